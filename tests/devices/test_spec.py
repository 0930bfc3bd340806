"""Tests of the GPU catalogue: figures and their sources."""

import json
import re
from dataclasses import FrozenInstanceError, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import toolkit as tk
from toolkit.core.errors import DeviceError, UnknownNameError
from toolkit.core.units import GiB, KiB
from toolkit.gpu.catalogue import CATALOGUE, RECORDED, GpuSpec, find_specs
from toolkit.gpu.opening import open_device

RESULTS = Path(tk.__file__).parent / "bench" / "results" / "h200_primitives.json"
CARDS = {
    "rtx-3090", "rtx-4090", "rtx-5090", "a10", "a10g", "a100-40g", "a100-80g", "l4", "l40s", "h100", "h200", "b200",
    "rtx-pro-6000",
}  # fmt: skip


def test_the_catalogue_has_the_cards():
    assert set(CATALOGUE) == CARDS
    assert all(spec.key == key for key, spec in CATALOGUE.items())


@pytest.mark.parametrize("spec", CATALOGUE.values(), ids=list(CATALOGUE))
def test_every_figure_has_a_source(spec: GpuSpec):
    figures = {f.name for f in fields(spec)} - {"key", "sources"}
    assert set(spec.sources) == figures
    for figure in figures:
        how, where = spec.source(figure)
        assert how in ("datasheet", "measured", "estimated")
        assert where


@pytest.mark.parametrize("spec", CATALOGUE.values(), ids=list(CATALOGUE))
def test_figures_are_sane(spec: GpuSpec):
    assert 20 * GiB < spec.memory_bytes < 200 * GiB
    assert 0.7 < spec.reached_bandwidth_bytes_per_s / spec.bandwidth_bytes_per_s < 1
    assert spec.smem_per_block_bytes == 48 * KiB < spec.smem_per_block_optin_bytes < spec.smem_per_sm_bytes
    assert spec.fp32_flops <= spec.tf32_flops <= spec.bf16_flops
    assert spec.bf16_flops == pytest.approx(2 * spec.tf32_flops, rel=0.03)  # or one of them is a sparse rate
    assert spec.d2h_pageable_bytes_per_s < spec.d2h_pinned_bytes_per_s
    assert all(getattr(spec, f.name) > 0 for f in fields(spec) if f.name.endswith(("_ns", "_s", "_bytes", "_flops")))


def test_only_the_h200_claims_measured_costs():
    measured = {key for key, spec in CATALOGUE.items() if spec.source("op_host_ns").how == "measured"}
    assert measured == {"h200"}


def _recorded(figure: str) -> float:
    """Return the entry of the recorded results that `figure` rounds, in the unit of `figure`."""
    entry = json.loads(RESULTS.read_text())
    for name in RECORDED[figure]:
        entry = entry[name]
    if figure.endswith("_per_s"):
        return (64 << 20) / entry[1] * 1e9  # [device, host] nanoseconds of 64 MiB
    return entry[0] if isinstance(entry, list) else entry


@pytest.mark.parametrize("figure", RECORDED)
def test_a_measured_figure_is_the_recorded_one(figure: str):
    assert CATALOGUE["h200"].source(figure).where.startswith("bench/results/h200_primitives.json")
    assert getattr(CATALOGUE["h200"], figure) == pytest.approx(_recorded(figure), rel=0.08)


def test_no_other_figure_cites_the_recorded_results_as_measured():
    sources = CATALOGUE["h200"].sources
    cites = {figure for figure, (how, where) in sources.items() if how == "measured" and "primitives.json (" in where}
    assert cites == {*RECORDED, "name", "compute_capability"}


def test_with_memory_changes_the_size_and_its_source_alone():
    card = CATALOGUE["rtx-5090"].with_memory(8 * GiB)
    assert card.memory_bytes == 8 * GiB
    assert card.key == "8.00GiB"
    assert card.source("memory_bytes").how == "chosen"
    assert CATALOGUE["rtx-5090"].source("memory_bytes").how == "measured"
    assert card.sms == CATALOGUE["rtx-5090"].sms


@pytest.mark.parametrize("n_bytes", [-1, 0, 4096])
def test_with_memory_refuses_sizes_no_gpu_has(n_bytes: int):
    with pytest.raises(DeviceError, match="less than 1 MiB"):
        CATALOGUE["h200"].with_memory(n_bytes)


def test_several_gpus_are_not_one_device():
    with pytest.raises(DeviceError, match=r'several processes\. Start a process for each, with tk.cluster\("virtual:2xh200"\)'):
        tk.device("virtual:2xh200")


def test_an_unknown_figure_names_the_nearest():
    with pytest.raises(UnknownNameError, match="bandwidth_bytes_per_s"):
        CATALOGUE["h200"].source("bandwidth")


@pytest.mark.parametrize("key", ["h300", "", 3, None], ids=repr)
def test_an_unknown_gpu_is_refused_by_name(key):
    with pytest.raises(UnknownNameError, match=f"GPU {key!r}: no such name.*Known: a10, a100-40g, "):
        CATALOGUE[key]
    assert key not in CATALOGUE
    assert CATALOGUE.get(key) is None
    assert CATALOGUE.get(key, "none") == "none"


def test_the_nearest_gpu_is_suggested():
    with pytest.raises(UnknownNameError, match=r'Did you mean "h[12]00"'):
        tk.GPUS["h300"]


def test_the_catalogue_is_a_mapping():
    h200 = CATALOGUE["h200"]
    assert CATALOGUE.get("h200") is h200
    assert "h200" in CATALOGUE
    assert dict(CATALOGUE) == dict(CATALOGUE.items()) == CATALOGUE
    assert list(CATALOGUE.values()) == find_specs()


def test_gpus_are_found_by_spec_or_key():
    h200, small = CATALOGUE["h200"], CATALOGUE["l4"].with_memory(8 * GiB)
    assert find_specs("h200") == find_specs(h200) == [h200]
    assert find_specs(iter([small, "h200"])) == [small, h200]
    with pytest.raises(UnknownNameError, match="'h300'"):
        find_specs(["h200", "h300"])
    with pytest.raises(UnknownNameError, match="GPU 5: no such name"):
        find_specs(5)  # type: ignore[arg-type]


def test_a_spec_is_frozen():
    with pytest.raises(FrozenInstanceError):
        CATALOGUE["h200"].sms = 1  # type: ignore[misc]


def test_the_catalogue_shows_a_table() -> None:
    lines = repr(CATALOGUE).splitlines()
    assert len(lines) == len(CATALOGUE) + 1
    assert "1,792 GB/s" in next(line for line in lines if line.startswith("rtx-5090"))
    assert CATALOGUE._repr_html_().count("<tr>") == len(lines)


@pytest.mark.parametrize(
    ("name", "cluster", "one"),
    [
        ("virtual:2xh200", "virtual:2xh200", "h200"), ("2xcuda", "2xcuda", "cuda"), ("2xcpu", "2xcpu", "cpu"),
        ("2xh200", "virtual:2xh200", "h200"), ("virtual:2x8GiB", "virtual:2x8GiB", "virtual:8GiB"),
        ("virtual:2 x h200", "virtual:2xh200", "h200"), ("virtual:2xH200", "virtual:2xh200", "h200"),
        ("virtual:2x2xh200", "virtual:2xh200", "h200"), ("2xvirtual:h200", "virtual:2xh200", "h200"),
        ("2xCUDA", "2xcuda", "cuda"), ("virtual:2xcuda", "2xcuda", "cuda"),
    ],
)  # fmt: skip
def test_names_of_several_devices_are_those_of_a_cluster(name: str, cluster: str, one: str) -> None:
    found = (
        rf'device {name}: several devices need several processes.*tk.cluster\("{cluster}"\) or torchrun\. '
        rf'A plan needs no processes: tk.plan\(MODEL, "{one}", tensor_parallel=2\)'
    )
    for use in (open_device, partial(tk.plan, "demo/qwen3")):
        with pytest.raises(DeviceError, match=found):
            use(name)


def test_a_process_of_torchrun_opens_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    found = r'virtual:2xh200: each rank opens one device\. Write "virtual:h200" for all ranks\. A plan needs no processes'
    with pytest.raises(DeviceError, match=found):
        open_device("virtual:2xh200")


@pytest.mark.parametrize(
    ("name", "found", "cluster"),
    [
        ("virtual:0xh200", 'such names are for several devices. For one, write "virtual:h200". For several, start', 2),
        ("virtual:1xh200", 'such names are for several devices. For one, write "virtual:h200". For several, start', 2),
        ("virtual:65xh200", "several devices need several processes. Start", 64),
    ],
)
def test_the_advice_has_a_number_of_devices_that_a_cluster_can_have(name: str, found: str, cluster: int) -> None:
    with pytest.raises(DeviceError, match=re.escape(found)) as caught:
        open_device(name)
    assert f'tk.cluster("virtual:{cluster}xh200")' in caught.value.do
    assert f'tk.plan(MODEL, "h200", tensor_parallel={cluster})' in caught.value.do
    with pytest.raises(UnknownNameError, match="'2xnvidia': no such name"):
        open_device("virtual:2xnvidia")


def test_what_looks_like_a_device_is_told_apart() -> None:
    with pytest.raises(DeviceError, match=r'device h200: these are the figures of a GPU, not a device\. Pass "virtual:h200"'):
        open_device(CATALOGUE["h200"])  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"a cluster has a device for each rank. Pass it to tk.load as cluster="):
        open_device(SimpleNamespace(device="virtual:h200", ranks=2))  # type: ignore[arg-type]
    for thing, kind in ((None, "a NoneType"), (3, "an int"), (["cuda"], "a list")):
        with pytest.raises(
            DeviceError, match=f'^a device: {kind}. Give a name, such as "virtual:h200", or what tk.device returned'
        ):
            open_device(thing)  # type: ignore[arg-type]
