"""For people who draft in blocks, or decide how much of a block is sent: tiny block drafts, and a check of what decisions use.

pair = block_pair(markov=True)                  tables: q of position k by the text's state and the token before the position
tiny_block(target, "dspark")                    a random DSpark draft of a tiny target
check_anticipation(MyPolicy(), BlockProposer()) does a token decide whether it is sent itself?
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from toolkit.decoding.proposers.base import DraftContext, TextProposer
from toolkit.decoding.proposers.block import BlockProposer
from toolkit.engine import BlockSession, Reading, TabularModel, open_session
from toolkit.engine.tabular import TabularSession
from toolkit.models.block_draft import BlockDraft, BlockSettings
from toolkit.models.pair import ModelPair
from toolkit.sampling import Sampling
from toolkit.stopping import Bounded, StoppingPolicy
from toolkit.stopping.base import State
from toolkit.types import Proposal, Verdict
from toolkit.verification.rules.rejection import Rejection

# -- drafts -----------------------------------------------------------------------------------------------------------


def tiny_block(
    target: Any, kind: str = "dflash", kept: Tensor | None = None, seed: int = 0, **settings: Any
) -> BlockDraft:
    """A random block draft of two layers for a tiny target, on its device; forty tokens have an output row.

    settings  of `BlockSettings`, and `window`: of the last layer
    """
    generator, base = torch.Generator().manual_seed(seed), target.config
    tokens = torch.randperm(base.vocab_size, generator=generator)[:40].sort().values if kept is None else kept
    window = settings.pop("window", None)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=base.vocab_size, hidden_size=base.hidden_size, intermediate_size=24, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, num_hidden_layers=2, max_position_embeddings=512, tie_word_embeddings=False,
        use_sliding_window=window is not None, sliding_window=window,
        layer_types=["full_attention", "full_attention" if window is None else "sliding_attention"],
    )  # fmt: skip
    spark = kind == "dspark"
    more = {"sample_from_anchor": spark, "markov_rank": 3 if spark else 0, "enable_confidence_head": spark,
            "confidence_head_with_markov": spark}  # fmt: skip
    usual = {"block_size": 4, "mask_token_id": 1, "target_layers": (0, 1, 2)}
    draft: Any = BlockDraft(config, BlockSettings(kind, **{**usual, **more, **settings}), tokens).to(target.dtype)
    for parameter in draft.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    frozen: BlockDraft = draft.to(target.device).requires_grad_(False).eval()
    return frozen


@dataclass
class TabularBlock(TabularModel):
    """A block draft that is a table. `probs` has the text's states, as of a `TabularModel`.

    later [K, rows, V, V]  q of position k by the text's state and the token before the position
    """

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

PARTS = 4  # probabilities of the tables below are multiples of 1 / PARTS
STATES = 3  # of a policy: fresh, and after so many rounds


def check_anticipation(
    policy: StoppingPolicy, proposer: TextProposer, most: int = 3, hidden_size: int = 2, seeds: int = 3
) -> float:
    """Whether position k of a round is sent depends on nothing that is drawn at k or later; by enumeration, in float64.

    Returns the largest total variation between the tokens of a round and the target's, under token verification: 0 up to
    rounding. Raises AssertionError if some position is sent for one of its own tokens and left out for another.

    The vocabulary has two tokens. All probabilities of q are multiples of 1/4, so that uniforms of four values stand for all:
    every round of `most` tokens is drafted once, with its probability. Drafts are random tables of blocks whose q_k depends on
    the token before, or of chains, as the proposer reads. Every state of the policy after a few rounds is tried, too.

    policy  bound (`StoppingPolicy.bind`); heads are for states of `hidden_size`, a power of two
    """
    bounded, worst = Bounded(policy, 0, most), 0.0
    order = hidden_size.bit_length() - 1
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        target = TabularModel.random(2, order, generator)
        draft = _quartered(order, most, isinstance(proposer, BlockProposer), generator)
        for state in _states(bounded, generator):
            rounds = _every_round(bounded, proposer, draft, state, most, order)
            _check_prefixes(rounds, most)
            worst = max(worst, _error(rounds, target, most, order))
    return worst


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
        length = (torch.rand(1, generator=generator) * (drafted + 1)).long()
        tokens = torch.zeros(1, int(drafted), dtype=torch.long)
        proposal = Proposal(tokens, torch.zeros(1, int(drafted), 2), drafted, drafted)
        verdict = Verdict(tokens, length, length, length == drafted, length >= 0)
        states.append(policy.observe(proposal, verdict, states[-1]))
    return states


@dataclass(frozen=True)
class DraftedRound:
    """A round: what was drawn with, the tokens that are sent [k], and their q [k, V]."""

    uniforms: tuple[float, ...]
    tokens: Tensor
    q: Tensor


def _every_round(
    policy: StoppingPolicy, proposer: TextProposer, draft: TabularModel, state: State, most: int, order: int
) -> list[DraftedRound]:
    """The round of every combination of uniforms; each is a row of one batch, or beside a neighbour where rows decide together.

    The neighbour draws the same in all of them.
    """
    every = list(product([(part + 0.5) / PARTS for part in range(PARTS)], repeat=most))
    size, rounds, context = 1 if policy.couples_rows else len(every), list[DraftedRound](), _context(order)
    for first in range(0, len(every), size):
        uniforms = every[first : first + size] + every[len(every) // 3 :][: policy.couples_rows]
        session = open_session(draft, len(uniforms), len(context) + most + 1)
        unread = torch.tensor([context] * len(uniforms)), [len(context)] * len(uniforms)
        drawn = DraftContext(
            sequences=[context] * len(uniforms),
            sessions=[session],
            unread=_Unread(unread),
            limits=torch.tensor([most] * len(uniforms)),
            room=[most] * len(uniforms),
            uniforms=torch.tensor(uniforms, dtype=torch.float64),
            sampling=Sampling(),
            vocab_size=2,
            fit=lambda logits: logits,
            seen=None,
            end_ids=(),
        )
        states = {key: value.repeat_interleave(len(uniforms), 0) for key, value in state.items()}
        proposal, _ = proposer.propose(drawn, policy, states)
        for row, values in enumerate(uniforms[:size]):
            sent = int(proposal.num_drafted[row])
            rounds.append(DraftedRound(values, proposal.tokens[row, :sent], proposal.draft_probs[row, :sent]))
    return rounds


@dataclass(frozen=True)
class _Unread:
    """The tokens that no draft has read, whatever the draft's number."""

    tokens: tuple[Tensor, list[int]]

    def __call__(self, draft: int) -> tuple[Tensor, list[int]]:
        return self.tokens


def _context(order: int) -> list[int]:
    return [0] * max(order, 1)


def _check_prefixes(rounds: Sequence[DraftedRound], most: int) -> None:
    """Raises AssertionError if whether position k is sent differs between rounds whose first k - 1 draws are the same."""
    for position in range(1, most + 1):
        sent: dict[tuple[float, ...], bool] = {}
        for drafted in rounds:
            is_sent = len(drafted.tokens) >= position
            assert sent.setdefault(drafted.uniforms[: position - 1], is_sent) == is_sent, (
                f"position {position} is sent or left out by what is drawn there or later: decide before drawing (`read`)"
            )


def _error(rounds: Sequence[DraftedRound], target: TabularModel, most: int, order: int) -> float:
    """Total variation between the first `most` + 1 tokens of all rounds, completed by p, and p's own."""
    start, rule = target.state(_context(order)), Rejection()
    texts = list(product(range(2), repeat=most + 1))
    emitted = dict.fromkeys(texts, 0.0)

    def rows(tokens: Sequence[int]) -> list[int]:
        """The table rows before each of the tokens, and after the last."""
        states = [start]
        for token in tokens:
            states.append((states[-1] * 2 + token) % len(target.probs))
        return states

    def probability(tokens: Sequence[int], first: int = 0) -> float:
        pairs = list(zip(rows(tokens), tokens, strict=False))[first:]
        return math.prod(float(target.probs[row, token]) for row, token in pairs)

    shares = Counter(tuple(drafted.tokens.tolist()) for drafted in rounds)
    for drafted in {tuple(drafted.tokens.tolist()): drafted for drafted in rounds}.values():
        tokens = drafted.tokens.tolist()
        lengths, residuals = rule.distribution(target.probs[rows(tokens)], drafted.q.expand(-1, 2), drafted.tokens)
        for text, length in product(texts, range(len(tokens) + 1)):
            if list(text[:length]) == tokens[:length]:
                mass = float(lengths[length] * residuals[length, text[length]]) * probability(text, length + 1)
                emitted[text] += mass * shares[tuple(tokens)] / len(rounds)
    return sum(abs(emitted[text] - probability(text)) for text in texts) / 2
