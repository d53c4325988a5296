"""Prompt lookup: the draft is what followed the text's last tokens when they occurred before. No draft model.

Known as prompt lookup decoding (transformers' `prompt_lookup_num_tokens`) and n-gram speculation (vLLM's `ngram`).
The draft's q is a point mass on the tokens that were found. So every rule that is exact for draws from q is exact for
it: a drafted token is accepted with p(token), at any temperature.
Deviation: of several earlier occurrences the last one counts (transformers: the first).

Shapes: B batch slots, K drafted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges
from toolkit.decoding.proposers.base import DraftContext, TextProposer, empty_proposal
from toolkit.engine.device import tensor_on
from toolkit.errors import InputError
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import DraftStep, Proposal, Verdict


@dataclass(frozen=True)
class PromptLookupProposer(TextProposer):
    """Copy what followed the longest n-gram that the text ends with and that it holds before.

    max_ngram  tokens that must agree, at most; shorter n-grams are tried if a longer one does not occur
    min_ngram  and at least
    """

    max_ngram: Annotated[int, AtLeast(1)] = 3
    min_ngram: Annotated[int, AtLeast(1)] = 1
    needs_draft_model: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_ranges(self, "proposer.")
        if not self.min_ngram <= self.max_ngram:
            raise InputError(
                f"proposer: expected 1 <= min_ngram <= max_ngram, got min_ngram={self.min_ngram}, max_ngram={self.max_ngram}"
            )

    def max_nodes(self, limit: int) -> int:
        return limit

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        """Draft the copied tokens, as far as the policy, the limits and an end of text in it allow."""
        device = context.limits.device
        tokens, num_drafted, state = self.copied(context.texts, context.room, context.end_ids, policy, state, device)
        num_calls = torch.zeros_like(context.limits)
        if not tokens.shape[1]:
            return empty_proposal(num_calls), state
        q = torch.nn.functional.one_hot(tokens, context.vocab_size).to(torch.float32)
        return Proposal(tokens, q, num_drafted, num_calls), state

    def copied(
        self,
        texts: Sequence[Sequence[int]],
        room: Sequence[int],
        end_ids: Sequence[int],
        policy: StoppingPolicy,
        state: State,
        device: torch.device,
    ) -> tuple[Tensor, Tensor, State]:
        """Drafted tokens [B, K], how many of them count [B], and the policy's state after it. No model is asked.

        room  the most tokens each row may draft
        """
        copies = [self.lookup(text, most, end_ids) for text, most in zip(texts, room, strict=True)]
        longest = max(map(len, copies))
        tokens = tensor_on(device, [copy + [0] * (longest - len(copy)) for copy in copies])
        available = tensor_on(device, [len(copy) for copy in copies])
        num_drafted, nothing = (
            torch.zeros_like(available),
            torch.zeros(len(copies), 0, dtype=torch.float32, device=device),
        )
        state, starts = policy.begin(available > 0, state)
        drafting = starts & (available > 0)
        for depth in range(1, longest + 1):
            num_drafted += drafting
            state, go_on = policy.step(DraftStep(depth, nothing, nothing, nothing, tokens[:, depth - 1]), state)
            drafting = drafting & go_on & (available > depth)
        return tokens, num_drafted, state

    def commit(
        self, context: DraftContext, proposal: Proposal, verdict: Verdict, accepted: list[int], lengths: list[int]
    ) -> None:
        """Do nothing: no cache has read the draft."""

    def lookup(self, text: Sequence[int], most: int, end_ids: Sequence[int]) -> list[int]:
        """At most `most` tokens that followed the text's last n-gram, up to an end of text; empty if it is new."""
        if most < 1:
            return []
        for size in range(min(self.max_ngram, len(text) - 1), self.min_ngram - 1, -1):
            last = text[len(text) - size :]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == last:
                    following = list(text[start + size : start + size + most])
                    ends = [index for index, token in enumerate(following) if token in end_ids]
                    return following[: ends[0] + 1] if ends else following
        return []
