"""Where cost tables come from: files, a device's figures, or a measurement that is kept."""

from types import SimpleNamespace

import pytest

from analysis.loads.costs import costs_of, measured_costs
from toolkit import ModelPair
from toolkit.costs.load import LoadCost
from toolkit.decoding import Sampling
from toolkit.errors import InputError

SAMPLING = Sampling(seed=1, max_new_tokens=8)


def test_two_drafts_are_measured_side_by_side():
    """The second draft is the target: it costs more. Both tables have the same autoregressive decoding."""
    toy = ModelPair.toy()
    both = ModelPair(toy.target, drafts=[toy.draft, ModelPair.toy().target], tokenizer=toy.tokenizer)
    (first, entries), (second, _) = measured_costs(both, [[5] * 9, [5] * 15], SAMPLING, [2], [1, 3], 4)
    assert first.source == "measured" and first.target.batch == (1.0, 2.0), "a batch of one is timed, too"
    assert first.target.width == (1.0, 2.0, 4.0, 13.0) and first.draft.width == (1.0, 12.0), (
        "prompts of 12 tokens are read"
    )
    assert first.target(2, 1) == second.target(2, 1) and second.draft(1) > first.draft(1) > 0
    assert list(entries) == ["model", "batch", "width", "context", "seconds", "low", "high"]
    assert (entries.low <= entries.seconds).all() and (entries.seconds <= entries.high).all()


def test_a_target_alone_is_measured_at_every_width():
    alone = ModelPair.from_pretrained("toy/target")
    ((costs, entries),) = measured_costs(alone, [[5] * 9, [5, 6, 7] * 5], SAMPLING, [2], [1, 3], 4)
    assert costs.target.width == (1.0, 2.0, 4.0, 13.0) and set(entries.model) == {"target"}
    assert costs.draft(2, 4) == costs.target(2, 4) > 0, "the target's own forwards stand for a draft's"


def test_a_measurement_is_kept_until_something_it_depends_on_changes(tmp_path):
    pair = ModelPair.toy()

    def measure(**changes):
        cfg = SimpleNamespace(**{"costs": None, "hardware": None, "rounds": 8, **changes})
        (costs,) = costs_of(cfg, [pair], ["a prompt"], SAMPLING, [1], tmp_path, deepest=1)
        return costs

    first = measure()
    assert measure().target(1) == first.target(1), "times differ, but none were taken"
    kept = set(tmp_path.glob("measured-*.json"))
    measure(rounds=9)
    assert len(kept) == 1 and len(set(tmp_path.glob("measured-*.json")) - kept) == 1
    assert len(list(tmp_path.glob("measured-*.csv"))) == 2


def test_files_are_one_for_all_drafts_or_one_for_each(tmp_path):
    pairs = [ModelPair.toy()] * 3
    names = [str(LoadCost.ratio(ratio).save(tmp_path / f"{ratio}.json")) for ratio in (0.1, 0.2, 0.3)]

    def ratios(files):
        tables = costs_of(SimpleNamespace(costs=files, hardware=None), pairs, [], SAMPLING, (1,), tmp_path)
        return [costs.draft(1, 1, 1) / costs.target(1, 1, 1) for costs in tables]

    assert ratios(names) == pytest.approx([0.1, 0.2, 0.3])
    assert ratios(names[1]) == ratios([names[1]]) == pytest.approx([0.2] * 3)
    with pytest.raises(InputError, match="expected one cost table, or one for each of 3 drafts, got 2"):
        ratios(names[:2])
    with pytest.raises(InputError, match="costs=FILE or hardware=NAME, got both"):
        costs_of(SimpleNamespace(costs=names[0], hardware="h100"), pairs, [], SAMPLING, (1,), tmp_path)


def test_a_file_that_would_be_read_as_flat_is_refused(tmp_path):
    """Of one batch size, or one width: a wider round would cost nothing more."""
    head, pairs = "model,batch,width,context,seconds\ndraft,1,1,0,.001\ntarget,1,1,0,.01\n", [ModelPair.toy()]
    path = tmp_path / "costs.csv"
    cfg = SimpleNamespace(costs=str(path), hardware=None)
    for lines, sizes, message in (
        (
            "target,1,6,0,.011\n",
            (1, 64),
            "draft at batch size 64, .*; python -m analysis.timing batch_sizes=.1,64. writes",
        ),
        ("", (1,), "target at width 2, too, got those at width 1 alone"),
    ):
        path.write_text(head + lines)
        with pytest.raises(InputError, match=rf"^costs={path}: expected times of the {message}.*$"):
            costs_of(cfg, pairs, [], SAMPLING, sizes, tmp_path)
    path.write_text(head + "target,1,6,0,.011\n")
    assert costs_of(cfg, pairs, [], SAMPLING, (1,), tmp_path)[0].target(1, 6) == 0.011


def test_costs_that_cannot_be_had_are_refused(table_pair):
    with pytest.raises(InputError, match=r"no room for 4000 timed rounds in \d+ tokens: expected fewer \(rounds=N\)"):
        measured_costs(ModelPair.toy(), [[5] * 9], SAMPLING, [1], [1], 4000)
    cfg = SimpleNamespace(costs=None, hardware="h100", devices=1)
    with pytest.raises(InputError, match="modelled costs need a model with a config"):
        costs_of(cfg, [table_pair], [], SAMPLING, (1,), None)
