"""What predicts acceptance, and what it is worth: analysis.heads statistics=[TRACES] tuning={DOMAIN: TRACES} tests={...}.

heads=[...] adds a row for every head. Rows: `analysis.replay.predictor_rows`.

Every row is replayed on the same recordings (upper_bound=true, and with states for heads). Each has one number, chosen from the
same list (`thresholds`) on the domain's tuning texts: K, or what a score must reach. Every figure is of the test texts. The
tables' domains are those of the draft and the temperature of `statistics`; others show what carries over.

    predictors   one line per row and domain: share of the way from the best fixed K to the upper bound, AUC, ECE (the mean
                 over depths in the round) raw and calibrated on the tuning texts, and the share without a chosen level: the
                 rate rule at cost_ratio, raw and calibrated
    calibration  ECE by depth, raw and calibrated
    drift        the domain changes in the middle: everything chosen and fitted on the one before
    costs, cost_texts  with costs={NAME: FILE}: what rows are worth at cost tables (`analysis.replay.predictor_costs`)
    predictors.md  the same as people read it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from analysis import keys
from analysis.replay.calibrate import fitted_maps, scored_maps
from analysis.replay.fit_samples import Samples, samples, score
from analysis.replay.head_folders import CandidateHead, find_heads
from analysis.replay.predictor_costs import at_costs, read_tables
from analysis.replay.predictor_domain import Domain
from analysis.replay.predictor_pages import carries_over, page
from analysis.replay.predictor_rows import (
    CARRIED,
    COLD,
    STATISTICS,
    WARM,
    Predictor,
    counted,
    estimated,
    head_labels,
    of_head,
    of_statistics,
    online,
    untrained,
    warm,
    with_calibration,
    without_level,
)
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import read_table, save_table
from analysis.tables.grid import FIXED, ORACLE, UPPER_BOUND
from analysis.tables.rows import COUNTS, Array, throughput
from analysis.tables.standing import standing
from toolkit.config import instantiate, plain
from toolkit.engine.facts import vocab_size
from toolkit.errors import InputError, warn
from toolkit.files.atomic import read_json, write_text
from toolkit.models.teacher import hidden_size
from toolkit.runs.stage import open_stage
from toolkit.trace import Trace, join
from toolkit.trace.replay import carried
from toolkit.trace.store import SUMMARY, read_traces
from toolkit.types import DraftStep

CALLS = 300  # of an estimator, timed
SIZES = (1000, 5000, 20000)  # positions of the learning curve; the last ones are all
REFERENCES = (FIXED, UPPER_BOUND, ORACLE)
COST_TABLES = ("costs", "cost_texts")


def compare_predictors(cfg: keys.Heads) -> Path:
    """Replay every row on every domain; returns the output folder."""
    tuning, tests = (plain(mapping) or {} for mapping in (cfg.tuning, cfg.tests))
    if set(tuning) != set(tests) or not tuning or not plain(cfg.statistics):
        raise InputError(
            f"tuning, tests: expected statistics=[TRACES] and recordings of the same domains, got "
            f"{', '.join(tuning) or 'none'} and {', '.join(tests) or 'none'}"
        )
    folders = {name: (Path(tuning[name]), Path(tests[name])) for name in tuning}
    if same := [name for name, (dev, test) in folders.items() if dev.resolve() == test.resolve()]:
        warn(f"tests: levels of {', '.join(same)} are chosen on the very texts that are scored: record other prompts")
    learned = [Path(folder) for folder in plain(cfg.statistics)]
    recordings = [*learned, *(folder for pair in folders.values() for folder in pair)]
    drafts, temperatures = zip(*map(_recorded_with, recordings), strict=True)
    same_draft = [folder for folder, name in zip(recordings, drafts, strict=True) if name == drafts[0]][len(learned) :]
    heads = find_heads(plain(cfg.heads), same_draft) if cfg.heads is not None else []
    tables = read_tables(plain(cfg.costs) or {}, cfg.max_drafted)
    stage = open_stage("heads", cfg, inputs=[folder / SUMMARY for folder in recordings], ignore=("track",))
    if not stage.finished:
        draft = instantiate(cfg.draft)
        traces = (read_traces(folder, replicate=None) for folder in learned)
        fitted = Samples.join([samples(trace, cfg.max_drafted, cfg.seed) for trace in traces])
        rows = _fitted_rows(fitted, cfg)
        parts = {name: samples(read_traces(pair[0]), cfg.max_drafted, cfg.seed) for name, pair in folders.items()}
        for name, part in parts.items():
            rows[f"{STATISTICS} of {name}"] = of_statistics(part, "numbers", cfg.seed)
        at_home = {name: _recorded_with(pair[1]) == (drafts[0], temperatures[0]) for name, pair in folders.items()}
        domains = [
            _tuned(name, pair, at_home[name], rows, parts[name], heads if pair[1] in same_draft else [], draft, cfg)
            for name, pair in folders.items()
        ]
        scored = [_scored(domain, cfg) for domain in domains]
        predictors = [_predictors(*pair, draft, cfg) for pair in zip(domains, scored, strict=True)]
        save_table(pd.concat(predictors, ignore_index=True), stage.folder, "predictors")
        depths = [estimator.depths for estimators in scored for estimator in estimators.values()]
        save_table(pd.concat(depths, ignore_index=True), stage.folder, "calibration")
        save_table(_drift([domain for domain in domains if domain.home], cfg), stage.folder, "drift")
        if tables:
            bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
            of_tables = [at_costs(domain, *named, bootstrap) for domain in domains for named in tables.items()]
            for name, lines in zip(COST_TABLES, zip(*of_tables, strict=True), strict=True):
                save_table(pd.concat(lines, ignore_index=True), stage.folder, name)
        stage.finish(positions=len(fitted.depth))
    names = ("predictors", "calibration", "drift", *(COST_TABLES[:1] if tables else ()))
    text = page({name: read_table(stage.folder, name) for name in names}, cfg.cost_ratio, stage.manifest["positions"])
    write_text(stage.folder / "predictors.md", text)
    print(text)
    return stage.folder


def _recorded_with(folder: Path) -> tuple[str, float]:
    summary = read_json(folder / SUMMARY)
    return summary["draft_fingerprint"], summary["sampling"]["temperature"]


def _fitted_rows(fitted: Samples, cfg: keys.Heads) -> dict[str, Predictor]:
    """Statistics of all positions, and of few: texts in a random order until so many are reached."""
    rows = {STATISTICS: of_statistics(fitted, cfg.form, cfg.seed)}
    order = torch.from_numpy(np.random.default_rng(cfg.seed).permutation(int(fitted.sequence.max()) + 1))
    lengths = torch.bincount(fitted.sequence, minlength=len(order))[order]
    for size in SIZES:
        if size < len(fitted.depth):
            chosen = fitted.where(torch.isin(fitted.sequence, order[lengths.cumsum(0) - lengths < size]))
            rows[f"{STATISTICS}, {size:,}"] = of_statistics(chosen, cfg.form, cfg.seed)
    return rows


def _tuned(
    name: str,
    folders: tuple[Path, Path],
    home: bool,
    fitted: Mapping[str, Predictor],
    part: Samples,
    heads: list[CandidateHead],
    draft: Any,
    cfg: keys.Heads,
) -> Domain:
    """A domain with the level of every row, chosen on its tuning texts, and what the row counts there on the test texts."""
    dev, test = (read_traces(folder) for folder in folders)
    for head in heads:
        dev, test = (_with_head(trace, head, draft) for trace in (dev, test))
    rows = untrained()
    if dev.run is not None:  # of a draft that reads the target's states: acceptance depends on where the round began
        del rows[ORACLE]
    rows |= {"log odds, fitted": of_statistics(part, "log_odds", cfg.seed)}
    rows |= {"log odds and log ratio, fitted": of_statistics(part, "ratio", cfg.seed)}
    rows |= {**fitted, **{name: of_head(head, draft) for name, head in head_labels(heads).items()}}
    if not home and cfg.costs is None:
        rows = {row: predictor for row, predictor in rows.items() if row in REFERENCES or carries_over(row)}
    domain = Domain(name, dev, test, home, rows, [float(h) for h in cfg.thresholds])

    def choose(row: str) -> None:
        domain.chosen[row] = domain.best(row, lambda counts: throughput(counts, cfg.cost_ratio))
        domain.counts[row] = domain.at(row, domain.chosen[row], test)

    for row in domain.rows:
        choose(row)
    if home:
        domain.rows[WARM] = warm(dev, domain.levels[domain.chosen[COLD]])
        choose(WARM)
    return domain


class Scored(NamedTuple):
    """An estimator on a domain's test texts."""

    depths: pd.DataFrame  # ECE by depth and over all, raw and calibrated on the tuning texts
    figures: dict[str, Any]  # AUC and log loss of drawn tokens, and ECE as the mean over depths
    without_level: dict[str, Array | None]  # by column, what the rate rule counts; None: not its estimator


def _scored(domain: Domain, cfg: keys.Heads) -> dict[str, Scored]:
    """The scores of every row that estimates a probability."""
    dev, test = (samples(trace, cfg.max_drafted, cfg.seed) for trace in (domain.dev, domain.test))
    scored = {}
    for row, predictor in domain.rows.items():
        if (estimator := predictor.estimator) is None:
            continue
        calibration = fitted_maps(estimated(estimator, domain.dev, dev))
        drawn = estimated(estimator, domain.test, test)["drawn"]
        table = pd.DataFrame(scored_maps({"drawn": drawn}, calibration)).assign(method=row, domain=domain.name)
        single = table[table.depth != "all"]
        figures = {key: np.average(single[key], weights=single.positions) for key in ("ECE", "ECE_calibrated")}
        figures |= {key: score(*drawn[:2])[key] for key in ("AUC", "log_loss")}
        columns = {"free": estimator, "free_calibrated": with_calibration(estimator, calibration)}
        counts = {name: without_level(domain.test, each, cfg.cost_ratio) for name, each in columns.items()}
        scored[row] = Scored(table, figures, counts)
    return scored


def _predictors(domain: Domain, scored: Mapping[str, Scored], draft: Any, cfg: keys.Heads) -> pd.DataFrame:
    """The lines of a domain: its rows at their levels, and in `free` and `free_calibrated` the shares without one."""
    facts = []
    for row, predictor in domain.rows.items():
        setting = "" if row == ORACLE else domain.setting(row, domain.chosen[row])
        fact: dict[str, Any] = {"setting": setting, "positions": predictor.positions, "states": predictor.needs_states}
        fact |= scored[row].figures if row in scored else {}
        if predictor.call is not None:
            fact["microseconds"] = microseconds(predictor.call, draft)
        facts.append(fact)
    counts = dict(domain.counts)
    for row, estimator in scored.items():
        for name, of_rule in estimator.without_level.items():
            if of_rule is not None:
                counts[f"{row}/{name}"] = of_rule
    bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
    table = _standing(counts, cfg.cost_ratio, bootstrap)
    shares = table.set_index("method").upper_bound_share
    table = table[table.method.isin(list(domain.counts))].set_index("method")
    for name in ("free", "free_calibrated"):
        table[name] = [shares.get(f"{row}/{name}", np.nan) for row in table.index]
    table = table.join(pd.DataFrame(facts, index=list(domain.rows))).reset_index()
    return table.assign(domain=domain.name, home=domain.home, prompts=domain.test.num_texts)


def _drift(domains: list[Domain], cfg: keys.Heads) -> pd.DataFrame:
    """The domain changes to the next one in the middle.

    Shares are measured on the second half, against its own best fixed K and upper bound.
    """
    tables = []
    for before, after in zip(domains, domains[1:] + domains[:1], strict=True):
        if before is after:
            continue
        counts = {FIXED: after.counts[FIXED], UPPER_BOUND: after.counts[UPPER_BOUND]}
        counts["best fixed K of the first domain"] = before.at(FIXED, before.chosen[FIXED], after.test)
        for row in before.rows:
            others = row.startswith(f"{STATISTICS} of ") and row != f"{STATISTICS} of {before.name}"
            if row not in REFERENCES and row != CARRIED and not others:
                name = row.replace(f"{STATISTICS} of {before.name}", f"{STATISTICS} of the first domain")
                counts[name] = before.at(row, before.chosen[row], after.test)
        level, alone = before.levels[before.chosen[COLD]], [replace(d.test, estimates={}) for d in (before, after)]
        both, _ = carried(join(alone), online(join(alone), level))
        counts[CARRIED] = counted(both)[before.test.num_texts :]
        bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
        table = _standing(counts, cfg.cost_ratio, bootstrap)
        tables.append(table.assign(before=before.name, after=after.name, prompts=after.test.num_texts))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame({"method": []})


def _standing(counts: Mapping[str, Array], cost_ratio: float, bootstrap: Bootstrap) -> pd.DataFrame:
    """`standing` of rows by their counts [texts, counts + M + 1]."""
    return standing(np.stack([*counts.values()], 1)[..., : len(COUNTS)], [*counts], FIXED, cost_ratio, bootstrap)


def _with_head(trace: Trace, head: CandidateHead, draft: Any) -> Trace:
    scored = head.scored(trace, draft)
    return replace(scored, estimates={**trace.estimates, **scored.estimates})


@torch.inference_mode()
def microseconds(call: Callable[[DraftStep], Any], draft: Any) -> float:
    """The median time of an estimate for one row, the statistics of q that it reads included."""
    generator, times = torch.Generator().manual_seed(0), []
    logits, hidden = (torch.randn(1, size(draft), generator=generator) for size in (vocab_size, hidden_size))
    for _ in range(CALLS):
        step = DraftStep(1, logits, logits.softmax(-1), hidden, torch.tensor([1]))
        started = perf_counter()
        call(step)
        times.append(perf_counter() - started)
    return float(np.median(times) * 1e6)
