"""Captured forwards against the models' own: every family, trees, decoding, reuse of caches, refusals."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch

from tests.toolkit.adapted import Adapted
from toolkit import ModelPair, generate
from toolkit.engine import capture, open_session
from toolkit.engine.capture import Captures, StaticForward, static_flow
from toolkit.engine.engine import engine_of
from toolkit.errors import InputError
from toolkit.testing import FAMILIES, VOCAB, tiny_model

ROUTED = {"mixtral", "qwen3_moe"}


class EagerStatic(StaticForward):
    after = 1


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ROUTED])
def test_replayed_forwards_equal_the_models_own(family, monkeypatch):
    monkeypatch.setattr(capture, "PROOFS", 0)  # no help from the comparison that guards new captures
    model, generator = tiny_model(family), torch.Generator().manual_seed(3)
    plain, replaying = open_session(model, 2, 96), open_session(model, 2, 96, Captures(EagerStatic))
    assert replaying.captures is not None
    prompts = torch.randint(3, VOCAB, (2, 9), generator=generator)
    for session in (plain, replaying):
        session.extend(prompts, counts=[9, 5])
    for turn in range(4):
        block = torch.randint(3, VOCAB, (2, 9), generator=generator)  # 9 is no captured width: it is padded to 10
        tree = torch.randint(3, VOCAB, (2, 4), generator=generator)
        parents = torch.tensor([[-1, -1, 0, 2], [-1, 0, 0, 1]])
        kept = torch.tensor([[3], [1 + turn % 2]])
        results = []
        for session in (plain, replaying):
            chain = session.extend(block, counts=[9, 3 + turn], last=2)
            branches = session.extend(tree, parents=parents, last=4)
            session.keep(kept)
            results.append(torch.cat([r.logits.flatten() for r in (chain, branches)] + [branches.hidden.flatten()]))
            session.truncate([length - 2 for length in session.lengths])
        assert torch.allclose(*results, rtol=1e-5, atol=1e-5 * float(results[0].abs().max()))
    assert not replaying.captures.refused
    assert len(replaying.captures.known) >= 2
    assert max(replaying.captures.uses.values()) > 1


def test_forwards_that_give_other_numbers_of_logits_are_captured_apart(monkeypatch):
    """Same tokens, same cache, but one position's logits, then four, then one."""
    monkeypatch.setattr(capture, "PROOFS", 0)
    model, generator = tiny_model("llama"), torch.Generator().manual_seed(5)
    plain, replaying = open_session(model, 1, 32), open_session(model, 1, 32, Captures(EagerStatic))
    prompt, block = (torch.randint(3, VOCAB, (1, width), generator=generator) for width in (6, 4))
    for session in (plain, replaying):
        session.extend(prompt)
    for last in (1, 1, 1, 4, 4, 4, 2, 1, 4):
        readings = []
        for session in (plain, replaying):
            readings.append(session.extend(block, last=last))
            session.truncate([6])
        assert readings[1].logits.shape == readings[0].logits.shape == (1, last, VOCAB)
        assert torch.allclose(readings[1].logits, readings[0].logits, rtol=1e-5, atol=1e-5)
    assert max(replaying.captures.uses.values()) > 1


def test_models_that_branch_on_values_are_not_captured():
    assert {name for name in FAMILIES if not static_flow(tiny_model(name))} == ROUTED
    model = tiny_model("phi3")
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "longrope"}
    assert not static_flow(model)


def test_a_capture_that_is_wrong_is_noticed_and_dropped():
    class Wrong(EagerStatic):
        def __call__(self, inputs):
            logits, hidden = super().__call__(inputs)
            return logits * 1.5, hidden

    model = tiny_model("llama")
    plain, replaying = open_session(model, 1, 32), open_session(model, 1, 32, Captures(Wrong))
    for session in (plain, replaying):
        session.extend(torch.tensor([[4, 5, 6]]))
    tokens = torch.tensor([[7]])
    assert torch.allclose(replaying.extend(tokens).logits, plain.extend(tokens).logits, atol=1e-5)
    with pytest.warns(RuntimeWarning, match="a replayed forward differs from the model's own"):
        second = replaying.extend(tokens).logits
    expected = plain.extend(tokens).logits
    assert torch.allclose(second, expected, atol=1e-5)
    assert torch.allclose(replaying.extend(tokens).logits, plain.extend(tokens).logits, atol=1e-5)


@pytest.mark.parametrize("method", ["speculative", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "specdec_pp", "mcsd", "speculative_beam", "dsbd", "mtad"
))])  # fmt: skip
def test_decoding_does_not_depend_on_captures(method):
    """In float64, where rounding cannot turn a token. More prompts than slots: caches are emptied, rows refilled."""
    prompts = [[5 + i, 9, 11 * i % 60, 7] + [3] * (i % 3) for i in range(5)]

    def tokens(pair, batch_size):
        generations = generate(pair, prompts, method, max_new_tokens=24, batch_size=batch_size)
        return [g.token_ids for g in generations]

    pair = ModelPair.from_pretrained("toy/target", "toy/draft", dtype="float64")
    expected = tokens(pair, 3)
    engine = engine_of(pair)
    engine.capture_kind, engine.captures = EagerStatic, []
    for _ in range(2):
        assert tokens(pair, 3) == expected
    assert tokens(pair, 2) == expected
    assert len(engine_of(pair).idle) == 2
    assert all(session.captures.known for sessions in engine_of(pair).idle for session in sessions.every)


def keeping(model):
    """Captures that keep Python values as CUDA graphs do: a replay runs with those of the time when it was captured."""

    class Keeping(EagerStatic):
        def __init__(self, forward, inputs):
            super().__init__(forward, inputs)
            run, states = self.run, [(module, dict(vars(module))) for module in model.modules()]

            def replay():
                now = [(module, dict(vars(module))) for module, _ in states]
                for module, state in states:
                    vars(module).update(state)
                results = run()
                for module, state in now:
                    vars(module).update(state)
                return results

            self.run = replay

    return Keeping


def greedy(model):
    """Twelve tokens of the model's own, without a cache."""
    text = torch.tensor([[5, 9, 11, 7]])
    for _ in range(12):
        text = torch.cat([text, model(input_ids=text, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return text[0, 4:].tolist()


def decoded(pair):
    return generate(pair, [[5, 9, 11, 7]], "autoregressive", temperature=0, max_new_tokens=12)[0].token_ids


def test_adapters_that_are_switched_are_decoded_as_they_are():
    model = Adapted(tiny_model("llama")).double()
    pair = ModelPair(target=model, end_ids=())
    engine_of(pair).capture_kind = keeping(model)
    texts = []
    for _ in range(3):
        assert decoded(pair) == greedy(model)
    texts.append(decoded(pair))
    with model.disable_adapter():
        assert decoded(pair) == greedy(model)
        texts.append(decoded(pair))
    model.set_adapter("b")
    assert decoded(pair) == greedy(model)
    texts.append(decoded(pair))
    for layer in model.layers():
        layer.scaling["b"] = -9.0
    assert decoded(pair) == greedy(model)
    assert len({*map(tuple, texts)}) == 3  # the adapters matter


def test_attributes_that_are_set_are_seen_and_captures_go_on():
    model = tiny_model("llama").double()
    pair = ModelPair(target=model, end_ids=())
    engine_of(pair).capture_kind = keeping(model)
    before = [decoded(pair) for _ in range(5)]
    captured = engine_of(pair).idle[0].target.captures
    assert captured.known and before == [greedy(model)] * 5
    for layer in model.model.layers:
        layer.self_attn.scaling *= 99
    for _ in range(3):
        assert decoded(pair) == greedy(model) != before[0]
    again = engine_of(pair).idle[0].target.captures
    assert again.known and again is not captured


def test_caches_are_used_again_only_by_calls_of_their_shape():
    pair = ModelPair.toy()
    engine = engine_of(pair)
    engine.capture_kind = EagerStatic
    first = engine.open(2, 60)
    first.target.extend(torch.tensor([[5, 6], [7, 8]]))
    engine.close(first)
    assert first.target.lengths == [0, 0]
    assert not bool(first.target.layers[0].keys.any())
    assert engine.open(2, 30) is first  # large enough
    engine.close(first)
    assert engine.open(3, 64) is not first
    assert engine.open(2, 500) is not first
    assert engine.idle == [first]


def test_the_least_used_capture_makes_room_for_one_used_twice_as_often():
    class Few(EagerStatic):
        layers = 0  # four captures are kept in any case

    captures = Captures(Few)
    session = open_session(tiny_model("llama"), 1, 64, captures)
    session.extend(torch.tensor([[4, 5, 6]]))

    def kept(*widths):
        for width in widths:
            session.extend(torch.full((1, width), 7))
            session.truncate([3])
        return sorted(key[1] for key in captures.known)

    assert kept(1, 2, 3, 4, 1, 2, 4) == [1, 2, 3, 4]
    assert kept(5, 5) == [1, 2, 3, 4]
    assert kept(5) == [1, 2, 4, 5]


def test_a_model_whose_code_cannot_be_captured_runs_as_it_is():
    class Failing(EagerStatic):
        def __init__(self, forward, inputs):
            raise TypeError("not in a graph")

    captures = Captures(Failing)
    plain, replaying = open_session(tiny_model("llama"), 1, 32), open_session(tiny_model("llama"), 1, 32, captures)
    for session in (plain, replaying):
        session.extend(torch.tensor([[4, 5, 6]]))
    with pytest.warns(RuntimeWarning, match="run one by one: not in a graph"):
        first = replaying.extend(torch.tensor([[7]])).logits
    assert torch.allclose(first, plain.extend(torch.tensor([[7]])).logits, atol=1e-5)
    assert captures.empty().refused


def test_models_in_training_are_not_captured():
    pair = ModelPair(target=tiny_model("llama").requires_grad_(True))
    engine_of(pair).capture_kind = EagerStatic
    generate(pair, [[4, 5]], "autoregressive", max_new_tokens=40)
    assert engine_of(pair).captures == [None]


@pytest.mark.parametrize("change", [lambda session: session.reserve(41), lambda session: session.select([1, 0])])
def test_captures_go_with_the_keys_and_values_that_they_write(change):
    session = open_session(tiny_model("llama"), 2, 40, Captures(EagerStatic))
    for token in range(3):
        session.extend(torch.tensor([[token], [token]]))
    assert session.captures.known
    change(session)
    assert not session.captures.known


def test_bad_options():
    with pytest.raises(InputError, match="cuda_graphs: expected one of auto, on, off or true or false, got 'fast'"):
        ModelPair.from_pretrained("toy/target", "toy/draft", cuda_graphs="fast")


@pytest.mark.parametrize("captures", [None, Captures(EagerStatic)], ids=["plain", "captured"])
def test_a_dropped_session_frees_its_caches_and_captures_without_the_garbage_collector(captures):
    """A large cache must not wait for a collection, nor a CUDA graph be freed while another one is captured."""
    session = open_session(tiny_model("llama"), 2, 64, captures)
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            session.extend(torch.full((2, 3), 3))
            session.truncate([0, 0])
        keys = ref(session.layers[0].keys)
        del session
        assert keys() is None
    finally:
        gc.enable()
