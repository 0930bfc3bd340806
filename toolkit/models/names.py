"""Weight names that the Qwen models share in checkpoints: prefixes, skipped tensors, and experts."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from toolkit.models.places import Source

SKIPPED = (
    r"mtp\.",  # multi-token prediction layers in Hugging Face checkpoints
    r"blk\.\d+\.nextn\.",  # and their extra tensors in GGUF files
    r"(model\.)?visual\.",
    r".*rotary_emb\.inv_freq$",
)


def ends_hf(stored: Collection[str]) -> tuple[str, str]:
    """Return (prefix, head): the prefix of "layers.0" in a checkpoint with tensors called `stored`, and the name of the head.

    The prefix is usually "model."; in multimodal checkpoints "model.language_model."; empty if a bare text model was saved.
    """
    ours = [name for name in stored if not name.startswith("mtp.")]
    table = next((name for name in ours if name.endswith("embed_tokens.weight")), "model.embed_tokens.weight")
    head = next((name for name in ours if name.endswith("lm_head.weight")), "lm_head.weight")
    return table.removesuffix("embed_tokens.weight"), head


def experts_hf(ours: str, theirs: str, experts: int, width: int, stored: Collection[str]) -> Iterator[tuple[str, Source]]:
    """Yield the sources of a layer's experts, stored one by one or fused.

    Fused, "gate_up_proj" is [experts, 2 * width, hidden] with the gate rows first, and "down_proj" [experts, hidden, width].
    """
    if f"{theirs}.0.gate_proj.weight" in stored:
        for leaf, name in (("gate_up.gate", "gate_proj"), ("gate_up.up", "up_proj"), ("down", "down_proj")):
            yield f"{ours}.{leaf}.weight", Source(tuple(f"{theirs}.{e}.{name}.weight" for e in range(experts)))
        return
    for i, leaf in enumerate(("gate", "up")):
        yield f"{ours}.gate_up.{leaf}.weight", Source((f"{theirs}.gate_up_proj",), rows=slice(i * width, (i + 1) * width))
    yield f"{ours}.down.weight", Source((f"{theirs}.down_proj",))


def experts_gguf(ours: str, theirs: str, width: int, stored: Collection[str]) -> Iterator[tuple[str, Source]]:
    """Yield the sources of a layer's experts: stacks [experts, out, in], gate and up separate or joined (gate first)."""
    both = f"{theirs}.ffn_gate_up_exps.weight"
    for i, leaf in enumerate(("gate", "up")):
        apart, part = Source((f"{theirs}.ffn_{leaf}_exps.weight",)), slice(i * width, (i + 1) * width)
        yield f"{ours}.gate_up.{leaf}.weight", Source((both,), rows=part) if both in stored else apart
    yield f"{ours}.down.weight", Source((f"{theirs}.ffn_down_exps.weight",))
