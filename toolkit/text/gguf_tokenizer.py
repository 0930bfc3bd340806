"""Build the tokenizer of a GGUF file with the `tokenizers` package from the file's tokens, merges and scores.

Three kinds are supported: "gpt2" (byte-level BPE), "gemma4" (BPE on characters, with spaces as U+2581) and "llama"
(SentencePiece: pieces with scores). Each is built like the tokenizer.json of the same model. Byte-level BPE first splits text
as llama.cpp does for the file's `tokenizer.ggml.pre`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import FormatError

if TYPE_CHECKING:
    import tokenizers

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BREAKS
_QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _BREAKS
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _BREAKS
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
CONTROLS = (2, 3)  # GGUF token types: unknown and control tokens are special
USER_DEFINED, BYTE, NORMAL = 4, 6, 1
LONGEST_PIECE = 1024  # in characters; `_merges_of_scores` splits pieces at every position
MERGED_PER_CHARACTER = 32  # characters of all implied merges per character of all pieces; a vocabulary of words has about 3
DO = "Load the same model as a Hugging Face folder with a tokenizer.json"


@dataclass(frozen=True)
class Cut:
    """A pre-tokenizer: the regular expressions `splits` are applied to the text in order, before merging."""

    splits: tuple[str, ...]
    nfc: bool = False  # normalize text to NFC first
    whole_words: bool = False  # do not merge pieces that are tokens themselves
    bos: bool = False  # add a beginning-of-text token by default


CUTS = {
    "default": Cut(_DEFAULT),
    "gpt-2": Cut((_GPT2,)),
    "qwen2": Cut((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": Cut((_QWEN2,), nfc=True),
    "qwen35": Cut((_QWEN35,), nfc=True),
    "llama-bpe": Cut((_LLAMA3,), whole_words=True, bos=True),
}


class Vocabulary:
    """The validated tokenizer metadata of a GGUF file: `tokens`, their `types`, special token ids, merges and scores."""

    def __init__(self, metadata: Mapping[str, Any], asked: str) -> None:
        """Raises FormatError if the lists of tokens and types are missing, invalid or of different lengths."""
        self.metadata, self.asked = metadata, asked
        self.kind = metadata.get("tokenizer.ggml.model")
        self.tokens = self._list("tokens", str)
        self.types = self._list("token_type", int) or [NORMAL] * len(self.tokens)
        if not self.tokens or len(self.types) != len(self.tokens):
            raise self.wrong("its lists of tokens and token types are missing or differ in length")
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def texts(self, name: str) -> list[str]:
        """Return the list of strings `name`; empty if it is missing or invalid."""
        return self._list(name, str)

    def scores(self) -> list[float]:
        """Return the scores, one per token. Raises FormatError if there is another number of them, or one is NaN."""
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens) or any(math.isnan(score) for score in scores):
            raise self.wrong("some of its scores are missing or NaN")
        return scores

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean, or `default` if it is missing. Raises FormatError for other values."""
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self.wrong(f"tokenizer.ggml.{name} is {value!r:.40}, not a boolean")
        return value

    def special(self, name: str, default: int | None = None) -> int | None:
        """Return the id of a special token ("bos", "eos", "eot", ...), or None if it is missing or out of range."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id", default)
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def wrong(self, found: str) -> FormatError:
        """Return a FormatError about this tokenizer."""
        return FormatError(self.asked, found, DO)

    def _list(self, name: str, kind: type) -> list[Any]:
        values = self.metadata.get(f"tokenizer.ggml.{name}", [])
        return values if isinstance(values, list) and all(type(value) is kind for value in values) else []


def build(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Return the tokenizer of `vocabulary`. Raises FormatError for unknown kinds of tokenizer or pre-tokenizer."""
    if vocabulary.kind == "gpt2":
        return _byte_level(vocabulary)
    if vocabulary.kind == "gemma4":
        return _pieces(vocabulary, _merges(vocabulary), prefix=False, bos=True)
    if vocabulary.kind == "llama":
        merges = _merges(vocabulary) if vocabulary.texts("merges") else _merges_of_scores(vocabulary)
        return _pieces(vocabulary, merges, prefix=True, bos=True)
    raise vocabulary.wrong(f"its kind is {vocabulary.kind!r:.40}; 'gpt2', 'gemma4' and 'llama' are supported")


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer on bytes, each of which is represented by a printable character."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in CUTS:
        raise vocabulary.wrong(f"its pre-tokenizer is {name!r:.40}; supported are {', '.join(CUTS)}")
    cut = CUTS[name]
    inner = Tokenizer(models.BPE(vocabulary.ids, _merges(vocabulary), ignore_merges=cut.whole_words))
    inner.normalizer = normalizers.NFC() if cut.nfc else None
    splits = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in cut.splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    inner.decoder = decoders.ByteLevel()
    _finish(inner, vocabulary, vocabulary.flag("add_bos_token", cut.bos))
    return inner


def _pieces(vocabulary: Vocabulary, merges: list[tuple[str, str]], prefix: bool, bos: bool) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer on characters. Spaces become U+2581; characters without a token fall back to bytes (<0x0A>).

    `prefix` and `bos`: whether to add a space and a beginning-of-text token at the start, unless the file has its own settings.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    prefix = vocabulary.flag("add_space_prefix", prefix)
    unknown = vocabulary.special("unknown", 0 if vocabulary.types[0] in CONTROLS else None)
    inner = Tokenizer(
        models.BPE(
            vocabulary.ids,
            merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    _finish(inner, vocabulary, vocabulary.flag("add_bos_token", bos))
    return inner


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    merges = vocabulary.texts("merges")
    if not merges:
        raise vocabulary.wrong("its merges are missing")
    cuts = [merge.find(" ", 1) for merge in merges]  # the first half may itself be a space
    if -1 in cuts:
        raise vocabulary.wrong(f"merge {merges[cuts.index(-1)]!r:.60} does not have two parts")
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def _merges_of_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece implies: all pairs of pieces that form another piece, best score first."""
    scores = vocabulary.scores()
    pieces = {token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] == NORMAL}
    if any(len(piece) > LONGEST_PIECE for piece in pieces):
        raise vocabulary.wrong(f"it has pieces of more than {LONGEST_PIECE:,} characters")
    found, left = [], MERGED_PER_CHARACTER * (1024 + sum(map(len, pieces)))
    for piece, whole in pieces.items():
        for cut in range(1, len(piece)):
            first, second = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if first is not None and second is not None:
                found.append((-scores[whole], first, second))
                left -= len(piece)
        if left < 0:
            raise vocabulary.wrong(f"its merges have more than {MERGED_PER_CHARACTER} times the characters of its pieces")
    return [(vocabulary.tokens[first], vocabulary.tokens[second]) for _, first, second in sorted(found)]


def _finish(inner: tokenizers.Tokenizer, vocabulary: Vocabulary, bos: bool) -> None:
    """Add the tokens that are matched as a whole, and those to put at the beginning and end of a text."""
    from tokenizers import AddedToken, processors

    both = zip(vocabulary.tokens, vocabulary.types, strict=True)
    special = [(token, kind in CONTROLS) for token, kind in both if token and kind in (*CONTROLS, USER_DEFINED)]
    inner.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in special])
    spm = vocabulary.kind == "llama"
    first = vocabulary.special("bos", 1 if spm else None) if bos else None
    last = vocabulary.special("eos", 2 if spm else None) if vocabulary.flag("add_eos_token", False) else None
    before, after = ([] if i is None else [vocabulary.tokens[i]] for i in (first, last))
    ends = [(token, inner.token_to_id(token)) for token in dict.fromkeys(before + after)]
    inner.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ends)
