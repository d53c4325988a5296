"""What every head predicts, and what decoding with it is worth: analysis.heads traces=FOLDER heads=[A,B,C].

Paper: SpecDec++ (arXiv:2405.19715), Table 3: heads over depth and w_rej, their binary KL, the best throughput and its
threshold. Any heads are replayed on one recording. Deviation: thresholds are chosen on texts that no number is reported on.

    heads       one line per head, and the best fixed K: settings, scores, threshold, throughput, rates
    results, heads.md  the same as people read it
    thresholds  one line per head and threshold, and per fixed K
    pareto.png  discard rate over verification rate, one curve per head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import keys
from analysis.figures import plots
from analysis.replay.head_folders import CandidateHead, find_heads
from analysis.replay.head_scores import head_scores
from analysis.tables.bootstrap import Bootstrap, spread_name
from analysis.tables.files import markdown, read_table, save_table, show
from analysis.tables.rows import COUNTS, Array, counts_of, throughput
from analysis.tables.standing import interval_text
from toolkit import metrics
from toolkit.config import instantiate, plain
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_text
from toolkit.runs.stage import open_stage
from toolkit.runs.tracking import log_image, log_table, wandb_run
from toolkit.trace import Trace, bounds
from toolkit.trace.replay import Replayed, sweep_levels
from toolkit.trace.store import SUMMARY, read_traces

FIXED = "fixed K"
PREREAD_SHORTEST = 1  # tokens: a pre-read head speaks of the next token before any later one is drafted
SHOWN = ("throughput", "gain", "discard_rate", "verification_rate")


@dataclass(frozen=True)
class Sequences:
    """Some texts of a trace: chosen [T]."""

    trace: Trace
    chosen: np.ndarray

    def counts(self, replayed: Replayed) -> Array:
        """What a policy counts on them [n, counts]."""
        return replayed.per_text[self.chosen]


def compare_heads(cfg: keys.Heads) -> Path:
    """Replay every head at every threshold; returns the output folder."""
    if cfg.traces is None:
        raise InputError("traces: expected a folder of data_gen.traces, traces=FOLDER heads=[...], got null")
    if not cfg.thresholds:
        raise InputError("thresholds: expected probabilities, got []")
    bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
    folders = [Path(str(folder)) for folder in (cfg.traces, *([cfg.dev] if cfg.dev is not None else []))]
    traces = [read_traces(folder) for folder in folders]
    candidates = find_heads(plain(cfg.heads), folders)
    files = [*(folder / SUMMARY for folder in folders), *(path for candidate in candidates for path in candidate.files)]
    stage = open_stage("heads", cfg, inputs=files, ignore=("track",))
    fresh = not stage.finished
    if fresh:
        dev, test = _parts(folders, traces, cfg.dev_share, cfg.seed)
        draft = instantiate(cfg.draft) if any(candidate.needs_draft for candidate in candidates) else None
        base, curve = _fixed(dev, test, cfg.cost_ratio)
        best = curve[curve.chosen].iloc[0][["setting", "dev_throughput"]]
        lines = [{"head": FIXED, **best, **worth(base, base, cfg.cost_ratio, bootstrap)}]
        curves = [curve]
        for candidate in candidates:
            line, curve = _study(candidate, draft, dev, test, base, cfg, bootstrap)
            lines.append(line)
            curves.append(curve)
        facts = {"texts": len(base), "cost_ratio": cfg.cost_ratio, **vars(bootstrap)}
        save_table(pd.DataFrame(lines).assign(**facts), stage.folder, "heads")
        save_table(pd.concat(curves, ignore_index=True), stage.folder, "thresholds")
    table = read_table(stage.folder, "heads")
    title = (
        f"{table.texts.iloc[0]} texts, thresholds chosen on others; c = {cfg.cost_ratio:g}, at least {cfg.min_drafted} "
        f"tokens a round (pre-read heads: {PREREAD_SHORTEST}), {spread_name(table.texts.iloc[0], cfg.confidence)}"
    )
    figure = plots.pareto(read_table(stage.folder, "thresholds"), stage.folder / "pareto.png", "heads, replayed")
    results = readable(table)
    save_table(results, stage.folder, "results")
    write_text(stage.folder / "heads.md", f"# Heads\n\n{title}\n\n{markdown(results)}\n\n![heads]({figure.name})\n")
    if fresh:
        read, name = [*folders, *plain(cfg.heads)], f"c={cfg.cost_ratio:g} {len(candidates)} heads"
        with wandb_run("heads", plain(cfg), stage.folder, track=cfg.track, name=name, inputs=read) as wandb:
            log_table(wandb, "heads/table", table)
            log_image(wandb, "heads/pareto", figure)
        stage.finish(heads=[candidate.name for candidate in candidates], num_texts=len(base))
    first = ("head", "throughput", f"over {FIXED}", "AUROC", "binary KL", "setting")
    show(results, title, stage.folder / "heads.md", first)
    return stage.folder


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table as people read it: intervals in brackets, ratios in percent, columns without any entry left out."""
    lines = [row for _, row in table.iterrows()]
    forms = {"binary_kl": "{:.4f}", "throughput": "{:.3f}", "gain": "{:+.1%}"}
    columns: dict[str, Any] = {name: list(table[name]) for name in ("head", "kind", "depth", "w_rej", "mixing")}
    columns["training KL"] = list(table.train_kl)
    columns["validation KL"] = list(table.validation_kl)
    columns["binary KL"] = [interval_text(row, "binary_kl", forms["binary_kl"]) for row in lines]
    columns |= {"KL corrected": list(table.binary_kl_corrected), "ECE corrected": list(table.ece_corrected)}
    columns |= {"AUROC": list(table.auroc), "setting": list(table.setting)}
    for name in SHOWN:
        columns[name.replace("_", " ")] = [interval_text(row, name, forms.get(name, "{:.3f}")) for row in lines]
    frame = pd.DataFrame(columns).rename(columns={"gain": f"over {FIXED}"})
    return frame.drop(columns=[name for name in frame if frame[name].isna().all()])


def _study(
    candidate: CandidateHead,
    draft: Any,
    dev: Sequences,
    test: Sequences,
    base: Array,
    cfg: keys.Heads,
    bootstrap: Bootstrap,
) -> tuple[dict[str, Any], pd.DataFrame]:
    """A head's line, and its curve over thresholds. The threshold is the best on dev, all numbers are of test."""
    thresholds, cost_ratio = [float(h) for h in cfg.thresholds], cfg.cost_ratio
    scored = {id(part.trace): candidate.scored(part.trace, draft) for part in (dev, test)}
    policy = candidate.policy(cfg.corrected)
    levels = [1 - h for h in thresholds]
    shortest = PREREAD_SHORTEST if candidate.kind == "preread" else cfg.min_drafted
    sweeps = {key: sweep_levels(trace, policy, levels, shortest) for key, trace in scored.items()}
    parts = ((part, sweeps[id(part.trace)]) for part in (test, dev))  # to counts [thresholds, texts, counts]
    test_counts, dev_counts = (np.stack([part.counts(replayed) for replayed in sweep]) for part, sweep in parts)
    on_dev = throughput(dev_counts.sum(1), cost_ratio)
    best = int(on_dev.argmax())
    line = {
        "head": candidate.name, **candidate.settings, "setting": f"h={thresholds[best]:g}", "dev_throughput": on_dev[best],
        **head_scores(scored[id(test.trace)], test.chosen, candidate.head, bootstrap),
        **worth(test_counts[best], base, cost_ratio, bootstrap),
    }  # fmt: skip
    curve = _curve(candidate.name, [f"h={h:g}" for h in thresholds], test_counts, on_dev, cost_ratio)
    trained = {name: candidate.settings[name] for name in ("depth", "w_rej")}
    return line, curve.assign(threshold=list(thresholds), **trained)


def _curve(name: str, settings: Sequence[str], counts: Array, on_dev: Array, cost_ratio: float) -> pd.DataFrame:
    """One line per setting, of its counts [settings, texts, counts] on the test texts; `chosen`: the best on dev."""
    sums = pd.DataFrame(counts.sum(1), columns=list(COUNTS))
    rates = [(metrics.discard_rate(c), metrics.verification_rate(c)) for c in map(counts_of, sums.to_dict("records"))]
    return sums.assign(
        method=name, setting=list(settings),
        discard_rate=[rate[0] for rate in rates], verification_rate=[rate[1] for rate in rates],
        throughput=throughput(counts.sum(1), cost_ratio), dev_throughput=on_dev,
        chosen=np.arange(len(settings)) == int(on_dev.argmax()), undominated=True,
    )  # fmt: skip


def worth(counts: Array, base: Array, cost_ratio: float, bootstrap: Bootstrap) -> dict[str, float]:
    """Rates of counts [texts, counts] with intervals over texts; `gain` over the best fixed K's, paired."""

    def rates(totals: Array) -> dict[str, Array]:
        """Of totals [..., 2 counts], a policy's and the baseline's."""
        of_policy, of_baseline = totals[..., : len(COUNTS)], totals[..., len(COUNTS) :]
        produced = of_policy[..., COUNTS.index("num_generated")]
        return {
            "throughput": throughput(of_policy, cost_ratio),
            "gain": throughput(of_policy, cost_ratio) / throughput(of_baseline, cost_ratio) - 1,
            "discard_rate": of_policy[..., COUNTS.index("num_discarded")] / produced,
            "verification_rate": of_policy[..., COUNTS.index("num_target_calls")] / produced,
        }

    return bootstrap.figures(np.concatenate([counts, base], 1), rates)


def _fixed(dev: Sequences, test: Sequences, cost_ratio: float) -> tuple[Array, pd.DataFrame]:
    of_dev, of_test = (bounds.fixed(part.trace) for part in (dev, test))
    lengths = [k for k in of_dev if k and k in of_test]
    on_dev = np.array([float(throughput(dev.counts(of_dev[k]).sum(0), cost_ratio)) for k in lengths])
    counts = np.stack([test.counts(of_test[k]) for k in lengths])
    return counts[int(on_dev.argmax())], _curve(FIXED, [f"K={k}" for k in lengths], counts, on_dev, cost_ratio)


def _parts(
    folders: Sequence[Path], traces: Sequence[Trace], dev_share: float, seed: int
) -> tuple[Sequences, Sequences]:
    """The texts thresholds are chosen on, and those that are reported. Raises InputError if one side has none."""
    if len(traces) == 2:
        test_summary, dev_summary = (read_json(folder / SUMMARY) for folder in folders)
        if test_summary["job"] == dev_summary["job"]:
            raise InputError("dev: expected traces of other texts than `traces`, got the same")
        for name in ("draft_fingerprint", "target_fingerprint", "sampling"):
            sides = [summary[name] for summary in (dev_summary, test_summary)]
            seedless = [{**side, "seed": None} if isinstance(side, dict) else side for side in sides]
            if seedless[0] != seedless[1]:
                raise InputError(f"dev and traces differ in {name}: {sides[0]} and {sides[1]}")
        test, dev = traces
        return Sequences(dev, np.ones(dev.num_texts, dtype=bool)), Sequences(test, np.ones(test.num_texts, dtype=bool))
    (trace,) = traces
    size = round(dev_share * trace.num_texts)
    if not 0 < size < trace.num_texts:
        raise InputError(
            f"dev_share: {dev_share} of {trace.num_texts} texts leaves none on one side; expected a number in (0, 1) and "
            "more texts, or dev=FOLDER"
        )
    chosen = np.zeros(trace.num_texts, dtype=bool)
    chosen[np.random.default_rng(seed).permutation(trace.num_texts)[:size]] = True
    return Sequences(trace, chosen), Sequences(trace, ~chosen)
