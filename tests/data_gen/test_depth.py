"""How deep a recording rolls out: by hand, and on the toy pair."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
import torch

from analysis.replay.policies import replay
from data_gen import traces
from data_gen.held_out import load_frozen
from data_gen.recording_by_start import DEEPEST, depth_of, depth_that_pays
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.runs.stage import read_manifest
from toolkit.stopping import Bounded, Fixed
from toolkit.trace.folders import read_traces


def test_depth_by_hand():
    assert depth_of([torch.full((30,), 0.2)]) == 3, ".04 at two tokens, .008 at three"
    assert depth_of([torch.full((30,), 0.01)]) == 1
    assert depth_of([torch.full((30,), 0.99)]) == DEEPEST
    assert depth_of([torch.full((5,), 0.99)]) == 6, "no text is longer"
    greedy = torch.tensor([1.0, 1.0, 0.0, 1.0])  # at temperature 0 alpha is 0 or 1; one of three pairs is accepted
    assert depth_of([greedy]) == 3


def test_a_draft_that_knows_nothing_pays_one_token_and_one_that_knows_all_pays_any():
    toy = ModelPair.toy()
    nothing = deepcopy(toy.draft)
    for parameter in nothing.parameters():
        parameter.data.zero_()
    prompts, sampling = [e.prompt for e in load_frozen("math", "dev")[:4]], Sampling(1.0, max_new_tokens=24, seed=1)
    plain = decode(toy, prompts, config.method("autoregressive"), sampling)
    texts = [(g.prompt_ids, g.token_ids) for g in plain]
    assert depth_that_pays(ModelPair(toy.target, toy.target, toy.tokenizer), texts, sampling) == DEEPEST
    assert depth_that_pays(ModelPair(toy.target, nothing, toy.tokenizer), texts, sampling, [None, 0.0]) <= 2


def test_a_recording_says_how_deep_it_is_and_refuses_deeper_policies(tmp_path):
    pair, sampling = ModelPair.toy(), Sampling(0.0, max_new_tokens=8)
    plain = decode(pair, [e.prompt for e in load_frozen("code", "dev")[:4]], config.method("autoregressive"), sampling)
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": g.prompt_ids, "token_ids": g.token_ids}) + "\n" for g in plain))
    words = [f"responses={path}", "sampling={temperature: 0, max_new_tokens: 8}", f"paths.root_dir={tmp_path}"]
    folder = traces.run(config.compose("traces", [*words, "max_drafted=auto", "heads={}"]))
    depth = read_manifest(folder)["max_drafted"]
    assert depth == read_traces(folder).max_drafted <= 9
    with pytest.raises(InputError, match=f"max_drafted={depth}"):
        replay(read_traces(folder), Bounded(Fixed(depth + 1), 1, depth + 1))
