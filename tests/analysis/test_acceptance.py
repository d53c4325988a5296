"""Acceptance along target text: means that agree with enumeration, tables that add up, parts that are kept."""

import numpy as np
import pandas as pd
import pytest
import torch

from analysis import acceptance, sweep, walk
from analysis.acceptance_table import QUANTITIES
from analysis.advice import TreeCost, advise, as_sentence, expected_tokens, shapes
from analysis.block_efficiency import block_efficiency_table
from analysis.comparison import Bootstrap
from analysis.expectation import expected_acceptance, optima, spread_uniforms
from analysis.grid import expand
from analysis.laws import Text, laws_along
from analysis.rows import load_rows
from analysis.tables import read_table
from tests.analysis.table_sweeps import PAIR, sweep_config, table
from toolkit import ModelPair, config
from toolkit.errors import InputError
from toolkit.sampling import Sampling
from toolkit.verification.enumeration import emission

METHODS = ["specinfer", "spectr", "importance", "mcsd", "mcsd_naive", "greedy_multi"]
JUDGES = {name: walk.Judge.of(name) for name in METHODS}


def dirichlet(num_pairs, vocab_size=5, seed=0):
    """p, q [P, V]."""
    p, q = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(vocab_size), (2, num_pairs)))
    return p, q


def uniforms(draws, num_pairs, num_drafts):
    """Spread ones, from a fixed seed."""
    return spread_uniforms((draws, num_pairs, num_drafts), torch.Generator().manual_seed(5), torch.float64)


def acceptance_config(folder, **changes):
    """conf/acceptance.yaml on a table pair; `folder` is the root of output folders."""
    cfg = config.compose("acceptance", [f"paths.root_dir={folder}", "sampling.max_new_tokens=12"])
    cfg.pair, cfg.track, cfg.resamples = PAIR, False, 200
    cfg.prompts = {"_target_": "tests.analysis.table_sweeps.IdPrompts", "limit": 20, "split": "dev", "domain": "ids"}
    cfg.num_drafts, cfg.positions, cfg.draws = [1, 2, 3], 2, 2
    cfg.merge_with(changes)
    return cfg


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run over 20 prompts, two parts, tracked offline."""
    return acceptance.run(acceptance_config(tmp_path_factory.mktemp("acceptance"), track=True))


# -- means ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_means_agree_with_enumeration(name, num_drafts):
    p, q = dirichlet(40)
    judge = JUDGES[name]
    exact = emission(judge.rule, judge.drawing, p, q.unsqueeze(1).expand(-1, num_drafts, -1).contiguous())
    got = expected_acceptance(judge.rule, judge.drawing, p, q, uniforms(400, 40, num_drafts))
    for mine, true in ((got.accepted, exact.accepted), (got.drafted, exact.drafted)):
        assert float((mine - true).abs().max()) < 0.1
        assert float((mine - true).mean()) == pytest.approx(0, abs=0.006)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "mcsd_naive"])
def test_one_candidate_is_accepted_with_the_overlap_of_the_laws_exactly(name):
    p, q = dirichlet(30, vocab_size=50)
    got = expected_acceptance(JUDGES[name].rule, JUDGES[name].drawing, p, q, uniforms(1, 30, 1))
    overlap = torch.minimum(p, q).sum(-1)
    assert torch.allclose(got.accepted, overlap, atol=1e-12, rtol=0)
    assert torch.allclose(optima(p, q, 1, JUDGES[name].drawing), overlap, atol=1e-12, rtol=0)


def test_draws_are_spread_evenly_and_uniform():
    values = uniforms(8, 500, 3)
    assert ((values >= 0) & (values < 1)).all()
    assert torch.equal((values * 8).long().sort(0).values, torch.arange(8).view(8, 1, 1).expand(8, 500, 3))
    assert float(torch.corrcoef(values.reshape(-1, 3).T).triu(1).abs().max()) < 0.05


@pytest.mark.parametrize("num_drafts", [3, 4])
def test_optimum_without_the_tail_stays_within_its_bound(num_drafts):
    p, q = dirichlet(6, vocab_size=200, seed=3)
    q = q**6 / (q**6).sum(-1, keepdim=True)
    from toolkit.verification.optimal import optimal_acceptances

    exact = optimal_acceptances(p, q, num_drafts, "without_replacement")
    assert torch.allclose(optima(p, q, num_drafts, "without_replacement"), exact, atol=1e-4, rtol=0)


def test_laws_along_a_text_are_those_of_its_tables():
    target, draft = (config.instantiate(table(seed)) for seed in (1, 2))
    pair = ModelPair(target=target, draft=draft, end_ids=(0,))
    texts = [Text("a", [1, 2, 3], [4, 1, 2, 0]), Text("b", [4], [3, 3])]
    laws = list(laws_along(pair, texts, [[0, 2, 3], [1]], Sampling()))
    for text, chosen, (p, q) in zip(texts, [[0, 2, 3], [1]], laws, strict=True):
        for row, position in enumerate(chosen):
            state = target.state(text.before(position))
            assert torch.allclose(p[row], target.probs[state])
            assert torch.allclose(q[row], draft.probs[state])


def test_a_repetition_penalty_applies_to_what_the_text_holds_so_far():
    pair = config.instantiate(PAIR)
    text = Text("a", [1, 2], [3, 4])
    ((p, _),) = laws_along(pair, [text], [[0, 1]], Sampling(repetition_penalty=2.0))
    ((plain, _),) = laws_along(pair, [text], [[0, 1]], Sampling())
    falls = p / p[:, :1] < plain / plain[:, :1] - 1e-9  # against the end, token 0, which has not come
    assert falls.tolist() == [[False, True, True, False, False], [False, True, True, True, False]]


# -- the command ----------------------------------------------------------------------------------------------------


def test_table_has_a_line_per_method_and_k_and_stays_below_the_optimum(folder):
    lines = read_table(folder, "acceptance")
    assert list(zip(lines.method, lines.K, strict=True)) == [(m, k) for m in METHODS for k in (1, 2, 3)]
    assert set(lines.dataset) == {"ids dev"}
    for name in QUANTITIES:
        assert (lines[f"{name}_low"] <= lines[name] + 1e-12).all()
        assert (lines[name] <= lines[f"{name}_high"] + 1e-12).all()
    assert np.allclose(lines.gap, lines.optimum - lines.acceptance)
    assert (lines.acceptance <= lines.drafted + 1e-9).all()
    assert (lines.drafted <= lines.optimum + 0.05).all(), "but for the noise of the draws"
    single = lines[(lines.K == 1) & (lines.method != "mcsd_naive")]
    assert np.allclose(single.gap, 0, atol=1e-9)
    sums = read_table(folder, "sums")
    assert len(sums) == len(lines) * lines.prompts.iloc[0]
    assert sums.positions.max() == 2


def test_every_output_is_there(folder):
    for name in ("sums", "acceptance", "advice"):
        assert len(pd.read_csv(folder / f"{name}.csv")) == len(read_table(folder, name))
    assert (folder / "figures" / "acceptance-ids_dev.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "acceptance.md").read_text()
    assert "| rule" in text and "## Advice" in text
    (run,) = (folder / "wandb").glob("offline-run-*")
    media = {path.name.split("_")[0] for path in (run / "files" / "media" / "table" / "acceptance").iterdir()}
    assert {"sums", "acceptance", "advice"} <= media


def test_finished_parts_are_kept_and_more_methods_go_on(tmp_path, monkeypatch):
    scored = []
    score = walk.Walk._score
    monkeypatch.setattr(
        walk.Walk,
        "_score",
        lambda self, texts, first, judges: (
            scored.append((first, [judge.method for judge in judges])),
            score(self, texts, first, judges),
        )[1],
    )
    first = acceptance.run(acceptance_config(tmp_path, methods=["mcsd"]))
    before = read_table(first, "acceptance")
    assert scored == [(0, ["mcsd"]), (16, ["mcsd"])]
    assert acceptance.run(acceptance_config(tmp_path, methods=["mcsd"])) == first
    assert len(scored) == 2
    pd.testing.assert_frame_equal(read_table(first, "acceptance"), before)
    assert acceptance.run(acceptance_config(tmp_path, methods=["mcsd", "spectr"])) == first
    assert scored[2:] == [(0, ["spectr"]), (16, ["spectr"])]
    pd.testing.assert_frame_equal(read_table(first, "acceptance").head(3), before)
    next((first / "parts").glob("mcsd-*-000016-*")).write_bytes(b"PAR1")
    acceptance.run(acceptance_config(tmp_path, methods=["mcsd"]))
    assert scored[4:] == [(16, ["mcsd"])]


def test_the_batch_size_does_not_change_the_results(folder, tmp_path):
    other = acceptance.run(acceptance_config(tmp_path, batch_size=3))
    pd.testing.assert_frame_equal(read_table(other, "sums"), read_table(folder, "sums"))


def test_data_sets_are_joined_and_sweeps_give_block_efficiency(folder, tmp_path, capsys):
    grid = {"autoregressive": {}, "mcsd": {"proposer": {"k_config": ["1x1x1", "4x2x1"]}}}
    trees = sweep.run(sweep_config(tmp_path, grid=grid))
    done = acceptance.run(
        acceptance_config(tmp_path, methods=["mcsd"], dataset="others", join=[str(folder)], sweeps=[str(trees)])
    )
    assert list(read_table(done, "acceptance").dataset.unique()) == ["others dev", "ids dev"]
    lines = read_table(done, "block_efficiency")
    assert list(lines.k_config) == ["1x1x1", "4x2x1"]
    assert lines.block_efficiency.is_monotonic_increasing
    rows = load_rows([trees], "sweeps")
    mine = rows[rows["proposer.k_config"] == "4x2x1"]
    assert lines.block_efficiency.iloc[1] == mine.num_generated.sum() / mine.num_target_calls.sum()
    assert capsys.readouterr().out.count("proposer.k_config=") == 2
    with pytest.raises(InputError, match="two runs call their texts 'ids dev'"):
        acceptance.run(acceptance_config(tmp_path, join=[str(folder)]))
    with pytest.raises(InputError, match=r"expected cells with proposer.k_config"):
        block_efficiency_table(rows[rows.method == "autoregressive"], Bootstrap(10))


def test_grids_of_the_command_line_compose():
    trees = expand(config.plain(config.compose("sweep", ["grid=trees", "grid.mcsd.proposer.k_config=[1x1,4x2]"]).grid))
    assert [cell.setting for cell in trees if cell.method == "mcsd"] == ["k=1x1", "k=4x2"]
    assert all(cell.method_config().proposer.k_config for cell in trees if cell.setting.startswith("k="))
    usual = ["grid.speculative.policy.num_drafted=[2,3]", "~grid.oracle", "+grid.block.policy.num_drafted=[4]"]
    cells = expand(config.plain(config.compose("sweep", usual).grid))
    assert {cell.method for cell in cells} == {
        "autoregressive", "speculative", "specdec_pp", "rate", "ceiling", "block",
    }  # fmt: skip


# -- advice ---------------------------------------------------------------------------------------------------------


def test_shapes_are_all_that_fit():
    assert list(shapes([1, 2], 2, 4)) == [(1,), (1, 1), (2,), (2, 1)]
    assert (4, 2, 1) in set(shapes([1, 2, 4], 3, 20))
    assert (4, 2, 1) not in set(shapes([1, 2, 4], 3, 19))


def test_tokens_and_costs_of_a_round():
    assert expected_tokens((4, 1), {1: 0.5, 4: 0.8}) == pytest.approx(1 + 0.8 + 0.8 * 0.5)
    assert TreeCost(0.2, 0.01).of_round((4, 2, 1)) == pytest.approx(1 + 0.6 + 0.01 * 20)
    assert TreeCost.of(9, 9, 2.0, 0.5, 0.1) == TreeCost(0.25, 0.05)


def test_advice_is_the_best_of_all_shapes_and_changes_with_the_costs():
    lines = pd.DataFrame([
        {"dataset": "d", "method": "mcsd", "K": k, "drafted": a} for k, a in ((1, 0.5), (2, 0.7), (4, 0.8))
    ])  # fmt: skip
    free = advise(lines, TreeCost(0.0, 0.0), 2, 20).iloc[0]
    assert (free.k_config, free.rate) == ("4x4", pytest.approx(1 + 0.8 + 0.64))
    dear = advise(lines, TreeCost(0.2, 0.3), 4, 20).iloc[0]
    assert dear.k_config == "1"
    assert dear.rate == dear.best_chain_rate == pytest.approx(1.5 / 1.5)
    assert "do not draft" in as_sentence(advise(lines, TreeCost(2.0, 0.3), 4, 20), TreeCost(2.0, 0.3))
    assert "proposer.k_config=4x4" in as_sentence(advise(lines, TreeCost(0, 0), 2, 20), TreeCost(0, 0))


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["mscd"]}, "unknown method 'mscd': did you mean mcsd"),
        ({"methods": ["speculative"]}, "methods that choose among candidates, got speculative"),
        ({"methods": []}, "methods: expected names"),
        ({"num_drafts": [0, 2]}, "num_drafts: expected positive integers, got [0, 2]"),
        ({"positions": 0}, "positions: expected at least 1, got 0"),
        ({"draws": 0}, "draws: expected at least 1, got 0"),
        ({"cost_ratio": -1.0}, "cost_ratio and node_cost: expected numbers of at least 0"),
        ({"node_seconds": 0.1}, "expected target_seconds above 0"),
        ({"join": ["nowhere"]}, "expected a table at nowhere/sums.parquet"),
        ({"sweeps": ["nowhere"]}, "expected a sweep's output folder at nowhere"),
        ({"responses": "nowhere"}, "expected a responses folder at nowhere"),
        ({"pair": {**PAIR, "draft": None}}, "needs a draft model"),
    ],
)
def test_bad_input_is_one_line_before_any_work(tmp_path, changes, message):
    with pytest.raises(InputError) as error:
        acceptance.run(acceptance_config(tmp_path, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_texts_with_unknown_tokens_or_too_long_are_refused():
    pair = config.instantiate(PAIR)
    with pytest.raises(InputError, match=r"text a: expected token ids in \[0, 5\), got 1..7"):
        walk.check_texts(pair, [Text("a", [1], [7])])


def test_responses_of_a_folder_are_walked(tiny_overrides, tiny_responses, tmp_path):
    overrides = [
        *tiny_overrides, f"responses={tiny_responses}", "methods=[mcsd]", "num_drafts=[1,2]", "positions=2", "draws=1",
        "resamples=50", "track=false", "sampling.temperature=0.9", "sampling.top_k=20", f"paths.root_dir={tmp_path}",
    ]  # fmt: skip
    lines = read_table(acceptance.run(config.compose("acceptance", overrides)), "acceptance")
    assert set(lines.dataset) == {"responses"}
    assert lines.prompts.iloc[0] == 60
    assert lines.gap.iloc[0] == pytest.approx(0, abs=1e-6)
