"""Counters of the virtual GPU's allocator: the figures of torch.cuda.memory_stats, at the cost of a few additions.

Each size class accumulates what is allocated and what is freed; the current figures are differences of the two. A peak can
only occur right before the first free after an allocation, so peaks are updated there, and not at every allocation.
"""

from __future__ import annotations

from collections.abc import Iterator

_Figures = tuple[int, int, int, int]  # in the order of _KINDS
_KINDS = ("current", "peak", "allocated", "freed")
_STATS = {  # attributes of a pool: increases, decreases, peak. "active" equals "allocated": no block waits for another stream
    "allocation": ("taken", "given", "peak"), "active": ("taken", "given", "peak"),
    "allocated_bytes": ("taken_bytes", "given_bytes", "peak_bytes"),
    "active_bytes": ("taken_bytes", "given_bytes", "peak_bytes"),
    "requested_bytes": ("taken_requested", "given_requested", "peak_requested"),
    "inactive_split": ("inactive", "reactivated", "peak_inactive"),
    "inactive_split_bytes": ("inactive_bytes", "reactivated_bytes", "peak_inactive_bytes"),
}  # fmt: skip
_ONCE = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


class Stat:
    """A counter that changes rarely, and therefore updates its peak at every change."""

    __slots__ = ("freed", "now", "peak", "taken")

    def __init__(self) -> None:
        self.now = self.peak = self.taken = self.freed = 0

    def rise(self, n: int) -> None:
        self.now += n
        self.taken += n
        if self.now > self.peak:
            self.peak = self.now

    def fall(self, n: int) -> None:
        self.now -= n
        self.freed += n

    @property
    def figures(self) -> _Figures:
        return self.now, self.peak, self.taken, self.freed


class Pool:
    """The counters of one size class: blocks, their bytes, requested bytes, and inactive splits.

    An inactive split is a free block of a segment that has other blocks. `inactive` counts blocks that became
    inactive splits, and `reactivated` blocks that ceased to be inactive splits.
    """

    __slots__ = (
        "given", "given_bytes", "given_requested", "inactive", "inactive_bytes", "peak", "peak_bytes", "peak_inactive",
        "peak_inactive_bytes", "peak_requested", "reactivated", "reactivated_bytes", "requests", "reserved", "segments",
        "small", "taken", "taken_bytes", "taken_requested",
    )  # fmt: skip

    def __init__(self, small: bool) -> None:
        self.small = small
        self.requests = 0  # allocations requested, also those that failed
        self.taken = self.taken_bytes = self.taken_requested = self.given = self.given_bytes = self.given_requested = 0
        self.peak = self.peak_bytes = self.peak_requested = 0
        self.inactive = self.inactive_bytes = self.reactivated = self.reactivated_bytes = 0
        self.peak_inactive = self.peak_inactive_bytes = 0
        self.segments, self.reserved = Stat(), Stat()

    def cut(self, was_whole: bool, size: int, left: int) -> None:
        """Count a block of `size` that was cut from a free one (`was_whole`: a whole segment), of which `left` remains."""
        if was_whole:
            self.inactive += 1
            self.inactive_bytes += left
        else:
            self.reactivated_bytes += size

    def fill(self, size: int) -> None:
        """Count an inactive split that was allocated without cutting it."""
        self.reactivated += 1
        self.reactivated_bytes += size

    def give(self, joined: int, size: int, joined_size: int, whole: bool) -> None:
        """Count a freed block of `size` that was `joined` with so many neighbors to one of `joined_size`."""
        change, n_bytes = -joined, size - joined_size
        if not whole:
            change, n_bytes = change + 1, size
        if change > 0:
            self.inactive += change
        else:
            self.reactivated -= change
        if n_bytes > 0:
            self.inactive_bytes += n_bytes
        else:
            self.reactivated_bytes -= n_bytes


class Counters:
    """The counters of an allocator, by size class and in total."""

    def __init__(self) -> None:
        self.small, self.large = Pool(True), Pool(False)
        self.allocated_peak_due = self.inactive_peak_due = False  # whether there may be a new peak
        self.peak = self.peak_bytes = self.peak_requested = self.peak_inactive = self.peak_inactive_bytes = 0
        self.segments, self.reserved = Stat(), Stat()
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.retries = self.ooms = self.syncs = self.device_allocs = self.device_frees = 0
        self._since: dict[str, int] = {}  # the accumulated figures when they were last reset

    @property
    def blocks(self) -> int:
        return self.small.taken - self.small.given + self.large.taken - self.large.given

    @property
    def bytes(self) -> int:
        small, large = self.small, self.large
        return small.taken_bytes - small.given_bytes + large.taken_bytes - large.given_bytes

    @property
    def requested(self) -> int:
        small, large = self.small, self.large
        return small.taken_requested - small.given_requested + large.taken_requested - large.given_requested

    def update_allocated_peaks(self) -> None:
        """Update the peaks of allocated blocks and bytes. Must be called before a block is freed."""
        self.allocated_peak_due = False
        blocks = n_bytes = requested = 0
        for pool in (self.small, self.large):
            held = pool.taken - pool.given
            blocks += held
            if held > pool.peak:
                pool.peak = held
            held = pool.taken_bytes - pool.given_bytes
            n_bytes += held
            if held > pool.peak_bytes:
                pool.peak_bytes = held
            held = pool.taken_requested - pool.given_requested
            requested += held
            if held > pool.peak_requested:
                pool.peak_requested = held
        if blocks > self.peak:
            self.peak = blocks
        if n_bytes > self.peak_bytes:
            self.peak_bytes = n_bytes
        if requested > self.peak_requested:
            self.peak_requested = requested

    def update_inactive_peaks(self) -> None:
        """Update the peaks of inactive splits. Must be called before there are fewer of them."""
        self.inactive_peak_due = False
        blocks = n_bytes = 0
        for pool in (self.small, self.large):
            held = pool.inactive - pool.reactivated
            blocks += held
            if held > pool.peak_inactive:
                pool.peak_inactive = held
            held = pool.inactive_bytes - pool.reactivated_bytes
            n_bytes += held
            if held > pool.peak_inactive_bytes:
                pool.peak_inactive_bytes = held
        if blocks > self.peak_inactive:
            self.peak_inactive = blocks
        if n_bytes > self.peak_inactive_bytes:
            self.peak_inactive_bytes = n_bytes

    def reset_peaks(self) -> None:
        """Reset all peaks to the current figures."""
        self.peak = self.peak_bytes = self.peak_requested = self.peak_inactive = self.peak_inactive_bytes = 0
        for pool in (self.small, self.large):
            pool.peak = pool.peak_bytes = pool.peak_requested = pool.peak_inactive = pool.peak_inactive_bytes = 0
        self.update_allocated_peaks()
        self.update_inactive_peaks()
        pools = (self.small, self.large)
        stats = [s for x in (*pools, self) for s in (x.segments, x.reserved)]
        for stat in (*stats, self.oversize_allocations, self.oversize_segments):
            stat.peak = stat.now

    def reset_accumulated(self) -> None:
        """Reset the accumulated figures ("allocated", "freed", and the numbers of events) to 0."""
        self._since = {}
        figures = self.figures()
        self._since = {key: n for key, n in figures.items() if key.endswith((".allocated", ".freed")) or key in _ONCE}

    def figures(self) -> dict[str, int]:
        """Return all counters by their names in torch.cuda.memory_stats, sorted by name."""
        self.update_allocated_peaks()
        self.update_inactive_peaks()
        found = {f"{name}.{kind}": n for name, figures in self._each() for kind, n in zip(_KINDS, figures, strict=True)}
        once = (self.retries, self.ooms, self.syncs, self.device_allocs, self.device_frees)
        found |= dict(zip(_ONCE, once, strict=True))
        return {key: found[key] - self._since.get(key, 0) for key in sorted(found)}

    def _each(self) -> Iterator[tuple[str, _Figures]]:
        """Yield each counter with its name."""
        scopes = (("small_pool", self.small), ("large_pool", self.large), ("all", self))
        for name, (rises, falls, peak) in _STATS.items():
            rose, fell = ([getattr(pool, x) for pool in (self.small, self.large)] for x in (rises, falls))
            totals = zip((*rose, sum(rose)), (*fell, sum(fell)), strict=True)
            for (scope, owner), (up, down) in zip(scopes, totals, strict=True):
                yield f"{name}.{scope}", (up - down, getattr(owner, peak), up, down)
        for scope, owner in scopes:
            yield f"segment.{scope}", owner.segments.figures
            yield f"reserved_bytes.{scope}", owner.reserved.figures
        yield "oversize_allocations", self.oversize_allocations.figures
        yield "oversize_segments", self.oversize_segments.figures
