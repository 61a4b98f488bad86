"""Texts that the probes send. They are our own, or follow from a seed; no user's data is among them."""

import random
import re

QUESTIONS = (
    "Explain in three sentences why the sky is blue.",
    "Write a short paragraph about how bread is baked.",
    "Describe the four seasons of the year, one sentence each.",
    "Tell a child in a few sentences how a bicycle works.",
)
PASSAGE = (
    "The harbour wakes before the town does. At four in the morning the first boats come in, and the men on the pier take "
    "the ropes without a word, because everything that has to be said was said years ago. By five the boxes of fish stand in "
    "rows on the wet stones, and the buyers walk along them with their hands behind their backs. An hour later the trucks "
    "have left for the city, the stones are washed, and the cats have taken what they were given. When the school bell rings "
    "at eight, nothing is left of the market but the smell, and the children who walk past it on their way up the hill no "
    "longer notice it."
)
ODD_CHARACTERS = "café, naïve, Grüße, 東京, Москва, 🚲🌧"
WORDS = tuple(
    re.findall(
        r"\w+",
        "apple river stone window garden paper summer winter bridge candle forest doctor silver engine market orange pencil "
        "rabbit shadow ticket valley yellow basket copper dinner family guitar hammer island jacket kitchen ladder mirror "
        "needle office planet pocket school soldier tunnel village wagon",
    )
)
COLOURS = ("red", "blue", "green", "white", "black", "brown", "purple", "grey")
_THINGS = ("crate", "barrel", "cart", "shelf", "drawer", "sack", "bench", "ladder")
_PLACES = ("north hall", "old cellar", "east yard", "upper room", "long corridor", "boat house", "small office", "back garden")


def words(count: int, seed: str) -> list[str]:
    """Common words in an order that has no meaning, each at most once in a row of all."""
    rng, chosen = random.Random(seed), list[str]()
    while len(chosen) < count:
        chosen += rng.sample(WORDS, len(WORDS))
    return chosen[:count]


def inventory(sentences: int, seed: str) -> list[str]:
    """Sentences about things in a house, some 20 tokens each."""
    rng = random.Random(seed)
    return [
        f"The {rng.choice(_THINGS)} number {rng.randint(100, 999)} stands in the {rng.choice(_PLACES)} and weighs "
        f"{rng.randint(10, 99)} kilograms."
        for _ in range(sentences)
    ]


def needle(colour: str, code: int) -> str:
    """A sentence with a code to recall."""
    return f"The secret code of the {colour} box is {code}."


def codes(seed: str) -> dict[str, int]:
    """A code for each colour."""
    rng = random.Random(seed)
    return dict(zip(COLOURS, rng.sample(range(1000, 9999), len(COLOURS)), strict=True))
