"""What a call of decoding does: engines and caches, how prompts are read, seconds of rounds, progress in tokens."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from toolkit import ModelPair, config, generate
from toolkit.decoding import Sampling, decode, decode_measured
from toolkit.decoding.batch import PREFILL
from toolkit.decoding.beams import BeamBatch
from toolkit.decoding.text import TextBatch
from toolkit.engine import Session, open_session
from toolkit.engine.attention import grouped_attention
from toolkit.engine.engine import EngineOptions, engine_of
from toolkit.runs.token_bar import TokenBar

PROMPTS = [[5, 9, 11, 7], [6, 3, 8], [12, 4], [9] * 12]


def test_one_engine_per_pair_its_models_and_options_and_none_after_it():
    pair, other = ModelPair.toy(), ModelPair.toy()
    engine = engine_of(pair)
    assert engine_of(pair) is engine
    assert engine_of(replace(pair, draft=None)) is not engine  # the same models, another pair
    pair.target = other.target
    second = engine_of(pair)
    assert second is not engine and second.models[0] is other.target
    pair.options = EngineOptions(cuda_graphs="off")
    third = engine_of(pair)
    assert third is not second
    gone = weakref.ref(third)
    del engine, second, third, pair
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("method", ["speculative", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dsbd",))])
def test_calls_at_the_same_time_decode_what_they_decode_alone(method):
    pair = ModelPair.from_pretrained("toy/target", "toy/draft", dtype="float64")
    seeds = range(4)

    def sequences(seed):
        return [g.token_ids for g in generate(pair, PROMPTS, method, max_new_tokens=10, seed=seed, batch_size=2)]

    alone = [sequences(seed) for seed in seeds]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(sequences, seeds)) == alone


def test_decoding_says_what_it_used():
    pair, method = ModelPair.toy(), config.method("speculative")
    few = decode_measured(pair, PROMPTS, method, Sampling(max_new_tokens=8), batch_size=1)
    many = decode_measured(pair, PROMPTS, method, Sampling(max_new_tokens=8), batch_size=4)
    assert [g.token_ids for g in few.generations] == [g.token_ids for g in many.generations]
    assert many.cache_bytes == 4 * few.cache_bytes > 0
    roomy = decode_measured(pair, PROMPTS, method, Sampling(max_new_tokens=8), batch_size=1, capacity=300)
    assert [g.token_ids for g in roomy.generations] == [g.token_ids for g in few.generations]
    assert roomy.cache_bytes == pytest.approx(3 * few.cache_bytes, rel=0.01), "384 instead of 128 tokens"


# -- how forward passes read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
def test_grouped_heads_give_the_stock_numbers(masked):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, count, 8, generator=generator, dtype=torch.float64)
        for heads, count in ((6, 3), (2, 5), (2, 5))
    )
    seen = torch.rand(2, 1, 3, 5, generator=generator) < 0.7
    mask = torch.zeros(2, 1, 3, 5, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True
    arguments = (module, query, key, value, mask if masked else None)
    stock, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, scaling=0.3)
    with grouped_attention():
        grouped, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](*arguments, scaling=0.3)
    assert grouped.shape == stock.shape == (2, 3, 6, 8)
    assert torch.allclose(grouped, stock, rtol=0, atol=1e-14)


def test_a_session_copies_no_keys(monkeypatch):
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model, copied = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval(), []
    stock = sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda states, count: copied.append(count) or stock(states, count))
    tokens, later = torch.tensor([[5, 9, 33, 21]]), torch.ones(4, 4, dtype=torch.bool).triu(1)
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.float64).masked_fill(later, torch.finfo(torch.float64).min)
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask)
    assert copied, "outside of sessions nothing is changed"
    copied.clear()
    got = open_session(model, 1, 8).extend(tokens, last=4)
    assert not copied and torch.allclose(got.logits, expected.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["autoregressive", "speculative"])
def test_long_and_short_prompts_are_read_apart_and_decode_as_alone(name, monkeypatch):
    read = []
    extend = Session.extend

    def noted(session, tokens, **options):
        read.append(tuple(tokens.shape))
        return extend(session, tokens, **options)

    monkeypatch.setattr(Session, "extend", noted)
    pair, sampling, method = ModelPair.toy(), Sampling(0.0, max_new_tokens=8), config.method(name)
    prompts = [list(range(5, 5 + length)) for length in (200, 12, 205, 14, 210, 11)]
    alone = [decode(pair, [prompt], method, sampling)[0].token_ids for prompt in prompts]
    read.clear()
    together = decode(pair, prompts, method, sampling, batch_size=6)
    wide = [shape for shape in read if shape[1] >= PREFILL]
    models = 1 if name == "autoregressive" else 2
    assert sorted(wide) == sorted([(3, 13), (3, 209)] * models), "two forward passes of three rows per model"
    assert [generation.token_ids for generation in together] == alone


# -- what a call says ------------------------------------------------------------------------------------------------------

SECONDS = {"_prefill": 1, "_uniforms": 2, "context": 4, "propose": 8, "score": 16, "verify": 32, "_refill": 64}


@pytest.fixture
def steps(monkeypatch):
    """A clock that only the loop's steps move, each by its seconds; the steps that were taken."""
    taken: list[str] = []

    def slowed(name, step):
        return lambda self, *arguments: taken.append(name) or step(self, *arguments)

    for kind in (TextBatch, BeamBatch):
        slow = {name: slowed(name, getattr(kind, name)) for name in SECONDS}
        for name, step in slow.items():
            monkeypatch.setattr(kind, name, step)
    monkeypatch.setattr("toolkit.decoding.batch.perf_counter", lambda: float(sum(SECONDS[name] for name in taken)))
    return taken


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("method", ["autoregressive", "speculative", "mtad"])
def test_what_the_loop_does_between_two_rounds_counts_for_the_target(method, timed, exact_pair, steps):
    sampling = Sampling(max_new_tokens=12)
    generations = decode_measured(
        exact_pair, [[1], [2]], config.method(method), sampling, batch_size=1, timed=timed
    ).generations
    assert [len(generation.rounds) > 1 for generation in generations] == [True, True]
    assert steps.count("propose") == sum(len(generation.rounds) for generation in generations)
    for generation in generations:
        seconds = [(one.draft_seconds, one.target_seconds) for one in generation.rounds]
        assert seconds[0] == (8, 1 + 2 + 4 + 16 + 32), "neither the texts before nor their ends"
        assert set(seconds[1:]) == {(8, 1 + 2 + 4 + 16 + 32 + 64)}


@pytest.mark.parametrize("name", ["autoregressive", "prompt_lookup", "mtad"])
def test_rounds_add_up_to_the_tokens(name):
    counts = []
    prompts = [[5, 6, 7, 5, 6], [8, 9], [5, 6, 7] * 3]
    generations = decode(
        ModelPair.toy(), prompts, config.method(name), Sampling(max_new_tokens=5), batch_size=2, on_round=counts.append
    )
    assert sum(counts) == sum(generation.counts.num_generated for generation in generations)
    assert len(counts) > 2 and counts[0] > 0, "from the first round on"


def test_what_is_left_is_estimated_from_the_rows_that_have_ended(capsys):
    with TokenBar("rows", 10, 100) as bar:
        assert bar.expected == 1000
        bar.tokens(60)
        assert bar.expected == 1000, "nothing has ended: any row may become the longest"
        bar.row()
        bar.row()
        assert bar.expected == pytest.approx(60 + 8 * 30), "60 tokens, two ends: a row ends after 30 on average"
        bar.skip(3)
        assert bar.expected == pytest.approx(60 + 5 * 30)
        for _ in range(5):
            bar.count(40)
        assert bar.expected == bar.made == 260
    assert "rows: 10 rows of at most 100 tokens, 1,000 in all" in capsys.readouterr().err
