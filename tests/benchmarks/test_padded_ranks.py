"""Predicted speeds: seconds are those of the live rounds, and the verdict counts what it says it counts."""

import numpy as np
import pytest

from benchmarks.padded_ranks import POLICIES, RoundCost, Speeds, predict, verdict
from toolkit import config
from toolkit.cost import CostModel, ForwardCost
from toolkit.decoding import Sampling, decode

COST = RoundCost(CostModel(ForwardCost(0.002, 0.0005), ForwardCost(0.04, 0.003)), outside=0.001)


def test_predicted_speeds_are_those_of_live_rounds(table_pair):
    """At temperature 0 replay and live decoding have the same rounds: every forward is priced one by one here."""
    prompts, sampling = [[1], [0, 1, 0], [1, 1, 0, 0]], Sampling(temperature=0.0, max_new_tokens=20)
    chosen = {name: POLICIES[name] for name in ("plain decoding", "fixed K=4", "confidence .4", "SpecDec++ h=.7")}
    found = predict(table_pair, prompts, chosen, COST, sampling, replicates=2)
    for name, (method, overrides) in chosen.items():
        tokens = seconds = 0.0
        for one in decode(table_pair, prompts, config.method(method, overrides), sampling):
            tokens += len(one.token_ids)
            drafts_first = True
            for number, r in enumerate(one.rounds):
                unread = len(one.prompt_ids) - 1 if number == 0 else 0
                seconds += COST.model.target(r.num_drafted + 1 + unread) + COST.outside
                for _ in range(r.num_draft_calls):
                    seconds += COST.model.draft(1 + (len(one.prompt_ids) - 1 if drafts_first else 0))
                    drafts_first = False
        assert found.found[name] == pytest.approx(tokens / seconds), name
        assert found.resampled[name].min() <= found.found[name] <= found.resampled[name].max() + 1e-9


def test_one_more_drafted_token_costs_its_forward_and_its_place_in_the_targets():
    assert COST.of_one_more(10) == pytest.approx((0.0025 + 0.003) / (0.043 + 0.001))


def speeds(**means):
    noise = np.random.default_rng(0).normal(0, 0.3, (len(means), 500))
    return Speeds(means, {name: mean + noise[row] for row, (name, mean) in enumerate(means.items())})


def test_only_gaps_beyond_their_interval_count():
    predicted = speeds(a=30.0, b=20.0, c=19.9)
    table, line = verdict(predicted, speeds(a=31.0, b=22.0, c=25.0))
    assert "3 pairs of policies 2 have a predicted gap beyond its interval" in line and "ranks 2 of these 2" in line
    assert "b over c" not in table and table.count("| same |") == 2
    table, line = verdict(predicted, speeds(a=20.0, b=22.0, c=19.9))
    assert "ranks 1 of these 2" in line and "| a over b | +50.0%" in table and "| **other** |" in table
    table, _ = verdict(predicted, speeds(a=20.0, b=20.01, c=10.0))
    assert "other, within its interval" in table and "**other**" not in table
