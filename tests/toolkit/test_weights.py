"""Fingerprints cover all weights; heads recognise their draft in any number format, and no other draft."""

from __future__ import annotations

import ast
import copy
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_gen.toy_pair.stamp import stamp
from tests.toolkit.adapted import Adapted
from toolkit import ModelPair, generate
from toolkit.acceptance import AcceptanceHead
from toolkit.acceptance.folder import check_draft, target_of
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.models.fingerprint import CHUNK, Weights, difference, sketch
from toolkit.models.pair import TOY, fingerprint
from toolkit.testing import tiny_model

ROOT = Path(__file__).parents[2]


def negate_every_second(weight):
    weight.view(-1)[1::2] *= -1


def change_the_last(weight):
    weight.view(-1)[-1] += weight.abs().max()


def swap_rows(weight):
    weight[:2] = weight[:2].flip(0).clone()


@pytest.mark.parametrize("change", [negate_every_second, change_the_last, swap_rows])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_weights_are_noticed(change, dtype):
    model = tiny_model("llama")
    other = copy.deepcopy(model).to(dtype)
    assert difference(sketch(model), sketch(other)) is None
    before = fingerprint(other)
    change(other.model.layers[1].mlp.up_proj.weight)
    assert difference(sketch(model), sketch(other)) == "model.layers.1.mlp.up_proj.weight differs"
    assert fingerprint(other) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_same_weights_in_another_format_are_the_same(dtype):
    model = tiny_model("qwen2")
    other = copy.deepcopy(model).to(dtype)
    assert difference(sketch(model), sketch(other)) is None
    assert (fingerprint(model) == fingerprint(other)) == (dtype is torch.float64)
    assert fingerprint(copy.deepcopy(other).float()) == fingerprint(other)  # formats that hold them exactly


def test_every_entry_counts_beyond_one_chunk():
    model = tiny_model("llama")
    model.register_buffer("long", torch.randn(3 * CHUNK + 5))
    near, exact = sketch(model), fingerprint(model)
    for place in (0, CHUNK, 3 * CHUNK, 3 * CHUNK + 4):
        model.long[place] += 1
        assert difference(near, sketch(model)) == "long differs" and fingerprint(model) != exact
        model.long[place] -= 1


def test_shapes_names_and_quantised_weights():
    one, other = sketch(tiny_model("llama")), sketch(tiny_model("qwen2"))
    assert difference(one, other).startswith("only one of them has model.layers.0.self_attn.k_proj.bias")
    wider = {**one, "tensors": {**one["tensors"], "lm_head.weight": [[1, 2], 1.0, [0.0] * 4]}}
    assert difference(one, wider) == "lm_head.weight has shape [61, 32] and [1, 2]"
    model = tiny_model("llama")
    model.config.quantization_config = {"bits": 4}
    with pytest.warns(RuntimeWarning, match="weights in float32 and quantised cannot be compared"):
        assert difference(one, sketch(model)) is None


def test_what_is_remembered_follows_the_weights():
    model = tiny_model("llama")
    first = fingerprint(model)
    assert fingerprint(model) == first
    model.lm_head.weight.data = model.lm_head.weight.data * 2
    assert fingerprint(model) != first


def through_data(weight):
    weight.data.mul_(-1)


def through_numpy(weight):
    weight.detach().numpy()[:] *= -1


def through_one_swap(weight):
    weight.data[:, :2] = weight.data[:, :2].flip(1).clone()


@pytest.mark.parametrize("write", [through_data, through_numpy, through_one_swap])
@pytest.mark.parametrize("inference", [False, True])
def test_writes_that_leave_no_version_are_noticed(write, inference):
    model = tiny_model("llama")
    if inference:
        with torch.inference_mode():  # tensors without versions at all
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)
    first = fingerprint(model)
    with torch.inference_mode(inference):
        write(model.lm_head.weight)
    assert fingerprint(model) != first


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_the_toy_pair_takes_its_heads_in_every_format(dtype):
    pair = ModelPair.toy(dtype=dtype)
    (generation,) = generate(pair, ["Q: 1 + 2\nA:"], "specdec_pp", max_new_tokens=4)
    assert generation.token_ids
    negate_every_second(pair.draft.model.layers[0].mlp.up_proj.weight)
    _, about = AcceptanceHead.load(pair.head)
    with pytest.raises(InputError, match=r"trained for another draft .*: model.layers.0.mlp.up_proj.weight differs"):
        check_draft(about, pair.draft, pair.head)


@pytest.mark.parametrize("kind", ["specdec_pp", "rate"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_for_another_target_is_used_with_one_warning(kind, dtype):
    pair = ModelPair.toy(dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(pair, [[5, 9, 11]], kind, max_new_tokens=3)
    target = copy.deepcopy(pair.target)
    swap_rows(target.model.layers[1].mlp.up_proj.weight)
    other = ModelPair(target=target, draft=pair.draft)
    expected = r"the head in .*head predicts the acceptance of another target than this pair's .*up_proj.weight differs"
    with pytest.warns(RuntimeWarning, match=expected):
        generate(other, [[5, 9, 11]], kind, max_new_tokens=3, head=pair.head)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(other, [[5, 9, 11]], kind, max_new_tokens=3, head=pair.head)


@pytest.mark.parametrize("earlier", [["target_weights"], ["target_weights", "target_fingerprint"]])
def test_heads_that_do_not_name_their_target_are_loaded_without_a_word(earlier, tmp_path):
    pair = ModelPair.toy(dtype="bfloat16")
    head, about = AcceptanceHead.load(pair.head)
    head.save(tmp_path, {name: fact for name, fact in about.items() if name not in ("head", *earlier)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(pair, [[5, 9, 11]], "specdec_pp", max_new_tokens=3, head=str(tmp_path))


def test_trained_heads_record_their_target(tiny_mix, tiny_pair):
    from toolkit.models.pair import load_draft
    from toolkit.training import MixedData

    data = MixedData(tiny_mix, load_draft(tiny_pair / "draft"))
    data.states = {"train": SimpleNamespace(num_positions=1)}
    assert target_of(data.about()).not_of(load_draft(tiny_pair / "target").bfloat16()) is None
    assert target_of(data.about()).not_of(load_draft(tiny_pair / "draft")) is not None


def test_which_adapters_are_at_work_counts():
    model = Adapted(tiny_model("llama"))
    with model.disable_adapter():
        seen = [Weights.of(model)]
    seen.append(Weights.of(model))
    model.set_adapter("b")
    seen.append(Weights.of(model))
    for layer in model.layers():
        layer.scaling["b"] = 2.0
    seen.append(Weights.of(model))
    assert len({one.fingerprint for one in seen}) == 4
    for i, one in enumerate(seen):
        again = Weights.recorded(json.loads(json.dumps(one.facts("draft"))))
        differing = [other for other in seen if again.other_than(other) is not None]
        assert len(differing) == 3 and seen[i] not in differing
    assert seen[-1].fingerprint == Weights.of(model).fingerprint


def test_stamps_are_current(tmp_path):
    pair = ModelPair.toy()
    AcceptanceHead.load(TOY / "head")[0].save(tmp_path, {"draft_fingerprint": "old"})
    stamp(tmp_path, pair)
    about, shipped = read_json(tmp_path / "config.json"), read_json(TOY / "head" / "config.json")
    assert about["draft_fingerprint"] == shipped["draft_fingerprint"] == fingerprint(pair.draft)
    assert about["target_fingerprint"] == shipped["target_fingerprint"] == fingerprint(pair.target)
    for role in ("draft_weights", "target_weights"):
        assert difference(about[role], shipped[role]) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_recorded_weights_are_recognised_in_every_format(dtype):
    model = tiny_model("llama")
    other = copy.deepcopy(model).to(dtype)
    about = json.loads(json.dumps(Weights.of(model).facts("draft")))  # as a summary holds it
    known, here = Weights.recorded(about), Weights.of(other)
    assert known.other_than(here) is None is here.other_than(known)
    assert Weights.recorded(about, "target") is None
    negate_every_second(other.model.layers[0].mlp.up_proj.weight)
    assert known.other_than(Weights.of(other)).endswith("model.layers.0.mlp.up_proj.weight differs")
    assert Weights("a").other_than(Weights("b")) == "fingerprint a, this one b"


@pytest.mark.parametrize("package", ["toolkit", "data_gen", "analysis"])
def test_fingerprints_are_compared_in_one_place(package):
    """Compared as texts elsewhere, they would refuse a head trained in float32 to a draft in bfloat16."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != ROOT / "toolkit" / "models" / "fingerprint.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and "fingerprint" in ast.unparse(node)
    ]
    assert not found


def test_training_data_of_a_float32_draft_serve_a_bfloat16_one(tiny_mix, tiny_pair):
    from toolkit.models.pair import load_draft
    from toolkit.training import MixedData
    from toolkit.training.checkpoints import check_resumable, warm_start

    data = MixedData(tiny_mix, load_draft(tiny_pair / "draft", dtype="bfloat16"))
    trained = Weights.of(load_draft(tiny_pair / "draft"))
    head = AcceptanceHead(16)
    checkpoint = {"about": {**trained.facts(), "head": head.config}}
    check_resumable(checkpoint, head, data.weights, tiny_mix)
    warm_start(head, None, data.weights)
    with pytest.raises(InputError, match="another draft"):
        check_resumable(checkpoint, head, Weights.of(tiny_model("llama")), tiny_mix)
