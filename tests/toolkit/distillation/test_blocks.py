"""Block drafts in training: what decoding computes, gradients, and the command from responses to a folder that decodes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from tests.toolkit.test_block_drafts import close, slow_logits
from toolkit import ModelPair, config, distill
from toolkit.distillation.data import DraftBatch
from toolkit.distillation.losses import ForwardKL
from toolkit.distillation.module import OnPolicy
from toolkit.distillation.states import TargetStates
from toolkit.distillation.teachers import OnlineTeacher
from toolkit.drafts.block import format as block_format
from toolkit.drafts.block.training import Blocks, BlockTraining, states_by_position
from toolkit.errors import InputError
from toolkit.sampling import Sampling
from toolkit.testing import tiny_llama
from toolkit.testing.blocks import tiny_block


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_training_sees_what_decoding_computes(kind):
    """Position k of a block that begins at an anchor: the logits of a round there, after k - 1 tokens of the text."""
    target = tiny_llama(32, 3, 1, torch.float64)
    draft = tiny_block(target, kind)
    batch = DraftBatch([([5, 9, 33], [21, 8, 4, 70]), ([7], [60, 12, 11])], [range(4), [0, 2]])
    anchors = [[2, 4], [0, 1]]
    states = TargetStates(target, [0, 1, 2]).of(batch.sequences)
    seen = 0
    columns = [3, 4, 5, 6, 1, 3]  # of the tokens that are looked at
    for depth, (finals, index) in enumerate(states_by_position(draft, states, batch, anchors)):
        for state, number in zip(finals, index.tolist(), strict=True):
            row = int(number >= 4)
            text, column = [*batch.sequences[row][0], *batch.sequences[row][1]], columns[number]
            anchor = column - 1 - depth
            assert anchor in anchors[row]
            logits = draft.lm_head.rows(state[:32])
            if kind == "dspark":
                logits = logits + draft.markov_head.markov_w2(state[32:])
            expected = slow_logits(target, draft, text[: anchor + 1], text[anchor + 1 : column])[depth]
            close(logits, expected[draft.lm_head.kept])
            seen += 1
    assert seen == (9 if kind == "dspark" else 8)


def test_every_seed_step_and_process_begins_blocks_elsewhere():
    target = tiny_llama(32, 3, 1, torch.float64)
    states = TargetStates(target, [0, 1, 2])
    batch = DraftBatch([([5, 9, 33], list(range(20, 60))), ([7], list(range(10, 70)))], [range(40), range(60)])

    def anchors(seed, step, rank):
        own = OnPolicy(0.0, Sampling(), (), seed)
        arguments = (tiny_block(target), OnlineTeacher(target, 1.0), ForwardKL(), 1.0, own, torch.optim.SGD)
        training = BlockTraining(*arguments, states=states, kind=Blocks(anchors=8))
        loop = SimpleNamespace(total_batch_idx=step)
        training.trainer = SimpleNamespace(fit_loop=loop, global_rank=rank, training=True)
        return str([index.tolist() for _, index in training.final_states(batch)])

    streams = [(seed, step, rank) for seed in (0, 1, 2**31) for step in (3, 4) for rank in (0, 1)]
    assert len({anchors(*stream) for stream in streams}) == len(streams)
    assert anchors(1, 3, 1) == anchors(1, 3, 1)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_command_trains_and_exports_a_draft_that_decodes(kind, tiny_pair, tiny_responses, tmp_path):
    folder = distill.run(config.compose("distill", [
        f"pair.target={tiny_pair}/target", "pair.draft=null", f"responses={tiny_responses}", f"kind={kind}",
        "kind.target_layers=[0,1]", "kind.block_size=4", "kind.num_layers=1", "kind.anchors=6", "trainer.max_epochs=4",
        f"loss={'dspark' if kind == 'dspark' else 'cross_entropy'}", "optimizer.lr=3e-3", "vocabulary=200", "logger=csv",
        f"paths.output_dir={tmp_path}/run",
    ]))  # fmt: skip
    scores = json.loads((folder / "metrics.json").read_text())
    assert scores["val/alpha"] > scores["start/alpha"] and scores["val/alpha_3"] > 0
    pair = ModelPair.from_pretrained(tiny_pair / "target", folder / "draft")
    assert pair.draft.settings.kind == kind and len(pair.draft.lm_head.kept) == 200
    assert pair.draft.settings.first == (0 if kind == "dspark" else 1)
    assert torch.equal(pair.draft.embed_tokens.weight, pair.target.get_input_embeddings().weight)
    if kind == "dspark":
        assert pair.draft.markov_head.markov_w2.weight.abs().sum() > 0 and pair.draft.confidence_head is not None
    again = distill.run(config.compose("distill", [
        f"pair.target={tiny_pair}/target", "pair.draft=null", f"responses={tiny_responses}", f"kind={kind}",
        f"from_pretrained={folder}/draft", "trainer.max_epochs=1", "logger=csv", f"paths.output_dir={tmp_path}/again",
    ]))  # fmt: skip
    first = json.loads((again / "metrics.json").read_text())["start/alpha"]
    assert first == pytest.approx(scores["val/alpha"], abs=0.02), "validation looks at the same tokens"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["layers=1"], "layers: kind=dspark takes none"),
        (["kind.block_size=1"], "kind.block_size: expected at least 2, got 1"),
        (["kind.mask_token_id=5000"], "kind.mask_token_id: expected a token below"),
        (["kind.target_layers=[0,7]"], "kind.target_layers: expected ascending layers"),
        (["from_pretrained={other}"], "holds a draft of the kind dflash, expected dspark"),
    ],
)
def test_what_is_refused(words, line, tiny_pair, tiny_responses, tmp_path):
    target = ModelPair.from_pretrained(tiny_pair / "target").target
    block_format.save(tmp_path / "other", Blocks(target_layers=[0, 1]).begin(target, None, 0), "target")
    words = [word.format(other=tmp_path / "other") for word in words]
    with pytest.raises(InputError) as error:
        distill.run(config.compose("distill", [
            f"pair.target={tiny_pair}/target", "pair.draft=null", f"responses={tiny_responses}", "kind=dspark", *words,
            "logger=csv", f"paths.output_dir={tmp_path}/run",
        ]))  # fmt: skip
    assert line in str(error.value) and "\n" not in str(error.value)
