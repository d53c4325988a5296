"""Real text: documented functions of the installed Python's standard library, split by module.

The prompt is the signature with its docstring, the response is the body. There is no answer to check.
"""

import ast
import random
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from data_gen.domains import Example, check_split, split_of

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo",
                   "encodings", "__pycache__", "__phello__"}  # fmt: skip
MAX_CHARACTERS = 1100  # of prompt and response together: about 450 tokens of the toy tokenizer
MIN_BODY_CHARACTERS = 40


def examples(split: str, count: int, seed: int = 0) -> list[Example]:
    """Up to `count` functions of one split (their number is limited), in an order that depends on the seed."""
    check_split(split)
    usable = [example for example in _functions() if split_of(module_of(example)) == split]
    random.Random(f"code/{split}/{seed}").shuffle(usable)
    return usable[:count]


def is_correct(response_text: str, answer: str | None) -> bool:
    """Code has no single right answer: a response counts if it is a body that parses."""
    try:
        ast.parse("def function():" + ("" if response_text.startswith("\n") else "\n") + response_text)
    except (SyntaxError, ValueError):
        return False
    return bool(response_text.strip())


def module_of(example: Example) -> str:
    return example.id.removeprefix("code-").split(":", 1)[0]


@lru_cache(maxsize=1)
def _functions() -> tuple[Example, ...]:
    """Every usable function of the standard library, in order of path and line, without repeated prompts."""
    root = Path(sysconfig.get_path("stdlib"))
    by_prompt: dict[str, Example] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(relative.parts) and not relative.parts[0].startswith("config-"):
            for example in _functions_of(path, ".".join(relative.with_suffix("").parts)):
                by_prompt.setdefault(example.prompt, example)
    return tuple(by_prompt.values())


def _functions_of(path: Path, module: str) -> Iterator[Example]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError, OSError):
        return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = _prompt_and_body(node, lines)
            if parts:
                yield Example(f"code-{module}:{node.name}:{node.lineno}", *parts, None)


def _prompt_and_body(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str] | None:
    """Signature with docstring and the body after it, dedented; None if there is too little or too much of them."""
    if ast.get_docstring(node) is None or len(node.body) < 2:
        return None
    first, last = node.lineno - 1, node.body[-1].end_lineno
    cut = (node.body[0].end_lineno or 0) - first
    indent = " " * node.col_offset  # not textwrap.dedent: strings and comments may reach further to the left
    text = [line.removeprefix(indent) for line in lines[first:last]]
    prompt, body = "\n".join(text[:cut]).rstrip(), "\n" + "\n".join(line.rstrip() for line in text[cut:])
    long_enough = len(body.strip()) >= MIN_BODY_CHARACTERS
    if not long_enough or len(prompt) + len(body) > MAX_CHARACTERS or not prompt.isascii() or not body.isascii():
        return None
    return prompt, body
