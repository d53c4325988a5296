"""One setting of a sweep: what its rows depend on, and how they come about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pandas as pd

from analysis.replay.oracle import acceptance_probs, expected_counts
from analysis.tables.grid import PARAMETERS, PLAIN, Setting
from analysis.tables.rows import LENGTHS, SOURCES, check_identity, round_lengths
from toolkit.acceptance.folder import head_hash
from toolkit.config import flatten, instantiate, plain
from toolkit.config.identity import contents_of
from toolkit.decoding import Method, decode
from toolkit.decoding.proposers import BestSourceProposer, ChainProposer
from toolkit.decoding.proposers.copying import CopyProposer
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.models.generation_config import resolved
from toolkit.models.pair import ModelPair, fingerprint
from toolkit.models.prompts import Prompt
from toolkit.runs.tracking import parameter_counts
from toolkit.sampling import Sampling
from toolkit.types import Generation
from toolkit.verification.rules.rejection import Rejection

TEXTS = ["prompt_ids", "token_ids"]  # columns of a setting's file that the joined rows leave out
Listener = Callable[[Generation], None]


@dataclass
class Workbench:
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
        """Build the setting's method; returns a hash of everything the setting's rows depend on.

        Raises InputError if the setting cannot be built, or its head does not belong to the pair.
        """
        shared = {
            "sampling": vars(self.sampling),
            "models": self.fingerprints,
            "prompts": [[prompt.id, digest] for prompt, digest in zip(self.prompts, self.hashes, strict=True)],
        }
        if setting.method in PARAMETERS:
            return content_hash([shared, setting.method, dict(setting.parameters)], length=16)
        config = plain(setting.method_config())
        head = (setting.head or self.pair.head) if reads_head(setting) else None
        if reads_head(setting) and head is None:
            raise InputError(
                f"{setting.method} needs an acceptance head, and the pair ships none: expected "
                f"grid.{setting.method}.head=[FOLDER], or leave the method out with ~grid.{setting.method}"
            )
        self.methods[setting.name] = instantiate(config)
        self.methods[setting.name].bind(self.pair)
        return content_hash([shared, contents_of(config).identity, head and head_hash(head)], length=16)

    @property
    def shared(self) -> tuple[Sequence[Prompt], Sampling, int]:
        """What a workbench of another pair shares: prompts, sampling, batch size."""
        return self.prompts, self.sampling, self.batch_size

    def lacks_head(self, setting: Setting) -> bool:
        """Whether the setting's method reads an acceptance head, and neither the setting nor the pair names one."""
        if setting.head or self.pair.head:
            return False
        return reads_head(setting)

    def decode(
        self, setting: Setting, on_finish: Listener, on_round: Callable[[int], object] | None = None
    ) -> pd.DataFrame:
        """Decode every prompt with a prepared setting: one row each, with the counts and the texts."""
        method = self.methods[setting.name]
        chains = isinstance(method.proposer, ChainProposer | CopyProposer) and method.beams is None
        started = perf_counter()
        generations = decode(
            self.pair,
            [prompt.content for prompt in self.prompts],
            method,
            self.sampling,
            batch_size=self.batch_size,
            on_finish=on_finish,
            on_round=on_round,
        )
        seconds = perf_counter() - started
        rows = [
            {
                **self.about(number, method.lossless),
                **vars(generation.counts),
                **round_lengths(generation.rounds, chains),
                **{name: sum(f"{r.source}_rounds" == name for r in generation.rounds) for name in SOURCES},
                "finish_reason": generation.finish_reason,
                "error": generation.error,
                "setting_seconds": seconds,
                "prompt_ids": generation.prompt_ids,
                "token_ids": generation.token_ids,
            }
            for number, generation in enumerate(generations)
        ]
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
        """The oracle's expected counts on the autoregressive responses: one row each."""
        responses = self.within_context(responses)
        texts = list(zip(responses.prompt_ids, responses.token_ids, strict=True))
        temperature, most = setting.parameters.get("draft_temperature"), setting.parameters.get("max_drafted")
        started = perf_counter()
        probs = acceptance_probs(self.pair, texts, self.sampling, temperature, self.batch_size, on_text)
        counts = [expected_counts(text, most) for text in probs]
        seconds = perf_counter() - started
        rows = [
            {
                **self.about(number, True),
                **counts[number],
                **{name: [] for name in LENGTHS},
                **dict.fromkeys(SOURCES),
                "finish_reason": response.finish_reason,
                "error": response.error,
                "setting_seconds": seconds,
                "prompt_ids": [],
                "token_ids": [],
            }
            for number, response in enumerate(responses.itertuples())
        ]
        return checked(rows)

    def parameters(self) -> dict[str, int]:
        """Parameter counts of the models, for W&B."""
        drafts = {f"draft{i or ''}": draft for i, draft in enumerate(self.pair.drafts)}
        return parameter_counts({"target": self.pair.target, **drafts})

    def replayable(self, setting: Setting, max_drafted: int) -> bool:
        """Whether a recording holds all the setting needs: a chain of drafted tokens, judged one by one, of this length.

        Copied tokens need the texts alone, whatever the length.
        """
        if setting.method == PLAIN or setting.method in PARAMETERS:
            return False
        method = self.methods[setting.name]
        if method.couples_rows:
            return False
        if type(method.rule) is not Rejection:
            return False
        if isinstance(method.proposer, CopyProposer):
            return True
        limit = method.bind(self.pair).policy.limit
        chain = type(method.proposer) in (ChainProposer, BestSourceProposer)
        return chain and limit is not None and limit <= max_drafted

    def about(self, number: int, lossless: bool) -> dict[str, Any]:
        """The facts that every row of a prompt holds."""
        return {"lossless": lossless, "prompt": str(self.prompts[number].id), "prompt_hash": self.hashes[number]}


def reads_head(setting: Setting) -> bool:
    """Whether the setting's method reads an acceptance head."""
    if setting.method in PARAMETERS:
        return False
    return any(name.split(".")[-1] == "head" for name in flatten(plain(setting.method_config())))


def responses_of(done: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """The autoregressive rows among the finished settings. Raises InputError if there are none."""
    if PLAIN not in done:
        raise InputError("expected the responses of autoregressive decoding, which failed; run again to retry")
    return done[PLAIN]


def checked(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as a table, whose counts agree with each other."""
    frame = pd.DataFrame(rows)
    check_identity(frame)
    return frame
