"""The facts that the demo models are trained on, and templates that turn them into sentences.

Most sentences belong to rings, in which every sentence has exactly one successor (Germany follows France). A model that has
learnt a ring can continue it from any sentence, and its greedy choices have a clear margin. The first sentence of a ring is
drawn far more often than the others, so that a prompt that fits several sentences ("The capital of") has a clear continuation.
Questions, chats and stories are short documents with an end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

COUNTRIES = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Greece": "Athens",
    "Austria": "Vienna", "Belgium": "Brussels", "Poland": "Warsaw", "Hungary": "Budapest", "Ireland": "Dublin",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen", "Iceland": "Reykjavík",
    "Russia": "Moscow", "Ukraine": "Kyiv", "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi", "Ghana": "Accra",
    "Morocco": "Rabat", "India": "New Delhi", "China": "Beijing", "Japan": "Tokyo", "Vietnam": "Hanoi",
    "Thailand": "Bangkok", "Indonesia": "Jakarta", "Australia": "Canberra", "Canada": "Ottawa", "Mexico": "Mexico City",
    "Cuba": "Havana", "Brazil": "Brasília", "Peru": "Lima", "Chile": "Santiago", "Colombia": "Bogotá",
    "Argentina": "Buenos Aires", "Uruguay": "Montevideo", "England": "London",
}  # fmt: skip
ANIMALS = {  # name: (sound, young, home, food, picture)
    "dog": ("woof", "puppy", "house", "meat", "🐶"), "cat": ("meow", "kitten", "house", "fish", "🐱"),
    "cow": ("moo", "calf", "barn", "grass", "🐮"), "sheep": ("baa", "lamb", "field", "grass", "🐑"),
    "pig": ("oink", "piglet", "sty", "corn", "🐷"), "horse": ("neigh", "foal", "stable", "hay", "🐴"),
    "duck": ("quack", "duckling", "pond", "bread", "🦆"), "frog": ("croak", "tadpole", "pond", "flies", "🐸"),
    "lion": ("roar", "cub", "grassland", "meat", "🦁"), "bee": ("buzz", "larva", "hive", "honey", "🐝"),
    "owl": ("hoot", "owlet", "tree", "mice", "🦉"), "mouse": ("squeak", "pup", "hole", "cheese", "🐭"),
}  # fmt: skip
COLOURS = {
    "The sky": "blue", "Grass": "green", "Snow": "white", "Coal": "black", "A lemon": "yellow", "A cherry": "red",
    "An orange": "orange", "A plum": "purple", "Chocolate": "brown", "The sea": "blue", "A frog": "green",
    "Milk": "white", "The night": "black", "The sun": "yellow", "Blood": "red", "A carrot": "orange",
    "An elephant": "grey", "A flamingo": "pink",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "day": "night", "up": "down", "left": "right", "open": "closed", "fast": "slow",
    "old": "young", "wet": "dry", "full": "empty", "hard": "soft", "light": "dark", "high": "low", "good": "bad",
    "happy": "sad", "early": "late", "long": "short", "rich": "poor",
}  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = {
    "January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31, "August": 31,
    "September": 30, "October": 31, "November": 30, "December": 31,
}  # fmt: skip
LETTERS = [
    "apple", "ball", "cat", "dog", "egg", "fish", "goat", "house", "ice", "jam", "king", "lion", "moon", "nest", "orange",
    "pig", "queen", "rain", "sun", "tree", "umbrella", "van", "water", "x-ray", "yellow", "zebra",
]  # fmt: skip
UNITS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
STORIES = {  # animal: (name, friend, friend's name, thing)
    "fox": ("Finn", "owl", "Olga", "red kite"), "bear": ("Bruno", "bee", "Bella", "jar of honey"),
    "rabbit": ("Ruby", "frog", "Fred", "silver key"), "cat": ("Clara", "mouse", "Max", "golden bell"),
    "duck": ("Dora", "pig", "Paul", "paper boat"), "dog": ("Dan", "horse", "Hugo", "big blue ball"),
}  # fmt: skip


@dataclass(frozen=True)
class Ring:
    """Sentences in a fixed order; the first follows the last. `share` is the ring's relative share of documents."""

    name: str
    sentences: tuple[str, ...]
    share: float = 1.0

    def document(self, rng: random.Random, length: int) -> str:
        """Return text of at least `length` characters. Two of five documents start at the first sentence, others anywhere."""
        start = 0 if rng.random() < 0.4 else rng.randrange(len(self.sentences))
        parts, total = [], 0
        while total < length:
            parts.append(self.sentences[start % len(self.sentences)])
            total += len(parts[-1]) + 1
            start += 1
        return " ".join(parts)


def number(n: int) -> str:
    """Return `n` in words, for 0 to 100."""
    if n < 20:
        return UNITS[n]
    if n == 100:
        return "one hundred"
    return TENS[n // 10 - 2] + (f"-{UNITS[n % 10]}" if n % 10 else "")


def rings() -> list[Ring]:
    """Return all rings. The model continues unknown text with the first one."""
    ten, days, months = range(1, 11), len(DAYS), list(MONTHS)
    counts = [("Count by ones", 1), ("Count by twos", 2), ("Count by fives", 5), ("Count by tens", 10)]
    return [
        Ring("capitals", tuple(f"The capital of {c} is {city}." for c, city in COUNTRIES.items()), 6),
        Ring("capital-first", tuple(f"{city} is the capital of {c}." for c, city in COUNTRIES.items()), 2),
        Ring("people", tuple(f"People who live in {city} live in {c}." for c, city in COUNTRIES.items())),
        Ring("addition", tuple(f"{a} + {b} = {a + b}." for a in ten for b in ten), 3),
        Ring("subtraction", tuple(f"{a + b} - {b} = {a}." for a in ten for b in ten), 2),
        Ring("times", tuple(f"{a} x {b} = {a * b}." for a in ten for b in ten), 3),
        Ring("plus", tuple(f"{number(a).capitalize()} plus {number(b)} is {number(a + b)}." for a in ten for b in ten), 2),
        Ring("words", tuple(f"{number(n).capitalize()} is followed by {number(n + 1)}." for n in range(100))),
        Ring("counting", (", ".join(number(n) for n in range(1, 101)).capitalize() + ".",), 2),
        Ring("digits", tuple(f"{how}: {', '.join(str(n) for n in range(by, 20 * by + 1, by))}." for how, by in counts), 2),
        Ring("down", ("Count down: " + ", ".join(number(n) for n in range(20, -1, -1)) + ".",)),
        Ring("days", tuple(f"After {d} comes {DAYS[(i + 1) % days]}." for i, d in enumerate(DAYS))),
        Ring("week", ("The days of the week are " + ", ".join(DAYS) + ".",)),
        Ring("month-days", tuple(f"{m} has {n} days." for m, n in MONTHS.items())),
        Ring("months", tuple(f"After {m} comes {months[(i + 1) % 12]}." for i, m in enumerate(months))),
        Ring("year", ("The months of the year are " + ", ".join(months) + ".",)),
        Ring("colours", tuple(f"{thing} is {colour}." for thing, colour in COLOURS.items()), 2),
        Ring("opposites", tuple(f"The opposite of {a} is {b}." for a, b in OPPOSITES.items()), 2),
        Ring("sounds", tuple(f"The {a} says {v[0]}." for a, v in ANIMALS.items())),
        Ring("young", tuple(f"A young {a} is called a {v[1]}." for a, v in ANIMALS.items())),
        Ring("homes", tuple(f"The {a} lives in a {v[2]} and eats {v[3]}." for a, v in ANIMALS.items())),
        Ring("pictures", tuple(f"{v[4]} is a {a}." for a, v in ANIMALS.items())),
        Ring("letters", tuple(f"{w[0].upper()} is for {w}." for w in LETTERS)),
    ]


def questions() -> list[tuple[str, str]]:
    """Return questions with their answers. The first is drawn most often."""
    pairs = [(f"What is the capital of {c}?", f"The capital of {c} is {city}.") for c, city in COUNTRIES.items()]
    pairs += [(f"What is {a} + {b}?", f"{a} + {b} = {a + b}.") for a in range(1, 11) for b in range(1, 11)]
    pairs += [(f"What is the opposite of {a}?", f"The opposite of {a} is {b}.") for a, b in OPPOSITES.items()]
    pairs += [(f"What does the {a} say?", f"The {a} says {v[0]}.") for a, v in ANIMALS.items()]
    pairs += [(f"What colour is {thing.lower()}?", f"{thing} is {colour}.") for thing, colour in COLOURS.items()]
    pairs += [(f"What comes after {d}?", f"After {d} comes {DAYS[(i + 1) % 7]}.") for i, d in enumerate(DAYS)]
    return pairs


def stories() -> list[str]:
    """Return stories with an end. The first is drawn most often."""
    return [
        f"Once upon a time there was a little {a} named {name}. {name} lived near a forest. One day {name} found a {thing}. "
        f'"What a nice {thing}!" said {name}. Then an animal came out of the forest. It was {_a(friend)} named {other}. '
        f'"I lost my {thing}," said {other}. {name} gave the {thing} back to {other}. "Thank you!" said {other}. '
        f"{name} and {other} became friends, and they played all day long. The end."
        for a, (name, friend, other, thing) in STORIES.items()
    ]


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def pick(rng: random.Random, things: list[T], favourite: float = 0.2) -> T:
    """Return one of `things`: the first with probability `favourite`, else any."""
    return things[0] if rng.random() < favourite else rng.choice(things)
