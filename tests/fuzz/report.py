"""`python -m tests.fuzz.report [KIND...]` prints what became of every kind of mutants, and each that went wrong."""

from __future__ import annotations

import sys
import time

from tests.fuzz.bases import KINDS
from tests.fuzz.boxed import run


def main(wanted: list[str]) -> int:
    print(
        f"{'kind':24}{'mutants':>9}{'refused':>9}{'loaded':>9}{'of them changed':>17}{'worst s':>9}{'peak MB':>9}{'faults':>8}"
    )
    began, total, faults = time.perf_counter(), 0, 0
    for kind in KINDS:
        if wanted and not any(word in kind.name for word in wanted):
            continue
        tally = run(kind)
        total, faults = total + tally.mutants, faults + len(tally.faults)
        print(
            f"{kind.name:24}{tally.mutants:9,}{tally.refused:9,}{tally.loaded:9,}{tally.changed:17,}"
            f"{tally.worst_seconds:9.2f}{tally.peak_mb:9.0f}{len(tally.faults):8}",
            flush=True,
        )
        for says, wrong in tally.faults:
            print(f"    {says}: {wrong}")
    print(f"{total:,} mutants in {time.perf_counter() - began:.0f} s, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
