"""python -m analysis.serving hardware=h100 users=[1,4,16] slots=16: what speculation does to a queue, by load.

Continuous batching, simulated on recorded texts (`analysis.loads.simulator`). A load is a number of users, each waiting for
its answer, or a rate of requests at random times. Files:

    serving      one line per load and setting: tokens/s, seconds per output token and to the answer (median, 95 %), batch
    serving.png  tokens per second over autoregressive decoding's, best setting of every method (also pdf and svg)
    costs.json   the cost table
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("serving")

from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from analysis import keys
from analysis.figures.plots import over_plain
from analysis.loads.costs import costs_of, costs_of_files
from analysis.loads.recorded import RecordedPair
from analysis.loads.simulator import Load
from analysis.tables.files import save_table, show
from analysis.tables.grid import PLAIN, expand
from analysis.tables.sweep_context import SweepContext
from toolkit.config import instantiate, plain
from toolkit.errors import InputError
from toolkit.models.prompts import without_grammars
from toolkit.runs.stage import open_stage, prompt_files
from toolkit.runs.tracking import log_image, log_table, wandb_run

SIMULATED = ("grid", "slots", "users", "rates", "requests", "shapes", "costs", "hardware", "devices", "rounds", "drops")
IGNORED = (*SIMULATED, "hidden", "track")
SHOWN = ["load", "method", "setting", "tokens_per_second", "times_plain", "token_seconds", "latency", "latency_95"]


def run(cfg: keys.Serving) -> Path:
    loads = [Load(cfg.slots, users=users, drops=cfg.drops) for users in plain(cfg.users)]
    loads += [Load(cfg.slots, rate=rate, drops=cfg.drops) for rate in plain(cfg.rates)]
    if not loads:
        raise InputError("expected users=[N, ...] or rates=[R, ...], got neither")
    pair, sampling = instantiate(cfg.pair), instantiate(cfg.sampling)
    pair.check_has_draft("serving with and without drafts")
    sizes = sorted({1, cfg.slots, *(min(size, cfg.slots) for size in plain(cfg.users))})
    costs_of_files(cfg, 1, sizes)  # what it lacks is named before anything is recorded
    prompts = without_grammars(instantiate(cfg.prompts).load())
    stage = open_stage("serving", cfg, inputs=prompt_files(cfg), ignore=IGNORED)
    stage.start()
    context = SweepContext(pair, prompts, sampling, cfg.batch_size)
    bound = cfg.max_drafted if cfg.max_drafted != "auto" else None
    settings = expand(plain(cfg.grid), with_plain=True, max_drafted=bound)
    recorded = RecordedPair(context, settings, stage.folder, cfg.max_drafted, cfg.hidden)
    for method, reason in recorded.left_out.items():
        print(f"{method} left out, {reason}")
    (costs,) = costs_of(cfg, [pair], sizes)
    recorded.costs = costs, costs.save(stage.folder / "costs.json")
    if beyond := costs.beyond(cfg.slots, recorded.deepest + 1):
        print(f"costs: {beyond}: the last slope continues there")
    requests = [number % len(recorded.sequences) for number in range(cfg.requests)]
    table = _serve(recorded, loads, requests)
    save_table(table, stage.folder, "serving")
    title = f"{cfg.slots} slots, {costs.whose}"
    figure = over_plain(table, stage.folder / "serving.png", title)
    best = table.loc[table.groupby(["load", "method"], sort=False).tokens_per_second.idxmax()]
    first = ("load", "method", "setting", "tokens_per_second", "times_plain", "note")
    show(best[[*SHOWN, "note"]], f"{title}; the best setting of every method", stage.folder / "serving.csv", first)
    for kind, part in table.groupby("kind", sort=False):
        pays = part[part.method != PLAIN].groupby("amount").times_plain.max().sort_index()
        losing = ", ".join(f"{load:g}" for load in pays[pays <= 1.0].index)
        every = f"drafting pays at every load, {pays.min():.2f} to {pays.max():.2f} times plain decoding"
        print(f"{kind}: drafting does not pay at {losing}" if losing else f"{kind}: {every}")
    with wandb_run("serving", plain(cfg), stage.folder, track=cfg.track) as wandb:
        log_table(wandb, "serving/serving", table)
        log_image(wandb, "serving/over_plain", figure)
    return stage.finish(num_requests=cfg.requests, costs=costs.source)


def _serve(recorded: RecordedPair, loads: list[Load], requests: list[int]) -> pd.DataFrame:
    lines = []
    with tqdm(total=len(loads) * len(recorded.settings), desc="simulating", unit="setting") as bar:
        for load in loads:
            # Few users send few requests: sixteen each, and at least 64 in all.
            count = max(64, 16 * load.users) if load.users is not None and load.rate is None else None
            for setting in recorded.settings:
                figures = recorded.serve(setting, load, requests[:count]).figures()
                kind, amount = ("users", load.users) if load.rate is None else ("requests/s", load.rate)
                lines.append({
                    "kind": kind, "amount": amount, "load": f"{amount:g} {kind}", "method": setting.method,
                    "setting": setting.label, **figures,
                })  # fmt: skip
                bar.update()
    table = pd.DataFrame(lines)
    without = table[table.method == PLAIN].set_index("load").tokens_per_second
    table["times_plain"] = table.tokens_per_second / table.load.map(without)
    fixed = table[table.method == "speculative"].groupby("load").tokens_per_second.max()
    below_fixed = table.tokens_per_second < table.load.map(fixed).fillna(0)
    slower = table.times_plain < 1
    table["note"] = np.select(
        [slower, below_fixed & (table.method != PLAIN)], ["slower than plain", "slower than fixed K"], ""
    )
    return table
