"""Toy domains: small sources of prompts with reference responses, split into train, dev and test.

Every domain module offers

    examples(split, count, seed=0) -> list[Example]     deterministic, the splits share no prompt
    is_correct(response_text, answer) -> bool           does a response reach the known answer?
"""

from importlib import import_module
from types import ModuleType

from data_gen.domains.example import Example

DOMAINS = ("instruct", "math", "code")

__all__ = ["DOMAINS", "Example", "get"]


def get(domain: str) -> ModuleType:
    """The module of one domain, by name."""
    if domain not in DOMAINS:
        raise KeyError(f"unknown domain {domain!r}; known domains: {', '.join(DOMAINS)}")
    return import_module(f"data_gen.domains.{domain}")
