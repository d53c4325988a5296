"""What makes training random, and how long a capture is on trial."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from toolkit.engine import capture
from toolkit.engine.capture import PROOFS, CaptureGuard, Captures
from toolkit.engine.facts import check_evaluation
from toolkit.errors import InputError
from toolkit.testing import llama_pair


class Small(nn.Module):
    """A model with a config, and one layer of a kind."""

    def __init__(self, layer=None, training=True, **config):
        super().__init__()
        self.inner = SimpleNamespace(**config)
        self.config = SimpleNamespace(
            get_text_config=lambda decoder=False: self.inner if decoder else None, chosen=["a"]
        )
        self.layer = nn.Identity() if layer is None else layer
        self.train(training)

    @property
    def device(self):
        return torch.device("cpu")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Small(nn.Dropout(0.5)), "dropout of 0.5"),
        (Small(nn.Dropout1d(1.0)), "dropout of 1.0"),
        (Small(nn.Dropout(0.0)), None),
        (Small(nn.Dropout(0.5), training=False), None),
        (Small(attention_dropout=0.1, hidden_dropout=0.2), "attention_dropout=0.1"),
        (Small(router_jitter_noise=0.1), "router_jitter_noise=0.1"),
        (Small(attention_dropout=0.0, drop_path=1, scale=0.5), None),
        (Small(classifier_dropout=0.1, summary_first_dropout=0.1, cls_dropout=0.1), None),
        (Small(attention_dropout=0.1, training=False), None),
    ],
)
def test_training_mode_is_refused_where_it_is_random(model, reason):
    if reason is None:
        check_evaluation(model)
        return
    with pytest.raises(
        InputError, match=f"^expected the draft in evaluation mode, got training mode with {reason}: call"
    ):
        check_evaluation(model, "draft")


def test_checkpointed_gradients_keep_no_cache():
    model = Small()
    model.layer.gradient_checkpointing = True
    with pytest.raises(InputError, match="^expected the model in .* with gradient checkpointing, which keeps no cache"):
        check_evaluation(model)
    model.layer.training = False
    check_evaluation(model)


def swapped(model):
    model.layer.weight = nn.Parameter(model.layer.weight.detach().clone())


def renamed(model):
    model.layer = nn.Linear(8, 4).train(False)


@pytest.mark.parametrize(
    "change",
    [
        swapped,
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
    model = Small(nn.Linear(8, 4), training=False)
    before = CaptureGuard(model)
    with torch.no_grad():
        model.layer.weight += 1  # written into: a capture sees that
    assert before == CaptureGuard(model) and before.asks_gradients and before != 3
    change(model)
    assert before != CaptureGuard(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert not CaptureGuard(model).asks_gradients


def test_a_capture_takes_the_code_of_classes_for_granted(monkeypatch):
    model = Small(nn.Linear(8, 4), training=False)
    before = CaptureGuard(model)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert before != CaptureGuard(model)


def test_recorders_of_hidden_states_change_nothing():
    model = llama_pair().target
    before = CaptureGuard(model)
    model(input_ids=torch.ones(1, 2, dtype=torch.int64), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())  # transformers leaves them there
    assert before == CaptureGuard(model) and not before.hooks and not CaptureGuard(model).hooks


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
    ran = []
    for _ in range(2 + PROOFS + 3):
        captures.run((1,), forward, [torch.ones(1)])
        ran.append(len(calls))
    assert captures.known[(1,)].replays == PROOFS + 3 and captures.uses == {(1,): 5 + PROOFS}
    alone, trial = [1, 2], [4 + 2 * i for i in range(PROOFS)]  # each trial runs the forward twice, once as a replay
    assert ran == [*alone, *trial, *(trial[-1] + 1 + i for i in range(3))]


@pytest.mark.parametrize(("faults", "reason"), [(("made",), "first"), (("run",), "last")])
def test_a_capture_that_fails_is_refused_with_one_line(faults, reason):
    kind = type("Failing", (Recorded,), {"faults": faults})
    captures, x = Captures(kind), torch.ones(1)
    with pytest.warns(RuntimeWarning, match=f"^this model's forwards are run one by one: {reason}$"):
        found = [captures.run((1,), lambda x: (x, 2 * x), [x])[1].item() for _ in range(4)]
    assert found == [2.0] * 4
    assert captures.refusals == [reason] and captures.known == {} and captures.refused


def test_captures_that_would_only_replace_each_other_are_not_made():
    captures = Captures(Recorded, num_layers=2)  # at most 4 at a time

    def run(key, times):
        for _ in range(times):
            captures.run((key,), lambda x: (x, x), [torch.ones(1)])

    for key in range(4):
        run(key, 3 + key)
    run(9, 6)
    assert set(captures.known) == {(0,), (1,), (2,), (3,)}  # used twice as often as the least used, not more
    run(9, 1)
    assert set(captures.known) == {(1,), (2,), (3,), (9,)} == set(captures.unproven)
    assert capture.SHAPES == 4096
