"""The advised setting as this package's own overrides, and the command line that decodes with them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.loads.choosing import Candidate
from analysis.tables.grid import PLAIN, Setting
from toolkit.config import compose, override, plain


def overrides_of(answer: Any, candidate: Candidate, costs: Path) -> list[str]:
    """The setting of an advised line: method, parameters, head, and what a batch rule was told.

    answer     the line (`choosing.choose`)
    candidate  its draft's
    costs      the file of its cost table, which a batch rule reads
    """
    words = [override("method", answer.method)]
    if answer.method == PLAIN:
        return words
    setting = _setting(answer, candidate.dev.settings)
    head = setting.head or candidate.dev.head_of(answer.method)
    given = {name: value for name, value in setting.parameters.items() if name != "head"}
    if setting.max_drafted is not None:
        given["max_drafted"] = setting.max_drafted
    if told := candidate.dev.told(setting, candidate.costs):
        given |= {f"policy.{name}": value for name, value in {"costs": costs.resolve(), **told}.items()}
    words += [override(f"method.{name}", value) for name, value in given.items() if value is not None]
    return words if head is None else [*words, override("head", head)]


def next_line(cfg: Any, overrides: Sequence[str], draft: str, batch: int) -> str:
    """The command that decodes as advised for a batch size: with the pair, the sampling and the prompts of `cfg`."""
    usual = plain(compose("decode"))
    asked = {"pair": {**plain(cfg.pair), "draft": draft}, "sampling": plain(cfg.sampling)}
    words = [
        override(f"{group}.{name}", value)
        for group, values in asked.items()
        for name, value in values.items()
        if name in usual[group] and value != usual[group][name]
    ]
    prompts = plain(cfg.prompts)
    if prompts.get("path") is not None:
        words += [override(f"prompts.{name}", prompts[name]) for name in ("path", "limit") if prompts.get(name)]
    else:
        words.append(f"prompts=toy_{prompts['domain']}" if "domain" in prompts else "prompts.path=FILE.jsonl")
    return f"next: python -m toolkit.decode {shlex.join([*overrides, *words, override('batch_size', batch)])}"


def _setting(answer: Any, settings: Sequence[Setting]) -> Setting:
    """The setting that a line stands for."""
    given = json.loads(answer.parameters)
    return next(one for one in settings if one.method == answer.method and dict(one.parameters) == given)
