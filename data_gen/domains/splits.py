"""Which split a piece of text belongs to, decided by its hash alone, so that no two splits can ever share it."""

import hashlib
import random
from collections.abc import Callable

from data_gen.domains.example import Example

SPLITS = ("train", "dev", "test")
DEV_PERCENT = 10
TEST_PERCENT = 10

Draw = Callable[[random.Random], tuple[str, str, str]]


def split_of(text: str) -> str:
    """The split of a prompt or module name: about 80 % train, 10 % dev, 10 % test."""
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100
    if bucket < TEST_PERCENT:
        return "test"
    return "dev" if bucket < TEST_PERCENT + DEV_PERCENT else "train"


def check_split(split: str) -> None:
    """Refuse an unknown split by name."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known splits: {', '.join(SPLITS)}")


def collect(domain: str, split: str, count: int, seed: int, draw: Draw) -> list[Example]:
    """Draw (prompt, response, answer) until `count` different prompts of the split are found."""
    check_split(split)
    rng = random.Random(f"{domain}/{split}/{seed}")
    by_prompt: dict[str, Example] = {}
    while len(by_prompt) < count:
        prompt, response, answer = draw(rng)
        if prompt not in by_prompt and split_of(prompt) == split:
            by_prompt[prompt] = Example(f"{domain}-{split}-{seed}-{len(by_prompt):05d}", prompt, response, answer)
    return list(by_prompt.values())
