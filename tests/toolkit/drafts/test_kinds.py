"""Kinds of drafts: one of a user's own from its training to its texts, and what every kind states."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file

from analysis.loads.exports import write_exports
from data_gen import responses, traces
from tests.test_docs import ROOT, write_examples
from toolkit import ModelPair, config, distill, generate
from toolkit.config import compose
from toolkit.drafts import SEPARATE, kind_by_target, kind_of
from toolkit.drafts.folders import kind_in
from toolkit.drafts.kinds import KINDS, all_kinds, named_object
from toolkit.errors import InputError

PARTS = ("load", "save", "session", "settings", "training", "proposer", "recorder")
PROMPTS = ["the cat", "a dog", "the dog", "a cat", "dog", "cat the", "a", "the"]


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """A user's folder with the example of docs/extending.md: its modules can be imported, its yaml are found."""
    write_examples(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with config.searching(tmp_path / "conf"):
        yield tmp_path


def test_a_kind_from_outside_is_trained_saved_loaded_recorded_decoded_and_exported(outside, tiny_pair, tiny_overrides):
    def run(command, name, *words):
        words = [*tiny_overrides, *words, f"paths.output_dir={outside / name}"]
        return command.run(compose(command.__name__.rpartition(".")[2], words))

    rows = [{"id": str(number), "prompt": prompt} for number, prompt in enumerate(PROMPTS)]
    (outside / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    texts = run(responses, "responses", f"prompts.path={outside / 'prompts.jsonl'}", "sampling.max_new_tokens=12")
    words = ["kind=bigram", "kind.rank=4", "pair.draft=null", f"responses=[{texts}]", "optimizer.lr=1", "seed=3"]
    draft = run(distill, "distill", *words, "+trainer.max_steps=3") / "draft"
    assert load_file(draft / "model.safetensors")["rows.weight"].shape[1] == 4
    assert "my_drafts:BIGRAM" in (outside / "distill/config.yaml").read_text()
    scores = json.loads((outside / "distill/metrics.json").read_text())
    assert scores["val/cross_entropy"] != scores["start/cross_entropy"]
    assert kind_in(draft).name == "bigram"
    run(traces, "traces", f"responses={texts}", f"pair.draft={draft}")
    assert list((outside / "traces").rglob("*.safetensors"))
    pair = ModelPair.from_pretrained(tiny_pair / "target", draft)
    assert type(pair.draft).__name__ == "Bigram"
    greedy = [
        [text.token_ids for text in generate(pair, PROMPTS, method, max_new_tokens=12, temperature=0.0)]
        for method in ("autoregressive", "speculative", "mcsd", "rate")
    ]
    assert greedy[1:] == greedy[:1] * 3
    sampled = generate(pair, PROMPTS, "speculative", max_new_tokens=12)
    assert sum(text.counts.num_drafted for text in sampled) > 0
    files = write_exports(outside, str(draft), {1: 3}, None, ["method=speculative"], [0.5])
    assert [path.name for path in files] == ["toolkit.txt"]  # no engine loads it


@pytest.mark.parametrize("text", KINDS)
def test_the_parts_of_a_kind_are_there_and_its_yaml_names_it(text):
    kind = named_object(text)
    assert kind in all_kinds() and kind_by_target({"_target_": text}) is kind
    assert f"_target_: {text}" in (ROOT / f"conf/kind/{kind.name}.yaml").read_text()
    for part in PARTS:
        assert callable(kind.part(part)), part


@pytest.mark.parametrize("text", KINDS)
def test_a_kinds_yaml_and_its_class_have_the_same_defaults(text):
    kind = named_object(text)
    values = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/kind/{kind.name}.yaml"))
    assert {name: value for name, value in values.items() if name != "_target_"} == {
        name: list(value) if isinstance(value, tuple) else value for name, value in vars(kind()).items()
    }


def test_models_of_no_kind_are_separate():
    assert kind_of(object()) is SEPARATE and kind_by_target(None) is SEPARATE
    assert kind_in(None) is SEPARATE and kind_in("no/such-folder") is SEPARATE


@pytest.mark.parametrize("target", ["toolkit.drafts.eagle3:NONE", "no.such:KIND", "toolkit.sampling:Sampling", "word"])
def test_another_target_is_one_line(target):
    with pytest.raises(InputError, match="expected package.module:"):
        kind_by_target({"_target_": target})
