"""Two invented languages that share a third of their words: texts made by a seeded generator.

After each word, one of three follows, with the probabilities PROBABILITIES; in the other language, others follow the same word.
So a model has to keep what it knows about a shared word in one language while it learns it in the other.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SHARED, OWN = 16, 32  # words of a language: those of both, and its own
PROBABILITIES = (0.6, 0.3, 0.1)
LENGTH = 200  # words of a document
OLD, NEW = 0, 1  # the languages


class Language:
    """A language's words, and what follows each of them."""

    def __init__(self, number: int) -> None:
        chance = random.Random(0)
        found: set[str] = set()
        while len(found) < SHARED + 2 * OWN:
            found.add("".join(chance.choice(letters) for letters in ("bdfgklmnprstvz", "aeiou", "bdklmnrst")))
        words = sorted(found)
        chance.shuffle(words)
        first = SHARED + number * OWN
        self.words = words[:SHARED] + words[first : first + OWN]
        chance = random.Random(number + 1)
        self.following = {word: chance.sample(self.words, len(PROBABILITIES)) for word in self.words}

    def document(self, chance: random.Random) -> str:
        """One text of LENGTH words."""
        found = [chance.choice(self.words)]
        while len(found) < LENGTH:
            found += chance.choices(self.following[found[-1]], PROBABILITIES)
        return " ".join(found)


def write_texts(path: Path, language: int, count: int, seed: int) -> None:
    """Write documents of a language as JSON Lines, atomically; a function of the seed."""
    known, chance = Language(language), random.Random(seed)
    lines = (json.dumps({"text": known.document(chance)}) for _ in range(count))
    staging = path.with_suffix(".staging")
    staging.write_text("\n".join(lines))
    staging.rename(path)
