"""The good checkpoints that mutants are made of, the kinds of mutants, and how each kind is loaded and judged."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.checkpoints import SHAPE, random_tensors, write_folder, write_gguf
from tests.fuzz import lies
from tests.fuzz.formats import OTHERS
from tests.fuzz.lies import Mutant

SMALL = SHAPE | {
    "vocab_size": 272, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "eos_token_id": 260,
}  # fmt: skip
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
UNREAD = {  # fields that say nothing about what a model computes: no lie in them can matter
    "transformers_version", "output_hidden_states", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder", "id2label",
    "label2id", "problem_type", "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "attention_dropout",
    "_name_or_path", "output_attentions", "output_router_logits", "router_aux_loss_coef",
}  # fmt: skip
References = Callable[[Path], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Kind:
    """A kind of mutants: `make` writes the good checkpoint, `mutants` lies about it, `given` is what is loaded.

    `reference` reads tensors as the format's own package does; what is loaded must be the same. None where none can.
    """

    name: str
    make: Callable[[Path], None]
    mutants: Callable[[Path, random.Random], Iterator[Mutant]]
    given: str = "."
    reference: References | None = None
    load: Callable[[Path], Any] | None = None  # None: `given` is a model, or the metadata of one


def tiny_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "th", "the", "Ġt", "in"])}
    inner = Tokenizer(models.BPE(vocab, [("t", "h"), ("th", "e"), ("Ġ", "t"), ("i", "n")]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    return inner


def folder(path: Path, shards: int = 1) -> None:
    write_folder(path, SMALL, random_tensors(SMALL), shards)


def with_tokenizer(path: Path) -> None:
    folder(path)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}, "chat_template": "{{ messages }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False, "extra_special_tokens": {}}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [260, 261]}))


def tokenizer_fields() -> dict[str, Any]:
    state = json.loads(tiny_tokenizer().to_str())
    vocab = state["model"]["vocab"]
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<|im_end|>", "<|im_start|>"]
    fields = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": [1] * 260 + [3, 3], "add_bos_token": True}
    fields |= {"merges": [" ".join(merge) for merge in state["model"]["merges"]], "eos_token_id": 260, "bos_token_id": 261}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()} | {"tokenizer.chat_template": "{{ messages }}"}


def gguf_file(path: Path) -> None:
    import gguf

    kinds = {list: gguf.GGUFValueType.ARRAY, str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32}
    fields = {
        k: (v, kinds[type(v)]) for k, v in tokenizer_fields().items() if type(v) in kinds and not k.endswith("token_type")
    }
    path.mkdir(parents=True)
    write_gguf(path / "m.gguf", SMALL, random_tensors(SMALL), "Q8_0", fields)


def split_gguf(path: Path) -> None:
    """The same tensors in two parts: the metadata in the first."""
    import gguf

    gguf_file(path)
    reader = gguf.GGUFReader(path / "m.gguf")
    for part in range(2):
        writer = gguf.GGUFWriter(path / f"m-{part + 1:05d}-of-00002.gguf", "qwen3")
        for name, field in reader.fields.items() if part == 0 else ():
            if not name.startswith(("GGUF.", "general.architecture")):
                inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], inner)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[part::2]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
            step()
    (path / "m.gguf").unlink()


def architecture(module: str, name: str) -> Callable[[Path], None]:
    """A small checkpoint of one of the architectures, saved as transformers would."""

    def make(path: Path) -> None:
        import importlib

        cases = importlib.import_module(f"tests.models.cases_{module}").CASES
        theirs = next(case for case in cases if case.name == name).theirs()
        path.mkdir(parents=True)
        save_file({n: t.contiguous().clone() for n, t in theirs.state_dict().items()}, path / ONE)
        values = {name: value for name, value in theirs.config.to_dict().items() if name not in UNREAD}
        (path / "config.json").write_text(json.dumps(values, default=str))

    return make


def coded(method: str) -> Callable[[Path], None]:
    """The small checkpoint with every matrix of its layers stored as `method` does."""

    def make(path: Path) -> None:
        options: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": 32, "desc_act": False}
        options |= {"version": "gemm"} if method == "awq" else {"checkpoint_format": "gptq"}
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in random_tensors(SMALL).items():
            if "proj" not in name:
                tensors[name] = tensor
                continue
            out, columns = tensor.shape
            stem, groups, scales = name.removesuffix("weight"), columns // 32, torch.rand(columns // 32, out).half()
            words = torch.randint(-(1 << 31), 1 << 31, (columns * out // 8,), dtype=torch.int64).to(torch.int32)
            zeros = torch.randint(0, 1 << 31, (groups, out // 8), dtype=torch.int64).to(torch.int32)
            if method == "hqq":
                sizes = {"shape": torch.tensor([out, columns]), "nbits": torch.tensor(4), "group_size": torch.tensor(32)}
                flags = {"axis": torch.tensor(1), "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8)}
                parts = {
                    "W_q": words.view(torch.uint8).view(-1, 32),
                    "scale": scales.reshape(-1, 1),
                    "zero": scales.reshape(-1, 1) * 8,
                }
                parts |= sizes | flags
            else:
                shape = (columns // 8, out) if method == "gptq" else (columns, out // 8)
                parts = {"qweight": words.view(shape), "qzeros": zeros, "scales": scales}
                if method == "gptq":
                    parts["g_idx"] = torch.arange(columns, dtype=torch.int32) // 32
            tensors |= {stem + leaf: part.contiguous() for leaf, part in parts.items()}
        write_folder(path, SMALL | {"quantization_config": options}, tensors)

    return make


def read(path: Path, name: str) -> bytes:
    return (path / name).read_bytes()


def safetensors_lies(path: Path, rng: random.Random) -> Iterator[Mutant]:
    raw = read(path, ONE)
    yield from lies.safetensors_mutants(ONE, raw, rng, each=5)
    yield from lies.random_mutants(ONE, raw, rng, 250, head=1400)


def sharded_lies(path: Path, rng: random.Random) -> Iterator[Mutant]:
    yield from lies.index_mutants(INDEX, json.loads(read(path, INDEX)), rng, each=4)
    yield from lies.random_mutants(INDEX, read(path, INDEX), rng, 60)
    for file in sorted(path.glob("model-*")):
        yield from lies.random_mutants(file.name, file.read_bytes(), rng, 40, head=900)


def gguf_lies(path: Path, rng: random.Random) -> Iterator[Mutant]:
    raw = read(path, "m.gguf")
    yield from lies.gguf_mutants("m.gguf", raw, rng, each=3)
    yield from lies.random_mutants("m.gguf", raw, rng, 300, head=9000)


def split_lies(path: Path, rng: random.Random) -> Iterator[Mutant]:
    names = [file.name for file in sorted(path.glob("*.gguf"))]
    files = {name: read(path, name) for name in names}
    for name in names:
        for mutant in lies.gguf_mutants(name, files[name], rng, each=10):
            if "split" in mutant.says or "count" in mutant.says:
                yield mutant
        yield Mutant(f"{name} is gone", {name: None})
        yield Mutant(f"{name} is empty", {name: b""})
        yield Mutant(f"{name} is both", dict.fromkeys(names, files[name]))
        yield from lies.random_mutants(name, files[name], rng, 40, head=2000)
    yield Mutant("parts in a circle", {names[0]: files[names[1]], names[1]: files[names[0]]})


def config_lies(each: int) -> Callable[[Path, random.Random], Iterator[Mutant]]:
    def make(path: Path, rng: random.Random) -> Iterator[Mutant]:
        yield from lies.json_mutants("config.json", json.loads(read(path, "config.json")), rng, each)
        yield from lies.random_mutants("config.json", read(path, "config.json"), rng, 40)

    return make


def tokenizer_lies(path: Path, rng: random.Random) -> Iterator[Mutant]:
    for name, only, each in (
        ("tokenizer.json", 60, 6),
        ("tokenizer_config.json", None, 20),
        ("generation_config.json", None, 20),
    ):
        document = json.loads(read(path, name))
        yield from lies.json_mutants(name, document, rng, each, only)
        yield from lies.random_mutants(name, read(path, name), rng, 30)
    document = json.loads(read(path, "tokenizer.json"))
    for key in document:  # the parts by themselves: 260 tokens hide them from a sample
        yield from lies.json_mutants("tokenizer.json", document, rng, 8, 8, top=(key,))


def metadata_lies(path: Path, rng: random.Random) -> Iterator[Mutant]:
    good = json.loads(read(path, "metadata.json"))
    spm = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [-float(i) for i in range(262)],
        "tokenizer.ggml.merges": [],
    }
    for changes in ({}, spm, {"tokenizer.ggml.model": "gemma4"}):
        document = good | changes
        for key in document:
            yield from lies.json_mutants("metadata.json", document, rng, 5, 3, top=(key,))
            for lie in rng.sample(lies.VALUES, 20):
                yield Mutant(f"{key} = {lie!r:.40}", {"metadata.json": json.dumps(document | {key: lie}).encode()})


def coded_lies(path: Path, rng: random.Random) -> Iterator[Mutant]:
    config = json.loads(read(path, "config.json"))
    yield from lies.json_mutants("config.json", config, rng, 12, top=("quantization_config",))
    raw = read(path, ONE)
    header, data = lies.safetensors_parts(raw)
    for key in [key for key in header if "q_proj" in key or "down_proj" in key]:
        shape, kind = header[key]["shape"], header[key]["dtype"]
        same = {"I32": ("F32", "U32"), "F16": ("BF16", "I16"), "U8": ("I8", "BOOL"), "I64": ("F64", "U64")}.get(kind, ())
        changed: list[dict[str, Any]] = [{"dtype": other} for other in same]
        changed += [
            {"shape": s}
            for s in (shape[::-1], [*shape, 1], [1, *shape], [torch.Size(shape).numel()], [*shape[:-1], 1, *shape[-1:]])
        ]
        for change in changed:
            yield Mutant(f"{key} {change}", {ONE: lies.safetensors_file(header | {key: header[key] | change}, data)})
        for other in rng.sample(sorted(header), 4):
            swapped = header | {key: header[other], other: header[key]}
            yield Mutant(f"{key} and {other} swapped", {ONE: lies.safetensors_file(swapped, data)})
        gone = {name: entry for name, entry in header.items() if name != key}
        yield Mutant(f"{key} renamed", {ONE: lies.safetensors_file(gone | {key + "x": header[key]}, data)})
        start, end = header[key]["data_offsets"]
        for lie in (0, 255, 128):
            torn = data[:start] + bytes([lie]) * (end - start) + data[end:]
            yield Mutant(f"{key} all {lie}", {ONE: lies.safetensors_file(header, torn)})
    yield from lies.random_mutants(ONE, raw, rng, 60, head=2500)


def metadata(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "metadata.json").write_text(json.dumps(tokenizer_fields()))


def by_safetensors(path: Path) -> dict[str, torch.Tensor]:
    index = path / INDEX
    if not index.exists():
        return load_file(path / ONE)
    homes = json.loads(index.read_text())["weight_map"]
    return {name: tensor for file in set(homes.values()) for name, tensor in load_file(path / file).items()}


def by_gguf(path: Path) -> dict[str, torch.Tensor]:
    import gguf

    found = {}
    for file in sorted(path.glob("*.gguf")):
        for tensor in gguf.GGUFReader(file).tensors:
            found[tensor.name] = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    return found


KINDS = (
    Kind("safetensors", folder, safetensors_lies, reference=by_safetensors),
    Kind("safetensors, sharded", lambda path: folder(path, 2), sharded_lies, reference=by_safetensors),
    Kind("gguf", gguf_file, gguf_lies, "m.gguf", by_gguf),
    Kind("gguf, split", split_gguf, split_lies, "m-00001-of-00002.gguf", by_gguf),
    Kind("config of qwen3", folder, config_lies(25)),
    Kind("config of gemma4", architecture("gemma4", "all_variants"), config_lies(6)),
    Kind("config of qwen3_5_moe", architecture("qwen3_5", "moe_usual"), config_lies(6)),
    Kind("tokenizer files", with_tokenizer, tokenizer_lies),
    Kind("tokenizer in gguf", metadata, metadata_lies, "metadata.json"),
    Kind("gptq", coded("gptq"), coded_lies),
    Kind("awq", coded("awq"), coded_lies),
    Kind("hqq", coded("hqq"), coded_lies),
    *(Kind(name, make, mutants, given, load=load) for name, make, mutants, given, load in OTHERS),
)


def write_good(kind: Kind, path: Path) -> None:
    """The good checkpoint of `kind` at `path`, and beside it one that no mutant may reach."""
    shutil.rmtree(path.parent, ignore_errors=True)
    kind.make(path)
    write_folder(path.parent / "other", SMALL, random_tensors(SMALL))
    (path.parent / "other" / ONE).rename(path.parent / "outside.safetensors")
