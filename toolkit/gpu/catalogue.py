"""The GPU catalogue: hardware figures and modelled costs of each GPU, each with its source.

`CATALOGUE["h200"].bandwidth_bytes_per_s` is a plain number. `CATALOGUE["h200"].source("bandwidth_bytes_per_s")` says where it
comes from, and whether it is from a datasheet, measured, or estimated. The catalogue needs neither torch nor a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from html import escape
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from toolkit.core.errors import DeviceError, unknown_name
from toolkit.core.units import GiB, KiB, MiB, bytes_text

How = Literal["datasheet", "measured", "estimated", "chosen"]


class Source(NamedTuple):
    """The source of a figure: `how` it was obtained, and the document or file `where` to look it up."""

    how: How
    where: str


@dataclass(frozen=True)
class GpuSpec:
    """One GPU model. Sizes are in bytes, times in ns, rates per second; every figure has a `source`.

    `bandwidth_bytes_per_s` is the bandwidth in the datasheet, `reached_bandwidth_bytes_per_s` the bandwidth that a streaming
    kernel reaches. `*_flops` are rates of dense operations (without sparsity) with fp32 accumulation. `*_host_ns` are costs of
    a Python program in eager PyTorch: they depend more on the host's processor than on the GPU.
    """

    key: str
    name: str  # as CUDA reports it
    compute_capability: tuple[int, int]
    memory_bytes: int  # the total that CUDA reports, a little less than the nominal size
    bandwidth_bytes_per_s: float
    reached_bandwidth_bytes_per_s: float
    sms: int
    registers_per_sm: int
    threads_per_sm: int
    smem_per_block_bytes: int  # without opt-in (cudaFuncSetAttribute)
    smem_per_block_optin_bytes: int
    smem_per_sm_bytes: int
    l2_bytes: int
    fp32_flops: float  # CUDA cores
    tf32_flops: float  # tensor cores
    bf16_flops: float  # tensor cores; fp16 runs at the same rate
    h2d_pinned_bytes_per_s: float
    d2h_pinned_bytes_per_s: float
    h2d_pageable_bytes_per_s: float
    d2h_pageable_bytes_per_s: float
    peer_bytes_per_s: float  # to and from other GPUs, in each direction: NVLink, all links together, or PCIe
    op_host_ns: float  # host: an eager operation that launches one kernel, including Python and the dispatcher
    library_host_ns: float  # host: the same for a matrix product (cuBLAS chooses a kernel)
    attention_host_ns: float  # host: the same for scaled dot product attention
    python_host_ns: float  # host: the interpreter between two operations that launch something
    launch_host_ns: float  # host: each further launch, memset or device copy inside the same operation
    tape_host_ns: float  # host: each launch of a decode step that is launched again from a tape
    view_host_ns: float  # host: an operation that launches nothing (a view, an allocation)
    item_host_ns: float  # host: `.item()` up to its wait
    h2d_host_ns: float  # host: start of a pageable H2D copy of a few bytes, which stages them
    d2h_host_ns: float  # host: start of a pageable D2H copy
    pinned_async_host_ns: float  # host: start of a pinned copy
    wait_host_ns: float  # host: return from a wait after the stream has finished
    graph_launch_host_ns: float  # host: launch of a captured CUDA graph
    kernel_floor_ns: float  # the shortest kernel
    kernel_gap_ns: float  # between two kernels queued on one stream
    copy_floor_ns: float  # an H2D copy of a few bytes, on the stream
    d2h_floor_ns: float  # a D2H copy of a few bytes, on the stream
    d2d_floor_ns: float  # a device-to-device memcpy of a few bytes
    graph_node_ns: float  # from the start of a kernel node of a CUDA graph to the start of the next
    collective_ns: float  # a collective of a few bytes in a CUDA graph, from the arrival of the last rank
    sources: Mapping[str, Source] = field(repr=False, compare=False, default_factory=dict)

    def source(self, figure: str) -> Source:
        """Return the source of `figure`, the name of a field. Raises UnknownNameError if it is not a figure."""
        if figure not in self.sources:
            raise unknown_name("figure", figure, self.sources)
        return self.sources[figure]

    def with_memory(self, n_bytes: int) -> GpuSpec:
        """Return this GPU with `n_bytes` of memory. Raises DeviceError if that is less than 1 MiB."""
        if n_bytes < MiB:
            raise DeviceError(f"a virtual GPU with {bytes_text(n_bytes)}", "it is less than 1 MiB", "Use 1 MiB or more")
        sources = {**self.sources, "memory_bytes": Source("chosen", "requested by the user")}
        return replace(
            self, key=bytes_text(n_bytes).replace(" ", ""), name=f"{self.name} ({bytes_text(n_bytes)})", memory_bytes=n_bytes,
            sources=MappingProxyType(sources),
        )  # fmt: skip


class _Architecture(NamedTuple):
    """The figures that all GPUs of a compute capability share (CUDA programming guide)."""

    smem_per_block_optin_bytes: int
    smem_per_sm_bytes: int
    threads_per_sm: int


_ARCHITECTURES = {
    (8, 0): _Architecture(163 * KiB, 164 * KiB, 2048),
    (8, 6): _Architecture(99 * KiB, 100 * KiB, 1536),
    (8, 9): _Architecture(99 * KiB, 100 * KiB, 1536),
    (9, 0): _Architecture(227 * KiB, 228 * KiB, 2048),
    (10, 0): _Architecture(227 * KiB, 228 * KiB, 2048),
    (12, 0): _Architecture(99 * KiB, 100 * KiB, 1536),
}

_GUIDE = Source("datasheet", "CUDA programming guide, tables of SM and memory information per compute capability")
_H200 = Source("measured", "bench/results/h200_primitives.json (NVIDIA H200, torch 2.11.0+cu130)")
_H100 = Source("measured", "bench/results/h100_primitives.json (NVIDIA H100 80GB HBM3, torch 2.11.0+cu130)")
_H100_READ = Source("measured", 'tune/tuned/h100.json: the kernel "read", 1 GiB in 343.7 us')
_EARLIER = Source("measured", "one NVIDIA H200, torch 2.11 + CUDA 13.0, before bench/primitives.py; not in its results")
_AS_H200 = Source("estimated", "the H200's figure; depends more on the host's processor than on the GPU")
_PCIE = {
    4: ((25.0e9, 25.5e9, 12.0e9, 10.0e9), Source("estimated", "80 % of PCIe 4.0 x16; pageable: half of that")),
    5: ((53.8e9, 54.9e9, 18.0e9, 17.7e9), Source("estimated", "as measured on an H200, the same PCIe 5.0 x16")),
}
_NVLINK = {  # by compute capability, for GPUs of servers
    (8, 0): (300e9, Source("datasheet", "NVIDIA A100 datasheet: NVLink 600 GB/s, both directions together")),
    (9, 0): (450e9, Source("datasheet", "NVIDIA H100 and H200 datasheets, SXM: NVLink 900 GB/s, both directions together")),
    (10, 0): (900e9, Source("datasheet", "NVIDIA Blackwell datasheet: NVLink 1.8 TB/s, both directions together")),
}
_NO_NVLINK = Source("estimated", "PCIe, without an NVLink bridge: the rate of pinned H2D copies, which nobody compared")
# 2.2 to 2.7 µs in six runs, of which the record is one. The time of the bytes that a rank receives is not part of it.
_PAIR = Source("measured", "bench/results/h200x2_ranks.json (two NVIDIA H200 with NVLink): 5,376 bf16 values in a graph")
_NCCL = Source("estimated", "as NCCL's all-reduce of 5,376 bf16 values on two H200; PCIe may take longer")
_PCIE_FIELDS = ("h2d_pinned_bytes_per_s", "d2h_pinned_bytes_per_s", "h2d_pageable_bytes_per_s", "d2h_pageable_bytes_per_s")

# Costs on the host and on streams in ns. RECORDED names the measurements of most, _CHOSEN how others were chosen.
_COSTS: dict[str, float] = {
    "op_host_ns": 5500, "library_host_ns": 12400, "attention_host_ns": 16000, "python_host_ns": 4000,
    "launch_host_ns": 2500, "tape_host_ns": 5900, "view_host_ns": 1000,
    "item_host_ns": 4700, "h2d_host_ns": 4600, "d2h_host_ns": 5600, "pinned_async_host_ns": 2800, "wait_host_ns": 1500,
    "graph_launch_host_ns": 6000, "kernel_floor_ns": 880, "kernel_gap_ns": 1100,
    "copy_floor_ns": 740, "d2h_floor_ns": 1450, "d2d_floor_ns": 690, "graph_node_ns": 980,
}  # fmt: skip
# Each of these figures is the rounded value of this entry of bench/results/h200_primitives.json.
RECORDED: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "op_host_ns": ("host_ns", "add_scalar"), "library_host_ns": ("host_ns", "matmul"),
    "attention_host_ns": ("host_ns", "sdpa_decode"), "view_host_ns": ("host_ns", "slice"),
    "pinned_async_host_ns": ("wait_ns", "h2d_pinned_async_8B"), "kernel_floor_ns": ("tiny_ns", "add", "busy_ns"),
    "kernel_gap_ns": ("tiny_ns", "add", "gap_ns"), "copy_floor_ns": ("curves_ns", "h2d_pinned", "8"),
    "d2h_floor_ns": ("tiny_ns", "d2h_pinned_8B", "busy_ns"), "d2d_floor_ns": ("curves_ns", "d2d", "8"),
    "h2d_pinned_bytes_per_s": ("curves_ns", "h2d_pinned", "67108864"),
    "d2h_pinned_bytes_per_s": ("curves_ns", "d2h_pinned", "67108864"),
    "h2d_pageable_bytes_per_s": ("curves_ns", "h2d_pageable", "67108864"),
    "d2h_pageable_bytes_per_s": ("curves_ns", "d2h_pageable", "67108864"),
    "memory_bytes": ("properties", "total_memory"), "l2_bytes": ("properties", "L2_cache_size"),
    "sms": ("properties", "multi_processor_count"),
})  # fmt: skip
_CHOSEN = {
    "python_host_ns": "fitted to h200_times.json: 3 us fits decode strategies best, 5 to 9 us Hugging Face's generate()",
    "launch_host_ns": "assumed: not measured separately",
    "tape_host_ns": "fitted to rates without graphs in h200_speed_*.json, where the host took 4.6 to 5.9 us per launch",
    "item_host_ns": "chosen so that `.item()` without python_host_ns takes about as long as in h200_primitives.json",
    "h2d_host_ns": "chosen in the same way as item_host_ns, for a pageable H2D of 8 bytes",
    "d2h_host_ns": "chosen in the same way as item_host_ns, for a pageable D2H of 8 bytes",
    "wait_host_ns": "assumed: between the times to synchronize an idle stream and an idle device in h200_primitives.json",
    "graph_launch_host_ns": "assumed: not measured separately",
}
_REACHED = 4.22 / 4.8  # read bandwidth of an H200: measured / datasheet, both in TB/s


def _card(
    key: str, name: str, cc: tuple[int, int], memory_gib: float, bandwidth: float, sms: int, l2_mib: float,
    tflops: tuple[float, float, float], pcie: int, sheet: str,
    others: Mapping[str, Source] = MappingProxyType({}), reached: float = _REACHED,
) -> GpuSpec:  # fmt: skip
    """Return the GPU described by `sheet`.

    `tflops` are (fp32, tf32, bf16), `reached` is the share of the bandwidth at which kernels read, and `others` maps figures to
    other sources.
    """
    architecture, (rates, pcie_source) = _ARCHITECTURES[cc], _PCIE[pcie]
    peer, peer_source = _NVLINK.get(cc, (rates[0], _NO_NVLINK))
    figures: dict[str, float] = {
        "bandwidth_bytes_per_s": bandwidth, "reached_bandwidth_bytes_per_s": bandwidth * reached, "sms": sms,
        "registers_per_sm": 65536, **architecture._asdict(), "smem_per_block_bytes": 48 * KiB, "l2_bytes": int(l2_mib * MiB),
        **dict(zip(("fp32_flops", "tf32_flops", "bf16_flops"), (t * 1e12 for t in tflops), strict=True)),
        **dict(zip(_PCIE_FIELDS, rates, strict=True)), **_COSTS, "peer_bytes_per_s": peer,
        "collective_ns": 2270 if cc in _NVLINK else 16300,
    }  # fmt: skip
    sources = dict.fromkeys(figures, Source("datasheet", sheet))
    sources |= dict.fromkeys(("name", "compute_capability", "memory_bytes", "sms", "l2_bytes"), _SEEN)
    sources |= dict.fromkeys((*_Architecture._fields, "registers_per_sm", "smem_per_block_bytes"), _GUIDE)
    sources |= dict.fromkeys(_COSTS, _AS_H200) | dict.fromkeys(_PCIE_FIELDS, pcie_source)
    sources["peer_bytes_per_s"] = peer_source
    sources["collective_ns"] = Source("estimated", f"as measured on {_PAIR.where}") if cc in _NVLINK else _NCCL
    sources["reached_bandwidth_bytes_per_s"] = Source("estimated", "88 % of the datasheet's, as measured on an H200")
    sources |= {figure: Source("estimated", why) for figure, why in _CHOSEN.items()}
    sources |= others
    return GpuSpec(
        key=key,
        name=name,
        compute_capability=cc,
        memory_bytes=int(memory_gib * GiB),
        sources=MappingProxyType(sources),
        **figures,  # type: ignore[arg-type]
    )


_SEEN = Source("measured", "reported by users of this GPU: deviceQuery, torch's device properties or out-of-memory messages")
_A100 = "NVIDIA A100 Tensor Core GPU architecture whitepaper; bandwidth: NVIDIA A100 datasheet"
_H100_FLOPS = "NVIDIA H100 Tensor Core GPU architecture whitepaper, SXM5"
_UNSTATED = "dense; it does not name the accumulation dtype, but bf16 products in torch (fp32 accumulation) exceed half of it"


class Catalogue(Mapping[str, GpuSpec]):
    """A read-only mapping from key to `GpuSpec`. Its text and HTML representations are tables of the main figures."""

    def __init__(self, cards: Iterable[GpuSpec]) -> None:
        self._cards = {card.key: card for card in cards}

    def __getitem__(self, key: str) -> GpuSpec:
        """Return the GPU called `key`. Raises UnknownNameError if there is none."""
        if key not in self._cards:
            raise unknown_name("GPU", key, self._cards)
        return self._cards[key]

    def __contains__(self, key: object) -> bool:
        return key in self._cards

    def get(self, key: str, default: Any = None) -> Any:
        """Return the GPU called `key`, or `default` if there is none."""
        return self._cards.get(key, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._cards)

    def __len__(self) -> int:
        return len(self._cards)

    def _rows(self) -> list[tuple[str, ...]]:
        head = ("key", "name", "compute", "memory", "bandwidth", "SMs", "SMEM per block", "L2", "bf16")
        return [head, *(_row(card) for card in self._cards.values())]

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        head, *rows = self._rows()
        cells = ["".join(f"<td>{escape(text)}</td>" for text in row) for row in rows]
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<table><thead><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr></thead><tbody>{body}</tbody></table>"


def _row(card: GpuSpec) -> tuple[str, ...]:
    return (
        card.key, card.name, "{}.{}".format(*card.compute_capability), bytes_text(card.memory_bytes),
        f"{card.bandwidth_bytes_per_s / 1e9:,.0f} GB/s", str(card.sms), bytes_text(card.smem_per_block_optin_bytes),
        bytes_text(card.l2_bytes), f"{card.bf16_flops / 1e12:,.0f} TFLOPS",
    )  # fmt: skip


# The datasheet figures were checked in November 2026 against public copies of the named documents or, mostly, against public
# code and notes that quote their tables. Sparse rates are halved. The doubled fp16 rate of GeForce GPUs is not used: it needs
# accumulation in fp16, and torch accumulates in fp32.
CATALOGUE = Catalogue(
    (
        _card("rtx-3090", "NVIDIA GeForce RTX 3090", (8, 6), 23.69, 936e9, 82, 6, (35.6, 35.6, 71.2), 4,
              "NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A",
              {"bf16_flops": Source("datasheet", "NVIDIA RTX Blackwell GPU architecture whitepaper, table 3 (GA102's: 71)")}),
        _card("rtx-4090", "NVIDIA GeForce RTX 4090", (8, 9), 23.65, 1008e9, 128, 72, (82.6, 82.6, 165.2), 4,
              "NVIDIA Ada GPU architecture whitepaper, appendix A"),
        _card("rtx-5090", "NVIDIA GeForce RTX 5090", (12, 0), 31.36, 1792e9, 170, 96, (104.8, 104.8, 209.5), 5,
              "NVIDIA RTX Blackwell GPU architecture whitepaper, table 3"),
        _card("a10", "NVIDIA A10", (8, 6), 22.20, 600e9, 72, 6, (31.2, 62.5, 125), 4, "NVIDIA A10 datasheet"),
        _card("a10g", "NVIDIA A10G", (8, 6), 22.06, 600e9, 80, 6, (35, 35, 70), 4,
              "NVIDIA A10G datasheet (AWS, February 2022)",
              {"bf16_flops": Source("datasheet", "NVIDIA A10G datasheet (AWS, February 2022), dense; users reach 67 TFLOPS")}),
        _card("a100-40g", "NVIDIA A100-SXM4-40GB", (8, 0), 39.49, 1555e9, 108, 40, (19.5, 156, 312), 4, _A100),
        _card("a100-80g", "NVIDIA A100-SXM4-80GB", (8, 0), 79.15, 2039e9, 108, 40, (19.5, 156, 312), 4, _A100),
        _card("l4", "NVIDIA L4", (8, 9), 22.03, 300e9, 58, 48, (30.3, 60, 121), 4, "NVIDIA L4 datasheet",
              {"bf16_flops": Source("datasheet", f"NVIDIA L4 datasheet, {_UNSTATED}")}),
        _card("l40s", "NVIDIA L40S", (8, 9), 44.39, 864e9, 142, 96, (91.6, 183, 362.05), 4, "NVIDIA L40S datasheet",
              {"bf16_flops": Source("datasheet", f"NVIDIA L40S datasheet, {_UNSTATED}")}),
        _card("h100", "NVIDIA H100 80GB HBM3", (9, 0), 79.18, 3350e9, 132, 50, (66.9, 494.7, 989.4), 5, _H100_FLOPS,
              dict.fromkeys(("name", "compute_capability", "memory_bytes", "sms", "l2_bytes"), _H100)
              | {"bandwidth_bytes_per_s": Source("datasheet", "NVIDIA H100 datasheet, SXM"),
                 "reached_bandwidth_bytes_per_s": _H100_READ}, 3.124 / 3.35),
        _card("h200", "NVIDIA H200", (9, 0), 139.80, 4800e9, 132, 60, (66.9, 494.7, 989.4), 5,
              f"{_H100_FLOPS}: the same chip; the H200 datasheet rounds them",
              dict.fromkeys((*RECORDED, "name", "compute_capability"), _H200)
              | dict.fromkeys(("reached_bandwidth_bytes_per_s", "graph_node_ns"), _EARLIER)
              | {"bandwidth_bytes_per_s": Source("datasheet", "NVIDIA H200 datasheet, SXM"), "collective_ns": _PAIR}),
        _card("b200", "NVIDIA B200", (10, 0), 178.35, 7700e9, 148, 126.5, (75, 1125, 2250), 5,
              "NVIDIA Blackwell datasheet, one GPU of the HGX B200 (8 TB/s for the DGX B200)",
              {"tf32_flops": Source("datasheet", "NVIDIA HGX platform specifications: 18 PFLOPS sparse for 8 B200")}),
        _card("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 94.97, 1792e9, 188, 128,
              (126.0, 251.9, 503.8), 5, "NVIDIA RTX Blackwell PRO GPU architecture whitepaper, table 4",
              {"l2_bytes": Source("estimated", "reported for the Server Edition, the same chip with the same number of SMs")}),
    )
)  # fmt: skip
"""All GPUs of the catalogue by key."""


Gpus = Iterable[GpuSpec | str] | GpuSpec | str | None  # as `find_specs` takes them


def find_specs(cards: Gpus = None) -> list[GpuSpec]:
    """Return GPUs, each given as a spec or by its key, or one of them; None means the catalogue.

    Raises UnknownNameError for an unknown key.
    """
    given = CATALOGUE if cards is None else cards if isinstance(cards, Iterable) and not isinstance(cards, str) else [cards]
    return [card if isinstance(card, GpuSpec) else CATALOGUE[card] for card in given]
