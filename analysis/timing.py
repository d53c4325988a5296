"""python -m analysis.timing prompts=toy_math: what one forward of each model costs here, and whether counts explain time.

Paper: SpecDec++ (arXiv:2405.19715), Table 2: seconds of a response = t_draft * draft forwards + t_target * target forwards,
least squares over responses; in speculative decoding, and for each model decoding alone. Ours adds the cost of width and
context (`toolkit.cost`), per round. One prompt at a time, settings interleaved, the first prompts for warming up left out.

    timing      per way of decoding: seconds per forward, R^2, c = t_draft / t_target
    responses   one line per prompt and setting: counts and seconds
    timing.png  seconds found against seconds that the counts explain
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots
from analysis.tables import read_table, save_table, show
from toolkit.config import instantiate, method_config, plain
from toolkit.cost import fit_rounds, least_squares
from toolkit.decoding import decode
from toolkit.errors import InputError
from toolkit.pair import ModelPair
from toolkit.stage import command, open_stage
from toolkit.tracking import log_image, log_table, wandb_run
from toolkit.types import Generation

CONTEXT = 128  # tokens behind a forward, where one figure must stand for all
ALONE = {"target alone": "target", "draft alone": "draft"}


def run(cfg: Any) -> Path:
    """Decode, time and regress; returns the output folder."""
    if cfg.warm_up < 0 or not cfg.num_drafted or min(cfg.num_drafted) < 1:
        raise InputError(
            f"expected warm_up >= 0 and num_drafted=[K, ...] above 0, got {cfg.warm_up}, {cfg.num_drafted}"
        )
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
        figure = plots.explained(responses, stage.folder / "timing.png")
        with wandb_run("timing", plain(cfg), stage.folder, track=cfg.track) as wandb:
            log_table(wandb, "timing/table", table)
            log_image(wandb, "timing/explained", figure)
        stage.finish(num_prompts=len(prompts))
    show(read_table(stage.folder, "timing"), f"seconds per forward, {len(prompts) - cfg.warm_up} prompts, batch 1")
    return stage.folder


def _decode(cfg: Any, pair: ModelPair, prompts: Any, sampling: Any) -> tuple[pd.DataFrame, list[Generation]]:
    """Every prompt with every setting, prompt by prompt; the generations of speculative decoding beside the table."""
    from tqdm.auto import tqdm

    single = {
        "target alone": ModelPair(target=pair.target, tokenizer=pair.tokenizer),
        "draft alone": ModelPair(target=pair.draft, tokenizer=pair.tokenizer),
    }
    ways: list[tuple[str, ModelPair, Any]] = [
        (name, one, instantiate(plain(method_config("autoregressive", [], None)))) for name, one in single.items()
    ]
    for k in cfg.num_drafted:
        method = instantiate(plain(method_config("speculative", [f"policy.num_drafted={k}"], None)))
        ways.append((f"K={k}", pair, method))
    rows, speculative = [], []
    for number, prompt in enumerate(tqdm(prompts, desc="timing", unit="prompt")):
        for name, one, method in ways:
            started = perf_counter()
            (generation,) = decode(one, [prompt.content], method, sampling, batch_size=1, row_ids=[number])
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
            if name not in single:
                speculative.append(generation)
    if not rows:
        raise InputError("every prompt failed: there is nothing to regress")
    return pd.DataFrame(rows), speculative


def _regress(responses: pd.DataFrame, speculative: list[Generation]) -> pd.DataFrame:
    """Table 2 of the paper, and the cost of width and context."""
    lines = []
    times = {}
    for name, which in ALONE.items():
        part = responses[responses.way == name]
        (seconds,), r2 = least_squares(part[["target_calls"]].to_numpy(dtype=float), part.seconds.to_numpy())
        times[which] = seconds
        lines.append({"decoding": name, f"t_{which}": seconds, "r2": r2})
    lines.append({
        "decoding": "each alone", "t_draft": times["draft"], "t_target": times["target"],
        "c": times["draft"] / times["target"],
    })  # fmt: skip
    part = responses[~responses.way.isin(list(ALONE))]
    beta, r2 = least_squares(part[["draft_calls", "target_calls"]].to_numpy(dtype=float), part.seconds.to_numpy())
    responses["explained"] = np.where(
        responses.way.isin(list(ALONE)), np.nan,
        responses[["draft_calls", "target_calls"]].to_numpy(dtype=float) @ beta,
    )  # fmt: skip
    lines.append({"decoding": "speculative", "t_draft": beta[0], "t_target": beta[1], "r2": r2, "c": beta[0] / beta[1]})
    model = fit_rounds(speculative)
    widest = max(r.num_drafted for g in speculative for r in g.rounds)
    lines += [
        {
            "decoding": f"per round, {width} drafted",
            "t_draft": model.draft(1, CONTEXT),
            "t_target": model.target(width + 1, CONTEXT),
            "r2": model.target.r2,
            "c": model.ratio(width, CONTEXT),
        }
        for width in (1, widest)
    ]
    return pd.DataFrame(lines)


if __name__ == "__main__":
    command("timing", run)
