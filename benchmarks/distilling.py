"""What a distilled draft is worth: the toy pair's, trained on with several losses, beside the same training with cross entropy.

Everything goes through the commands: responses, distill, drafts. What they make is kept below outputs/.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analysis import drafts
from analysis.tables.files import markdown, read_table, with_interval
from data_gen import responses
from toolkit import distill
from toolkit.config import compose
from toolkit.io import read_json

FOLDER = Path(__file__).resolve().parent.parent / "outputs" / "distillation"
DOMAINS = ("instruct", "math", "code")
CONTROL, LOSSES = "cross_entropy", ("forward_kl", "tvd", "lk")
SEEDS = (0, 1)
TRAIN, TEST, EPOCHS = 200, 40, 3
FIGURES = ("alpha", "accepted", "throughput")


def distillation() -> str:
    """The shipped draft trained on responses of its target: chance of acceptance, accepted length, throughput per domain."""
    torch.set_num_threads(1)
    train = {domain: _responses(domain, "train", TRAIN, 0) for domain in DOMAINS}
    test = {domain: _responses(domain, "test", TEST, 1) for domain in DOMAINS}
    runs = {f"{loss}-{seed}": _distilled(loss, seed, list(train.values())) for loss in (CONTROL, *LOSSES) for seed in SEEDS}
    named = {"shipped": "toy/draft", **{name: str(folder / "draft") for name, folder in runs.items()}}
    table = _compared(named, test)
    tokens = {read_json(folder / "metrics.json")["tokens"] for folder in runs.values()}
    return "\n".join([*_about(tokens), "", markdown(_summary(table)), "", *_verdict(table), "", "Every run, with intervals:",
                      "", markdown(drafts.readable(table))])  # fmt: skip


def _about(tokens: set[int]) -> list[str]:
    return [
        f"Start: the shipped toy draft. {TRAIN} training prompts of each domain, {EPOCHS} epochs, batches of 16 texts, AdamW with",
        f"the default rate, which was not tuned: {', '.join(f'{count:,}' for count in sorted(tokens))} tokens per run. The",
        "teacher is a cache of the 64 likeliest tokens. The exported state is the one of the highest chance of acceptance on",
        f"validation prompts, for the control (cross entropy on the same tokens), too. {TEST} test prompts per domain, T = 1,",
        f"c = .2. `{len(SEEDS)}` seeds per loss (order of the texts, validation prompts): too few for an interval over seeds, so",
        "both are shown; intervals are over prompts. All texts were drawn from the target: nothing here is on-policy.",
    ]


def _responses(domain: str, split: str, limit: int, seed: int) -> Path:
    words = [f"prompts=toy_{domain}", f"prompts.split={split}", f"prompts.limit={limit}", f"sampling.seed={seed}"]
    return _run(responses, "responses", words)


def _distilled(loss: str, seed: int, texts: Sequence[Path]) -> Path:
    named = f"responses=[{','.join(map(str, texts))}]"
    return _run(distill, "distill", [named, f"loss={loss}", "teacher=cached", f"trainer.max_epochs={EPOCHS}", f"seed={seed}"])


def _compared(named: dict[str, str], test: dict[str, Path]) -> pd.DataFrame:
    said = {"drafts": named, "responses": {domain: str(folder) for domain, folder in test.items()}}
    words = [f"{key}={{{', '.join(f'{name}: {value}' for name, value in values.items())}}}" for key, values in said.items()]
    return read_table(_run(drafts, "drafts", words), "drafts")


def _run(module: Any, config: str, words: Sequence[str]) -> Path:
    folder: Path = module.run(compose(config, [*words, f"paths.root_dir={FOLDER}"]))
    return folder


def _summary(table: pd.DataFrame) -> pd.DataFrame:
    """One line per loss and domain: the shipped draft's figures, and what each seed gains."""
    lines = []
    for domain in DOMAINS:
        of = table[table.domain == domain].set_index("draft")
        shipped = {name: with_interval(*(of[f"{name}{end}"]["shipped"] for end in ("", "_low", "_high"))) for name in FIGURES}
        lines.append({"domain": domain, "loss": "shipped", **shipped})
        for loss in (CONTROL, *LOSSES):
            gains = {
                name: ", ".join(f"{of[f'{name} gain'][f'{loss}-{seed}']:+.3f}" for seed in SEEDS) for name in FIGURES
            }
            lines.append({"domain": domain, "loss": loss + (" (control)" if loss == CONTROL else ""), **gains})
    return pd.DataFrame(lines)


def _verdict(table: pd.DataFrame) -> list[str]:
    """Per loss, the domains where every seed's interval is above the shipped draft, and where one seed's lies below it."""
    lines = ["Against the shipped draft, by the intervals over prompts:", ""]
    for loss in (CONTROL, *LOSSES):
        said = []
        for name in FIGURES:
            gains = {domain: _gains(table, loss, domain, name) for domain in DOMAINS}
            better = [domain for domain, (low, _, _) in gains.items() if low > 0]
            worse = [domain for domain, (_, high, _) in gains.items() if high < 0]
            fell = [domain for domain, (_, _, least) in gains.items() if least < 0 and domain not in worse]
            said.append(
                f"{name}: better in {', '.join(better) or 'none'}; worse in {', '.join(worse) or 'none'}"
                + (f"; lower, within the interval, for some seed in {', '.join(fell)}" if fell else "")
            )
        lines.append(f"- `{loss}`. " + ". ".join(one[0].upper() + one[1:] for one in said) + ".")
    return lines


def _gains(table: pd.DataFrame, loss: str, domain: str, name: str) -> tuple[float, float, float]:
    """The lowest lower end, the lowest upper end and the lowest gain of the seeds."""
    chosen = table[(table.domain == domain) & table.draft.str.startswith(f"{loss}-")]
    column = f"{name} gain"
    return float(chosen[f"{column}_low"].min()), float(chosen[f"{column}_high"].min()), float(chosen[column].min())
