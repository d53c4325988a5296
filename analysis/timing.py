"""python -m analysis.timing prompts=toy_math: what a forward pass of each model costs here, and whether counts explain time.

Paper: SpecDec++ (arXiv:2405.19715), Table 2: seconds of a response = t_draft * draft passes + t_target * target
passes. The fit is by least squares over responses, in speculative decoding and for each model decoding alone. Ours
adds the cost of width and context (`toolkit.costs.forward`), per round. The decoding loop's own work counts for the target.
With an acceptance head SpecDec++ is timed, too: what its responses take beyond fixed K's passes is what its head costs. With
batch_sizes=[1,4,16] forward passes are timed under load (`analysis.loads.costs`). With traces=FOLDER head=FOLDER the price of
the rate rule is solved instead (`analysis.replay.price`).

    timing      per way of decoding: seconds per forward pass, R^2, c = t_draft / t_target
    responses   one line per prompt and setting: counts and seconds
    timing.png  seconds found against seconds that the counts explain
    costs.json, loads  the cost table under load and its entries
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("timing")

from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from analysis.figures import plots
from analysis.loads.costs import measured_costs
from analysis.replay.price import solve_prices
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import read_table, save_table, show
from toolkit.config import commands, instantiate, method_config, plain
from toolkit.costs.forward import fit_rounds, least_squares
from toolkit.decoding import decode
from toolkit.engine.facts import reads_states
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.runs.stage import Stage, finished_stage, open_stage
from toolkit.runs.tracking import log_image, log_summary, log_table, parameter_counts, wandb_run
from toolkit.types import Generation

CONTEXT = 128  # tokens that a forward pass attends to, where one figure must stand for all
HEADED = "SpecDec++"
ALONE = {"target alone": "target", "draft alone": "draft"}


def run(cfg: commands.Timing) -> Path:
    if cfg.traces is not None:
        return solve_prices(cfg)
    if not cfg.num_drafted:
        raise InputError(f"expected warm_up >= 0 and num_drafted=[K, ...] above 0, got {cfg.warm_up}, []")
    finished = finished_stage("timing", cfg, ignore=("track",))
    if finished is not None:
        return _show(finished)
    pair, sampling = instantiate(cfg.pair), instantiate(cfg.sampling)
    prompts = instantiate(cfg.prompts).load()
    if len(prompts) <= cfg.warm_up:
        raise InputError(f"expected more prompts than warm_up={cfg.warm_up}, got {len(prompts)}")
    stage = open_stage("timing", cfg, ignore=("track",))
    if not stage.finished:
        responses, generations = _decode(cfg, pair, prompts, sampling)
        table = _regress(responses, generations)
        save_table(responses, stage.folder, "responses")
        save_table(table, stage.folder, "timing")
        if cfg.batch_sizes:
            contents = [prompt.content for prompt in prompts]
            sizes, drafted = plain(cfg.batch_sizes), plain(cfg.num_drafted)
            first = replace(pair, draft=pair.drafts[0], drafts=())
            ((costs, cells),) = measured_costs(first, contents, sampling, sizes, drafted, cfg.rounds)
            save_table(cells, stage.folder, "loads")
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
    counted = stage.manifest["num_prompts"] - stage.manifest["config"]["warm_up"]
    title = f"seconds per forward pass, {counted} prompts, batch 1"
    show(read_table(stage.folder, "timing"), title, stage.folder / "timing.csv")
    if stage.manifest["config"].get("batch_sizes"):
        show(read_table(stage.folder, "loads"), "seconds per forward pass under load", stage.folder / "loads.csv")
        print(f"cost table: {stage.folder / 'costs.json'}")
    return stage.folder


def _decode(
    cfg: commands.Timing, pair: ModelPair, prompts: Any, sampling: Any
) -> tuple[pd.DataFrame, list[Generation]]:
    """Decode every prompt with every setting, prompt by prompt; returns counts and seconds, and the speculative generations."""
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
    rows, speculative = [], []
    for number, prompt in enumerate(tqdm(prompts, desc="timing", unit="prompt")):
        for name, models, method in ways:
            _wait(models)
            started = perf_counter()
            (generation,) = decode(models, [prompt.content], method, sampling, batch_size=1, row_ids=[number])
            _wait(models)
            seconds = perf_counter() - started
            if generation.error is not None or number < cfg.warm_up:
                continue
            inside = sum(r.draft_seconds + r.target_seconds for r in generation.rounds)
            counts = generation.counts
            rows.append({
                "prompt": str(prompt.id), "way": name, "draft_calls": counts.num_draft_calls,
                "target_calls": counts.num_target_calls, "tokens": counts.num_generated, "seconds": inside,
                "wall_seconds": seconds,
            })  # fmt: skip
            if name not in (*single, HEADED):
                speculative.append(generation)
    if not rows:
        raise InputError("every prompt failed: there is nothing to regress")
    return pd.DataFrame(rows), speculative


def _wait(pair: ModelPair) -> None:
    if pair.device.type == "cuda":
        torch.cuda.synchronize(pair.device)


def _headed(part: pd.DataFrame, fixed: np.ndarray) -> dict[str, Any]:
    """SpecDec++'s own regression, and what a draft pass of it takes beyond the coefficients of fixed K."""
    counts = part[["draft_calls", "target_calls"]].to_numpy(dtype=float)
    beta, r2 = least_squares(counts, part.seconds.to_numpy())
    beyond = np.stack([part.seconds.to_numpy() - counts @ fixed, counts[:, 0]], 1)
    line = {"decoding": HEADED, "t_draft": beta[0], "t_target": beta[1], "r2": r2, "c": beta[0] / beta[1]}
    return line | Bootstrap().figures(beyond, lambda totals: {"beyond": totals[..., 0] / totals[..., 1]})


def _regress(responses: pd.DataFrame, speculative: list[Generation]) -> pd.DataFrame:
    lines = []
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
    lines += [_headed(headed, beta)] if len(headed) else []
    model = fit_rounds(speculative)
    drafted = [r.num_drafted for g in speculative for r in g.rounds if r.num_drafted]
    for width in sorted({min(drafted), max(drafted)}):
        seconds = {"t_draft": model.draft(1, CONTEXT), "t_target": model.target(width + 1, CONTEXT)}
        ratio = {"r2": model.target.r2, "c": model.ratio(width, CONTEXT)}
        lines.append({"decoding": f"per round, {width} drafted", **seconds, **ratio})
    return pd.DataFrame(lines)
