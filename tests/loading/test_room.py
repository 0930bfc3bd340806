"""What the error for weights that don't fit advises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.core.errors import DeviceError
from toolkit.gpu.device import Memory
from toolkit.loading.room import check_empty, too_big

FREE_OR_LARGER = "Free memory on it, or use a larger card"


def card(allocated: int, limit: int = 1000) -> Any:
    memory = Memory(allocated, allocated, allocated, 1000)
    return SimpleNamespace(
        name="virtual:card", torch=torch.device("meta"), memory=lambda: memory, limit_bytes=limit
    )  # fmt: skip


@pytest.mark.parametrize(("device", "needed", "size", "do"), [
    (card(600), 900, 300, 'Use a smaller format: scheme="int8" needs 300 B'),
    (card(600), 900, 500, FREE_OR_LARGER),
    (card(600), 1100, 500, 'Free memory on it and use a smaller format (scheme="int8" needs 500 B), or use a larger card'),
    (card(600), 3000, 1500, "Use a larger card"),
    (card(0), 3000, 1500, "Use a larger card"),
    (card(0, 400), 900, 500, "Set a larger budget, or use a larger card"),
    (card(0, 400), 1001, 500, "Use a larger card"),
])  # fmt: skip
def test_freeing_memory_is_advised_only_if_it_helps(device: Any, needed: int, size: int, do: str) -> None:
    assert too_big("m.gguf", device, needed, [('scheme="int8"', size)]).do == do


def test_weights_for_an_empty_card() -> None:
    check_empty("m.gguf", "virtual:card", 1000, 1000, [])
    with pytest.raises(DeviceError, match=r"on virtual:card: its weights need 1001 B, .* has 1000 B. Use a larger card"):
        check_empty("m.gguf", "virtual:card", 1000, 1001, [('scheme="int8"', 1001)])
    with pytest.raises(DeviceError, match="Use a smaller format: scheme"):
        check_empty("m.gguf", "virtual:card", 1000, 1001, [('scheme="int8"', 1000)])
