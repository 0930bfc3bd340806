"""Text to token ids and back, where generation ends, and how a chat is laid out. From tokenizer.json or from a GGUF.

It wraps the `tokenizers` package, which is loaded when the first tokenizer is; it knows no model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import FormatError, ModelError, ToolkitError
from toolkit.formats.safetensors import read_json

if TYPE_CHECKING:
    import tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"gpt-2": _GPT2, "qwen2": _QWEN2}  # by GGUF's tokenizer.ggml.pre: how text is cut before merging
_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types that are matched whole in the text
_CHAT_SECONDS, _CHAT_BYTES = 10.0, 1 << 30


class Tokenizer:
    """`encode`, `decode`, `eos_ids` (tokens that end a generation), `vocab_size`, and `chat` where there is a template."""

    def __init__(self, inner: tokenizers.Tokenizer, eos_ids: Iterable[int] = (), chat_template: str | None = None) -> None:
        self._inner, self.eos_ids, self.chat_template = inner, tuple(eos_ids), chat_template
        self.vocab_size = inner.get_vocab_size(with_added_tokens=True)

    def __repr__(self) -> str:
        return f"Tokenizer({self.vocab_size:,} tokens, eos_ids={self.eos_ids})"

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written in it (<|im_end|>) are recognised. ToolkitError for what isn't text."""
        if not isinstance(text, str):
            raise ModelError(f"token ids of a {type(text).__name__}", "not a text", "Give a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"it holds half a character ({error.reason})"
            raise ModelError("token ids of a text", found, "Give valid Unicode") from error
        return list(self._inner.encode(text).ids)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of token ids. Special tokens are left out unless `special`; an unfinished character reads as U+FFFD."""
        whole = [int(i) for i in ids]
        if any(not 0 <= i < 1 << 32 for i in whole):
            raise ModelError("the text of token ids", "an id below 0 or above 32 bits", "Give ids that the model made")
        return self._inner.decode(whole, skip_special_tokens=not special)

    def chat(self, messages: Sequence[Mapping[str, str]], generate: bool = True) -> str:
        """The prompt of a chat: `messages` are {"role": ..., "content": ...}; `generate` opens the assistant's turn.

        The checkpoint's template is somebody else's program: it runs sandboxed, in a process of its own that may use
        10 seconds and 1 GiB. Raises ToolkitError where there is none or it fails.
        """
        if not self.chat_template:
            raise ToolkitError("a chat prompt", "this checkpoint has no chat template", "Give a plain prompt to tk.generate")
        return _render(self.chat_template, {"messages": [dict(m) for m in messages], "add_generation_prompt": generate})


def from_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, or None where it has no tokenizer.json. FormatError where it is damaged."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    read_json(path, "tokenizer")
    from tokenizers import Tokenizer as Inner

    inner = _guarded(lambda: Inner.from_file(str(path)), f"tokenizer {path}")
    config = _optional(folder / "tokenizer_config.json")
    return Tokenizer(inner, _eos_ids(folder, inner, config), _template(folder, config))


def from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer | None:
    """The tokenizer inside a GGUF (byte-level BPE), or None where there is none. `source` names the file in errors.

    Raises FormatError for other kinds of tokenizer: cutting text in a wrong way would give wrong tokens silently.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None:
        return None
    asked, pre = f"tokenizer in {source}", metadata.get("tokenizer.ggml.pre", "gpt-2")
    do = "Load the same model as a Hugging Face folder with a tokenizer.json"
    if kind != "gpt2":
        raise FormatError(asked, f"its kind is {kind!r:.40}; byte-level BPE ('gpt2') is what is read from GGUF", do)
    if not isinstance(pre, str) or pre not in SPLITS:
        raise FormatError(asked, f"it cuts text as {pre!r:.40}; known are {', '.join(SPLITS)}", do)
    tokens, merges = _texts(metadata.get("tokenizer.ggml.tokens")), _texts(metadata.get("tokenizer.ggml.merges"))
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not tokens or not merges or not isinstance(types, list) or len(types) != len(tokens):
        raise FormatError(asked, "its tokens, merges or token types are missing or don't fit together", do)
    inner = _guarded(lambda: _bpe(tokens, merges, types, SPLITS[pre]), asked)
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    ids = [i for i in (eos, metadata.get("tokenizer.ggml.eot_token_id")) if type(i) is int and 0 <= i < len(tokens)]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(inner, dict.fromkeys(ids), template if isinstance(template, str) else None)


def _bpe(tokens: list[str], merges: list[str], types: list[int], split: str) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    special = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    inner.normalizer = normalizers.NFC() if split == _QWEN2 else None
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in special])
    return inner


def _texts(values: Any) -> list[str]:
    """`values` where they are a list of texts, else none."""
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []


def _guarded(build: Callable[[], tokenizers.Tokenizer], asked: str) -> tokenizers.Tokenizer:
    """What `build` returns; the package's own failures (panics of its native code too) become a FormatError."""
    try:
        return build()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise FormatError(asked, f"it can't be built ({error!s:.200})", "Get it from the checkpoint's source again") from error


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path, path.name) if path.exists() else {}


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


_RENDER = f"""
import datetime, json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({_CHAT_BYTES}, {_CHAT_BYTES}))
except ImportError:
    pass
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
def refuse(message):
    raise TemplateError(message)
given = json.load(sys.stdin)
try:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    answer = dict(text=environment.from_string(given["template"]).render(**given["values"]))
except MemoryError:
    answer = dict(error="it needs more than 1 GiB")
except Exception as error:
    answer = dict(error=f"{{type(error).__name__}}: {{error!s:.300}}")
json.dump(answer, sys.stdout)
"""


def _render(template: str, values: Mapping[str, Any]) -> str:
    """`template` rendered with `values` in a process of its own, bounded in time and memory."""
    asked, do = "a chat prompt", "Check the messages against the model card, or give a plain prompt"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _RENDER],
            input=json.dumps({"template": template, "values": values}),
            capture_output=True,
            encoding="utf-8",
            timeout=_CHAT_SECONDS,
            cwd=tempfile.gettempdir(),
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise ToolkitError(asked, f"the chat template ran for {_CHAT_SECONDS:.0f} s", do) from error
    except (TypeError, ValueError) as error:
        raise ToolkitError(asked, f"the chat template or its messages can't be rendered ({error!s:.200})", do) from error
    if "error" in answer:
        raise ToolkitError(asked, f"the chat template fails ({answer['error']})", do)
    return str(answer["text"])
