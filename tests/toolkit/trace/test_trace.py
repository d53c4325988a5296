"""Traces in memory and in files: joined, saved, read again; a step of one, and folders of them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from toolkit.errors import InputError
from toolkit.files.tensors import load_tensors, save_tensors
from toolkit.runs import stage
from toolkit.trace import Trace, join
from toolkit.trace.steps import RecordedStep
from toolkit.trace.store import file_name, read_file, read_traces
from toolkit.trace.trace import Rows

PER_TEXT = ("room", "rows")
PER_POSITION = ("accepted", "text_accept_prob", "roll_length", "target_entropy")
PER_STEP = ("tokens", "draft_prob", "token_prob", "entropy", "top_probs", "accept_prob", "alpha")


def trace_of(lengths, rolls, seed=0, **about):
    """Random columns; `rolls` says how many steps follow each position."""
    generator = torch.Generator().manual_seed(seed)
    positions, steps = sum(lengths), sum(lengths) + sum(rolls)
    assert len(rolls) == positions
    ends = torch.tensor(rolls).cumsum(0)

    def some(*shape):
        return torch.rand(*shape, generator=generator)

    return Trace(
        text_first=torch.tensor([0, *lengths]).cumsum(0),
        room=torch.arange(len(lengths)) + 5,
        rows=torch.arange(len(lengths)) + 100 * seed,
        accepted=torch.tensor(rolls) == 0,
        text_accept_prob=some(positions),
        roll_first=torch.where(torch.tensor(rolls) > 0, positions + ends - torch.tensor(rolls), 0),
        roll_length=torch.tensor(rolls, dtype=torch.int32),
        target_entropy=some(positions),
        tokens=torch.arange(steps, dtype=torch.int32) + 1000 * seed,
        top_probs=some(steps, 2),
        **{name: some(steps) for name in ("draft_prob", "token_prob", "entropy", "accept_prob", "alpha")},
        max_drafted=4,
        estimates={"mine": some(steps), "mine.preread": some(steps, 2)},
        hidden=some(steps, 3).half(),
        about={"job": "j", "seed": seed, **about},
    )


@pytest.fixture
def three():
    return [
        trace_of([2, 3], [0, 2, 0, 1, 0], seed=1),
        trace_of([1], [3], seed=2),
        trace_of([2, 1, 1], [1, 0, 0, 2], seed=3),
    ]


def same(one, other, but=()):
    for item in fields(Trace):
        a, b = getattr(one, item.name), getattr(other, item.name)
        if item.name in but:
            continue
        if isinstance(a, torch.Tensor | Rows):
            a, b = (value.whole() if isinstance(value, Rows) else value for value in (a, b))
            assert a.dtype == b.dtype and torch.equal(a, b), item.name
        elif item.name == "estimates":
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        else:
            assert a == b, item.name


def roll_of(trace, position, column):
    first, length = int(trace.roll_first[position]), int(trace.roll_length[position])
    return column[first : first + length]


@pytest.mark.parametrize("mapped", [False, True])
def test_joined_traces_hold_each_texts_positions_and_roll_outs(three, mapped):
    whole = join(three, mapped)
    assert (whole.num_texts, whole.num_positions, whole.num_steps) == (6, 10, 19)
    assert whole.lengths().tolist() == [2, 3, 1, 2, 1, 1] and whole.text_first.tolist() == [0, 2, 5, 6, 8, 9, 10]
    assert (whole.max_drafted, whole.about) == (4, three[0].about)
    assert isinstance(whole.hidden, Rows) == mapped
    for name in (*PER_TEXT, *PER_POSITION):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(trace, name) for trace in three])), name
    begin = 0
    for trace in three:
        end = begin + trace.num_positions
        columns = [(getattr(whole, name), getattr(trace, name)) for name in (*PER_STEP, "hidden")]
        columns += [(whole.estimates[name], trace.estimates[name]) for name in trace.estimates]
        for joined, column in columns:
            everything = joined.whole() if isinstance(joined, Rows) else joined
            assert torch.equal(everything[begin:end], column[: trace.num_positions])
            for position in range(trace.num_positions):
                assert torch.equal(roll_of(whole, begin + position, everything), roll_of(trace, position, column))
        assert torch.equal(whole.roll_first[begin:end] == 0, trace.roll_length == 0)
        begin = end


def test_states_that_stay_where_they_are_are_not_read(three, monkeypatch):
    """States alone are in half precision."""
    dtypes, cat = [], torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors, *rest: dtypes.append(tensors[0].dtype) or cat(tensors, *rest))
    join(three, mapped=True)
    assert torch.half not in dtypes and torch.int32 in dtypes
    join(three)
    assert torch.half in dtypes


def test_traces_that_do_not_go_together_are_not_joined(three):
    one, other, _ = three
    for changed in (
        replace(other, hidden=None),
        replace(other, max_drafted=5),
        replace(other, estimates={"mine": other.estimates["mine"]}),
    ):
        with pytest.raises(InputError, match="^traces to be joined must hold the same"):
            join([one, one, changed])
    with pytest.raises(InputError, match="^expected at least one trace"):
        join([])
    assert join([one]) is one
    assert join([replace(one, target_prob=None), other]).target_prob is None  # files that an older version began
    bare = join([replace(trace, hidden=None) for trace in three], mapped=True)
    assert bare.hidden is None and bare.num_steps == 19


@pytest.mark.parametrize("mapped", [False, True])
def test_a_trace_is_read_as_it_was_written(three, tmp_path, mapped):
    whole = join(three, mapped)
    path = whole.save(tmp_path / "one.safetensors")
    assert path == tmp_path / "one.safetensors"
    same(Trace.load(path), whole)
    assert "chance" in load_tensors(path, "trace", "")[0]  # the name in recordings of earlier revisions
    for changed in (
        replace(whole, hidden=None, estimates={}),
        replace(whole, estimates={"a/b": whole.estimates["mine"]}),  # names may hold slashes
    ):
        same(Trace.load(str(changed.save(tmp_path / "other"))), changed)


def test_the_size_is_that_of_all_tensors(three):
    one = three[0]  # 2 texts, 5 positions, 8 steps
    numbers = 8 * (3 + 2 + 2) + 5 * (1 + 4 + 8 + 4 + 4) + 8 * (4 * 6 + 4 * 2)
    estimates, states = 8 * (4 + 8), 8 * 3 * 2
    assert one.num_bytes == numbers + estimates + states
    assert replace(one, hidden=None).num_bytes == numbers + estimates
    assert join(three).num_bytes == join(three, mapped=True).num_bytes
    assert replace(one, hidden=Rows([one.hidden[:3], one.hidden[3:]])).num_bytes == one.num_bytes


def test_rows_of_several_tensors_are_those_of_one():
    parts = [torch.arange(size * 2).view(size, 2) + 100 * size for size in (3, 1, 4)]
    whole, rows = torch.cat(parts), Rows(parts)
    assert len(rows) == 8 and rows.shape == (8, 2) and rows.dtype == torch.long
    assert torch.equal(rows.whole(), whole)
    for index in (torch.tensor([0, 2, 3, 4, 7]), torch.tensor([[7, 0], [3, 3]]), torch.tensor([], dtype=torch.long)):
        assert torch.equal(rows[index], whole[index])
    assert torch.equal(Rows([whole])[torch.tensor([5])], whole[5:6])
    chosen = rows[torch.tensor([0])]
    chosen[:] = -1  # a copy
    assert torch.equal(rows.whole(), whole)


def test_a_file_that_is_no_trace_is_named(three, tmp_path):
    path = three[0].save(tmp_path / "one")
    tensors, about = load_tensors(path, "trace", "")
    for name, (changed, words) in {
        "without": ({key: value for key, value in tensors.items() if key != "alpha"}, about),
        "with more": ({**tensors, "other": torch.zeros(1)}, about),
        "no about": (tensors, {"max_drafted": "4"}),
        "no json": (tensors, {"max_drafted": "4", "about": "{"}),
        "no number": (tensors, {"max_drafted": "x", "about": "{}"}),
    }.items():
        save_tensors(tmp_path / name, changed, words)
    path.write_bytes(path.read_bytes()[:-9])
    for name in ("without", "with more", "no about", "no json", "no number", "one"):
        with pytest.raises(
            InputError, match=f"^[^\n]*{name} is not a whole trace[^\n]*; delete it and record it again"
        ):
            Trace.load(tmp_path / name)
    with pytest.raises(InputError, match="expected a trace at .*missing"):
        Trace.load(tmp_path / "missing")


def test_a_step_says_what_was_recorded(three):
    trace, index = three[0], torch.tensor([1, 6])
    step = RecordedStep(trace, 2, index)
    assert (step.depth, step.live, step.drawn) == (2, None, True)
    assert step.tokens.dtype == torch.long and step.tokens.tolist() == trace.tokens[index].tolist()
    for name in ("draft_prob", "token_prob", "entropy", "top_probs"):
        assert torch.equal(getattr(step, name), getattr(trace, name)[index]), name
    assert torch.equal(step.margin, trace.top_probs[index, 0] - trace.top_probs[index, 1])
    assert step.hidden.dtype == trace.hidden.dtype and torch.equal(step.hidden, trace.hidden[index])
    assert RecordedStep(trace, 2, index, device=torch.device("meta")).entropy.device.type == "meta"
    assert torch.equal(step.head_logits(SimpleNamespace(key="mine.preread")), trace.estimates["mine.preread"][index])
    assert RecordedStep(trace, 2, index, drawn=False).tokens is None
    with pytest.raises(AttributeError, match="a recorded step has no probs: policies may read depth, tokens, "):
        _ = step.probs


def test_what_a_step_lacks_is_said(three):
    step = RecordedStep(replace(three[0], hidden=None), 1, torch.tensor([0]))
    with pytest.raises(InputError, match="^this trace holds no hidden states: record it with hidden=true"):
        step.hidden  # noqa: B018
    with pytest.raises(InputError, match="no estimates of the head yours .held: mine, mine.preread.: record it"):
        step.head_logits(SimpleNamespace(key="yours"))


# -- folders ----------------------------------------------------------------------------------------------------------


def folder_of(path: Path, traces, name="traces", finish=True):
    """A folder of two shards, in two replicates each."""
    opened = stage.open_stage(name, OmegaConf.create({"paths": {"output_dir": str(path)}}))
    for number, trace in enumerate(traces):
        trace.save(path / file_name(number // 2, number % 2))
    if finish:
        opened.finish(job="j", replicates=2, num_shards=2)
    return path


def test_a_folder_is_read_by_replicates(three, tmp_path):
    traces = [*three, trace_of([3], [0, 0, 1], seed=4)]
    folder = folder_of(tmp_path / "out", traces)
    assert {path.name for path in folder.glob("traces-*")} == {
        f"traces-0000{shard}-r{replicate}.safetensors" for shard in (0, 1) for replicate in (0, 1)
    }
    same(read_traces(folder), join(traces[::2]))
    same(read_traces(str(folder), 1), join(traces[1::2]))
    same(read_traces(folder, None), join([*traces[::2], *traces[1::2]]))
    assert isinstance(read_traces(folder).hidden, Rows)


def test_folders_and_files_that_are_not_whole_or_of_other_work_are_named(three, tmp_path):
    other = folder_of(tmp_path / "other", three, name="responses")
    begun = folder_of(tmp_path / "begun", three, finish=False)
    missing = folder_of(tmp_path / "missing", three)
    for folder, words in (
        (tmp_path / "none", "expected a folder of data_gen.traces at .*none"),
        (other, "expected a folder of data_gen.traces at .*other"),
        (begun, "are not finished: run data_gen.traces again first"),
        (missing, "traces-00001-r1.safetensors"),
    ):
        with pytest.raises(InputError, match=words):
            read_traces(folder, 1)
    path = three[0].save(tmp_path / "one")
    same(read_file(path, "j"), three[0])
    without = replace(three[0], about={}).save(tmp_path / "two")
    for file, job in ((path, "k"), (without, "j")):
        with pytest.raises(InputError, match=f"{file.name} belongs to another job .*; delete it"):
            read_file(file, job)
