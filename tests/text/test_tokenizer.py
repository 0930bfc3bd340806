"""Tests of tokenizers from tokenizer.json and GGUF (same ids as transformers) and of the sandbox of chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

import toolkit
from tests.checkpoints import SHAPE, random_tensors, write_gguf
from toolkit.core.errors import FormatError, ModelError, ToolkitError
from toolkit.text import tokenizer as tokenizers
from toolkit.text.tokenizer import Tokenizer
from toolkit.weights.gguf_files import GgufFile

DEMO = Path(toolkit.__file__).parent / "demo" / "qwen3"
TEXTS = [
    "The capital of France is Paris.", "", " ", "  two  spaces \n\n and lines\r\n", "Reykjavík, Bogotá 🐶🐱", "don't WE'LL 12",
    "<|im_start|>user\nHi!<|im_end|>\n", "<|im_start", "x" * 2000, "e\u0301 \u00e9 \u200b \ufeff", "日本語 العربية עברית",
]  # fmt: skip


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    found = tokenizers.from_folder(DEMO)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def hugging_face() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


def gguf_fields(**changes: Any) -> dict[str, Any]:
    """Return the demo tokenizer as GGUF metadata, converted by the rules of llama.cpp's converter."""
    content = json.loads((DEMO / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"] | {t["content"]: t["id"] for t in content["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    control = {t["content"] for t in content["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in control else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": vocabulary["<|im_end|>"],
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    return values | changes


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:12]))
def test_ids_are_those_of_transformers_and_come_back(demo: Tokenizer, hugging_face: Any, text: str) -> None:
    ids = demo.encode(text)
    assert ids == hugging_face(text)["input_ids"]
    assert demo.decode(ids) == hugging_face.decode(ids, skip_special_tokens=True)
    assert demo.decode(ids, special=True) == hugging_face.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_the_tokenizer_in_a_gguf_is_the_same_one(text: str) -> None:
    folder, inside = tokenizers.from_folder(DEMO), tokenizers.from_gguf(gguf_fields(), "x.gguf")
    assert folder is not None
    assert inside is not None
    ids = inside.encode(text)
    assert ids == folder.encode(text)
    assert inside.decode(ids, special=True) == folder.decode(ids, special=True)


def test_a_gguf_file_with_its_tokenizer(tmp_path: Path, demo: Tokenizer) -> None:
    kinds = {list: gguf.GGUFValueType.ARRAY, str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32}
    fields = {key: value for key, value in gguf_fields().items() if key != "tokenizer.ggml.token_type"}
    config = SHAPE | {"vocab_size": demo.vocab_size}
    typed = {key: (value, kinds[type(value)]) for key, value in fields.items()}
    write_gguf(tmp_path / "x.gguf", config, random_tensors(config), tokenizer=typed)
    inside = tokenizers.from_gguf(GgufFile(tmp_path / "x.gguf").metadata, "x.gguf")
    assert inside is not None
    assert inside.encode(TEXTS[0]) == demo.encode(TEXTS[0])
    assert inside.eos_ids == (demo.encode("<|im_end|>")[0],), "control tokens aren't known without their types"
    assert inside.vocab_size == demo.vocab_size


BAD_GGUF: dict[str, tuple[dict[str, Any], str]] = {
    "WordPiece": ({"tokenizer.ggml.model": "bert"}, "'bert'"),
    "unknown cut": ({"tokenizer.ggml.pre": "poro-chat"}, "poro-chat"),
    "kind a number": ({"tokenizer.ggml.model": 5}, "5"),
    "cut a list": ({"tokenizer.ggml.pre": ["qwen2"]}, "qwen2"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "missing"),
    "no merges": ({"tokenizer.ggml.merges": []}, "missing"),
    "tokens of numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "missing"),
    "a beginning that is no flag": ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token"),
    "SentencePiece without scores": ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": []}, "scores"),
    "merge of one half": ({"tokenizer.ggml.merges": ["ab"]}, "does not have two parts"),
    "types too few": ({"tokenizer.ggml.token_type": [1]}, "differ in length"),
    "merge of nothing": ({"tokenizer.ggml.merges": ["a b", "zzz yyy"]}, "can't be built"),
}


@pytest.mark.parametrize(("changes", "says"), BAD_GGUF.values(), ids=BAD_GGUF)
def test_gguf_tokenizers_that_would_cut_wrong_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(FormatError, match=r"x\.gguf") as caught:
        tokenizers.from_gguf(gguf_fields(**changes), "x.gguf")
    assert says in caught.value.found


def test_a_gguf_without_a_tokenizer_has_none() -> None:
    assert tokenizers.from_gguf({"general.architecture": "qwen3"}, "x.gguf") is None


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"{}", b'{"model": {"type": "BPE"}}', b"\xff", b"[" * 99_999], ids=repr)
def test_damaged_tokenizer_files_are_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(raw)
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        tokenizers.from_folder(tmp_path)


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
UNTYPED = {key: value for key, value in DOUBLE.items() if key != "type"}
INSERT = {"type": "Replace", "pattern": {"Regex": "(?=a)|"}, "content": "aa"}
TEMPLATE = {
    "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 1000, "pair": [],
    "special_tokens": {"a": {"id": "a", "ids": [0] * 1000, "tokens": ["a"] * 1000}},
}  # fmt: skip
BOMBS: dict[str, dict[str, Any]] = {
    "normalizer": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 60}},
    "without types": {"normalizer": {"normalizers": [UNTYPED] * 60}},
    "nested": {"normalizer": {"normalizers": [{"normalizers": [DOUBLE] * 30}] * 2}},
    "empty matches": {"normalizer": {"type": "Sequence", "normalizers": [INSERT] * 30}},
    "bytes of bytes": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 60}},
    "pre-tokenizer": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}] * 40,
        }
    },
    "special tokens": {"post_processor": TEMPLATE},
    "decoder": {"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 60}},
}


@pytest.mark.parametrize("changes", BOMBS.values(), ids=BOMBS)
def test_tokenizers_that_would_fill_the_memory_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads((DEMO / "tokenizer.json").read_text()) | changes))
    with pytest.raises(FormatError, match="more than 1,000 times as long"):
        tokenizers.from_folder(tmp_path)


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert tokenizers.from_folder(tmp_path) is None


EOS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "generation config first": ({"generation_config": [5, 6], "config": 7}, (5, 6)),
    "then the config": ({"generation_config": None, "config": 7}, (7,)),
    "then its text part": ({"generation_config": None, "config": None, "text_config": 8}, (8,)),
    "then the tokenizer": ({"generation_config": None, "config": None}, (767,)),
    "nonsense is passed over": ({"generation_config": ["a", -1, True], "config": "b"}, (767,)),
    "each once": ({"generation_config": [5, 5], "config": None}, (5,)),
}


@pytest.mark.parametrize(("stated", "ids"), EOS.values(), ids=EOS)
def test_where_generation_ends(tmp_path: Path, stated: dict[str, Any], ids: tuple[int, ...]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    stated = {name: {"eos_token_id": value} for name, value in stated.items()}
    stated["config"]["text_config"] = stated.pop("text_config", None)
    for name, value in stated.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    found = tokenizers.from_folder(tmp_path)
    assert found is not None
    assert found.eos_ids == ids


def test_what_is_no_text_and_no_ids(demo: Tokenizer) -> None:
    with pytest.raises(ModelError, match="surrogate"):
        demo.encode("\ud83d")
    with pytest.raises(ModelError, match="not a string"):
        demo.encode(b"bytes")  # type: ignore[arg-type]
    for ids in ([-1], [1 << 32], [1.5], ["1"], "12", [True], [[1]], 3, None, torch.tensor(3), torch.tensor([[1, 2]])):
        with pytest.raises(ModelError, match=r"are not whole numbers from 0 to 2\*\*32 - 1"):
            demo.decode(ids)
    assert demo.decode(torch.tensor([36, 37])) == demo.decode(np.array([36, 37])) == demo.decode((36, 37))
    assert demo.decode([70_000]) == ""


def test_a_tokenizer_that_fails_says_so() -> None:
    unknown = Tokenizer(Inner(models.WordLevel({"a": 0}, unk_token="missing")))
    assert unknown.encode("a") == [0]
    with pytest.raises(FormatError, match=r"^token ids of a text: the tokenizer of this model fails \(.*UNK"):
        unknown.encode("b")
    inner = Inner(models.WordLevel({"a": 0}, unk_token="a"))
    inner.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])  # panics on a text that is empty
    stripped = Tokenizer(inner)
    assert stripped.decode([0]) == "a"
    with pytest.raises(FormatError, match=r"^the text of token ids: the tokenizer of this model fails"):
        stripped.decode([])


CHATS = {
    "one turn": [{"role": "user", "content": "What is 2 + 2?"}],
    "system and turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi 🐶 {{ 7 * 7 }}"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ],
}


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_chats_are_laid_out_as_transformers_does(demo: Tokenizer, hugging_face: Any, messages: Any, generate: bool) -> None:
    expected = hugging_face.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
    assert demo.chat(messages, generate) == expected


TEMPLATES = {
    "in the style of Qwen3": (
        "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}"
        "{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}"
        "{%- set ns = namespace(last=messages|length - 1) %}"
        "{%- for message in messages[::-1] %}{%- if message.role == 'user' and message.content is string %}"
        "{%- set ns.last = messages|length - 1 - loop.index0 %}{%- break %}{%- endif %}{%- endfor %}"
        "{%- for message in messages %}{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}"
        "{{- '<|im_start|>' + message.role + '\\n' }}"
        "{{- (content if loop.index0 < ns.last else message.content) + '<|im_end|>\\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
        "{%- endif %}"
    ),
    "in the style of Gemma": (
        "{{ bos_token }}{%- macro text(parts) -%}{%- if parts is string -%}{{ parts | trim }}{%- else -%}"
        "{%- for part in parts if part.type == 'text' -%}{{ part['text'] | trim }}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
        "{%- if messages[0]['role'] not in ['user', 'system'] -%}{{ raise_exception('a user speaks first') }}{%- endif -%}"
        "{%- for message in messages -%}{%- set role = 'model' if message.role == 'assistant' else message.role -%}"
        "{{ '<start_of_turn>' ~ role ~ '\\n' ~ text(message.content) ~ '<end_of_turn>\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- if not enable_thinking | default(true) -%}"
        "{{ 'now' }}{%- endif -%}{%- endif -%}"
    ),
    "with a part that training looks at": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    ),
}
TOOL = {
    "type": "function",
    "function": {"name": "größe", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
TURNS = [
    {"role": "user", "content": " What is 2 + 2? "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour."},
    {"role": "user", "content": "And <b>3</b>?"},
]


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}, {"enable_thinking": False}, {"generate": False}], ids=str)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_real_templates_get_what_they_ask_for(tmp_path: Path, template: str, options: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<|endoftext|>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(template)
    ours = tokenizers.from_folder(tmp_path)
    assert ours is not None
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    given = {"add_generation_prompt": options.get("generate", True)} | {k: v for k, v in options.items() if k != "generate"}
    assert ours.chat(TURNS, **options) == theirs.apply_chat_template(TURNS, tokenize=False, **given)


@pytest.mark.parametrize("where", ["list", "folder", "both"])
def test_a_template_for_tools_is_used_with_tools(tmp_path: Path, where: str) -> None:
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    plain, for_tools = "plain {{ messages[0].content }}", "{{ tools | tojson }} {{ messages[0].content }}"
    if where != "folder":
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        config["chat_template"] = [{"name": "default", "template": plain}, {"name": "tool_use", "template": for_tools}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if where != "list":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text(f"file {plain}")
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(f"file {for_tools}")
    ours, theirs = tokenizers.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    for tokenizer in (ours, tokenizers.from_bytes(ours.to_bytes(), "a package")):
        for tools in (None, [TOOL], []):
            said = theirs.apply_chat_template(TURNS, tokenize=False, tools=tools)
            assert tokenizer.chat(TURNS, tools=tools) == said
            assert ("plain" in said) == (tools is None)


def test_a_template_for_tools_in_a_gguf_file() -> None:
    inside = tokenizers.from_gguf(gguf_fields(**{"tokenizer.chat_template.tool_use": "{{ tools[0] }}"}), "x.gguf")
    assert inside is not None
    turns = [{"role": "user", "content": "Hi"}]
    assert (inside.chat(turns), inside.chat(turns, tools=["a tool"])) == ("Hi", "a tool")
    none = tokenizers.from_gguf(gguf_fields(), "x.gguf")
    assert none is not None
    assert none.chat(turns, tools=["a tool"]) == "Hi"


@pytest.mark.parametrize("content", [[{"type": "image"}, {"type": "text", "text": " Hi "}], "Hi"], ids=["in parts", "a text"])
def test_messages_in_parts(demo: Tokenizer, content: Any) -> None:
    boxed = Tokenizer(demo._inner, (), TEMPLATES["in the style of Gemma"], {"bos_token": "<bos>"})
    said = boxed.chat([{"role": "user", "content": content}])
    assert said == "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    with pytest.raises(ToolkitError, match="a user speaks first"):
        boxed.chat([{"role": "assistant", "content": "Hi"}])


@pytest.mark.parametrize("flag", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
@pytest.mark.parametrize("written", [True, False], ids=["tokenizer.json adds one and cuts", "tokenizer.json adds none"])
def test_what_is_put_around_a_text(tmp_path: Path, flag: dict[str, bool], written: bool) -> None:
    from transformers import AutoTokenizer

    content = json.loads((DEMO / "tokenizer.json").read_text())
    if written:
        parts = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        start = content["added_tokens"][0]
        special = {start["content"]: {"id": start["content"], "ids": [start["id"]], "tokens": [start["content"]]}}
        content["post_processor"] = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}
        content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
        padding = {
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }
        content["padding"] = padding | {"strategy": {"Fixed": 64}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"} | flag
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = tokenizers.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, ends=False) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode("<|endoftext|>Hi") == ours.encode("<|endoftext|>Hi", ends=False), "never twice"


@pytest.mark.parametrize("flags", [{"special": True}, {"special": False, "normalized": True, "lstrip": True}], ids=str)
def test_tokens_that_only_the_config_adds(tmp_path: Path, flags: dict[str, bool]) -> None:
    from transformers import AutoTokenizer

    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    path, size = tmp_path / "tokenizer_config.json", 768
    rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = {str(size + i): {**rest, **flags, "content": text} for i, text in enumerate(["<tool>", "</tool>"])}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": added}))
    ours, theirs = tokenizers.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    assert ours.vocab_size == size + 2
    ids = ours.encode("Call <tool>x</tool>, please")
    assert ids == theirs("Call <tool>x</tool>, please")["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    path.write_text(json.dumps({"added_tokens_decoder": {"770": added["768"]}}))
    with pytest.warns(UserWarning, match=r"the id 770, which is not the next free one\. It has the id 768"):
        tokenizers.from_folder(tmp_path)
    path.write_text(json.dumps({"added_tokens_decoder": {"x": 1}}))
    with pytest.raises(FormatError, match="can't be built"):
        tokenizers.from_folder(tmp_path)


@pytest.mark.parametrize("place", ["added, not special", "in the vocabulary"])
@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<|im_end|>"},
        {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": True, "rstrip": True}},
        {"bos_token": "<|endoftext|>", "additional_special_tokens": ["<|im_end|>"]},
        {"extra_special_tokens": {"turn_token": "<|im_end|>"}},
        {"split_special_tokens": True, "eos_token": "<|im_end|>"},
    ],
    ids=str,
)
def test_special_tokens_that_only_the_config_names(tmp_path: Path, config: dict[str, Any], place: str) -> None:
    from transformers import AutoTokenizer

    content = json.loads((DEMO / "tokenizer.json").read_text())
    end = next(token for token in content["added_tokens"] if token["content"] == "<|im_end|>")
    end["special"] = False
    if place == "in the vocabulary":
        content["added_tokens"].remove(end)
        content["model"]["vocab"]["<|im_end|>"] = end["id"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config))
    ours, theirs = tokenizers.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    for tokenizer in (ours, tokenizers.from_bytes(ours.to_bytes(), "a package")):
        for text in ("Hi <|im_end|> x", "<|im_start|>user<|im_end|>"):
            assert tokenizer.encode(text) == theirs(text)["input_ids"]
        assert tokenizer.decode([39, end["id"]]) == theirs.decode([39, end["id"]], skip_special_tokens=True)


def test_special_tokens_without_an_id_are_left_out(tmp_path: Path) -> None:
    """The model may have no embedding for them."""
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    odd = {"pad_token": "[PAD]", "extra_special_tokens": ["<new>", None, {}, 5], "eos_token": {"content": None}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(odd))
    ours = tokenizers.from_folder(tmp_path)
    assert ours is not None
    assert ours.vocab_size == 768


BAD_TEMPLATES = {
    "syntax": ("{% for %}", "TemplateSyntaxError"),
    "escape by attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "escape by globals": ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
    "changes its input": ("{{ messages.append(1) }}", "SecurityError"),
    "refuses by itself": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "a range too long": ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    "memory": ("{{ 'x' * 10**10 }}", "1 GiB"),
    "memory, doubling": (
        "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s * 8 %}{% endfor %}",
        "1 GiB",
    ),
    "memory, of the text as JSON": ("{{ '{:\1>268435456}'.format(1) }}", "1 GiB"),
    "includes a file": ("{% include '/etc/passwd' %}", "no loader"),
}


@pytest.mark.parametrize(("template", "says"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES)
def test_templates_stay_in_their_box(demo: Tokenizer, template: str, says: str) -> None:
    boxed = Tokenizer(demo._inner, (), template)
    with pytest.raises(ToolkitError) as caught:
        boxed.chat([{"role": "user", "content": "Hi"}])
    assert says in str(caught.value)


def test_template_files_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_bytes(bytes(2 << 20))
    with pytest.raises(FormatError, match=r"^chat template .*chat_template\.jinja: it is larger than"):
        tokenizers.from_folder(tmp_path)
    if (unreadable := Path("/proc/self/mem")).exists():  # on Linux, a regular file that can be opened and not read
        template.unlink()
        template.symlink_to(unreadable)
        with pytest.raises(FormatError, match=r"^chat template .*chat_template\.jinja: it can't be read"):
            tokenizers.from_folder(tmp_path)


def test_a_template_that_never_ends_is_stopped(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.text.chat_templates.SECONDS", 1.0)
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(ToolkitError, match="ran for 1 s"):
        Tokenizer(demo._inner, (), loops).chat([])


def test_chat_without_a_template_or_with_messages_that_are_none(demo: Tokenizer) -> None:
    with pytest.raises(ToolkitError, match="no chat template"):
        Tokenizer(demo._inner).chat([])
    with pytest.raises(ToolkitError, match="messages"):
        demo.chat([{"role": "user", "content": object()}])  # type: ignore[dict-item]


@pytest.mark.parametrize("messages", [None, 5, "text", [5], ["text"], [[("role", "user")]]], ids=str)
def test_messages_that_are_no_mappings(demo: Tokenizer, messages: Any) -> None:
    with pytest.raises(ToolkitError, match="not mappings"):
        demo.chat(messages)


def test_messages_that_are_nested_too_deeply(demo: Tokenizer) -> None:
    content: Any = []
    for _ in range(100_000):
        content = [content]
    with pytest.raises(ToolkitError, match="can't be rendered"):
        demo.chat([{"role": "user", "content": content}])
