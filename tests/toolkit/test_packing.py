"""Packed weights against the models' own: sessions, decoding; weights that change; what is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit import ModelPair, generate
from toolkit.engine import open_session, packing
from toolkit.engine.engine import engine_of
from toolkit.engine.packing import PackedLinears, packable, packed_for
from toolkit.models.pair import fingerprint
from toolkit.testing import FAMILIES, VOCAB, tiny_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(packing, "LARGE", 1)


def _readings(session, seed=5):
    """Logits and states of a prompt, a chain and a tree, with a move in between."""
    generator = torch.Generator().manual_seed(seed)
    read = [session.extend(torch.randint(3, VOCAB, (2, 7), generator=generator), counts=[7, 4])]
    for _ in range(3):
        chain = session.extend(torch.randint(3, VOCAB, (2, 3), generator=generator), last=3)
        tree = torch.randint(3, VOCAB, (2, 3), generator=generator)
        read += [chain, session.extend(tree, parents=torch.tensor([[-1, -1, 1], [-1, 0, 0]]), last=3)]
        session.keep(torch.tensor([[2], [1]]))
    return torch.cat([part.flatten() for one in read for part in (one.logits, one.hidden)])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_weights_compute_the_same(family):
    model = tiny_model(family)
    packed = PackedLinears(model)
    assert bool(packed.modules)
    expected = _readings(open_session(model, 2, 96))
    readings = _readings(open_session(model, 2, 96, None, packed))
    assert torch.allclose(readings, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_packed_weights_are_used_and_only_within_sessions(monkeypatch):
    model = tiny_model("llama")
    packed = packed_for(model, "auto")
    session = open_session(model, 2, 96, None, packed)
    own = _readings(open_session(model, 2, 96))
    packed.weights = [torch.ops.mkldnn._reorder_linear_weight(2 * m.weight.detach()) for m in packed.modules]
    assert not torch.allclose(_readings(session), own, rtol=1e-2)  # they are what is multiplied by
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch.equal(_readings(open_session(model, 2, 96)), own)


def test_a_failing_forward_leaves_the_model_as_it_was():
    model = tiny_model("llama")
    session = open_session(model, 1, 16, None, packed_for(model, "on"))
    with pytest.raises(RuntimeError, match="stop"), _raising(model):
        session.extend(torch.tensor([[4, 5]]))
    assert all("forward" not in vars(module) for module in model.modules())


def _raising(model):
    def stop(*args):
        raise RuntimeError("stop")

    return model.get_output_embeddings().register_forward_hook(stop)


def test_weights_written_to_are_packed_anew():
    pair = _pair()
    before = engine_of(pair).open(2, 64).target
    first = _readings(before)
    with torch.no_grad():
        pair.target.get_output_embeddings().weight.mul_(2)
    after = _readings(engine_of(pair).open(2, 64).target)
    assert not torch.allclose(after, first, rtol=1e-2)
    expected = _readings(open_session(pair.target, 2, 64))
    assert torch.allclose(after, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def through_data(weights):
    for weight in weights:
        weight.data.mul_(-1)


def through_numpy(weights):
    weights[-1].detach().numpy()[:] *= -1


def through_one_swap(weights):
    weights[0].data[:, :2] = weights[0].data[:, :2].flip(1).clone()


@pytest.mark.parametrize("write", [through_data, through_numpy, through_one_swap])
@pytest.mark.parametrize("inference", [False, True])
def test_writes_that_leave_no_version_are_seen_by_the_next_call(write, inference):
    pair = _pair()
    if inference:
        with torch.inference_mode():  # tensors without versions at all
            for module in packable(pair.target):
                module.weight = nn.Parameter(module.weight.clone(), requires_grad=False)
    first, identity = _readings(engine_of(pair).open(2, 64).target), fingerprint(pair.target)
    with torch.inference_mode(inference):
        write([module.weight for module in packable(pair.target)])
    readings, expected = (_readings(open()) for open in (
        lambda: engine_of(pair).open(2, 64).target, lambda: open_session(pair.target, 2, 64)
    ))  # fmt: skip
    assert torch.allclose(readings, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert not torch.allclose(readings, first, rtol=1e-2)
    assert fingerprint(pair.target) != identity


def test_who_promises_not_to_write_pays_for_no_checks(monkeypatch):
    pair = _pair(weight_check="off")
    monkeypatch.setattr(packing, "checksums", lambda weights: pytest.fail("the weights were read"))
    first = _readings(engine_of(pair).open(2, 64).target)
    with torch.no_grad():
        pair.target.get_output_embeddings().weight.mul_(2)  # counted by torch
    assert not torch.allclose(_readings(engine_of(pair).open(2, 64).target), first, rtol=1e-2)


def test_a_model_that_changes_its_format_is_no_longer_packed():
    pair = _pair()
    engine_of(pair).open(1, 16)
    assert engine_of(pair).packed[0].modules
    pair.target.double()
    read = engine_of(pair).open(1, 16).target.extend(torch.tensor([[4, 5, 6]]))
    assert read.logits.dtype == torch.float64
    assert engine_of(pair).packed[0] is None


@pytest.mark.parametrize("method", ["speculative", "mcsd", "dsbd"])
def test_decoding_with_packed_weights(method):
    """Float32: the texts are equal as long as rounding turns no token, which it does not here."""
    prompts = [[5, 9, 11, 7], [6, 3, 8], [12, 4]]
    texts = [
        [g.token_ids for g in generate(pair, prompts, method, max_new_tokens=16, batch_size=2)]
        for pair in (_pair("off"), _pair("on"))
    ]
    assert texts[0] == texts[1]


def test_what_is_not_packed(monkeypatch):
    assert packed_for(tiny_model("llama"), "off") is None
    assert packable(tiny_model("llama").double()) == []
    small = tiny_model("llama")
    monkeypatch.setattr(packing, "LARGE", 10**9)
    assert packed_for(small, "on") is None
    monkeypatch.setattr(packing, "LARGE", 1)
    monkeypatch.setattr(packing, "AT_MOST", 1000)
    assert packed_for(small, "auto") is None  # more copies than it may take unasked
    assert packed_for(small, "on") is not None
    hooked = nn.Linear(4, 4)
    hooked.forward = lambda x: x
    assert packable(nn.ModuleList([hooked])) == []
    pair = _pair("on")
    pair.target.requires_grad_(True)  # in training: weights are no constants
    engine_of(pair).open(1, 16)
    assert engine_of(pair).packed[0] is None
    assert engine_of(pair).packed[1] is not None


def _pair(cpu_packing="on", **options):
    return ModelPair.from_pretrained("toy/target", "toy/draft", cpu_packing=cpu_packing, **options)
