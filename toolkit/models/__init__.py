"""The architectures of the toolkit, one file each, by the `model_type` of Hugging Face and the architecture name of GGUF."""

from __future__ import annotations

from types import ModuleType

from toolkit.models import gemma4, qwen3, qwen3_5_moe

ARCHITECTURES: dict[str, ModuleType] = {
    "gemma4": gemma4, "gemma4_text": gemma4, "gemma4_unified": gemma4, "gemma4_unified_text": gemma4, "qwen3": qwen3,
    "qwen3_moe": qwen3, "qwen3moe": qwen3, "qwen3_5": qwen3_5_moe, "qwen3_5_text": qwen3_5_moe, "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe, "qwen35": qwen3_5_moe, "qwen35moe": qwen3_5_moe,
}  # fmt: skip
