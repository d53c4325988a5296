"""Borders: free leading dimensions, uniforms that meet a probability exactly, impossible tokens, what is not a number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.toolkit.verification.test_multi_draft_rules import pairs
from tests.toolkit.verification.test_tree_walk import two_levels
from toolkit import verification
from toolkit.errors import InputError
from toolkit.sampling import draw
from toolkit.testing import dirichlet_pairs, draft_distributions
from toolkit.types import Proposal
from toolkit.verification import LayerRule, PathRule, SelectionRule, TreeRule, base, schemes
from toolkit.verification.enumeration import candidate_tuples, optimum
from toolkit.verification.optimal import independent_bounds, optimal_acceptance, optimal_acceptances
from toolkit.verification.width import acceptance_probs, fill_probs, layer_width

PATHS, SELECTIONS, TREES, LAYERS = (
    [name for name in verification.names() if isinstance(verification.get(name), kind)]
    for kind in (PathRule, SelectionRule, TreeRule, LayerRule)
)
HALF = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64), torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)


def uniforms(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# -- leading dimensions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", list(schemes.SCHEMES))
@pytest.mark.parametrize("num_drafts", [1, 3, 6])
def test_candidates_of_many_nodes_are_those_of_each_alone(how, num_drafts):
    """Four tokens, some with zeros: six candidates are more than there are."""
    _, q = pairs(8)
    drawn = uniforms(4, 6, num_drafts)
    given = draft_distributions(q, num_drafts, how) if how == "independent" else q
    given = given.reshape(4, 6, *given.shape[1:])
    tokens, counts = schemes.candidates(how, given, drawn)
    assert tokens.shape == (4, 6, num_drafts) and counts.shape == (4, 6)
    for a in range(4):
        for b in range(6):
            alone, count = schemes.candidates(how, given[a, b], drawn[a, b])
            assert alone.tolist() == tokens[a, b].tolist() and int(count) == int(counts[a, b])
            assert alone[int(count) :].tolist() == [0] * (num_drafts - int(count))


def test_the_most_probable_of_many_nodes_are_those_of_each_alone():
    logits = uniforms(4, 5, 7)
    logits[0, 0, 2:] = -torch.inf
    tokens, counts = schemes.most_probable(logits, 3)
    assert counts[0].tolist() == [2, 3, 3, 3, 3]
    for a in range(4):
        for b in range(5):
            alone, count = schemes.most_probable(logits[a, b], 3)
            wanted = sorted(range(7), key=lambda token, at=(a, b): -float(logits[at][token]))[: int(count)]
            assert alone.tolist() == tokens[a, b].tolist() == wanted + [0] * (3 - int(count))
            assert schemes.top_tokens(logits[a, b], 9)[:2].tolist() == wanted[:2]


def test_optima_of_many_pairs_are_those_of_each_alone():
    p, q = (distribution.reshape(4, 6, 4) for distribution in pairs(8))
    for how in ("iid", "without_replacement", "greedy"):
        for num_drafts in (1, 2, 3):
            together = optimal_acceptances(p, q, num_drafts, how)
            alone = [
                optimal_acceptance(*pair, num_drafts, how)
                for pair in zip(p.flatten(0, 1), q.flatten(0, 1), strict=True)
            ]
            assert together.flatten().tolist() == pytest.approx(alone, abs=1e-14)
            assert optimal_acceptances(p[:2, :0], q[:2, :0], num_drafts, how).shape == (2, 0)


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_bounds_of_independent_draws_are_met(num_drafts):
    """An upper bound always; on these pairs the optimum itself."""
    p, q = pairs(num_random=80)
    distributions = draft_distributions(q, num_drafts, "independent")
    bounds = independent_bounds(p, distributions)
    assert torch.allclose(bounds, optimum(candidate_tuples("independent", distributions), p), atol=1e-9, rtol=0)
    assert torch.equal(independent_bounds(p.reshape(4, 24, 4), distributions.reshape(4, 24, -1, 4)).flatten(), bounds)
    assert float(independent_bounds(p[5], distributions[5])) == pytest.approx(float(bounds[5]), abs=1e-14)
    assert independent_bounds(p.float(), distributions.float()).dtype == torch.float64


def test_later_orders_of_the_bound_look_at_the_set_found_last(monkeypatch):
    """Here the first order's bound is not the optimum, and the second one's is."""
    p = torch.tensor([0.192, 0.001, 0.215, 0.556, 0.036], dtype=torch.float64)
    q = torch.tensor([[0.01, 0.003, 0.379, 0.002, 0.606], [0.313, 0.076, 0.005, 0.606, 0.0]], dtype=torch.float64)
    shuffled = torch.tensor([3, 0, 4, 2, 1])
    others = dirichlet_pairs(1, vocab_size=5)
    many = torch.stack([others[0][0], p, p[shuffled]])
    drafts = torch.stack([others[1].expand(2, 5), q, q[:, shuffled]])
    best = optimum(candidate_tuples("independent", drafts), many)
    assert torch.allclose(independent_bounds(many, drafts), best, atol=1e-12, rtol=0)
    monkeypatch.setattr("toolkit.verification.optimal.ROUNDS", 1)
    assert ((independent_bounds(many, drafts) - best)[1:] > 1e-3).all()


def test_widths_of_many_layers_are_those_of_each_alone():
    p, q = (distribution.reshape(4, 6, 4) for distribution in pairs(8))
    accepted, fills = acceptance_probs(p, q, 3), fill_probs(p, q, 3)
    widths = layer_width(p, q, 3, 0.6)
    for a in range(4):
        for b in range(6):
            assert acceptance_probs(p[a, b], q[a, b], 3).tolist() == pytest.approx(accepted[a, b].tolist(), abs=1e-14)
            assert fill_probs(p[a, b], q[a, b], 3).tolist() == pytest.approx(fills[a, b].tolist(), abs=1e-14)
            assert int(layer_width(p[a, b], q[a, b], 3, 0.6)) == int(widths[a, b])
    counts = (torch.arange(24) % 3 + 1).reshape(4, 6)
    flat = p.flatten(0, 1), q.flatten(0, 1)
    widths = layer_width(p, q, 3, 0.6, 1, counts)
    assert torch.equal(widths.flatten(), layer_width(*flat, 3, 0.6, 1, counts.flatten()))
    assert torch.equal(fill_probs(p, q, 3, counts).flatten(0, 1), fill_probs(*flat, 3, counts.flatten()))


@pytest.mark.parametrize("name", PATHS)
def test_a_shorter_chain_in_a_wider_batch_is_verified_as_if_it_were_alone(name):
    """What lies behind its end counts for nothing, and no length beyond it has a probability."""
    rule, (p, q) = verification.get(name), dirichlet_pairs(60)
    p, q, tokens = p.reshape(12, 5, 4)[:, :4], q.reshape(12, 5, 4)[:, :3], torch.arange(36).reshape(12, 3) % 4
    for count in range(4):
        lengths, residuals = rule.distribution(p, q, tokens, torch.full((12,), count))
        alone, rest = rule.distribution(p[:, : count + 1], q[:, :count], tokens[:, :count])
        assert torch.allclose(lengths[:, : count + 1], alone, atol=1e-14) and not lengths[:, count + 1 :].any()
        assert torch.allclose(residuals[:, : count + 1], rest, atol=1e-14)
        assert torch.allclose(rest[:, count], p[:, count])
        single, _ = rule.distribution(p[0], q[0], tokens[0], count)  # a number will do, too
        assert torch.allclose(single[: count + 1], alone[0], atol=1e-14)
    counts, more = torch.arange(12) % 4, (3, 4)
    leading = rule.distribution(*(values.reshape(*more, *values.shape[1:]) for values in (p, q, tokens, counts)))
    for one, other in zip(leading, rule.distribution(p, q, tokens, counts), strict=True):
        assert torch.equal(one.flatten(0, 1), other)
    assert {one.dtype for one in rule.distribution(p.float(), q.float(), tokens, counts)} == {torch.float32}


@pytest.mark.parametrize("name", [name for name in PATHS if verification.get(name).lossless])
def test_where_p_never_exceeds_q_the_residual_is_p(name):
    p = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.125, 0.125, 0.75]], dtype=torch.float64)
    lengths, residuals = verification.get(name).distribution(p, p[:2], torch.tensor([1, 2]))
    assert torch.equal(residuals, p) and lengths.tolist() == [0, 0, 1]


# -- what a choice is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SELECTIONS)
def test_equal_distributions_accept_the_first_candidate_for_certain(name):
    """mcsd_naive looks at p alone."""
    p = torch.full((4,), 0.25, dtype=torch.float64)
    for num_drafts in (1, 2, 4):
        tokens = torch.arange(num_drafts)
        accept, _ = verification.get(name).distribution(p, p.expand(num_drafts, 4), tokens)
        assert float(accept.sum()) == pytest.approx(num_drafts / 4 if name == "mcsd_naive" else 1.0, abs=0)


# -- uniforms at a border -------------------------------------------------------------------------------------------


def chain(tokens: list[int], q: Tensor, width: int | None = None) -> Proposal:
    """One row that drafts these tokens, all from q."""
    count = torch.tensor([len(tokens)])
    given = torch.tensor([tokens + [0] * ((width or len(tokens)) - len(tokens))], dtype=torch.long)
    return Proposal(given, q.expand(1, given.shape[1], -1), count, count)


def verdict_at(name: str, proposal: Proposal, p: Tensor, test: float, extra: float = 0.5):
    most = proposal.num_nodes
    drawn = torch.tensor([[test] * (2 * most) + [extra] * (most + 1)], dtype=torch.float64)
    return verification.get(name).verify(proposal, p.expand(1, most + 1, -1), drawn)


@pytest.mark.parametrize("name", ["rejection", "block", "specinfer", "mcsd", "spectr", "importance", "greedy_multi"])
def test_a_token_is_accepted_below_its_probability_and_not_at_it(name):
    """p/q = 1/2 of the only drafted token: one candidate, or a chain of one."""
    p, q = HALF
    for test, length in ((0.5 - 1e-9, 1), (0.5, 0)):
        assert verdict_at(name, chain([0], q), p, test, extra=0.999).length.tolist() == [length]


@pytest.mark.parametrize("name", LAYERS)
def test_a_beam_is_kept_below_its_probability_and_not_at_it(name):
    p, q = (one.unsqueeze(0) for one in HALF)
    one, real = torch.ones(1).long(), torch.ones(1, 1, dtype=torch.bool)
    for test, kept in ((0.5 - 1e-9, True), (0.5, False)):
        given = torch.tensor([[test]], dtype=torch.float64)
        assert verification.get(name).walk(p, q, torch.tensor([[0]]), real, one, given)[0].tolist() == [[kept]]


@pytest.mark.parametrize("name", [*PATHS, *SELECTIONS, *TREES])
def test_a_token_that_p_does_not_have_is_never_emitted(name):
    """Token 2 is drafted and has no probability under p: not even the uniform 0 accepts it, alone or behind another."""
    p, q = HALF
    for drafted in ([2], [1, 2], [2, 2], [1, 2, 1]):
        verdict = verdict_at(name, chain(drafted, q), p, 0.0)
        path = [drafted[node] for node in verdict.path[0].tolist() if node >= 0]
        assert len(path) == int(verdict.length) and 2 not in [*path, int(verdict.extra)]


# -- verdicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PATHS)
def test_rows_of_chains_do_not_depend_on_their_neighbours_and_name_what_is_not_a_number(name):
    rule, (p, q) = verification.get(name), dirichlet_pairs(40)
    p, q = p.reshape(8, 5, 4)[:, :4], q.reshape(8, 5, 4)[:, :3]
    count, tokens = torch.tensor([3, 2, 1, 3, 0, 3, 2, 3]), torch.arange(24).reshape(8, 3) % 4
    drawn = uniforms(8, base.num_uniforms(3))
    clean = rule.verify(Proposal(tokens, q, count, count), p, drawn)
    assert clean.valid.all() and (clean.bonus == (clean.length == count)).all()
    steps = torch.arange(3)
    assert torch.equal(clean.path, torch.where(steps < clean.length.unsqueeze(1), steps, -1))
    for row in range(8):
        part = slice(row, row + 1)
        alone = rule.verify(Proposal(tokens[part], q[part], count[part], count[part]), p[part], drawn[part])
        for field in ("path", "length", "extra", "bonus", "valid"):
            assert torch.equal(getattr(alone, field)[0], getattr(clean, field)[row])
    for node, value in ((0, torch.nan), (3, torch.nan), (1, torch.inf)):
        spoilt = p.clone()
        spoilt[3, node, 1] = value
        broken = rule.verify(Proposal(tokens, q, count, count), spoilt, drawn)
        assert broken.valid.tolist() == [row != 3 for row in range(8)]
        for field in ("path", "length", "extra", "bonus"):
            assert torch.equal(getattr(broken, field)[broken.valid], getattr(clean, field)[broken.valid])
    for node, value in ((0, torch.nan), (2, torch.nan), (1, torch.inf)):  # of row 1 the last one fills the batch
        for row, broken_row in ((3, True), (1, node < 2)):
            spoilt = q.clone()
            spoilt[row, node, 1] = value
            broken = rule.verify(Proposal(tokens, spoilt, count, count), p, drawn)
            assert broken.valid.tolist() == [not broken_row or other != row for other in range(8)]
            for field in ("path", "length", "extra", "bonus"):
                assert torch.equal(getattr(broken, field)[broken.valid], getattr(clean, field)[broken.valid])
    nothing = p.clone()
    nothing[5] = 0.0  # no distribution either
    assert rule.verify(Proposal(tokens, q, count, count), nothing, drawn).valid.tolist() == [
        row != 5 for row in range(8)
    ]


class Redraws(SelectionRule):
    """Accepts the first candidate with probability 1/4, and draws from p: often a candidate again."""

    lossless, schemes = False, ("iid",)

    def _distribution(
        self, target_probs: Tensor, draft_probs: Tensor, candidates: Tensor, num_candidates: Tensor
    ) -> tuple[Tensor, Tensor]:
        accept = torch.zeros_like(candidates, dtype=target_probs.dtype)
        accept[..., 0] = torch.where(num_candidates > 0, 0.25, 0.0)
        return accept, target_probs


@pytest.mark.parametrize("rule", [*map(verification.get, [*SELECTIONS, *TREES]), Redraws()])
def test_a_smaller_tree_in_a_wider_batch_is_verified_as_if_it_were_alone(rule):
    """Rows of 0 to 6 nodes, one or two at the context and behind each of those."""
    rows = 70
    p, q = dirichlet_pairs(3, vocab_size=3, seed=2)[0], dirichlet_pairs(6, vocab_size=3)[1].reshape(2, 3, 3)
    drawn = uniforms(rows, base.num_uniforms(6))
    whole = two_levels(rule.schemes[0], q, drawn)
    count = torch.arange(rows) % 7
    together = Proposal(whole.tokens, whole.draft_probs, count, count, whole.parents)
    target = p[torch.cat([torch.zeros(rows, 1, dtype=torch.long), whole.tokens], 1)]
    verdict, lengths = rule.verify(together, target, drawn), set()
    for row, n in enumerate(count.tolist()):
        part = slice(row, row + 1)
        nodes = (together.tokens[part, :n], together.draft_probs[part, :n], count[part], count[part])
        alone = rule.verify(Proposal(*nodes, together.parents[part, :n]), target[part, : n + 1], drawn[part])
        for field in ("length", "extra", "bonus", "valid"):
            assert torch.equal(getattr(alone, field)[0], getattr(verdict, field)[row]), (row, field)
        assert verdict.path[row].tolist() == alone.path[0].tolist() + [-1] * (6 - n)
        assert int(verdict.path[row].max()) < n and bool(verdict.valid[row])
        lengths.add(int(verdict.length[row]))
    assert {0, 1} <= lengths
    assert torch.equal(verdict.extra[count == 0], draw(target[count == 0, 0], drawn[count == 0, 12]))


@pytest.mark.parametrize("name", [*SELECTIONS, *TREES])
def test_candidates_may_share_the_distribution_they_were_drawn_from(name):
    """One distribution per node of the tree instead of one per candidate."""
    rule = verification.get(name)
    if rule.schemes[0] == "independent":
        return
    p, q = dirichlet_pairs(3, vocab_size=3, seed=2)[0], dirichlet_pairs(6, vocab_size=3)[1].reshape(2, 3, 3)
    drawn = uniforms(30, base.num_uniforms(6))
    whole = two_levels(rule.schemes[0], q, drawn)
    target = p[torch.cat([torch.zeros(30, 1, dtype=torch.long), whole.tokens], 1)]
    sources = torch.tensor([0, 0, 1, 1, 2, 2]).expand(30, -1)
    shared = Proposal(
        whole.tokens, whole.draft_probs[:, ::2], whole.num_drafted, whole.num_calls, whole.parents, sources
    )
    expected, verdict = rule.verify(whole, target, drawn), rule.verify(shared, target, drawn)
    for field in ("path", "length", "extra", "bonus", "valid"):
        assert torch.equal(getattr(verdict, field), getattr(expected, field))
    assert len(expected.length.unique()) > 1


@pytest.mark.parametrize("name", [*SELECTIONS, *TREES])
def test_one_row_may_go_on_where_another_one_has_ended(name):
    """One drafted token in each: accepted in the first row, without a probability in the second."""
    q = torch.tensor([0.5, 0.5], dtype=torch.float64).expand(2, 1, 2)
    p = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64)
    one = torch.ones(2, dtype=torch.long)
    proposal = Proposal(torch.zeros(2, 1, dtype=torch.long), q, one, one)
    verdict = verification.get(name).verify(proposal, p, uniforms(2, base.num_uniforms(1)))
    assert verdict.path.tolist() == [[0], [-1]] and verdict.length.tolist() == [1, 0]
    assert verdict.bonus.tolist() == [True, False] and int(verdict.extra[1]) == 1


@pytest.mark.parametrize("name", [*SELECTIONS, *TREES])
def test_rows_of_trees_say_what_is_not_a_distribution(name):
    rule, (p, q) = verification.get(name), HALF
    four = Proposal(
        torch.tensor([[0, 1]] * 4), q.expand(4, 2, 3).clone(), torch.full((4,), 2), torch.full((4,), 2),
        torch.full((4, 2), -1),
    )  # fmt: skip
    spoilt = p.expand(4, 3, 3).clone()
    spoilt[1, 2, 0], spoilt[2] = torch.inf, 0.0
    four.draft_probs[3, 1, 2] = torch.inf
    assert rule.verify(four, spoilt, uniforms(4, base.num_uniforms(2))).valid.tolist() == [True, False, False, False]


# -- parts ----------------------------------------------------------------------------------------------------------


def test_equal_candidates_are_found_wherever_they_are():
    base.check_distinct(
        torch.tensor([[[0, 1, 2], [2, 1, 0]], [[5, 3, 3], [1, 1, 1]]]),
        torch.tensor([3, 3, 2, 1]).view(2, 2, 1) > torch.arange(3),
    )
    for tokens in ([0, 1, 0], [1, 0, 0], [0, 0, 1]):
        with pytest.raises(InputError, match="expected different tokens"):
            base.check_distinct(torch.tensor([[1, 2, 3], tokens]), torch.ones(2, 3, dtype=torch.bool))
