"""`python -m toolkit.ranks.process engine|controller PID ...`: a process of ipyparallel that ends when the process PID does.

ipyparallel's own processes outlive a client that was killed. PID is the process that starts this one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

POLL_S = 0.5


def _end_with(parent: int) -> None:
    """End this process and those in its process group once `parent` is no longer its parent."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run what the command line asks for. The process must lead a process group, as those of ipyparallel's launchers do."""
    kind, parent = sys.argv[1], int(sys.argv[2])
    del sys.argv[1:3]
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if kind == "controller":
        from ipyparallel.controller.app import main as run
    else:
        from ipyparallel.engine.app import main as run
    run()


if __name__ == "__main__":
    main()
