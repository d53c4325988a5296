"""A recording against one made token by token from the tables: every column of the trace, and what is refused."""

import gc
import math
import random
import resource
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from toolkit import ModelPair, testing
from toolkit.engine import Session
from toolkit.engine.capture import StaticForward
from toolkit.engine.engine import engine_of
from toolkit.engine.tabular import TabularModel
from toolkit.errors import InputError
from toolkit.sampling import Sampling, row_generator
from toolkit.trace import join
from toolkit.trace.record import BATCH, Recorder

V, END, LENGTH = 4, 0, 6
PROMPTS = [[1], [3, 2, 1], [2, 2]]
NAMES = ("tokens", "draft_prob", "token_prob", "entropy", "top_probs", "accept_prob", "alpha", "hidden", "mine")


def pair_of(order=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    target, draft = (TabularModel.random(V, order, generator, sharpness=1.4) for _ in range(2))
    return ModelPair(target=target, draft=draft, end_ids=(END,))


def texts_of(count, seed=1):
    """Prompts and responses that end as live decoding ends: by an end of text, or by the limit."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for number in range(count):
        tokens = torch.randint(0, V, (LENGTH,), generator=generator).tolist()
        cut = tokens.index(END) + 1 if END in tokens else LENGTH
        sequences.append((PROMPTS[number % 3], tokens[:cut]))
    return sequences


def inverse(weights, uniform):
    """The token whose part of the line holds the point."""
    point, below = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        below += weight
        if point < below:
            return token
    raise AssertionError


class Reference:
    """One text, step by step."""

    def __init__(self, recorder, text, row):
        self.recorder, self.sampling = recorder, recorder.sampling
        self.prompt, self.text = text
        generator = row_generator(self.sampling.seed + 1_000_003 * (recorder.replicate + 1), row)
        self.first = torch.rand(len(self.text), 2, generator=generator, dtype=torch.float64).tolist()
        rest = torch.rand(len(self.text), recorder.max_drafted - 1, generator=generator, dtype=torch.float64)
        self.later = rest.tolist()
        self.path, self.rolls, self.accepted, self.accept_probs, self.entropies = [], [], [], [], []
        for place, token in enumerate(self.text):
            self.position(place, token)

    def probs(self, model, context, temperature, penalty=1.0):
        logits = model.probs[model.state(context)].log()
        for token in set(context):
            logits[token] *= penalty if logits[token] < 0 else 1 / penalty
        return (logits / temperature).softmax(-1)

    def both(self, context):
        own, penalty = self.recorder.draft_temperature, self.sampling.repetition_penalty
        p = self.probs(self.recorder.pair.target, context, self.sampling.temperature, penalty)
        return p, self.probs(
            self.recorder.pair.draft, context, self.sampling.temperature if own is None else own, penalty
        )

    def facts(self, context, token, p, q, known):
        raw = self.probs(self.recorder.pair.draft, context, 1.0)
        state = self.recorder.pair.draft.state(context)
        return {
            "tokens": token, "draft_prob": q[token], "token_prob": raw[token], "entropy": -(raw * raw.log()).sum(),
            "top_probs": raw.sort(descending=True).values[:2],
            "accept_prob": min(1.0, float(p[token] / q[token])) if known else torch.nan,
            "alpha": sum(min(float(a), float(b)) for a, b in zip(p, q, strict=True)) if known else torch.nan,
            "hidden": torch.eye(V**self.recorder.pair.draft.order)[state], "mine": 10 * state + token,
        }  # fmt: skip

    def position(self, place, token):
        context = self.prompt + self.text[:place]
        p, q = self.both(context)
        self.accept_probs.append(min(1.0, float(q[token] / p[token])))
        self.accepted.append(self.first[place][0] < self.accept_probs[-1])
        self.entropies.append(float(-(p * p.log()).sum()))
        drafted = token if self.accepted[-1] else inverse((q - p).clamp(min=0).tolist(), self.first[place][1])
        self.path.append(self.facts(context, drafted, p, q, known=True))
        self.rolls.append([])
        if self.accepted[-1]:
            return
        behind = [*context, drafted]
        for depth in range(1, self.recorder.max_drafted):
            if behind[-1] == END or place + depth >= self.sampling.max_new_tokens - 1:
                return
            p, q = self.both(behind)
            drawn = inverse(q.tolist(), self.later[place][depth - 1])
            self.rolls[-1].append(self.facts(behind, drawn, p, q, known=self.recorder.upper_bound))
            behind.append(drawn)


def head(step):
    """The row of the draft's table, and the drawn token: what a head could read. Every step is the first of its forward."""
    return 10 * step.hidden.argmax(-1) + step.tokens + 1000 * (step.depth - 1)


def recorder_of(**options):
    warped = {name: options.pop(name) for name in ("temperature", "repetition_penalty") if name in options}
    sampling = Sampling(max_new_tokens=LENGTH, seed=3, **warped)
    return Recorder(pair_of(), sampling, heads={"mine": head}, hidden=True, **options)


def agrees(trace, recorder, sequences, rows):
    recorded = {name: getattr(trace, name, None) for name in NAMES} | {"mine": trace.estimates["mine"]}
    known = [Reference(recorder, text, row) for text, row in zip(sequences, rows, strict=True)]
    steps = [step for each in known for step in each.path]
    first, length = [], []
    for each in known:
        for roll in each.rolls:
            first.append(len(steps))
            length.append(len(roll))
            steps += roll
    assert trace.num_steps == len(steps) and trace.num_positions == len(first) and trace.num_texts == len(sequences)
    for name in NAMES:
        expected = torch.stack([torch.as_tensor(step[name], dtype=torch.float64) for step in steps])
        assert torch.allclose(recorded[name].double(), expected, atol=1e-6, equal_nan=True), name
    assert trace.roll_length.tolist() == length
    assert [f for f, n in zip(trace.roll_first.tolist(), length, strict=True) if n] == [
        f for f, n in zip(first, length, strict=True) if n
    ]
    assert trace.accepted.tolist() == [value for each in known for value in each.accepted]
    assert trace.text_accept_prob.tolist() == pytest.approx(
        [value for each in known for value in each.accept_probs], abs=1e-6
    )
    entropies = [value for each in known for value in each.entropies]
    assert trace.target_entropy.tolist() == pytest.approx(entropies, abs=1e-6)
    assert trace.lengths().tolist() == [len(text) for _, text in sequences] and int(trace.text_first[0]) == 0
    assert trace.rows.tolist() == list(rows) and trace.room.tolist() == [LENGTH - 1] * len(sequences)
    assert trace.max_drafted == recorder.max_drafted
    return known


@pytest.mark.parametrize(
    "options",
    [
        {"max_drafted": 4},
        {"max_drafted": 4, "upper_bound": True, "replicate": 2},
        {"max_drafted": 1, "upper_bound": True},
        {"max_drafted": 2, "draft_temperature": 0.5},
        {"max_drafted": 20, "temperature": 0.8, "upper_bound": True},
        {"max_drafted": 4, "repetition_penalty": 1.7, "temperature": 1.2, "upper_bound": True},
    ],
    ids=str,
)
def test_every_column_is_that_of_a_plain_recording(options):
    recorder, sequences = recorder_of(**options), texts_of(30)
    rows = range(5, 35)
    known = agrees(recorder.record(sequences, rows), recorder, sequences, rows)
    rejected = [not value for each in known for value in each.accepted]
    assert 10 < sum(rejected) < len(rejected) - 10
    deepest = max(len(roll) for each in known for roll in each.rolls)
    assert deepest == min(options["max_drafted"] - 1, LENGTH - 2)


def test_kinds_of_columns_are_small_but_for_the_states():
    recorder = recorder_of(max_drafted=3)
    trace = recorder.record(texts_of(4), range(4))
    kinds = {"tokens": torch.int32, "roll_length": torch.int32, "roll_first": torch.long, "hidden": torch.float64}
    singles = ("draft_prob", "token_prob", "entropy", "top_probs", "accept_prob", "alpha", "target_entropy")
    for name, kind in {**kinds, **dict.fromkeys(singles, torch.float32), "accepted": torch.bool}.items():
        assert getattr(trace, name).dtype == kind, name
    assert trace.estimates["mine"].dtype == torch.float32
    bare = Recorder(pair_of(), recorder.sampling, 3).record(texts_of(4), range(4))
    assert bare.hidden is None and bare.estimates == {}


def test_texts_of_one_token_and_without_rejections_have_no_roll_outs():
    trace = Recorder(pair_of(), Sampling(max_new_tokens=1), 4).record([([1], [2]), ([1, 2, 3], [0])], [0, 1])
    assert trace.num_steps == trace.num_positions == 2 and trace.room.tolist() == [0, 0]
    probs = torch.full((V, V), 1 / V, dtype=torch.float64)
    pair = ModelPair(target=TabularModel(probs), draft=TabularModel(probs), end_ids=(END,))
    trace = Recorder(pair, Sampling(max_new_tokens=LENGTH), 4).record([([1], [1, 2, 3, 1, 2, 3])], [0])
    assert bool(trace.accepted.all()) and trace.num_steps == LENGTH and trace.tokens.tolist() == [1, 2, 3, 1, 2, 3]


def test_texts_beside_each_other_do_not_see_each_other():
    """Models that count positions: padding in front of the shorter one moves nothing."""
    pair = testing.llama_pair()
    sequences = [([5, 6, 7, 8, 9], [4, 11, 12]), ([3], [13, 14, 15]), ([9, 9], [16, 17, 18])]
    recorder = Recorder(pair, Sampling(max_new_tokens=3), 3, hidden=True, upper_bound=True)
    together = recorder.record(sequences, range(3))
    alone = join([recorder.record([text], [row]) for row, text in enumerate(sequences)])
    assert together.tokens.tolist() == alone.tokens.tolist() and together.num_steps > together.num_positions
    for name in ("text_accept_prob", "draft_prob", "entropy", "alpha", "accept_prob", "target_entropy"):
        assert torch.allclose(getattr(together, name), getattr(alone, name), atol=1e-6), name


@pytest.mark.parametrize("upper_bound", [False, True])
def test_there_is_room_for_any_number_of_roll_outs(upper_bound):
    """Far more steps than the text has tokens: rejected everywhere, and every roll-out goes on to its end."""
    certain, even = torch.full((V, V), 1e-9), torch.full((V, V), 1 / V)
    certain[:, 1] = 1 - 3e-9
    pair = ModelPair(target=TabularModel(certain.double()), draft=TabularModel(even.double()), end_ids=())
    trace = Recorder(pair, Sampling(max_new_tokens=300), 9, upper_bound=upper_bound).record([([1], [1] * 300)], [0])
    whole = trace.roll_length[~trace.accepted][:-10]
    assert len(whole) > 150 and whole.tolist() == [8] * len(whole)


@pytest.mark.parametrize("batch_size", [None, 5])
def test_any_number_of_texts_is_recorded_in_batches(batch_size):
    recorder, sequences, heard = recorder_of(max_drafted=3), texts_of(19), []
    rows = range(100, 119)
    options = {} if batch_size is None else {"batch_size": batch_size}
    size = batch_size or BATCH
    trace = recorder.record_all(sequences, rows, on_batch=heard.append, **options)
    assert heard == [sum(len(text) for _, text in sequences[i : i + size]) for i in range(0, 19, size)]
    agrees(trace, recorder, sequences, rows)
    assert recorder.record_all(sequences, rows, **options).num_steps == trace.num_steps  # unheard


@pytest.mark.parametrize(("options", "problem"), [
    ({"max_drafted": 0}, "^max_drafted: expected at least 1, got 0$"),
    ({"sampling": Sampling(max_length=9)}, "^traces know one limit for all texts"),
])  # fmt: skip
def test_what_no_trace_can_hold_is_refused(options, problem):
    with pytest.raises(InputError, match=problem):
        Recorder(**{"pair": pair_of(), "sampling": Sampling(), **options})
    assert Recorder(pair_of(), Sampling(), 1).max_drafted == 1


@pytest.mark.parametrize(("prompt", "text", "problem"), [
    ([], [1, END], "is empty: expected a prompt and at least one token"),
    ([1], [], "is empty: expected a prompt and at least one token"),
    ([V], [1, END], "holds ids outside of the vocabulary of 4"),
    ([1], [1, -1], "holds ids outside of the vocabulary of 4"),
    ([1], [1] * (LENGTH + 1), f"has {LENGTH + 1} tokens, more than max_new_tokens={LENGTH}"),
    ([1], [END, END], "goes on after an end of text"),
    ([1], [1, 2], f"ends after 2 tokens, neither by an end of text nor by max_new_tokens={LENGTH}"),
    ([1, 1, 1], [1, END], f"and max_new_tokens={LENGTH} exceed the draft's context of 8"),
])  # fmt: skip
def test_a_text_that_cannot_be_is_named_with_the_reason(prompt, text, problem, monkeypatch):
    monkeypatch.setattr(ModelPair, "max_length", 8)
    recorder = recorder_of(max_drafted=3)
    recorder.record([([1, 1], [1, 2, END]), ([1, 0], [3] * LENGTH), ([1], [END])], [0, 1, 2])  # as long as can be
    with pytest.raises(InputError, match=f"^response 7 {problem}$"):
        recorder.record([([1], [END]), (prompt, text)], [0, 7])


@pytest.mark.parametrize(
    ("kind", "tie", "apart"),
    [(torch.float64, 3e-10, 1e-6), (torch.float32, 3e-5, 3e-3), (torch.bfloat16, 3e-3, 0.2)],
)
def test_the_coarser_the_format_the_wider_a_tie(kind, tie, apart):
    """Greedy: the second most probable token may have been the most probable where the model was run before."""
    for gap, possible in ((tie, True), (apart, False)):
        probs = torch.tensor([[0.25 + gap / 8, 0.25 - gap / 8, 0.5 - 0.25, 0.25]], dtype=torch.float64)
        model = TabularModel((probs / probs.sum()).clamp(min=1e-3))
        pair = ModelPair(target=model, draft=model, end_ids=())
        model.dtype = kind
        recorder = Recorder(pair, Sampling(temperature=0.0, max_new_tokens=1), 2)
        if possible:
            recorder.record([([0], [1])], [0])
        else:
            with pytest.raises(InputError, match=r"response 0: token 1 \(1\) has probability 0 under this target"):
                recorder.record([([0], [1])], [0])


def possible(probs, token, sampling):
    """Whether a text of this token could have come from the target."""
    model = TabularModel(torch.tensor([probs], dtype=torch.float64))
    recorder = Recorder(ModelPair(target=model, draft=model, end_ids=()), replace(sampling, max_new_tokens=1), 2)
    try:
        return recorder.record([([0], [token])], [0]).num_texts == 1
    except InputError:
        return False


def test_how_wide_an_edge_is():
    """Two logits may both be off by a share of the largest one; sums of probabilities by that share, too."""
    small = 1e-6
    margin = 1e-9 * -math.log(small)
    greedy = Sampling(temperature=0.0)
    for gap, expected in ((1.8, True), (2.2, False)):
        half = (1 - small) / 2
        probs = [half, half * math.exp(-gap * margin), small]
        assert possible(probs, 1, greedy) == expected
    margin = 1e-9 * -math.log(0.08)
    for below, expected in ((0.6, True), (1.5, False)):
        second = 0.8 * (0.1 - below * margin)
        assert possible([0.8, second, 0.2 - second], 1, Sampling(min_p=0.1)) == expected
    margin = 1e-9 * -math.log(0.1)
    for below, expected in ((0.7, True), (2.0, False)):
        assert possible([0.6, 0.3, 0.1], 1, Sampling(top_p=0.6 - below * margin)) == expected


class BrokenHead:
    """Gives what is not a number for tokens drawn in one state of the table."""

    def __call__(self, step):
        return torch.where(step.hidden.argmax(-1) == 7, torch.nan, step.entropy)


@pytest.mark.parametrize("upper_bound", [False, True])
@pytest.mark.parametrize("part", ["target", "draft", "head"])
def test_texts_of_what_is_not_a_number_are_left_out_or_refused(part, upper_bound):
    """On the text's path or in a roll-out; the other texts of the batch are recorded as ever."""
    pair, sampling = pair_of(), Sampling(max_new_tokens=LENGTH)
    sequences = texts_of(24)
    heads = {"mine": BrokenHead() if part == "head" else lambda step: step.entropy}
    whole = Recorder(pair, sampling, 3, {"mine": lambda step: step.entropy}, True, upper_bound).record_all(
        sequences, range(24)
    )
    if part != "head":
        getattr(pair, part).probs[7, 1] = torch.nan
    broken = Recorder(pair, sampling, 3, heads, True, upper_bound)
    recorded = replace(broken, sound=True).record_all(sequences, range(24))
    gone = sorted(set(range(24)) - set(recorded.rows.tolist()))
    assert 0 < len(gone) < 24
    expected = join([whole.only(whole.rows == row) for row in recorded.rows])
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(-1), getattr(recorded, name).nan_to_num(-1)), name
    assert torch.equal(expected.estimates["mine"], recorded.estimates["mine"])
    with pytest.raises(
        InputError, match=f"^response {gone[0]}: the models' distributions hold values that are not numb"
    ):
        broken.record_all(sequences, range(24))
    assert replace(broken, sound=True).record_all([sequences[gone[0]]], gone[:1]).num_texts == 0


def test_a_token_that_rounding_made_impossible_is_accepted_if_the_draft_has_it():
    """Of probability 0 by a tie: the probability is 1 where the draft may draw it, else 0."""
    even = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    for draft, prob in ((even, 1.0), (torch.tensor([[1.0, 0.0]], dtype=torch.float64), 0.0)):
        pair = ModelPair(target=TabularModel(even), draft=TabularModel(draft), end_ids=())
        recorder = Recorder(pair, Sampling(temperature=0.0, max_new_tokens=1), 2, draft_temperature=1.0)
        trace = recorder.record([([0], [1])] * 4, range(4))
        assert trace.text_accept_prob.tolist() == [prob] * 4 and trace.accepted.tolist() == [prob == 1.0] * 4
        assert trace.tokens.tolist() == [int(prob)] * 4


# -- no more memory for more texts ------------------------------------------------------------------------------------


LONGEST = 32


def random_texts(pair: ModelPair, rng: random.Random, count: int) -> list[tuple[list[int], list[int]]]:
    """Any tokens will do at temperature 1; lengths vary, as forwards' shapes do then."""
    ends = set(pair.end_ids)
    words = [token for token in range(10, 1000) if token not in ends]
    return [
        (
            rng.choices(words, k=rng.randint(4, 60)),
            [*rng.choices(words, k=rng.randint(4, LONGEST - 1)), min(ends)],
        )
        for _ in range(count)
    ]


def resident() -> int:
    """Resident bytes of this process now (Linux); elsewhere the most it ever had."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_recording_captures_no_forwards():
    """Shapes of recordings hardly recur."""
    made = []

    class Noted(StaticForward):
        after = 1

        def __init__(self, *arguments):
            made.append(arguments)
            super().__init__(*arguments)

    pair = ModelPair.toy()
    engine_of(pair).capture_kind = Noted
    recorder, rng = Recorder(pair, Sampling(max_new_tokens=LONGEST), 4), random.Random(0)
    recorder.record_all(random_texts(pair, rng, 4), range(4), 4)
    assert engine_of(pair).captures and not made


@pytest.mark.slow
def test_resident_memory_is_flat_over_texts():
    """Before: 83 kB for every text, 66 MB between the halves compared; the allocator itself swings by some 20 MB."""
    pair, rng = ModelPair.toy(), random.Random(0)
    recorder = Recorder(pair, Sampling(max_new_tokens=LONGEST), 8)
    seen = []
    for shard in range(80):
        recorder.record_all(random_texts(pair, rng, 16), range(16), 4)
        if shard % 4 == 3:
            gc.collect()
            seen.append(resident())
    assert median(seen[-6:]) - median(seen[2:8]) < 32 * 2**20, [round(value / 2**20) for value in seen]


def test_long_texts_are_read_a_part_at_a_time_and_record_the_same(monkeypatch):
    """Sixteen positions of logits are held instead of 256, and the recording is the same."""
    pair, rng = ModelPair.toy(), random.Random(1)
    many = random_texts(pair, rng, 8)
    widest = []
    extend = Session.extend

    def noted(session, tokens, **options):
        reading = extend(session, tokens, **options)
        widest.append(reading.logits.numel())
        return reading

    monkeypatch.setattr(Session, "extend", noted)

    def record():
        widest.clear()
        recorder = Recorder(pair, Sampling(max_new_tokens=LONGEST, repetition_penalty=1.1), 4, upper_bound=True)
        return recorder.record(many, range(8)), max(widest)

    whole, most = record()
    monkeypatch.setattr("toolkit.trace.record.LOGITS", 16 * pair.vocab_size)
    parts, fewer = record()
    assert fewer == 16 * pair.vocab_size < most / 8
    for name, column in vars(whole).items():
        other = getattr(parts, name)
        if isinstance(column, torch.Tensor):
            torch.testing.assert_close(other, column, rtol=2e-3, atol=1e-5, equal_nan=True, msg=name)


@pytest.mark.parametrize("broken", ["target", "draft"])
def test_padding_brings_no_number_of_its_own(broken):
    """A token that is not a number spoils the texts that hold it, and no others of their batch."""
    pair = testing.llama_pair()
    with torch.no_grad():
        getattr(pair, broken).get_input_embeddings().weight[0] = torch.nan
    (end, *_) = pair.ends(Sampling())
    sequences = [([25, 29, 12], [24, end]), ([17], [26, 29, 24, 21, 25, 28]), ([13, 14, 25, 26], [19, 17, end])]
    recorder = Recorder(pair, Sampling(max_new_tokens=6), 3, upper_bound=True, sound=True)
    alone = [recorder.record([text], [row]).num_texts for row, text in enumerate(sequences)]
    together = recorder.record(sequences, range(3))
    assert together.rows.tolist() == [row for row, count in enumerate(alone) if count] and together.num_texts
