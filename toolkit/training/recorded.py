"""Traces for training heads: the output folder of data_gen.traces (hidden=true) as a LightningDataModule.

On path a trace holds clean training examples, and no token mixing is needed. At every position of a text of the target,
the drafted token follows the draft's distribution given that text. Its label is its probability of acceptance. Where the
acceptance draw accepted the drafted token, it is the text's own token. Then the next position's alpha =
sum_x min(p, q)(x) is the probability that the token after it is accepted. For heads that read the depth in the round, every
position is given a depth (`drawn_depths`).

An acceptance head (SpecDec++) learns from the state that has read the drafted token: that of the round's next step.

Shapes: P positions, M most tokens of a recorded round, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from toolkit.acceptance.head import AcceptanceHead
from toolkit.acceptance.inputs import Inputs
from toolkit.acceptance.preread import embedding_table
from toolkit.acceptance.saved import SavedHead
from toolkit.config.notes import AtLeast, Between, File
from toolkit.config.values import check_ranges
from toolkit.errors import InputError
from toolkit.models.fingerprint import Weights
from toolkit.models.teacher import hidden_size
from toolkit.sampling import seed_of
from toolkit.trace import Trace
from toolkit.trace.steps import Geometry, RecordedStep, step_at
from toolkit.trace.store import SAME_PROMPT, SUMMARY, check_final_states, read_traces
from toolkit.trace.trace import within
from toolkit.training.batches import Examples
from toolkit.training.examples import ExampleData, Positions

READS = "the draft's final hidden state that the token was drawn from, its embedding, and the shape of the draft's distribution"
READ_STATE = "the draft's final hidden state that has read the token"
HARD_LABELS = (
    "1 where the recording's acceptance draws accept the drafted token, and the one after an accepted token; else 0"
)
LABELS = "min(1, p/q) of the drafted token, and sum min(p, q) one position later where it was accepted"


class RecordedStates(Examples):
    """Texts of a trace. `edges` [N + 1] says at which rows the positions of each of the trace's N texts begin."""

    def __init__(self, edges: Tensor, sequences: Sequence[int]):
        self.first, self.last = edges[:-1][list(sequences)], edges[1:][list(sequences)]
        self.num_examples, self.num_positions = len(sequences), int((self.last - self.first).sum())

    def rows(self, examples: Sequence[int]) -> Tensor:
        return torch.cat([torch.arange(int(self.first[text]), int(self.last[text])) for text in examples])


class TracedStates(RecordedStates):
    """The positions of some texts of a trace: features [P, F] and labels [P, 2], not a number where there is none.

    Of recordings by start these are all steps that a round may visit before a rejection, P of them.

    inputs  what the head to be trained reads; hard: labels are the acceptance draws, not their probabilities
    seed    of the depths that positions are given, once for all epochs
    """

    def __init__(
        self,
        trace: Trace,
        sequences: Sequence[int],
        table: Tensor,
        inputs: Inputs | None = None,
        hard: bool = False,
        seed: int = 0,
    ):
        self.trace, self.table, self.inputs, self.depths = trace, table, inputs or Inputs(), None
        edges = trace.text_first
        if trace.run is None:
            self.steps = torch.arange(trace.num_positions)
            following, accepted = (self.steps + 1).clamp(max=trace.num_positions - 1), trace.accepted
            followed = accepted.index_fill(0, edges[1:] - 1, False)
            accepts = torch.stack([accepted, accepted[following]], 1)
            if self.inputs.round_depth:
                first = edges[:-1].repeat_interleave(trace.lengths())
                generator = torch.Generator().manual_seed(seed_of(seed))
                self.depths = drawn_depths(accepted, first, self.inputs.round_depth, generator)
        else:
            start, depth, self.steps, followed = visited(trace)
            following, run = trace.roll_first[start] + depth - 1, trace.run[start]
            accepts = torch.stack([run >= depth, run > depth], 1)
            edges = torch.searchsorted(start, edges)
            self.depths = depth.clamp(max=self.inputs.round_depth) if self.inputs.round_depth else None
        following = torch.where(followed, following, 0)
        labels = accepts.float() if hard else torch.stack([trace.accept_prob[self.steps], trace.alpha[following]], 1)
        self.labels = torch.stack([labels[:, 0], labels[:, 1].where(followed, torch.nan)], 1)
        super().__init__(edges, sequences)

    def batch(self, examples: Sequence[int]) -> Positions:
        index = self.rows(examples)
        step = RecordedStep(self.trace, 1, self.steps[index])
        depth = None if self.depths is None else self.depths[index]
        return Positions(self.inputs.features(step, self.table, depth), self.labels[index], step.token_prob)


class ReadStates(RecordedStates):
    """The states [P, D] that have read the drafted tokens of some texts of a trace, with labels [P], for acceptance heads.

    Positions and labels are those of `TracedStates`, where the recording has a step more.
    """

    def __init__(self, trace: Trace, sequences: Sequence[int], hard: bool = False):
        self.trace = trace
        if trace.run is None:
            start = self.steps = torch.arange(trace.num_positions)
            self.reading, read = step_at(trace, Geometry.of(trace), start, 2)
            accepted = trace.accepted
        else:
            start, depth, self.steps, _ = visited(trace)
            self.reading, read = trace.roll_first[start] + depth - 1, depth <= trace.roll_length[start]
            accepted = trace.run[start] >= depth
        start, self.steps, self.reading = start[read], self.steps[read], self.reading[read]
        self.labels = accepted[read].float() if hard else trace.accept_prob[self.steps]
        edges = torch.searchsorted(start, trace.text_first)
        super().__init__(edges, [text for text in sequences if edges[text] < edges[text + 1]])

    def batch(self, examples: Sequence[int]) -> Positions:
        index = self.rows(examples)
        hidden = RecordedStep(self.trace, 1, self.reading[index]).hidden
        return Positions(hidden, self.labels[index], self.trace.token_prob[self.steps[index]])


def visited(trace: Trace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a recording by start: the steps that rounds visit before a rejection or the text's end, by start and depth.

    Returns start [n], depth from 1 [n], step [n], and whether there is one step more [n].
    """
    assert trace.run is not None
    geometry = Geometry.of(trace)
    more = torch.minimum(geometry.run, geometry.left - 1).minimum(trace.roll_length)
    start = torch.arange(trace.num_positions).repeat_interleave(more + 1)
    depth = 1 + within(more + 1)
    step = torch.where(depth == 1, start, trace.roll_first[start] + depth - 2)
    return start, depth, step, depth <= more[start]


def drawn_depths(probs: Tensor, first: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """A depth in the round, in 1..most, for every position [n]: a recorded position belongs to no round.

    Rounds of 1 to M tokens may start at every token of a response, with equal probability. A round goes on only while all
    its drafted tokens are accepted. So a position i is at depth d with a probability proportional to

        c_{i-1} c_{i-2} ... c_{i-d+1},      d = 1 .. min(i - first + 1, M)

    c_j is the probability that the drafted token at j is accepted. It is 0 or 1 in a trace, where acceptance draws are known.
    There d is uniform over the starts whose round reaches i. No policy is presumed, because the head shall decide how long
    rounds are. Replay and dynamic program weigh starts alike, too. Rounds of one policy start mostly after its rejections.

    probs [n]  c of every position
    first [n]  where the position's response begins
    """
    probs = probs.double()
    position = torch.arange(len(probs))

    def deeper(weight: Tensor, depth: int) -> Tensor:
        before = position - depth
        return torch.where(before >= first, weight * probs[before.clamp(min=0)], 0.0)

    total = weight = torch.ones_like(probs)  # sums of weights over depths
    for depth in range(1, most):
        weight = deeper(weight, depth)
        total = total + weight
    level = torch.rand(len(probs), generator=generator, dtype=torch.float64) * total
    depths, reached, weight = torch.ones_like(position), torch.zeros_like(level), torch.ones_like(level)
    for depth in range(1, most):
        reached = reached + weight
        weight = deeper(weight, depth)
        depths += (level >= reached) & (weight > 0)
    return depths


class TracedData(ExampleData):
    """Batches of positions, texts being the unit.

    path                 folder of data_gen.traces, recorded with hidden=true; all its replicates are used
    draft                the model that drafted in it: its embeddings are read
    batch_size           texts per batch and process
    validation_fraction  of the prompts; the texts of a prompt, and the replicates of a text, stay together
    shuffle, seed        a new order of the training texts for every epoch
    hard_labels          train on the recording's acceptance draws, 0 or 1, instead of their probabilities
    positions            so many, of texts in a random order; the validation texts are of these; None: all

    Raises InputError if the folder is not finished, holds no states, or the draft is another one.
    """

    made_by = ("data_gen.traces", SUMMARY, "traces")

    def __init__(
        self,
        path: Annotated[str | Path, File()],
        draft: Any,
        batch_size: Annotated[int, AtLeast(1)] = 32,
        validation_fraction: Annotated[float, Between(0, 1, "()")] = 0.1,
        shuffle: bool = True,
        seed: int = 0,
        hard_labels: bool = False,
        positions: Annotated[int, AtLeast(1)] | None = None,
    ):
        super().__init__(path, draft, batch_size, shuffle, seed)
        self.hard_labels, self.head_inputs, self.reads_state = hard_labels, Inputs(), False
        self.validation_fraction, self.positions = validation_fraction, positions
        check_ranges(self, "data.")
        check_final_states(self.summary, path)

    def setup(self, stage: str | None = None) -> None:
        if self.states:
            return
        trace, table = read_traces(self.path, replicate=None), embedding_table(self.draft).cpu()
        if trace.hidden is None:
            raise InputError(f"the traces in {self.path} hold no hidden states: record them with hidden=true")
        generator = torch.Generator().manual_seed(0)  # the split does not depend on the training's seed
        first = torch.arange(int(trace.rows.max()) + 1)
        for row, *others in self.summary.get(SAME_PROMPT, ()):
            first[[other for other in others if other < len(first)]] = row
        rows = first[trace.rows]
        different = rows.unique()  # each prompt once, whatever its texts and their replicates
        different = different[torch.randperm(len(different), generator=generator)]
        if self.positions is not None:
            lengths = torch.zeros(int(different.max()) + 1, dtype=torch.long).index_add_(0, rows, trace.lengths())
            before = lengths[different].cumsum(0) - lengths[different]
            different = different[before < self.positions]
        held_out = different[: round(len(different) * self.validation_fraction)]
        validation, used = torch.isin(rows, held_out), torch.isin(rows, different)
        for name, chosen in (("train", used & ~validation), ("validation", validation)):
            sequences = chosen.nonzero().squeeze(1).tolist()
            if not sequences:
                raise InputError(f"{self.path}: {len(different)} prompts leave none for the {name} split; record more")
            hard = self.hard_labels and name == "train"
            if self.reads_state:
                self.states[name] = ReadStates(trace, sequences, hard)
            else:
                self.states[name] = TracedStates(trace, sequences, table, self.head_inputs, hard, self.seed)

    def read_by(self, head: SavedHead) -> None:
        reads = (head.inputs, isinstance(head, AcceptanceHead))
        if reads[1] and head.inputs != Inputs():
            raise InputError(
                "data=traced gives acceptance heads the newest state alone: expected head.earlier=0 head.likelihood=false "
                "head.round_depth=0, or data=mixed"
            )
        if reads != (self.head_inputs, self.reads_state):
            (self.head_inputs, self.reads_state), self.states = reads, {}

    def head_sizes(self) -> dict[str, int]:
        return {"hidden_size": hidden_size(self.draft), "embedding_size": embedding_table(self.draft).shape[1]}

    def about(self) -> dict[str, Any]:
        names = ("target_fingerprint", "target_weights", "sampling")
        return {
            **{name: self.summary[name] for name in names if name in self.summary},
            **(Weights.recorded(self.summary) or self.weights).facts(),
            "data": self.path.name,
            "num_positions": self.states["train"].num_positions,
            "hidden_state": READ_STATE if self.reads_state else READS,
            "label": HARD_LABELS if self.hard_labels else LABELS,
        }
