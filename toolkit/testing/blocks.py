"""For people who draft in blocks, or decide how much of a block is sent: tiny block drafts, and a check of what decisions use.

pair = block_pair(markov=True)                  tables: q of position k by the text's state and the token before the position
tiny_block(target)                              a random block draft of a tiny target
check_anticipation(MyPolicy(), BlockProposer()) do tokens decide whether they are sent?
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from toolkit.decoding.proposers.base import DraftContext, TextProposer
from toolkit.drafts.block.testing import tiny_block as tiny_block
from toolkit.drafts.kinds import DraftKind
from toolkit.engine import BlockSession, Reading, TabularModel, open_session
from toolkit.engine.tabular import TabularSession
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.sampling import Sampling
from toolkit.stopping import Bounded, StoppingPolicy
from toolkit.stopping.base import State, in_context
from toolkit.testing.trees import Path, check_children, emitted, levels_of
from toolkit.types import Proposal, Verdict
from toolkit.verification import SelectionRule, get

# -- drafts -----------------------------------------------------------------------------------------------------------


@dataclass
class TabularBlock(TabularModel):
    """A block draft that is a table. `probs` has the text's states, as of a `TabularModel`.

    later [K, rows, V, V]  q of position k by the text's state and the token before the position
    """

    draft_kind: ClassVar[DraftKind] = DraftKind(
        "table", "block table", proposer="toolkit.decoding.proposers.block:BlockProposer", forwards="block"
    )
    later: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.block_length = len(self.later)

    def open_session(self, num_rows: int, capacity: int) -> BlockSession:
        return TabularBlockSession(self, num_rows, capacity)


class TabularBlockSession(TabularSession, BlockSession):
    """Blocks of a table; states that heads read are the one-hot table row."""

    model: TabularBlock

    def draft(self, tokens: Tensor, counts: list[int]) -> None:
        if tokens.shape[1] > 1:
            self.extend(tokens[:, :-1], counts=[count - 1 for count in counts])
        rows, lengths = torch.arange(len(tokens)), torch.tensor(self.lengths)
        old = torch.where(lengths > 0, self.states[rows, (lengths - 1).clamp(min=0)], 0)
        self.newest = tokens[:, -1]
        self.row = (old * self.model.vocab_size + self.newest) % self.model.probs.shape[0]

    def position(self, depth: int, before: Tensor | None) -> Reading:
        q = self.model.later[depth - 1, self.row, self.newest if before is None else before]
        hidden = torch.nn.functional.one_hot(self.row, self.model.probs.shape[0]).to(q.dtype)
        return Reading(q.log().unsqueeze(1), hidden.unsqueeze(1))


def block_table(
    vocab_size: int, order: int, length: int, markov: bool, generator: torch.Generator, sharpness: float = 1.0
) -> TabularBlock:
    """A random block draft in float64; without `markov` q of a position is the same after every token."""
    rows = vocab_size**order
    noise = torch.randn(length, rows, vocab_size, vocab_size, generator=generator, dtype=torch.float64)
    noise = noise if markov else noise[:, :, :1].expand_as(noise)
    probs = torch.full((rows, vocab_size), 1 / vocab_size, dtype=torch.float64)
    return TabularBlock(probs, later=(noise * sharpness).softmax(-1))


def block_pair(length: int = 4, markov: bool = True, vocab_size: int = 4, seed: int = 3) -> ModelPair:
    """Tables in float64, the draft's a block's; the last token ends a text."""
    generator = torch.Generator().manual_seed(seed)
    target = TabularModel.random(vocab_size, 2, generator, sharpness=1.2)
    draft = block_table(vocab_size, 2, length, markov, generator)
    return ModelPair(target=target, draft=draft, end_ids=(vocab_size - 1,), costs="assumed")


# -- anticipation -----------------------------------------------------------------------------------------------------

PARTS = 4  # probabilities of the enumerated tables are multiples of 1 / PARTS
UNIFORMS = [(part + 0.5) / PARTS for part in range(PARTS)]
MOST_ROUNDS = PARTS**5
RULES = {"iid": "specinfer", "independent": "specinfer", "top_k": "specinfer", "without_replacement": "mcsd",
         "greedy": "greedy_multi"}  # fmt: skip
STATES = 3  # of a policy: fresh, and after so many rounds
PAIRS, CHANGES, TREE_CHANGES = 2000, 4, 16  # pairs of rows; changed rounds for each first one
NUM_ROWS, DEEPEST, LONGEST, EARLIER = 3, 8, 40, 5  # at most: of a batch, a round, a text, and rounds before


def check_anticipation(
    policy: StoppingPolicy, proposer: TextProposer, most: int = 3, hidden_size: int = 2, seeds: int = 3
) -> float:
    """Whether draws decide that they are sent themselves: by pairs of rounds. And short rounds' texts, by enumeration.

    Returns the largest total variation between the first tokens of texts and the target's, under token verification: 0 up to
    rounding. Raises AssertionError if a pair shows that texts need not follow the target's distribution.

    A pair: a round is drafted, and once more with other draws at depth k or later, in any rows, that were not sent. What is
    sent up to k must stay the same in every row. (In one row: whether position k is sent depends on nothing drawn at k or
    later.) That makes texts exact, and rows independent. Which rows stop before k then follows from earlier draws and from
    draws that are sent. Given these, what such a row would draw from k on still follows q, and a rule for draws from q emits
    p averaged over it, whether it sees it or not. Without `couples_rows`, a row may depend on no neighbour at all.

    A pair of trees: any draws are others. At the first level where the rounds of a row differ, its nodes must have as many
    children in both: numbers follow from earlier levels, of the whole tree, and what was drawn is sent.

    Some 2,000 pairs of rows: q of three tokens, mostly from .02 to .98, texts of up to 40 tokens and rows without one, up to
    three rows and five rounds before, rounds of up to eight tokens (or `limit`, `deepest`). Not seen: what shows in one draw of
    a thousand, or only in longer rounds or larger batches. Enumerated are rounds of at most `most` tokens, after up to two
    others; q of two tokens is a multiple of 1/4, so that uniforms of four values stand for all. Trees are enumerated as deep
    as they have at most five nodes.

    policy    bound (`StoppingPolicy.bind`); heads are for states of `hidden_size`, a power of two
    proposer  draws the token at depth k by a row's k-th uniform; a tree of at most five nodes by as many
    """
    while most and len(UNIFORMS) ** proposer.max_nodes(most) > MOST_ROUNDS:
        most -= 1
    if not most:
        raise InputError(
            f"check_anticipation: expected a tree of at most 5 nodes, got {proposer.max_nodes(1)} (proposer.num_nodes=5)"
        )
    _check_pairs(policy, proposer, hidden_size)
    bounded, worst = Bounded(policy, 0, most), 0.0
    order = hidden_size.bit_length() - 1
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        target = TabularModel.random(2, order, generator)
        draft = _quartered(order, most, proposer.reads_blocks, generator)
        for state in _states(bounded, generator):
            rounds = _every_round(bounded, proposer, draft, state, most)
            worst = max(worst, _error(rounds, target, most, get(RULES[proposer.scheme])))
    return worst


@torch.inference_mode()
def _check_pairs(policy: StoppingPolicy, proposer: TextProposer, hidden_size: int) -> None:
    """Raises AssertionError if the rounds of some pair differ in what is sent where they must not."""
    generator, num_pairs = torch.Generator().manual_seed(0), 0
    limits = DEEPEST, policy.limit, getattr(policy, "deepest", None)
    deepest = max(1, min(limit for limit in limits if limit is not None))
    bounded, depths = Bounded(policy, 0, deepest), torch.arange(1, proposer.max_nodes(deepest) + 1)
    side_by_side = 1 if policy.couples_rows else CHANGES  # a row that is not coupled may stand beside others

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def draws(num_rows: int) -> Tensor:
        """Uniforms that are more often near 0 and 1 than evenly spread ones: rare tokens are drawn, too."""
        return (random(num_rows, len(depths)) * math.pi / 2).sin().square().clamp(max=1 - 1e-12)

    while num_pairs < PAIRS:
        num_rows = 1 + int(random() * NUM_ROWS)
        state = bounded.init(num_rows, torch.device("cpu"))
        for _ in range(EARLIER + 1):
            draft = _log_uniform(hidden_size, deepest, proposer.reads_blocks, random)
            texts = [(random(int(random() * (LONGEST + 1))) * 3).long().tolist() for _ in range(num_rows)]
            most = 1 + int(random() * deepest)
            room = [(most if random() < 0.7 else int(random() * (most + 1))) if text else 0 for text in texts]
            start = _Start(bounded, proposer, draft, texts, room, state, (2,) if random() < 0.5 else ())
            uniforms = draws(num_rows)
            proposal, state = start.drafted(uniforms)
            trees = proposal.parents is not None
            if trees:
                nodes = proposal.num_drafted.repeat_interleave(TREE_CHANGES)
                changes = depths > (random(len(nodes)) * (1 + nodes)).long().unsqueeze(1)
                changed = torch.where(changes, draws(len(nodes)), uniforms.repeat_interleave(TREE_CHANGES, 0))
                check_children(proposal, start.repeated(TREE_CHANGES).drafted(changed)[0], TREE_CHANGES)
            for _ in range(0 if trees else CHANGES // side_by_side):
                sent = proposal.num_drafted.repeat_interleave(side_by_side)
                first = 1 + (sent[int(random() * num_rows)].expand_as(sent) if policy.couples_rows else sent)
                changes = depths >= torch.maximum(first, sent + 1).unsqueeze(1)
                changed = torch.where(changes, draws(len(sent)), uniforms.repeat_interleave(side_by_side, 0))
                again = start.repeated(side_by_side).drafted(changed)[0].num_drafted
                differs = torch.minimum(sent, first) != torch.minimum(again, first)
                assert not differs.any(), (
                    f"position {int(torch.minimum(sent, again)[differs].min()) + 1} is sent or left out by what is drawn there "
                    "or later, or by a neighbour: decide before drawing (`read`)"
                )
            num_pairs += (TREE_CHANGES if trees else CHANGES) * sum(most > 0 for most in room)
            state = bounded.observe(proposal, _random_verdict(proposal, generator), state)


def _log_uniform(num_states: int, length: int, blocks: bool, random: Callable[..., Tensor]) -> TabularModel:
    """A random draft over three tokens, of probabilities from .02 to .98 before they are normalised."""

    def probs(*shape: int) -> Tensor:
        weights = 0.02 * 49 ** random(*shape, 3)
        return weights / weights.sum(-1, keepdim=True)

    draft = TabularBlock(probs(1), later=probs(length, num_states, 3)) if blocks else TabularModel(probs(1))
    draft.probs = probs(num_states)  # states are as wide as heads expect, whatever the number of tokens
    return draft


def _quartered(order: int, length: int, blocks: bool, generator: torch.Generator) -> TabularModel:
    """A random draft over two tokens, its probabilities 1/4, 1/2 or 3/4."""

    def random(*shape: int) -> Tensor:
        first = torch.randint(1, PARTS, shape, generator=generator).double() / PARTS
        return torch.stack([first, 1 - first], -1)

    probs = random(2**order)
    return TabularBlock(probs, later=random(length, 2**order, 2)) if blocks else TabularModel(probs)


def _states(policy: StoppingPolicy, generator: torch.Generator) -> list[State]:
    """States of one row: fresh, and after one or more rounds of random verdicts."""
    states = [policy.init(1, torch.device("cpu"))]
    for _ in range(STATES - 1):
        drafted = torch.randint(1, 4, (1,), generator=generator)
        tokens = torch.zeros(1, int(drafted), dtype=torch.long)
        proposal = Proposal(tokens, torch.zeros(1, int(drafted), 2), drafted, drafted)
        states.append(policy.observe(proposal, _random_verdict(proposal, generator), states[-1]))
    return states


def _random_verdict(proposal: Proposal, generator: torch.Generator) -> Verdict:
    drafted = proposal.num_drafted
    length = (torch.rand(len(drafted), generator=generator) * (drafted + 1)).long()
    return Verdict(proposal.tokens, length, length, length == drafted, length >= 0)


@dataclass(frozen=True)
class _Start:
    """What a round of some rows begins with, apart from its draws."""

    policy: StoppingPolicy
    proposer: TextProposer
    draft: TabularModel
    texts: list[list[int]]
    room: list[int]
    state: State
    end_ids: tuple[int, ...] = ()

    def repeated(self, times: int) -> _Start:
        """Every row so many times, one after the other."""
        rows = [row for row in range(len(self.room)) for _ in range(times)]
        texts, room = [self.texts[row] for row in rows], [self.room[row] for row in rows]
        return replace(self, texts=texts, room=room, state={key: value[rows] for key, value in self.state.items()})

    def drafted(self, uniforms: Tensor) -> tuple[Proposal, State]:
        """The round of these uniforms [B, M], and the policy's state after it. Drafts read the last two tokens of a text."""
        num_rows = len(self.texts)
        unread = torch.tensor([[0, 0, *text][-2:] for text in self.texts]), [2] * num_rows
        context = DraftContext(
            sequences=self.texts,
            sessions=[open_session(self.draft, num_rows, 3 + self.proposer.max_nodes(max(self.room)))],
            unread=lambda draft: unread,
            limits=torch.tensor(self.room),
            room=self.room,
            uniforms=uniforms,
            sampling=Sampling(),
            vocab_size=self.draft.vocab_size,
            fit=lambda logits: logits,
            seen=None,
            end_ids=self.end_ids,
        )
        lengths = torch.tensor([len(text) for text in self.texts])
        return self.proposer.propose(context, self.policy, in_context(self.policy, self.state, lengths))


def _every_round(
    policy: StoppingPolicy, proposer: TextProposer, draft: TabularModel, state: State, most: int
) -> list[tuple[Proposal, int]]:
    """The round of every combination of uniforms: a proposal and its row.

    All combinations form one batch. A policy that couples rows gets one combination and a fixed neighbour.
    """
    every = list(product(UNIFORMS, repeat=proposer.max_nodes(most)))
    size, rounds = 1 if policy.couples_rows else len(every), list[tuple[Proposal, int]]()
    for first in range(0, len(every), size):
        uniforms = every[first : first + size] + every[len(every) // 3 :][: policy.couples_rows]
        start = _Start(policy, proposer, draft, [[0]], [most], state).repeated(len(uniforms))
        proposal, _ = start.drafted(torch.tensor(uniforms, dtype=torch.float64))
        rounds += [(proposal, row) for row in range(size)]
    return rounds


def _error(rounds: Sequence[tuple[Proposal, int]], target: TabularModel, most: int, rule: SelectionRule) -> float:
    """Total variation between the first `most` + 1 tokens of all rounds, completed by p, and p's own."""

    def target_probs(path: Path) -> Tensor:
        return target.probs[target.state([0, *path])]

    def probability(text: Path, first: int = 0) -> float:
        return math.prod(float(target_probs(text[:n])[text[n]]) for n in range(first, len(text)))

    names = [str(levels_of(*each)) for each in rounds]
    shares, totals = Counter(names), defaultdict[Path, float](float)
    for name, each in dict(zip(names, rounds, strict=True)).items():
        for path, mass in emitted(*each, target_probs, rule).items():
            totals[path] += mass * shares[name] / len(rounds)
    error = 0.0
    for text in product(range(2), repeat=most + 1):
        ours = sum(totals[text[:length]] * probability(text, length) for length in range(1, most + 2))
        error += abs(ours - probability(text)) / 2
    return error
