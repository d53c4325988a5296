"""python -m analysis.diagnose responses=ANSWERS pair.target=T pair.draft=D: why does an engine accept less than it should?

The draft is replayed along the engine's own texts (`analysis.diagnosis.replay`), and its rounds are compared with those that
the engine counted. Where they differ, each cause of the draft's kind changes the replay by one mistake, and the likelihood of
the counts says which one explains them (`analysis.diagnosis.compare`). `diagnosis.json` holds all of it.

The target is loaded for drafts that read its states, and above temperature 0, where drafts are drawn and acceptance is a
probability.

With counts=[METRICS1,METRICS2,...] baseline=FOLDER it is a watch (`analysis.diagnosis.watch`), which ends with exit code 3 if
acceptance has fallen.
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("diagnose")

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from analysis import keys
from analysis.diagnosis.along import AlongTexts
from analysis.diagnosis.answers import Answer, beyond_end, most_drafted, read_answers
from analysis.diagnosis.compare import (
    PENALTY,
    Accepted,
    best_of,
    explanations,
    log_likelihood,
    sampled_explanations,
)
from analysis.diagnosis.replay import Terms, expected, num_passes, sampled_terms
from analysis.diagnosis.sentence import of_rounds, of_sums
from analysis.diagnosis.watch import watch
from analysis.loads.engine_counts import read_counts
from analysis.tables.bootstrap import FEWEST, Bootstrap
from toolkit.config import instantiate, plain
from toolkit.drafts import kind_of
from toolkit.drafts.causes import AS_IT_SHOULD_BE, Case, Cause, sampled
from toolkit.drafts.folders import kind_in
from toolkit.engine.facts import max_positions
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_json
from toolkit.models.pair import ModelPair, load_draft, resolve
from toolkit.models.reduced import is_compact
from toolkit.models.remote import remote_pair
from toolkit.runs.stage import MANIFEST, config_as_written, open_stage, read_manifest
from toolkit.sampling import Sampling

FEWEST_ROUNDS = 40
FELL = 3  # exit code


def run(cfg: keys.Diagnose) -> Path:
    if cfg.counts and cfg.baseline and not cfg.responses:
        return _watched(cfg, Path(cfg.baseline))
    if cfg.counts or cfg.baseline or not cfg.responses:
        raise InputError("expected either responses=ANSWERS, or counts=[METRICS1,METRICS2,...] baseline=FOLDER")
    responses = Path(cfg.responses)
    _check_settings(cfg, responses, instantiate(cfg.sampling))
    stage = open_stage("diagnose", cfg, inputs=[responses])
    if not stage.finished:
        write_json(stage.folder / "diagnosis.json", _diagnosed(cfg, responses))
        stage.finish()
    result = read_json(stage.folder / "diagnosis.json")
    if lines := result["left_out"]:
        print(f"left out: {len(lines)} answers, first {lines[0]}")
    if (beyond := result.get("beyond_end", {})).get("tokens"):
        print(
            f"{beyond['tokens']} accepted tokens were counted after the end of {beyond['texts']} texts; they are left out"
        )
    for line in (result["sentence"], *(f"set: {setting}" for setting in result["set"])):
        print(line)
    return stage.folder


def exit_code(folder: Path) -> int:
    """What the command ends with: FELL for a watch whose counts have fallen."""
    return FELL * read_json(folder / "diagnosis.json").get("fell", False)


def _watched(cfg: keys.Diagnose, baseline: Path) -> Path:
    """The output folder of a watch; its sentence is printed."""
    answers = baseline / "generations.jsonl" if baseline.is_dir() else baseline
    stage = open_stage("diagnose", cfg, inputs=[*cfg.counts, answers])
    if not stage.finished:
        pages = [read_counts(Path(page)) for page in cfg.counts]
        write_json(stage.folder / "diagnosis.json", watch(read_counts(answers), pages, cfg.counts))
        stage.finish()
    print(read_json(stage.folder / "diagnosis.json")["sentence"])
    return stage.folder


def _check_settings(cfg: keys.Diagnose, responses: Path, sampling: Sampling) -> None:
    """Raises InputError for drafts that are not there, and for texts of toolkit.decode that were drawn otherwise."""
    for other in cfg.others:
        resolve(other)
    if sampling.generation_config:
        raise InputError(
            "sampling.generation_config: expected false or null, and what it says as sampling.temperature=T etc."
        )
    folder = responses.parent
    if (folder / MANIFEST).is_file() and (manifest := read_manifest(folder))["stage"] == "decode":
        recorded = config_as_written(manifest)["sampling"]
        names = ("temperature", "repetition_penalty", *(("top_k", "top_p", "min_p") if sampling.temperature else ()))
        for name in () if recorded["generation_config"] else names:
            if recorded[name] != (value := getattr(sampling, name)):
                raise InputError(f"sampling.{name}: the texts were decoded with {recorded[name]}, not {value}")


def _diagnosed(cfg: keys.Diagnose, responses: Path) -> dict[str, Any]:
    sampling, bootstrap = instantiate(cfg.sampling), Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
    kind = kind_in(None if cfg.pair.draft is None else resolve(cfg.pair.draft))
    compact = cfg.pair.draft is not None and is_compact(resolve(cfg.pair.draft))
    loaded = kind.reads_target or compact or sampling.temperature > 0  # the target is
    pair = instantiate(cfg.pair) if loaded else remote_pair(plain(cfg.pair))
    every, left_out = read_answers(responses, pair)
    draft = pair.draft if loaded else instantiate(cfg.draft)
    answers = _replayable(cfg, every, max_positions(draft))
    along = AlongTexts(pair.target, answers) if kind.reads_target or sampling.temperature > 0 else None
    replay = partial(expected, draft, sampling=sampling, undrafted=pair.unshared)
    if kind.reads_target:
        replay = partial(replay, along=along)
    if answers[0].sums is not None:
        if sampling.temperature:
            raise InputError("sampling.temperature: expected 0 for answers with sums alone, or counts by round")
        with tqdm(unit="token", unit_scale=True) as bar:
            result = of_sums(answers, replay(AS_IT_SHOULD_BE, answers, progress=bar.update), bootstrap)
        return {**result, "left_out": left_out}
    causes = _causes(cfg, draft, pair, answers, sampling)
    rounds = _table(answers)
    if along is None or not sampling.temperature:
        several = explanations(rounds, _replays(rounds, causes, draft, answers, replay))
    else:
        logits = along.logits(pair, sampling)
        terms = partial(
            sampled_terms, draft, answers=answers, sampling=sampling, fit=pair.fit, along=along, logits=logits
        )
        several = sampled_explanations(rounds, _sampled_replays(rounds, causes, num_passes(answers, draft), terms))
    return {**of_rounds(rounds, several, bootstrap), "beyond_end": beyond_end(every), "left_out": left_out}


def _causes(
    cfg: keys.Diagnose, draft: Any, pair: ModelPair, answers: Sequence[Answer], sampling: Sampling
) -> list[Cause]:
    """The causes of the draft's kind, of sampled drafts, and of the drafts in `others`."""
    prompts, longest = [answer.prompt_ids for answer in answers], max(answer.length for answer in answers)
    case = Case(draft, pair.tokenizer, prompts, longest, sampling, cfg.windows, pair.target, most_drafted(answers))
    kind = kind_of(draft)
    causes: list[Cause] = [] if kind.causes is None else kind.part("causes")(case)
    if sampling.temperature:
        causes += sampled.causes(case)
    target = pair.target if kind.reads_target else cfg.pair.target
    return causes + [
        Cause(
            f"the draft's weights are those of {folder}",
            "the draft's folder",
            draft=partial(_other, cfg, folder, target),
        )
        for folder in cfg.others
    ]


def _replays(
    rounds: pd.DataFrame,
    causes: Sequence[Cause],
    draft: Any,
    answers: Sequence[Answer],
    replay: Callable[..., list[list[int]]],
) -> dict[Cause, Accepted]:
    """Accepted tokens of every round as it should be and, if some round is not, under causes.

    A cause is replayed along the texts that hold such rounds, for in the others it cannot be better. Where rounding explains
    them, causes that are no better there are left out; else every cause is replayed along all texts.
    """
    with _progress(rounds, num_passes(answers, draft)) as bar:

        def accepted(cause: Cause, part: Sequence[Answer]) -> Accepted:
            return np.array([count for text in replay(cause, part, progress=bar.update) for count in text])

        right = accepted(AS_IT_SHOULD_BE, answers)
        differs = right != rounds.accepted
        if not differs.any():
            return {AS_IT_SHOULD_BE: right}
        tried = rounds.text.isin(rounds.text[differs]).to_numpy()
        first, others = (_rounds_of(answers, set(rounds.text[which])) for which in (tried, ~tried))
        drafted = int(rounds.drafted[tried].sum())
        _announce(bar, len(causes), len(causes), num_passes(first, draft), drafted)
        replays = {AS_IT_SHOULD_BE: right}
        for cause in causes:
            replays[cause] = right.copy()
            replays[cause][tried] = accepted(cause, first)

        def whole(some: Sequence[Cause]) -> dict[Cause, Accepted]:
            for cause in () if tried.all() else some:
                bar.total += int(rounds.drafted.sum()) - drafted
                replays[cause][~tried] = accepted(cause, others)
            return {cause: replays[cause] for cause in (AS_IT_SHOULD_BE, *some)}

        at_least = log_likelihood(rounds, right).sum() + PENALTY
        better = [cause for cause in causes if log_likelihood(rounds, replays[cause]).sum() > at_least]
        chosen = whole(better)
        best = best_of(rounds, explanations(rounds, chosen))
        if best is not None and best.rounding:
            return chosen
        whole([cause for cause in causes if cause not in better])
        return replays


def _rounds_of(answers: Sequence[Answer], texts: set[int]) -> list[Answer]:
    """All answers, with the rounds of some."""
    return [answer if number in texts else replace(answer, rounds=[]) for number, answer in enumerate(answers)]


def _sampled_replays(
    rounds: pd.DataFrame, causes: Sequence[Cause], passes: int, terms: Callable[..., list[Terms]]
) -> dict[Cause, Terms]:
    """The terms of every round as it should be, and under every cause: those of the same forward passes together."""
    groups: dict[tuple[Any, ...], list[Cause]] = {}
    for cause in (AS_IT_SHOULD_BE, *causes):
        groups.setdefault(cause.passes, []).append(cause)
    replays: dict[Cause, Terms] = {}
    with _progress(rounds, passes) as bar:
        for group in groups.values():
            replays |= zip(group, terms(causes=group, progress=bar.update), strict=True)
            if AS_IT_SHOULD_BE in group:
                _announce(bar, len(causes), len(groups) - 1, passes, bar.total)
    return replays


def _progress(rounds: pd.DataFrame, passes: int) -> Any:
    """A bar of drafted tokens, after what one replay takes."""
    print(
        f"diagnose: {len(rounds)} rounds of {rounds.text.nunique()} answers, {passes} draft forward passes",
        file=sys.stderr,
    )
    return tqdm(total=int(rounds.drafted.sum()), unit="token", unit_scale=True)


def _announce(bar: Any, num_causes: int, num_replays: int, passes: int, drafted: int) -> None:
    """Say what the causes take, after the first replay: passes and drafted tokens of each of theirs."""
    minutes = bar.format_dict["elapsed"] / 60 * num_replays * drafted / bar.total
    line = f"{num_causes} causes, {passes * num_replays} draft forward passes, about {minutes:.1f} minutes"
    bar.write(f"diagnose: {line}; more for contexts that are cut, and for likely causes", file=sys.stderr)
    bar.total += num_replays * drafted


def _replayable(cfg: keys.Diagnose, answers: Sequence[Answer], longest: int) -> list[Answer]:
    """The first answers, with as many rounds as are wanted; of sums, a round at every start. Raises InputError for too few."""
    usable = [answer for answer in answers if answer.length < longest]
    if len(usable) < len(answers):
        print(f"{len(answers) - len(usable)} answers exceed the draft's context of {longest} and are left out")
    size, chosen = 0, []
    for answer in usable:
        rounds = answer.rounds[: max(cfg.rounds - size, 0)]
        if answer.sums is not None and size < cfg.rounds:
            if cfg.num_drafted is None:
                raise InputError("num_drafted: expected K, what rounds draft, for answers with sums alone; got null")
            rounds = [(start, cfg.num_drafted, 0) for start in range(1, len(answer.token_ids))]
        size += len(rounds)
        chosen += [replace(answer, rounds=rounds)] if rounds else []
    if size < FEWEST_ROUNDS or len(chosen) < FEWEST:
        needed = f"{FEWEST_ROUNDS} rounds of {FEWEST} answers are needed to see a difference of .1"
        raise InputError(f"{cfg.responses}: too few, {size} whole rounds of {len(chosen)} answers: {needed}")
    return chosen


def _table(answers: Sequence[Answer]) -> pd.DataFrame:
    """A line per round; third: of its text, from 1."""
    lines = [
        (number, start, drafted, accepted, 3 * start // len(answer.token_ids) + 1, answer.category)
        for number, answer in enumerate(answers)
        for start, drafted, accepted in answer.rounds
    ]
    return pd.DataFrame(lines, columns=["text", "start", "drafted", "accepted", "third", "category"])


def _other(cfg: keys.Diagnose, folder: str, target: Any, _: Any) -> Any:
    """The draft of another folder."""
    return load_draft(folder, cfg.pair.device, cfg.pair.dtype, target=target)
