"""The simulator against the live loop (greedy: equal texts, so equal counts), and by hand."""

from functools import partial

import numpy as np
import pytest
import torch

from analysis.loads.recorded import RecordedPair
from analysis.loads.simulator import Load, serve
from analysis.tables.grid import Setting, expand
from analysis.tables.sweep_context import Recording, SweepContext
from data_gen.held_out import load_frozen
from toolkit import ModelPair, config
from toolkit.acceptance.folder import head_hash
from toolkit.costs.load import CostGrid, LoadCost
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt
from toolkit.stopping import Bounded, Fixed
from toolkit.trace.copies import Copies
from toolkit.trace.record import Recorder
from toolkit.trace.replay import replay
from toolkit.trace.score import named_scorers
from toolkit.trace.steps import Geometry

SAMPLING = Sampling(temperature=0.0, max_new_tokens=24)


@pytest.fixture(scope="module")
def pair():
    return ModelPair.toy()


@pytest.fixture(scope="module")
def recorded(pair):
    prompts = [e.prompt for domain in ("math", "code") for e in load_frozen(domain, "dev")[:4]]
    plain = decode(pair, prompts, config.method("autoregressive"), SAMPLING)
    sequences = [(g.prompt_ids, g.token_ids) for g in plain]
    return sequences, Recorder(pair, SAMPLING, 10, named_scorers(pair, {head_hash(pair.head): pair.head})).record(
        sequences, range(len(sequences))
    )


COLUMN = CostGrid((1.0, 8.0), (1.0, 3.0), (0.0,), np.array([[[1.0], [1.2]], [[2.0], [3.5]]]))
COSTS = LoadCost(CostGrid((1.0, 8.0), (1.0,), (0.0,), np.array([[[0.1]], [[0.2]]])), COLUMN, "test")


def longest_first(lengths):
    """The texts as the decoding loop takes them."""
    return sorted(range(len(lengths)), key=lambda text: -lengths[text])


@pytest.mark.parametrize(("name", "slots"), [
    ("speculative", 3), ("confidence", 1), ("rate", 3), ("batch_rate", 3), ("batch_rate", 1), ("dynamic_confidence", 3),
])  # fmt: skip
def test_it_counts_what_live_batches_count(pair, recorded, tmp_path, name, slots):
    sequences, trace = recorded
    costs = COSTS.save(tmp_path / "costs.json")
    method = config.method(name, ["max_drafted=10", *([f"policy.costs={costs}"] if name == "batch_rate" else [])])
    live = decode(pair, [prompt for prompt, _ in sequences], method, SAMPLING, batch_size=slots)
    policy = method.bind(pair).policy
    lengths = [len(prompt) for prompt, _ in sequences]
    order = longest_first(lengths)
    results = serve(trace, lengths, policy, COSTS, Load(slots, drops="half"), order)
    for number, generation in enumerate(live[text] for text in order):
        counts = generation.counts
        assert results.tokens[number] == counts.num_generated
        assert results.rounds[number] == counts.num_target_calls
        assert results.num_drafted[number] == counts.num_drafted
        assert results.num_calls[number] == counts.num_draft_calls


@pytest.mark.parametrize(
    ("name", "slots"), [("prompt_lookup", 3), ("lookup_rate", 1), ("lookup_rate", 3), ("batch_lookup_rate", 3)]
)
def test_copies_count_what_live_batches_of_a_target_alone_count(pair, recorded, tmp_path, name, slots):
    sequences, _ = recorded
    costs = COSTS.save(tmp_path / "costs.json")
    told = (
        ["policy.num_drafted=3"] if name == "prompt_lookup" else [f"policy.costs={costs}", f"policy.batch_size={slots}"]
    )
    alone = ModelPair(pair.target, tokenizer=pair.tokenizer)
    method = config.method(name, told).bind(alone)
    live = decode(alone, [prompt for prompt, _ in sequences], method, SAMPLING, batch_size=slots)
    copies = Copies(method.proposer, sequences, 10, SAMPLING.max_new_tokens, alone.ends(SAMPLING))
    lengths = [len(prompt) for prompt, _ in sequences]
    order = longest_first(lengths)
    results = serve(copies, lengths, method.policy, COSTS, Load(slots, drops="half"), order)
    assert results.num_drafted.sum() > 0 == results.forwards[0]
    for number, generation in enumerate(live[text] for text in order):
        assert results.tokens[number] == generation.counts.num_generated
        assert results.rounds[number] == generation.counts.num_target_calls
        assert results.num_drafted[number] == generation.counts.num_drafted


def test_costs_are_those_of_the_longest_context_or_of_their_mean(recorded):
    """Two plain texts side by side, a target that costs its context: one round of each text's first position."""
    sequences, trace = recorded
    grid = CostGrid((1.0,), (1.0,), (0.0, 1000.0), np.array([[[1e-9, 1000.0]]]))
    costs, lengths = LoadCost(grid, grid, "test"), [100 * (number + 1) for number in range(len(sequences))]
    for drops, context in (("half", 400), ("always", (200 + 400) / 2)):
        results = serve(trace, lengths, Bounded(Fixed(1), 0, 0), costs, Load(2, drops=drops), [1, 3])
        reading = costs.target(2, 400) - costs.target(2, 1)  # the same: one width is known
        assert results.first.tolist() == pytest.approx([context + reading] * 2, abs=0.1)


def test_seconds_by_hand(recorded):
    """One slot, fixed K: every round costs its draft forwards and one target forward; the first one reads the prompt, too."""
    sequences, trace = recorded
    lengths = [len(prompt) for prompt, _ in sequences]
    results = serve(trace, lengths, Bounded(Fixed(2), 0, 2), COSTS, Load(1), [0, 3])
    counts = replay(trace, Bounded(Fixed(2), 0, 2)).counts
    expected = 0.0
    for number, text in enumerate([0, 3]):
        expected += 0.1 * (lengths[text] - 1)  # .1 a token; the draft's forward takes as long whatever it reads
        expected += sum(
            counts[name][text] * cost for name, cost in (("num_draft_calls", 0.1), ("num_target_calls", 1.0))
        )
        expected += 0.1 * counts["num_drafted"][text]  # 0.1 a column
        assert results.answered[number] == pytest.approx(expected)
    assert results.seconds.sum() == pytest.approx(results.answered.max())
    assert results.sent[1] == results.answered[0] == results.joined[1]


def test_reading_prompts_costs_the_same_whichever_requests_join_together(recorded):
    """A batch that ends together and is filled together reads no more than one whose slots are freed one by one."""
    sequences, trace = recorded
    grid = CostGrid((1.0, 4.0), (1.0, 17.0), (0.0,), np.array([[[1.0], [2.0]], [[1.0], [9.0]]]))
    costs, queue = LoadCost(grid, grid, "test"), list(range(len(sequences)))
    lengths = [10 + 30 * number for number in range(len(sequences))]
    reading = []
    for rate in (None, 1e-6):  # side by side, and one at a time
        load = Load(4 if rate is None else 1, rate=rate)
        results = serve(trace, lengths, Bounded(Fixed(1), 0, 0), costs, load, queue)
        reading.append(results.seconds.sum() - results.forwards[1])  # a plain round takes a second
    assert reading[0] == pytest.approx(reading[1]) == pytest.approx(sum(length - 1 for length in lengths) / 16)


def test_this_packages_loop_pads_prompts_of_similar_length_alone(recorded):
    """Two short prompts and a long one: two forward passes, as live batches read them; a token of a row takes a second."""
    sequences, trace = recorded
    grid = CostGrid((1.0, 3.0), (1.0, 1001.0), (0.0,), np.array([[[1.0], [1001.0]], [[3.0], [3003.0]]]))
    lengths = [11, 13, 1000, *(len(prompt) for prompt, _ in sequences[3:])]
    results = serve(
        trace, lengths, Bounded(Fixed(1), 0, 0), LoadCost(grid, grid, "test"), Load(3, drops="half"), [0, 1, 2]
    )
    assert results.first.tolist() == pytest.approx([2 * 12 + 999 + 3] * 3)


class Pausing(Fixed):
    """Drafts in every third position alone."""

    def begin(self, live, state):
        return state, live & (torch.arange(len(live)) % 3 == 0)


@pytest.mark.parametrize("drops", ["always", "half"])
def test_a_draft_reads_nothing_while_no_row_drafts_and_catches_up(recorded, drops):
    """One slot, text by text: what the draft has not read is read in its next forward pass; a token takes a second."""
    sequences, trace = recorded
    draft = CostGrid((1.0,), (1.0, 1001.0), (0.0,), np.array([[[1.0], [1001.0]]]))
    target = CostGrid((1.0,), (1.0,), (0.0,), np.array([[[1e-9]]]))
    policy, lengths = Bounded(Pausing(1), 0, 1), [len(prompt) for prompt, _ in sequences]
    results = serve(trace, lengths, policy, LoadCost(draft, target, "test"), Load(1, drops=drops), [0, 1, 2])
    geometry, expected, drafting = Geometry.of(trace), 0, True
    for text in range(3):
        position, end = trace.text_first[text : text + 2].tolist()
        unread = lengths[text] - 1
        if drafting and drops == "always":  # a live batch of new rows alone reads in the round's own forward pass
            expected, unread = expected + unread, 0
        while position < end:
            drafting = position % 3 == 0 and int(geometry.room[position]) > 0
            produced = 1 + (drafting and int(geometry.run[position]) > 0)
            produced = min(produced, end - position)
            expected += drafting * (1 + unread)
            unread, position = 0 if drafting else unread + produced, position + produced
    assert results.seconds.sum() == pytest.approx(expected)


def test_plain_decoding_reads_no_prompt_with_the_draft(recorded):
    sequences, trace = recorded
    plain = Bounded(Fixed(1), 0, 0)
    results = serve(trace, [len(p) for p, _ in sequences], plain, COSTS, Load(1), [0])
    assert results.answered[0] == pytest.approx(len(sequences[0][1]) * 1.0 + 0.1 * (len(sequences[0][0]) - 1))
    assert results.num_calls.sum() == 0 and results.forwards == (0, len(sequences[0][1]))


def test_requests_wait_for_a_slot(recorded):
    sequences, trace = recorded
    lengths = [len(p) for p, _ in sequences]
    queue = list(range(len(sequences))) * 3
    crowded = serve(trace, lengths, Bounded(Fixed(2), 0, 2), COSTS, Load(2, rate=1e6), queue)
    idle = serve(trace, lengths, Bounded(Fixed(2), 0, 2), COSTS, Load(2, rate=1e-6), queue)
    users = serve(trace, lengths, Bounded(Fixed(2), 0, 2), COSTS, Load(2, users=4), queue)
    assert (crowded.tokens == idle.tokens).all() and crowded.tokens.sum() == users.tokens.sum()
    assert (idle.joined - idle.sent).max() == pytest.approx(0) and idle.figures()["mean_batch"] == pytest.approx(1)
    assert (crowded.joined - crowded.sent).max() > 1 and crowded.figures()["mean_batch"] > 1.8
    at_work = [((users.sent <= t) & (users.answered > t)).sum() for t in np.linspace(0.1, users.answered.max() / 2, 40)]
    assert max(at_work) <= 4 and np.median(at_work) == 4
    assert torch.isfinite(torch.from_numpy(users.sent)).all()


# -- what can be results, and what rules for a whole batch are told ----------------------------------------------------


@pytest.fixture(scope="module")
def context():
    prompts = [Prompt(str(n), e.prompt) for n, e in enumerate(load_frozen("math", "dev")[:6])]
    return SweepContext(ModelPair.toy(), prompts, Sampling(temperature=1.0, max_new_tokens=20, seed=3), 6)


@pytest.fixture(scope="module")
def recorded_pair(context, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded_pair")
    own = LoadCost.ratio(0.9).save(folder / "own.json")
    settings = [Setting("autoregressive"), Setting("speculative"), Setting("batch_rate_confidence")]
    settings += [Setting("batch_rate_confidence", {"policy.costs": str(own)}), Setting("oracle"), Setting("mcsd")]
    pair = RecordedPair(context, settings, folder, 20)
    pair.costs = LoadCost.ratio(0.05), LoadCost.ratio(0.05).save(folder / "costs.json")
    return pair


def test_chains_verified_token_by_token_are_simulated(recorded_pair):
    assert [setting.method for setting in recorded_pair.settings] == [
        "autoregressive", "speculative", "batch_rate_confidence", "batch_rate_confidence",
    ]  # fmt: skip
    assert recorded_pair.left_out == {
        "oracle": "a bound, not a method",
        "mcsd": "only chains verified token by token are simulated",
    }
    plain, fixed = (recorded_pair.serve(setting, Load(2)) for setting in recorded_pair.settings[:2])
    assert plain.tokens.tolist() == fixed.tokens.tolist() and plain.forwards[0] == 0 < fixed.forwards[0]
    assert plain.forwards[1] > fixed.forwards[1]


def grid_of(*methods):
    grid = config.plain(config.compose("advise", ["pair.draft=toy/draft"]).grid)
    return expand({name: values for name, values in grid.items() if not methods or name in methods}, with_plain=True)


@pytest.mark.parametrize(
    "methods", [("batch_rate", "batch_rate_confidence"), pytest.param((), marks=pytest.mark.slow)], ids=["batch", "all"]
)
def test_settings_serve_by_cut_recordings_as_by_whole_ones(context, methods, tmp_path, monkeypatch):
    """Rules of a batch, whose wishes no text alone tells, too; fixed lengths miss the ends of text that are drafted there."""
    costs = LoadCost.ratio(0.05)
    results, steps = [], []
    for whole in (False, True):
        made = partial(Recording, whole=whole)
        monkeypatch.setattr("analysis.loads.recorded.Recording", lambda *words, whole, made=made: made(*words))
        pair = RecordedPair(context, grid_of(*methods), tmp_path / str(whole), 20)
        pair.costs = costs, costs.save(tmp_path / "costs.json")
        results.append({(s.name, n): pair.serve(s, Load(n)) for s in pair.settings for n in (1, 4)})
        steps.append(pair.recording.trace_for(pair.settings[-1]).num_steps)
    assert steps[0] < steps[1]
    for key, cut in results[0].items():
        whole = results[1][key]
        assert cut.rounds.tolist() == whole.rounds.tolist()
        if not key[0].startswith("speculative"):
            assert cut.num_drafted.tolist() == whole.num_drafted.tolist() and cut.figures() == whole.figures(), key
        else:
            share = cut.figures()["tokens_per_second"] / whole.figures()["tokens_per_second"]
            assert 0.97 < share <= 1, key


def test_a_batch_rule_reads_the_table_unless_its_setting_names_one(recorded_pair):
    free, given = recorded_pair.settings[-2:]
    assert recorded_pair.serve(free, Load(2)).num_drafted.sum() > recorded_pair.serve(given, Load(2)).num_drafted.sum()
    assert recorded_pair.overrides(free)["method.policy.costs"].endswith("costs.json")
    assert recorded_pair.overrides(given)["method.policy.costs"].endswith("own.json")
    assert recorded_pair.overrides(recorded_pair.settings[1])["method"] == "speculative"


def test_nothing_to_simulate_is_refused(context, tmp_path):
    with pytest.raises(InputError, match="no setting can be simulated: oracle: a bound, not a method"):
        RecordedPair(context, [Setting("oracle")], tmp_path, 20)
    with pytest.raises(InputError, match="may draft 20 tokens: expected at most max_drafted=4"):
        RecordedPair(context, [Setting("batch_rate_confidence")], tmp_path, 4)


def test_roll_outs_are_as_deep_as_pays_and_deeper_settings_are_left_out(context, tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.loads.recorded.depth_that_pays", lambda *_: 3)
    settings = [Setting("speculative", {"policy.num_drafted": length}) for length in (2, 3, 4)]
    pair = RecordedPair(context, [Setting("autoregressive"), *settings, Setting("confidence")], tmp_path, "auto")
    assert pair.max_drafted == 3 and list(pair.left_out) == ["speculative"]
    assert [setting.label for setting in pair.settings[:-1]] == ["", "K=2", "K=3"]
    pair.costs = LoadCost.ratio(0.05), LoadCost.ratio(0.05).save(tmp_path / "costs.json")
    assert pair.recording.trace_for(pair.settings[1]).max_drafted == 3
    assert pair.overrides(pair.settings[-1])["method.max_drafted"] == 3, "decoded as it was simulated"
    monkeypatch.setattr("analysis.loads.recorded.depth_that_pays", lambda *_: 7)
    assert RecordedPair(context, settings, tmp_path, "auto").max_drafted == 3, "measured once per draft and texts"
