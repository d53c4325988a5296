"""One setting of a sweep: what its rows depend on, and how they come about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pandas as pd

from analysis.tables.grid import PARAMETERS, PLAIN, Setting
from analysis.tables.rows import COUNTS, LENGTHS, SOURCES, round_lengths
from toolkit.acceptance.folder import head_hash
from toolkit.acceptance.statistics import SHIPPED
from toolkit.config import flatten, instantiate, plain
from toolkit.config.identity import contents_of
from toolkit.decoding import Method, decode
from toolkit.decoding.proposers import BestSourceProposer, ChainProposer
from toolkit.decoding.proposers.copying import CopyProposer
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.files.digests import digest
from toolkit.models.generation_config import resolved
from toolkit.models.pair import ModelPair, fingerprint
from toolkit.models.prompts import Prompt
from toolkit.runs.tracking import parameter_counts
from toolkit.sampling import Sampling
from toolkit.trace.bounds import acceptance_probs, expected_counts
from toolkit.types import Generation
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

    def prepare(self, setting: Setting) -> str:
        """Build the method; returns a hash of all its rows depend on. Raises InputError if it, or its head, does not fit."""
        shared = {
            "sampling": vars(self.sampling),
            "models": self.fingerprints,
            "prompts": [[prompt.id, digest] for prompt, digest in zip(self.prompts, self.hashes, strict=True)],
        }
        if setting.method in PARAMETERS:
            return content_hash([shared, setting.method, dict(setting.parameters)], length=16)
        config = plain(setting.method_config())
        head = (setting.head or self.pair.head) if reads_head(setting) else None
        if self.lacks_head(setting):
            raise InputError(
                f"{setting.method} needs an acceptance head, and the pair ships none: expected "
                f"grid.{setting.method}.head=[FOLDER], or leave the method out with ~grid.{setting.method}"
            )
        self.methods[setting.name] = instantiate(config)
        self.methods[setting.name].bind(self.pair)
        weights = head_hash(head) if head else digest(SHIPPED) if reads_head(setting) else None
        return content_hash([shared, contents_of(config).identity, weights], length=16)

    def bound(self, setting: Setting) -> Method:
        """A prepared setting's method, bound to the pair."""
        return self.methods[setting.name].bind(self.pair)

    @property
    def shared(self) -> tuple[Sequence[Prompt], Sampling, int]:
        return self.prompts, self.sampling, self.batch_size

    def lacks_head(self, setting: Setting) -> bool:
        """Whether the setting's method needs an acceptance head, and neither the setting nor the pair names one."""
        return not (setting.head or self.pair.head) and reads_head(setting) and not _has_key(setting, "statistics")

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
            ids = generation.prompt_ids, generation.token_ids
            rows.append(self.row(number, method.lossless, counts, generation, seconds, *ids))
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
        responses = self.within_context(responses)
        sequences = list(zip(responses.prompt_ids, responses.token_ids, strict=True))
        temperature, most = setting.parameters.get("draft_temperature"), setting.parameters.get("max_drafted")
        started = perf_counter()
        probs = acceptance_probs(self.pair, sequences, self.sampling, temperature, self.batch_size, on_text)
        counts = [expected_counts(text, most) for text in probs]
        seconds = perf_counter() - started
        unknown: dict[str, Any] = {**{name: [] for name in LENGTHS}, **dict.fromkeys(SOURCES)}
        return checked([
            self.row(number, True, {**counts[number], **unknown}, response, seconds)
            for number, response in enumerate(responses.itertuples())
        ])  # fmt: skip

    def parameters(self) -> dict[str, int]:
        drafts = {f"draft{i or ''}": draft for i, draft in enumerate(self.pair.drafts)}
        return parameter_counts({"target": self.pair.target, **drafts})

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
        response: Any,
        seconds: float,
        prompt_ids: Sequence[int] = (),
        token_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        """The row of a prompt. response: has finish_reason and error; the ids are given where it was decoded."""
        return {
            "lossless": lossless, "prompt": str(self.prompts[number].id), "prompt_hash": self.hashes[number], **counts,
            "finish_reason": response.finish_reason, "error": response.error, "setting_seconds": seconds,
            "prompt_ids": list(prompt_ids), "token_ids": list(token_ids),
        }  # fmt: skip


def reads_head(setting: Setting) -> bool:
    return setting.method not in PARAMETERS and _has_key(setting, "head")


def _has_key(setting: Setting, key: str) -> bool:
    return any(name.split(".")[-1] == key for name in flatten(plain(setting.method_config())))


def responses_of(done: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The autoregressive rows among the finished settings. Raises InputError if there are none."""
    if PLAIN not in done:
        raise InputError("expected the responses of autoregressive decoding, which failed; run again to retry")
    return done[PLAIN]


def checked(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as a table. Raises AssertionError if a row's counts contradict each other."""
    table = pd.DataFrame(rows)
    gap = table.num_drafted + table.num_target_calls - table.num_generated - table.num_discarded
    wrong = table[gap.abs() > 1e-6]
    assert wrong.empty, (
        f"counts of {len(wrong)} rows contradict each other, first {wrong.iloc[0][list(COUNTS)].to_dict()}"
    )
    return table
