"""Calibration by depth: scales and shifts that made the labels, files of heads and statistics, and what is refused."""

import json
import shutil

import pytest
import torch

from toolkit import ModelPair
from toolkit.acceptance import HeadEstimator, PrereadEstimator, StatisticsEstimator
from toolkit.acceptance.calibration.by_depth import FILE, ByDepth, Calibration
from toolkit.acceptance.statistics import SHIPPED
from toolkit.errors import InputError
from toolkit.types import DraftStep

MAPS = {
    "drawn": ByDepth((0.5, 2.0), (1.0, -3.0)),
    "following": ByDepth((1.0, 0.25), (0.5, 0.0)),
    "position": ByDepth((1.5,), (0.75,)),
    "read": ByDepth((0.75, 3.0), (-1.0, 0.5)),
}


def steps(depths, probs_of):
    """Logits of the estimates, before and after, of a step at each depth; `read` scores the token before."""
    generator = torch.Generator().manual_seed(1)
    for depth in depths:
        logits, hidden = torch.randn(3, 1024, generator=generator), torch.randn(3, 96, generator=generator)
        step = DraftStep(depth, logits, logits.softmax(-1), hidden, torch.tensor([3, 1, 7]))
        yield depth, *(probs_of(estimator, step) for estimator in (0, 1))


def test_the_maps_are_those_that_made_the_labels():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60000, generator=generator, dtype=torch.float64) * 2
    depth = torch.randint(1, 4, (60000,), generator=generator)
    depth = torch.where(depth == 2, 5, depth)  # depths 2 and 4 are never seen
    scale, shift = 0.5 + 0.25 * depth, 1 - 0.5 * depth
    fitted = ByDepth.fitted(logits, torch.sigmoid(scale * logits + shift), depth)
    assert fitted.scales == pytest.approx((0.75, 0.75, 1.25, 1.25, 1.75), abs=0.03)
    assert fitted.shifts == pytest.approx((0.5, 0.5, -0.5, -0.5, -1.5), abs=0.03)
    torch.testing.assert_close(fitted(logits, depth), scale * logits + shift, atol=0.2, rtol=0)
    assert torch.equal(fitted(logits, 9), fitted(logits, 5))  # deeper ones have the last


def test_few_positions_change_little_and_an_empty_map_nothing():
    logits = torch.tensor([2.0, -1.0])
    fitted = ByDepth.fitted(logits, torch.tensor([0.0, 0.0]), torch.tensor([1, 1]))
    assert abs(fitted.scales[0] - 1) < 0.2 and -0.3 < fitted.shifts[0] < 0
    assert torch.equal(Calibration().prob("drawn", logits, 3), torch.sigmoid(logits))


def test_counts_of_a_server_shift_the_mean_to_its_rates():
    logits, depth = torch.linspace(-3, 4, 400), torch.tensor([1, 2] * 200)
    by_depth = ByDepth.shifted(logits, depth, [0.3, 0.9, 0.5])
    assert by_depth.scales == (1.0,) * 3 and by_depth.shifts[2] == by_depth.shifts[1]
    for level, rate in ((1, 0.3), (2, 0.9)):
        at_level = depth == level
        assert float(torch.sigmoid(by_depth(logits[at_level], level)).mean()) == pytest.approx(rate, abs=1e-4)


def test_heads_and_statistics_read_what_lies_beside_their_weights(tmp_path):
    toy = ModelPair.toy()
    folder = tmp_path / "head"
    shutil.copytree(toy.head, folder)
    plain = [PrereadEstimator(str(folder)).bind(toy), HeadEstimator(str(folder), True).bind(toy)]
    Calibration(MAPS).save(folder)
    calibrated = [PrereadEstimator(str(folder)).bind(toy), HeadEstimator(str(folder)).bind(toy)]
    file = tmp_path / "statistics.json"
    file.write_text(json.dumps(json.loads(SHIPPED.read_text()) | {"calibration": Calibration(MAPS).facts()}))
    plain.append(StatisticsEstimator(str(SHIPPED)).bind(None))
    calibrated.append(StatisticsEstimator(str(file)).bind(None))
    reads = {
        "drawn": (0, lambda e, s: e.drawn_probs(s)[0]), "following": (0, lambda e, s: e.drawn_probs(s)[1]),
        "read": (1, lambda e, s: e.read_prob(s)), "position": (2, lambda e, s: e.position_prob(s)),
    }  # fmt: skip
    reads |= {"statistics drawn": (2, reads["drawn"][1]), "statistics following": (2, reads["following"][1])}
    for name, (which, read) in reads.items():
        output = name.split()[-1]
        both = (plain[which], calibrated[which])
        for depth, before, after in steps((2, 3, 7), lambda number, s, b=both, r=read: r(b[number], s)):
            expected = MAPS[output](before.double().logit(), depth - 1 if output == "read" else depth)
            torch.testing.assert_close(after.double().logit(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "content",
    [[1], {"drawn": {"scales": [1.0], "shifts": []}}, {"drawn": {"scales": ["nan"], "shifts": [0]}}, {"other": {}}],
)
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(InputError, match=FILE):
        Calibration.beside(tmp_path)
