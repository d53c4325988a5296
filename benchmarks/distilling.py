"""What a distilled draft gains: the toy pair's draft, trained further with several losses and, as a control, cross entropy.

Everything goes through the commands responses, distill and drafts. Their results are kept below outputs/.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analysis import drafts
from analysis.tables.files import markdown, read_table, with_interval
from benchmarks.distilled_heads import rate_rule
from data_gen import responses
from toolkit import distill
from toolkit.config import compose
from toolkit.io import read_json

FOLDER = Path(__file__).resolve().parent.parent / "outputs" / "distillation"
DOMAINS = ("instruct", "math", "code")
CONTROL = "cross_entropy"
TRAINED = (CONTROL, "forward_kl", "tvd", "lk")
SEEDS = (0, 1, 2)
RATES = (1e-4, 3e-4, 1e-3)  # tried with the first seed
TRAIN, TEST, EPOCHS = 200, 40, 3
FIGURES = ("alpha", "accepted", "throughput")
AFTER = """\
## The rate rule, heads retrained

`python -m toolkit.distill +experiment=distill_heads seed=SEED`: total variation, 150 training prompts per domain, six epochs
at most. A pre-read head is trained for the shipped draft and one for the distilled draft, on the same responses. 100 test
prompts per domain, replayed. Tokens per target-forward time at c = .2."""


def distillation() -> str:
    """The shipped draft trained on responses of its target: chance of acceptance, accepted length, throughput per domain."""
    torch.set_num_threads(1)
    train = {domain: _responses(domain, "train", TRAIN, 0) for domain in DOMAINS}
    test = {domain: _responses(domain, "test", TEST, 1) for domain in DOMAINS}
    tried = {loss: {rate: _distilled(loss, SEEDS[0], rate, list(train.values())) for rate in RATES} for loss in TRAINED}
    rates = {
        loss: max(RATES, key=lambda rate, of=found: _scores(of[rate])["val/alpha"]) for loss, found in tried.items()
    }
    runs = {
        f"{loss}-{seed}": _distilled(loss, seed, rate, list(train.values()))
        for loss, rate in rates.items()
        for seed in SEEDS
    }
    named = {"shipped": "toy/draft", **{name: str(folder / "draft") for name, folder in runs.items()}}
    table = _compared(named, test)
    parts = [_about({_scores(folder)["tokens"] for folder in runs.values()}), markdown(_rates(tried)),
             markdown(_summary(table, rates)), _verdict(table), "Every run, with intervals:",
             markdown(drafts.readable(table)), AFTER, markdown(rate_rule(SEEDS, FOLDER))]  # fmt: skip
    return "\n\n".join(parts)


def _about(tokens: set[int]) -> str:
    counts = ", ".join(f"{count:,}" for count in sorted(tokens))
    return f"""\
Start: the shipped toy draft. {TRAIN} training prompts per domain, {EPOCHS} epochs, batches of 16 texts, AdamW with a cosine:
{counts} tokens per run. The control is cross entropy on the same tokens. The teacher is a cache
of the 64 likeliest tokens. The exported state is the one with the highest acceptance rate (alpha) on validation prompts.
The learning rate of each loss, the control's too, is the one with the highest such alpha with seed {SEEDS[0]}.
{TEST} test prompts per domain, T = 1, c = .2; *accepted*: tokens per round of eight. {len(SEEDS)} seeds per loss (order of the
texts, validation prompts), each shown; intervals are over prompts. All texts were drawn from the target: nothing is on-policy.
Responses and runs that an earlier call had finished are found again and not timed again."""


def _rates(tried: dict[str, dict[float, Path]]) -> pd.DataFrame:
    """Validation alpha by rate, before and after."""
    lines = []
    for loss, found in tried.items():
        before = _scores(found[RATES[0]])["start/alpha"]
        after = {f"alpha after, rate {rate:g}": f"{_scores(folder)['val/alpha']:.4f}" for rate, folder in found.items()}
        lines.append({"loss": loss, "validation alpha before": f"{before:.4f}", **after})
    return pd.DataFrame(lines)


def _scores(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_json(folder / "metrics.json")
    return found


def _responses(domain: str, split: str, limit: int, seed: int) -> Path:
    words = [f"prompts=toy_{domain}", f"prompts.split={split}", f"prompts.limit={limit}", f"sampling.seed={seed}"]
    return _run(responses, "responses", words)


def _distilled(loss: str, seed: int, rate: float, texts: Sequence[Path]) -> Path:
    words = [f"responses=[{','.join(map(str, texts))}]", f"loss={loss}", "teacher=cached", f"seed={seed}"]
    return _run(distill, "distill", [*words, f"trainer.max_epochs={EPOCHS}", f"optimizer.lr={rate:g}"])


def _compared(named: dict[str, str], test: dict[str, Path]) -> pd.DataFrame:
    said = {"drafts": named, "responses": {domain: str(folder) for domain, folder in test.items()}}
    words = [
        f"{key}={{{', '.join(f'{name}: {value}' for name, value in values.items())}}}" for key, values in said.items()
    ]
    return read_table(_run(drafts, "drafts", words), "drafts")


def _run(module: Any, config: str, words: Sequence[str]) -> Path:
    folder: Path = module.run(compose(config, [*words, f"paths.root_dir={FOLDER}"]))
    return folder


def _summary(table: pd.DataFrame, rates: dict[str, float]) -> pd.DataFrame:
    """One line per loss and domain: the shipped draft's figures, and the gain of each seed."""
    lines = []
    for domain in DOMAINS:
        of = table[table.domain == domain].set_index("draft")
        shipped = {
            name: with_interval(*(of[f"{name}{end}"]["shipped"] for end in ("", "_low", "_high"))) for name in FIGURES
        }
        lines.append({"domain": domain, "loss": "shipped", "rate": "", **shipped})
        for loss in TRAINED:
            gains = {
                name: ", ".join(f"{of[f'{name} gain'][f'{loss}-{seed}']:+.3f}" for seed in SEEDS) for name in FIGURES
            }
            name = loss + (" (control)" if loss == CONTROL else "")
            lines.append({"domain": domain, "loss": name, "rate": f"{rates[loss]:g}", **gains})
    return pd.DataFrame(lines)


def _verdict(table: pd.DataFrame) -> str:
    """Per loss, the domains where every seed's interval is above the shipped draft, and where one seed's lies below it."""
    lines = [
        "Against the shipped draft, by the intervals over prompts (better: with every seed; worse: with at least one):",
        "",
    ]
    for loss in TRAINED:
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
    return "\n".join(lines)


def _gains(table: pd.DataFrame, loss: str, domain: str, name: str) -> tuple[float, float, float]:
    """The lowest lower end, the lowest upper end and the lowest gain of the seeds."""
    chosen = table[(table.domain == domain) & table.draft.str.startswith(f"{loss}-")]
    column = f"{name} gain"
    return float(chosen[f"{column}_low"].min()), float(chosen[f"{column}_high"].min()), float(chosen[column].min())
