"""Building blocks that the architectures share: linear layers (plain, packed, joined), norms, MLPs, experts, residuals.

The layers use plain PyTorch and `toolkit.ops` and are written so that a decode step launches few kernels and copies nothing:
they neither index with host data nor wait for the device. Sizes that are cuts divide a model among ranks (see `cuts`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from toolkit import ops
from toolkit.models.cuts import Size, as_cut, end_to_end, parts_of
from toolkit.ops import Operand, Projected
from toolkit.weights.packed import PackedMatrix, experts_matmul

DENSE_VALUES = 1 << 24  # outputs computed at a time when every expert processes every token: bounds the intermediate memory
TRACED_TOKENS = 512  # number of tokens that is assumed when a graph for any number of tokens is traced


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32. The weight is fp32, too, in every model.

    Some checkpoints store the weight minus one; their `Source` adds the one while loading.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps).plain

    def operand(self, x: Tensor, weight: nn.Parameter | PackedMatrix) -> Operand:
        """Return the norm as the input of the product with `weight`."""
        return ops.rms_norm(x, self.weight, self.eps, ops.takes_quantized(weight))


@dataclass(frozen=True)
class Residual:
    """The residual stream of a decoder: `x` [B, T, hidden], and the output of a block that is still to be added.

    The output may also be a share of a sum over all ranks that is still to be computed.

    The addition is deferred so that the norm after a block, the sum, and the norm before the next block are one operation. The
    norm `post` is applied to `added` before the addition, and the sum is multiplied by `scalar` [1], if they are given.
    """

    x: Tensor
    added: Tensor | ops.Partial | None = None
    post: RMSNorm | None = None
    scalar: Tensor | None = None

    def add(self, made: Tensor | ops.Partial, post: RMSNorm | None = None, scalar: Tensor | None = None) -> Residual:
        """Return the residual with a block's output `made` still to be added; it must have no other pending output."""
        assert self.added is None
        return Residual(self.x, made, post, scalar)

    def normed(self, norm: RMSNorm, matrices: Joined | None = None) -> tuple[Operand, Residual]:
        """Add the pending output. Return the input of the next block, norm(sum), and the residual after the addition.

        The block multiplies the input with `matrices`, if they are given. If one of them takes it quantized, it is quantized.
        """
        decoded = matrices if ops.few_rows(self.x) else None  # of many tokens, nothing is quantized or read ahead
        quantize = decoded is not None and decoded.takes_quantized
        if self.added is None:
            return ops.rms_norm(self.x, norm.weight, norm.eps, quantize), self
        post = None if self.post is None else self.post.weight
        ahead = None if decoded is None else decoded.read_first
        out, x = ops.add_norm(self.x, self.added, norm.weight, norm.eps, post, self.scalar, quantize, ahead)
        return out, Residual(x)

    def sum(self) -> Tensor:
        """Return the residual after the addition: [B, T, hidden]."""
        if self.added is None:
            return self.x
        if self.post is None:
            return self.x + ops.whole(self.added)
        return ops.norm_add(self.x, self.added, self.post.weight, self.post.eps, self.scalar)


class Linear(nn.Module):
    """x @ weight.T (+ bias). The weight is a Parameter, or a PackedMatrix once a scheme is set.

    With `experts`, the weight is a stack of matrices [experts, out, in], selected by number: `linear(x, chosen)`. The bias is
    added by a separate kernel, because `addmm` with one row copies the bias first on CUDA.

    A `Cut` as a size is the part that the rank holds. If outputs are cut, the result holds the rank's outputs. If inputs are
    cut, the result is the sum over all ranks; with `partial`, and with `experts`, it is only the rank's share of that sum.
    """

    ranks = 1  # over which the result is summed

    def __init__(
        self, size_in: Size, size_out: Size, bias: bool = False, experts: int | None = None, partial: bool = False
    ) -> None:
        super().__init__()
        rows, columns = as_cut(size_out), as_cut(size_in)
        matrix = (rows.held, columns.held)
        self.weight: nn.Parameter | PackedMatrix = nn.Parameter(torch.empty(matrix if experts is None else (experts, *matrix)))
        self.bias = nn.Parameter(torch.empty(rows.held)) if bias else None
        self.cuts = {"weight": (rows, columns), "bias": (rows,)}
        if not partial and experts is None:
            self.ranks = columns.shard.ranks

    def forward(self, x: Tensor | Operand, chosen: Tensor | slice | None = None) -> Tensor:
        """x [..., in] -> [..., out]; with `chosen` (n experts), a plain x [n, T, in] -> [n, T, out]."""
        if chosen is None:
            return ops.whole(self.unsummed(x))
        assert isinstance(x, Tensor)
        out = experts_matmul(x, self.weight, chosen)
        return out if self.bias is None else out + self.bias

    def unsummed(self, x: Tensor | Operand) -> Tensor | ops.Partial:
        """Return the result for x [..., in], still to be summed if it is a sum over several ranks."""
        out = ops.matmul_partial(x, self.weight, self.ranks)
        return out if self.bias is None else ops.whole(out) + self.bias


class Joined(nn.Module):
    """Matrices with the same input, such as q, k and v. `join` merges neighbors with the same dtype or scheme into one matrix.

    Calling the module returns the outputs in order, merged or not. `sizes` are those of the whole outputs or the rank's cuts of
    them; the attribute `sizes` has those that the rank holds.
    """

    def __init__(self, size_in: int, sizes: Mapping[str, Size], bias: bool = False, experts: int | None = None) -> None:
        super().__init__()
        self.cuts = {name: {"weight": (as_cut(size), as_cut(size_in)), "bias": (as_cut(size),)} for name, size in sizes.items()}
        self.sizes = {name: as_cut(size).held for name, size in sizes.items()}
        self.groups: tuple[tuple[str, ...], ...] = tuple((name,) for name in sizes)
        for name, size in sizes.items():
            self.add_module(name, Linear(size_in, size, bias, experts))

    @property
    def takes_quantized(self) -> bool:
        """Whether one of the matrices does (see `ops.takes_quantized`)."""
        return any(ops.takes_quantized(part.weight) for part in self._modules.values() if isinstance(part, Linear))

    @property
    def read_first(self) -> Tensor | None:
        """What a product with the first matrix reads (see `ops.read_first`)."""
        return ops.read_first(self._part(self.groups[0]).weight)

    def forward(self, x: Tensor | Operand, chosen: Tensor | slice | None = None) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for group in self.groups:
            out = self._part(group)(x, chosen)
            found.extend(out.split([self.sizes[name] for name in group], -1) if len(group) > 1 else [out])
        return tuple(found)

    def row(self, x: Tensor | Operand) -> Tensor:
        """Return all outputs in one row [..., sum of the sizes]."""
        parts = [self._part(group)(x) for group in self.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def projected(self, x: Tensor | Operand) -> Projected:
        """Return the outputs of q, k and v in one row. Those of v stay apart if only its matrix has another scheme."""
        parts = [self._part(group)(x) for group in self.groups]
        apart = self.groups[-1] == ("v",) and len(parts) == 2
        return Projected(*parts) if apart or len(parts) == 1 else Projected(torch.cat(parts, -1))

    def whole(self) -> nn.Parameter | PackedMatrix | None:
        """Return the merged weight; None if there are several matrices, or biases."""
        part = self._part(self.groups[0])
        return part.weight if len(self.groups) == 1 and part.bias is None else None

    def gated(self, x: Tensor | Operand, activation: str, chosen: Tensor | slice | None = None) -> Tensor:
        """Return activation(gate) * up for two matrices of one size, in one operation if they are merged."""
        whole = self.whole()
        if chosen is None and whole is not None:
            return ops.matmul(x, whole, activation)
        gate, up = self(x, chosen)
        return ops.ACTIVATIONS[activation](gate) * up

    def join(self) -> list[tuple[str, ...]]:
        """Merge each run of neighbors that have the same dtype or scheme, and return the runs of more than one matrix.

        Takes no memory on "meta". On a device, the merged matrix is allocated before the old ones are freed.
        """
        runs: list[list[tuple[str, ...]]] = []
        for group in self.groups:
            same = runs and _kind(self._part(runs[-1][0])) == _kind(self._part(group))
            runs[-1].append(group) if same else runs.append([group])
        for run in (run for run in runs if len(run) > 1):
            parts = [self._part(group) for group in run]
            for group in run:
                delattr(self, "_".join(group))
            self.add_module("_".join(name for group in run for name in group), _cat(parts))
        self.groups = tuple(tuple(name for group in run for name in group) for run in runs)
        return [group for group in self.groups if len(group) > 1]

    def split(self) -> None:
        """Undo `join`: each matrix becomes a view of the merged one's rows."""
        for group in [group for group in self.groups if len(group) > 1]:
            whole, start = self._part(group), 0
            delattr(self, "_".join(group))
            for name in group:
                rows = slice(start, start := start + self.sizes[name])
                self.add_module(name, part := _rows(whole, rows))
                part.cuts = self.cuts[name]
        self.groups = tuple((name,) for group in self.groups for name in group)

    def _part(self, group: tuple[str, ...]) -> Linear:
        part = self._modules["_".join(group)]
        assert isinstance(part, Linear)
        return part


def _kind(linear: Linear) -> object:
    """Return the property that two matrices must share to be merged."""
    weight = linear.weight
    return weight.scheme if isinstance(weight, PackedMatrix) else weight.dtype


def _cat(parts: Sequence[Linear]) -> Linear:
    """Return one Linear with the concatenated outputs of `parts`."""
    whole = Linear.__new__(Linear)
    nn.Module.__init__(whole)
    whole.weight = _cat_weights([part.weight for part in parts])
    biases = [part.bias.detach() for part in parts if part.bias is not None]
    whole.bias = nn.Parameter(_end_to_end(biases, 0)) if biases else None
    rows = end_to_end(*(part.cuts["bias"][0] for part in parts))
    whole.cuts = {"weight": (rows, parts[0].cuts["weight"][1]), "bias": (rows,)}
    if not any(p.requires_grad for part in parts for p in part.parameters()):
        whole.requires_grad_(False)
    return whole


def _rows(whole: Linear, rows: slice) -> Linear:
    """Return a Linear for some of the outputs of another, sharing its memory."""
    part = Linear.__new__(Linear)
    nn.Module.__init__(part)
    weight, grad = whole.weight, not isinstance(whole.weight, PackedMatrix) and whole.weight.requires_grad
    if isinstance(weight, PackedMatrix):
        part.weight = PackedMatrix(weight.scheme, (*weight.shape[:-2], rows.stop - rows.start, weight.shape[-1]))
        for name, held in weight.parts().items():
            setattr(part.weight, name, nn.Parameter(held[..., rows, :], requires_grad=False))
    else:
        part.weight = nn.Parameter(weight.detach()[..., rows, :], requires_grad=grad)
    part.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach()[rows], requires_grad=whole.bias.requires_grad)
    return part


def _cat_weights(weights: Sequence[nn.Parameter | PackedMatrix]) -> nn.Parameter | PackedMatrix:
    packed = [weight for weight in weights if isinstance(weight, PackedMatrix)]
    if not packed:
        return nn.Parameter(_end_to_end([weight.detach() for weight in weights if isinstance(weight, Tensor)], -2))
    first = packed[0]
    whole = PackedMatrix(first.scheme, (*first.shape[:-2], sum(w.shape[-2] for w in packed), first.shape[-1]))
    for name in first.parts():
        setattr(whole, name, nn.Parameter(_end_to_end([w.parts()[name] for w in packed], -2), requires_grad=False))
    return whole


def _end_to_end(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate `tensors` along `dim`. Avoids `cat` on "meta", which imports torch's compiler and takes seconds."""
    if not tensors[0].is_meta:
        return torch.cat(list(tensors), dim)
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return tensors[0].new_empty(shape)


class Embedding(nn.Module):
    """Rows of a table [vocab, size], plain or packed, times `scale`. Rows of a packed table are returned in `dtype`.

    If `vocab` is cut, each rank holds some of the rows, and the result is the sum over the ranks: a rank adds zeros for the ids
    whose rows it doesn't hold.
    """

    def __init__(self, vocab: Size, size: int, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        rows = as_cut(vocab)
        self.weight: nn.Parameter | PackedMatrix = nn.Parameter(torch.empty(rows.held, size))
        self.dtype, self.scale = dtype, scale
        self.cuts = {"weight": (rows, as_cut(size))}

    def forward(self, ids: Tensor) -> Tensor:
        """ids of any shape -> [*ids.shape, size]."""
        rows, _ = self.cuts["weight"]
        if rows.held == rows.size:
            return ops.embed(ids, self.weight, self.dtype, self.scale)
        first = rows.ranges[0][0]
        return ops.whole(ops.embed_partial(ids, self.weight, self.dtype, self.scale, first, rows.shard.ranks))

    def on_host(self) -> Embedding:
        """Return a copy of the table on the CPU, with the rows of all ranks."""
        whole: dict[int, nn.Parameter] = {}
        for table in _tables(self):
            rows, _ = table.cuts["weight"]
            sizes = parts_of(rows.size, rows.shard.ranks)
            for part in [table.weight] if isinstance(table.weight, Tensor) else table.weight.parameters():
                whole[id(part)] = nn.Parameter(ops.all_gather(part.detach().cpu(), sizes, 0), requires_grad=False)
        found = copy.deepcopy(self, whole)
        for table in _tables(found):
            rows, columns = table.cuts["weight"]
            table.cuts = {"weight": (as_cut(rows.size), columns)}
        return found


def _tables(embedding: Embedding) -> list[Embedding]:
    """Return the tables of an embedding: itself, and others inside."""
    return [module for module in embedding.modules() if isinstance(module, Embedding)]


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), to be summed over the ranks; `activation` is one of `ops.ACTIVATIONS`.

    For `partial`, see `Linear`.
    """

    def __init__(self, hidden: int, width: Size, activation: str = "silu", partial: bool = False) -> None:
        super().__init__()
        self.gate_up = Joined(hidden, {"gate": width, "up": width})
        self.down = Linear(width, hidden, partial=partial)
        self.activation = activation

    def forward(self, x: Tensor | Operand) -> Tensor | ops.Partial:
        return self.down.unsummed(self.gate_up.gated(x, self.activation))


def packed_pair(gate_up: Joined, down: Linear) -> tuple[PackedMatrix, PackedMatrix] | None:
    """Return the packed matrices of a gated MLP or of a stack of them (for `ops.experts`); None if one is plain."""
    up = gate_up.whole()
    both = isinstance(up, PackedMatrix) and isinstance(down.weight, PackedMatrix) and down.bias is None
    return (up, down.weight) if both else None  # type: ignore[return-value]


class Experts(nn.Module):
    """Gated MLPs of which each token uses a few; the result is the weighted sum of their outputs.

    A few tokens read only their chosen experts; many tokens run through all experts, in chunks. Nothing is copied to the host.
    If `width` is cut, each rank holds a part of every expert, so that all ranks have the same work for any choice of experts.
    The result is then the rank's share of the sum over `ranks`.
    """

    def __init__(self, experts: int, hidden: int, width: Size, activation: str = "silu") -> None:
        super().__init__()
        self.count, self.width, self.ranks = experts, as_cut(width).held, as_cut(width).shard.ranks
        self.gate_up = Joined(hidden, {"gate": width, "up": width}, experts=experts)
        self.down = Linear(width, hidden, experts=experts)
        self.activation = activation

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [N, hidden], expert numbers `chosen` [N, k], their weights `shares` [N, k] -> [N, hidden]."""
        n, k = chosen.shape
        traced = isinstance(n, torch.SymInt)  # a graph for any number of tokens can't branch on that number
        packed = packed_pair(self.gate_up, self.down)
        if packed is not None and ops.experts_fit(x, packed, self.activation, shares):
            return ops.experts(x, chosen, shares, packed, self.activation)
        if not traced and n * k <= self.count:
            rows = x[:, None].expand(n, k, -1).reshape(n * k, 1, -1)
            each = self._run(rows, chosen.reshape(-1)).view(n, k, -1)
            return (each * shares.to(x.dtype)[..., None]).sum(1)
        dense = torch.zeros(n, self.count, dtype=x.dtype, device=x.device).scatter_(1, chosen, shares.to(x.dtype))
        total = torch.zeros_like(x)
        step = max(1, DENSE_VALUES // ((TRACED_TOKENS if traced else n) * max(x.shape[-1], 2 * self.width)))
        for start in range(0, self.count, step):
            some = slice(start, min(start + step, self.count))
            each = self._run(x.expand(some.stop - start, -1, -1), some)  # [c, N, hidden]
            total = total + (each * dense[:, some].t()[..., None]).sum(0)
        return total

    def step(
        self, x: Residual, norm: RMSNorm, router: nn.Parameter | PackedMatrix | None, top_k: int, shared: GatedMLP | None = None
    ) -> Residual | None:  # fmt: skip
        """Add the pending output to the residual of one token, and run norm(sum) through its experts in one operation.

        The softmax of the `top_k` largest scores weights the experts. `router` [experts, hidden] gives the scores; with a
        `shared` expert, one more row gives its weight before the sigmoid. Returns None if `x` holds several tokens, or if the
        operation doesn't support these matrices. Otherwise the pending output is to be summed over all ranks.
        """
        if x.x.numel() != x.x.shape[-1]:
            return None
        packed = packed_pair(self.gate_up, self.down)
        own = None if shared is None else packed_pair(shared.gate_up, shared.down)
        if packed is None or (own is None and shared is not None) or not isinstance(router, Tensor):
            return None
        if x.added is None or x.post is not None or x.scalar is not None:
            return None
        if not ops.moe_fits(x.added, x.x, norm.weight, router, packed, self.activation, own):
            return None
        given = (norm.weight, norm.eps, router, top_k, packed, self.activation, own)
        # Ranks with unequal parts may differ in whether this operation fits, so it doesn't send its result to them.
        equal = all(each.down.cuts["weight"][1].is_equal for each in (self, shared) if each is not None)
        out, total = ops.moe(x.added, x.x, *given, ranks=self.ranks if equal else 1)
        return Residual(total, out if equal else ops.Partial(ops.whole(out), self.ranks))

    def _run(self, x: Tensor, experts: Tensor | slice) -> Tensor:
        out: Tensor = self.down(self.gate_up.gated(x, self.activation, experts), experts)
        return out
