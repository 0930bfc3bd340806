"""The models the toolkit decodes itself, one file each, by the `model_type` that Hugging Face and GGUF know them by."""

from __future__ import annotations

from types import ModuleType

from toolkit.models import qwen3

ARCHITECTURES: dict[str, ModuleType] = {"qwen3": qwen3}
