"""The engine of a pair: one per pair, gone with it, made anew when models change; calls at the same time; thin wrappers."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import pytest

from toolkit import ModelPair, config, generate
from toolkit.config import files
from toolkit.decoding import Sampling, decode_measured
from toolkit.engine.engine import EngineOptions, engine_of
from toolkit.errors import InputError

PROMPTS = [[5, 9, 11, 7], [6, 3, 8], [12, 4], [9] * 12]


def test_a_pair_is_values():
    names = {field.name for field in fields(ModelPair)}
    assert names == {
        "target",
        "draft",
        "tokenizer",
        "drafts",
        "end_ids",
        "name",
        "head",
        "options",
        "chat_template_options",
        "unshared",
    }


def test_one_engine_per_pair_and_none_after_it():
    pair = ModelPair.toy()
    engine = engine_of(pair)
    assert engine_of(pair) is engine
    assert engine_of(replace(pair, draft=None)) is not engine  # the same models, another pair
    gone = weakref.ref(engine)
    del engine, pair
    gc.collect()
    assert gone() is None


def test_replaced_models_and_options_get_an_engine_of_their_own():
    pair, other = ModelPair.toy(), ModelPair.toy()
    engine = engine_of(pair)
    pair.target = other.target
    second = engine_of(pair)
    assert second is not engine
    assert second.models[0] is other.target
    pair.options = EngineOptions(cuda_graphs="off")
    assert engine_of(pair) is not second


@pytest.mark.parametrize(
    "method", ["speculative", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mcsd", "dsbd", "rate"))]
)
def test_calls_at_the_same_time_decode_what_they_decode_alone(method):
    pair = ModelPair.from_pretrained("toy/target", "toy/draft", dtype="float64")
    seeds = range(6)

    def texts(seed):
        return [g.token_ids for g in generate(pair, PROMPTS, method, max_new_tokens=20, seed=seed, batch_size=2)]

    alone = [texts(seed) for seed in seeds]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(texts, seeds)) == alone


def test_decoding_says_what_it_used():
    pair, method = ModelPair.toy(), config.method("speculative")
    few = decode_measured(pair, PROMPTS, method, Sampling(max_new_tokens=8), batch_size=1)
    many = decode_measured(pair, PROMPTS, method, Sampling(max_new_tokens=8), batch_size=4)
    assert [g.token_ids for g in few.generations] == [g.token_ids for g in many.generations]
    assert many.cache_bytes == 4 * few.cache_bytes > 0
    roomy = decode_measured(pair, PROMPTS, method, Sampling(max_new_tokens=8), batch_size=1, capacity=300)
    assert [g.token_ids for g in roomy.generations] == [g.token_ids for g in few.generations]
    assert roomy.cache_bytes == pytest.approx(3 * few.cache_bytes, rel=0.01), "384 instead of 128 tokens"


def test_a_method_is_built_once_and_anew_when_a_configuration_file_changes(monkeypatch, tmp_path):
    shutil.copytree(config.CONF, tmp_path / "conf")
    monkeypatch.setattr(files, "CONF", tmp_path / "conf")
    first = config.method("confidence")
    assert config.method("confidence") is first
    assert config.method("confidence", ["policy.threshold=.3"]).policy.threshold == 0.3
    path = tmp_path / "conf" / "stopping" / "confidence.yaml"
    path.write_text(path.read_text().replace("threshold: 0.4", "threshold: 0.6"))
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))
    assert config.method("confidence").policy.threshold == 0.6


def test_bad_options_are_one_line():
    with pytest.raises(InputError, match="cuda_graphs: expected one of auto, on, off or true or false, got 'fast'"):
        EngineOptions(cuda_graphs="fast")
