"""Captured forwards: they equal the model's own, never outlive what they captured, and are made where it is worth it."""

from __future__ import annotations

import gc
import warnings
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
import transformers as hf
from torch import nn

from tests.toolkit.adapted import Adapted
from toolkit import ModelPair, generate
from toolkit.engine import capture, open_session
from toolkit.engine.capture import PROOFS, CaptureGuard, Captures, GraphForward, StaticForward, static_flow
from toolkit.engine.engine import Engine, EngineOptions, engine_of
from toolkit.testing import FAMILIES, VOCAB, llama_pair, tiny_model

PROMPT = [5, 9, 11, 7]


class EagerStatic(StaticForward):
    after = 1


def both_sessions(model, num_rows, kind=EagerStatic):
    """A session that runs forwards as they are, and one that replays them."""
    return open_session(model, num_rows, 96), open_session(model, num_rows, 96, Captures(kind))


# -- a replay gives what the forward gives --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "phi3", "gpt_neox", "gpt2", "opt"])
def test_replayed_forwards_equal_the_models_own(family, monkeypatch):
    monkeypatch.setattr(capture, "PROOFS", 0)  # no help from the comparison that guards new captures
    model, generator = tiny_model(family), torch.Generator().manual_seed(3)
    plain, replaying = both_sessions(model, 2)
    prompts = torch.randint(3, VOCAB, (2, 9), generator=generator)
    for session in (plain, replaying):
        session.extend(prompts, counts=[9, 5])
    for turn in range(3):
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
    plain, replaying = both_sessions(tiny_model("llama"), 1)
    for session in (plain, replaying):
        session.extend(torch.tensor([[5, 6, 7, 8, 9, 10]]))
    for last in (1, 1, 4, 4, 2, 1, 4):
        logits = []
        for session in (plain, replaying):
            logits.append(session.extend(torch.tensor([[4, 9, 30, 8]]), last=last).logits)
            session.truncate([6])
        assert logits[1].shape == logits[0].shape == (1, last, VOCAB)
        assert torch.allclose(*logits, rtol=1e-5, atol=1e-5)
    assert max(replaying.captures.uses.values()) > 1


@pytest.mark.parametrize(
    "method", ["speculative", *(pytest.param(name, marks=pytest.mark.slow) for name in ("specdec_pp", "mtad"))]
)
def test_decoding_does_not_depend_on_captures(method):
    """In float64, where rounding cannot turn a token. More prompts than slots: caches are emptied, rows refilled."""
    prompts = [[5 + i, 9, 11 * i % 60, 7] + [3] * (i % 3) for i in range(5)]

    def tokens(pair, batch_size):
        generations = generate(pair, prompts, method, max_new_tokens=12, batch_size=batch_size)
        return [g.token_ids for g in generations]

    pair = ModelPair.from_pretrained("toy/target", "toy/draft", dtype="float64")
    expected = tokens(pair, 3)
    engine = engine_of(pair)
    engine.capture_kind, engine.captures = EagerStatic, []
    for batch_size in (3, 3, 2):
        assert tokens(pair, batch_size) == expected
    assert len(engine_of(pair).idle) == 2
    assert all(session.captures.known for sessions in engine_of(pair).idle for session in sessions.every)


class Recorded:
    """A capture that counts its replays; `faults` are what they raise."""

    after, layers, faults = 2, 8, ()

    def __init__(self, forward, inputs):
        if self.faults[:1] == ("made",):
            raise ValueError("first\nsecond")
        self.forward, self.replays = forward, 0

    def __call__(self, inputs):
        self.replays += 1
        if self.faults:
            raise ValueError(" first\nsecond\nlast \n")
        return self.forward(*inputs)


def test_a_new_capture_is_compared_a_few_times_and_then_trusted():
    calls = []

    def forward(x):
        calls.append(x)
        return x, x

    captures = Captures(Recorded)
    counts = []
    for _ in range(2 + PROOFS + 3):
        captures.run((1,), forward, [torch.ones(1)])
        counts.append(len(calls))
    assert captures.known[(1,)].replays == PROOFS + 3 and captures.uses == {(1,): 5 + PROOFS}
    alone, trial = [1, 2], [4 + 2 * i for i in range(PROOFS)]  # each trial runs the forward twice, once as a replay
    assert counts == [*alone, *trial, *(trial[-1] + 1 + i for i in range(3))]


@pytest.mark.parametrize(("faults", "reason"), [(("made",), "first"), (("run",), "last")])
def test_a_capture_that_fails_is_refused_with_one_line(faults, reason):
    captures, x = Captures(type("Failing", (Recorded,), {"faults": faults})), torch.ones(1)
    with pytest.warns(RuntimeWarning, match=f"{reason}$"):
        results = [captures.run((1,), lambda x: (x, 2 * x), [x])[1].item() for _ in range(4)]
    assert results == [2.0] * 4
    assert captures.refusals == [reason] and captures.known == {} and captures.empty().refused


def test_a_capture_that_is_wrong_is_noticed_and_dropped():
    class Wrong(EagerStatic):
        def __call__(self, inputs):
            logits, hidden = super().__call__(inputs)
            return logits * 1.5, hidden

    plain, replaying = both_sessions(tiny_model("llama"), 1, Wrong)
    for session in (plain, replaying):
        session.extend(torch.tensor([[4, 5, 6]]))
    own = [plain.extend(torch.tensor([[7]])).logits for _ in range(3)]
    with pytest.warns(RuntimeWarning, match="a replayed forward differs from the model's own"):
        replayed = [replaying.extend(torch.tensor([[7]])).logits for _ in range(3)]
    assert torch.allclose(torch.cat(replayed), torch.cat(own), atol=1e-5)


TRUTH, NAN, INF = torch.tensor([1.0, -4.0]), torch.tensor([torch.nan, 2.0]), torch.tensor([-torch.inf, 2.0])


@pytest.mark.parametrize(
    ("replayed", "truth", "alike"),
    [
        (TRUTH + 0.04, TRUTH, True),
        (TRUTH + 0.2, TRUTH, False),
        (TRUTH.double(), TRUTH, False),
        (TRUTH.view(1, 2), TRUTH, False),
        (TRUTH.double() + 1e-10, TRUTH.double(), True),
        (TRUTH.double() + 1e-8, TRUTH.double(), False),
        # A padded vocabulary has logits of minus infinity; one prompt's may be not numbers at all.
        *((odd.clone(), odd, True) for odd in (NAN, INF, NAN[:1], INF[:1])),
        *((torch.stack([odd[0], torch.tensor(3.0)]), odd, False) for odd in (NAN, INF)),
        *((torch.tensor([2.0, 2.0]), odd, False) for odd in (NAN, INF)),
    ],
)
def test_a_replay_is_compared_in_format_shape_and_value(replayed, truth, alike):
    kind = type("Fixed", (Recorded,), {"__call__": lambda self, inputs: (truth, replayed)})
    captures = Captures(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            captures.run((1,), lambda x: (truth, truth), [truth])
    assert captures.refused != alike


# -- captures are dropped with what they captured -------------------------------------------------------------------------


def decoded(pair):
    return generate(pair, [PROMPT], "autoregressive", temperature=0, max_new_tokens=6)[0].token_ids


def write(model):
    model.lm_head.weight.mul_(-1)


def scale(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 99


def hook(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * -1.5)


@pytest.mark.parametrize(("change", "left"), [(write, "the same"), (scale, "others"), (hook, "none")])
def test_captures_of_a_model_that_changes(change, left):
    """What is written is seen; for attributes that are set, others are made; a model with hooks is not captured."""
    model = tiny_model("llama").double()
    pair = ModelPair(target=model, end_ids=())
    engine_of(pair).capture_kind = EagerStatic
    before, _ = decoded(pair), decoded(pair)
    captured = engine_of(pair).idle[0].target.captures
    assert captured.known
    change(model)
    assert decoded(pair) == decoded(ModelPair(target=model, end_ids=())) != before
    if left == "none":
        assert engine_of(pair).captures == [None]
    else:
        again = engine_of(pair).idle[0].target.captures
        assert again.known and (again is captured) == (left == "the same")


class Small(nn.Module):
    """A model with a config and one linear layer."""

    def __init__(self):
        super().__init__()
        inner = SimpleNamespace()
        self.config = SimpleNamespace(get_text_config=lambda decoder=False: inner if decoder else None, chosen=["a"])
        self.layer = nn.Linear(8, 4)
        self.eval()


def swapped(model):
    model.layer.weight = nn.Parameter(model.layer.weight.detach().clone())


def moved(model):
    model.layer.weight.data = model.layer.weight.data.clone()


def renamed(model):
    model.layer = nn.Linear(8, 4).train(False)


@pytest.mark.parametrize(
    "change",
    [
        swapped,
        moved,
        renamed,
        lambda model: model.layer.train(),
        lambda model: model.layer.register_forward_hook(lambda *_: None),
        lambda model: model.layer.register_forward_pre_hook(lambda *_: None),
        lambda model: vars(model.layer).update(forward=nn.Linear.forward),
        lambda model: model.layer.weight.requires_grad_(False),
        lambda model: model.register_buffer("more", torch.zeros(1)),
        lambda model: model.double(),
        lambda model: setattr(model.layer, "scale", 2.0),
        lambda model: setattr(model.layer, "function", torch.relu),
        lambda model: model.config.chosen.append("b"),
    ],
)
def test_what_a_capture_takes_for_granted(change):
    model = Small()
    before = CaptureGuard(model)
    with torch.no_grad():
        model.layer.weight += 1  # written into: a capture sees that
    assert before == CaptureGuard(model) and before.asks_gradients and before != 3
    change(model)
    assert before != CaptureGuard(model)
    assert not CaptureGuard(model.requires_grad_(False)).asks_gradients


def test_a_capture_takes_the_code_of_classes_for_granted_but_no_recorders_of_hidden_states(monkeypatch):
    model = llama_pair().target
    before = CaptureGuard(model)
    model(input_ids=torch.ones(1, 2, dtype=torch.int64), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())  # transformers leaves them there
    assert before == CaptureGuard(model) and not before.hooks and not CaptureGuard(model).hooks
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert before != CaptureGuard(model)


@pytest.mark.parametrize("change", [lambda session: session.reserve(97), lambda session: session.select([1, 0])])
def test_captures_go_with_the_keys_and_values_that_they_write(change):
    _, session = both_sessions(tiny_model("llama"), 2)
    for token in range(3):
        session.extend(torch.tensor([[token], [token]]))
    assert session.captures.known
    change(session)
    assert not session.captures.known


@pytest.mark.parametrize("captured", [False, True])
def test_a_dropped_session_frees_its_caches_and_captures_without_the_garbage_collector(captured):
    """A large cache must not wait for a collection, nor a CUDA graph be freed while another one is captured."""
    session = both_sessions(tiny_model("llama"), 2)[captured]
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


# -- which models and shapes are captured, and where ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "fixed"),
    [
        ({}, True),
        ({"num_experts": 4}, False),
        ({"num_local_experts": 4}, False),
        ({"n_routed_experts": 4}, False),
        ({"num_experts": 0}, True),
        ({"rope_parameters": {"rope_type": "longrope"}}, False),
        ({"rope_parameters": {"rope_type": "linear"}}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "theta": 1.0}}, False),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic"}}, False),
    ],
)
def test_forwards_that_branch_on_values_are_not_captured(config, fixed):
    text_config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**config))
    assert static_flow(SimpleNamespace(config=text_config, modules=lambda: [])) == fixed


def test_families_that_route_and_models_with_adapters_are_not_captured():
    assert {name for name in FAMILIES if not static_flow(tiny_model(name))} == {"mixtral", "qwen3_moe"}
    assert not static_flow(Adapted(tiny_model("llama")))


@pytest.mark.parametrize(("option", "wanted"), [("auto", True), (True, True), ("off", False), (False, False)])
def test_what_a_device_uses(option, wanted):
    engine = Engine((), EngineOptions(cuda_graphs=option))
    for device, graphs in (("cuda", wanted), ("cpu", False), ("meta", False)):
        model = nn.Linear(2, 2).requires_grad_(False)
        model.device, model.config = torch.device(device), hf.LlamaConfig(num_hidden_layers=2)
        captures = engine._captures(CaptureGuard(model), model)
        assert (captures is not None) == graphs
        assert captures is None or (captures.kind is GraphForward and captures.num_layers == 2)


def test_models_in_training_are_not_captured():
    pair = ModelPair(target=tiny_model("llama").requires_grad_(True))
    engine_of(pair).capture_kind = EagerStatic
    generate(pair, [PROMPT], "autoregressive", max_new_tokens=4)
    assert engine_of(pair).captures == [None]


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


def test_captures_that_would_only_replace_each_other_are_not_made():
    assert [Captures(StaticForward, layers).most for layers in (1, 2, 1024, 1500)] == [4096, 2048, 4, 4]
    captures = Captures(Recorded, num_layers=2)  # at most 4 at a time
    assert captures.empty().num_layers == 2

    def run(key, times):
        for _ in range(times):
            captures.run((key,), lambda x: (x, x), [torch.ones(1)])

    for key in range(4):
        run(key, 3 + key)
    run(9, 6)
    assert set(captures.known) == {(0,), (1,), (2,), (3,)}  # used twice as often as the least used, not more
    run(9, 1)
    assert set(captures.known) == {(1,), (2,), (3,), (9,)} == set(captures.unproven)


def test_counts_of_rare_shapes_are_forgotten(monkeypatch):
    monkeypatch.setattr(capture, "SHAPES", 6)
    captures = Captures(StaticForward)
    for key in range(100):
        captures.run((key,), lambda: None, [])
    assert len(captures.uses) <= 6 and (99,) in captures.uses
