"""Earlier positions as inputs of a head: live, recorded and slowly computed ones are the same."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch

from data_gen.held_out import load_frozen
from tests.toolkit.acceptance.live_rounds import lengths_alike
from toolkit import ModelPair, generate
from toolkit.acceptance import PrereadEstimator, PrereadHead
from toolkit.acceptance.folder import head_hash, scorer, scorer_with
from toolkit.acceptance.inputs import Inputs
from toolkit.config import method
from toolkit.decoding import Method, decode
from toolkit.decoding.proposers import ChainProposer, TreeProposer
from toolkit.errors import InputError
from toolkit.sampling import Sampling
from toolkit.stopping import Bounded, Rate, StoppingPolicy
from toolkit.trace.record import Recorder
from toolkit.trace.score import named_scorers, recorded_logits
from toolkit.trace.steps import RecordedStep
from toolkit.verification.rules.rejection import Rejection

H, MOST, LENGTH = 3, 5, 14
SAMPLED = Sampling(temperature=1.0, max_new_tokens=LENGTH, seed=3)
FIELDS = ("hidden", "tokens", "token_prob", "entropy", "top_probs", "present", "likelihood", "count")


def slow(draft, prompt, text):
    """What `History` should hold before the next token of prompt + text, from one plain forward."""
    ids = torch.tensor([prompt + text])
    output = draft(ids, use_cache=False, output_hidden_states=True)
    states, probs = output.hidden_states[-1][0], output.logits[0].softmax(-1)
    rows = []
    for back in range(H, 0, -1):
        place = len(prompt) + len(text) - 1 - back  # of the token whose state was there
        if back > len(text):
            rows.append([torch.zeros(states.shape[1]), 0, 0.0, 0.0, torch.zeros(2), False])
            continue
        q, token = probs[place], (prompt + text)[place + 1]
        entropy = float(-(q * q.log()).sum())
        rows.append([states[place], token, float(q[token]), entropy, q.topk(2).values, True])
    said = sum(float(probs[len(prompt) - 1 + i, token].log()) for i, token in enumerate(text))
    columns = [torch.stack([torch.as_tensor(v).double() for v in column]) for column in zip(*rows, strict=True)]
    return dict(zip(FIELDS, [*columns, torch.tensor(said), torch.tensor(len(text))], strict=True))


def check(history, row, expected):
    for name in FIELDS:
        torch.testing.assert_close(
            getattr(history, name)[row].double(),
            expected[name].double(),
            rtol=0,
            atol=1e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@dataclass(frozen=True)
class Watching(StoppingPolicy):
    """Looks at earlier positions, sometimes drafts nothing, and stops at depths that tokens decide."""

    heard: list
    limit: int = MOST

    @property
    def num_history(self):
        return H

    def init(self, num_rows, device):
        return {"rounds": torch.zeros(num_rows, dtype=torch.long)}

    def begin(self, live, state):
        return {"rounds": state["rounds"] + 1}, state["rounds"] % 4 != 2

    def step(self, step, state):
        self.heard.append(step)
        return state, step.tokens % 4 != 0


class Telling(ChainProposer):
    """Says which texts the slots hold."""

    def __init__(self):
        self.sequences = []

    def propose(self, context, policy, state):
        first = len(policy.policy.heard)
        proposal = super().propose(context, policy, state)
        self.sequences += [
            (number, [list(text) for text in context.sequences]) for number in range(first, len(policy.policy.heard))
        ]
        return proposal


@pytest.mark.parametrize("batch_size", [1, 3])
def test_live_steps_know_the_accepted_text(exact_pair, prompts, batch_size):
    """Over rejections, bonus tokens, rounds without a draft, and slots that take new prompts or are dropped."""
    heard, proposer = [], Telling()
    watching = Method("watching", Watching(heard), Rejection(), proposer, 0, MOST)
    generations = decode(exact_pair, prompts, watching, SAMPLED, batch_size=batch_size)
    assert any(one.bonus for g in generations for one in g.rounds)
    assert any(one.num_accepted < one.num_drafted for g in generations for one in g.rounds)
    if batch_size == 1:
        assert any(one.num_drafted == 0 for g in generations for one in g.rounds[1:-1])
    checked = 0
    for number, sequences in proposer.sequences:
        step = heard[number]
        drafted = [other.tokens for other in heard[number - step.depth + 1 : number]]
        for row, text in enumerate(sequences):
            prompt = next((p for p in prompts if text[: len(p)] == p), None)
            if prompt is None:
                continue  # an empty slot
            produced = text[len(prompt) :] + [int(tokens[row]) for tokens in drafted]
            check(step.history(H), row, slow(exact_pair.draft, prompt, produced))
            checked += 1
    assert checked > 100
    assert heard[0].history(H + 1) is None


def test_recorded_steps_know_their_texts_and_roll_outs(exact_pair, prompts):
    sequences = [(g.prompt_ids, g.token_ids) for g in decode(exact_pair, prompts, method("autoregressive"), SAMPLED)]
    trace = Recorder(exact_pair, SAMPLED, MOST, hidden=True).record_all(sequences, range(len(sequences)), 3)
    assert trace.num_steps > trace.num_positions
    history = RecordedStep(trace, 1, torch.arange(trace.num_steps)).history(H)
    for number, (prompt, text) in enumerate(sequences):
        first = int(trace.text_first[number])
        for place in range(len(text)):
            check(history, first + place, slow(exact_pair.draft, prompt, text[:place]))
            rolled = [*text[:place], int(trace.tokens[first + place])]
            for step in range(int(trace.roll_length[first + place])):
                index = int(trace.roll_first[first + place]) + step
                check(history, index, slow(exact_pair.draft, prompt, rolled))
                rolled.append(int(trace.tokens[index]))


@pytest.fixture(scope="module")
def toy_head(tmp_path_factory):
    """A head of the toy draft that reads everything, with weights large enough that its rounds differ."""
    torch.manual_seed(5)
    head = PrereadHead(96, 96, width=16, earlier=2, likelihood=True)
    for parameter in head.parameters():
        parameter.data *= 1.7
    head.layers[-1].bias.data += 1.5  # mostly sure of acceptance: rounds of many lengths
    return str(head.save(tmp_path_factory.mktemp("earlier") / "head"))


def test_live_rounds_are_replayed_rounds(toy_head):
    """Toy pair, temperature 0, where the text and every draft are certain: tokens and rounds are equal one by one."""
    pair, greedy = ModelPair.toy(), Sampling(temperature=0.0, max_new_tokens=40)
    asked = [load_frozen(domain, "dev")[i].prompt for domain in ("instruct", "math", "code") for i in range(2)]
    plain = decode(pair, asked, method("autoregressive"), greedy)
    heads = named_scorers(pair, {head_hash(toy_head): toy_head})
    recorder = Recorder(pair, greedy, 8, heads)
    trace = recorder.record_all([(g.prompt_ids, g.token_ids) for g in plain], range(len(plain)))
    assert trace.hidden is None and trace.estimates[f"{head_hash(toy_head)}.preread"].shape == (trace.num_steps, 2)
    lengths = set()
    for rate in (1.0, 2.5):
        policy = Bounded(Rate(PrereadEstimator(toy_head), 0.2, rate), 1, 8)
        lengths |= lengths_alike(pair, asked, plain, trace, policy, greedy, batch_size=4)
    assert len(lengths) > 4


def test_the_logits_of_a_recording_are_those_from_its_states(toy_head):
    pair, sampling = ModelPair.toy(), Sampling(max_new_tokens=16)
    sequences = [
        (g.prompt_ids, g.token_ids)
        for g in generate(pair, ["Q: Spell river.\nA:"], method="autoregressive", max_new_tokens=16)
    ]
    head = PrereadHead.load(toy_head)[0]
    whole = Recorder(pair, sampling, 4, {"mine": scorer(pair, toy_head, "preread")}).record(sequences, [0])
    states = Recorder(pair, sampling, 4, hidden=True).record(sequences, [0])
    logits = recorded_logits(states, scorer_with(head, pair.draft, "cpu"))
    torch.testing.assert_close(logits, whole.estimates["mine"])
    blind = replace(states, text_tokens=None)
    with pytest.raises(InputError, match="record it again"):
        recorded_logits(blind, scorer_with(head, pair.draft, "cpu"))


def test_every_input_counts(exact_pair, prompts):
    """Features have the size that the head is built for, and each kind of input changes them."""
    sequences = [
        (g.prompt_ids, g.token_ids) for g in decode(exact_pair, prompts[:2], method("autoregressive"), SAMPLED)
    ]
    trace = Recorder(exact_pair, SAMPLED, 2, hidden=True).record(sequences, [0, 1])
    table = exact_pair.draft.get_input_embeddings().weight
    step = RecordedStep(trace, 1, torch.arange(trace.num_positions))
    sizes = set()
    for inputs in (
        Inputs(), Inputs(2), Inputs(2, earlier_states=False), Inputs(2, earlier_tokens=False),
        Inputs(2, earlier_statistics=False), Inputs(likelihood=True),
    ):  # fmt: skip
        features = inputs.features(step, table)
        assert features.shape == (trace.num_positions, inputs.size(16, 16))
        sizes.add(features.shape[1])
    assert len(sizes) == 5  # states and embeddings are of one size here
    first = int(trace.text_first[1])  # nothing lies before a text's first position
    assert not Inputs(2, likelihood=True).features(step, table)[first, Inputs().size(16, 16) :].any()


def test_a_head_remembers_its_inputs_and_older_ones_have_none(tmp_path):
    head = PrereadHead(4, 3, width=2, earlier=2, earlier_states=False, likelihood=True, dropout=0.1)
    loaded, _ = PrereadHead.load(head.save(tmp_path / "new"))
    assert loaded.inputs == Inputs(2, earlier_states=False, likelihood=True) and loaded.dropout == 0.1
    values = torch.rand(5, loaded.inputs.size(4, 3))
    assert torch.equal(loaded(values), head.eval()(values))
    plain = PrereadHead(4, 3, width=2).save(tmp_path / "plain")
    said = json.loads((plain / "preread.json").read_text())["head"]
    assert said == {"hidden_size": 4, "embedding_size": 3, "width": 2, "depth": 2, "log_w_rej": 0.0}
    assert PrereadHead.load(ModelPair.toy().head)[0].inputs == Inputs()


def test_dropout_acts_in_training_alone():
    torch.manual_seed(0)
    head, values = PrereadHead(4, 3, width=64, dropout=0.5), torch.rand(2, 12)
    assert not torch.equal(head.train()(values), head(values))
    assert torch.equal(head.eval()(values), head(values))


def test_proposers_that_keep_nothing_refuse(toy_head):
    policy = Rate(PrereadEstimator(toy_head), rate=1.0)
    trees = Method("trees", policy, Rejection(), TreeProposer("1x1", scheme="iid"))
    with pytest.raises(InputError, match="TreeProposer keeps none"):
        decode(ModelPair.toy(), ["Once"], trees, Sampling(max_new_tokens=4))
