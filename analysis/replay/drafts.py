"""Drafts of one target, side by side: analysis.heads drafts={NAME: FOLDER} responses={DOMAIN: FOLDER}.

Along held-out responses of the target, for every draft and domain:

    alpha       sum_x min(p, q), the probability that a drafted token is accepted: by enumeration, mean over all tokens
    accepted    mean accepted length: accepted tokens per round of `depth` drafted ones, replayed
    throughput  tokens per target-forward time of the best fixed K, replayed (`toolkit.trace`); K is chosen for every draft
                on the responses of dev=FOLDER; without them on these very texts, for every domain by itself

with intervals over prompts, and the differences from the first draft, paired by prompt. Writes drafts.{parquet,csv,md}.

With vocabularies=[4000,null] every draft is also compared with its output layer reduced; coverage is the share of tokens that
it keeps. With measured=true the costs of forward passes are timed here, the target's by their width, so that throughput is the
predicted speed-up over autoregressive decoding. The draft with the largest one over all domains is written to best/. Of many
drafts the best one's figures are too good: report it on other responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from analysis import keys
from analysis.tables.bootstrap import Array, Bootstrap
from analysis.tables.files import markdown, read_table, save_table, show, with_interval
from data_gen.texts import TargetResponses, check_vocabulary, fingerprints, read_responses, within_context
from toolkit.config import instantiate, plain
from toolkit.costs.measure import WIDTHS, measure
from toolkit.costs.table import CostTable
from toolkit.distillation.drafts import export
from toolkit.engine.facts import NO_LIMIT, vocab_size
from toolkit.errors import InputError
from toolkit.files.atomic import write_text
from toolkit.models.pair import TOY, ModelPair, lacks_tokenizer, load_draft, load_tokenizer, resolve, unshared_tokens
from toolkit.models.reduced import kept_tokens, most_frequent, reduce_vocabulary
from toolkit.models.teacher import Text, distributions_along
from toolkit.runs.stage import open_stage
from toolkit.trace.bounds import fixed
from toolkit.trace.record import Recorder
from toolkit.types import Counts

FIGURES = ("alpha", "accepted", "throughput")
COUNTS = tuple(Counts.__dataclass_fields__)
CONTEXT = 128  # tokens before the ones that are timed
REPEATS = 9  # forward passes that are timed; their median counts


def compare_drafts(cfg: keys.Heads) -> Path:
    """Measure every draft on every domain; returns the output folder."""
    drafts, folders = plain(cfg.drafts), plain(cfg.responses)
    if not drafts or not folders:
        raise InputError("expected drafts={NAME: FOLDER} and responses={DOMAIN: FOLDER}, each with at least one")
    if any(cfg.vocabularies) and not cfg.frequencies:
        raise InputError(
            "vocabularies: expected frequencies=[FOLDER,...] of data_gen.responses, whose tokens are counted"
        )
    sequences = {domain: read_responses(folder, same_ends=True) for domain, folder in folders.items()}
    dev = None if cfg.dev is None else read_responses(cfg.dev, same_ends=True)
    counted = read_responses(plain(cfg.frequencies)) if any(cfg.vocabularies) else None
    read = [responses for responses in (*sequences.values(), counted, dev) if responses is not None]
    inputs = [path for responses in read for path in responses.inputs]
    stage = open_stage("heads", cfg, inputs=[*inputs, *(path for draft in drafts.values() for path in _files(draft))])
    if not stage.finished:
        alone: ModelPair = instantiate(cfg.pair, draft=None)
        for responses in (*sequences.values(), *([counted] if counted else [])):
            check_vocabulary(responses, alone.vocab_size)
        candidates = _candidates(cfg, drafts, alone, counted)
        table = _measured(cfg, candidates, alone, sequences, dev)
        save_table(table, stage.folder, "drafts")
        write_text(stage.folder / "drafts.md", markdown(readable(table)) + "\n")
        if cfg.measured:
            best = str(table.groupby("draft", sort=False).throughput.mean().idxmax())
            card = f"# {best}\n\nThe best of {len(candidates)} drafts of `{cfg.pair.target}`: see ../drafts.md.\n"
            export(stage.folder / "best", candidates[best].drafts[0], alone.tokenizer, card)
        stage.finish(drafts=list(candidates), domains=list(folders))
    table = read_table(stage.folder, "drafts")
    columns = readable(table)
    first = [name for name in columns if name not in ("texts", "tokens")]
    costs = "costs measured here" if cfg.measured else f"c = {cfg.cost_ratio:g}"
    show(columns, f"drafts of {cfg.pair.target}, {costs}", stage.folder / "drafts.md", first)
    if cfg.measured:
        means = table.groupby("draft", sort=False).throughput.mean()
        verdict = "" if means.max() > 1 else ", which is slower than autoregressive decoding"
        chosen = f"; chosen among {len(means)} on these very responses" if len(means) > 1 else ""
        print(f"drafts: best/ is {means.idxmax()}, predicted speed-up {means.max():.2f}{verdict}{chosen}")
    return stage.folder


def _candidates(
    cfg: keys.Heads, drafts: dict[str, str], alone: ModelPair, counted: TargetResponses | None
) -> dict[str, ModelPair]:
    """The target with every draft and every reduction of it, by name."""
    sequences = [(row["prompt_ids"], row["token_ids"]) for row in counted.rows] if counted else []
    candidates = {}
    for name, source in drafts.items():
        own = alone.tokenizer if lacks_tokenizer(resolve(source)) else load_tokenizer(source)
        unshared = unshared_tokens(alone.tokenizer, own, f"draft {source}")
        for count in cfg.vocabularies:
            draft = load_draft(source, cfg.pair.device, cfg.pair.dtype, target=alone.target)
            if count is not None:
                vocabulary = kept_tokens(draft)
                tokens = range(vocab_size(draft)) if vocabulary is None else vocabulary.tolist()
                if count >= len(tokens):
                    continue
                ends = alone.end_ids or ()
                reduce_vocabulary(draft, most_frequent(sequences, count, tokens, ends), ends)
            label = name if count is None else f"{name}, V'={count:,}"
            candidates[label] = replace(alone, draft=None, drafts=[draft], unshared=tuple(unshared))
    return candidates


def _measured(
    cfg: keys.Heads,
    candidates: dict[str, ModelPair],
    alone: ModelPair,
    sequences: dict[str, TargetResponses],
    dev: TargetResponses | None,
) -> pd.DataFrame:
    """One line per draft and domain."""
    bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
    costs = [CostTable.ratio(cfg.cost_ratio)] * len(candidates)
    if cfg.measured:  # nothing is decoded, and the loop's own work is left out: many drafts are compared in seconds
        widest = cfg.max_drafted + 1
        widths = [*(width for width in WIDTHS if width < widest), widest]
        side_by_side = replace(alone, draft=None, drafts=[pair.draft for pair in candidates.values()])
        costs = measure(side_by_side, 1, widths, [CONTEXT], REPEATS)
    lines: list[dict[str, Any]] = []
    first: dict[str, Array] = {}
    total = len(candidates) * sum(min(len(responses.rows), cfg.limit or NO_LIMIT) for responses in sequences.values())
    with tqdm(total=total, desc="drafts", unit="text") as bar:
        for (name, pair), cost in zip(candidates.items(), costs, strict=True):
            vocabulary = kept_tokens(pair.draft)
            chosen = (
                None if dev is None else best_length(*replayed(pair, _fitting(pair, dev, cfg.limit), cfg, cost)[:2])
            )
            for domain, responses in sequences.items():
                fitting = _fitting(pair, responses, cfg.limit)
                rows = fitting.rows
                best, parts = text_parts(pair, fitting, cfg, cost, chosen)
                base = first.setdefault(domain, parts)
                tokens = [token for row in rows for token in row["token_ids"]]
                covered = 1.0 if vocabulary is None else float(np.isin(tokens, vocabulary.cpu().numpy()).mean())
                facts = {"draft": name, "domain": domain, "texts": len(rows), "tokens": int(parts[:, 1].sum())}
                facts |= {"coverage": covered, "c": cost.draft(CONTEXT) / cost.target(1, CONTEXT), "best K": best}
                lines.append({**facts, **figures(parts, base, bootstrap)})
                bar.update(len(rows))
    return pd.DataFrame(lines)


def _fitting(pair: ModelPair, responses: TargetResponses, limit: int | None) -> TargetResponses:
    """The first responses that fit into a pair's context. Raises InputError if another target wrote them."""
    fingerprints(pair, responses)
    return replace(responses, rows=within_context(pair, replace(responses, rows=responses.rows[:limit])).rows)


def text_parts(
    pair: ModelPair, responses: TargetResponses, cfg: keys.Heads, costs: CostTable, chosen: int | None = None
) -> tuple[int, Array]:
    """The best fixed K, and for every text the six sums [n, 6] that the figures are quotients of.

    chosen  that K, if other texts have decided it
    """
    sequences = [(row["prompt_ids"], row["token_ids"]) for row in responses.rows]
    generated, cost, accepted = replayed(pair, responses, cfg, costs)
    best = chosen or best_length(generated, cost)
    parts = [
        *alphas(pair, sequences, responses, cfg.batch_size),
        accepted @ np.arange(accepted.shape[1]),
        accepted.sum(1),
        generated[best],
        cost[best],
    ]
    return best, np.stack(parts, axis=1)


def replayed(
    pair: ModelPair, responses: TargetResponses, cfg: keys.Heads, costs: CostTable
) -> tuple[dict[int, Array], dict[int, Array], Array]:
    """By fixed K the tokens that are generated of each text [n], and what they cost [n]; by the tokens accepted, the rounds of
    `depth` drafted ones [n, depth + 1].
    """
    sequences = [(row["prompt_ids"], row["token_ids"]) for row in responses.rows]
    played = []
    for replicate in range(cfg.replicates):
        recorder = Recorder(pair, responses.sampling, cfg.max_drafted, replicate=replicate)
        played.append(fixed(recorder.record_all(sequences, range(len(sequences)), cfg.batch_size)))
    counts = {k: np.sum([replay[k].per_text for replay in played], axis=0) for k in played[0]}
    drafts, targets = COUNTS.index("num_draft_calls"), COUNTS.index("num_target_calls")
    c, single = costs.draft(CONTEXT) / costs.target(1, CONTEXT), costs.target(1, CONTEXT)
    wide = {k: costs.target(k + 1, CONTEXT) / single for k in counts}
    cost = {k: c * part[:, drafts] + wide[k] * part[:, targets] for k, part in counts.items()}
    generated = {k: part[:, COUNTS.index("num_generated")] for k, part in counts.items()}
    depth = min(cfg.depth, cfg.max_drafted)
    accepted = np.sum([replay[depth].accepted for replay in played], axis=0).astype(np.float64)
    return generated, cost, accepted


def best_length(generated: dict[int, Array], cost: dict[int, Array]) -> int:
    """The fixed K above 0 of the most tokens per cost."""
    return max((k for k in generated if k), key=lambda k: generated[k].sum() / cost[k].sum())


def alphas(
    pair: ModelPair, sequences: Sequence[Text], responses: TargetResponses, batch_size: int
) -> tuple[Array, Array]:
    """Sum of alpha over each text's tokens [n], and how many those are [n]."""
    sums = []
    for first in range(0, len(sequences), batch_size):
        distributions = distributions_along(pair, sequences[first : first + batch_size], responses.sampling)
        sums += [float(p.minimum(q).double().sum()) for p, q in distributions]
    return np.array(sums), np.array([float(len(produced)) for _, produced in sequences])


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
    if (table.coverage < 1).any():
        columns["coverage"] = table.coverage.map("{:.3f}".format)
    if table.c.nunique() > 1:
        columns["c"] = table.c.map("{:.3f}".format)
    for name in FIGURES:
        if name == "throughput":
            columns["best K"] = table["best K"]
        for column in (name, f"{name} gain"):
            ends = zip(table[column], table[f"{column}_low"], table[f"{column}_high"], table.texts, strict=True)
            columns[column] = [with_interval(*numbers) for numbers in ends]
        columns.loc[table.draft == table.draft.iloc[0], f"{name} gain"] = ""
    return columns


def _files(source: str) -> list[Path]:
    """The files of a local checkpoint; none of a hub name."""
    folder = TOY.parent / source if source == "toy/draft" else Path(source)
    return sorted(path for path in folder.glob("*.safetensors")) + sorted(folder.glob("*config.json"))
