"""What the virtual GPU's allocator counts: the figures of torch.cuda.memory_stats, kept at the cost of a few additions.

What is taken and given is added up for each size class; how much is held, and what is held in all, are differences. A
peak can only lie where taking turns into giving, so it is looked for there and not at every allocation. Sizes only.
"""

from __future__ import annotations

from collections.abc import Iterator

_Figures = tuple[int, int, int, int]  # held now, most held, taken in all, given in all
_KINDS = ("current", "peak", "allocated", "freed")
_ONCE = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


class Stat:
    """A figure that changes rarely."""

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
    """The blocks of one size class: how many and how large, what was asked for, and what lies free beside held ones."""

    __slots__ = (
        "given", "given_bytes", "given_requested", "loose", "loose_bytes", "peak", "peak_bytes", "peak_loose",
        "peak_loose_bytes", "peak_requested", "requests", "reserved", "segments", "small", "taken", "taken_bytes",
        "taken_requested", "tight", "tight_bytes",
    )  # fmt: skip

    def __init__(self, small: bool) -> None:
        self.small = small
        self.requests = 0  # how often a block was looked for
        self.taken = self.taken_bytes = self.taken_requested = self.given = self.given_bytes = self.given_requested = 0
        self.peak = self.peak_bytes = self.peak_requested = 0
        # free parts of segments that are partly held: became so, and ceased to be so
        self.loose = self.loose_bytes = self.tight = self.tight_bytes = 0
        self.peak_loose = self.peak_loose_bytes = 0
        self.segments, self.reserved = Stat(), Stat()

    def cut(self, was_whole: bool, size: int, left: int) -> None:
        """A block of `size` was taken off a free one, of which `left` stays."""
        if was_whole:
            self.loose += 1
            self.loose_bytes += left
        else:
            self.tight_bytes += size

    def fill(self, size: int) -> None:
        """The free part of a segment was taken whole."""
        self.tight += 1
        self.tight_bytes += size

    def loosen(self, joined: int, size: int, joined_size: int, whole: bool) -> None:
        """A block of `size` was given back, and joined so many free ones to make one of `joined_size`."""
        change, n_bytes = -joined, size - joined_size
        if not whole:
            change, n_bytes = change + 1, size
        if change > 0:
            self.loose += change
        else:
            self.tight -= change
        if n_bytes > 0:
            self.loose_bytes += n_bytes
        else:
            self.tight_bytes -= n_bytes


class Counters:
    """The counters of an allocator: by size class, and of all."""

    def __init__(self) -> None:
        self.small, self.large = Pool(True), Pool(False)
        self.grown = self.loosened = False  # since the peaks were looked at
        self.peak = self.peak_bytes = self.peak_requested = self.peak_loose = self.peak_loose_bytes = 0
        self.segments, self.reserved = Stat(), Stat()
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        self.retries = self.ooms = self.syncs = self.device_allocs = self.device_frees = 0
        self._since: dict[str, int] = {}  # the accumulated figures when they were last set to nothing

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

    def note_grown(self) -> None:
        """Look whether what is held is the most yet. To be called before anything is given back."""
        self.grown = False
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

    def note_loose(self) -> None:
        """The same for what lies free beside held blocks. To be called before there is less of it."""
        self.loosened = False
        blocks = n_bytes = 0
        for pool in (self.small, self.large):
            held = pool.loose - pool.tight
            blocks += held
            if held > pool.peak_loose:
                pool.peak_loose = held
            held = pool.loose_bytes - pool.tight_bytes
            n_bytes += held
            if held > pool.peak_loose_bytes:
                pool.peak_loose_bytes = held
        if blocks > self.peak_loose:
            self.peak_loose = blocks
        if n_bytes > self.peak_loose_bytes:
            self.peak_loose_bytes = n_bytes

    def reset_peaks(self) -> None:
        """Let the peaks start again from what is held now."""
        self.peak = self.peak_bytes = self.peak_requested = self.peak_loose = self.peak_loose_bytes = 0
        for pool in (self.small, self.large):
            pool.peak = pool.peak_bytes = pool.peak_requested = pool.peak_loose = pool.peak_loose_bytes = 0
        self.note_grown()
        self.note_loose()
        pools = (self.small, self.large)
        stats = [s for x in (*pools, self) for s in (x.segments, x.reserved)]
        for stat in (*stats, self.oversize_allocations, self.oversize_segments):
            stat.peak = stat.now

    def reset_accumulated(self) -> None:
        """Let what was taken and given in all start again from nothing."""
        self._since = {}
        figures = self.figures()
        self._since = {key: n for key, n in figures.items() if key.endswith((".allocated", ".freed")) or key in _ONCE}

    def figures(self) -> dict[str, int]:
        """All counters, under the names that torch.cuda.memory_stats gives them, in the order of their names."""
        self.note_grown()
        self.note_loose()
        found = {f"{name}.{kind}": n for name, figures in self._each() for kind, n in zip(_KINDS, figures, strict=True)}
        once = (self.retries, self.ooms, self.syncs, self.device_allocs, self.device_frees)
        found |= dict(zip(_ONCE, once, strict=True))
        return {key: found[key] - self._since.get(key, 0) for key in sorted(found)}

    def _each(self) -> Iterator[tuple[str, _Figures]]:
        """Each counter by name and class; what is active is what is allocated, as nothing waits for another stream."""
        small, large = self.small, self.large
        for name, held in (("allocation", _blocks), ("active", _blocks), ("allocated_bytes", _bytes), ("active_bytes", _bytes),
                           ("requested_bytes", _requested), ("inactive_split", _loose),
                           ("inactive_split_bytes", _loose_bytes)):  # fmt: skip
            (now, peak, taken, given), (now_2, peak_2, taken_2, given_2) = held(small), held(large)
            yield f"{name}.small_pool", (now, peak, taken, given)
            yield f"{name}.large_pool", (now_2, peak_2, taken_2, given_2)
            yield f"{name}.all", (now + now_2, self._peak(name), taken + taken_2, given + given_2)
        for name in ("segments", "reserved"):
            key = {"segments": "segment", "reserved": "reserved_bytes"}[name]
            for scope, owner in (("small_pool", small), ("large_pool", large), ("all", self)):
                yield f"{key}.{scope}", getattr(owner, name).figures
        yield "oversize_allocations", self.oversize_allocations.figures
        yield "oversize_segments", self.oversize_segments.figures

    def _peak(self, name: str) -> int:
        return {
            "allocation": self.peak, "active": self.peak, "allocated_bytes": self.peak_bytes, "active_bytes": self.peak_bytes,
            "requested_bytes": self.peak_requested, "inactive_split": self.peak_loose,
            "inactive_split_bytes": self.peak_loose_bytes,
        }[name]  # fmt: skip


def _blocks(pool: Pool) -> _Figures:
    return pool.taken - pool.given, pool.peak, pool.taken, pool.given


def _bytes(pool: Pool) -> _Figures:
    return pool.taken_bytes - pool.given_bytes, pool.peak_bytes, pool.taken_bytes, pool.given_bytes


def _requested(pool: Pool) -> _Figures:
    return pool.taken_requested - pool.given_requested, pool.peak_requested, pool.taken_requested, pool.given_requested


def _loose(pool: Pool) -> _Figures:
    return pool.loose - pool.tight, pool.peak_loose, pool.loose, pool.tight


def _loose_bytes(pool: Pool) -> _Figures:
    return pool.loose_bytes - pool.tight_bytes, pool.peak_loose_bytes, pool.loose_bytes, pool.tight_bytes
