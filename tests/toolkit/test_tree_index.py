"""Slots, positions and masks of trees against paths that are followed node by node; tables that are read as models."""

from __future__ import annotations

import itertools

import pytest
import torch

from toolkit.engine import TabularModel
from toolkit.engine.tree import TreeIndex
from toolkit.errors import InputError

CPU = torch.device("cpu")


class Plain:
    """One row: its context, and the parent of every node."""

    def __init__(self):
        self.context, self.parents = 0, []

    def path(self, node):
        """The node's ancestors and itself, oldest first."""
        ancestors = []
        while node >= 0:
            ancestors.insert(0, node)
            node = self.parents[node]
        return ancestors

    def sees(self, node):
        """Slots that a node may look at."""
        return {*range(self.context), *(self.context + one for one in self.path(node))}

    def keep(self, nodes):
        """The kept nodes in their order, and where `nodes` are afterwards."""
        paths = [self.path(node) for node in nodes]
        kept = sorted(set().union(*paths))
        shared = set(paths[0]).intersection(*paths[1:]) if all(paths) else set()
        rest = [node for node in kept if node not in shared]
        new = {node: rest.index(node) if node in rest else -1 for node in [*kept, -1]}
        parents = [new[self.parents[node]] for node in rest]
        self.context, self.parents = self.context + len(shared), parents
        return kept, [new[node] for node in nodes]


def placed(index, plain, rows, counts, chain, parents):
    """Place a block and compare it with what the plain rows say."""
    width = chain + (0 if parents is None else len(parents[0]))
    starts = [plain[row].context + len(plain[row].parents) for row in rows]
    given = None if parents is None else torch.tensor(parents)
    placement = index.place(rows, width, counts, given)
    counts = [chain] * len(rows) if counts is None else counts
    for place, row in enumerate(rows):
        tree, first = plain[row], starts[place]
        tree.context += counts[place]
        for t in range(chain):
            behind = t - (chain - counts[place])
            if behind < 0:
                assert int(placement.slots[place, t]) == index.capacity  # no token attends to it
                continue
            assert int(placement.slots[place, t]) == int(placement.positions[place, t]) == first + behind
            assert seen(placement, place, t) == set(range(first + behind + 1))
        for n in range(width - chain):
            tree.parents.append(parents[place][n])
        for n in range(width - chain):
            node = len(tree.parents) - (width - chain) + n
            assert int(placement.slots[place, chain + n]) == tree.context + node
            assert int(placement.positions[place, chain + n]) == tree.context + len(tree.path(node)) - 1
            assert seen(placement, place, chain + n) == tree.sees(node)
        assert index.lengths[row] == tree.context + len(tree.parents)
        assert index.context_lengths[row] == tree.context and index.num_nodes(row) == len(tree.parents)
    used = max(max(index.lengths[row] for row in rows), 1)
    assert (
        placement.visible == placement.mask.shape[2] == min(-(-used // index.granule) * index.granule, index.capacity)
    )
    alike = len(set(starts)) == 1 and all(count == chain for count in counts)
    assert placement.start == (starts[0] if alike else None)


def seen(placement, row, token):
    return set(placement.mask[row, token].nonzero().flatten().tolist())


def positions(index, plain, rows, visible):
    """What slots hold: those in use."""
    slots = index.slot_positions(rows, visible)
    assert slots.shape == (len(rows), visible)
    for place, row in enumerate(rows):
        tree = plain[row]
        known = [*range(tree.context), *(tree.context + len(tree.path(n)) - 1 for n in range(len(tree.parents)))]
        assert slots[place, : len(known)].tolist() == known


@pytest.mark.parametrize("granule", [1, 8])
@pytest.mark.parametrize("seed", range(6))
def test_random_trees_are_placed_and_cut_back(seed, granule):
    generator = torch.Generator().manual_seed(seed)

    def some(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    index, plain = TreeIndex(3, 90, CPU), [Plain() for _ in range(3)]
    index.granule = granule
    placed(index, plain, [0, 1, 2], None if seed % 2 else [4, 2, 0], 4, None)
    for step in range(5):
        for rows in ([0, 1, 2], [2, 0] if step % 2 else [1]):
            held = [len(plain[row].parents) for row in rows]
            width = some(1, 4)
            parents = [[some(-1, count + n - 1) for n in range(width)] for count in held]
            chain = 0 if any(held) else some(0, 2)
            placed(index, plain, rows, None, chain, parents)
            positions(index, plain, rows, max(index.lengths[row] for row in rows))
        chosen = [[some(-1, len(tree.parents) - 1) for _ in range(2)] for tree in plain]
        moved, new = index.keep(torch.tensor(chosen))
        known = [tree.keep(nodes) for tree, nodes in zip(plain, chosen, strict=True)]
        assert moved == [kept for kept, _ in known] and new.tolist() == [nodes for _, nodes in known]
        assert index.lengths == [tree.context + len(tree.parents) for tree in plain]
        assert index.context_lengths == [tree.context for tree in plain]
        positions(index, plain, [0, 1, 2], max(index.lengths))


def test_one_path_that_is_kept_is_a_chain_again():
    index, plain = TreeIndex(2, 20, CPU), [Plain(), Plain()]
    placed(index, plain, [0, 1], None, 2, [[-1, 0, 0], [-1, -1, 1]])
    moved, new = index.keep(torch.tensor([[2], [-1]]))
    assert (moved, new.tolist()) == ([[0, 2], []], [[-1], [-1]])
    assert index.lengths == index.context_lengths == [4, 2] and index.ancestors is None
    assert index.slot_positions([0, 1], 4).tolist() == [[0, 1, 2, 3]] * 2
    nothing = index.keep(torch.tensor([[-1], [-1]]))
    assert nothing[0] == [[], []] and nothing[1].tolist() == [[-1], [-1]]
    with pytest.raises(InputError, match=r"^keep: the cache holds no tree nodes, got node ids \[\[0\], \[-1\]\]$"):
        index.keep(torch.tensor([[0], [-1]]))


def test_rows_leave_are_emptied_and_cut():
    index, plain = TreeIndex(3, 20, CPU), [Plain() for _ in range(3)]
    placed(index, plain, [0, 1, 2], [3, 1, 2], 3, [[-1, 0], [-1, -1], [-1, 0]])
    index.select([2, 0])
    plain = [plain[2], plain[0]]
    assert (index.num_rows, index.lengths, index.context_lengths) == (2, [4, 5], [2, 3])
    placed(index, plain, [0, 1], None, 0, [[1], [1]])
    index.reset(0)
    plain[0] = Plain()
    assert (index.lengths, index.context_lengths) == ([0, 6], [0, 3]) and not bool(index.ancestors[0].any())
    index.reset(1)
    plain[1] = Plain()
    placed(index, plain, [0, 1], [4, 2], 4, None)
    index.truncate([2, 9])
    assert index.lengths == index.context_lengths == [2, 2] and index.ancestors is None
    bare = TreeIndex(2, 9, CPU)
    bare.select([1])
    bare.reset(0)
    assert (bare.num_rows, bare.lengths) == (1, [0])


def test_a_cache_that_grows_holds_more():
    index, plain = TreeIndex(1, 3, CPU), [Plain()]
    placed(index, plain, [0], None, 3, None)
    with pytest.raises(InputError, match="^row 0: the cache holds 3 tokens, 4 were asked for$"):
        index.place([0], 1, None, None)
    index.grow(6)
    placed(index, plain, [0], [2], 3, None)
    placed(index, plain, [0], None, 0, [[-1]])
    with pytest.raises(InputError, match="^row 0: the cache holds 6 tokens, 7 were asked for$"):
        index.place([0], 1, None, torch.tensor([[0]]))
    with pytest.raises(InputError, match="^row 0: its context cannot grow while it holds 1 tree nodes$"):
        index.place([0], 1, None, None)
    for count in (-1, 2):
        with pytest.raises(InputError, match=f"^row 0: expected 0 to 1 tokens for the context, got {count}$"):
            index.place([0], 1, [count], None)


# -- tables ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def table():
    return TabularModel.random(3, 2, torch.Generator().manual_seed(0))


def test_a_table_is_read_by_the_last_tokens(table):
    assert (table.order, table.vocab_size, table.probs.shape, table.dtype) == (2, 3, (9, 3), torch.float64)
    assert table.state([]) == 0 and table.state([2]) == 2 and table.state([0, 1, 2, 1]) == 3 * 2 + 1
    assert torch.allclose(table.probs.sum(-1), torch.ones(9, dtype=torch.float64))
    noise = torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(table.probs, noise.softmax(-1))
    sharp = TabularModel.random(3, 2, torch.Generator().manual_seed(0), sharpness=2.0)
    assert torch.allclose(sharp.probs, (2 * noise).softmax(-1))
    weight = table.get_input_embeddings().weight
    assert weight.dtype == torch.float64 and torch.equal(weight, torch.eye(3, dtype=torch.float64))
    assert TabularModel(torch.ones(1, 4)).order == 0
    with pytest.raises(InputError, match="a table over 3 tokens needs a power of that many rows, got 4"):
        TabularModel(torch.ones(4, 3))


@pytest.mark.parametrize("end", [None, 2])
def test_the_distribution_of_whole_outputs(table, end):
    distribution = table.sequence_distribution([1, 0], 3, end)
    known = {}
    for output in itertools.product(range(3), repeat=3):
        cut = output[: output.index(end) + 1] if end in output else output
        prob, text = 1.0, [1, 0]
        for token in cut:
            prob *= float(table.probs[table.state(text), token])
            text.append(token)
        known[cut] = prob
    assert distribution == pytest.approx(known) and sum(distribution.values()) == pytest.approx(1.0)
    assert len(distribution) == (27 if end is None else 8 + 1 + 2 + 4)


def test_a_session_of_a_table_follows_its_rows(table):
    session = table.open_session(2, 6)
    reading = session.extend(torch.tensor([[2, 1, 0], [0, 0, 2]]), counts=[3, 1], last=3)
    for t, text in enumerate(([2], [2, 1], [2, 1, 0])):
        assert torch.equal(reading.logits[0, t], table.probs[table.state(text)].log())
        assert int(reading.hidden[0, t].argmax()) == table.state(text) and float(reading.hidden[0, t].sum()) == 1.0
    assert reading.hidden.dtype == torch.float64
    assert torch.equal(reading.logits[1, 2], table.probs[2].log())
    reading = session.extend(torch.tensor([[1, 2], [1, 1]]), parents=torch.tensor([[-1, 0], [-1, -1]]), last=2)
    for row, node, text in ((0, 0, [0, 1]), (0, 1, [1, 2]), (1, 0, [2, 1]), (1, 1, [2, 1])):
        assert torch.equal(reading.logits[row, node], table.probs[table.state(text)].log())
    session.keep(torch.tensor([[1], [1]]))
    assert session.lengths == [5, 2] and session.num_calls == 2
    session.reserve(6)
    assert session.index.capacity == 6
    session.reserve(7)
    assert session.index.capacity == 7  # a quarter more of what there was is less
    session.reserve(8)
    assert session.index.capacity == 8
    assert session.states.shape == (2, 9) and session.cache_bytes == 2 * 9 * 8
    session.select([1, 0])
    reading = session.extend(torch.tensor([[0], [2]]))
    for row, text in enumerate(([1, 0], [2, 2])):
        assert torch.equal(reading.logits[row, 0], table.probs[table.state(text)].log())
