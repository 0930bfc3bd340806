"""Tests with the configs, tensor names and GGUF metadata of published checkpoints, without their weights."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.models.published import CONFIGS, METADATA, stored_names
from toolkit.models import ARCHITECTURES
from toolkit.models.shapes import SHAPES

SHAPE = {
    name: next(
        shape for shape in SHAPES.values() if f"/{re.sub('(-it|-Thinking-2507)$', '', name)}/" in shape.source
    )
    for name in CONFIGS
    if name != "Qwen/Qwen3.5-0.8B"
}  # fmt: skip
TENSORS = {"Qwen/Qwen3.5-35B-A3B": 733, "Qwen/Qwen3.5-27B": 851}  # in GGUF files of them, as listings of these count


def config_of(name):
    return ARCHITECTURES[CONFIGS[name]["model_type"]].Config.from_hf(CONFIGS[name])


def plain(config, *without):
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if name not in without}


@pytest.mark.parametrize("name", SHAPE)
def test_a_config_as_published_says_what_the_random_model_of_that_size_has(name):
    shape = ARCHITECTURES[SHAPE[name].config["model_type"]].Config.from_hf(SHAPE[name].config)
    changed = ("max_position_embeddings", "rope") if name.endswith("2507") else ()
    found = config_of(name)
    assert plain(found, "eos_token_ids", *changed) == plain(shape, "eos_token_ids", *changed)
    assert set(shape.eos_token_ids) <= set(found.eos_token_ids)


def test_what_the_later_versions_change():
    config = config_of("Qwen/Qwen3-30B-A3B-Thinking-2507")
    assert (config.max_position_embeddings, config.rope.theta, config.rope.kind) == (262144, 1e7, "default")
    assert config_of("google/gemma-4-31B-it").eos_token_ids == (1, 106)
    small = config_of("Qwen/Qwen3.5-0.8B")
    assert (small.tie_word_embeddings, small.linear_num_value_heads, small.rope.dims) == (True, 16, 64)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_published_tensor_has_its_place_or_is_left_out(name):
    architecture, config, stored = ARCHITECTURES[CONFIGS[name]["model_type"]], config_of(name), stored_names(CONFIGS[name])
    wanted = {tensor for source in architecture.names_hf(config, stored).values() for tensor in source.names}
    assert wanted <= stored
    skipped = (*architecture.SKIPPED, *getattr(config, "skipped", ()))
    left = [tensor for tensor in stored - wanted if not any(re.match(pattern, tensor) for pattern in skipped)]
    assert left == []


@pytest.mark.parametrize("name", METADATA)
def test_metadata_of_a_converted_file_says_what_the_config_says(name):
    published, metadata = config_of(name), METADATA[name]
    architecture = ARCHITECTURES[metadata["general.architecture"]]
    names = architecture.names_gguf(dataclasses.replace(published, **_fields_from_tensors(published)))
    tensors = dict.fromkeys((tensor for source in names.values() for tensor in source.names), (published.vocab_size, 1))
    found = architecture.Config.from_gguf(metadata, tensors)
    told = ("eos_token_ids", "rms_norm_eps", "full", *_fields_from_tensors(published))
    assert plain(found, *told) == plain(published, *told)
    assert found.rms_norm_eps == pytest.approx(1e-6, rel=1e-6)
    if name in TENSORS:
        assert len(tensors) == TENSORS[name]
    else:
        assert (found.full.kv_heads, found.full.head_dim, found.full.theta) == (
            published.full.kv_heads, published.full.head_dim, published.full.theta,
        )  # fmt: skip


def _fields_from_tensors(config):
    """Return the config fields that follow from a GGUF file's tensors: frequency factors, or the order of the value heads."""
    return {"rope_freqs_stored": True} if hasattr(config, "rope_freqs_stored") else {"tiled": True}
