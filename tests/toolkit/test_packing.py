"""Packed weights against the models' own: sessions, decoding; weights that change; what is left alone; the choices."""

from __future__ import annotations

import json
import threading
import time
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.toolkit.adapted import Adapted
from toolkit import ModelPair, generate
from toolkit.engine import open_session, packing
from toolkit.engine.engine import EngineOptions, engine_of
from toolkit.engine.packing import ROWS, PackedLinears, packable
from toolkit.files.digests import cache_folder
from toolkit.files.measured import measured
from toolkit.testing import FAMILIES, VOCAB, tiny_model

PROMPTS = [[5, 9, 11, 7], [6, 3, 8], [12, 4]]
PACKABLE = bool(packable(nn.Linear(4, 4), large=False))
on_this_torch = pytest.mark.skipif(not PACKABLE, reason="this torch or processor has no packed products")
ON = EngineOptions(packed="on")


def readings(session, seed=5):
    """Logits and states of a prompt, a chain and a tree, with a move in between."""
    generator = torch.Generator().manual_seed(seed)
    read = [session.extend(torch.randint(3, VOCAB, (2, 7), generator=generator), counts=[7, 4])]
    for _ in range(3):
        chain = session.extend(torch.randint(3, VOCAB, (2, 3), generator=generator), last=3)
        tree = torch.randint(3, VOCAB, (2, 3), generator=generator)
        read += [chain, session.extend(tree, parents=torch.tensor([[-1, -1, 1], [-1, 0, 0]]), last=3)]
        session.keep(torch.tensor([[2], [1]]))
    return torch.cat([tensor.flatten() for reading in read for tensor in (reading.logits, reading.hidden)])


def alike(left, right, tolerance=1e-5):
    return torch.allclose(left, right, rtol=0, atol=tolerance * float(right.abs().max()))


def packed_readings(pair):
    return readings(engine_of(pair).open(2, 64).target)


@on_this_torch
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_weights_compute_the_same_and_only_within_sessions(family):
    model = tiny_model(family)
    pair = ModelPair(target=model, end_ids=(), options=ON)
    expected = readings(open_session(model, 2, 64))
    assert alike(packed_readings(pair), expected) and engine_of(pair).packed
    assert all("forward" not in vars(module) for module in model.modules())
    assert torch.equal(readings(open_session(model, 2, 64)), expected)


@on_this_torch
def test_bfloat16():
    model = tiny_model("llama").bfloat16()
    expected = readings(open_session(model, 2, 64))
    assert alike(packed_readings(ModelPair(target=model, end_ids=(), options=ON)).float(), expected.float(), 3e-2)


@on_this_torch
def test_a_layer_is_stock_where_stock_is_faster(monkeypatch):
    """Bit for bit: at other numbers of rows, and where there are too many."""
    monkeypatch.setattr(packing, "ROWS", (1, 2, 4, 8, 16))
    monkeypatch.setattr(packing, "_trials", lambda modules: {packing._key(m): (0.5, [8, 2, 8]) for m in modules})
    torch.manual_seed(0)
    layer = nn.Linear(1024, 512)
    linears = PackedLinears(nn.Sequential(layer))
    linears.refresh()
    with torch.inference_mode():
        for rows in range(40):
            x = torch.randn(rows, 1024)
            expected = layer(x)
            with linears:
                result = layer(x)
            assert torch.allclose(result, expected, atol=1e-5)
            if rows not in (2, 3, *range(8, 16)):
                assert torch.equal(result, expected)
        layer.bias += 1
        with linears:
            assert torch.allclose(layer(x), expected + 1, atol=1e-5)


@on_this_torch
def test_models_that_share_a_layer_are_decoded_at_the_same_time():
    """Whichever forward pass ends first: neither fails, and no layer keeps a packed weight."""
    shared = nn.Linear(8, 8)
    first, second = PackedLinears(nn.Sequential(shared), "on"), PackedLinears(nn.Sequential(shared), "on")
    first.refresh()
    with first:
        second.refresh()  # another thread's, while the first is under way
        assert len(second.products) == 1
        second.__enter__()
    assert "forward" not in vars(shared)
    second.__exit__()
    assert "forward" not in vars(shared)


@on_this_torch
def test_a_failing_forward_leaves_the_model_as_it_was():
    pair = ModelPair(target=tiny_model("llama"), end_ids=(), options=ON)
    session = engine_of(pair).open(1, 16).target

    def stop(*args):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), pair.target.get_output_embeddings().register_forward_hook(stop):
        session.extend(torch.tensor([[4, 5]]))
    assert all("forward" not in vars(module) for module in pair.target.modules())


# -- weights and modules that change between two calls --------------------------------------------------------------------


def counted(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(-2)


def through_data(model):
    for module in packable(model, large=False):
        module.weight.data[1::2].mul_(-1)


def through_numpy(model):
    model.lm_head.weight.detach().numpy()[:] *= -1


def through_one_swap(model):
    weight = model.model.layers[0].mlp.up_proj.weight.data
    weight[:, :2] = weight[:, :2].flip(1).clone()


def through_rows(model):
    model.lm_head.weight.data[3:9] = model.lm_head.weight.data[3:9].flip(0).clone()


def loaded(model):
    model.load_state_dict({name: -tensor for name, tensor in model.state_dict().items()})


def loaded_in_place_of_others(model):
    model.load_state_dict({name: -tensor for name, tensor in model.state_dict().items()}, assign=True)


def merged(model):
    """As PEFT merges an adapter."""
    generator = torch.Generator().manual_seed(3)
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data += torch.randn(weight.shape, generator=generator)


def replaced(model):
    model.lm_head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False).requires_grad_(False)


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.embed_tokens.weight.data.mul_(-1.5)


WRITES = [
    counted,
    through_data,
    through_numpy,
    through_one_swap,
    through_rows,
    loaded,
    loaded_in_place_of_others,
    merged,
    replaced,
    tied,
]


@on_this_torch
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("inference", [False, True])
def test_what_is_written_is_read_by_the_next_call(write, inference):
    model = tiny_model("llama").requires_grad_(False)
    pair = ModelPair(target=model, end_ids=(), options=ON)
    if inference:
        with torch.inference_mode():  # tensors without versions at all
            for module in packable(model, large=False):
                module.weight = nn.Parameter(module.weight.clone(), requires_grad=False)
    before = packed_readings(pair)
    assert alike(packed_readings(pair), before, 1e-6)
    with torch.inference_mode(inference):
        write(model)
    expected = readings(open_session(model, 2, 64))
    assert alike(packed_readings(pair), expected) and not alike(expected, before, 1e-3)


@on_this_torch
def test_embeddings_that_are_resized_between_two_calls():
    model = tiny_model("llama").requires_grad_(False)
    pair = ModelPair(target=model, end_ids=(), options=ON)
    packed_readings(pair)
    model.resize_token_embeddings(VOCAB + 7)
    assert alike(packed_readings(pair), readings(open_session(model, 2, 64)))


@on_this_torch
def test_adapters_that_are_switched_between_two_calls():
    model = Adapted(tiny_model("llama"))
    pair = ModelPair(target=model, end_ids=(), options=ON)
    sequences = []
    for name in ("a", "b", "a"):
        model.set_adapter(name)
        sequences.append(packed_readings(pair))
        assert alike(sequences[-1], readings(open_session(model, 2, 64)))
    with model.disable_adapter():
        assert not alike(packed_readings(pair), sequences[0], 1e-3)
    assert not alike(sequences[0], sequences[1], 1e-3)


@on_this_torch
def test_who_promises_not_to_write_pays_for_no_comparison(monkeypatch):
    pair = ModelPair(target=tiny_model("llama"), end_ids=(), options=EngineOptions(packed="on", writable=False))
    monkeypatch.setattr(packing, "projection", lambda weight: pytest.fail("a weight was read"))
    before = packed_readings(pair)
    counted(pair.target)  # torch counts it
    assert not alike(packed_readings(pair), before, 1e-3)


@on_this_torch
@pytest.mark.parametrize(
    "change", [lambda model: model.double(), lambda model: model.to("meta"), lambda model: torch.compile(model)]
)
def test_models_that_change_their_format_or_device_are_no_longer_packed(change):
    linears = PackedLinears(tiny_model("llama"), "on")
    linears.refresh()
    assert linears.products
    linears.model = change(linears.model)
    linears.refresh()
    assert not linears.products


@on_this_torch
def test_another_number_of_threads():
    pair = ModelPair(target=tiny_model("llama"), end_ids=(), options=ON)
    before, threads = packed_readings(pair), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert alike(packed_readings(pair), before)
    finally:
        torch.set_num_threads(threads)


def test_what_is_left_alone():
    hooked, weighted = nn.Linear(8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    hooked.forward = lambda x: x
    quantised = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)), {nn.Linear}, dtype=torch.qint8)
    for model in (
        hooked,
        weighted,
        quantised,
        nn.Linear(8, 8, device="meta"),
        nn.Linear(8, 8).double(),
        torch.compile(nn.Sequential(nn.Linear(8, 8))),
    ):
        assert packable(nn.ModuleList([model]), large=False) == []
    assert packable(nn.Linear(8, 8)) == []  # small
    linears = PackedLinears(nn.Sequential(nn.Linear(8, 8)), "off")
    linears.refresh()
    assert linears.products == []


@on_this_torch
@pytest.mark.parametrize("method", ["speculative", "mcsd", "dsbd"])
def test_decoding_with_packed_weights(method):
    """Float32: the texts are equal as long as rounding turns no token, which it does not here."""
    sequences = []
    for packed in ("off", "on"):
        pair = ModelPair.from_pretrained("toy/target", "toy/draft", packed=packed)
        sequences.append([g.token_ids for g in generate(pair, PROMPTS, method, max_new_tokens=16, batch_size=2)])
    assert sequences[0] == sequences[1]


# -- choices, memory, and the user's cache ----------------------------------------------------------------------------------


@on_this_torch
def test_shapes_are_tried_once_and_memory_is_said_before(monkeypatch, capsys):
    monkeypatch.setattr(packing, "SMALL", 1)
    monkeypatch.setattr(packing, "GAIN", -100.0)  # whatever it gains
    model, state = tiny_model("llama"), torch.get_rng_state()
    expected = readings(open_session(model, 2, 64))
    for num_lines in (2, 1):
        pair = ModelPair(target=model, end_ids=())
        assert alike(packed_readings(pair), expected) and engine_of(pair).packed
        assert len(capsys.readouterr().err.splitlines()) == num_lines
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(packing, "available_memory", lambda: 1000)
    pair = ModelPair(target=model, end_ids=())
    with pytest.warns(RuntimeWarning, match="^linear layers are not packed: expected .* of free memory, got 0$"):
        assert torch.equal(packed_readings(pair), expected)
    assert not engine_of(pair).packed


@on_this_torch
def test_at_most_a_quarter_of_the_free_memory_and_what_gains_most_comes_first(monkeypatch, capsys):
    layers = [nn.Linear(64, rows) for rows in (100, 200, 300)]  # 25, 50 and 75 KiB
    saved = {100: 0.2, 200: 0.5, 300: 0.3}
    monkeypatch.setattr(packing, "SMALL", 1)
    monkeypatch.setattr(
        packing, "_trials", lambda modules: {packing._key(m): (saved[m.out_features], [8, 1]) for m in modules}
    )
    for free, expected in ((600, {100, 200, 300}), (500, {200, 300}), (400, {200, 100}), (120, {100}), (80, set())):
        monkeypatch.setattr(packing, "available_memory", lambda free=free: free * 1024)
        linears = PackedLinears(nn.Sequential(*layers))
        with pytest.warns(RuntimeWarning, match="not packed") if not expected else nullcontext():
            linears.refresh()
        assert {each.module.out_features for each in linears.products} == expected
        assert ("of 0, a quarter" in capsys.readouterr().err) == (len(expected) in (1, 2))


@on_this_torch
def test_an_operator_that_computes_something_else_is_not_used(monkeypatch):
    packing._operators_work.cache_clear()
    own = packing.product
    monkeypatch.setattr(packing, "product", lambda x, packed, bias=None: own(x, packed, bias) * 1.1)
    try:
        pair = ModelPair(target=tiny_model("llama"), end_ids=(), options=ON)
        with pytest.warns(RuntimeWarning, match="float32 are not packed: the operator gives other results"):
            packed_readings(pair)
        assert not engine_of(pair).packed
    finally:
        packing._operators_work.cache_clear()


def kept_number(name, value=1, calls=None):
    def measure():
        time.sleep(0.05)
        if calls is not None:
            calls.append(value)
        return value

    return measured(name, "numbers", {"here": measure}, lambda entry: isinstance(entry, int), 0.05)["here"]


@pytest.mark.parametrize("content", ["", '{"here": ', "[1]", '{"here": "x"}', '{"elsewhere": 3}', "null", "\xff\xfe"])
def test_measurements_of_others_and_broken_files_are_measured_again(content):
    path = cache_folder() / "numbers.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="latin-1")
    assert kept_number(path.name, 5) == 5 == kept_number(path.name, 6)
    path.unlink()


def test_two_that_measure_at_once_measure_once():
    calls, results = [], []
    threads = [
        threading.Thread(target=lambda n=n: results.append(kept_number("once.json", n, calls))) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and results == calls * 3


def test_a_cache_that_cannot_be_written_to_keeps_nothing(monkeypatch, tmp_path):
    (tmp_path / "acceptance-toolkit").write_text("a file where the folder would be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept_number("numbers.json", 5) == 5 and kept_number("numbers.json", 6) == 6


@on_this_torch
@pytest.mark.parametrize(
    ("stock", "packed", "expected"),
    [
        ([1.0], [0.5], True),
        ([1.0, 3.0, 1.0], [0.5, 0.5, 4.0], True),  # a few slow calls, whosever they are
        ([1.0], [0.95], False),
        ([1.0, 9.0, 9.0], [0.99], False),  # the least times are equal for long: it is tried on, and not believed
    ],
)
def test_a_busy_machine_chooses_nothing_that_it_keeps_for_ever(monkeypatch, stock, packed, expected):
    """Least and median times must agree that packing gains."""
    clock, number = [0.0], {True: 0, False: 0}

    def took(is_packed):
        times = packed if is_packed else stock
        clock[0] += times[number[is_packed] // len(ROWS) % len(times)]
        number[is_packed] += 1
        return torch.zeros(1)

    monkeypatch.setattr(packing, "LAYOUTS", (1,))
    monkeypatch.setattr(packing, "linear", lambda x, weight: took(False))
    monkeypatch.setattr(packing, "product", lambda x, weight: took(True))
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(packing.time, name, lambda: clock[0])
    choice = packing._trial([torch.ones(4, 4)])
    choice = choice and [*choice]  # as JSON holds it
    assert (bool(choice and choice[1]) is expected) and (choice is None) == (len(stock) == 3 and not expected)
    assert measured("undecided.json", "trials", {"here": lambda: choice}, lambda kept: True, 1)["here"] == choice
    again = measured("undecided.json", "trials", {"here": lambda: 7}, lambda kept: True, 1)["here"]
    assert again == (7 if choice is None else choice)
    (cache_folder() / "undecided.json").unlink()


@on_this_torch
@pytest.mark.parametrize("kept", [[0.5, [8, 3]], [0.5, [2, 4]], [8, 2], [0.5], "packed"])
def test_a_choice_of_another_version_is_tried_again(monkeypatch, capsys, kept):
    monkeypatch.setattr(packing, "SMALL", 1)
    model = tiny_model("llama")
    path = cache_folder() / "packed.json"
    packed_readings(ModelPair(target=model, end_ids=()))
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), kept)))
    capsys.readouterr()
    packed_readings(ModelPair(target=model, end_ids=()))
    assert "measuring packed weights" in capsys.readouterr().err
    assert kept not in json.loads(path.read_text()).values()
