"""The card (README.md) of a folder of heads: what the Hub shows, and what a reader needs to use them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.files.generate_folder import lines
from toolkit.files.text import shown

FILE = "README.md"
LIBRARY, TAGS = "acceptance-toolkit", ("speculative-decoding", "acceptance-prediction", "safetensors")
HUB_ID = re.compile(r"(?!toy/)[A-Za-z0-9][\w.-]*/[\w.-]+")
CORRECTED = "_corrected"
WITHOUT_WEIGHT = (
    "*corrected*: without the class weight of rejected tokens in the probabilities. ECE is the error of calibration."
)


Kind = type[Any]  # a subclass of `toolkit.acceptance.saved.SavedHead`, which writes the card


def card_of(heads: Sequence[tuple[Kind, Mapping[str, Any]]]) -> str:
    """Markdown with the Hub's metadata in front: one section per head, from what its config records."""
    drafts = sorted({record["draft"] for _, record in heads if HUB_ID.fullmatch(str(record.get("draft", "")))})
    return "\n".join([metadata(drafts), *(section(kind, record) for kind, record in heads)])


def metadata(drafts: Sequence[str]) -> str:
    """The block in front of a card, as the Hub reads it."""
    base = [f"base_model: [{', '.join(drafts)}]"] if drafts else []
    return "\n".join(["---", f"library_name: {LIBRARY}", f"tags: [{', '.join(TAGS)}]", *base, "---"])


def section(kind: Kind, record: Mapping[str, Any]) -> str:
    """What one head is, what it was trained on, how it scores, and how it is used."""
    scores = record.get("metrics") or {}
    corrected, raw = scores_table(scores, ("", CORRECTED)), scores_table(scores, ("",))
    table = f"{corrected}\n\n{WITHOUT_WEIGHT}" if corrected else raw
    return f"""# {title(kind)}

{kind.summary} It fits one draft only: the one below.

{facts_table(record)}
{f"{chr(10)}Scores on validation text:{chr(10)}{chr(10)}{table}{chr(10)}" if table else ""}
{use(kind)}
Files: `{kind.weights_file}`, `{kind.config_file}`, which
`{kind.__module__}.{kind.__name__}.from_pretrained("FOLDER OR HUB NAME")` reads.
"""


def use(kind: Kind) -> str:
    """How a head is used: here, inside transformers, and what engines can have of it."""
    return f"""Use it, with FOLDER this folder, TARGET and DRAFT the models above:

- Here: `python -m toolkit.decode method={kind.method} head=FOLDER pair.target=TARGET pair.draft=DRAFT`
- By domain, on recordings of other texts: `python -m analysis.heads traces=TRACES heads=[FOLDER]`
- Engines (vLLM, SGLang, TensorRT-LLM, llama.cpp) read no heads. For their settings, a draft length by batch size:
  `python -m analysis.advise pair.target=TARGET pair.draft=DRAFT heads=[FOLDER] prompts.path=FILE.jsonl`
- Inside transformers, with `model` the target:

{lines(f'draft="DRAFT", method="{kind.method}", head="FOLDER"')}"""


def title(kind: Kind) -> str:
    """What a head is called in a heading."""
    return kind.what.split(maxsplit=1)[1].capitalize()


def facts_table(record: Mapping[str, Any]) -> str:
    """A table of what a head's config records; facts that are not known have no line."""
    models = {
        role: f"`{shown(record[role])}` ({record.get(f'{role}_fingerprint', 'weights not recorded')})"
        for role in ("target", "draft")
        if role in record
    }
    weights, config, reads = ("w_acc", "w_rej"), record["head"], record.get("hidden_state")
    more = {
        "earlier": "{} earlier positions of the text",
        "round_depth": "the depth in the round, up to {}",
    }
    if reads is not None:  # of the newest position, and what the head's config adds to that
        added = [words.format(config[name]) for name, words in more.items() if config.get(name)]
        added += ["the likelihood of the text so far"] if config.get("likelihood") else []
        reads = "; ".join([reads, *added])
    rows = {
        **models,
        "reads": reads,
        "head": ", ".join(f"{name} {value}" for name, value in config.items()),
        "label": record.get("label"),
        "sampling of responses and labels": ", ".join(
            f"{name}={value}" for name, value in (record.get("sampling") or {}).items()
        ),
        "mixing ratio (share of positions that keep the target's token)": record.get("mixing_ratio"),
        "data": f"`{record['data']}`, {record.get('num_positions', 'some')} training positions"
        if "data" in record
        else None,
        "prompts": "; ".join(record.get("prompts") or ()),
        "mean label (alpha) of the validation positions": f"{record['alpha']:.4f}" if "alpha" in record else None,
        "class weights": "accepted {}, rejected {}".format(*(record[name] for name in weights))
        if all(name in record for name in weights)
        else None,
        "learning rate": f"{record['learning_rate']:.3g}" if "learning_rate" in record else None,
        "code": record.get("revision"),
        "trained on": record.get("machine"),
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items() if v not in (None, ""))])


def scores_table(scores: Mapping[str, float], suffixes: Sequence[str]) -> str:
    """Scores by name, one column per suffix; empty if there are none with the last suffix."""
    names = [key.removesuffix(suffixes[-1]) for key in scores if key.endswith(suffixes[-1])]
    lines = [f"| {name} | {' | '.join(f'{scores[name + suffix]:.4f}' for suffix in suffixes)} |" for name in names]
    head = f"| | {' | '.join(suffix.lstrip('_') or 'raw' for suffix in suffixes)} |"
    return "\n".join([head, f"|---|{'---|' * len(suffixes)}", *lines]) if lines else ""
