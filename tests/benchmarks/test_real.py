"""`make real`: the draft that ships, as it is and as it is made; a pair of one's own; what goes on after an interruption."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks.decoders import Decoder
from benchmarks.real import steps
from benchmarks.real.folder import SHIPPED
from benchmarks.real.pair import SIZES, models_of
from benchmarks.real.ship import MOST, PATHS, copied, ship
from benchmarks.speed import measure
from toolkit import ModelPair, generate
from toolkit.errors import InputError
from toolkit.models.pair import TOY, load_draft
from toolkit.models.reduced import CONFIG, WEIGHTS, is_compact, reduce_vocabulary, save


@pytest.mark.skipif(not is_compact(SHIPPED), reason="the weights are in the repository alone")
def test_the_draft_that_ships_is_small_and_its_targets_alone():
    config = json.loads((SHIPPED / CONFIG).read_text("utf-8"))
    assert (SHIPPED / WEIGHTS).stat().st_size <= MOST
    assert not set(PATHS) & set(config)
    card = (SHIPPED / "README.md").read_text("utf-8")
    assert "Apache-2.0" in card
    assert "/tmp/" not in card
    with pytest.raises(InputError, match="another target's draft") as error:
        ModelPair.from_pretrained(TOY / "target", SHIPPED)
    assert "\n" not in str(error.value)


def test_what_ships_decodes_and_says_nothing_of_the_machine(tiny_pair, tmp_path):
    target = ModelPair.from_pretrained(tiny_pair / "target")
    draft = reduce_vocabulary(load_draft(tiny_pair / "target"), range(30), target.end_ids)
    draft.config._name_or_path = str(tmp_path)
    save(tmp_path / "compact", draft, compact=True)
    copied(tmp_path / "compact", tmp_path / "draft")
    assert str(tmp_path) not in "".join(p.read_text("utf-8") for p in (tmp_path / "draft").glob("*.json"))
    pair = ModelPair.from_pretrained(tiny_pair / "target", tmp_path / "draft")
    assert generate(pair, ["the cat"], "speculative", max_new_tokens=4)[0].counts.num_drafted > 0


def test_a_run_without_a_compact_draft_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"exports=\[compact\], got"):
        ship(tmp_path)


def test_of_the_two_models_of_a_folder_the_larger_one_is_the_target(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x" * 99)
    with pytest.raises(InputError, match="expected two models in .* got a$") as error:
        models_of(tmp_path)
    assert "\n" not in str(error.value)
    (tmp_path / "b.gguf").write_bytes(b"x" * 9)
    assert [path.name for path in models_of(tmp_path)] == ["b.gguf", "a"]
    (tmp_path / "a" / "model.safetensors").write_bytes(b"x" * 20)
    assert [path.name for path in models_of(tmp_path)] == ["a", "b.gguf"]


def test_a_pairs_questions_are_of_every_kind_and_spread_over_their_files(tmp_path, monkeypatch):
    message = [{"role": "user", "content": "?"}]
    rows = {
        "humaneval": [{"id": f"code {n}", "prompt": f"def f{n}():"} for n in range(9)],
        "gsm8k_test": [{"id": f"sum {n}", "messages": message} for n in range(9)],
        "spec_bench": [
            {"id": n, "category": c, "messages": message} for n, c in enumerate(["math_reasoning", "qa"] * 4)
        ],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(steps, "SIZES", replace(SIZES, kinds={"code": 3, "mathematics": 4, "chat": 2}))
    questions = steps.kinds(tmp_path)
    ids = ["code 0", "code 3", "code 6", "sum 0", "sum 2", "sum 4", "sum 6", 1, 5]
    assert [question["id"] for question in questions] == ids
    assert [question["category"] for question in questions] == ["code"] * 3 + ["mathematics"] * 4 + ["chat"] * 2
    assert questions[1]["messages"][0]["content"].endswith("def f3():") and questions[-1]["messages"] == message


def test_what_was_measured_is_kept_group_by_group(tmp_path):
    pair, prompts, decoded, broken = ModelPair.toy(), [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], [], {2}

    def run(pair, group, max_new_tokens, seed, temperature):
        if seed in broken:
            raise KeyboardInterrupt
        decoded.append(seed)
        pair.target(input_ids=torch.tensor(group))
        return [[1, 2]]

    shared = {"max_new_tokens": 2, "warm_up": 0, "results": tmp_path / "live.csv"}
    with pytest.raises(KeyboardInterrupt):
        measure(pair, prompts, [Decoder("one", run)], **shared)
    broken.clear()
    for _ in range(2):
        table = measure(pair, prompts, [Decoder("one", run)], **shared)
        assert list(table.group) == decoded == [0, 1, 2] and (table.tokens == 2).all()
