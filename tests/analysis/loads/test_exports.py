"""What is exported, in the engines' own hands: transformers' generate makes the forwards that are predicted for it."""

import json
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from analysis import advise
from analysis.loads.engine_counts import read_counts
from analysis.loads.exports import LARGEST, next_line, write_exports, zero_note
from analysis.loads.rates import by_context
from data_gen.held_out import load_frozen
from toolkit import ModelPair, config
from toolkit import decode as decode_command
from toolkit.costs.load import CostGrid, LoadCost
from toolkit.decoding import Sampling, decode


@pytest.mark.parametrize("length", [2, 4])
def test_transformers_makes_the_forwards_that_are_predicted(tmp_path, length):
    """At temperature 0 the texts are equal, so the counts must be, forward by forward."""
    pair = ModelPair.toy()
    write_exports(tmp_path, "toy/draft", {1: length}, None, ["method=speculative"])
    exported = json.loads((tmp_path / "transformers.json").read_text())
    for name, value in exported["assistant_generation_config"].items():
        setattr(pair.draft.generation_config, name, value)
    calls = {"target": 0, "draft": 0}
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        model.register_forward_pre_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    method, sampling = config.method("speculative", [f"policy.num_drafted={length}"]), Sampling(0.0, max_new_tokens=24)
    quiet = ModelPair.toy()
    expected = [0, 0]
    for example in load_frozen("math", "dev")[:3]:
        ids = pair.encode(example.prompt)
        (ours,) = decode(quiet, [ids], method, sampling)
        theirs = pair.target.generate(
            torch.tensor([ids]), assistant_model=pair.draft, max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert theirs[0, len(ids) :].tolist() == ours.token_ids
        expected = [expected[0] + ours.counts.num_target_calls, expected[1] + ours.counts.num_draft_calls]
    assert [calls["target"], calls["draft"]] == expected


def test_what_does_not_pay_is_said(tmp_path):
    write_exports(tmp_path, "d", {1: 0, 8: 0}, {1: 0, 8: 0}, ["method=autoregressive"])
    assert json.loads((tmp_path / "transformers.json").read_text()) == {"assistant_model": None}
    assert json.loads((tmp_path / "vllm.json").read_text()) == {}
    for name in ("sglang.txt", "llama_cpp.txt"):
        assert (tmp_path / name).read_text().startswith("# do not draft")


def test_a_draft_that_reads_states_is_named_as_such(tmp_path):
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    written = write_exports(tmp_path, str(tmp_path / "draft"), {1: 3}, None, ["method=speculative"])
    assert {path.name for path in written} == {
        "vllm.json", "sglang.txt", "sglang_adaptive.json", "llama_cpp.txt", "tensorrt_llm.yaml", "toolkit.txt"
    }  # fmt: skip
    assert read_yaml(tmp_path / "tensorrt_llm.yaml")["decoding_type"] == "Eagle3"
    assert json.loads((tmp_path / "vllm.json").read_text())["method"] == "eagle3"
    assert "--speculative-algorithm EAGLE3 " in (tmp_path / "sglang.txt").read_text()
    assert "--spec-type draft-eagle3 " in (tmp_path / "llama_cpp.txt").read_text()


def read_yaml(path):
    return yaml.safe_load(path.read_text())["speculative_config"]


def test_schedules_by_batch_size_say_what_was_advised(tmp_path):
    """Every engine's own reading of its file gives the advised length, at every size: inclusive ranges, from, up to."""
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    lengths = {1: 4, 4: 4, 16: 2, 64: 0}
    write_exports(tmp_path, str(tmp_path / "draft"), lengths, None, ["method=batch_rate"], [0.9, 0.5])
    expected = lambda batch: 4 if batch <= 10 else 2 if batch <= 40 else 0
    for end, least in (("", 0), ("_k1", 1)):
        ranges = json.loads((tmp_path / f"vllm{end}.json").read_text())["num_speculative_tokens_per_batch_size"]
        tensorrt = read_yaml(tmp_path / f"tensorrt_llm{end}.yaml")
        assert tensorrt["max_draft_len"] == 4 == tensorrt["draft_len_schedule"][min(tensorrt["draft_len_schedule"])]
        for batch in (1, 10, 11, 40, 41, 64, 500):
            wanted = max(expected(batch), least)
            assert [length for first, last, length in ranges if first <= batch <= last] == [wanted]
            fitting = sorted(last for last in tensorrt["draft_len_schedule"] if batch <= last)
            assert (tensorrt["draft_len_schedule"][fitting[0]] if fitting else 0) == wanted
    steps = json.loads((tmp_path / "sglang_adaptive.json").read_text())
    for batch in (1, 10, 11, 40, 41, 500):
        assert steps[str(max(int(first) for first in steps if int(first) <= batch))] == {
            "candidate_steps": [expected(batch)]
        }
    assert "K = 0 at batch size 64: " in zero_note(lengths)
    write_exports(tmp_path, "separate", {1: 4, 64: 1}, None, ["method=batch_rate"])
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == {
        "vllm.json", "sglang.txt", "llama_cpp.txt", "tensorrt_llm.yaml", "toolkit.txt", "transformers.json"
    }, "what an earlier call wrote for other sizes is gone"  # fmt: skip
    assert zero_note({1: 4, 64: 1}) is zero_note({1: 0, 64: 0}) is None


def test_the_first_length_of_tensorrts_schedule_is_its_largest(tmp_path):
    write_exports(tmp_path, 'separate: "d"', {1: 2, 8: 5}, None, ["method=batch_rate"])
    assert read_yaml(tmp_path / "tensorrt_llm.yaml") == {
        "decoding_type": "DraftTarget", "max_draft_len": 2, "speculative_model": "separate: \"d\"",
        "draft_len_schedule": {4: 2, LARGEST: 2},
    }  # fmt: skip


def test_rates_for_benchmarks_are_what_decoding_accepts(tmp_path):
    """At temperature 0 the exported survival is that of the same prompts, decoded and counted."""
    lines = [json.dumps({"id": f"p{i}", "prompt": e.prompt}) for i, e in enumerate(load_frozen("math", "dev")[:12])]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    words = [f"prompts.path={tmp_path}/p.jsonl", "sampling.temperature=0", "sampling.max_new_tokens=24"]
    words += ["pair.draft=toy/draft", f"paths.root_dir={tmp_path}", "track=false"]
    grid = "+grid={autoregressive: {}, speculative: {policy: {num_drafted: [2, 3]}}}"
    costs = LoadCost.ratio(0.01).save(tmp_path / "costs.json")
    shared = [*words, "prompts.limit=null", "~grid", grid, f"costs={costs}", "resamples=50", "batch_sizes=[1]"]
    folder = advise.run(config.compose("advise", shared))
    vllm = json.loads((folder / "exports" / "vllm_synthetic.json").read_text())
    rates, most = vllm["synthetic_acceptance_rates"], vllm["num_speculative_tokens"]
    assert vllm["rejection_sample_method"] == "synthetic" and len(rates) == most
    assert rates[0] <= 1 and all(before >= after >= 0 for before, after in pairwise(rates))
    flags = (folder / "exports" / "llama_cpp_synthetic.txt").read_text().split()
    assert flags[flags.index("--spec-draft-n-max") + 1] == str(most)
    assert [float(rate) for rate in flags[flags.index("--spec-synth-rates") + 1].split(",")] == rates
    words += ["method=speculative", f"method.policy.num_drafted={most}"]
    counts = read_counts(decode_command.run(config.compose("decode", words)) / "generations.jsonl")
    assert rates == pytest.approx((counts.accepted.sum(0) / counts.reached.sum(0)).cumprod(), abs=1e-4)
    assert pd.read_csv(folder / "schedule.csv").columns.tolist() == [
        "batch", "context", "num_drafted", "tokens_per_round", "speedup"
    ]  # fmt: skip


def test_the_best_fixed_length_by_context():
    """By hand: a draft forward costs .1 of a short target forward; after a long context, as much as the target's."""
    draft = CostGrid((1.0,), (1.0,), (0.0, 1000.0), np.array([[[0.1, 1.0]]]))
    target = CostGrid((1.0,), (1.0, 2.0), (0.0, 1000.0), np.array([[[1.0, 1.0], [1.0, 1.0]]]))
    table = by_context(LoadCost(draft, target, "mine"), [1], np.array([0.5, 0.25, 0.01]))
    assert table.context.tolist() == [0, 1000] and table.num_drafted.tolist() == [2, 0]
    assert table.speedup.tolist() == pytest.approx([1.75 / 1.2, 1])
    table = by_context(LoadCost(draft, target, "mine"), [1], np.array([0.5, 0.25, 0.01]), blocks=True)
    assert table.num_drafted.tolist() == [3, 0], "a block costs the same, however much of it is sent"
    assert table.speedup.tolist() == pytest.approx([1.76 / 1.1, 1])


def test_flags_of_other_engines(tmp_path):
    write_exports(tmp_path, "small", {1: 4, 4: 4, 16: 2}, {1: 5, 4: 5, 16: 1}, ["method=batch_rate"])
    vllm = json.loads((tmp_path / "vllm.json").read_text())
    assert vllm["num_speculative_tokens"] == 5 and vllm["draft_sample_method"] == "greedy"
    assert vllm["num_speculative_tokens_per_batch_size"] == [[1, 10, 5], [11, LARGEST, 1]]
    assert "--speculative-num-steps 5" in (tmp_path / "sglang.txt").read_text(), "it drafts greedily"
    assert "--spec-draft-n-max 5" in (tmp_path / "llama_cpp.txt").read_text(), "so does it"
    write_exports(tmp_path, "small", {1: 4}, None, ["method=batch_rate"])
    assert "--speculative-num-steps 4 " in (tmp_path / "sglang.txt").read_text()


@pytest.mark.parametrize("draft, file", [("a/my draft", "a/my draft.gguf"), ("a/draft.gguf", "a/draft.gguf")])
def test_flags_name_the_file_of_a_draft(draft, file, tmp_path):
    write_exports(tmp_path, draft, {1: 3}, {1: 3}, [], alive=[0.5])
    for name in ("llama_cpp.txt", "llama_cpp_synthetic.txt"):
        words = shlex.split((tmp_path / name).read_text())
        assert words[words.index("--spec-draft-model") + 1] == file
    words = shlex.split((tmp_path / "sglang.txt").read_text())
    assert words[words.index("--speculative-draft-model-path") + 1] == draft


def test_the_engines_own_parsers_know_every_name(tmp_path):
    """Against names read from the engines' sources, of TensorRT-LLM from its reference."""
    known = json.loads(Path(__file__).with_name("engine_fields.json").read_text())
    assert {name: one["version"] for name, one in known.items()} == {
        "vllm": "0.32.0", "sglang": "0.5.23", "llama_cpp": "b11434", "tensorrt_llm": "1.4.0rc1"
    }  # fmt: skip
    for greedy in ({1: 5, 16: 1, 64: 0}, None):
        write_exports(tmp_path, "small", {1: 4, 16: 2}, greedy, ["method=batch_rate"], [0.5])
        vllm = json.loads((tmp_path / "vllm.json").read_text())
        synthetic = json.loads((tmp_path / "vllm_synthetic.json").read_text())
        assert set(vllm) | set(synthetic) <= set(known["vllm"]["fields"])
        for key in ("method", "draft_sample_method"):
            assert vllm[key] in known["vllm"][key], key
        flags = [word for word in (tmp_path / "sglang.txt").read_text().split() if word.startswith("--")]
        assert len(flags) == 5 and set(flags) <= set(known["sglang"]["flags"])
        for name in ("llama_cpp.txt", "llama_cpp_synthetic.txt"):
            words = (tmp_path / name).read_text().split()
            assert {word for word in words if word.startswith("--")} <= set(known["llama_cpp"]["flags"])
        tensorrt = read_yaml(tmp_path / "tensorrt_llm.yaml")
        assert set(tensorrt) == set(known["tensorrt_llm"]["fields"])
        assert tensorrt["decoding_type"] in known["tensorrt_llm"]["decoding_type"]
        # What vLLM asks of a schedule: from 1, ranges in order that do not overlap, lengths of at most the one it is built for.
        ends = [0]
        for first, last, length in vllm["num_speculative_tokens_per_batch_size"]:
            assert ends[-1] < first <= last and 0 <= length <= vllm["num_speculative_tokens"]
            ends.append(last)
        assert vllm["num_speculative_tokens_per_batch_size"][0][0] == 1


# -- the line that decodes as advised: every value is read back as it was --------------------------------------------

ODD = ['mine, the "first" one', "a=b(c)", "données", "123", "true", "1e5", "~x#", "c:\\d\\", "${x}", "[a]"]


def read_back(line):
    assert line.startswith("next: python -m toolkit.decode ")
    return config.compose("decode", shlex.split(line)[4:])


@pytest.mark.parametrize("at", range(0, len(ODD), 3))
def test_a_line_is_read_back_as_it_was_written(at):
    target, path, head, draft = (ODD * 2)[at : at + 4]
    asked = config.compose("advise", [
        f"pair.target={config.quoted(target)}", "pair.dtype=bfloat16", f"prompts.path={config.quoted(path)}",
        "prompts.limit=7", "sampling.temperature=0", "pair.chat_template_options={thinking: false}",
        config.override("sampling.stop", ["\n\n", "é", target]),
    ])  # fmt: skip
    overrides = [config.override("method.policy.cost_ratio", 0.25), config.override("head", head)]
    cfg = read_back(next_line(asked, ["method=batch_rate", *overrides], draft, 4))
    assert (cfg.pair.target, cfg.prompts.path, cfg.head, cfg.pair.draft) == (target, path, head, draft)
    assert (cfg.pair.dtype, cfg.batch_size, cfg.prompts.limit, cfg.sampling.temperature) == ("bfloat16", 4, 7, 0)
    assert config.plain(cfg.sampling) == config.plain(asked.sampling)
    assert config.plain(cfg.pair.chat_template_options) == {"thinking": False}
    assert cfg.method.policy.cost_ratio == 0.25


@pytest.mark.parametrize("words", [
    ["prompts=toy_code", "prompts.split=dev"],
    ["prompts=gsm8k", "prompts.limit=40"],
    ["prompts=hub", "prompts.name=mine", "prompts.data_files=rows.csv", "prompts.template='{{ a }}'", "+prompts.limits.test=9"],
    ["prompts=jsonl", "prompts.path=mine.jsonl", "prompts.split=train", "prompts.shares.dev=.2"],
])  # fmt: skip
def test_the_same_prompts_are_asked(words):
    asked = config.compose("advise", words)
    same = read_back(next_line(asked, ["method=tail"], "toy/draft", 1))
    assert config.plain(same.prompts) == config.plain(asked.prompts)


def test_prompts_that_no_choice_describes_are_left_to_the_user():
    asked = config.compose("advise")
    OmegaConf.set_struct(asked, False)
    asked.prompts = {"name": "mine"}
    assert next_line(asked, ["method=tail"], "toy/draft", 1).endswith("prompts.path=FILE.jsonl batch_size=1")
