"""Text to token ids and back, where generation ends, and how a chat is laid out. From tokenizer.json or from a GGUF.

It wraps the `tokenizers` package, which is loaded when the first tokenizer is; it knows no model.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.core.errors import FormatError, ModelError, ToolkitError
from toolkit.text import chat_templates as chat
from toolkit.text.gguf_tokenizer import CONTROLS, Vocabulary, build
from toolkit.weights.safetensors_files import read_json

if TYPE_CHECKING:
    import tokenizers

T = TypeVar("T")
SPECIALS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
NOT_READ = ("tokenizer.model", "spiece.model", "vocab.json", "tekken.json", "tiktoken.model")  # other files of tokenizers
ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<eos>", "</s>")  # of turns, texts


class Tokenizer:
    """`encode`, `decode`, `eos_ids` (tokens that end a generation), `vocab_size`, and `chat` where there is a template."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        specials: Mapping[str, str] | None = None,
    ) -> None:
        """`specials`: the texts of special tokens by name ("bos_token", "eos_token", ...), which chat templates may use."""
        self._inner, self.eos_ids, self.chat_template = inner, tuple(eos_ids), chat_template
        self.specials = dict(specials or {})
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)
        plain, whole = inner.encode("a", add_special_tokens=False).ids, inner.encode("a").ids
        before = next((k for k in range(len(whole)) if plain and whole[k : k + len(plain)] == plain), 0)
        self._front = whole[:before]  # what is put before every text

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size:,} tokens, eos_ids={self.eos_ids})"

    def encode(self, text: str, ends: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it (<|im_end|>) are recognised. ToolkitError for what isn't text.

        `ends`: with the tokens that this tokenizer puts around every text (<bos>). A text that begins with them itself, as
        chat prompts do, doesn't get them twice.
        """
        if not isinstance(text, str):
            raise ModelError(f"token ids of a {type(text).__name__}", "not a text", "Give a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"it holds half a character ({error.reason})"
            raise ModelError("token ids of a text", found, "Give valid Unicode") from error
        ids, front = list(self._inner.encode(text, add_special_tokens=ends).ids), self._front
        doubled = ends and front and ids[len(front) : 2 * len(front)] == front
        return ids[len(front) :] if doubled else ids

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of token ids. Special tokens are left out unless `special`; an unfinished character reads as U+FFFD."""
        whole = [int(i) for i in ids]
        if any(not 0 <= i < 1 << 32 for i in whole):
            raise ModelError("the text of token ids", "an id below 0 or above 32 bits", "Give ids that the model made")
        return self._inner.decode(whole, skip_special_tokens=not special)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], generate: bool = True, tools: Sequence[Any] | None = None, **options: Any
    ) -> str:
        """The prompt of a chat: `messages` are {"role": ..., "content": ...}; `generate` opens the assistant's turn.

        `tools` (JSON schemas) and `options` (enable_thinking=False) are given to the checkpoint's template, which is
        somebody else's program: it runs sandboxed, in a process of its own that may use 10 seconds and 1 GiB. Raises
        ToolkitError where there is none or it fails.
        """
        if not self.chat_template:
            raise ToolkitError("a chat prompt", "this checkpoint has no chat template", "Give a plain prompt to tk.generate")
        given = {"messages": [dict(m) for m in messages], "tools": tools, "documents": None, "add_generation_prompt": generate}
        return chat.render(self.chat_template, self.specials | given | options)

    def to_bytes(self) -> bytes:
        """Everything that makes this tokenizer, as JSON: `from_bytes` makes it again."""
        plain = {"tokenizer": json.loads(self._inner.to_str()), "eos_ids": self.eos_ids}
        return json.dumps({**plain, "chat_template": self.chat_template, "specials": self.specials}).encode()


def from_bytes(data: bytes, source: str) -> Tokenizer:
    """The tokenizer that `Tokenizer.to_bytes` wrote. FormatError, naming `source`, for anything else."""
    from tokenizers import Tokenizer as Inner

    def make() -> Tokenizer:
        plain = json.loads(data)
        inner = Inner.from_str(json.dumps(plain["tokenizer"]))
        return Tokenizer(inner, plain["eos_ids"], plain["chat_template"], plain["specials"])

    return _guarded(make, f"tokenizer of {source}")


def from_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, or None where it has no tokenizer.json. FormatError where it is damaged.

    Warns where there is a tokenizer in files that aren't read: prompts must then be token ids.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        others = [name for name in NOT_READ if (folder / name).exists()]
        if others:
            warnings.warn(_not_read(folder, others[0]), stacklevel=2)
        return None
    read_json(path, "tokenizer")
    from tokenizers import Tokenizer as Inner

    asked = f"tokenizer {path}"
    inner = _guarded(lambda: Inner.from_file(str(path)), asked)
    config = _optional(folder / "tokenizer_config.json")
    specials = _specials(config)
    return _guarded(lambda: Tokenizer(inner, _eos_ids(folder, inner, config), _template(folder, config), specials), asked)


def _not_read(folder: Path, name: str) -> str:
    return (
        f"{folder} has its tokenizer in {name}, which isn't read: the model gets none. For a tokenizer.json: "
        "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer | None:
    """The tokenizer inside a GGUF, or None where there is none. `source` names the file in errors.

    Raises FormatError for kinds of tokenizer that aren't known: cutting text in a wrong way would give wrong tokens silently.
    """
    if metadata.get("tokenizer.ggml.model") is None:
        return None
    asked = f"tokenizer in {source}"
    vocabulary = Vocabulary(metadata, asked)
    inner = _guarded(lambda: build(vocabulary), asked)
    named = {
        f"{name}_token": vocabulary.special({"unk": "unknown", "pad": "padding", "sep": "seperator"}.get(name, name))
        for name in SPECIALS
    }
    specials = {name: vocabulary.tokens[i] for name, i in named.items() if i is not None}
    ends = [vocabulary.special(name) for name in ("eos", "eot", "eom")]
    ends += [i for token in ENDS if (i := vocabulary.ids.get(token)) is not None and vocabulary.types[i] in CONTROLS]
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    return _guarded(lambda: Tokenizer(inner, dict.fromkeys(i for i in ends if i is not None), template, specials), asked)


def _guarded(make: Callable[[], T], asked: str) -> T:
    """What `make` returns; the package's own failures (panics of its native code too) become a FormatError."""
    try:
        return make()
    except (KeyboardInterrupt, SystemExit, MemoryError, ToolkitError):
        raise
    except BaseException as error:
        raise FormatError(asked, f"it can't be built ({error!s:.200})", "Get it from the checkpoint's source again") from error


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path, path.name) if path.exists() else {}


def _specials(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that tokenizer_config.json names, as texts by name ("bos_token", ...)."""
    more = config.get("extra_special_tokens")
    stated = {f"{name}_token": config.get(f"{name}_token") for name in SPECIALS} | (more if isinstance(more, dict) else {})
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in stated.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _eos_ids(folder: Path, inner: tokenizers.Tokenizer, config: Mapping[str, Any]) -> tuple[int, ...]:
    """From generation_config.json, else config.json, else the tokenizer's own eos_token: the first that says anything."""
    for name in ("generation_config.json", "config.json"):
        value = _optional(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        known = tuple(dict.fromkeys(i for i in ids if type(i) is int and i >= 0))
        if known:
            return known
    token = config.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    found = inner.token_to_id(token) if isinstance(token, str) else None
    return () if found is None else (found,)


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or a text (or a list of named ones) in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file() and path.stat().st_size < 1 << 20:
        return path.read_text(encoding="utf-8", errors="replace")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None
