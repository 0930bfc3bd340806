"""Install a build of PyTorch that suits this machine into the Python that runs this file.

With an NVIDIA GPU (or off Linux) that is the ordinary package. Without one it is a CPU build, so that no gigabytes of
CUDA packages are downloaded: from PyTorch's own CPU index, or, where that can't be reached, from wherever pip is set up
to look (a wheel folder named by PIP_FIND_LINKS, say), and only if that build brings no CUDA package along.
"""

import importlib.util
import json
import platform
import shutil
import subprocess
import sys

TORCH = "torch==2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def has_nvidia_gpu() -> bool:
    return bool(shutil.which("nvidia-smi")) and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0


def pip(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*PIP, *arguments], capture_output=True, text=True)


def cuda_packages_of(*arguments: str) -> list[str] | None:
    """The CUDA packages that `pip install *arguments` would bring; None where it finds nothing to install."""
    plan = pip("install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *arguments)
    if plan.returncode != 0:
        return None
    names = [item["metadata"]["name"].lower() for item in json.loads(plan.stdout)["install"]]
    return [name for name in names if name.startswith(("nvidia-", "cuda-"))]


def install_cpu_build() -> bool:
    # --no-deps: the index may be out of reach while a wheel lies at hand; the toolkit's own install brings the rest.
    quick = ("--no-deps", "--retries", "0", "--timeout", "20", "--index-url", CPU_INDEX, TORCH)
    if pip("install", *quick).returncode == 0:
        return True
    print("PyTorch's CPU index can't be reached: looking where pip is set up to look", flush=True)
    cuda = cuda_packages_of(TORCH)
    return cuda == [] and pip("install", "--no-deps", TORCH).returncode == 0


def main() -> int:
    if importlib.util.find_spec("torch"):
        return 0
    if platform.system() != "Linux" or has_nvidia_gpu():
        print("installing PyTorch", flush=True)
        return subprocess.run([*PIP, "install", "--quiet", "torch>=2.11"]).returncode
    print("no NVIDIA GPU: installing a CPU build of PyTorch", flush=True)
    if install_cpu_build():
        return 0
    print(
        f"asked for a CPU build of {TORCH}: {CPU_INDEX} can't be reached, and what pip finds elsewhere needs CUDA packages.\n"
        f"Download a CPU wheel from that index, then: PIP_FIND_LINKS=/folder/with/the/wheel make demo",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
