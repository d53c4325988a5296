"""What a serving engine's own counts say of the draft length: analysis.advise responses=FILE cost_ratio=.1.

The input is a file of vLLM's answers, of its /metrics page, or the generations.jsonl of toolkit.decode
(`analysis.loads.engine_counts`). Every length k up to the longest K gets tokens per round, 1 + sum_{j <= k} P(at least j
accepted), and (tokens per round) / (1 + c k), or 1 + c where a round's tokens come from one draft forward pass: the file of
toolkit.decode says so, of another blocks=true. Copies cost none, c = 0.
P(at least j accepted) is the product, up to j, of P(accepted | drafted and all before accepted). Rounds of length k are taken
to start where the counted ones did: exact at k = K, close where acceptance is alike along a text. Rounds of changing length
count as if the draft's tokens did not decide their lengths. Files:

    lengths    one line per draft length
    positions  P(accepted | all before accepted) of every draft position
    observed.md
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import keys
from analysis.loads.engine_counts import DETAILED, PositionCounts, read_counts
from analysis.tables.bootstrap import ENOUGH, Array, Bootstrap, brackets, spread_name
from analysis.tables.files import markdown, read_table, save_table, show, with_interval
from toolkit.errors import InputError
from toolkit.files.atomic import write_text
from toolkit.runs.stage import open_stage


def advise_from_counts(cfg: keys.Advise) -> Path:
    path = Path(str(cfg.responses))
    counts = read_counts(path)
    if counts.has_two_sources:
        raise InputError(
            f"{path}: expected rounds of one source; some copied tokens, others drafted them, and prices differ"
        )
    if counts.most_calls is not None:
        if cfg.blocks and counts.most_calls != 1:
            raise InputError(f"blocks=true: {path} counts {counts.most_calls} draft passes a round; leave it out")
        cfg = copy.deepcopy(cfg)
        cfg.blocks, cfg.cost_ratio = counts.most_calls == 1, cfg.cost_ratio if counts.most_calls else 0.0
    stage = open_stage("advise", cfg, inputs=[path])
    num_requests = len(counts.reached)
    whose = "sums of a whole server" if counts.whole_server else f"{num_requests} requests"
    about = f"{whose}, c = {cfg.cost_ratio:g}"
    notes = notes_on(counts)
    if not stage.finished:
        bootstrap = Bootstrap(cfg.resamples, cfg.confidence, cfg.seed)
        spread = "no intervals" if counts.whole_server else f"{spread_name(num_requests, cfg.confidence)} over requests"
        lengths, positions = by_length(counts, cfg.cost_ratio, bootstrap, cfg.blocks), by_position(counts, bootstrap)
        save_table(lengths, stage.folder, "lengths")
        save_table(positions, stage.folder, "positions")
        parts = [
            "# Observed acceptance",
            sentence(lengths, counts, cfg.cost_ratio, cfg.blocks),
            " ".join([f"{about}; {spread}.", *notes]),
        ]
        parts += [markdown(readable(lengths)), "Accepted, given that all tokens before it were:", markdown(positions)]
        write_text(stage.folder / "observed.md", "\n\n".join(parts) + "\n")
        stage.finish(num_requests=num_requests, num_skipped=counts.skipped)
    lengths = read_table(stage.folder, "lengths")
    show(readable(lengths), about, stage.folder / "observed.md")
    for note in notes:
        print(note)
    print(sentence(lengths, counts, cfg.cost_ratio, cfg.blocks))
    return stage.folder


def notes_on(counts: PositionCounts) -> list[str]:
    """What a reader has to know of where the figures come from, as sentences."""
    notes = []
    if counts.skipped:
        notes.append(
            f"{counts.skipped} lines were left out: no counts, or rounds of changing length, which only {DETAILED} tells apart."
        )
    if counts.most_calls in (0, 1):
        notes.append(f"Draft forward passes per round, as the file counts them: {counts.most_calls}.")
    share = counts.drafted / (counts.longest * counts.rounds)
    if counts.bounded:
        notes.append(
            f"Rounds drafted {share:.0%} of {counts.longest} tokens. Sums do not say which: figures are lower bounds; "
            f"{DETAILED} tells positions apart."
        )
    elif share < 1:
        notes.append(
            f"Rounds drafted {share:.0%} of {counts.longest} tokens. Where a rule ended them for what the draft showed, longer "
            "lengths look better than they are."
        )
    return notes


def by_length(counts: PositionCounts, cost_ratio: float, bootstrap: Bootstrap, blocks: bool = False) -> pd.DataFrame:
    """One line per draft length k, 0 being autoregressive decoding: tokens per round, throughput, their intervals.

    blocks  a round's tokens come from one draft forward pass
    """

    def tokens_per_round(totals: Array) -> Array:
        """[..., 2 K] -> at draft length k: 1 + sum over j <= k of P(at least j accepted); not a number beyond what was drafted.

        Of the rounds that accepted position j, those that drafted position j + 1 stand for all.
        """
        reached, accepted = np.split(totals, 2, axis=-1)
        weights = np.ones_like(reached)
        weights[..., 1:] = np.where(accepted[..., :-1] > 0, accepted[..., :-1] / reached[..., 1:], 1).cumprod(-1)
        alive = accepted / reached[..., :1] * weights
        return np.concatenate([np.ones_like(alive[..., :1]), alive], axis=-1).cumsum(-1)

    ends = bootstrap.spread(np.hstack([counts.reached, counts.accepted]), tokens_per_round)
    table = pd.DataFrame({"num_drafted": np.arange(counts.longest + 1), "requests": len(counts.reached)})
    calls = table.num_drafted.clip(upper=1) if blocks else table.num_drafted
    for name, cost in (("tokens_per_round", 1.0), ("throughput", 1 + cost_ratio * calls)):
        for end, numbers in zip(("", "_low", "_high"), ends, strict=True):
            table[f"{name}{end}"] = numbers / cost
    return table


def by_position(counts: PositionCounts, bootstrap: Bootstrap) -> pd.DataFrame:
    """One line per draft position: how often it was accepted where all before it were, and over how many rounds."""
    lines = []
    for j in range(counts.longest):
        pairs = np.stack([counts.accepted[:, j], counts.reached[:, j]], axis=1)
        with np.errstate(invalid="ignore"):  # positions that no round reached
            accepted = bootstrap.figures(pairs, lambda sums: {"accepted": sums[..., 0] / sums[..., 1]}, "probability")
        lines.append({"position": j + 1, "rounds": int(pairs[:, 1].sum()), **accepted})
    return pd.DataFrame(lines)


def sentence(lengths: pd.DataFrame, counts: PositionCounts, cost_ratio: float, blocks: bool = False) -> str:
    """The answer in one sentence: the best of the draft lengths whose speed-up has an interval (or range) above 1.

    Sums of a server have no interval: the best of their figures, or of their lower bounds.
    """
    few, requests = lengths.throughput_low[1:].isna().all(), len(counts.reached)
    if few and not counts.whole_server:
        return "Nothing is advised: so few requests show no spread; give the counts of more."
    faster = lengths[(lengths.throughput if counts.whole_server else lengths.throughput_low) > 1]
    if faster.empty and counts.bounded:
        return f"Nothing is advised: no lower bound is above autoregressive decoding; serve with {DETAILED}."
    if faster.empty:
        beyond = "" if counts.whole_server else " beyond its interval" if requests >= ENOUGH else " in every request"
        return f"Do not draft: no draft length is faster than autoregressive decoding{beyond}."
    best = faster.loc[faster.throughput.idxmax()]
    length, drafted = int(best.num_drafted), counts.drafted / counts.rounds
    wider = (
        " (the longest that was counted: let the server draft more to see further)" if length == counts.longest else ""
    )
    counted = (1 + counts.accepted.sum() / counts.rounds) / (1 + cost_ratio * (1 if blocks else drafted))
    rounds = (
        f"rounds of {tokens(counts.longest)}"
        if drafted == counts.longest
        else f"rounds of {drafted:.1f} tokens on average"
    )
    ends = brackets(f"{best.throughput_low:.2f}", f"{best.throughput_high:.2f}", requests)
    return (
        f"Draft {tokens(length)}{wider}: {'at least ' if counts.bounded else ''}{best.throughput:.2f} times "
        f"autoregressive decoding {'(a sum, no interval)' if counts.whole_server else ends}; as counted, in {rounds}: "
        f"{counted:.2f}."
    )


def tokens(count: int) -> str:
    """A number of tokens, in words that agree with it."""
    return f"{count} token{'' if count == 1 else 's'}"


def readable(lengths: pd.DataFrame) -> pd.DataFrame:
    table = pd.DataFrame({"draft length": lengths.num_drafted})
    for name in ("tokens_per_round", "throughput"):
        ends = lengths[[name, f"{name}_low", f"{name}_high", "requests"]].itertuples(index=False)
        table[name.replace("_", " ")] = [with_interval(*numbers) for numbers in ends]
    return table
