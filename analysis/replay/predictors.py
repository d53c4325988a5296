"""What predicts acceptance, and what it is worth: analysis.heads statistics=[TRACES] tuning={DOMAIN: TRACES} tests={...}.

heads=[...] adds a row for every head.

Every row is replayed on the same recordings (upper_bound=true, and with states for heads). Each has one number, chosen from the
same list (`thresholds`) on the domain's tuning texts: K, or what a score must reach. Every figure is of the test texts.

    predictors   share of the way from the best fixed K to the upper bound, AUC and ECE, microseconds per token
    predictors.md  the same as people read it

    online, cold     the online logistic, begun again with every text
    online, carried  its weights carried from text to text; the level is the one that `online, cold` chose
    online, warm     its form, fitted to the domain's tuning texts and then fixed
    statistics       fitted to the recordings of `statistics`; `of DOMAIN`: to that domain's tuning texts alone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from analysis.replay.fit_statistics import Samples, chosen_fit, samples, score
from analysis.replay.head_folders import CandidateHead, find_heads, threshold_policy
from analysis.replay.head_scores import drawn_samples
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import markdown, read_table, save_table, show
from analysis.tables.grid import FIXED, UPPER_BOUND
from analysis.tables.rows import Array, throughput
from analysis.tables.standing import interval_text, standing
from toolkit.acceptance import Confidence as ConfidenceEstimator
from toolkit.acceptance import OnlineLogistic, PrereadHead, StatisticsEstimator
from toolkit.acceptance.folder import scorer_with
from toolkit.acceptance.statistics import OUTPUTS
from toolkit.config import commands, instantiate, plain
from toolkit.engine.facts import vocab_size
from toolkit.errors import InputError
from toolkit.files.atomic import write_text
from toolkit.models.teacher import hidden_size
from toolkit.runs.stage import open_stage
from toolkit.stopping import Bounded, Confidence, OnlineRate, Rate
from toolkit.trace import Trace, bounds
from toolkit.trace.replay import Sent, VerifiedLengths, by_rounds, draft, sweep_levels
from toolkit.trace.steps import Geometry, RecordedStep, step_at
from toolkit.trace.store import SUMMARY, read_traces
from toolkit.types import Counts, DraftStep

CARRIED, COLD = "online, carried", "online, cold"
CALLS = 300  # of an estimator, timed


@dataclass(frozen=True)
class Predictor:
    """One row of the table.

    counts   of a trace at every level [levels, texts, counts]; or at one level, if `at` is not None
    probs    P(accepted) [P] of the tokens drawn at all positions of a trace; None: it predicts none
    call     one estimate of a token, to be timed; None: nothing is estimated
    at       the row whose chosen level this one takes
    """

    counts: Callable[[Trace, list[float]], Array]
    probs: Callable[[Trace], Tensor] | None = None
    call: Callable[[DraftStep], Any] | None = None
    needs_states: bool = False
    at: str | None = None


def compare_predictors(cfg: commands.Heads) -> Path:
    """Replay every row on every domain; returns the output folder."""
    tuning, tests = (plain(mapping) or {} for mapping in (cfg.tuning, cfg.tests))
    if set(tuning) != set(tests) or not tuning or not plain(cfg.statistics):
        raise InputError(
            f"tuning, tests: expected statistics=[TRACES] and recordings of the same domains, got "
            f"{', '.join(tuning) or 'none'} and {', '.join(tests) or 'none'}"
        )
    folders = {name: (Path(tuning[name]), Path(tests[name])) for name in tuning}
    learned = [Path(folder) for folder in plain(cfg.statistics)]
    every = [*learned, *(folder for pair in folders.values() for folder in pair)]
    heads = find_heads(plain(cfg.heads), every[len(learned) :]) if cfg.heads is not None else []
    stage = open_stage("heads", cfg, inputs=[folder / SUMMARY for folder in every], ignore=("track",))
    if not stage.finished:
        own = instantiate(cfg.draft)
        parts = {name: samples(read_traces(pair[0]), cfg.max_drafted, cfg.seed) for name, pair in folders.items()}
        fitted = Samples.join(
            [samples(read_traces(folder, replicate=None), cfg.max_drafted, cfg.seed) for folder in learned]
        )
        rows: dict[str, Predictor] = {}
        rows |= {f"head {head.name}": _of_head(head, own) for head in heads}
        rows["statistics"] = _of_estimator(estimator_of(fitted, cfg.form, cfg.seed))
        for name, part in parts.items():
            rows[f"statistics of {name}"] = _of_estimator(estimator_of(part, "numbers", cfg.seed))
        lines = []
        for name, (dev, test) in folders.items():
            warm = {"online, warm": _of_estimator(estimator_of(parts[name], "log_odds", cfg.seed))}
            lines.append(
                _domain(name, read_traces(dev), read_traces(test), {**_untrained(), **warm, **rows}, own, heads, cfg)
            )
        save_table(pd.concat(lines, ignore_index=True), stage.folder, "predictors")
        stage.finish(positions=len(fitted.depth))
    table = read_table(stage.folder, "predictors")
    title = (
        f"c = {cfg.cost_ratio:g}; every setting is chosen on `tuning`, every figure is of `tests`; statistics are fitted to "
        f"{stage.manifest['positions']} positions"
    )
    results = readable(table)
    write_text(stage.folder / "predictors.md", f"# What predicts acceptance\n\n{title}\n\n{markdown(results)}\n")
    show(results, title, stage.folder / "predictors.md")
    return stage.folder


def estimator_of(part: Samples, form: str, seed: int) -> StatisticsEstimator:
    """The estimator fitted to all samples."""
    return StatisticsEstimator(outputs={name: chosen_fit(name, part, form, seed) for name in OUTPUTS})


def _levels(trace: Trace, policy: Any, levels: list[float]) -> Array:
    return np.stack([replayed.per_text for replayed in sweep_levels(trace, policy, levels, 1)])


def _of_estimator(estimator: Any) -> Predictor:
    def counts(trace: Trace, levels: list[float]) -> Array:
        return _levels(trace, Rate(estimator, rate=1.0), levels)

    def probs(trace: Trace) -> Tensor:
        return estimator.drawn_probs(RecordedStep(trace, 1, torch.arange(trace.num_positions)))[0]

    return Predictor(counts, probs, estimator.drawn_probs)


def _of_head(head: CandidateHead, own: Any) -> Predictor:
    policy, scorer = threshold_policy(head.head, True), scorer_with(head.head, own, "cpu")

    def counts(trace: Trace, levels: list[float]) -> Array:
        return _levels(trace, policy, levels)

    def probs(trace: Trace) -> Tensor:
        preread = isinstance(head.head, PrereadHead)
        logits, _, _ = drawn_samples(trace, trace.head_logits(head.head.key), preread)
        values = torch.full((trace.num_positions,), torch.nan)
        values[read_positions(trace)] = torch.sigmoid(logits + float(head.head.config["log_w_rej"])).float()
        return values

    return Predictor(counts, probs, scorer, needs_states=True)


def _untrained() -> dict[str, Predictor]:
    """The rows that nothing is fitted for."""

    def online(trace: Trace, level: float) -> Bounded:
        return Bounded(OnlineRate(OnlineLogistic(), cost_ratio=1.0, rate=level), 1, trace.max_drafted).bind(None)

    confidence = ConfidenceEstimator()
    return {
        FIXED: Predictor(lambda trace, levels: np.stack([v.per_text for k, v in bounds.fixed(trace).items() if k])),
        UPPER_BOUND: Predictor(
            lambda trace, levels: np.stack([bounds.at_price(trace, level).per_text for level in levels])
        ),
        "confidence": Predictor(
            lambda trace, levels: _levels(trace, Confidence(0.5), levels),
            lambda trace: trace.token_prob[: trace.num_positions],
            confidence.drawn_probs,
        ),
        COLD: Predictor(
            lambda trace, levels: np.stack([by_rounds(trace, online(trace, level)).per_text for level in levels])
        ),
        CARRIED: Predictor(
            lambda trace, levels: np.stack([carried(trace, online(trace, level)) for level in levels]), at=COLD
        ),
    }


def carried(trace: Trace, policy: Any) -> Array:
    """Counts [texts, counts] of a policy whose estimator's weights go on from text to text, in the order of the recording."""
    geometry, device = Geometry.of(trace), torch.device("cpu")
    state = policy.init(1, device)
    weights = policy.policy.estimator.init(1, policy.max_drafted, device)
    counts = np.zeros((trace.num_texts, len(Counts.__dataclass_fields__)))
    for text in range(trace.num_texts):
        state = {**policy.init(1, device), **{name: state[name] for name in weights}}
        at, end = int(trace.text_first[text]), int(trace.text_first[text + 1])
        while at < end:
            starts = torch.tensor([at])
            num_drafted, num_calls, state = draft(trace, geometry, starts, policy, state)
            accepted = torch.minimum(num_drafted, geometry.run[starts])
            state = policy.observe(Sent(num_drafted, num_calls), VerifiedLengths(accepted), state)
            produced = int(torch.minimum(accepted + 1, geometry.left[starts]))
            drafted = int(num_drafted)
            of_round = {
                "num_drafted": drafted, "num_draft_calls": int(num_calls), "num_target_calls": 1,
                "num_generated": produced, "num_discarded": drafted + 1 - produced,
            }  # fmt: skip
            counts[text] += [of_round[name] for name in Counts.__dataclass_fields__]
            at += produced
    return counts


def read_positions(trace: Trace) -> Tensor:
    """The positions whose drawn token is read by a further step: those that every predictor is scored on."""
    starts = torch.arange(trace.num_positions)
    return starts[step_at(trace, Geometry.of(trace), starts, 2)[1]]


def _domain(
    name: str,
    dev: Trace,
    test: Trace,
    rows: Mapping[str, Predictor],
    own: Any,
    heads: list[CandidateHead],
    cfg: commands.Heads,
) -> pd.DataFrame:
    """The lines of a domain: each row at the level that is best on dev."""
    for head in heads:
        dev, test = (_with_head(trace, head, own) for trace in (dev, test))
    levels, chosen, counts, extras = [float(h) for h in cfg.thresholds], dict[str, int](), [], []
    at = read_positions(test)
    for row, predictor in rows.items():
        if predictor.at is None:
            chosen[row] = int(throughput(predictor.counts(dev, levels).sum(1), cfg.cost_ratio).argmax())
            counts.append(predictor.counts(test, levels)[chosen[row]])
        else:
            chosen[row] = chosen[predictor.at]
            counts.append(predictor.counts(test, [levels[chosen[row]]])[0])
        extra: dict[str, Any] = {"setting": f"K={chosen[row] + 1}" if row == FIXED else f"h={levels[chosen[row]]:g}"}
        if predictor.probs is not None:
            logits = predictor.probs(test)[at].double().logit(eps=1e-6)
            scored = score(logits, test.accept_prob[at].double())
            extra |= {key: scored[key] for key in ("AUC", "ECE", "log_loss")}
        if predictor.call is not None:
            extra |= {"microseconds": microseconds(predictor.call, own), "states": predictor.needs_states}
        extras.append(extra)
    bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
    table = standing(np.stack(counts, 1), list(rows), FIXED, cfg.cost_ratio, bootstrap)
    return table.join(pd.DataFrame(extras)).assign(domain=name, prompts=test.num_texts)


def _with_head(trace: Trace, head: CandidateHead, own: Any) -> Trace:
    scored = head.scored(trace, own)
    return replace(scored, estimates={**trace.estimates, **scored.estimates})


@torch.inference_mode()
def microseconds(call: Callable[[DraftStep], Any], own: Any) -> float:
    """The median time of an estimate for one row, the statistics of q that it reads included."""
    generator, times = torch.Generator().manual_seed(0), []
    logits, hidden = (
        torch.randn(1, vocab_size(own), generator=generator),
        torch.randn(1, hidden_size(own), generator=generator),
    )
    for _ in range(CALLS):
        step = DraftStep(1, logits, logits.softmax(-1), hidden, torch.tensor([1]))
        started = perf_counter()
        call(step)
        times.append(perf_counter() - started)
    return float(np.median(times) * 1e6)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """One line per row of the table, shares, AUC and ECE of every domain beside each other."""
    lines = []
    for row in table.method.unique():
        mine = table[table.method == row].set_index("domain")
        line: dict[str, Any] = {"predictor": row}
        for domain, entry in mine.iterrows():
            line[f"{domain}: share"] = interval_text(entry, "upper_bound_share", "{:.0%}")
            line |= {f"{domain}: {name}": entry.get(name) for name in ("AUC", "ECE")}
        line |= {"us per token": mine.microseconds.median(), "states": "yes" if mine.states.eq(True).any() else "no"}
        lines.append(line)
    return pd.DataFrame(lines).round({"us per token": 0})
