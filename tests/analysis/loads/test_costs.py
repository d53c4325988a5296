"""Where cost tables come from: files, a device's figures, or a measurement that is kept."""

from types import SimpleNamespace

import pytest

from analysis.loads.costs import costs_of
from toolkit import ModelPair
from toolkit.costs.load import LoadCost
from toolkit.errors import InputError


def test_two_drafts_are_measured_side_by_side():
    """The second draft is the target. Both tables have the same autoregressive decoding."""
    toy = ModelPair.toy()
    pairs = [ModelPair(toy.target, draft=draft, tokenizer=toy.tokenizer) for draft in (toy.draft, toy.target)]
    first, second = costs_of(SimpleNamespace(max_drafted="auto", costs=None, hardware=None, rounds=5), pairs, [2])
    assert first.source == "measured" and first.target.batch == (1.0, 2.0), "a batch of one is timed, too"
    assert first.target(2, 1) == second.target(2, 1) and first.draft(1) > 0 and first.draft(1) != second.draft(1)
    again, _ = costs_of(SimpleNamespace(max_drafted="auto", costs=None, hardware=None, rounds=5), pairs, [2])
    assert again.target(1, 3) == first.target(1, 3), "times differ, but none were taken"


def test_the_forwards_of_a_target_alone_stand_for_those_of_a_draft():
    alone = ModelPair.from_pretrained("toy/target")
    (costs,) = costs_of(SimpleNamespace(max_drafted="auto", costs=None, hardware=None, rounds=5), [alone], [1])
    assert costs.draft(1, 3, 200) == costs.target(1, 3, 200) > 0


def test_files_are_one_for_all_drafts_or_one_for_each(tmp_path):
    pairs = [ModelPair.toy()] * 3
    names = [str(LoadCost.ratio(ratio).save(tmp_path / f"{ratio}.json")) for ratio in (0.1, 0.2, 0.3)]

    def ratios(files):
        tables = costs_of(SimpleNamespace(max_drafted="auto", costs=files, hardware=None), pairs, (1,))
        return [costs.draft(1, 1, 1) / costs.target(1, 1, 1) for costs in tables]

    assert ratios(names) == pytest.approx([0.1, 0.2, 0.3])
    assert ratios(names[1]) == ratios([names[1]]) == pytest.approx([0.2] * 3)
    with pytest.raises(InputError, match="expected one cost table, or one for each of 3 drafts, got 2"):
        ratios(names[:2])
    with pytest.raises(InputError, match="costs=FILE or hardware=NAME, got both"):
        costs_of(SimpleNamespace(max_drafted="auto", costs=names[0], hardware="h100"), pairs, (1,))


def test_a_file_that_would_be_read_as_flat_is_refused(tmp_path):
    """Of one batch size, or one width: a wider round would cost nothing more."""
    head, pairs = "model,batch,width,context,seconds\ndraft,1,1,0,.001\ntarget,1,1,0,.01\n", [ModelPair.toy()]
    path = tmp_path / "costs.csv"
    cfg = SimpleNamespace(max_drafted="auto", costs=str(path), hardware=None)
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
            costs_of(cfg, pairs, sizes)
    path.write_text(head + "target,1,6,0,.011\n")
    assert costs_of(cfg, pairs, (1,))[0].target(1, 6) == 0.011


def test_costs_that_cannot_be_had_are_refused(table_pair):
    cfg = SimpleNamespace(max_drafted="auto", costs=None, hardware="h100", devices=1, overlap=1.0)
    with pytest.raises(InputError, match="modelled costs need a model with a config"):
        costs_of(cfg, [table_pair], (1,))
