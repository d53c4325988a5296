"""Cost tables of a machine: measured once, kept whole, measured again where a file is of no use, and handed to the rules."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.toolkit.adapted import Adapted
from toolkit import ModelPair, config, decode, generate, testing
from toolkit.costs import kept
from toolkit.costs.clock import Stopwatch
from toolkit.costs.kept import costs_here, weighs_costs, with_costs
from toolkit.costs.measure import CONTEXTS, WARM_UP, WIDTHS, machine_of, measure
from toolkit.costs.table import CostTable
from toolkit.engine import Session
from toolkit.engine.engine import engine_of
from toolkit.runs.stage import read_manifest
from toolkit.stopping import StoppingPolicy
from toolkit.testing.blocks import tiny_block

WEIGHING = ("batch_rate_confidence", "lookup_rate", "best_source")


@pytest.fixture(autouse=True)
def another_process(tmp_path, monkeypatch):
    """A cache of its own, and nothing remembered from before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield
    forget()


def forget():
    kept._LOADED.clear()
    kept._OF_ENGINES.clear()


def tiny(**changes):
    """A pair that measures its costs."""
    return replace(testing.table_pair(), draft=None, **{"costs": "measured", **changes})


def test_every_width_context_and_draft_is_measured():
    toy = ModelPair.toy()
    both = ModelPair(toy.target, drafts=[toy.draft, toy.target], tokenizer=toy.tokenizer)
    first, second = measure(both, 2, repeats=1)
    assert (first.batch_size, tuple(first.widths), tuple(first.contexts)) == (2, WIDTHS, CONTEXTS)
    assert first.target_seconds == second.target_seconds and len(second.draft_seconds) == len(CONTEXTS)
    assert {"processor", "threads", "dtype", "torch"} < set(first.machine) and first.machine["dtype"] == "float32"
    assert measure(ModelPair(toy.target, tokenizer=toy.tokenizer), repeats=1)[0].draft_seconds == []
    (large,) = measure(tiny(), 2**12, widths=(1, 2), repeats=1)
    assert large.contexts == [4], "a large batch takes no more memory"


def test_captured_forward_passes_have_a_table_of_their_own():
    """They take other times; which tables are equal is decided by these facts."""
    pair = ModelPair.toy()
    facts = machine_of(pair)
    engine_of(pair).captures = [None, object()]  # as on a GPU
    assert machine_of(pair) == {**facts, "captured": True} != facts


def test_times_are_of_their_width_and_context_and_warming_up_does_not_count(monkeypatch):
    """Where forward passes are captured, the first of each shape take longer."""

    class Forwards:
        """A stopwatch that says how many tokens a call has read and had before it, not how long it took."""

        def __init__(self, device):
            self.seconds = []

        def __enter__(self):
            now.append(self)

        def __exit__(self, *_):
            now.pop()

    now, extend = [], Session.extend

    def noted(session, tokens, *args, **options):
        for watch in now:  # nobody's while an architecture is checked
            slow = 1000 if len(watch.seconds) < WARM_UP else 0
            watch.seconds.append(tokens.shape[1] + session.lengths[0] / 100 + slow)
        return extend(session, tokens, *args, **options)

    monkeypatch.setattr("toolkit.costs.measure.Stopwatch", Forwards)
    monkeypatch.setattr("toolkit.engine.engine.Sessions.fixed_rows", True)
    monkeypatch.setattr(Session, "extend", noted)
    (table,) = measure(ModelPair.toy(), widths=(1, 3), contexts=(100, 200), repeats=3)
    assert table.target_seconds == [[2.0, 4.0], [3.0, 5.0]] and table.draft_seconds == [2.0, 3.0]
    assert table.machine["spread"] == 0


def test_with_one_thread_the_time_of_other_programs_does_not_count():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        watch = Stopwatch(torch.device("cpu"))
        with watch:
            time.sleep(0.2)
    finally:
        torch.set_num_threads(threads)
    assert watch.seconds[0] < 0.1


def test_times_hold_for_a_number_of_threads():
    pair, threads = tiny(), torch.get_num_threads()
    ((_, path),) = costs_here(pair, repeats=1)
    try:
        torch.set_num_threads(threads + 1)
        ((table, beside),) = costs_here(pair, repeats=1)
    finally:
        torch.set_num_threads(threads)
    assert table.machine["threads"] == threads + 1 and beside != path


def kept_at(target, draft=None):
    """The file of a pair's costs."""
    return costs_here(ModelPair(target, draft), repeats=1)[0][1]


def test_pairs_that_differ_in_settings_alone_have_tables_of_their_own():
    """Longer blocks, other layers that are read, more experts per token, fewer layers: the tensors are the same."""
    target = testing.tiny_model("llama")
    blocks = [kept_at(target, tiny_block(target, block_size=size)) for size in (4, 8, 4)]
    eagles = [kept_at(target, testing.tiny_eagle3(target, layers)) for layers in ((0, 1, 2), (0, 1, 3))]
    assert blocks[0] != blocks[1] and blocks[0] == blocks[2] and eagles[0] != eagles[1]
    experts, layers = testing.tiny_model("mixtral"), testing.tiny_model("llama")
    assert kept_at(layers) == kept_at(target), "the weights' values do not matter"
    settings = {**experts.config.to_dict(), "num_experts_per_tok": 1}
    fewer = type(experts)(type(experts.config).from_dict(settings)).eval()
    layers.config.num_hidden_layers = 2
    assert kept_at(experts) != kept_at(fewer) and kept_at(layers) != kept_at(target)


def lower_layers(model):
    model.config.num_hidden_layers = 2


def route_to_one_expert(model):
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 1


def use_another_attention(model):
    model.set_attn_implementation("eager")


@pytest.mark.parametrize(
    ("family", "change"),
    [("llama", lower_layers), ("mixtral", route_to_one_expert), ("llama", use_another_attention)],
)
def test_a_model_that_is_changed_between_two_calls_has_another_table(family, change):
    pair = ModelPair(testing.tiny_model(family))
    ((table, path),) = costs_here(pair, repeats=1)
    assert costs_here(pair, repeats=1)[0][0] is table
    change(pair.target)
    assert costs_here(pair, repeats=1)[0][1] != path


def test_adapters_that_are_switched_have_another_table():
    adapted = Adapted(testing.tiny_model("llama"))
    pair = ModelPair(adapted)
    ((_, path),) = costs_here(pair, repeats=1)
    with adapted.disable_adapter():
        assert costs_here(pair, repeats=1)[0][1] != path
    assert costs_here(pair, repeats=1)[0][1] == path


def test_a_table_is_measured_once_and_kept(capsys):
    ((table, path),) = costs_here(tiny(), 3)
    assert table.machine["spread"] >= 0
    said = capsys.readouterr().err.splitlines()
    said = [line for line in said if not line.startswith("these times vary")]  # as they may
    assert [line.split(" ")[0] for line in said] == ["measuring", "costs"], "said beforehand, and what came out"
    assert CostTable.load(path).target_seconds == table.target_seconds
    assert costs_here(tiny(), 3)[0][0] is table and capsys.readouterr().err == ""
    forget()
    ((again, _),) = costs_here(tiny(), 3)
    assert again.target_seconds == table.target_seconds and "measuring" not in capsys.readouterr().err
    ((other, beside),) = costs_here(tiny(), 4)
    assert other.batch_size == 4 and beside != path


@pytest.mark.parametrize("damage", ["cut off", "another machine"])
def test_a_file_of_no_use_is_measured_again(damage, capsys):
    ((_, path),) = costs_here(tiny())
    content = json.loads(path.read_text())
    content["machine"]["processor"] = "another"
    path.write_text(path.read_text()[:40] if damage == "cut off" else json.dumps(content))
    forget()
    capsys.readouterr()
    ((table, _),) = costs_here(tiny())
    lines = [line for line in capsys.readouterr().err.splitlines() if "measured again" in line]
    assert len(lines) == 1 and str(path) in lines[0]
    assert CostTable.load(path).machine == table.machine


def test_without_a_cache_it_is_measured_and_one_line_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ((table, path),) = costs_here(tiny())
    assert not path.exists() and capsys.readouterr().err.count("cannot be written to") == 1
    assert costs_here(tiny())[0][0] is table, "the process has one table"


def test_two_processes_that_measure_at_once_have_one_table(tmp_path):
    code = (
        "from toolkit import testing; from dataclasses import replace; from toolkit.costs.kept import costs_here\n"
        "pair = replace(testing.table_pair(), draft=None, costs='measured')\n"
        "print(list(map(list, costs_here(pair)[0][0].target_seconds)))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (process.communicate()[0] for process in both)
    assert [process.returncode for process in both] == [0, 0] and first == second


@pytest.mark.parametrize("name", WEIGHING)
def test_only_rules_without_costs_of_their_own_take_the_table(name, tmp_path):
    policy = config.method(name).policy
    taken = with_costs(policy, tiny(), 4)
    assert isinstance(taken.costs, CostTable) and taken.costs.batch_size == 4 == getattr(taken, "batch_size", 4)
    assert with_costs(policy, tiny(costs="assumed"), 4) is policy
    default = {"batch_rate_confidence": 0.0}.get(name, 0.05)
    for own in (f"policy.costs={taken.costs.save(tmp_path / 'costs.json')}", f"policy.column_cost={default}"):
        assert not weighs_costs(config.method(name, [own]).policy)
    assert not weighs_costs(config.method("speculative").policy) and not weighs_costs(StoppingPolicy())


@pytest.mark.parametrize("name", WEIGHING)
def test_equal_tables_give_equal_texts_and_greedy_texts_are_always_the_same(name):
    """Whether forward passes are dear or cheap; in a batch and alone."""
    prompts = [[0, 1, 0, 1, 0], [1, 1, 0]]
    cheap, dear = CostTable.ratio(0.01), CostTable.ratio(0.9, 0.9)

    def sequences(table, temperature):
        method = config.method(name)
        method = replace(method, policy=replace(method.policy, costs=table))
        limits = {"max_new_tokens": 24, "temperature": temperature, "batch_size": 1}
        return [list(g.token_ids) for g in generate(testing.table_pair(), prompts, method, **limits)]

    assert sequences(cheap, 1.0) == sequences(cheap, 1.0)
    plain = generate(testing.table_pair(), prompts, "autoregressive", max_new_tokens=24, temperature=0.0)
    assert sequences(cheap, 0.0) == sequences(dear, 0.0) == [list(g.token_ids) for g in plain]


def test_generate_measures_what_a_rule_weighs(capsys):
    pair = tiny()
    first = generate(pair, [[0, 1, 0, 1]], "lookup_rate", max_new_tokens=16, batch_size=2)
    assert "at batch size 2, once" in capsys.readouterr().err
    assert (
        generate(pair, [[0, 1, 0, 1]], "lookup_rate", max_new_tokens=16, batch_size=2)[0].token_ids
        == first[0].token_ids
    )
    generate(pair, [[0, 1]], "speculative", max_new_tokens=4)
    generate(ModelPair.toy(), ["Q: "], "lookup_rate", max_new_tokens=4)
    assert capsys.readouterr().err == "", "nothing else is measured: the toy pair's costs are assumed"


def test_a_decoding_command_has_its_table_in_its_identity(tiny_overrides, tmp_path, capsys):
    words = [*tiny_overrides, "prompts=toy_math", "prompts.limit=2", "sampling.max_new_tokens=6", "track=false"]
    words += ["method=lookup_rate", f"paths.root_dir={tmp_path}"]
    folder = decode.run(config.compose("decode", words))
    manifest = read_manifest(folder)
    path = Path(manifest["given"]["method.policy.costs"])
    assert manifest["config"]["method"]["policy"]["batch_size"] == manifest["batch_size"] == 8
    forget()
    capsys.readouterr()
    assert decode.run(config.compose("decode", words)) == folder, "the same table: finished work"
    assert "measuring" not in capsys.readouterr().err
    table = CostTable.load(path)
    replace(table, target_seconds=[[9.0] * len(WIDTHS)] * len(CONTEXTS)).save(path)
    forget()
    assert decode.run(config.compose("decode", words)) != folder, "another table, another text"
    own = decode.run(config.compose("decode", [*words, "method.policy.column_cost=.05"]))
    assert "method.policy.costs" not in (read_manifest(own).get("given") or {}), "a figure that is written out is used"
    assert read_manifest(folder)["config"]["method"]["policy"]["column_cost"] == 0.05, "as work of before was called"
