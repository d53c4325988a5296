"""Rounds on a trace, walked one at a time as one would explain them; and a small trace to walk on."""

import torch

from toolkit import testing
from toolkit.sampling import Sampling
from toolkit.trace import Trace
from toolkit.trace.record import Recorder
from toolkit.types import Counts

NAMES = tuple(Counts.__dataclass_fields__)
MOST = 5


def small_trace(count=40, most=MOST, **options):
    """Random texts over tables of three tokens, of 1 to 8 tokens; token 2 ends a text."""
    sequences = [([0], [*[0, 1, 0, 0, 1, 1, 0][: i % 8], 2]) for i in range(count - 2)] + [([1], [0, 1] * 5)] * 2
    recorder = Recorder(testing.table_pair(), Sampling(max_new_tokens=10), most, **options)
    return recorder.record_all(sequences, range(count))


class Text:
    """One text of a trace: which steps a round visits."""

    def __init__(self, trace: Trace, number: int):
        self.trace, self.number = trace, number
        self.first, self.end = trace.text_first[number : number + 2].tolist()

    def visited(self, start):
        """The steps of the longest round from a position."""
        steps = []
        for position in range(start, self.end):
            steps.append(position)
            if not self.trace.accepted[position]:
                first = int(self.trace.roll_first[position])
                return steps + list(range(first, first + int(self.trace.roll_length[position])))
        return steps

    def run(self, start):
        """Accepted positions from one on."""
        run = 0
        while start + run < self.end and self.trace.accepted[start + run]:
            run += 1
        return run

    def room(self, start):
        """Tokens that a round may draft from a position."""
        return max(int(self.trace.room[self.number]) - (start - self.first), 0)

    def rounds(self, draft):
        """Start, drafted, forwards, accepted, produced of every round; `draft(text, start)` says how many of each."""
        at, rounds = self.first, []
        while at < self.end:
            drafted, calls = draft(self, at)
            accepted = min(drafted, self.run(at))
            produced = min(accepted + 1, self.end - at)
            rounds.append((at, drafted, calls, accepted, produced))
            at += produced
        return rounds


def while_(trace, go_on, least=1, most=MOST):
    """A policy without memory: draft another while `go_on(step)` says so of the newest one."""

    def draft(text, start):
        drafted, steps = 0, text.visited(start)
        while drafted < min(most, text.room(start), len(steps)):
            drafted += 1
            if drafted >= least and not go_on(steps[drafted - 1]):
                break
        return drafted, drafted

    return draft


def counted(rounds, most=MOST):
    """The counts of one text's rounds, and how many rounds accepted, drafted and judged so many tokens."""
    counts = dict.fromkeys(NAMES, 0)
    accepted, drafted, judged = ([0] * (most + 1) for _ in range(3))
    for _, length, calls, good, produced in rounds:
        counts["num_drafted"] += length
        counts["num_draft_calls"] += calls
        counts["num_target_calls"] += 1
        counts["num_generated"] += produced
        counts["num_discarded"] += length + 1 - produced
        accepted[good] += 1
        drafted[length] += 1
        judged[min(length, produced)] += 1
    return counts, accepted, drafted, judged


def same(replayed, trace, draft, most=MOST):
    """Whether a replay counts what the plain rounds count, in every column."""
    known = [counted(Text(trace, number).rounds(draft), most) for number in range(trace.num_texts)]
    for name in NAMES:
        assert replayed.counts[name].tolist() == [counts[name] for counts, *_ in known], name
    for name, column in (("accepted", 1), ("drafted", 2), ("reached_lengths", 3)):
        assert getattr(replayed, name).tolist() == [each[column] for each in known], name
    accepted, drafted, judged = (torch.tensor([each[i] for each in known]).sum(0) for i in (1, 2, 3))
    assert replayed.lengths.tolist() == drafted.tolist()
    assert replayed.passed.tolist() == [int(accepted[k:].sum()) for k in range(1, most + 1)]
    assert replayed.reached.tolist() == [int(judged[k:].sum()) for k in range(1, most + 1)]
