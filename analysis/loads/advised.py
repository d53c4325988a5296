"""The advised setting as this package's own overrides, and the command line that decodes with them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.loads.choosing import Candidate
from analysis.tables.grid import PLAIN, Setting
from toolkit.config import choices, compose, override, plain


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
    if told := candidate.dev.told(setting):
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
    words += _prompts(plain(cfg.prompts))
    return f"next: python -m toolkit.decode {shlex.join([*overrides, *words, override('batch_size', batch)])}"


def _prompts(asked: Mapping[str, Any]) -> list[str]:
    """The prompts as overrides: the choice of `conf/prompts` with the fewest differences from them, and these."""
    if asked.get("path") is not None and "shares" not in asked:  # a file that is read instead of the source
        return [override(f"prompts.{name}", asked[name]) for name in ("path", "limit") if asked.get(name)]
    found = []
    for name in choices("prompts"):
        usual = _composed([f"prompts={name}"])
        if usual.keys() == asked.keys():
            differing = {f"prompts.{key}": value for key, value in asked.items() if value != usual[key]}
            words = [f"{'++' * isinstance(value, dict)}{override(key, value)}" for key, value in differing.items()]
            found.append([f"prompts={name}", *words])
    same = (words for words in sorted(found, key=len) if _composed(words) == asked)
    return next(same, ["prompts.path=FILE.jsonl"])


def _composed(words: Sequence[str]) -> dict[str, Any]:
    prompts: dict[str, Any] = plain(compose("decode", words, checked=False).prompts)
    return prompts


def _setting(answer: Any, settings: Sequence[Setting]) -> Setting:
    """The setting that a line stands for."""
    given = json.loads(answer.parameters)
    return next(one for one in settings if one.method == answer.method and dict(one.parameters) == given)
