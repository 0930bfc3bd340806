"""How a model is divided among ranks (tensor parallel): the part of each dimension of a weight that a rank holds.

Layers that follow each other are cut along the dimension between them: the first one's outputs, the second one's inputs. Each
rank then computes a share of the sum that is the second layer's result. Query heads stay with the key and value heads that
they read. With a single rank, every cut is whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from toolkit.core.distributed import WHOLE, Shard
from toolkit.core.errors import ModelError
from toolkit.core.units import plural


@dataclass(frozen=True)
class Cut:
    """The part of a dimension of `size` indices that `shard` holds: `ranges` (start, stop), in order."""

    size: int
    ranges: tuple[tuple[int, int], ...]
    shard: Shard = WHOLE

    @property
    def held(self) -> int:
        """The number of indices that the rank holds."""
        return sum(stop - start for start, stop in self.ranges)

    @property
    def is_equal(self) -> bool:
        """Whether all ranks hold equally many indices. It is the same on all of them."""
        return self.held * self.shard.ranks == self.size

    def times(self, width: int) -> Cut:
        """Return the cut of a dimension in which each index stands for `width` neighbors, such as those of a head."""
        return Cut(self.size * width, tuple((start * width, stop * width) for start, stop in self.ranges), self.shard)


Size = int | Cut  # of one dimension of a weight; an int stands for a dimension that all ranks hold


def as_cut(size: Size) -> Cut:
    """Return `size` as a cut. That of an int is whole."""
    return size if isinstance(size, Cut) else Cut(size, ((0, size),))


def end_to_end(*cuts: Cut) -> Cut:
    """Return the cut of a dimension that consists of those of `cuts`, one after the other."""
    ranges: list[tuple[int, int]] = []
    offset = 0
    for cut in cuts:
        ranges += [(offset + start, offset + stop) for start, stop in cut.ranges]
        offset += cut.size
    return Cut(offset, tuple(ranges), cuts[0].shard)


def evenly(size: int, shard: Shard, what: str) -> Cut:
    """Return an equal part of `size` for each rank. Raises ModelError, which names `what`, if there is none.

    Where equal parts would separate the weights of a block, parts are whole blocks, and differ by at most one.
    """
    if shard.block > 1 and size % shard.block == 0 and size // shard.block >= shard.ranks:
        return spread(size // shard.block, shard).times(shard.block)
    if size % shard.ranks:
        fitting = [ranks for ranks in range(shard.ranks - 1, 0, -1) if size % ranks == 0]
        raise ModelError(
            f"a model over {shard.ranks} ranks", f"they don't divide its {what}, {size:,}", f"Use {plural(fitting[0], 'rank')}"
        )
    return spread(size, shard)


def spread(size: int, shard: Shard) -> Cut:
    """Return a part of `size` for each rank; parts differ by at most one. Raises ModelError if `size` is below the ranks."""
    if size < shard.ranks:
        asked = f"a table of {plural(size, 'row')} over {shard.ranks} ranks"
        raise ModelError(asked, "a rank would hold none", f"Use at most {plural(size, 'rank')}")
    first, last = (size * rank // shard.ranks for rank in (shard.rank, shard.rank + 1))
    return Cut(size, ((first, last),), shard)


def parts_of(size: int, ranks: int) -> list[int]:
    """Return how many of `size` indices each rank holds, as divided by `spread`."""
    return [spread(size, Shard(rank, ranks)).held for rank in range(ranks)]


def split_heads(heads: int, shared: int, shard: Shard, names: tuple[str, str], tiled: bool = False) -> tuple[Cut, Cut]:
    """Divide `heads` heads, of which equally many read each of `shared` others, and return the cuts of both.

    If there are more ranks than shared heads, several ranks hold the same shared head and divide its readers. With `tiled`,
    head j reads shared head j modulo `shared`; without it, neighbors read the same one. `names` are those of the two numbers in
    the config. Raises ModelError, which states the numbers, if the ranks can't be divided among the heads.
    """
    ranks, each = shard.ranks, heads // shared
    copies = max(1, ranks // shared)  # ranks that hold the same shared head
    if shared * copies % ranks or each % copies:
        fitting = [
            n for n in range(ranks - 1, 0, -1) if (shared % n == 0 or n % shared == 0) and each % max(1, n // shared) == 0
        ]
        found = f"they can't divide {heads} {names[0]} that share {shared} {names[1]}"
        raise ModelError(f"a model over {ranks} ranks", found, f"Use {plural(fitting[0], 'rank')}", heads=heads, shared=shared)
    few = shared * copies // ranks  # shared heads per rank
    first, some = shard.rank // copies * few, each // copies
    start = shard.rank % copies * some  # of the readers of each shared head
    if tiled:
        mine = [(reader * shared + first, reader * shared + first + few) for reader in range(start, start + some)]
    else:
        mine = [(head * each + start, head * each + start + some) for head in range(first, first + few)]
    return Cut(heads, tuple(_merged(mine)), shard), Cut(shared, ((first, first + few),), shard)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges that follow each other."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found
