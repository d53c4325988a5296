"""Sessions against plain uncached runs: every family, trees, ragged rows, random extend and keep."""

from __future__ import annotations

import pytest
import torch

from toolkit.engine import open_session
from toolkit.testing import FAMILIES, VOCAB, WINDOW, ExpectedTree, difference, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_prompts_branches_and_compaction_equal_plain_runs(family):
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(1)
    session = open_session(model, 2, 64)
    prompts = torch.randint(3, VOCAB, (2, 11), generator=generator)
    reading = session.extend(prompts, counts=[11, 6])
    tree = ExpectedTree([prompts[0].tolist(), prompts[1, 5:].tolist()])
    worst = difference(model, reading.logits[:, 0], tree.contexts)

    parents = torch.tensor([[-1, -1, 0, 0, 3, 2], [-1, 0, 1, 0, -1, 4]])
    tokens = torch.randint(3, VOCAB, (2, 6), generator=generator)
    tree.add(tokens, parents)
    reading = session.extend(tokens, parents=parents, last=6)
    for node in range(6):
        worst = max(worst, difference(model, reading.logits[:, node], [tree.text(row, node) for row in range(2)]))

    sequences = [tree.text(0, 4), tree.text(1, 2)]
    assert session.keep(torch.tensor([[4], [2]])).tolist() == [[-1], [-1]]
    assert session.lengths == [len(text) for text in sequences]
    tail = torch.randint(3, VOCAB, (2, 3), generator=generator)
    reading = session.extend(tail, last=3)
    for i in range(3):
        longer = [text + tail[row, : i + 1].tolist() for row, text in enumerate(sequences)]
        worst = max(worst, difference(model, reading.logits[:, i], longer))
    assert worst < 1e-5


@pytest.mark.parametrize("family", ["mistral", "gemma3", "phi3", "llama"])
def test_paths_of_a_tree_that_are_longer_than_the_window_see_their_own_window(family):
    """Two paths of 2 x WINDOW nodes in turns: slots are twice as far apart as positions, and the edge falls among nodes."""
    model, generator, depth = tiny_model(family), torch.Generator().manual_seed(2), 2 * WINDOW
    session = open_session(model, 1, 64)
    prompt = torch.randint(3, VOCAB, (1, 5), generator=generator)
    session.extend(prompt)
    tree = ExpectedTree(prompt.tolist())
    for first in (0, depth):
        parents = torch.arange(first - 2, first + depth - 2).clamp(min=-1).unsqueeze(0)
        tokens = torch.randint(3, VOCAB, (1, depth), generator=generator)
        tree.add(tokens, parents)
        reading = session.extend(tokens, parents=parents, last=depth)
        for node in range(depth):
            assert difference(model, reading.logits[:, node], [tree.text(0, first + node)]) < 1e-5
    positions = session.index.slot_positions([0], session.index.lengths[0])
    assert positions.tolist() == [[*range(5), *(5 + node // 2 for node in range(2 * depth))]]


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
@pytest.mark.parametrize("seed", range(3))
def test_random_extend_and_keep_equal_recomputation(family, seed):
    """Beams: several nodes survive each round, so that the cache keeps branching behind a growing context."""
    model = tiny_model(family)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCAB, (2, 5), generator=generator)
    session, tree = open_session(model, 2, 96), ExpectedTree(prompts.tolist())
    session.extend(prompts)
    for _ in range(4):
        for width in (3, 2):
            held = [len(nodes) for nodes in tree.nodes]
            choices = [torch.randint(-1, max(count, 1), (width,), generator=generator) for count in held]
            parents = torch.stack([c.clamp(max=count - 1) for c, count in zip(choices, held, strict=True)])
            tokens = torch.randint(3, VOCAB, (2, width), generator=generator)
            tree.add(tokens, parents)
            reading = session.extend(tokens, parents=parents, last=width)
            for i in range(width):
                sequences = [tree.text(row, held[row] + i) for row in range(2)]
                assert difference(model, reading.logits[:, i], sequences) < 1e-5
        kept = torch.stack([torch.randint(len(nodes), (2,), generator=generator) for nodes in tree.nodes])
        expected = [tree.keep(row, kept[row].tolist()) for row in range(2)]
        assert session.keep(kept).tolist() == expected
        assert session.lengths == [len(t) + len(n) for t, n in zip(tree.contexts, tree.nodes, strict=True)]


def test_hidden_is_the_state_that_the_output_layer_reads():
    model = tiny_model("gemma2")  # soft-caps its logits: the state must be taken before that
    tokens = torch.tensor([[5, 9, 7]])
    reading = open_session(model, 1, 16).extend(tokens, last=2)
    expected = model.model(tokens).last_hidden_state[:, -2:]
    assert torch.allclose(reading.hidden, expected, atol=1e-6)


def test_rows_join_leave_and_restart():
    model = tiny_model("llama")
    session = open_session(model, 3, 32)
    session.extend(torch.tensor([[4, 5, 6]] * 3))
    session.reset(1)
    session.extend(torch.tensor([[9, 8]]), rows=[1])
    session.select([1, 2])
    reading = session.extend(torch.tensor([[7], [7]]))
    assert difference(model, reading.logits[:, 0], [[9, 8, 7], [4, 5, 6, 7]]) < 1e-5
    session.truncate([2, 1])
    reading = session.extend(torch.tensor([[3], [3]]))
    assert difference(model, reading.logits[:, 0], [[9, 8, 3], [4, 3]]) < 1e-5


def test_cache_memory_is_the_documented_formula():
    """2 x layers x rows x (capacity + 1) x key-value heads x head size x bytes per number."""
    session = open_session(tiny_model("llama"), 3, 40)
    assert session.cache_bytes == 0
    session.extend(torch.tensor([[4, 5]] * 3))
    assert session.cache_bytes == 2 * 3 * 3 * 41 * 2 * 8 * 4
