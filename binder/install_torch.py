"""Install PyTorch into the Python environment that runs this file, unless it is installed already.

On Linux without an NVIDIA GPU this installs a CPU build, so that no CUDA packages (several gigabytes) are downloaded. It comes
from PyTorch's CPU index or, if that can't be reached, from wherever pip is configured to look (for example a wheel folder named
by PIP_FIND_LINKS), provided that the build found there depends on no CUDA packages. Everywhere else this installs the default
build.
"""

import importlib.util
import json
import platform
import shutil
import subprocess
import sys

CPU_BUILD = "torch==2.13.0"
TESTED = "torch>=2.11,<2.16"  # exports for GPUs refuse other versions: VERSIONS in toolkit/exporting/inductor.py
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def has_nvidia_gpu() -> bool:
    return bool(shutil.which("nvidia-smi")) and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0


def pip(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*PIP, *arguments], capture_output=True, text=True)


def cuda_packages_of(*arguments: str) -> list[str] | None:
    """Return the CUDA packages that `pip install *arguments` would install, or None if pip finds nothing to install."""
    plan = pip("install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *arguments)
    if plan.returncode != 0:
        return None
    names = [item["metadata"]["name"].lower() for item in json.loads(plan.stdout)["install"]]
    return [name for name in names if name.startswith(("nvidia-", "cuda-"))]


def install_cpu_build() -> bool:
    # --no-deps: dependencies come with the toolkit's own installation, also when PyTorch's index can't be reached
    quick = ("--no-deps", "--retries", "0", "--timeout", "20", "--index-url", CPU_INDEX, CPU_BUILD)
    if pip("install", *quick).returncode == 0:
        return True
    print("PyTorch's CPU index can't be reached: looking where pip is configured to look", flush=True)
    cuda = cuda_packages_of(CPU_BUILD)
    return cuda == [] and pip("install", "--no-deps", CPU_BUILD).returncode == 0


def check_gpu() -> None:
    """Warn if the PyTorch that was just installed can't use the GPU, for example because the driver is too old for it."""
    code = "import torch; torch.zeros(1, device='cuda'); print(torch.__version__, 'uses', torch.cuda.get_device_name())"
    tried = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    if tried.returncode == 0:
        print(tried.stdout.strip(), flush=True)
        return
    said = (tried.stderr.strip().splitlines() or ["no message"])[-1]
    print(
        f"Warning: PyTorch was installed, and can't use this machine's NVIDIA GPU: {said}\n"
        "Update the GPU's driver, or install a PyTorch built for the CUDA version that `nvidia-smi` shows, in a version that\n"
        f"satisfies '{TESTED}': see pytorch.org/get-started",
        file=sys.stderr,
    )


def main() -> int:
    if importlib.util.find_spec("torch"):
        return 0
    if platform.system() != "Linux" or has_nvidia_gpu():
        print("Installing PyTorch", flush=True)
        status = subprocess.run([*PIP, "install", "--quiet", TESTED]).returncode
        if status == 0 and has_nvidia_gpu():
            check_gpu()
        return status
    print("No NVIDIA GPU found: installing a CPU build of PyTorch", flush=True)
    if install_cpu_build():
        return 0
    print(
        f"Can't install a CPU build ({CPU_BUILD}): {CPU_INDEX} can't be reached, and the build that pip finds elsewhere\n"
        "depends on CUDA packages. Download a CPU wheel from that index, then run:\n"
        "  PIP_FIND_LINKS=/folder/with/the/wheel make demo",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
