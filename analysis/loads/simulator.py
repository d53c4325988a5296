"""Continuous batching over recorded texts: how a policy serves a queue of requests, by a table of costs. No model runs.

Batch slots hold requests. When a request ends, its slot takes the next one. In every round all slots draft, as deep as the
deepest of them, and one forward of the target checks them. A round takes its draft forwards at this batch size, the target
forward at the widest draft, and the reading of new prompts. The trace says which tokens are drafted and accepted, exactly as in
a replay.

Shapes: Q requests, T texts of the trace, B slots, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.costs.load import CostGrid, LoadCost
from toolkit.decoding.batch import read_together
from toolkit.errors import InputError
from toolkit.stopping import StoppingPolicy
from toolkit.stopping.base import State, with_fresh
from toolkit.trace import Trace
from toolkit.trace.copies import Copies
from toolkit.trace.replay import check_replayed, draft
from toolkit.trace.steps import Geometry, check_recorded
from toolkit.types import RoundCounts

Floats = NDArray[np.float64]
SEED = 0


@dataclass(frozen=True)
class Load:
    """How requests arrive, and how many are decoded at a time.

    slots     B, requests decoded side by side
    users     a fixed number of users, each sending its next request when the last one is answered; None: `rate`
    rate      requests per second, at random times (Poisson)
    drops     "always": free slots leave the batch at once, and costs are those of the mean context, as in serving engines.
              "half": free slots are kept until they are half of the batch, as in this package's loop. There all rows cost as
              much as the longest one. "flattened": as "always", and a target forward costs what its tokens cost side by
              side, as in serving engines, whichever rows they are of.
    """

    slots: int
    users: int | None = None
    rate: float | None = None
    drops: str = "always"

    def arrivals(self, count: int) -> Floats:
        """When each request is sent [Q], in seconds; infinite if it waits for its user's earlier one to be answered."""
        if self.rate is not None:
            gaps = np.random.default_rng(SEED).exponential(1 / self.rate, count)
            return np.asarray(gaps.cumsum() - gaps[0])
        first = self.slots if self.users is None else self.users
        return np.where(np.arange(count) < first, 0.0, np.inf)


@dataclass
class RequestResults:
    """The requests [Q]: in seconds, when each was sent, joined the batch, had its first token and was answered.

    tokens [Q]      produced;  rounds [Q]  target forwards that it took part in
    num_drafted, num_calls [Q]  its drafted tokens and draft forwards
    seconds [Q]     its share of its rounds, each divided by the requests in it, and the reading of its prompt
    forwards        draft and target forwards of the batch, whichever rows took part
    """

    sent: Floats

    def __post_init__(self) -> None:
        count = len(self.sent)
        self.joined, self.first, self.answered, self.seconds = (np.zeros(count) for _ in range(4))
        self.tokens, self.rounds, self.num_drafted, self.num_calls = (np.zeros(count, dtype=np.int64) for _ in range(4))
        self.forwards = (0, 0)

    @property
    def tokens_per_second(self) -> float:
        return float(self.tokens.sum() / (self.answered.max() - self.sent.min()))

    def figures(self) -> dict[str, float]:
        """Tokens per second; seconds per output token after the first one, and to the answer: median and 95th percentile."""
        later = self.tokens > 1
        per_token = (self.answered - self.first)[later] / (self.tokens[later] - 1)
        latency = self.answered - self.sent
        return {
            "tokens_per_second": self.tokens_per_second,
            "token_seconds": float(np.median(per_token)) if later.any() else float("nan"),
            "token_seconds_95": float(np.quantile(per_token, 0.95)) if later.any() else float("nan"),
            "latency": float(np.median(latency)),
            "latency_95": float(np.quantile(latency, 0.95)),
            "first_token": float(np.median(self.first - self.sent)),
            "mean_batch": float((self.rounds.sum()) / max(self.forwards[1], 1)),
            "drafted_per_round": float(self.num_drafted.sum() / max(self.rounds.sum(), 1)),
        }


def serve(
    trace: Trace | Copies,
    prompt_tokens: Sequence[int],
    policy: StoppingPolicy,
    costs: LoadCost,
    load: Load,
    requests: Sequence[int],
) -> RequestResults:
    """Serve texts `requests` [Q] of a trace, or of copied-from texts, in this order. prompt_tokens [T]; the policy is bound.

    Raises CutError if the policy goes on where the trace's roll-outs were cut.
    """
    return _Server(trace, np.asarray(prompt_tokens), policy, costs, load, np.asarray(requests)).run()


@dataclass
class _Server:
    """Runs the batch. Of each slot: `slot`, its request (-1: free); `at`, where its next round starts; `unread`, by the draft.

    As in live batches a draft reads nothing while no row drafts. If one does again, all rows catch up in its first forward.
    """

    trace: Trace | Copies
    prompt_tokens: NDArray[np.int64]
    policy: StoppingPolicy
    costs: LoadCost
    load: Load
    requests: NDArray[np.int64]

    def __post_init__(self) -> None:
        trace, policy = self.trace, self.policy
        if trace.most_sent > trace.max_drafted:
            raise InputError("a simulation knows no grammar, whose certain tokens rows of a batch share: expected none")
        check_replayed(policy, trace)
        self.geometry = trace.geometry if isinstance(trace, Copies) else Geometry.of(trace)
        produced = torch.arange(trace.num_positions) - trace.text_first[:-1].repeat_interleave(trace.text_first.diff())
        prompts = torch.from_numpy(self.prompt_tokens).repeat_interleave(trace.text_first.diff())
        self.geometry = replace(self.geometry, context=prompts + produced)
        self.run_of, self.left_of = self.geometry.run.numpy(), self.geometry.left.numpy()
        self.first_of = trace.text_first.numpy()
        self.drafts = policy.limit != 0 and not isinstance(trace, Copies)
        self.wanted: list[Tensor] = []  # after which positions the policy goes on past a cut
        self.by_start: tuple[Tensor, Tensor] | None = None  # lengths and draft forwards of rounds from every position
        if not policy.uses_history and not policy.couples_rows:
            starts = torch.arange(trace.num_positions)
            self.by_start = self._draft(starts, policy.init(len(starts), torch.device("cpu")), None)[:2]
            check_recorded(self.wanted)
        elif isinstance(trace, Trace):
            self.geometry = self.geometry.with_steps(trace)
        self.results = RequestResults(self.load.arrivals(len(self.requests)))
        self.slot: list[int] = []
        self.at, self.unread = np.zeros((2, 0), dtype=np.int64)
        self.drafting = True  # whether the last round had a draft forward
        self.state: State = policy.init(0, torch.device("cpu"))
        self.next, self.clock = 0, 0.0
        self.seconds: dict[tuple[Any, ...], float] = {}

    def run(self) -> RequestResults:
        while self.next < len(self.requests) or any(request >= 0 for request in self.slot):
            joined = self._fill()
            if not any(request >= 0 for request in self.slot):
                self.clock = float(self.results.sent[self.next :].min())
                continue
            self._round(joined)
        check_recorded(self.wanted)
        return self.results

    def _fill(self) -> list[int]:
        """Requests that have been sent take free slots. Returns these slots; the free slots after them are dropped."""
        joined: list[int] = []
        for slot, request in enumerate(self.slot):
            if request < 0 and self._waiting():
                self._join(slot)
                joined.append(slot)
        while len(self.slot) < self.load.slots and self._waiting():
            self.slot.append(-1)
            self.at, self.unread = np.append(self.at, 0), np.append(self.unread, 0)
            fresh = self.policy.init(1, torch.device("cpu"))
            self.state = {key: torch.cat([self.state[key], fresh[key]]) for key in fresh}
            self._join(len(self.slot) - 1)
            joined.append(len(self.slot) - 1)
        busy = [slot for slot, request in enumerate(self.slot) if request >= 0]
        if self.load.drops != "half" or 2 * len(busy) <= len(self.slot):
            self.slot, self.at, self.unread = [self.slot[slot] for slot in busy], self.at[busy], self.unread[busy]
            self.state = {key: value[busy] for key, value in self.state.items()}
            joined = [busy.index(slot) for slot in joined]
        return joined

    def _waiting(self) -> bool:
        return self.next < len(self.requests) and self.results.sent[self.next] <= self.clock

    def _join(self, slot: int) -> None:
        self.slot[slot], request = self.next, self.next
        self.next += 1
        self.results.joined[request] = self.clock
        self.at[slot] = self.first_of[self.requests[request]]
        self.unread[slot] = self.prompt_tokens[self.requests[request]] - 1
        self.state = with_fresh(self.policy, self.state, slot)

    def _round(self, joined: list[int]) -> None:
        request = np.array(self.slot)
        busy = request >= 0
        starts = np.where(busy, self.at, 0)
        positions, state = torch.from_numpy(starts), self.state
        if self.by_start is not None:
            num_drafted, num_calls = self.by_start[0][positions], self.by_start[1][positions]
        else:
            num_drafted, num_calls, state = self._draft(positions, state, torch.from_numpy(busy))
        drafted, calls = np.where(busy, num_drafted.numpy(), 0), np.where(busy, num_calls.numpy(), 0)
        accepted = np.minimum(drafted, self.run_of[starts])
        produced = np.minimum(accepted + 1, self.left_of[starts])
        if self.policy.uses_history or self.policy.couples_rows:
            counts = RoundCounts(*map(torch.from_numpy, (drafted, calls, accepted)))
            self.state = self.policy.observe(counts, counts, state)
        sequences = self.requests[request[busy]]
        contexts = self.prompt_tokens[sequences] + starts[busy] - self.first_of[sequences]
        context = float(contexts.max() if self.load.drops == "half" else contexts.mean())
        width = float(drafted.mean() if self.load.drops == "flattened" else drafted.max())
        reading, draft_forwards = self._reading(joined, width + 1), int(calls.max())
        seconds = self._seconds(len(self.slot), draft_forwards, width, context)
        if draft_forwards and self.unread[busy].any():
            seconds += self._read(self.costs.draft, self.unread[busy], 1, together=True)
        self.drafting = draft_forwards > 0
        self.unread = np.where(self.drafting, 0, self.unread + produced)
        self.clock += reading + seconds
        results, who = self.results, request[busy]
        results.seconds[who] += seconds / len(who)
        results.seconds[request[joined]] += reading / max(len(joined), 1)
        results.forwards = (results.forwards[0] + draft_forwards, results.forwards[1] + 1)
        results.first[who] = np.where(results.tokens[who] == 0, self.clock, results.first[who])
        results.tokens[who] += produced[busy]
        results.rounds[who] += 1
        results.num_drafted[who] += drafted[busy]
        results.num_calls[who] += calls[busy]
        self.at = np.where(busy, self.at + produced, self.at)
        for slot in np.flatnonzero(busy):
            if self.at[slot] >= self.first_of[self.requests[request[slot]] + 1]:
                results.answered[request[slot]] = self.clock
                self.slot[slot] = -1
                unsent = np.flatnonzero(np.isinf(results.sent))
                if len(unsent):  # the user's next request
                    results.sent[unsent[0]] = self.clock

    def _seconds(self, batch: int, calls: int, width: float, context: float) -> float:
        """Seconds of a round: the batch's draft forwards, and the target forward over `width` drafted tokens per row."""
        key = (batch, calls, width, round(context / 16))
        if key not in self.seconds:
            target = self.costs.target(batch, width + 1, context)
            catching_up = self.costs.drafting if calls and not width else 0.0  # else it is in the target's time
            self.seconds[key] = calls * self.costs.draft(batch, 1, context) + target + catching_up
        return self.seconds[key]

    def _reading(self, joined: list[int], width: float) -> float:
        """Seconds to read new prompts. width: tokens per row of the target forward.

        Serving engines pad nothing and read prompts beside decoded tokens: each adds what it adds to one row's forward pass,
        whichever others join with it. This package's loop (drops "half") pads prompts of similar length and reads them in
        forwards of their own (`read_together`); where all rows are new and alike, the round's own forwards do it.
        """
        if not joined:
            return 0.0
        lengths, together = self.prompt_tokens[self.requests[np.array(self.slot)[joined]]] - 1, False
        if self.load.drops == "half":
            together = len(joined) == len(self.slot) and len(read_together(lengths.tolist())) == 1
        seconds = self._read(self.costs.target, lengths, width, together)
        if self.drafts and self.drafting and not together:
            seconds += self._read(self.costs.draft, lengths, 1, together=False)
            self.unread[joined] = 0
        return seconds

    def _read(self, forward: CostGrid, lengths: NDArray[np.int64], own: float, together: bool) -> float:
        """Seconds in which a model reads tokens of several rows. together: in the round's own forward, over `own` tokens."""
        if self.load.drops != "half":
            return sum(forward(1, 1.0 + length) - forward(1, 1.0) for length in lengths)
        rows = len(self.slot)
        if together:
            return forward(rows, own + float(lengths.max())) - forward(rows, own)
        groups = [lengths[group] for group in read_together(lengths.tolist())]
        return sum(forward(len(group), float(group.max())) for group in groups)

    def _draft(self, starts: Tensor, state: State, busy: Tensor | None) -> tuple[Tensor, Tensor, State]:
        if isinstance(self.trace, Copies):
            return self.trace.draft(starts, self.policy, state, busy)
        return draft(self.trace, self.geometry, starts, self.policy, state, busy, self.wanted)
