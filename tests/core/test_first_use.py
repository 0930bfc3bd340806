"""An interrupt during the first use of a name of the toolkit, which imports PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

INTERRUPTED = """
import signal
import sys

import toolkit as tk

assert "torch" not in sys.modules
signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == "torch._C":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)


sys.meta_path.insert(0, Interrupts())
try:
    {use}
except KeyboardInterrupt:
    print("interrupted", hasattr(sys.modules.get("torch"), "zeros"))
{use}
print("used")
"""


@pytest.mark.parametrize("use", ["tk.cluster", "tk.load_ipython_extension(IPython.core.interactiveshell.InteractiveShell())"])
def test_an_interrupt_waits_for_the_import_of_pytorch(use: str) -> None:
    """PyTorch can't be imported again after an interrupted import: it raises a SystemError, or the process crashes."""
    program = ("import IPython\n" if "IPython" in use else "") + INTERRUPTED.format(use=use)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (found.stdout.split("\n"), found.returncode) == (["interrupted True", "used", ""], 0), found.stderr
