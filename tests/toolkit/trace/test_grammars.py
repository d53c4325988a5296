"""Recordings under grammars: replay against decoding, round for round, and what names and refuses a recording."""

import json
from dataclasses import dataclass, replace

import pytest
import torch

from tests.toolkit.trace.test_replay import (
    ForcedBestSource,
    ForcedProposer,
    ForcedRule,
    ForcedSource,
    best_source,
    method_of,
    per_text,
)
from toolkit import ModelPair, config
from toolkit.acceptance.folder import head_hash
from toolkit.decoding import Sampling, decode
from toolkit.decoding.proposers.copying import CopyProposer
from toolkit.drafts.block.testing import tiny_block
from toolkit.errors import InputError
from toolkit.grammar import grammar_of, grammars_of
from toolkit.grammar.text import TextWithGrammar
from toolkit.stopping import Bounded, Confidence, StoppingPolicy
from toolkit.testing import tiny_eagle3, tiny_llama, tiny_tokenizer
from toolkit.trace import CutError, bounds
from toolkit.trace.copies import Copies
from toolkit.trace.record import Recorder
from toolkit.trace.record_by_start import recorder_of
from toolkit.trace.replay import by_rounds, by_starts, replay_rounds, sweep_levels
from toolkit.trace.score import named_scorers
from toolkit.trace.store import Store

MOST = 10  # max_drafted of methods and recordings
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "name": {"type": "string", "maxLength": 8},
        "ok": {"enum": ["yes", "year"]},
    },
    "required": ["a", "name", "ok"],
    "additionalProperties": False,
}
GRAMMARS = (SCHEMA, "([0-9]{2}, answer: )+[0-9]", None)
PROMPTS = ("Q: 3 + 4 =\nA:", "list: 7 8 9\n")


@dataclass(frozen=True)
class Told(StoppingPolicy):
    """Decides by all that it hears of the rounds before, certain tokens apart."""

    def init(self, num_rows, device):
        return {"mood": torch.zeros(num_rows, dtype=torch.long, device=device)}

    def begin(self, live, state):
        return {"mood": state["mood"] + live}, state["mood"] % 5 != 4

    def step(self, step, state):
        return {"mood": state["mood"] + 3 * step.tokens + step.depth}, state["mood"] % 7 != 6

    def observe(self, proposal, verdict, state):
        mood = 5 * verdict.length + 7 * proposal.num_drafted + 11 * proposal.num_calls
        if getattr(proposal, "sent_certain", None) is not None:
            mood = mood + 13 * proposal.sent_certain + 17 * proposal.kept_certain
        return {"mood": state["mood"] + mood}


def attentive():
    return replace(config.method("speculative", [f"max_drafted={MOST}"]), policy=Told())


def methods():
    fixed = {f"K={k}": method_of("fixed", [f"policy.num_drafted={k}"]) for k in (1, 3, 8)}
    others = {name: method_of(name) for name in ("rate", "svip", "adaedl", "survival")}
    sources = {
        name: config.method(name, [f"max_drafted={MOST}"]) for name in ("best_source", "lookup_rate", "prompt_lookup")
    }
    return {**fixed, **others, **sources, "doubtful": best_source("doubtful"), "attentive": attentive()}


METHODS = ("K=1", "K=3", "K=8", "rate", "svip", "adaedl", "survival", "best_source", "lookup_rate", "prompt_lookup", "doubtful",
           "attentive")  # fmt: skip


@pytest.fixture(scope="module")
def pair():
    return ModelPair.toy()


def requests(pair):
    """Every prompt with every grammar, and those without one."""
    return [
        ({"prompt": prompt, "grammar": grammar} if grammar else prompt, grammar)
        for prompt in PROMPTS
        for grammar in GRAMMARS
    ]


def texts_of(pair, sampling):
    chosen = requests(pair)
    generations = decode(pair, [prompt for prompt, _ in chosen], config.method("autoregressive"), sampling)
    assert not any(each.error for each in generations)
    pairs = zip(generations, chosen, strict=True)
    return [TextWithGrammar(each.prompt_ids, each.token_ids, grammar) for each, (_, grammar) in pairs]


@pytest.fixture(scope="module", params=[0.0, 1.0])
def recorded(request, pair):
    sampling = Sampling(request.param, max_new_tokens=40, repetition_penalty=1.2 if request.param else 1.0)
    sequences = texts_of(pair, sampling)
    recorder = Recorder(pair, sampling, MOST, named_scorers(pair, {head_hash(pair.head): pair.head}), hidden=True)
    return sampling, sequences, recorder.record(sequences, range(len(sequences)))


def rounds_of(pair, method, trace, sequences, sampling):
    """Every text's replayed rounds: drafted, forwards, accepted, produced."""
    bound, copies = method.bind(pair), None
    source = bound.proposer if isinstance(bound.proposer, CopyProposer) else getattr(bound.proposer, "copies", None)
    if source is not None:
        grammars = grammars_of(pair, sampling, sequences)
        copies = Copies(source, sequences, bound.limit, sampling.max_new_tokens, pair.ends(sampling), grammars)
    walked = (
        replay_rounds(copies, bound.policy) if source is bound.proposer else replay_rounds(trace, bound.policy, copies)
    )
    rounds = [[] for _ in sequences]
    for part in walked:
        for text, _, *counts in zip(*(values.tolist() for values in part), strict=True):
            rounds[text].append(tuple(counts))
    return rounds


def decoded_rounds(generations):
    return [
        [(r.num_drafted, r.num_draft_calls, r.num_accepted, r.num_produced) for r in each.rounds]
        for each in generations
    ]


@pytest.mark.parametrize("recorded", [0.0], indirect=True)
@pytest.mark.parametrize("name", METHODS)
def test_greedy_decoding_equals_replay_round_for_round(recorded, pair, name):
    sampling, sequences, trace = recorded
    method = methods()[name]
    live = decode(pair, [prompt for prompt, _ in requests(pair)], method, sampling, batch_size=1)
    assert [each.token_ids for each in live] == [produced for _, produced in sequences]
    assert rounds_of(pair, method, trace, sequences, sampling) == decoded_rounds(live)
    if name not in ("K=8", "best_source", "attentive"):
        return
    together = decode(pair, [prompt for prompt, _ in requests(pair)], method, sampling, batch_size=5)
    assert decoded_rounds(together) == decoded_rounds(live), "whoever decodes beside a row"


@pytest.mark.parametrize("recorded", [1.0], indirect=True)
@pytest.mark.parametrize("name", METHODS)
def test_forced_draws_of_decoding_equal_replay_round_for_round(recorded, pair, name):
    """The draws of the recording decide what is drafted and accepted in decoding, too."""
    sampling, sequences, trace = recorded
    method = methods()[name]
    source = hasattr(method.proposer, "copies") or isinstance(method.proposer, CopyProposer)
    rounds = []
    for number, (prompt, produced) in enumerate(sequences):
        if isinstance(method.proposer, CopyProposer):
            continue  # the texts alone decide, see below
        drafts = (ForcedBestSource if source else ForcedProposer)(trace, number, len(prompt))
        rule = (ForcedSource if source else ForcedRule)(drafts, produced)
        grammar = sequences[number].grammar
        forced = replace(method, proposer=drafts, rule=rule)
        (live,) = decode(pair, [{"prompt": prompt, "grammar": grammar} if grammar else prompt], forced, sampling)
        assert live.token_ids == produced
        rounds += decoded_rounds([live])
    replayed = rounds_of(pair, method, trace, sequences, sampling)
    if rounds:
        assert replayed == rounds


def test_a_recording_knows_what_is_certain(recorded, pair):
    """Along the texts and along the roll-outs: as fresh grammars say that are fed the same tokens."""
    sampling, sequences, trace = recorded
    step = 0
    for text in sequences:
        state = grammar_of(pair, sampling, text.grammar)
        for position, token in enumerate(text[1]):
            at = step + position
            checked = [(at, state)]
            drafted = None if state is None else state.after(int(trace.tokens[at]))
            first = int(trace.roll_first[at])
            for deeper in range(first, first + int(trace.roll_length[at])):
                checked.append((deeper, drafted))
                drafted = None if drafted is None else drafted.after(int(trace.tokens[deeper]))
            for index, before in checked:
                after = None if before is None else before.after(int(trace.tokens[index]))
                assert bool(trace.certain[index]) == (before is not None and before.forced is not None)
                assert int(trace.certain_after[index]) == (0 if after is None else len(after.run(16)))
                assert before is None or before.allowed[int(trace.tokens[index])]
                if trace.certain[index]:
                    assert trace.draft_prob[index] == trace.token_prob[index] == 1 and trace.entropy[index] == 0
            state = None if state is None else state.after(token)
        step += len(text[1])
    assert 0 < int(trace.certain[: trace.num_positions].sum()) < trace.num_positions
    assert bool(trace.certain[trace.num_positions :].any()), "roll-outs pass through certain tokens"


@pytest.mark.parametrize("recorded", [1.0], indirect=True)
def test_ways_of_replay_agree_and_others_refuse(recorded, pair):
    _, _, trace = recorded
    policy = Bounded(Confidence(0.6), 1, MOST)
    assert per_text(by_starts(trace, policy)) == per_text(by_rounds(trace, policy))
    for call in (
        lambda: sweep_levels(trace, Confidence(0.6), [0.5]),
        lambda: bounds.oracle(trace),
        lambda: bounds.true_probability(trace, 0.2),
    ):
        with pytest.raises(InputError, match="expected a recording without a grammar"):
            call()


@pytest.mark.parametrize("name", ["K=3", "svip", "rate"])
def test_cut_recordings_replay_alike(pair, name):
    """One made for a policy, one that goes on where it was cut, and a whole one."""
    sampling = Sampling(1.0, max_new_tokens=40)
    sequences = texts_of(pair, sampling)
    heads = named_scorers(pair, {head_hash(pair.head): pair.head})
    whole = Recorder(pair, sampling, MOST, heads).record(sequences, range(len(sequences)))
    policy = methods()[name].bind(pair).policy
    recorder = Recorder(pair, sampling, MOST, heads, policies=[policy])
    cut = recorder.record(sequences, range(len(sequences)))
    assert cut.num_steps < whole.num_steps
    assert per_text(by_rounds(cut, policy)) == per_text(by_rounds(whole, policy))
    deep = Bounded(Confidence(0.0), 1, MOST)
    with pytest.raises(CutError) as error:
        by_rounds(cut, deep)
    deeper = replace(recorder, policies=None).deepened(cut, sequences, error.value.positions)
    assert per_text(by_rounds(deeper, deep)) == per_text(by_rounds(whole, deep))


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_recordings_by_start_replay_greedy_decoding(kind):
    tokenizer = tiny_tokenizer()
    target = tiny_llama(32, 2, 0, torch.float32, len(tokenizer))
    draft = tiny_eagle3(target) if kind == "eagle3" else tiny_block(target, kind)
    pair = ModelPair(target=target, draft=draft, tokenizer=tokenizer, end_ids=(2,), costs="assumed")
    sampling = Sampling(0.0, max_new_tokens=40)
    sequences = texts_of(pair, sampling)
    trace = recorder_of(pair, sampling, 6).record(sequences, range(len(sequences)))
    assert trace.run is not None and bool(trace.certain.any())
    for number in (1, 3, trace.max_drafted):
        method = config.method("speculative", [f"max_drafted={trace.max_drafted}", f"policy.num_drafted={number}"])
        live = decode(pair, [prompt for prompt, _ in requests(pair)], method, sampling)
        assert [each.token_ids for each in live] == [produced for _, produced in sequences]
        assert rounds_of(pair, method, trace, sequences, sampling) == decoded_rounds(live)


def test_a_grammar_names_a_recording_and_none_changes_no_name(pair, tmp_path):
    sampling = Sampling(1.0, max_new_tokens=40)
    text = texts_of(pair, sampling)[0]
    schema, bare = json.dumps(SCHEMA), (text[0], text[1])
    path = tmp_path / "schema.json"
    path.write_text(schema)

    def name(sampling, text):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        trace = Store(folder).trace(pair, sampling, [text], 2)
        (file,) = folder.iterdir()
        return file.name, trace.certain is not None

    plain = name(sampling, bare)
    assert name(sampling, TextWithGrammar(*bare, None)) == plain and not plain[1]
    under = name(sampling, text)
    assert under[1] and under[0] != plain[0]
    assert name(replace(sampling, grammar=schema), bare) == name(replace(sampling, grammar=str(path)), bare) == under
    other = name(replace(sampling, grammar="json"), bare)
    assert other[1] and other[0] not in (under[0], plain[0]), "another grammar is recorded anew"
    with pytest.raises(InputError, match="has probability 0 under this target and sampling"):
        name(replace(sampling, grammar="[0-9]+"), bare)
    with pytest.raises(InputError, match="no stop strings"):
        name(replace(sampling, grammar=schema, stop=("b",)), bare)
