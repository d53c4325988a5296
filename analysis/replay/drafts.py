"""Drafts of one target, side by side: analysis.heads drafts={NAME: FOLDER} responses={DOMAIN: FOLDER}.

Along held-out responses of the target, for every draft and domain:

    alpha       sum_x min(p, q), the probability that a drafted token is accepted: by enumeration, mean over all tokens
    accepted    mean accepted length: accepted tokens per round of `depth` drafted ones, replayed
    throughput  tokens per target-forward time of the best fixed K, replayed (`analysis.replay`); K is chosen on these very
                texts, for every draft and domain by itself

with intervals over prompts, and the differences from the first draft, paired by prompt. Writes drafts.{parquet,csv,md}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.replay.upper_bound import fixed
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.console import show
from analysis.tables.files import markdown, read_table, save_table, with_interval
from data_gen.recording import Recorder
from data_gen.texts import Responses, fingerprints, read_responses, within_context
from toolkit.config import commands, instantiate, plain
from toolkit.errors import InputError
from toolkit.files.atomic import write_text
from toolkit.models.pair import TOY, ModelPair, load_draft, load_tokenizer, unshared_tokens
from toolkit.models.teacher import Text, distributions_along
from toolkit.runs.stage import open_stage
from toolkit.types import Counts

Array = NDArray[np.float64]
FIGURES = ("alpha", "accepted", "throughput")
COUNTS = tuple(Counts.__dataclass_fields__)


def compare_drafts(cfg: commands.Heads) -> Path:
    """Measure every draft on every domain; returns the output folder."""
    drafts, folders = plain(cfg.drafts), plain(cfg.responses)
    if not drafts or not folders:
        raise InputError("expected drafts={NAME: FOLDER} and responses={DOMAIN: FOLDER}, each with at least one")
    texts = {domain: read_responses(folder, same_ends=True) for domain, folder in folders.items()}
    inputs = [path for responses in texts.values() for path in responses.inputs]
    stage = open_stage("drafts", cfg, inputs=[*inputs, *(path for draft in drafts.values() for path in _files(draft))])
    if not stage.finished:
        table = _measured(cfg, drafts, texts)
        save_table(table, stage.folder, "drafts")
        write_text(stage.folder / "drafts.md", markdown(readable(table)) + "\n")
        stage.finish(drafts=list(drafts), domains=list(folders))
    table = readable(read_table(stage.folder, "drafts"))
    first = [name for name in table if name not in ("texts", "tokens")]
    show(table, f"drafts of {cfg.pair.target}, c = {cfg.cost_ratio:g}", stage.folder / "drafts.md", first)
    return stage.folder


def _measured(cfg: commands.Heads, drafts: dict[str, str], texts: dict[str, Responses]) -> pd.DataFrame:
    """One line per draft and domain."""
    alone: ModelPair = instantiate(cfg.pair, draft=None)
    bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
    lines: list[dict[str, Any]] = []
    first: dict[str, Array] = {}
    for name, source in drafts.items():
        unshared = unshared_tokens(alone.tokenizer, load_tokenizer(source), f"draft {source}")
        draft = load_draft(source, cfg.pair.device, cfg.pair.dtype)
        pair = replace(alone, draft=None, drafts=[draft], unshared=tuple(unshared))
        for domain, responses in texts.items():
            fingerprints(pair, responses)
            rows = within_context(pair, replace(responses, rows=responses.rows[: cfg.limit])).rows
            best, parts = text_parts(pair, replace(responses, rows=rows), cfg)
            base = first.setdefault(domain, parts)
            facts = {
                "draft": name,
                "domain": domain,
                "texts": len(rows),
                "tokens": int(parts[:, 1].sum()),
                "best K": best,
            }
            lines.append({**facts, **figures(parts, base, bootstrap)})
    return pd.DataFrame(lines)


def text_parts(pair: ModelPair, responses: Responses, cfg: commands.Heads) -> tuple[int, Array]:
    """The best fixed K, and for every text the six sums [n, 6] that the figures are quotients of."""
    texts = [(row["prompt_ids"], row["token_ids"]) for row in responses.rows]
    played = []
    for replicate in range(cfg.replicates):
        recorder = Recorder(pair, responses.sampling, cfg.max_drafted, replicate=replicate)
        played.append(fixed(recorder.record_all(texts, range(len(texts)), cfg.batch_size)))
    counts = {k: np.sum([replay[k].per_text for replay in played], axis=0) for k in played[0]}
    cost = {k: np.sum([replay[k].cost(cfg.cost_ratio) for replay in played], axis=0) for k in played[0]}
    generated = COUNTS.index("num_generated")
    best = max(counts, key=lambda k: counts[k][:, generated].sum() / cost[k].sum())
    depth = min(cfg.depth, cfg.max_drafted)
    accepted = np.sum([replay[depth].accepted for replay in played], axis=0).astype(np.float64)
    parts = [
        *alphas(pair, texts, responses, cfg.batch_size),
        accepted @ np.arange(accepted.shape[1]),
        accepted.sum(1),
        counts[best][:, generated],
        cost[best],
    ]
    return best, np.stack(parts, axis=1)


def alphas(pair: ModelPair, texts: Sequence[Text], responses: Responses, batch_size: int) -> tuple[Array, Array]:
    """Sum of alpha over each text's tokens [n], and how many those are [n]."""
    sums = []
    for first in range(0, len(texts), batch_size):
        distributions = distributions_along(pair, texts[first : first + batch_size], responses.sampling)
        sums += [float(p.minimum(q).double().sum()) for p, q in distributions]
    return np.array(sums), np.array([float(len(produced)) for _, produced in texts])


def figures(parts: Array, base: Array, bootstrap: Bootstrap) -> dict[str, float]:
    """The figures of a draft with intervals, and their differences from another draft's on the same texts."""

    def quotients(totals: Array) -> dict[str, Array]:
        each = totals[..., 0::2] / totals[..., 1::2]  # three of the draft, three of the other one
        gains = each[..., :3] - each[..., 3:]
        return {
            **{name: each[..., number] for number, name in enumerate(FIGURES)},
            **{f"{name} gain": gains[..., number] for number, name in enumerate(FIGURES)},
        }

    return bootstrap.figures(np.concatenate([parts, base], axis=1), quotients)


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """The table with intervals after the figures; the first draft has no gains."""
    columns = table[["draft", "domain", "texts", "tokens"]].copy()
    for name in FIGURES:
        if name == "throughput":
            columns["best K"] = table["best K"]
        for column in (name, f"{name} gain"):
            triples = zip(table[column], table[f"{column}_low"], table[f"{column}_high"], strict=True)
            columns[column] = [with_interval(*triple) for triple in triples]
        columns.loc[table.draft == table.draft.iloc[0], f"{name} gain"] = ""
    return columns


def _files(source: str) -> list[Path]:
    """The files of a local checkpoint; none of a hub name."""
    folder = TOY.parent / source if source == "toy/draft" else Path(source)
    return sorted(path for path in folder.glob("*.safetensors")) + sorted(folder.glob("config.json"))
