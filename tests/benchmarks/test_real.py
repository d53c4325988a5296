"""The draft that ships with `make real`, as it is and as it is made."""

import json

import pytest

from benchmarks.real.folder import SHIPPED
from benchmarks.real.ship import MOST, PATHS, copied, ship
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
