"""A sweep's settings: what their rows depend on, and how they come about: decoded, replayed on a recording, or computed.

Autoregressive responses are recorded at all draft temperatures together (`toolkit.trace.store`), and every chain method with
token-level rejection is replayed on them. What cannot be replayed (draft trees, block verification) is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import Tensor

from analysis.tables.grid import ORACLE, PARAMETERS, PLAIN, UPPER_BOUND, Setting
from analysis.tables.rows import COUNTS, LENGTHS, SOURCES, round_lengths
from toolkit.acceptance.folder import head_hash
from toolkit.acceptance.statistics import SHIPPED
from toolkit.config import flatten, instantiate
from toolkit.config.identity import contents_of
from toolkit.decoding import Method, decode
from toolkit.decoding.proposers import BestSourceProposer, ChainProposer
from toolkit.decoding.proposers.copying import CopyProposer
from toolkit.drafts.kinds import reads_states
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.files.digests import digest
from toolkit.grammar import grammars_of
from toolkit.grammar.text import TextWithGrammar, source_of
from toolkit.models.generation_config import resolved
from toolkit.models.pair import ModelPair, fingerprint
from toolkit.models.prompts import Prompt, without_grammar
from toolkit.models.teacher import Text
from toolkit.runs.tracking import parameter_counts
from toolkit.sampling import Sampling
from toolkit.stopping import StoppingPolicy
from toolkit.trace import Trace
from toolkit.trace.bounds import acceptance_probs, at_price, expected_counts
from toolkit.trace.copies import Copies
from toolkit.trace.replay import Replayed, replay
from toolkit.trace.store import Store
from toolkit.trace.view import piece, token_rounds
from toolkit.types import Counts, Generation
from toolkit.verification.rules.rejection import Rejection

TEXTS = ["prompt_ids", "token_ids"]  # columns of a setting's file that the joined rows leave out
Listener = Callable[[Generation], None]


@dataclass
class SweepContext:
    """What all settings of a sweep share. Prompt r draws from the random stream (sampling.seed, r) in every setting."""

    pair: ModelPair
    prompts: Sequence[Prompt]
    sampling: Sampling
    batch_size: int

    def __post_init__(self) -> None:
        self.sampling = resolved(self.sampling, self.pair.target)
        self.hashes = [content_hash(prompt.content) for prompt in self.prompts]
        self.fingerprints = [fingerprint(model) for model in (self.pair.target, *self.pair.drafts)]
        self.methods: dict[str, Method] = {}
        drafts = {f"draft{i or ''}": draft for i, draft in enumerate(self.pair.drafts)}
        self.parameters = parameter_counts({"target": self.pair.target, **drafts})

    def prepare_all(self, settings: Sequence[Setting]) -> dict[str, str]:
        """`prepare` of the settings that pair and sampling allow, by name; prints which methods are left out.

        Raises InputError for a setting that does not fit, and for a grid of nothing but methods without their head.
        """
        headless = sorted({setting.method for setting in settings if self.lacks_head(setting)})
        if any(setting.method not in (*headless, *PARAMETERS, PLAIN) for setting in settings):
            if headless:
                names = ", ".join(headless)
                print(f"{names}: left out, the pair has no trained head; grid.METHOD.head=[FOLDER] names one")
            settings = [setting for setting in settings if setting.method not in headless]
        if self.has_grammars and any(setting.method in PARAMETERS for setting in settings):
            print(f"{', '.join(PARAMETERS)}: left out, they know no grammar")
            settings = [setting for setting in settings if setting.method not in PARAMETERS]
        if reads_states(self.pair.draft) and any(setting.method == ORACLE for setting in settings):
            print("oracle: left out, a draft that reads the target's states has no acceptance of a position alone")
            settings = [setting for setting in settings if setting.method != ORACLE]
        return {setting.name: self.prepare(setting) for setting in settings}

    def prepare(self, setting: Setting) -> str:
        """Build the method; returns a hash of all its rows depend on. Raises InputError if it, or its head, does not fit."""
        grammar = None if self.sampling.grammar is None else source_of(self.sampling.grammar)  # of a file its content
        shared = {
            "sampling": {**vars(self.sampling), "grammar": grammar},
            "models": self.fingerprints,
            "prompts": [[prompt.id, digest] for prompt, digest in zip(self.prompts, self.hashes, strict=True)],
        }
        if setting.method in PARAMETERS:
            return content_hash([shared, setting.method, dict(setting.parameters)], length=16)
        if self.lacks_head(setting):
            raise InputError(
                f"{setting.method} needs an acceptance head, and the pair ships none: expected "
                f"grid.{setting.method}.head=[FOLDER], or leave the method out with ~grid.{setting.method}"
            )
        config, weights = setting.content["method"], None
        self.methods[setting.name] = method = instantiate(config)
        method.bind(self.pair)
        if reads_head(setting):
            head = setting.head or self.pair.head
            weights = head_hash(head) if head else digest(SHIPPED)
        together = [self.batch_size] if method.couples_rows else []
        return content_hash([shared, contents_of(config).identity, weights, *together], length=16)

    def draft_temperature(self, setting: Setting) -> float | None:
        """The draft's own temperature in a prepared setting; None: the sampling's. Equal ones share a recording."""
        own = self.methods[setting.name].draft_temperature
        return None if own == self.sampling.temperature else own

    @property
    def has_grammars(self) -> bool:
        """Whether any text has one."""
        return self.sampling.grammar is not None or any(map(own_grammar, self.prompts))

    @property
    def shared(self) -> tuple[Sequence[Prompt], Sampling, int]:
        return self.prompts, self.sampling, self.batch_size

    def lacks_head(self, setting: Setting) -> bool:
        """Whether the setting's method needs an acceptance head, and neither the setting nor the pair names one."""
        lacks = reads_head(setting) and not (setting.head or self.pair.head)
        return lacks and not _has_key(setting, "statistics")

    def decode(
        self, setting: Setting, on_finish: Listener, on_round: Callable[[int], object] | None = None
    ) -> pd.DataFrame:
        """Decode every prompt with a prepared setting: one row each, with the counts and the texts."""
        method = self.methods[setting.name]
        chains = isinstance(method.proposer, ChainProposer | CopyProposer) and method.beams is None
        started = perf_counter()
        options: dict[str, Any] = {"batch_size": self.batch_size, "on_finish": on_finish, "on_round": on_round}
        generations = decode(self.pair, [prompt.content for prompt in self.prompts], method, self.sampling, **options)
        seconds = perf_counter() - started
        rows = []
        for number, generation in enumerate(generations):
            counts = {**vars(generation.counts), **round_lengths(generation.rounds, chains)}
            counts |= {name: sum(f"{r.source}_rounds" == name for r in generation.rounds) for name in SOURCES}
            ended = generation.finish_reason, generation.error, seconds, generation.prompt_ids, generation.token_ids
            rows.append(self.row(number, method.lossless, counts, *ended))
        return checked(rows)

    def within_context(self, responses: pd.DataFrame) -> pd.DataFrame:
        """The autoregressive rows; those whose text a draft cannot read to its longest get an error instead of it."""
        longest = responses.prompt_ids.map(lambda ids: len(ids) + self.sampling.room(len(ids)))
        beyond = responses.error.isna() & (longest > self.pair.max_length)
        responses = responses.copy()
        responses.loc[beyond, "error"] = f"prompt and response exceed {self.pair.context}; source=live decodes them"
        for name in TEXTS:
            responses[name] = responses[name].where(~beyond, pd.Series([[]] * len(responses), responses.index))
        return responses

    def score_oracle(
        self, setting: Setting, responses: pd.DataFrame, on_text: Callable[[int], object] = lambda count: None
    ) -> pd.DataFrame:
        """The oracle's rows: expectations over the acceptance draws, given the autoregressive responses."""
        responses = self.within_context(responses)
        sequences = list(zip(responses.prompt_ids, responses.token_ids, strict=True))
        temperature, most = setting.parameters.get("draft_temperature"), setting.parameters.get("max_drafted")
        started = perf_counter()
        probs = acceptance_probs(self.pair, sequences, self.sampling, temperature, self.batch_size, on_text)
        counts = [expected_counts(text, most) for text in probs]
        seconds = perf_counter() - started
        unknown: dict[str, Any] = {**{name: [] for name in LENGTHS}, **dict.fromkeys(SOURCES)}
        return checked([
            self.row(number, True, {**counts[number], **unknown}, response.finish_reason, response.error, seconds)
            for number, response in enumerate(responses.itertuples())
        ])  # fmt: skip

    def replayable(self, setting: Setting, max_drafted: int) -> bool:
        """Whether a recording holds all the setting needs: a chain of this length, verified token by token, or copies."""
        if setting.method == PLAIN or setting.method in PARAMETERS:
            return False
        method = self.methods[setting.name]
        if method.couples_rows or type(method.rule) is not Rejection:
            return False
        if isinstance(method.proposer, CopyProposer):
            return True
        limit = method.bind(self.pair).policy.limit
        chain = type(method.proposer) in (ChainProposer, BestSourceProposer)
        return chain and limit is not None and limit <= max_drafted

    def row(
        self,
        number: int,
        lossless: bool,
        counts: Mapping[str, Any],
        finish_reason: str,
        error: str | None,
        seconds: float,
        prompt_ids: Sequence[int] = (),
        token_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        """The row of a prompt, with the ids where it was decoded."""
        return {
            "lossless": lossless, "prompt": str(self.prompts[number].id), "prompt_hash": self.hashes[number], **counts,
            "finish_reason": finish_reason, "error": error, "setting_seconds": seconds,
            "prompt_ids": list(prompt_ids), "token_ids": list(token_ids),
        }  # fmt: skip


class Recording:
    """The traces of a sweep's responses, made when they are needed.

    responses    rows of autoregressive decoding
    folder       the traces are kept here
    settings     that will be replayed: the heads that their methods read are recorded, and what the upper bound needs
    max_drafted  most tokens a replayed method may draft in a round
    hidden       keep the draft's states, for heads that are asked for later
    whole        whether roll-outs go on where none of these settings does; else `deepen` records more
    """

    def __init__(
        self,
        context: SweepContext,
        responses: pd.DataFrame,
        folder: Path,
        settings: Sequence[Setting],
        max_drafted: int,
        hidden: bool = True,
        whole: bool = True,
    ):
        if context.sampling.max_length is not None:
            raise InputError("replays know one limit for all texts: expected sampling.max_length=null, or source=live")
        self.context, self.max_drafted = context, max_drafted
        self.responses = context.within_context(responses)
        self.upper_bound = any(setting.method == UPPER_BOUND for setting in settings)
        # Methods bound to the pair, by setting: their policies are replayed.
        self.methods = {s.name: context.methods[s.name].bind(context.pair) for s in settings if s.method != UPPER_BOUND}
        estimators = [getattr(getattr(m.policy, "policy", None), "estimator", None) for m in self.methods.values()]
        self.heads = sorted(
            {head for estimator in estimators if (head := getattr(estimator, "head", None)) is not None}
        )
        self.states = any(getattr(estimator, "reads_hidden", False) for estimator in estimators)
        recorded = [setting for setting in settings if not self._copies(setting)]
        self.policies = {self._temperature(setting): None if whole else list[StoppingPolicy]() for setting in recorded}
        for setting in recorded:
            policies = self.policies[self._temperature(setting)]
            if policies is not None and not (policy := self.methods[setting.name].policy).couples_rows:
                policies.append(policy)  # those of a batch go on as their neighbours do
        fine = self.responses.error.isna() & self.responses.token_ids.map(len).gt(0)
        self.usable = np.flatnonzero(fine).tolist()
        rows = [self.responses.iloc[number] for number in self.usable]
        grammars = [own_grammar(context.prompts[number]) for number in self.usable]
        self.sequences: list[Text] = [
            TextWithGrammar(list(row.prompt_ids), list(row.token_ids), grammar)
            for row, grammar in zip(rows, grammars, strict=True)
        ]
        self.folder, self.hidden, self.traces = folder, hidden, dict[float | None, Trace]()

    def trace_for(self, setting: Setting) -> Trace | None:
        """The trace that a setting is replayed on; None: it needs the texts alone."""
        if self._copies(setting):
            return None
        temperature = self._temperature(setting)
        if temperature not in self.traces:
            self._record(temperature)
        return self.traces[temperature]

    def deepen(self, setting: Setting, positions: Tensor) -> Trace:
        """The trace of a setting that goes on past cuts, with the roll-outs after these positions [n] to their ends."""
        return self._record(self._temperature(setting), positions)

    def _record(self, temperature: float | None, deeper: Tensor | None = None) -> Trace:
        self.traces[temperature] = Store(self.folder, self.hidden).trace(
            self.context.pair, self.context.sampling, self.sequences, self.max_drafted, self.heads,
            rows=self.usable, draft_temperature=temperature, upper_bound=self.upper_bound, states=self.states,
            policies=self.policies, deeper=deeper,
        )  # fmt: skip
        return self.traces[temperature]

    def _copies(self, setting: Setting) -> bool:
        return setting.method != UPPER_BOUND and isinstance(self.methods[setting.name].proposer, CopyProposer)

    def _temperature(self, setting: Setting) -> float | None:
        """The draft's own in a setting; None: the sampling's."""
        if setting.method == UPPER_BOUND:
            return setting.parameters.get("draft_temperature")
        return self.context.draft_temperature(setting)

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
            rows.append(self.context.row(number, True, counts, response.finish_reason, response.error, seconds))
        return checked(rows)

    def _replay(self, trace: Trace | None, setting: Setting) -> Replayed:
        if setting.method == UPPER_BOUND:
            assert trace is not None
            price, min_drafted = setting.parameters["price"], setting.parameters.get("min_drafted")
            return at_price(trace, float(price), int(min_drafted or 0))
        method = self.methods[setting.name]
        if isinstance(method.proposer, CopyProposer):
            return replay(self.copies(method.proposer, method.limit), method.policy)
        assert trace is not None
        best = method.proposer if isinstance(method.proposer, BestSourceProposer) else None
        return replay(trace, method.policy, None if best is None else self.copies(best.copies, method.limit))

    def copies(self, proposer: CopyProposer | None, most: int) -> Copies:
        """What these texts let a proposer copy, at most so many tokens a round."""
        context = self.context
        pair, sampling = context.pair, context.sampling
        grammars = grammars_of(pair, sampling, self.sequences)
        return Copies(proposer, self.sequences, most, sampling.max_new_tokens, pair.ends(sampling), grammars)

    def tokens(self, setting: Setting, count: int) -> dict[str, Any] | None:
        """What the setting's rounds did to every token of the first `count` texts; None where no recording says it."""
        trace = None if setting.method == UPPER_BOUND else self.trace_for(setting)
        if trace is None or self.context.methods[setting.name].proposer.shows_matches:
            return None
        tokenizer, policy = self.context.pair.tokenizer, self.methods[setting.name].policy
        chosen = list(range(min(count, len(self.sequences))))
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


def own_grammar(prompt: Prompt) -> str | Mapping[str, Any] | None:
    """The grammar of a prompt's row; None: it has none of its own."""
    return without_grammar(prompt.content)[1]


def reads_head(setting: Setting) -> bool:
    return setting.method not in PARAMETERS and _has_key(setting, "head")


def _has_key(setting: Setting, key: str) -> bool:
    return any(name.split(".")[-1] == key for name in flatten(setting.content["method"]))


def _histogram(counts: NDArray[np.int64], at: int | None) -> list[int]:
    """A text's line of counts [T, M + 1], without the zeros after the last one."""
    return [] if at is None or not len(counts) else np.trim_zeros(counts[at], "b").tolist()


def checked(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as a table. Raises AssertionError if a row's counts contradict each other."""
    table = pd.DataFrame(rows)
    gap = table.num_drafted + table.num_target_calls - table.num_generated - table.num_discarded
    wrong = table[gap.abs() > 1e-6]
    assert wrong.empty, (
        f"counts of {len(wrong)} rows contradict each other, first {wrong.iloc[0][list(COUNTS)].to_dict()}"
    )
    return table
