"""Sizes of alphabets along target texts, and acceptance without the optimum."""

import pytest
import torch

from analysis import acceptance
from analysis.multi_draft.target_texts import alphabet_sizes
from analysis.tables.files import read_table
from tests.analysis.test_acceptance import acceptance_config


def test_a_size_is_how_many_tokens_have_a_probability():
    probs = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    assert alphabet_sizes(probs).tolist() == [2, 1, 3]


def test_every_position_counts_once_and_top_k_bounds_the_size(tmp_path):
    cfg = acceptance_config(tmp_path, methods=["specinfer"], num_drafts=[1], alphabet=True)
    cfg.sampling.top_k = 2
    folder = acceptance.run(cfg)
    table, positions = read_table(folder, "alphabet"), int(read_table(folder, "acceptance").positions.max())
    assert table.groupby("model").positions.sum().to_dict() == {"target": positions, "draft": positions}
    assert table["size"].between(1, 2).all()
    assert table.groupby("model").share.sum().tolist() == pytest.approx([1, 1])
    assert table.groupby("model").share_up_to.last().tolist() == pytest.approx([1, 1])


def test_without_the_optimum_acceptance_is_the_same(tmp_path):
    tables = [
        read_table(
            acceptance.run(acceptance_config(tmp_path / str(best), methods=["mcsd"], optimum=best)), "acceptance"
        )
        for best in (True, False)
    ]
    assert tables[0].acceptance.tolist() == tables[1].acceptance.tolist()
    assert tables[0].optimum.notna().all()
    assert tables[1][["optimum", "gap"]].isna().all(axis=None)
