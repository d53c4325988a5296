"""Seconds of forward passes on this machine, and whether counts explain seconds: analysis.timing prompts=toy_math.

Paper: SpecDec++ (arXiv:2405.19715), Table 2: seconds of a response = t_draft * draft passes + t_target * target
passes. The fit is by least squares over responses, in speculative decoding and for each model decoding alone. The decoding
loop's own work counts for the target. Ours adds forward passes alone, by width (`toolkit.costs.measure`). With an acceptance
head SpecDec++ is timed, too: what its responses take beyond fixed K's passes is what its head costs. With
batch_sizes=[1,4,16] forward passes are timed under load.

    timing      per way of decoding: seconds per forward pass, R^2, c = t_draft / t_target
    responses   one line per prompt and setting: counts and seconds
    timing.png  seconds found against seconds that the counts explain
    costs.json, loads  the cost table under load and its entries
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from analysis import keys
from analysis.figures import plots
from analysis.tables.bootstrap import Array, Bootstrap
from analysis.tables.files import read_table, save_table, show
from toolkit.config import instantiate, method_config, plain
from toolkit.costs.clock import now
from toolkit.costs.load import LoadCost
from toolkit.costs.measure import WIDTHS, measure
from toolkit.decoding import decode
from toolkit.drafts.kinds import reads_states
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.models.prompts import without_grammars
from toolkit.runs.stage import Stage, finished_stage, open_stage
from toolkit.runs.tracking import log_image, log_summary, log_table, parameter_counts, wandb_run

CONTEXT = 128  # tokens that a forward pass attends to, where one figure must stand for all
HEADED = "SpecDec++"
ALONE = {"target alone": "target", "draft alone": "draft"}


def regress(cfg: keys.Timing) -> Path:
    """Decode, time and regress; returns the output folder."""
    if not cfg.num_drafted:
        raise InputError(f"expected warm_up >= 0 and num_drafted=[K, ...] above 0, got {cfg.warm_up}, []")
    finished = finished_stage("timing", cfg, ignore=("track",))
    if finished is not None:
        return _show(finished)
    pair, sampling = instantiate(cfg.pair), instantiate(cfg.sampling)
    prompts = without_grammars(instantiate(cfg.prompts).load())
    if len(prompts) <= cfg.warm_up:
        raise InputError(f"expected more prompts than warm_up={cfg.warm_up}, got {len(prompts)}")
    stage = open_stage("timing", cfg, ignore=("track",))
    if not stage.finished:
        first = replace(pair, draft=pair.drafts[0], drafts=())
        responses = _decode(cfg, pair, prompts, sampling)
        table = pd.concat([_regressed(responses), _alone(cfg, first)], ignore_index=True)
        save_table(responses, stage.folder, "responses")
        save_table(table, stage.folder, "timing")
        if cfg.batch_sizes:
            sizes, widths = sorted({1, *plain(cfg.batch_sizes)}), _widths(cfg)
            costs = LoadCost.of([measure(first, size, widths, repeats=cfg.rounds)[0] for size in sizes])
            save_table(_entries(costs), stage.folder, "loads")
            costs.save(stage.folder / "costs.json")
        figure = plots.explained(responses, stage.folder / "timing.png")
        models = {"target": pair.target, **{f"draft{i or ''}": draft for i, draft in enumerate(pair.drafts)}}
        with wandb_run("timing", plain(cfg), stage.folder, track=cfg.track, name=f"{len(prompts)} prompts") as wandb:
            log_summary(wandb, parameter_counts(models))
            log_table(wandb, "timing/table", table)
            log_image(wandb, "timing/explained", figure)
        stage.finish(num_prompts=len(prompts))
    return _show(stage)


def _show(stage: Stage) -> Path:
    counted = read_table(stage.folder, "responses").prompt.nunique()
    title = f"seconds per forward pass, {counted} prompts, batch 1"
    show(read_table(stage.folder, "timing"), title, stage.folder / "timing.csv")
    if stage.manifest["config"].get("batch_sizes"):
        show(read_table(stage.folder, "loads"), "seconds per forward pass under load", stage.folder / "loads.csv")
        print(f"cost table: {stage.folder / 'costs.json'}")
    return stage.folder


def _decode(cfg: keys.Timing, pair: ModelPair, prompts: Any, sampling: Any) -> pd.DataFrame:
    """Decode every prompt with every setting, prompt by prompt; returns counts and seconds."""
    ways: list[tuple[str, ModelPair, Any]] = []
    options = pair.chat_template_options
    single = {
        f"{role} alone": ModelPair(target=model, tokenizer=pair.tokenizer, chat_template_options=options)
        for role, model in (("target", pair.target), ("draft", pair.draft))
        if not reads_states(model)  # which is not read alone
    }
    for name, models in single.items():
        ways.append((name, models, instantiate(plain(method_config("autoregressive", [], None)))))
    for k in cfg.num_drafted:
        fixed = method_config("speculative", [f"policy.num_drafted={k}"], None)
        ways.append((f"K={k}", pair, instantiate(plain(fixed))))
    headed = instantiate(plain(method_config("specdec_pp", [], cfg.head)))
    try:
        headed.bind(pair)
        ways.append((HEADED, pair, headed))
    except InputError:  # the pair has no head, or one was named that does not fit
        if cfg.head is not None:
            raise
    rows = []
    for number, prompt in enumerate(tqdm(prompts, desc="timing", unit="prompt")):
        for name, models, method in ways:
            started = now([models.device])
            (generation,) = decode(models, [prompt.content], method, sampling, batch_size=1, row_ids=[number])
            seconds = now([models.device]) - started
            if generation.error is not None or number < cfg.warm_up:
                continue
            inside = sum(r.draft_seconds + r.target_seconds for r in generation.rounds)
            counts = generation.counts
            rows.append({
                "prompt": str(prompt.id), "way": name, "draft_calls": counts.num_draft_calls,
                "target_calls": counts.num_target_calls, "tokens": counts.num_generated, "seconds": inside,
                "wall_seconds": seconds,
            })  # fmt: skip
    if not rows:
        raise InputError("every prompt failed: there is nothing to regress")
    return pd.DataFrame(rows)


def beyond_fixed(part: pd.DataFrame, fixed: np.ndarray) -> dict[str, Any]:
    """SpecDec++'s own regression, and what a draft pass of it takes beyond the coefficients of fixed K."""
    counts = part[["draft_calls", "target_calls"]].to_numpy(dtype=float)
    beta, r2 = least_squares(counts, part.seconds.to_numpy())
    beyond = np.stack([part.seconds.to_numpy() - counts @ fixed, counts[:, 0]], 1)
    line = {"decoding": HEADED, "t_draft": beta[0], "t_target": beta[1], "r2": r2, "c": beta[0] / beta[1]}
    return line | Bootstrap().figures(beyond, lambda totals: {"beyond": totals[..., 0] / totals[..., 1]})


def _regressed(responses: pd.DataFrame) -> pd.DataFrame:
    lines: list[dict[str, Any]] = []
    times = {}
    for name, which in ALONE.items():
        part = responses[responses.way == name]
        if part.empty:
            continue
        (seconds,), r2 = least_squares(part[["target_calls"]].to_numpy(dtype=float), part.seconds.to_numpy())
        times[which] = seconds
        lines.append({"decoding": name, f"t_{which}": seconds, "r2": r2})
    if len(times) == len(ALONE):
        lines.append({"decoding": "each alone", "c": times["draft"] / times["target"]})
        lines[-1] |= {f"t_{which}": seconds for which, seconds in times.items()}
    part = responses[~responses.way.isin([*ALONE, HEADED])]
    beta, r2 = least_squares(part[["draft_calls", "target_calls"]].to_numpy(dtype=float), part.seconds.to_numpy())
    responses["explained"] = np.where(
        responses.way.isin(list(ALONE)), np.nan,
        responses[["draft_calls", "target_calls"]].to_numpy(dtype=float) @ beta,
    )  # fmt: skip
    lines.append({"decoding": "speculative", "t_draft": beta[0], "t_target": beta[1], "r2": r2, "c": beta[0] / beta[1]})
    headed = responses[responses.way == HEADED]
    lines += [beyond_fixed(headed, beta)] if len(headed) else []
    return pd.DataFrame(lines)


def _alone(cfg: keys.Timing, pair: ModelPair) -> pd.DataFrame:
    """Forward passes alone, by how many drafted tokens the target verifies."""
    (costs,) = measure(pair, 1, _widths(cfg), [CONTEXT], cfg.rounds)
    draft = costs.draft(CONTEXT)
    return pd.DataFrame([
        {"decoding": f"forward passes, {k} drafted", "t_draft": draft, "t_target": target, "c": draft / target}
        for k in sorted({min(cfg.num_drafted), max(cfg.num_drafted)})
        for target in [costs.target(k + 1, CONTEXT)]
    ])  # fmt: skip


def _entries(costs: LoadCost) -> pd.DataFrame:
    """The cost table under load, one line per model and point."""
    return pd.DataFrame([
        {"model": name, "batch": batch, "width": width, "context": context, "seconds": grid(batch, width, context)}
        for name, grid in (("draft", costs.draft), ("target", costs.target))
        for batch, width, context in product(grid.batch, grid.width, grid.context)
    ])  # fmt: skip


def _widths(cfg: keys.Timing) -> list[int]:
    """Tokens of the target's forward passes that are timed."""
    return sorted({1, *WIDTHS, *(k + 1 for k in cfg.num_drafted)})


def least_squares(columns: Array, values: Array) -> tuple[Array, float]:
    """Coefficients [k] of values [n] on columns [n, k], and R^2 (about the mean)."""
    beta: Array = np.linalg.lstsq(columns, values, rcond=None)[0].astype(np.float64)
    residual = values - columns @ beta
    spread = ((values - values.mean()) ** 2).sum()
    return beta, float(1 - (residual**2).sum() / spread) if spread > 0 else float("nan")
