"""The tokenizer inside a GGUF, built anew with the `tokenizers` package from its lists of tokens, merges and scores.

Three kinds: "gpt2" (byte-level BPE), "gemma4" (BPE on characters, with spaces as U+2581) and "llama" (SentencePiece: pieces
with scores). Each is built as the tokenizer.json of the same model is; where text is cut first, as llama.cpp cuts it for
the file's `tokenizer.ggml.pre`. Knows no model.
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
LONGEST_PIECE = 1024  # characters; merges are found by cutting a piece in every place
DO = "Load the same model as a Hugging Face folder with a tokenizer.json"


@dataclass(frozen=True)
class Cut:
    """How text is cut before merging: by `splits`, one after the other."""

    splits: tuple[str, ...]
    nfc: bool = False  # characters are composed first
    whole_words: bool = False  # a piece that is a token is taken as it is, without merging
    bos: bool = False  # a beginning token is added unless the file says otherwise


CUTS = {
    "default": Cut(_DEFAULT),
    "gpt-2": Cut((_GPT2,)),
    "qwen2": Cut((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": Cut((_QWEN2,), nfc=True),
    "qwen35": Cut((_QWEN35,), nfc=True),
    "llama-bpe": Cut((_LLAMA3,), whole_words=True, bos=True),
}


class Vocabulary:
    """The checked lists of a GGUF: `tokens`, `types`, and special ids by their short name ("bos", "eos", ...)."""

    def __init__(self, metadata: Mapping[str, Any], asked: str) -> None:
        """Raises FormatError where the lists are missing, of other things, or don't fit together."""
        self.metadata, self.asked = metadata, asked
        self.kind = metadata.get("tokenizer.ggml.model")
        self.tokens = self._list("tokens", str)
        self.types = self._list("token_type", int) or [NORMAL] * len(self.tokens)
        if not self.tokens or len(self.types) != len(self.tokens):
            raise self.wrong("its tokens or token types are missing or don't fit together")
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def texts(self, name: str) -> list[str]:
        """The texts under `name`; none where there are none."""
        return self._list(name, str)

    def scores(self) -> list[float]:
        """A score for every token. FormatError where there isn't one, or one isn't a number."""
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens) or any(math.isnan(score) for score in scores):
            raise self.wrong("its scores are missing, or some aren't numbers")
        return scores

    def flag(self, name: str, default: bool) -> bool:
        """A stated true or false. FormatError for anything else."""
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self.wrong(f"tokenizer.ggml.{name} is {value!r:.40}")
        return value

    def special(self, name: str, default: int | None = None) -> int | None:
        """The id of a special token ("bos", "eos", "eot", ...); None where the file names none of its tokens."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id", default)
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def wrong(self, found: str) -> FormatError:
        """A FormatError about this tokenizer."""
        return FormatError(self.asked, found, DO)

    def _list(self, name: str, kind: type) -> list[Any]:
        values = self.metadata.get(f"tokenizer.ggml.{name}", [])
        return values if isinstance(values, list) and all(type(value) is kind for value in values) else []


def build(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The tokenizer of `vocabulary`. FormatError for kinds and cuts that aren't known: wrong tokens would come silently."""
    if vocabulary.kind == "gpt2":
        return _byte_level(vocabulary)
    if vocabulary.kind == "gemma4":
        return _pieces(vocabulary, _merges(vocabulary), prefix=False, bos=True)
    if vocabulary.kind == "llama":
        merges = _merges(vocabulary) if vocabulary.texts("merges") else _merges_of_scores(vocabulary)
        return _pieces(vocabulary, merges, prefix=True, bos=True)
    raise vocabulary.wrong(f"its kind is {vocabulary.kind!r:.40}; 'gpt2', 'gemma4' and 'llama' are read from GGUF")


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """BPE on bytes, each written as a printable character."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in CUTS:
        raise vocabulary.wrong(f"it cuts text as {name!r:.40}; known are {', '.join(CUTS)}")
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
    """BPE on characters; spaces are U+2581, characters without a token fall back to bytes (<0x0A>).

    `prefix` and `bos`: what is added at the start unless the file says otherwise, a space and the beginning token.
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
    cuts = [merge.find(" ", 1) for merge in merges]  # a merge's first half may be a space itself
    if -1 in cuts:
        raise vocabulary.wrong(f"merge {merges[cuts.index(-1)]!r:.60} isn't two halves")
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]


def _merges_of_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges that SentencePiece makes without listing them: any two neighbours that make a piece, best score first."""
    scores = vocabulary.scores()
    pieces = {token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] == NORMAL}
    if any(len(piece) > LONGEST_PIECE for piece in pieces):
        raise vocabulary.wrong(f"it has pieces of more than {LONGEST_PIECE:,} characters")
    found = [
        (-scores[whole], pieces[piece[:cut]], pieces[piece[cut:]], piece[:cut], piece[cut:])
        for piece, whole in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _finish(inner: tokenizers.Tokenizer, vocabulary: Vocabulary, bos: bool) -> None:
    """Tokens that are matched whole in the text, and what is added at its ends."""
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
