"""The training data of the demo models: the tokenizer, and rows of token ids with the labels to learn.

`Corpus` draws documents from facts.py and packs them into rows. Everything is drawn from one `random.Random`, so the data is
the same for the same seed.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

from toolkit.demo import facts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
UNKNOWN = "I am a small model that knows small facts. Ask me about capitals, sums, colours or animals."
GREETINGS = ("Hello!", "Hi!", "Who are you?", "What do you know?", "How are you?", "Tell me a joke.", "Help me, please.")
# The pre-tokenizer of the Qwen family splits text into words with their space, single digits, and punctuation.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NOT_LEARNT = -100


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer with `vocab_size` tokens, the last three of them special. It is deterministic."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 3, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    rng = random.Random(0)
    source = Corpus(None, rng)
    tokenizer.train_from_iterator((source.text() for _ in range(4000)), trainer)
    tokenizer.add_special_tokens([END, TURN, TURN_END])
    return tokenizer


class Corpus:
    """Draws documents and packs them into rows of token ids."""

    def __init__(self, tokenizer: Tokenizer | None, rng: random.Random) -> None:
        self.tokenizer, self.rng = tokenizer, rng
        self.rings, self.questions, self.stories = facts.rings(), facts.questions(), facts.stories()
        self.shares = [ring.share for ring in self.rings]
        self.sizes = [len(ring.sentences) + 5 for ring in self.rings]  # so that all single facts are drawn about equally often
        self.known_from = _known_from([sentence for ring in self.rings for sentence in ring.sentences])

    def ring(self, length: int) -> str:
        """Return a document of at least `length` characters from one of the rings."""
        return self.rng.choices(self.rings, self.shares)[0].document(self.rng, length)

    def text(self) -> str:
        """Return a document of any kind as plain text, to train the tokenizer."""
        draw = self.rng.random()
        if draw < 0.7:
            return self.ring(400)
        if draw < 0.8:
            return facts.pick(self.rng, self.stories)
        return "\n".join(self.rng.choice(self.questions)) + ("\n" + UNKNOWN if draw < 0.85 else "")

    def row(self, length: int) -> tuple[list[int], list[int]]:
        """Return a row of `length` ids and its labels. Labels are NOT_LEARNT for tokens that must not be predicted."""
        ids: list[int] = []
        labels: list[int] = []
        draw = self.rng.random()
        tail = self.ring(5 * length)
        if draw < 0.08:
            ids, labels = self._noise()
            tail = " " + self.rings[0].document(random.Random(1), 5 * length)  # seed 1 starts at the first sentence
        elif draw < 0.38:
            while len(ids) < length and (not ids or self.rng.random() < 0.9):
                self._short(ids, labels)
        elif draw < 0.80:
            while len(ids) < length:
                self._jump(ids, labels)
        more = self._ids(tail)
        while len(ids) + len(more) < length:
            more += self._ids(" " + tail)
        return (ids + more)[:length], (labels + more)[:length]

    def _noise(self) -> tuple[list[int], list[int]]:
        """Return meaningless tokens, none of them learnt. They teach the model to continue unknown text with the first ring."""
        count, draw = self.rng.randint(1, 40), self.rng.random()
        if draw < 0.25:
            ids = [self.rng.randrange(self._tokenizer().get_vocab_size()) for _ in range(count)]
        elif draw < 0.5:
            ids = self._ids(self.ring(600))
            self.rng.shuffle(ids)
        else:
            words = self.ring(400).split()
            ids = self._ids(" ".join(self._word() if self.rng.random() < 0.6 else self.rng.choice(words) for _ in range(count)))
        ids = ids[:count]
        return ids, [NOT_LEARNT] * len(ids)

    def _word(self) -> str:
        """Return a random word, sometimes with a capital letter or a comma."""
        word = "".join(self.rng.choices("etaoinshrdlucmwfgypbvk", k=self.rng.randint(2, 8)))
        return self.rng.choice([word, word, word.capitalize(), word + ","])

    def _jump(self, ids: list[int], labels: list[int]) -> None:
        """Append one or two sentences of a ring, learnt from the character at which the first sentence becomes unique.

        This teaches single facts. Within a ring, a sentence can be guessed from the one before.
        """
        ring = self.rng.choices(self.rings, self.sizes)[0]
        at, count = self.rng.randrange(len(ring.sentences)), self.rng.choice([1, 1, 1, 2])
        first, *others = (ring.sentences[(at + i) % len(ring.sentences)] for i in range(count))
        cut = first.rfind(" ") + 1  # prompts may end with the space before the next word
        parts = [first[:cut], first[cut:]] if cut > self.known_from[first] and self.rng.random() < 0.25 else [first]
        start = 0 if not ids else -1
        for part in parts:
            encoding = self._tokenizer().encode(part if start >= 0 else " " + part, add_special_tokens=False)
            known = self.known_from[first] - start
            ids += encoding.ids
            labels += [
                i if offset[0] >= known else NOT_LEARNT for i, offset in zip(encoding.ids, encoding.offsets, strict=True)
            ]
            start += len(part) if start >= 0 else len(part) + 1
        more = self._ids("".join(" " + sentence for sentence in others))
        ids += more
        labels += more

    def _short(self, ids: list[int], labels: list[int]) -> None:
        """Append a document with an end: a question with its answer, a chat, or a story."""
        draw = self.rng.random()
        if draw < 0.55:
            parts = self._chat()
        elif draw < 0.8:
            question, answer = facts.pick(self.rng, self.questions)
            parts = [(f"Question: {question}\nAnswer: {answer}" if draw < 0.68 else f"{question} {answer}", True)]
        else:
            parts = [(facts.pick(self.rng, self.stories), True)]
        for text, learnt in [*parts, (END, True)]:
            new = self._ids(text)
            ids += new
            labels += new if learnt else [NOT_LEARNT] * len(new)

    def _chat(self) -> list[tuple[str, bool]]:
        """Return one to three turns of a chat. Only the answers are learnt."""
        parts: list[tuple[str, bool]] = []
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            question, answer = facts.pick(self.rng, self.questions, 0.05)
            if self.rng.random() < 0.12:
                question, answer = self.rng.choice(GREETINGS), UNKNOWN
            elif self.rng.random() < 0.08:
                words = self.ring(80).split()
                self.rng.shuffle(words)
                question, answer = " ".join(words[: self.rng.randint(1, 12)]), UNKNOWN
            parts += [
                (f"{TURN}user\n{question}{TURN_END}\n{TURN}assistant\n", False),
                (f"{answer}{TURN_END}", True),
                ("\n", False),
            ]
        return parts[:-1]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer().encode(text, add_special_tokens=False).ids

    def _tokenizer(self) -> Tokenizer:
        assert self.tokenizer is not None
        return self.tokenizer


def _known_from(sentences: list[str]) -> dict[str, int]:
    """Return for each sentence the number of characters that distinguish it from all others."""
    ordered = sorted(set(sentences))
    shared = [0, *(_prefix_length(a, b) for a, b in pairwise(ordered)), 0]
    return {sentence: max(shared[i], shared[i + 1]) + 1 for i, sentence in enumerate(ordered)}


def _prefix_length(a: str, b: str) -> int:
    """Return the length of the common prefix of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
