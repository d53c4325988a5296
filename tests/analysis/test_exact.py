"""Exact acceptance: the optimum is Theorem 3's, rules are at most it, bad input is one line."""

from itertools import chain, combinations

import pytest

from analysis import acceptance
from analysis.tables.files import read_table
from toolkit.config import compose
from toolkit.errors import InputError

P = [0.4, 0.3, 0.3]
Q = [[0.4, 0.3, 0.3], [0.4, 0.0, 0.6], [0.4, 0.15, 0.45]]


def theorem_3(p, q):
    """min over S of p(S) + q(S^c)^2 + 2 q(S) q(S^c) (Khisti et al., arXiv:2410.18234)."""
    sets = chain.from_iterable(combinations(range(len(p)), size) for size in range(len(p) + 1))
    values = []
    for chosen in sets:
        inside = sum(q[i] for i in chosen)
        values.append(sum(p[i] for i in chosen) + (1 - inside) ** 2 + 2 * inside * (1 - inside))
    return min(values)


def config(tmp_path, *words):
    given = [f"target_probs={P}", f"draft_probs={Q}", "num_drafts=[2]"]
    return compose("acceptance", [f"paths.root_dir={tmp_path}", "track=false", *given, *words])


def test_the_optimum_is_theorem_3_and_no_rule_is_above_it(tmp_path):
    table = read_table(acceptance.run(config(tmp_path, "methods=[specinfer,spectr,importance,mcsd]")), "exact")
    best = table[(table.method == "optimum") & (table.scheme == "iid")]
    assert best.acceptance.tolist() == pytest.approx([theorem_3(P, q) for q in Q], abs=1e-12)
    assert best[["q_1", "q_2", "q_3"]].to_numpy().tolist() == Q
    assert (table.acceptance <= table.drafted + 1e-12).all()
    assert (table.drafted <= table.optimum + 1e-9).all()
    mine = table.set_index(["method", "q_2"]).acceptance
    assert mine["specinfer", 0.3] == pytest.approx(1)
    assert mine["importance", 0.15] == pytest.approx(mine["optimum", 0.15].iloc[0])
    assert set(table[table.method == "optimum"].scheme) == {"iid", "without_replacement"}


def test_more_candidates_are_lines_of_their_own(tmp_path):
    table = read_table(acceptance.run(config(tmp_path, "methods=[specinfer]", "num_drafts=[1,3]")), "exact")
    overlap = [sum(min(a, b) for a, b in zip(P, q, strict=True)) for q in Q]
    assert table[(table.K == 1) & (table.method == "specinfer")].acceptance.tolist() == pytest.approx(overlap)
    assert table[table.K == 3].acceptance.mean() > table[table.K == 1].acceptance.mean()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("draft_probs=[[.5,.5]]", "same tokens"),
        ("draft_probs=[[.5,.4,.3]]", "add up to 1"),
        ("draft_probs=[]", "at least one distribution"),
        ("num_drafts=[]", "num_drafts"),
        ("num_drafts=[40]", "V\\^K"),
        ("methods=[mtad]", "choose among candidates"),
    ],
)
def test_bad_input_is_one_line(tmp_path, word, said):
    with pytest.raises(InputError, match=said) as caught:
        acceptance.run(config(tmp_path, word))
    assert "\n" not in str(caught.value)
