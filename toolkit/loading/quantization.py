"""`tk.quantize`: quantize a model that is already on a device, and report the error of each matrix.

The new model shares all tensors that are not quantized with the old one, which is not changed. Weights are read, fitted and
measured a few rows at a time on their device.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.core.errors import ModelError, kind_of, unknown_name
from toolkit.core.progress import Counter, Progress
from toolkit.core.units import count_text, dtype_name
from toolkit.loading.quantization_report import Matrix, Quantization
from toolkit.models.layers import Embedding, Joined, Linear
from toolkit.models.model import CausalLM
from toolkit.text.prompts import prompt_ids
from toolkit.weights.fitting import quantize_hqq, quantize_minmax
from toolkit.weights.packed import PackedMatrix, dequantize
from toolkit.weights.recipes import ALWAYS_PLAIN, Recipe, misfit, nothing_to_quantize, recipe
from toolkit.weights.schemes import Scheme, find_scheme

METHODS = {"min-max": quantize_minmax, "hqq": quantize_hqq}
TEXT = "Water boils at 100 degrees Celsius at sea level. The capital of France is Paris, and its river is the Seine."
CHUNK_WEIGHTS = 1 << 24  # weights processed at a time: bounds the scratch memory to 0.6 GiB, or to one expert
SAME = "already in this scheme"
LOWEST_SNR_DB = 6.0  # a matrix with a lower SNR stays plain: its values are too small for fp16 scales

Fit = Callable[[Tensor, Scheme, str], dict[str, Tensor]]


def quantize(
    model: CausalLM,
    scheme: str | Scheme | Recipe,
    method: str = "min-max",
    progress: bool | Progress = True,
    prompt: object = None,
) -> Any:
    """Return a new model on the same device with its matrices quantized to `scheme`. `model` is not changed.

    Norms, biases, routers and convolutions are shared with `model`. So are matrices whose rows do not even divide into groups
    of 32, and matrices that are already in `scheme`. Matrices packed in another scheme are dequantized and quantized again;
    their SNR is relative to the dequantized values. `.quantization` of the new model is the report.

    Args:
        scheme: one scheme for all matrices ("int4-g32", "int4-g64", "int4-g128", "int8-g32", ...), or a recipe ("q4_k_m",
            "int4", "int8").
        method: "min-max", or "hqq", which refines the min-max solution.
        progress: True (one line on a terminal), False, or a function of (done, total weights, name), which is called at most
            ten times a second and once at the end.
        prompt: text or token ids on which the logits of both models are compared.

    Raises ModelError if the model has none of the toolkit's layers, if a matrix has NaN or infinite values, or if nothing can
    be quantized; UnknownNameError for an unknown scheme or method. If it fails or is interrupted, all new memory is freed.
    """
    chosen = recipe(scheme)
    if not isinstance(method, str) or method not in METHODS:
        raise unknown_name("method", method, METHODS)
    plan = _plan(model, chosen)
    ids = _ids(model, prompt)
    counter = Counter(f"quantizing to {chosen.name}", progress, unit=count_text)
    counter.begin(sum(math.prod(m.shape) for m in plan.values() if m.scheme and not m.why))
    with torch.no_grad(), model.as_loaded():
        new = _twin(model)
        try:
            rows = _quantize_matrices(new, plan, METHODS[method], counter)
            comparable = any(row.snr_db == row.snr_db for row in rows if row.scheme)  # NaN where there are no values
            lowest, mean = _cosines(model, new, ids) if comparable else (math.nan, math.nan)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            _empty(new, model)
            raise
    new.quantization = Quantization(chosen.name, method, tuple(rows), mean, lowest, tuple(ids))
    new.quantisation = new.quantization  # the former name
    new.unquantized = {}
    for row in new.quantization.left:
        if row.why not in (ALWAYS_PLAIN, SAME):
            new.unquantized[row.why] = (*new.unquantized.get(row.why, ()), row.name)
    return new


def _plan(model: CausalLM, chosen: Recipe) -> dict[str, Matrix]:
    """Return the planned report row of each matrix, by its logical name, before anything is measured."""
    found: dict[str, Matrix] = {}
    config: Any = getattr(model, "config", None)
    for name, weight, shape in _matrices(model) if isinstance(model, nn.Module) else ():
        meant = chosen.meant_for(name, shape, config.num_hidden_layers, config.tie_word_embeddings)
        why = ALWAYS_PLAIN if meant is None else misfit(meant, shape)
        if isinstance(weight, PackedMatrix) and weight.scheme == meant:
            why = SAME
        was = weight.scheme.name if isinstance(weight, PackedMatrix) else dtype_name(weight.dtype)
        bits = weight.scheme.bits_per_weight if isinstance(weight, PackedMatrix) else 8.0 * weight.dtype.itemsize
        found[name] = Matrix(name, tuple(shape), was, bits, None if why else meant.name if meant else None, why)
    if not any(matrix.scheme for matrix in found.values()):
        if not found:
            why = f"{kind_of(model)} has none of the toolkit's layers"
            raise ModelError(f"quantizing to {chosen.name}", why, "Give a model that tk.load returned in this process")
        raise nothing_to_quantize(chosen.name, (matrix.why for matrix in found.values()))
    return found


def _matrices(model: nn.Module) -> Iterator[tuple[str, Tensor | PackedMatrix, tuple[int, ...]]]:
    """Yield (logical name, tensor, shape) of every matrix and table; fused matrices are listed one by one."""
    inside: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, Joined):
            for group in module.groups:
                inside.add(whole := f"{path}.{'_'.join(group)}")
                weight: Any = model.get_submodule(whole).weight
                for part in group:
                    yield f"{path}.{part}.weight", weight, (*weight.shape[:-2], module.sizes[part], weight.shape[-1])
        elif isinstance(module, Linear | Embedding) and path not in inside:
            yield f"{path}.weight", module.weight, tuple(module.weight.shape)


def _quantize_matrices(new: nn.Module, plan: dict[str, Matrix], fit: Fit, counter: Counter) -> list[Matrix]:
    """Replace the planned matrices of `new` and return the measured rows. Fused matrices are fused again if possible."""
    done = dict(plan)
    joined = {path: module for path, module in new.named_modules() if isinstance(module, Joined)}
    groups = {path: [f"{path}.{part}.weight" for part in module.sizes] for path, module in joined.items()}
    inside = {name for names in groups.values() for name in names}
    for path, names in [*groups.items(), *((None, [name]) for name in plan if name not in inside)]:
        todo = [name for name in names if plan[name].scheme]
        if not todo:
            continue
        module = None if path is None else joined[path]
        again = module is not None and len(module.groups) < len(module.sizes)
        if module is not None:
            module.split()
        for name in todo:
            done[name] = _replace(new.get_submodule(name.removesuffix(".weight")), plan[name], fit)
            counter.step(math.prod(plan[name].shape), name)
        if again and module is not None:
            module.join()
    return list(done.values())


def _replace(owner: nn.Module, planned: Matrix, fit: Fit) -> Matrix:
    """Replace the weight of `owner` by a packed matrix and measure it. It stays plain if its values are too small."""
    scheme = find_scheme(planned.scheme or "")
    packed, snr, error = pack_weight(owner.weight, scheme, fit, planned.name)  # type: ignore[arg-type]
    if snr < LOWEST_SNR_DB:
        return replace(planned, scheme=None, why=f"its values are too small for fp16 scales ({snr:.1f} dB)")
    del owner.weight
    owner.weight = packed
    known = error if snr == snr else math.nan  # there are no values
    return replace(planned, snr_db=snr, max_abs_error=known, now_bits=scheme.bits_per_weight)


def pack_weight(weight: Tensor | PackedMatrix, scheme: Scheme, fit: Fit, name: str) -> tuple[PackedMatrix, float, float]:
    """Pack `weight` [..., out, in] in `scheme` on its device. Returns it with its SNR in dB and largest absolute error."""
    held = weight.parts() if isinstance(weight, PackedMatrix) else {"values": weight.detach()}
    device = next(iter(held.values())).device
    packed = PackedMatrix(scheme, tuple(weight.shape), device)
    step = max(1, CHUNK_WEIGHTS // math.prod(weight.shape[1:]))
    signal, noise = torch.zeros(2, dtype=torch.float64, device=device)
    worst = torch.zeros((), device=device)
    for start in range(0, weight.shape[0], step):
        some = {part: tensor[start : start + step] for part, tensor in held.items()}
        values = dequantize(weight.scheme, some) if isinstance(weight, PackedMatrix) else some["values"].float()
        parts = fit(values, scheme, name)
        error = dequantize(scheme, parts).sub_(values)
        signal += values.square().sum(dtype=torch.float64)
        worst = torch.maximum(worst, error.abs().amax())
        noise += error.square_().sum(dtype=torch.float64)
        for part, tensor in packed.parts().items():
            tensor[start : start + step] = parts[part]
    s, n, largest = torch.stack((signal, noise, worst.double())).tolist()
    snr = 10 * math.log10(s / n) if s and n else math.inf if not n and s else math.nan
    return packed, snr, largest


def _twin(model: nn.Module) -> Any:
    """Copy the modules of a model; the copy shares its tensors, config, tokenizer and device."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) or (module is model and not name.startswith("_")):
                shared[id(value)] = value
    found = copy.deepcopy(model, shared)
    found.__dict__.pop("token_bytes", None)  # it depends on which matrices are packed
    return found


def _empty(new: nn.Module, old: nn.Module) -> None:
    """Free the tensors of `new` that `old` does not share, because a traceback may keep `new` alive."""
    shared = {id(parameter) for parameter in old.parameters()}
    for module in new.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in shared:
                setattr(module, name, nn.Parameter(torch.empty(0, dtype=parameter.dtype, device="meta"), requires_grad=False))


def _ids(model: CausalLM, prompt: object) -> list[int]:
    """Return the token ids to compare on: the prompt's, those of a fixed text, or fixed ids if there is no tokenizer."""
    if prompt is not None:
        return prompt_ids(model, prompt)
    config = model.config
    known = prompt_ids(model, TEXT) if model.tokenizer is not None else [(7919 * i + 1) % config.vocab_size for i in range(32)]
    return known[: config.max_position_embeddings]


def _cosines(old: Any, new: Any, ids: list[int]) -> tuple[float, float]:
    """Return the cosine similarity of both models' logits over the positions of a prompt: (lowest, mean)."""
    given = torch.tensor([ids], device=old.device.torch)
    similar = F.cosine_similarity(old(given).double(), new(given).double(), dim=-1)  # [1, T]
    lowest, mean = torch.stack((similar.amin(), similar.mean())).tolist()
    return lowest, mean
