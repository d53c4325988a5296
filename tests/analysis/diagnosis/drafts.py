"""Drafts of the toy target that read its states: begun as ours are, and taught some texts, so that they are accepted."""

import torch
from torch.nn.functional import cross_entropy

from toolkit.distillation.data import DraftBatch
from toolkit.distillation.states import TargetStates
from toolkit.drafts.block.training import Blocks, MarkovBlocks, states_by_position
from toolkit.drafts.eagle3.training import Unrolled, states_by_depth
from toolkit.engine.facts import end_ids

ROWS = 400  # of a draft's output layer


def begun(kind, target, texts, drafted):
    """A draft whose rows are of the texts' tokens and some more."""
    tokens = {token for _, produced in texts for token in produced} | set(end_ids(target, None))
    others = [token for token in range(target.config.vocab_size) if token not in tokens]
    kept = sorted([*tokens, *others[: max(ROWS - len(tokens), 0)]])
    settings = {
        "eagle3": Unrolled(depth=drafted),
        "dflash": Blocks(block_size=drafted + 1, num_layers=1),
        "dspark": MarkovBlocks(block_size=drafted, num_layers=1, markov_rank=8),
    }
    return settings[kind].begin(target, kept, 0)


def taught(kind, target, texts, drafted, steps, rate=3e-3):
    """A draft after some steps on texts, each a prompt and what follows."""
    draft = begun(kind, target, texts, drafted)
    source = TargetStates(target, draft.target_layers)
    batch = DraftBatch(texts, [range(len(produced)) for _, produced in texts])
    states = source.of(texts).clone()
    labels = torch.tensor([token for _, produced in texts for token in produced])
    rows = torch.full((target.config.vocab_size,), -1)
    rows[draft.lm_head.kept] = torch.arange(len(draft.lm_head.kept))
    anchors = [list(range(len(prompt) - 1, len(prompt) + len(produced) - 2)) for prompt, produced in texts]
    learnt = [
        weights.requires_grad_(True)
        for name, weights in draft.named_parameters()
        if not name.startswith(("embed_tokens", "lm_head"))
    ]
    optimizer = torch.optim.Adam(learnt, rate)
    width = draft.config.hidden_size
    for _ in range(steps):
        if kind == "eagle3":
            finals = states_by_depth(draft, states, texts, batch.positions, drafted)
        else:
            finals = states_by_position(draft, states, batch, anchors)
        loss = torch.zeros(())
        for final, index in finals:
            logits = draft.lm_head.rows(final[:, :width])
            if kind == "dspark":
                logits = logits + draft.markov_head.markov_w2(final[:, width:])
            loss = loss + cross_entropy(logits, rows[labels[index]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.requires_grad_(False).eval()
