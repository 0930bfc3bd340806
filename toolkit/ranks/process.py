"""`python -m toolkit.ranks.process engine|controller PID ...`: a process of ipyparallel that ends when the process PID does.

ipyparallel's own processes outlive a client that was killed. PID is the process that starts this one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

POLL_S = 0.5


def _end_with(parent: int) -> None:
    """End this process and those that it has started once `parent` is no longer its parent."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    kill_all(os.getpid())


def kill_all(leader: int) -> None:
    """Kill a process that leads a process group, the group, and what it has started in other groups.

    ipyparallel starts a process there that watches an engine, which would end seconds later.
    """
    import psutil

    with suppress(psutil.Error):
        for each in psutil.Process(leader).children(recursive=True):
            with suppress(psutil.Error):
                each.kill()
    with suppress(OSError):  # it has ended
        os.killpg(leader, signal.SIGKILL)


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
