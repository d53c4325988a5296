"""Why an architecture is refused, in the words of its config; which of many forwards stay captured."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch import nn

from toolkit.engine import capture, selfcheck
from toolkit.engine.capture import CaptureGuard, Captures, StaticForward, static_flow
from toolkit.engine.engine import Engine, EngineOptions
from toolkit.errors import InputError


class Model:
    def __init__(self, **own):
        vars(self).update(own)

    def modules(self):
        return []


def model_of(config=None, **own):
    """What messages look at."""
    facts = {"layer_types": ["full_attention"], "model_type": "x", **(config or {})}
    config = SimpleNamespace(**facts)
    config.get_text_config = lambda decoder=False: config
    found = {
        "config": config, "dtype": torch.float32, "device": torch.device("cpu"),
        "get_output_embeddings": lambda: SimpleNamespace(weight=torch.zeros(1)),
        "forward": lambda input_ids, position_ids, use_cache=False: None, **own,
    }  # fmt: skip
    return Model(**found)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (model_of(), None),
        (model_of({"layer_types": None}), None),
        (model_of({"layer_types": ["full_attention", "linear_attention"]}), "it keeps a state"),
        (model_of({"layer_types": ["mamba2"]}), "it keeps a state"),
        (model_of(_is_stateful=True), "it keeps a state"),
        (model_of({"is_encoder_decoder": True}), "it is an encoder-decoder"),
        (model_of(get_output_embeddings=lambda: None), "it has no output embedding"),
        (
            model_of({"_attn_implementation": "flash_attention_2"}),
            r"its attention \(flash_attention_2\) takes no masks",
        ),
        (model_of({"_attn_implementation": "flex_attention"}), r"its attention \(flex_attention\) takes no masks"),
        (model_of({"_attn_implementation": "sdpa"}), None),
        (
            model_of({"_experts_implementation": "grouped_mm"}, dtype=torch.float64),
            r"its experts \(grouped_mm\) know no float64",
        ),
        (model_of({"_experts_implementation": "grouped_mm"}), None),
        (model_of({"_experts_implementation": "eager"}, dtype=torch.float64), None),
    ],
)
def test_what_rules_a_model_out_from_the_start(model, words):
    found = selfcheck.hopeless(model)
    assert found is None if words is None else re.match(words, found)


def test_a_model_without_output_embeddings_of_any_kind_is_ruled_out():
    model = model_of()
    del model.get_output_embeddings
    assert selfcheck.hopeless(model) == "it has no output embedding"


def ahead(input_ids, use_cache):
    """Logits of the first token that change with the others."""
    return SimpleNamespace(logits=input_ids.sum(1).view(-1, 1, 1).float())


def behind(input_ids, use_cache):
    return SimpleNamespace(logits=input_ids[:, :1].view(-1, 1, 1).float())


class Called(Model):
    def __call__(self, **options):
        assert options["use_cache"] is False
        return self.answers(**options)


def called(answers):
    return Called(**vars(model_of()), answers=answers)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (model_of({"alibi": True}), "its attention is biased by slots (alibi), and nodes of a tree are not in order"),
        (model_of({"attn_config": SimpleNamespace(alibi=True)}), "its attention is biased by slots (alibi)"),
        (
            type("BloomForCausalLM", (Model,), {})(**vars(model_of())),
            "its attention is biased by slots (alibi)",
        ),
        (
            model_of({"layer_types": ["sliding_attention", "sparse", "chunked_attention"]}),
            "it has layers of type sparse, which",
        ),
        (model_of({"layer_types": ["zeta", "eta", "full_attention"]}), "it has layers of type eta, which"),
        (model_of({"model_type": "gpt_neo"}), "its attention counts slots, not positions"),
        (model_of(forward=lambda input_ids: None), "its forward takes no positions (position_ids)"),
        (called(ahead), "its attention is bidirectional: a token's logits change with what follows it"),
        (called(behind), "its cached forward differs from its uncached one (what was seen)"),
        (model_of({"layer_types": None}), "its cached forward differs from its uncached one (what was seen)"),
    ],
)
def test_what_may_be_wrong_with_a_model(model, words):
    assert selfcheck.likely(model, "what \n was   seen").startswith(words)


def test_what_was_seen_is_shortened():
    assert selfcheck.likely(model_of(), "x" * 130).endswith(f"({'x' * 120})")


def test_the_config_of_the_decoder_is_asked():
    model, asked = model_of(), []
    config = model.config
    config.get_text_config = lambda decoder: asked.append(decoder) or config
    assert selfcheck.hopeless(model) is None and "differs" in selfcheck.likely(model, "x")
    assert asked == [True, True]


class Tried:
    """A model that is decoded in formats; `faults` says what happens in which."""

    def __init__(self, faults, dtype=None):
        self.faults, self.dtype = faults, dtype

    def to(self, dtype):
        return Tried(self.faults, dtype)


BOTH = [torch.float64, torch.float32]


@pytest.mark.parametrize(
    ("faults", "verdict", "formats"),
    [
        ({}, None, [torch.float64]),
        ({torch.float64: RuntimeError(" no doubles ")}, None, BOTH),
        ({torch.float64: RuntimeError("a"), torch.float32: ValueError(" b ")}, "likely: ValueError: b", BOTH),
        ({torch.float64: selfcheck.Differs("by 3")}, "likely: by 3", [torch.float64]),
        ({torch.float64: InputError("no layers")}, "likely: no layers", [torch.float64]),
    ],
)  # fmt: skip
def test_a_trial_is_made_in_the_finest_format_that_a_model_can(faults, verdict, formats, monkeypatch):
    tried = []

    def check_trees(model, **sizes):
        tried.append((model.dtype, sizes))
        if model.dtype in faults:
            raise faults[model.dtype]

    monkeypatch.setattr(selfcheck, "check_trees", check_trees)
    monkeypatch.setattr(selfcheck, "likely", lambda model, seen: f"likely: {seen}")
    assert selfcheck._try(Tried(faults)) == verdict
    assert selfcheck._try(Tried(faults), 12) == verdict
    assert tried == [*((dtype, {}) for dtype in formats), *((dtype, {"threshold": 12}) for dtype in formats)]


# -- the check's memory, and models that are tried on their own weights ----------------------------------------------


def large(size=10, meta=False, **config):
    model = model_of(config)
    model.parameters = lambda: [SimpleNamespace(numel=lambda: size, is_meta=meta)] * 2
    return model


@pytest.mark.parametrize(
    ("model", "positions", "far"),
    [
        (large(), 10_000, 8),
        (large(size=selfcheck.SMALL // 2), 10_000, 8),
        (large(size=selfcheck.SMALL // 2 + 1), 10_000, None),
        (large(sliding_window=16), 10_000, 16),
        (large(attention_chunk_size=1024, sliding_window=None), 10_000, 1024),
        (large(attention_chunk_size=1025), 10_000, None),
        (large(window_size=32), 10_000, 32),
        (large(window_size=[7, 7]), 10_000, 8),
        (large(), 8 + len(selfcheck.KEPT) + selfcheck.TAIL + 6, 8),
        (large(), 8 + len(selfcheck.KEPT) + selfcheck.TAIL + 5, None),
        (large(meta=True), 10_000, None),
    ],
)
def test_a_class_that_cannot_be_shrunk_is_tried_past_its_windows_if_it_is_small(model, positions, far, monkeypatch):
    tried = []
    copied = SimpleNamespace(to=lambda device: SimpleNamespace(eval=lambda: ("copy", device)))
    monkeypatch.setattr(selfcheck, "max_positions", lambda model: positions)
    monkeypatch.setattr(selfcheck.copy, "deepcopy", lambda one: copied if one is model else None)
    monkeypatch.setattr(selfcheck, "_try", lambda *given: tried.append(given) or "the verdict")
    found = selfcheck._on_own_weights(model, "why")
    if far is None:
        assert found == "its class could not be built tiny, which a check of it needs (why)" and not tried
    else:
        assert found == "the verdict" and tried == [(("copy", "cpu"), far)]


def test_what_was_right_is_remembered_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = selfcheck.memory_file()
    assert path == tmp_path / "acceptance-toolkit" / "architectures.json" and selfcheck._read(path) == []
    monkeypatch.setattr(selfcheck, "REMEMBERED", 3)
    for key in "abcd":
        selfcheck._remember(path, key)
    assert selfcheck._read(path) == ["b", "c", "d"]
    for content in ("no json", "[]", "{}", '{"right": 3}'):
        path.write_text(content)
        assert selfcheck._read(path) == []
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert selfcheck.memory_file() == tmp_path / "home" / ".cache" / "acceptance-toolkit" / "architectures.json"
    (tmp_path / "file").write_text("")
    selfcheck._remember(tmp_path / "file" / "below", "a")  # cannot be written: not remembered


# -- which forwards stay captured -----------------------------------------------------------------------------------------


def test_counts_of_rare_shapes_are_forgotten(monkeypatch):
    monkeypatch.setattr(capture, "SHAPES", 6)
    captures = Captures(StaticForward)
    captures.known, captures.uses = {(9,): None}, {(9,): 1, (1,): 5, (2,): 2, (3,): 4, (4,): 3, (5,): 1}
    captures._forget()
    assert captures.uses == {(9,): 1, (1,): 5, (3,): 4}
    captures.known = dict.fromkeys([(9,), (1,), (3,), (7,)])
    captures.uses |= {(7,): 0, (8,): 9}
    captures._forget()
    assert captures.uses == {(9,): 1, (1,): 5, (3,): 4, (7,): 0}


def test_how_many_forwards_of_a_model_are_captured():
    assert [Captures(StaticForward, layers).most for layers in (1, 2, 1024, 1500)] == [4096, 2048, 4, 4]
    refusals: list[str] = []
    captures = Captures(StaticForward, 2, refusals)
    assert not captures.refused
    refusals.append("x")
    empty = captures.empty()
    assert empty.refused and empty.num_layers == 2 and empty.kind is StaticForward and empty.known == {}


@pytest.mark.parametrize("option", ["auto", "on", True, "off", False])
def test_what_a_device_uses(option):
    engine = Engine((), EngineOptions(cuda_graphs=option))
    for device, graphs in (("cuda", option not in ("off", False)), ("cpu", False), ("meta", False)):
        model = nn.Linear(2, 2).requires_grad_(False)
        model.device, model.config = torch.device(device), hf.LlamaConfig(num_hidden_layers=2)
        captures = engine._captures(CaptureGuard(model), model)
        assert (captures is not None) == graphs
        assert captures is None or (captures.kind is capture.GraphForward and captures.num_layers == 2)


@pytest.mark.parametrize(
    ("config", "fixed"),
    [
        ({}, True),
        ({"num_experts": 4}, False),
        ({"num_local_experts": 4}, False),
        ({"n_routed_experts": 4}, False),
        ({"num_experts": 0}, True),
        ({"rope_parameters": {"rope_type": "dynamic"}}, False),
        ({"rope_parameters": {"rope_type": "longrope"}}, False),
        ({"rope_parameters": {"rope_type": "linear"}}, True),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "theta": 1.0}}, False),
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic"}}, False),
    ],
)
def test_forwards_that_branch_on_values_are_not_captured(config, fixed):
    assert static_flow(model_of(config)) == fixed


def test_a_replay_is_compared_in_format_shape_and_value():
    truth = torch.tensor([1.0, -4.0])
    assert capture._alike(truth + 0.04, truth) and not capture._alike(truth + 0.2, truth)
    assert not capture._alike(truth.double(), truth) and not capture._alike(truth.view(1, 2), truth)
    exact = truth.double()
    assert capture._alike(exact + 1e-10, exact) and not capture._alike(exact + 1e-8, exact)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_no_numbers_neither_hide_a_difference_nor_are_one(odd):
    """A padded vocabulary has logits of minus infinity; one prompt's may be not numbers at all."""
    truth = torch.tensor([odd, 2.0])
    assert capture._alike(truth.clone(), truth)
    assert not capture._alike(torch.tensor([odd, 3.0]), truth) and not capture._alike(torch.tensor([2.0, 2.0]), truth)
    assert capture._alike(truth[:1], truth[:1]) and not capture._alike(torch.zeros(1), truth[:1])
