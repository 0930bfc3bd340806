"""Compare the kernel that looks up embedding rows with dequantized tables."""

from __future__ import annotations

import pytest
import torch

from toolkit.core.errors import ModelError, ToolkitError
from toolkit.kernels.base import Config
from toolkit.kernels.embed import EMBED_ROWS, EmbedShape
from toolkit.kernels.exchange import in_memory, memory_words, sum_of_sent
from toolkit.models.layers import Embedding
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.schemes import SCHEMES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(shape: EmbedShape, inputs: dict[str, torch.Tensor], config: Config) -> torch.Tensor:
    """Launch with a poisoned result."""
    outputs = EMBED_ROWS.outputs(shape, inputs)
    outputs["out"].fill_(torch.nan)
    for launch in EMBED_ROWS.launches(shape, config, inputs, outputs):
        launch.run()
    return outputs["out"]


def embedding_of(shape: EmbedShape, inputs: dict[str, torch.Tensor]) -> Embedding:
    """Return an Embedding with the table of the inputs."""
    found = Embedding(1, 1, torch.float32, scale=float(shape.scale))
    if shape.scheme is None:
        found.weight.data = inputs["table"]
        return found
    del found.weight
    found.weight = PackedMatrix(shape.scheme, (shape.vocab, shape.hidden), DEVICE)
    for name in found.weight.parts():
        getattr(found.weight, name).data = inputs[name]
    return found


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("table", ["float32", *SCHEMES])
def test_rows_are_the_tables_own(table: str, tokens: int) -> None:
    """fp32 rows are bit-identical for every scheme, and every block of a row is written."""
    shape = EmbedShape(tokens, 77, 768, table, scale="1.7", dtype="float32")
    inputs = EMBED_ROWS.inputs(shape, DEVICE)
    found = run(shape, inputs, Config(block=512))
    assert torch.equal(found, EMBED_ROWS.reference(shape, inputs)[0])
    assert torch.equal(found, embedding_of(shape, inputs)(inputs["ids"]))


@pytest.mark.parametrize("table", ["float32", "q4_k"])
def test_rows_that_a_part_of_a_table_does_not_hold_are_zeros(table: str) -> None:
    shape = EmbedShape(5, 9, 256, table, dtype="float32")
    for first, ids, held in ((0, (0, 8, 9, 40, 3), (1, 1, 0, 0, 1)), (5, (4, 5, 13, 14, 0), (0, 1, 1, 0, 0))):
        inputs = EMBED_ROWS.inputs(shape, DEVICE) | {"ids": torch.tensor(ids, device=DEVICE), "before": torch.empty(first, 0)}
        found = run(shape, inputs, Config(block=512))
        assert torch.equal(found, EMBED_ROWS.reference(shape, inputs)[0])
        assert found.any(1).tolist() == [*map(bool, held)]


def test_rows_are_sent() -> None:
    """Each of two ranks holds a part of the table."""
    memory = [torch.zeros(memory_words(2), dtype=torch.int64, device=DEVICE) for _ in range(2)]
    addresses = torch.tensor([each.data_ptr() for each in memory], device=DEVICE)
    boxes = [in_memory(rank, own, addresses) for rank, own in enumerate(memory)]
    shape = EmbedShape(3, 8, 700, "float32", dtype="float32")
    table, ids = torch.randn(16, 700, device=DEVICE), torch.tensor([7, 15, 8], device=DEVICE)
    for rank, box in enumerate(boxes):
        inputs = {"ids": ids, "table": table[8 * rank :][:8].contiguous(), "before": torch.empty(8 * rank, 0)}
        run(shape, inputs | {"targets": box.sent.targets, "counts": box.sent.counts}, Config(block=256))
    for box in boxes:
        sum_of_sent(box, out := torch.empty(3, 700, device=DEVICE)).run()
        assert torch.equal(out, table[ids])


def test_rows_in_bfloat16_are_rounded_before_and_after_the_scale() -> None:
    shape = EmbedShape(3, 33, 64, "int8-g32", scale="73.5")
    inputs = EMBED_ROWS.inputs(shape, DEVICE)
    found = run(shape, inputs, Config(block=256))
    # The interpreter truncates twice where a GPU rounds: allow two steps of bf16.
    torch.testing.assert_close(found, EMBED_ROWS.reference(shape, inputs)[0], rtol=2**-6, atol=0)


def test_ids_may_begin_anywhere() -> None:
    """The ids of a part of a prompt, and those of a slot among others, aren't aligned to 16 bytes."""
    shape = EmbedShape(2, 9, 32, "float32", dtype="float32")
    inputs = EMBED_ROWS.inputs(shape, DEVICE)
    inputs["ids"] = torch.tensor([4, 8, 3], device=DEVICE)[1:]
    assert torch.equal(run(shape, inputs, Config(block=256)), inputs["table"][[8, 3]])


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("ids", lambda x: x.int(), "int32 where int64"),
        ("ids", lambda x: x[None], "shape"),
        ("table", lambda x: x.t().contiguous().t(), "not contiguous"),
        ("table", lambda x: x.to("meta"), "on meta"),
    ],
)
def test_wrong_tensors_are_told_by_name(name: str, change, says: str) -> None:  # type: ignore[no-untyped-def]
    shape = EmbedShape(2, 64, 8, "float32", dtype="float32")
    inputs = EMBED_ROWS.inputs(shape, DEVICE)
    inputs[name] = change(inputs[name])
    with pytest.raises(ModelError, match=f"embed_rows, {name}.*{says}"):
        run(shape, inputs, Config(block=256))


@pytest.mark.parametrize(
    "make",
    [
        lambda: EmbedShape(1, 9, 48, "q4_k"),
        lambda: EmbedShape(1, 9, 8, "float32"),
        lambda: EmbedShape(1, 9, 8, "float64", dtype="float64"),
        lambda: EmbedShape(1, 9, 8, "q3_k"),
    ],
)
def test_impossible_shapes_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ToolkitError):
        make()


def test_known_shapes_launch_without_values() -> None:
    for shape in EMBED_ROWS.known.values():
        assert EmbedShape.from_key(shape.key) == shape
        inputs = EMBED_ROWS.inputs(shape, "meta")
        outputs = EMBED_ROWS.outputs(shape, inputs)
        for config in EMBED_ROWS.space(shape):
            assert len(EMBED_ROWS.launches(shape, config, inputs, outputs)) == 1
        assert EMBED_ROWS.cost(shape).bytes > 0
