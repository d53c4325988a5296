"""A look at mixed examples: which tokens are the prompt's, the target's, the draft's, and how likely those are accepted."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

LEGEND = "prompt | target's tokens as they are, [draft's token|probability of acceptance]"


def show(tokenizer: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print examples of the data set: in colours on a terminal, with plain marks elsewhere."""
    if not sys.stdout.isatty():
        print(LEGEND)
        for row in rows:
            print(f"  {as_text(tokenizer, row)}")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print("prompt, [cyan]target's[/cyan] tokens, draft's from [red]rejected[/red] to [green]accepted[/green]")
    for row in rows:
        line = Text()
        for word, kind, label in _words(tokenizer, row):
            line.append(word, {"prompt": "dim", "target": "cyan", "draft": _colour(label)}[kind])
        console.print(line)


def as_text(tokenizer: Any, row: Mapping[str, Any]) -> str:
    """One example with plain marks."""
    words = _words(tokenizer, row)
    prompt = "".join(word for word, kind, _ in words if kind == "prompt")
    rest = (f"[{word}|{label:.2f}]" if kind == "draft" else word for word, kind, label in words if kind != "prompt")
    return f"{prompt} | {''.join(rest)}"


def _words(tokenizer: Any, row: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """Text, origin (prompt, target or draft) and label of every token."""
    words = []
    columns = zip(row["input_ids"], row["mask"], row["labels"], strict=True)
    for position, (token, from_draft, label) in enumerate(columns):
        text = f" {token}" if tokenizer is None else tokenizer.decode([token]).replace("\n", "⏎")
        kind = "prompt" if position < row["prompt_length"] else "draft" if from_draft else "target"
        words.append((text, kind, label))
    return words


def _colour(label: float) -> str:
    """Red for 0 to green for 1."""
    return f"rgb({round(220 * (1 - label))},{round(170 * label)},60)"
