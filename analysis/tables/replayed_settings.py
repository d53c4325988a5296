"""Settings of a sweep from one recording: every chain policy is replayed on a trace of autoregressive responses.

What cannot be replayed (draft trees, block verification) is decoded. One trace serves all settings of one draft
temperature (`toolkit.trace.store`). If a sweep asks for the upper bound, its traces hold the target along the roll-outs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.tables.grid import UPPER_BOUND, Setting
from analysis.tables.sweep_context import SweepContext, checked
from toolkit.decoding.proposers import BestSourceProposer
from toolkit.decoding.proposers.copying import CopyProposer
from toolkit.errors import InputError
from toolkit.models.teacher import Text
from toolkit.trace import Trace
from toolkit.trace.bounds import at_price
from toolkit.trace.copies import Copies
from toolkit.trace.replay import Replayed, replay
from toolkit.trace.store import Store
from toolkit.trace.view import piece, token_rounds
from toolkit.types import Counts


class Recording:
    """The traces of a sweep's responses, made when they are needed.

    responses    rows of autoregressive decoding
    folder       the traces are kept here
    settings     that will be replayed: the heads that their methods read are recorded, and what the upper bound needs
    max_drafted  most tokens a replayed method may draft in a round
    hidden       keep the draft's states, for heads that are asked for later
    """

    def __init__(
        self,
        context: SweepContext,
        responses: pd.DataFrame,
        folder: Path,
        settings: Sequence[Setting],
        max_drafted: int,
        hidden: bool = True,
    ):
        if context.sampling.max_length is not None:
            raise InputError("replays know one limit for all texts: expected sampling.max_length=null, or source=live")
        self.context, self.settings, self.max_drafted = context, settings, max_drafted
        self.store, self.traces = Store(folder, hidden), dict[float | None, Trace]()
        self.responses = context.within_context(responses)
        self.upper_bound = any(setting.method == UPPER_BOUND for setting in settings)
        policies = [context.bound(setting).policy for setting in settings if setting.method != UPPER_BOUND]
        estimators = [getattr(getattr(policy, "policy", None), "estimator", None) for policy in policies]
        heads = {getattr(estimator, "head", None) for estimator in estimators}
        self.heads = sorted(head for head in heads if head is not None)
        fine = self.responses.error.isna() & self.responses.token_ids.map(len).gt(
            0
        )  # a table turns None into not-a-number
        self.usable = np.flatnonzero(fine).tolist()
        rows = [self.responses.iloc[number] for number in self.usable]
        self.sequences: list[Text] = [(list(row.prompt_ids), list(row.token_ids)) for row in rows]

    def rows(self, setting: Setting) -> pd.DataFrame:
        """The setting's row of every prompt."""
        trace = self.trace_for(setting)  # recorded before the clock starts
        started = perf_counter()
        replayed = self._replay(trace, setting)
        seconds = perf_counter() - started
        index_of = {number: i for i, number in enumerate(self.usable)}
        rows = []
        for number, response in enumerate(self.responses.itertuples()):
            at = index_of.get(number)
            counts: dict[str, Any] = {
                **{name: 0 if at is None else int(replayed.counts[name][at]) for name in Counts.__dataclass_fields__},
                "accepted_lengths": _histogram(replayed.accepted, at),
                "drafted_lengths": _histogram(replayed.drafted, at),
                "reached_lengths": _histogram(replayed.reached_lengths, at),
                **{name: 0 if at is None else int(values[at]) for name, values in replayed.sources.items()},
            }
            rows.append(self.context.row(number, True, counts, response, seconds))
        return checked(rows)

    def tokens(self, setting: Setting, count: int) -> dict[str, Any] | None:
        """What the setting's rounds did to every token of the first `count` texts; None where no recording says it."""
        trace = None if setting.method == UPPER_BOUND else self.trace_for(setting)
        if trace is None or self.context.methods[setting.name].proposer.shows_matches:
            return None
        tokenizer, policy = self.context.pair.tokenizer, self.context.bound(setting).policy
        chosen = list(range(min(count, trace.num_texts)))
        sequences = []
        for number, rounds in zip(chosen, token_rounds(trace, policy, chosen, tokenizer), strict=True):
            prompt, produced = self.sequences[number]
            for record in rounds:
                if record["extra"] is not None:
                    record["extra"]["text"] = piece(tokenizer, int(produced[record["extra"].pop("position")]))
            ids = list(map(int, prompt))
            text = ids if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
            sequences.append(
                {"id": str(self.context.prompts[self.usable[number]].id), "prompt": str(text), "rounds": rounds}
            )
        return {"method": setting.method, "setting": setting.label, "texts": sequences}

    def trace_for(self, setting: Setting) -> Trace | None:
        """The trace that a setting is replayed on; None: it needs the texts alone."""
        if setting.method == UPPER_BOUND:
            temperature = setting.parameters.get("draft_temperature")
        else:
            method = self.context.methods[setting.name]
            if isinstance(method.proposer, CopyProposer):
                return None
            temperature = method.draft_temperature
        if temperature not in self.traces:
            self.traces[temperature] = self.store.trace(
                self.context.pair, self.context.sampling, self.sequences, self.max_drafted, self.heads,
                rows=self.usable, draft_temperature=temperature, upper_bound=self.upper_bound,
            )  # fmt: skip
        return self.traces[temperature]

    def copies(self, proposer: CopyProposer | None, most: int) -> Copies:
        """What these texts let a proposer copy, at most so many tokens a round."""
        context = self.context
        return Copies(
            proposer, self.sequences, most, context.sampling.max_new_tokens, context.pair.ends(context.sampling)
        )

    def _replay(self, trace: Trace | None, setting: Setting) -> Replayed:
        if setting.method == UPPER_BOUND:
            assert trace is not None
            price, min_drafted = setting.parameters["price"], setting.parameters.get("min_drafted")
            return at_price(trace, float(price), int(min_drafted or 0))
        method = self.context.bound(setting)
        if isinstance(method.proposer, CopyProposer):
            return replay(self.copies(method.proposer, method.limit), method.policy)
        assert trace is not None
        best = method.proposer if isinstance(method.proposer, BestSourceProposer) else None
        return replay(trace, method.policy, None if best is None else self.copies(best.copies, method.limit))


def _histogram(counts: NDArray[np.int64], at: int | None) -> list[int]:
    """A text's line of counts [T, M + 1], without the zeros after the last one."""
    return [] if at is None or not len(counts) else np.trim_zeros(counts[at], "b").tolist()
