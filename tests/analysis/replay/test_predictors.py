"""analysis.heads tuning=... tests=...: weights carried from text to text against a replay, and what the table needs."""

import numpy as np
import pytest
import torch

from analysis.heads import run
from analysis.replay.predictors import carried
from toolkit import config
from toolkit.acceptance import OnlineLogistic
from toolkit.errors import InputError
from toolkit.stopping import Bounded, OnlineRate
from toolkit.trace.replay import by_rounds


def online(evidence, rate):
    return Bounded(OnlineRate(OnlineLogistic(evidence=evidence), cost_ratio=1.0, rate=rate), 1, 5)


def test_weights_that_do_not_move_carry_nothing_and_others_do(trace):
    different = []
    for rate in (0.2, 0.35, 0.5):
        fixed = online(1e9, rate)
        assert np.array_equal(carried(trace, fixed), by_rounds(trace, fixed).per_text)
        learning = online(0.05, rate)
        different.append(not np.array_equal(carried(trace, learning), by_rounds(trace, learning).per_text))
        first = torch.arange(trace.num_texts) == 0  # nothing is carried into the first text
        assert np.array_equal(carried(trace.only(first), learning), by_rounds(trace.only(first), learning).per_text)
    assert any(different)


def test_domains_must_be_the_same(tmp_path):
    words = ["statistics=[A]", "tuning={math: B}", "tests={code: C}", f"paths.root_dir={tmp_path}", "track=false"]
    with pytest.raises(InputError, match="same domains, got math and code"):
        run(config.compose("heads", words))
