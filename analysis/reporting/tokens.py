"""Texts token by token: what was accepted, rejected, corrected or a bonus, and what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.figures.method_styles import setting_name
from analysis.reporting.folders import Folder, generations
from toolkit.errors import InputError
from toolkit.files.atomic import read_json

KINDS = {
    "accepted": "drafted and accepted",
    "rejected": "drafted and rejected",
    "unused": "drafted after a rejected token",
    "corrected": "the target's, in place of a rejected token",
    "bonus": "the target's, after a wholly accepted round",
}
LEVELS = 5  # shades of the prediction
MOST_TEXTS, MOST_VIEWS = 3, 3


@dataclass(frozen=True)
class Token:
    """A token as the page shows it; `level` 1..LEVELS shades what was predicted, 0: nothing was recorded."""

    text: str
    kind: str
    level: int
    title: str


@dataclass(frozen=True)
class ShownText:
    id: str
    prompt: str
    rounds: Sequence[Sequence[Token]]


@dataclass(frozen=True)
class TokenView:
    """A few texts as one setting of one folder treated them; `note` says what is missing."""

    title: str
    note: str
    texts: Sequence[ShownText]


def token_views(folders: Sequence[Folder]) -> list[TokenView]:
    """Views of sweeps (tokens.json) and of decoded folders (generations.jsonl), the best settings first."""
    views = [view for folder in folders for view in (*_of_sweep(folder), *_of_decoded(folder))]
    return views[: 2 * MOST_VIEWS]


def _of_sweep(folder: Folder) -> Iterator[TokenView]:
    try:
        views = read_json(folder.path / "tokens.json")[:MOST_VIEWS]
    except InputError:
        return
    for view in views:
        texts = [
            ShownText(
                text["id"],
                text["prompt"],
                [
                    [_token(token["text"], token["kind"], token) for token in record["drafted"]]
                    + [_token(extra["text"], extra["kind"], {}) for extra in [record["extra"]] if extra is not None]
                    for record in text["rounds"]
                ],
            )
            for text in view["texts"][:MOST_TEXTS]
        ]
        drafted = [token for text in view["texts"] for record in text["rounds"] for token in record["drafted"]]
        predicted = any(token["predicted"] is not None for token in drafted)
        missing = "" if predicted else " No head was recorded: predictions are missing."
        note = f"Replayed on recorded texts of the target.{missing}"
        yield TokenView(f"{folder.path.name}: {setting_name(view['method'], view['setting'])}", note, texts)


def _of_decoded(folder: Folder) -> Iterator[TokenView]:
    """Decoded texts: rounds know how many tokens were rejected, not which ones, and nothing of predictions."""
    lines = []
    for line in generations(folder):  # of one chain, whose tokens follow each other in the text
        rounds, pieces = line.get("rounds", []), line.get("pieces")
        whole = pieces and sum(r["num_produced"] for r in rounds) == len(pieces)
        lines += [line] if whole and not any(r.get("widths") for r in rounds) else []
    lines = lines[:MOST_TEXTS]
    if not lines:
        return
    texts = [ShownText(str(line["id"]), str(line.get("prompt", "")), list(_decoded_rounds(line))) for line in lines]
    method = str((folder.manifest.get("config") or {}).get("method", {}).get("name") or folder.stage)
    note = "Decoded. Rejected tokens are counted, their texts were not recorded; predictions are missing."
    yield TokenView(f"{folder.path.name}: {setting_name(method, '')}", note, texts)


def _decoded_rounds(line: Mapping[str, Any]) -> Iterator[list[Token]]:
    pieces = iter(line["pieces"])
    for r in line["rounds"]:
        kinds = ["accepted"] * min(r["num_accepted"], r["num_produced"])
        kinds += ["bonus" if r["bonus"] else "corrected"] * (r["num_produced"] - len(kinds))
        tokens = [_token(next(pieces), kind, {}) for kind in kinds]
        if lost := max(r["num_drafted"] - r["num_accepted"], 0):
            tokens.insert(min(r["num_accepted"], len(tokens)), _token(f"[{lost} rejected]", "rejected", {}))
        yield tokens


def _token(text: str, kind: str, facts: Mapping[str, Any]) -> Token:
    names = {"predicted": "predicted P(accept)", "draft_prob": "q", "accept_prob": "min(1, p/q)"}
    probabilities = [f"{name} {facts[key]:.3f}" for key, name in names.items() if facts.get(key) is not None]
    drafted = kind in ("accepted", "rejected", "unused")
    missing = [] if facts.get("predicted") is not None or not drafted else ["prediction missing"]
    visible = text.replace("\n", "⏎").replace("\t", "⇥") or "∅"
    value = facts.get("predicted")
    level = 0 if value is None else min(int(value * LEVELS), LEVELS - 1) + 1
    return Token(visible, kind, level, f"{kind}: {KINDS[kind]}; {', '.join([*probabilities, *missing])}".rstrip("; "))
