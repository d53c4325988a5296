"""Toy domains: small sources of prompts with reference responses, split into train, dev and test by a hash of the text.

examples(split, count, seed=0) -> list[Example]     deterministic, the splits share no prompt
is_correct(response_text, answer) -> bool           does a response reach the known answer?
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

DOMAINS = ("instruct", "math", "code")
SPLITS = ("train", "dev", "test")
DEV_PERCENT = 10
TEST_PERCENT = 10

Draw = Callable[[random.Random], tuple[str, str, str]]


@dataclass(frozen=True)
class Example:
    """A prompt, the response that a perfect model could give, and the answer to check a response against."""

    id: str
    prompt: str
    response: str
    answer: str | None


def get(domain: str) -> ModuleType:
    if domain not in DOMAINS:
        raise KeyError(f"unknown domain {domain!r}; known domains: {', '.join(DOMAINS)}")
    return import_module(f"data_gen.domains.{domain}")


def split_of(text: str) -> str:
    """The split of a prompt or module name: about 80 % train, 10 % dev, 10 % test."""
    bucket = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 100
    if bucket < TEST_PERCENT:
        return "test"
    return "dev" if bucket < TEST_PERCENT + DEV_PERCENT else "train"


def check_split(split: str) -> None:
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
