"""A worker process that answers each job with itself: see `kills`."""

from __future__ import annotations

from toolkit.core.workers import listen


def main() -> None:
    _, jobs, answer = listen()
    for job in jobs:
        answer(job)


if __name__ == "__main__":
    main()
