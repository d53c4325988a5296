"""Cost tables from timed rounds: by hand, and what the clock runs for."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from tqdm.auto import tqdm

from analysis.loads import measured, tabulated, timed_forwards
from data_gen.frozen import load_frozen
from toolkit import ModelPair
from toolkit.decoding import Sampling
from toolkit.errors import InputError


def forwards(spread: float = 0.0, texts: str = "near", context: float = 50.0, **seconds: float) -> pd.DataFrame:
    """Ten timed rounds each: of a draft that drafts one token, and of a target at widths w1, w2, ..."""
    lines = []
    for number in range(10):
        shared = {"batch": 1, "context": context + number, "repeat": 1, "texts": texts}
        lines.append({"model": "draft", "width": 1, **shared, "drafted": 1, "seconds": 0.1})
        for name, value in seconds.items():
            noise = spread * (number - 4.5)
            width = int(name[1:])
            lines.append({"model": "target", "width": width, **shared, "drafted": width - 1, "seconds": value + noise})
    return pd.DataFrame(lines)


def readings(*seconds: float) -> pd.DataFrame:
    """Forwards of both models that read a prompt of 30 tokens."""
    shared = {"batch": 1, "width": 30, "context": 0.0, "drafted": 1, "repeat": 1, "texts": "prompt"}
    return pd.DataFrame(
        [{"model": model, **shared, "seconds": one} for model in ("draft", "target") for one in seconds]
    )


def test_more_tokens_per_row_take_no_less_time_where_that_may_be_chance():
    """The intervals of 3.0 and 2.8 seconds, +-.18, overlap."""
    costs, entries = tabulated.cost_table(forwards(spread=0.1, w1=1.0, w2=3.0, w3=2.8, w5=4.0), {})
    assert [costs.target(1, width, 50) for width in (1, 2, 3, 5)] == pytest.approx([1.0, 2.9, 2.9, 4.0])
    assert costs.draft(1, 1, 50) == pytest.approx(0.1)
    found = entries[entries.model == "target"].seconds.tolist()
    assert found == pytest.approx([1.0, 3.0, 2.8, 4.0]), "the entries are the means themselves"


def test_more_tokens_per_row_take_less_time_where_that_is_clear():
    """Processors are faster at some widths: four tokens per row may take less than three. Noise beside it is still levelled."""
    costs, _ = tabulated.cost_table(forwards(spread=0.1, w1=2.1, w2=2.0, w3=3.0, w4=2.2, w5=2.1, w6=4.0), {})
    means = [costs.target(1, width, 50) for width in range(1, 7)]
    assert means == pytest.approx([2.05, 2.05, 3.0, 2.15, 2.15, 4.0])


def test_costs_rise_with_the_context_as_far_as_they_were_timed():
    """Width 1 takes 2 more seconds over 100 more tokens; width 2 takes less, which is noise: its mean, 3.5."""
    found = pd.concat([forwards(w1=1.0, w2=4.0), forwards(texts="far", context=150.0, w1=3.0, w2=3.0)])
    costs, entries = tabulated.cost_table(found, {})
    assert costs.target.context == (50, 54, 154)
    asked = (0, 50, 54.5, 104.5, 154.5)
    assert [costs.target(1, 1, context) for context in asked] == pytest.approx([0.91, 0.91, 1, 2, 3], abs=0.02)
    assert [costs.target(1, 2, context) for context in (50, 54.5, 154.5)] == pytest.approx([3.5, 3.5, 3.5])
    assert set(entries.texts) == {"near", "far"}


def test_batches_of_longer_texts_cost_no_less_than_at_the_shortest_they_were_timed_at():
    """Batch 2 was timed behind 100 tokens and more: no line from far away says what it takes behind 50."""
    short = pd.concat([forwards(w1=1.0), forwards(texts="far", context=150.0, w1=3.0)])
    longer = pd.concat([forwards(context=100.0, w1=4.0), forwards(texts="far", context=200.0, w1=6.0)])
    costs, _ = tabulated.cost_table(pd.concat([short, longer.assign(batch=2)]), {})
    assert costs.target.context == (50, 80, 180)
    assert [costs.target(2, 1, context) for context in (50, 80)] == pytest.approx([3.91, 3.91], abs=0.02)
    assert [costs.target(1, 1, context) for context in (50, 80)] == pytest.approx([0.91, 1.51], abs=0.02)


def test_widths_timed_at_one_context_get_a_slope_between_their_neighbours():
    """A token of context adds .02 seconds at width 1 and .04 at width 5, so .03 at width 3. Readings of prompts get none."""
    near, far = forwards(w1=1.0, w3=3.0, w5=5.0), forwards(texts="far", context=150.0, w1=3.0, w5=9.0)
    costs, _ = tabulated.cost_table(pd.concat([near, far, readings(9.0)]), {})
    assert [costs.target(1, 3, context) for context in (54.5, 104.5, 154.5)] == pytest.approx([3.0, 4.5, 6.0], abs=0.02)
    assert [costs.target(1, 30, context) for context in (50, 154)] == pytest.approx([9.0, 9.0])


def test_contexts_that_hardly_differ_are_one():
    found = pd.concat([forwards(w1=1.0), forwards(texts="far", context=52.0, w1=3.0)])
    costs, _ = tabulated.cost_table(found, {})
    assert costs.target(1, 1, 50) == costs.target(1, 1, 60) == pytest.approx(2.0)


def test_the_reading_of_prompts_is_a_width_of_both_models():
    costs, entries = tabulated.cost_table(pd.concat([forwards(w1=1.0, w2=2.0), readings(5.0, 9.0, 8.0)]), {})
    assert costs.draft.width == (1, 30) and costs.target.width == (1, 2, 30)
    assert costs.draft(1, 30, 50) == costs.target(1, 30, 50) == pytest.approx(22 / 3), "however much they vary"
    assert entries[entries.texts == "prompt"].context.tolist() == [0, 0]


def test_what_the_first_draft_forward_takes_beyond_the_others_counts_for_the_target():
    """Drafts of K tokens take .1 + .1 K seconds: a forward costs .1, and every round that drafts .1 more."""
    found = forwards(w1=1.0, w2=1.5, w5=3.0)
    found = found[found.model == "target"]
    drafts = [
        {"model": "draft", "width": 1, "batch": 1, "context": 50.0, "drafted": drafted, "repeat": 1, "texts": "near",
         "seconds": 0.1 + 0.1 * drafted}
        for drafted in (1, 2, 4)
    ]  # fmt: skip
    costs, entries = tabulated.cost_table(pd.concat([found, pd.DataFrame(drafts * 10)]), {})
    assert costs.draft(1, 1, 50) == pytest.approx(0.1)
    assert [costs.target(1, width, 50) for width in (1, 2, 5)] == pytest.approx([1.0, 1.6, 3.1])
    assert entries[entries.model == "draft"].seconds.tolist() == pytest.approx([0.1])


@pytest.mark.parametrize(
    ("seconds", "first"),
    [([0.2, 0.3, 0.5], 0.1), ([0.1, 0.2, 0.4], 0.0), ([0.1, 0.3, 0.7], 0.0), ([0.4, 0.41, 0.43], 0.36), ([0.3], 0.0)],
)
def test_the_first_draft_forward_takes_no_less_than_the_others(seconds, first):
    """By draft length 1, 2, 4. Noise may say less than nothing, or that all seconds are the first's: at most 90 % are."""
    lengths = np.array([1.0, 2.0, 4.0])[: len(seconds)]
    assert tabulated._first(lengths, np.array(seconds)) == pytest.approx(first)


def test_times_that_vary_too_much_are_refused():
    with pytest.raises(
        InputError, match="the times of 1 of 3 settings vary too much .*first: target, batch 1, 2 tokens"
    ):
        tabulated.cost_table(forwards(spread=0.15, w1=4.0, w2=1.0), {})


def test_a_slower_repeat_counts_as_the_others_do():
    """Every setting takes three times as long in repeat 2, and one round is interrupted: neither shows in the seconds."""
    usual = {("target", 0): 1.0, ("target", 4): 2.0, ("draft", 4): 0.5}
    lines = [
        {"model": model, "batch": 1, "drafted": drafted, "draft": 0 if drafted else -1, "texts": texts, "repeat": repeat,
         "context": 50.0, "seconds": seconds * (3.0 if repeat == 2 else 1.0), "width": drafted + 1}
        for (model, drafted), seconds in usual.items() for texts in ("near", "far") for repeat in (1, 2, 3)
        for _ in range(4)
    ]  # fmt: skip
    reading = {**lines[0], "texts": "prompt", "drafted": 1, "draft": 0}
    lines += [{**reading, "repeat": 2, "seconds": 30.0}, {**reading, "batch": 2, "seconds": 7.0}]
    found = tabulated.steady(pd.DataFrame(lines))
    expected = [usual[line["model"], line["drafted"]] for line in lines[:-2]]
    assert found.seconds.tolist() == pytest.approx([*expected, 10.0, 7.0]), (
        "readings are scaled; nothing is known of batch 2"
    )


def test_one_interrupted_round_counts_for_twice_the_median():
    assert tabulated._mean(np.array([1.0, 1.0, 2.0, 1.0, 500.0]))[0] == pytest.approx((1 + 1 + 2 + 1 + 2) / 5)
    middle, low, high = tabulated._mean(np.array([1.0, 3.0]))
    assert (middle, high - middle, middle - low) == pytest.approx((2.0, 1.96 / 2**0.5, 1.96 / 2**0.5))


def test_repeats_are_spread_over_the_whole_time():
    order = [(which, repeat) for _, which, repeat in measured._spread([6, 3])]
    assert order == [(0, 2), (0, 3), (0, 4), (1, 2), (0, 5), (0, 6), (1, 3)]


@pytest.fixture
def timings(monkeypatch):
    """Batch sizes and numbers of the repeats, in the order in which they begin."""
    monkeypatch.setattr(measured, "BRIEF", float("inf"))  # on a slow machine, too
    monkeypatch.setattr(measured, "SPENT", 0.0)
    begun, repeat = [], measured.Timing.repeat

    def counting(self, number):
        begun.append((len(self.cut), number))
        return repeat(self, number)

    monkeypatch.setattr(measured.Timing, "repeat", counting)
    return begun


def test_what_is_timed(timings):
    pair = ModelPair.toy()
    prompt = min((e.prompt for e in load_frozen("math", "dev")), key=lambda text: len(pair.encode(text)))
    found = measured.measure_loads(pair, [prompt], Sampling(seed=1), [1], [1], num_rounds=24)
    assert timings == [(1, repeat + 1) for repeat in range(measured.LEAST)]
    rounds = found[found.texts != "prompt"]
    assert set(rounds.repeat) == {1, 2, 3} and set(rounds[rounds.model == "target"].width) == {1, 2}
    assert rounds[rounds.drafted == 1].groupby(["model", "texts", "repeat"]).size().between(20, 50).all()
    means = rounds.groupby("texts").context.mean()
    assert means["far"] - means["near"] == pytest.approx(0.75 * Sampling().max_new_tokens, abs=40)
    reading = found[found.texts == "prompt"]
    assert len(reading) == 2 * 3 * 4 and (reading.context == 0).all(), "both models, three repeats, four settings"
    length = len(pair.encode(prompt))
    assert set(reading[reading.model == "draft"].width) == {length}
    assert set(reading[reading.model == "target"].width) == {length + 1}


def test_drafts_are_measured_side_by_side(timings):
    """Both tables have the same plain decoding."""
    begun = timings
    toy = ModelPair.toy()
    both = ModelPair(toy.target, drafts=[toy.draft, ModelPair.toy().draft], tokenizer=toy.tokenizer)
    found = measured.measure_loads(both, [[5] * 9], Sampling(seed=1, max_new_tokens=8), [1, 2], [1, 3], 8)
    assert (
        [number for size, number in begun if size == 1] == [number for size, number in begun if size == 2] == [1, 2, 3]
    )
    assert set(found[found.drafted == 0].draft) == {measured.PLAIN} and set(found.draft) == {0, 1, measured.PLAIN}
    parts = [measured.of_draft(found, draft) for draft in (0, 1)]
    plain = [part[part.draft == measured.PLAIN].seconds.tolist() for part in parts]
    assert plain[0] == plain[1] and plain[0]
    for part, draft in zip(parts, (0, 1), strict=True):
        assert set(part.draft) == {draft, measured.PLAIN} and set(part.drafted) == {0, 1, 3}


def test_only_batch_sizes_that_vary_are_measured_again(timings, monkeypatch, capsys):
    begun = timings
    asked = []

    def varying_once(entries):
        asked.append((len(begun), entries))
        return entries[(entries.batch == 2) & (len(asked) == 1)]

    monkeypatch.setattr(measured, "noisy_of", varying_once)
    ((costs, entries),) = measured.measured_costs(
        ModelPair.toy(), [[5] * 9], Sampling(seed=1, max_new_tokens=8), [2], [1], 8
    )
    assert "batch size 2 vary too much" in capsys.readouterr().out
    (before, first), (_, second) = asked
    assert begun[before:] == [(2, 1), (2, 2), (2, 3)]
    first, second = (table.set_index(["model", "batch", "width", "texts"]).forwards for table in (first, second))
    assert (second[:, 2] == 2 * first[:, 2]).all() and (second[:, 1] == first[:, 1]).all(), "batch 2 alone, once more"
    assert costs.draft.batch == (1.0, 2.0), "a batch of one is timed, too"
    assert list(entries.forwards) == list(asked[1][1].forwards)


def test_contexts_are_the_window_of_the_longest_row():
    """A batch of one takes the prompt of the median length, a batch of two a shorter and a longer one."""
    pair = ModelPair.toy()
    found = measured.measure_loads(
        pair, [[5] * 150, [5] * 9, [5] * 40], Sampling(seed=1, max_new_tokens=8), [1, 2], [1], 2, repeats=1
    )
    assert set(found.batch) == {1, 2}
    assert set(found.drafted) == {0, 1} and set(found[found.texts == "near"].width) == {1, 2}
    rounds = found[found.texts == "near"]
    assert set(rounds[rounds.batch == 1].context) == {32.0}, "at most 64 tokens"
    assert set(rounds[rounds.batch == 2].context) == {160.0}, "128 to 191 tokens"


def test_short_timings_have_the_caches_of_whole_responses(monkeypatch):
    """A forward's seconds depend on the capacity of the caches, which is that of the longest prompt and response."""
    decoded, asked = timed_forwards.decode_measured, []

    def noting(pair, prompts, method, *rest, capacity, **named):
        asked.append((method.max_drafted, capacity))
        return decoded(pair, prompts, method, *rest, capacity=capacity, **named)

    monkeypatch.setattr(timed_forwards, "decode_measured", noting)
    measured.measure_loads(
        ModelPair.toy(), [[5] * 9, [5] * 50], Sampling(seed=1, max_new_tokens=96), [1], [3], 8, repeats=1
    )
    rounds = {capacity for _, capacity in asked if capacity}
    assert rounds == {50 + 96 + 3 + 1} and {length for length, capacity in asked if capacity} == {0, 3}


def test_far_texts_have_every_second_draft_length_and_the_longest():
    found = measured.measure_loads(
        ModelPair.toy(), [[5] * 9], Sampling(seed=1, max_new_tokens=40), [1], [1, 2, 3], 2, repeats=1
    )
    lengths = found.groupby("texts").drafted.unique().map(sorted)
    assert (lengths["near"], lengths["far"]) == ([0, 1, 2, 3], [0, 2, 3])


def test_every_setting_has_rounds_whatever_is_accepted(monkeypatch):
    """A draft that is the target itself: nine tokens a round. Few rounds are timed of slow models."""
    monkeypatch.setattr(measured, "LONG", 0.0)
    monkeypatch.setattr(measured, "BRIEF", 0.0)
    target = ModelPair.toy().target
    pair = ModelPair(target, target)
    found = measured.measure_loads(pair, [[5] * 9], Sampling(seed=1, max_new_tokens=8), [2], [8], 8, repeats=1)
    assert (found[found.drafted == 8].groupby(["model", "texts"]).size() >= 2).all()


@pytest.mark.parametrize(("long", "plain"), [(0.0, measured.FEW), (100.0, 9)])
def test_few_long_rounds_are_timed(long, plain, monkeypatch):
    monkeypatch.setattr(measured, "LONG", long)
    monkeypatch.setattr(measured, "BRIEF", 0.0)  # nothing to settle
    found = measured.measure_loads(
        ModelPair.toy(), [[5] * 9], Sampling(seed=1, max_new_tokens=8), [1], [1], 9, repeats=2
    )
    counts = found[(found.drafted == 0) & (found.texts == "near")].groupby("repeat").seconds.count()
    assert counts.tolist() == [plain, plain]


def test_small_models_are_timed_until_their_caches_are_warm():
    brief, usual, long = measured.BRIEF / 2, 2 * measured.BRIEF, 2 * measured.LONG
    assert [measured._timed_rounds(12, brief, between) for between in (20, 3)] == [20, 12]
    assert measured._timed_rounds(12, usual, 48) == 12
    assert measured._timed_rounds(12, long, 48) == measured.FEW


@pytest.mark.parametrize("seconds, rounds", [(0.001, 16), (0.01, 5), (0.03, 0)])
def test_settings_of_brief_rounds_decode_for_a_moment_before_they_are_timed(seconds, rounds):
    """16 rounds, or as many as fit into .05 s; none where rounds take long."""
    timing = measured.Timing([], {}, [[5]], Sampling(), [1], 8, 0, tqdm(total=0, disable=True))
    timing.taken["near", 0, 1], timing.made["near", 0, 1] = seconds, 2.0
    assert timing._settling("near", 0, 1) == 2 * rounds


def test_the_rounds_of_that_moment_are_not_timed(monkeypatch):
    decoded = []
    inner = measured.Timing._decoded

    def noting(self, where, draft, length, tokens):
        found = inner(self, where, draft, length, tokens)
        timed = [line for line in timed_forwards.forwards(found, length, where) if line["model"] == "target"]
        decoded.append((length, len(timed)))
        return found

    monkeypatch.setattr(measured.Timing, "_decoded", noting)
    monkeypatch.setattr(measured.Timing, "_settling", lambda self, where, draft, length: 12 if length else 0)
    found = measured.measure_loads(
        ModelPair.toy(), [[5] * 9], Sampling(seed=1, max_new_tokens=8), [1], [1], 12, repeats=2
    )
    plain, settling, timed = zip(*(decoded[-6:-3], decoded[-3:]), strict=True)
    assert [length for length, _ in (*plain, *settling, *timed)] == [0, 0, 1, 1, 1, 1]
    assert all(count for _, count in settling)
    rounds = found[(found.drafted == 1) & (found.model == "target") & (found.texts == "near")]
    assert rounds.groupby("repeat").size().tolist() == [count for _, count in timed]


def test_a_prompt_that_does_not_fit_is_named():
    pair = ModelPair.toy()
    longest = pair.target.config.max_position_embeddings
    with pytest.raises(InputError, match="a prompt cannot be timed: "):
        measured.measure_loads(pair, [[5] * (longest - 2)], Sampling(seed=1), [1], [1], num_rounds=2)
