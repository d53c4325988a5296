"""Acceptance along target text: means that agree with enumeration, tables that add up, parts that are kept."""

from itertools import chain, combinations

import numpy as np
import pandas as pd
import pytest
import torch

from analysis import acceptance, sweep
from analysis.multi_draft import target_texts
from analysis.multi_draft.acceptance_table import (
    QUANTITIES,
    TreeCost,
    advise,
    as_sentence,
    block_efficiency_table,
    readable_shapes,
)
from analysis.multi_draft.target_texts import TargetText, expected_acceptance, optima, spread_uniforms
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import read_table
from analysis.tables.selection import load_rows
from tests.analysis.table_sweeps import PAIR, sweep_config, table
from toolkit import ModelPair, config
from toolkit.decoding import decode
from toolkit.errors import InputError
from toolkit.models.teacher import distributions_along, readings_along
from toolkit.sampling import Sampling
from toolkit.testing import dirichlet_pairs
from toolkit.verification import get
from toolkit.verification.enumeration import emission
from toolkit.verification.optimal import optimal_acceptances
from toolkit.verification.schemes import most_probable

METHODS = ["specinfer", "spectr", "importance", "mcsd", "mcsd_naive", "greedy_multi"]
RULES = {name: target_texts.MethodRule.of(name) for name in METHODS}


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


@pytest.mark.parametrize(("name", "scheme"), [
    *((name, "") for name in METHODS), *((name, "independent") for name in ("specinfer", "mcsd_naive", "importance_grouped"))
])  # fmt: skip
def test_means_agree_with_enumeration(name, scheme):
    p, q = dirichlet_pairs(40, 5)
    every = torch.stack([q, q.roll(1, 0), q.roll(7, 0)], 1) if scheme else q.unsqueeze(1).expand(-1, 3, -1).contiguous()
    method_rule = target_texts.MethodRule.of(name, [f"proposer.scheme={scheme}"] if scheme else [])
    exact = emission(method_rule.rule, method_rule.scheme, p, every)
    got = expected_acceptance(method_rule.rule, method_rule.scheme, p, every if scheme else q, uniforms(400, 40, 3))
    for estimate, true in ((got.accepted, exact.accepted), (got.drafted, exact.drafted)):
        assert float((estimate - true).abs().max()) < 0.1
        assert float((estimate - true).mean()) == pytest.approx(0, abs=0.002 if scheme else 0.006)


@pytest.mark.parametrize("scheme", ["iid", "independent"])
@pytest.mark.parametrize("name", ["specinfer", "spectr", "importance", "importance_grouped", "mcsd_naive"])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_what_a_rule_sums_is_exact_and_never_above_the_optimum(name, scheme, num_drafts):
    """One draw, so whatever is random would show."""
    rule, (p, q) = get(name), dirichlet_pairs(30, 5)
    if scheme not in rule.schemes:
        pytest.skip(f"{name} is for other candidates")
    side = q if scheme == "iid" else torch.stack([q.roll(k, 0) for k in range(num_drafts)], 1)
    every = q.unsqueeze(1).expand(-1, num_drafts, -1).contiguous() if scheme == "iid" else side
    got = expected_acceptance(rule, scheme, p, side, uniforms(1, 30, num_drafts))
    exact = emission(rule, scheme, p, every)
    torch.testing.assert_close(got.accepted, exact.accepted, atol=1e-9, rtol=0)
    assert (got.accepted <= optima(p, side, num_drafts, scheme) + 1e-9).all()
    assert (got.drafted >= got.accepted).all()


@pytest.mark.parametrize("name", [name for name in METHODS if name != "mcsd_naive"])
def test_one_candidate_is_accepted_with_the_overlap_of_the_distributions_exactly(name):
    p, q = dirichlet_pairs(30, vocab_size=50)
    got = expected_acceptance(RULES[name].rule, RULES[name].scheme, p, q, uniforms(1, 30, 1))
    overlap = torch.minimum(p, q).sum(-1)
    assert torch.allclose(got.accepted, overlap, atol=1e-12, rtol=0)
    assert torch.allclose(optima(p, q, 1, RULES[name].scheme), overlap, atol=1e-12, rtol=0)


def test_draws_are_spread_evenly_and_uniform():
    values = uniforms(8, 500, 3)
    assert ((values >= 0) & (values < 1)).all()
    assert torch.equal((values * 8).long().sort(0).values, torch.arange(8).view(8, 1, 1).expand(8, 500, 3))
    assert float(torch.corrcoef(values.reshape(-1, 3).T).triu(1).abs().max()) < 0.05


def test_optimum_without_the_tail_stays_within_its_bound():
    p, q = dirichlet_pairs(6, vocab_size=200, seed=3)
    q = q**6 / (q**6).sum(-1, keepdim=True)
    exact = optimal_acceptances(p, q, 3, "without_replacement")
    assert torch.allclose(optima(p, q, 3, "without_replacement"), exact, atol=1e-4, rtol=0)


# -- temperature 0 and different drafts -----------------------------------------------------------------------------


def walked(pair, methods, ks, *, overrides=(), sampling=None, folder, draws=400, positions=None, **changes):
    """The rows of a walk along texts of token ids."""
    sampling = sampling or Sampling()
    generator = torch.Generator().manual_seed(3)
    sequences = [TargetText(str(i), [1, 2], torch.randint(1, 5, (12,), generator=generator).tolist()) for i in range(4)]
    method_rules = [target_texts.MethodRule.of(name, overrides, sampling, len(pair.drafts)) for name in methods]
    walk = target_texts.Walk(
        pair, sequences, sampling, ks, positions, draws, 0, changes.pop("draft_temperature", None), 3
    )
    return walk.run(method_rules, folder, lambda count: None), sequences


def test_greedy_candidates_are_the_most_probable_tokens_whatever_the_rule(tmp_path):
    pair = config.instantiate(PAIR)
    for sampling in (Sampling(temperature=0), Sampling(temperature=0, repetition_penalty=1.6, top_k=1)):
        rows, sequences = walked(
            pair, ["mcsd", "specinfer", "importance"], [1, 2, 4], sampling=sampling, folder=tmp_path
        )
        member = dict.fromkeys((1, 2, 4), 0)
        for text in sequences:
            for i in range(len(text.token_ids)):
                before = [*text.prompt_ids, *text.token_ids[:i]]
                p, q = (model.probs[model.state(before)].log() for model in (pair.target, pair.draft))
                seen = list(set(before))
                for logits in (p, q):  # log probabilities are negative: the penalty multiplies
                    logits[seen] *= sampling.repetition_penalty
                order = q.argsort(descending=True).tolist()
                for k in member:
                    member[k] += int(p.argmax()) in order[:k]
        for (_, k), lines in rows.groupby(["method", "K"]):
            assert set(lines.scheme) == {"top_k"}
            assert lines.accepted.sum() == lines.drafted.sum() == lines.optimum.sum() == member[k]
        assert member[1] < member[2] < member[4]


def test_greedy_trees_accept_where_the_table_says():
    """The table's K = 2 is whether a tree of two children goes on, round by round."""
    pair, sampling = config.instantiate(PAIR), Sampling(temperature=0, max_new_tokens=30)
    prompts = [[i, j] for i in range(1, 5) for j in range(1, 5)]
    generations = decode(pair, prompts, config.method("mcsd", ["proposer.k_config=[2]"]), sampling)
    produced = [(g.prompt_ids, g.token_ids) for g in generations]
    judged = set()
    for generation, reading in zip(generations, readings_along(pair, produced, sampling), strict=True):
        tokens, _ = most_probable(reading.draft_logits[0], 2)
        inside = (tokens == torch.tensor(generation.token_ids).unsqueeze(1)).any(1).tolist()
        at = 0
        for r in generation.rounds:
            if r.num_drafted:
                assert r.num_accepted == int(inside[at])
                judged.add(r.num_accepted)
            at += r.num_produced
    assert judged == {0, 1}


def test_candidates_come_from_the_drafts_in_turn(tmp_path):
    target, first, second = (config.instantiate(table(seed)) for seed in (1, 2, 3))
    several = ModelPair(target=target, drafts=[first, second], end_ids=(0,))
    ((reading),) = readings_along(several, [([1, 2], [3, 4, 1])], Sampling(), num_drafts=2)
    method_rule = target_texts.MethodRule.of("specinfer", ["proposer.scheme=independent"], Sampling(), 2)
    q = method_rule.draft_side(reading, None, 3)
    states = [target.state([1, 2, 3, 4, 1][: 2 + i]) for i in range(3)]
    for k, model in enumerate((first, second, first)):
        assert torch.allclose(q[:, k], model.probs[states])
    one = ModelPair(target=target, draft=first, end_ids=(0,))
    warm = ["proposer.scheme=independent", "proposer.temperatures=[.5,5]"]
    method_rule = target_texts.MethodRule.of("specinfer", warm, Sampling(), 1)
    ((reading),) = readings_along(one, [([1, 2], [3, 4, 1])], Sampling())
    q = method_rule.draft_side(reading, None, 2)
    for k, temperature in enumerate((0.5, 5.0)):
        assert torch.allclose(q[:, k], reading.draft_probs(temperature))
    with pytest.raises(InputError, match=r"proposer.temperatures: expected one per draft model \(3\), got 2"):
        target_texts.MethodRule.of("specinfer", warm, Sampling(), 3)
    rows, _ = walked(several, ["specinfer"], [1, 2], overrides=warm[:1], folder=tmp_path, draws=100)
    alone, _ = walked(several, ["specinfer"], [1, 2], folder=tmp_path, draws=100)
    by_k = {kind: frame.groupby("K").accepted.sum() for kind, frame in (("two", rows), ("one", alone))}
    assert by_k["two"][1] == pytest.approx(by_k["one"][1], abs=1e-9)
    assert by_k["two"][2] != pytest.approx(by_k["one"][2], abs=1e-3)
    assert (rows.accepted <= rows.optimum + 0.1).all()


@pytest.mark.parametrize("more", [[], ["proposer.scheme=independent"]])
def test_a_methods_own_draft_temperature_is_that_of_its_candidates(tmp_path, more):
    """As in decoding: it goes before the temperature of the walk."""
    pair, words = config.instantiate(PAIR), {"folder": tmp_path, "draws": 4}
    own, _ = walked(
        pair, ["specinfer"], [1, 2], overrides=["draft_temperature=3", *more], draft_temperature=0.5, **words
    )
    expected, _ = walked(pair, ["specinfer"], [1, 2], overrides=more, draft_temperature=3, **words)
    pd.testing.assert_frame_equal(own, expected)


def test_overrides_of_the_command_reach_every_method(tmp_path):
    changes = {"methods": ["importance"], "num_drafts": [4], "draws": 16}
    few, many = (
        read_table(acceptance.run(acceptance_config(tmp_path, overrides=[word], **changes)), "acceptance")
        for word in ("rule.num_free=1", "rule.num_free=5")
    )
    assert few.acceptance.iloc[0] < many.acceptance.iloc[0]
    with pytest.raises(InputError, match="unknown key 'rule.num_fre': did you mean rule.num_free"):
        acceptance.run(acceptance_config(tmp_path, overrides=["rule.num_fre=1"], **changes))


def test_distributions_along_a_text_are_those_of_its_tables():
    target, draft = (config.instantiate(table(seed)) for seed in (1, 2))
    pair = ModelPair(target=target, draft=draft, end_ids=(0,))
    sequences = [([1, 2, 3], [4, 1, 2, 0]), ([4], [3, 3])]
    distributions = list(distributions_along(pair, sequences, Sampling(), positions=[[0, 2, 3], [1]]))
    for (prompt, produced), chosen, (p, q) in zip(sequences, [[0, 2, 3], [1]], distributions, strict=True):
        for row, position in enumerate(chosen):
            state = target.state([*prompt, *produced[:position]])
            assert torch.allclose(p[row], target.probs[state])
            assert torch.allclose(q[row], draft.probs[state])


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
    score = target_texts.Walk._score

    def noted(self, sequences, first, method_rules):
        scored.append((first, [each.method for each in method_rules]))
        return score(self, sequences, first, method_rules)

    monkeypatch.setattr(target_texts.Walk, "_score", noted)
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


def test_every_setting_of_a_shape_is_shown():
    values = {"block_efficiency": [2.0, 3.0], "block_efficiency_low": [1.0, 2.0], "block_efficiency_high": [4.0, 5.0]}
    settings = ["k=2x1 alphabet=10", "k=2x1 alphabet=40"]
    lines = pd.DataFrame({"method": "importance", "k_config": "2x1", "setting": settings, "prompts": 20, **values})
    (shown,) = readable_shapes(lines).to_dict("records")
    assert [shown[setting] for setting in settings] == ["2.000 [1.000, 4.000]", "3.000 [2.000, 5.000]"]


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
    of_shape = rows[rows["proposer.k_config"] == "4x2x1"]
    assert lines.block_efficiency.iloc[1] == of_shape.num_generated.sum() / of_shape.num_target_calls.sum()
    assert capsys.readouterr().out.count("proposer.k_config=") == 2
    with pytest.raises(InputError, match="two runs call their texts 'ids dev'"):
        acceptance.run(acceptance_config(tmp_path, join=[str(folder)]))
    with pytest.raises(InputError, match=r"expected settings with proposer.k_config"):
        block_efficiency_table(rows[rows.method == "autoregressive"], Bootstrap(10))


# -- advice ---------------------------------------------------------------------------------------------------------


def test_advice_is_the_best_of_all_shapes_and_changes_with_the_costs():
    lines = pd.DataFrame([
        {"dataset": "d", "method": "mcsd", "K": k, "drafted": a} for k, a in ((1, 0.5), (2, 0.7), (4, 0.8))
    ])  # fmt: skip
    assert TreeCost.of(9, 9, 2.0, 0.5, 0.1) == TreeCost(0.25, 0.05)
    free = advise(lines, TreeCost(0.0, 0.0), 2, 20).iloc[0]
    assert (free.k_config, free.rate) == ("4x4", pytest.approx(1 + 0.8 + 0.64))
    dear = advise(lines, TreeCost(0.2, 0.3), 4, 20).iloc[0]
    assert dear.k_config == "1"
    assert advise(lines, TreeCost(0.0, 0.0), 2, 19).iloc[0].k_config == "4x2", "4x4 has 20 nodes"
    assert dear.rate == dear.best_chain_rate == pytest.approx(1.5 / 1.5)
    assert "do not draft" in as_sentence(advise(lines, TreeCost(2.0, 0.3), 4, 20), TreeCost(2.0, 0.3))
    assert "proposer.k_config=4x4" in as_sentence(advise(lines, TreeCost(0, 0), 2, 20), TreeCost(0, 0))


# -- alphabets, and exact acceptance of given distributions ----------------------------------------------------------


def test_every_position_counts_once_and_top_k_bounds_the_alphabet(tmp_path):
    cfg = acceptance_config(tmp_path, methods=["specinfer"], num_drafts=[1], alphabet=True)
    cfg.sampling.top_k = 2
    folder = acceptance.run(cfg)
    table, positions = read_table(folder, "alphabet"), int(read_table(folder, "acceptance").positions.max())
    assert table.groupby("model").positions.sum().to_dict() == {"target": positions, "draft": positions}
    assert table["size"].between(1, 2).all()
    assert table.groupby("model").share.sum().tolist() == pytest.approx([1, 1])
    assert table.groupby("model").share_up_to.last().tolist() == pytest.approx([1, 1])


def test_without_the_optimum_acceptance_is_the_same(folder, tmp_path):
    table = read_table(folder, "acceptance")
    whole = table[table.method == "mcsd"]
    bare = read_table(acceptance.run(acceptance_config(tmp_path, methods=["mcsd"], optimum=False)), "acceptance")
    assert bare.acceptance.tolist() == whole.acceptance.tolist() and whole.optimum.notna().all()
    assert bare[["optimum", "gap"]].isna().all(axis=None)


P = [0.4, 0.3, 0.3]
Q = [[0.4, 0.3, 0.3], [0.4, 0.0, 0.6], [0.4, 0.15, 0.45]]


def theorem_3(p, q):
    """min over S of p(S) + q(S^c)^2 + 2 q(S) q(S^c) (Khisti et al., arXiv:2410.18234)."""
    values = []
    for chosen in chain.from_iterable(combinations(range(len(p)), size) for size in range(len(p) + 1)):
        inside = sum(q[i] for i in chosen)
        values.append(sum(p[i] for i in chosen) + (1 - inside) ** 2 + 2 * inside * (1 - inside))
    return min(values)


def test_the_optimum_is_theorem_3_and_no_rule_is_above_it(tmp_path):
    words = [f"target_probs={P}", f"draft_probs={Q}", "num_drafts=[1,2]", "methods=[specinfer,spectr,importance,mcsd]"]
    folder = acceptance.run(config.compose("acceptance", [f"paths.root_dir={tmp_path}", "track=false", *words]))
    single, table = (read_table(folder, "exact").query(f"K == {k}") for k in (1, 2))
    best = table[(table.method == "optimum") & (table.scheme == "iid")]
    assert best.acceptance.tolist() == pytest.approx([theorem_3(P, q) for q in Q], abs=1e-12)
    assert best[["q_1", "q_2", "q_3"]].to_numpy().tolist() == Q
    assert (table.acceptance <= table.drafted + 1e-12).all()
    assert (table.drafted <= table.optimum + 1e-9).all()
    acceptance_of = table.set_index(["method", "q_2"]).acceptance
    assert acceptance_of["specinfer", 0.3] == pytest.approx(1)
    assert acceptance_of["importance", 0.15] == pytest.approx(acceptance_of["optimum", 0.15].iloc[0])
    assert set(table[table.method == "optimum"].scheme) == {"iid", "without_replacement"}
    overlap = [sum(min(a, b) for a, b in zip(P, q, strict=True)) for q in Q]
    assert single[single.method == "specinfer"].acceptance.tolist() == pytest.approx(overlap)


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "message"), [
    ({"methods": ["speculative"]}, "methods that choose among candidates, got speculative"),
    ({"pair": {**PAIR, "draft": None}}, "needs a draft model"),
    ({"target_probs": P, "draft_probs": [[0.5, 0.5]]}, "same tokens"),
    ({"target_probs": P, "draft_probs": Q, "num_drafts": [40]}, "V^K"),
])  # fmt: skip
def test_bad_input_is_one_line_before_any_work(tmp_path, changes, message):
    with pytest.raises(InputError) as error:
        acceptance.run(acceptance_config(tmp_path, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_texts_with_unknown_tokens_are_refused():
    sequences = [TargetText("b", [1], [2])] * 3 * target_texts.PART + [TargetText("a", [1], [7])]
    with pytest.raises(InputError, match=r"text a: expected token ids in \[0, 5\), got 1..7"):
        target_texts.Walk(config.instantiate(PAIR), sequences, Sampling(), [1], None, 1, 0, None, 2)


def test_responses_of_a_folder_are_walked(tiny_overrides, tiny_responses, tmp_path):
    overrides = [
        *tiny_overrides, f"responses={tiny_responses}", "methods=[mcsd]", "num_drafts=[1,2]", "positions=2", "draws=1",
        "resamples=50", "track=false", "sampling.temperature=0.9", "sampling.top_k=20", f"paths.root_dir={tmp_path}",
    ]  # fmt: skip
    lines = read_table(acceptance.run(config.compose("acceptance", overrides)), "acceptance")
    assert set(lines.dataset) == {"responses"}
    assert lines.prompts.iloc[0] == 60
    assert lines.gap.iloc[0] == pytest.approx(0, abs=1e-6)
    with pytest.warns(RuntimeWarning, match="drawn at .*0.9.*read at .*0.0.*other texts"):
        acceptance.run(config.compose("acceptance", [*overrides, "sampling.temperature=0", "sampling.top_k=0"]))
    with pytest.raises(InputError, match="the responses come from another target"):
        acceptance.run(config.compose("acceptance", [*overrides, "pair.target=toy/target", "pair.draft=toy/draft"]))
