"""Drafts with a reduced output vocabulary: their files, and that no lossless method's output changes."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.toolkit.test_decoding import BEAMS, LOSSLESS
from toolkit import ModelPair, config, generate
from toolkit.engine import TabularModel
from toolkit.errors import InputError
from toolkit.models import reduced
from toolkit.testing import output_pvalue

KEPT = [2, *range(40, 1024, 5)]


@pytest.fixture(scope="module")
def reduced_pair(tmp_path_factory) -> ModelPair:
    """The toy pair, its draft's output layer reduced to 198 of 1,024 tokens, loaded from its folder."""
    pair = ModelPair.toy()
    folder = tmp_path_factory.mktemp("reduced")
    reduced.save(folder, reduced.reduce_vocabulary(pair.draft, KEPT, pair.end_ids))
    pair.tokenizer.save_pretrained(folder)
    return ModelPair.from_pretrained("toy/target", folder)


@torch.no_grad()
def test_kept_logits_are_the_models_own_and_the_others_cannot_be_drawn(reduced_pair):
    ids = torch.randint(3, 1000, (2, 30), generator=torch.Generator().manual_seed(0))
    ours, whole = reduced_pair.draft(ids).logits, ModelPair.toy().draft(ids).logits
    others = sorted(set(range(1024)) - set(KEPT))
    torch.testing.assert_close(ours[..., KEPT], whole[..., KEPT])
    assert bool(ours[..., others].isneginf().all())
    assert reduced_pair.vocab_size == 1024
    target = torch.rand(1024, 96, generator=torch.Generator().manual_seed(1))
    plain = reduced.whole_vocabulary(reduced_pair.draft, target)
    assert torch.equal(plain.lm_head.weight[others], target[others])
    torch.testing.assert_close(plain(ids).logits[..., KEPT], ours[..., KEPT])


def test_a_library_that_knows_nothing_of_it_refuses_the_folder(reduced_pair, tmp_path):
    reduced.save(tmp_path, reduced_pair.draft)
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["speculative", "tail", "mcsd", "dsbd", "block"])
def test_greedy_outputs_are_the_targets_own(name, reduced_pair):
    prompts = ["Tom has 3 red balls and", "def add(a, b):"]
    (plain, ours) = (
        generate(reduced_pair, prompts, method, max_new_tokens=16, temperature=0.0)
        for method in ("autoregressive", name)
    )
    assert [g.token_ids for g in ours] == [g.token_ids for g in plain]
    assert ours[0].counts.num_drafted > 0


@pytest.mark.parametrize("name", [name for name in LOSSLESS if name not in BEAMS])
def test_whole_outputs_follow_the_targets_distribution_where_the_draft_has_fewer_tokens_than_candidates(
    name, table_pair
):
    """The draft can draw token 1 and the end alone: of three or more candidates, two are real."""
    probs = table_pair.draft.probs.clone()
    probs[:, 0] = 0.0
    pair = copy.copy(table_pair)
    pair.draft = TabularModel(probs / probs.sum(-1, keepdim=True))
    pair.drafts = (pair.draft, *table_pair.drafts[1:])
    assert output_pvalue(pair, config.method(name), 4_000, batch_size=4000) > 0.001 / len(LOSSLESS)


def test_bad_vocabularies_are_one_line():
    draft = ModelPair.toy().draft
    with pytest.raises(InputError, match=r"needs the tokens that end a text: add \[2\]"):
        reduced.reduce_vocabulary(draft, [4, 5], (2,))
    with pytest.raises(InputError, match="expected tokens from 0 to 1023"):
        reduced.reduce_vocabulary(draft, [2, 1024], (2,))
