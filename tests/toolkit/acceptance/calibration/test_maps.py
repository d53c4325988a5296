"""Calibrations: maps against scikit-learn's own predictions, the product's temperature, files that are read strictly."""

import json

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

from toolkit import testing
from toolkit.acceptance import AcceptanceHead, HeadEstimator, PrereadEstimator, PrereadHead
from toolkit.acceptance.calibration import stored
from toolkit.acceptance.calibration.fit import fit_map, fit_temperature
from toolkit.acceptance.calibration.maps import NEAREST, Calibration, ProbabilityMap
from toolkit.acceptance.folder import head_hash
from toolkit.errors import InputError

N = 4000


@pytest.fixture(scope="module")
def samples():
    """Corrected logits, and true probabilities whose logits are .5 z + 1."""
    logits = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    return logits.numpy(), torch.sigmoid(0.5 * logits + 1).numpy()


def mean_loss(chances, labels):
    return float(-(labels * np.log(chances) + (1 - labels) * np.log1p(-chances)).mean())


def test_platt_finds_scale_and_shift(samples):
    found = fit_map("platt", *samples)
    assert (found.scale, found.shift) == pytest.approx((0.5, 1.0), abs=1e-3)


@pytest.mark.parametrize("kind", ["platt", "temperature"])
def test_few_samples_are_fitted_without_a_penalty(kind):
    """Newton's method on the same loss, in plain numpy; so few that a pull towards 0 would show."""
    generator = np.random.default_rng(1)
    logits, labels = generator.normal(size=12), generator.uniform(size=12)
    columns = np.stack([logits, np.ones(12)], 1)[:, : 2 if kind == "platt" else 1]
    wanted = np.zeros(columns.shape[1])
    for _ in range(30):
        chances = 1 / (1 + np.exp(-columns @ wanted))
        curvature = (columns.T * (chances * (1 - chances))) @ columns
        wanted -= np.linalg.solve(curvature, columns.T @ (chances - labels))
    found = fit_map(kind, logits if wanted[0] > 0 else -logits, labels)
    assert found.scale == pytest.approx(abs(wanted[0]), abs=1e-6)
    assert found.shift == pytest.approx(wanted[1] if kind == "platt" else 0.0, abs=1e-6)


def test_a_score_that_says_the_opposite_says_nothing():
    logits = np.linspace(-2, 2, 9)
    assert fit_map("temperature", logits, 1 / (1 + np.exp(logits))).scale == 0


def test_what_cannot_be_fitted_is_named():
    with pytest.raises(InputError, match="unknown calibration 'plat': did you mean platt"):
        fit_map("plat", np.zeros(1), np.zeros(1))
    with pytest.raises(InputError, match="expected samples, got none"):
        fit_map("platt", np.zeros(0), np.zeros(0))


def test_temperature_is_the_best_scale_alone(samples):
    logits, labels = samples
    found = fit_map("temperature", logits, labels)
    at = [mean_loss(1 / (1 + np.exp(-scale * logits)), labels) for scale in np.linspace(0.05, 2, 196)]
    assert found.shift == 0 and found.scale == pytest.approx(np.linspace(0.05, 2, 196)[int(np.argmin(at))], abs=0.01)


def test_isotonic_is_scikit_learns_line(samples):
    logits, labels = samples
    noisy = np.clip(labels + 0.2 * np.random.default_rng(0).standard_normal(N), 0, 1)
    found = fit_map("isotonic", logits, noisy)
    reference = IsotonicRegression(out_of_bounds="clip").fit(logits, noisy)
    at = np.linspace(-15, 15, 601)
    chances = found(torch.from_numpy(at)).numpy()
    assert chances == pytest.approx(np.clip(reference.predict(at), NEAREST, 1 - NEAREST), abs=1e-9)
    assert (np.diff(chances) >= 0).all()
    assert found(torch.zeros(3, 2, 1)).shape == (3, 2, 1)
    constant = fit_map("isotonic", logits[:5], np.full(5, 0.3))
    assert constant(torch.tensor([-9.0, 9.0])).tolist() == pytest.approx([0.3, 0.3])


def test_the_products_temperature_undoes_a_power():
    chances = np.random.default_rng(0).uniform(0.02, 0.98, N)
    assert fit_temperature(chances**2.5, chances) == pytest.approx(2.5, rel=1e-3)
    for power in (0.2, 1.0, 6.0):
        products = np.concatenate([chances[:300] ** power, [0.0, 1e-9, 1 - 1e-5, 1 - 1e-6, 1.0]])
        labels = np.concatenate([chances[:300], [0.3, 0.2, 0.9, 0.95, 0.7]])
        grid = np.exp(np.linspace(np.log(0.05), np.log(20), 3001))
        at = [mean_loss(np.clip(np.maximum(products, 1e-12) ** (1 / t), 1e-8, 1 - 1e-8), labels) for t in grid]
        assert fit_temperature(products, labels) == pytest.approx(grid[int(np.argmin(at))], rel=3e-3)
    for odd in (1 - 1e-5, 1 - 1e-10, 1e-6, 0.0):  # probabilities of next to nothing that are often enough wrong
        products = np.concatenate([chances[:300], np.full(40, odd)])
        labels = np.concatenate([chances[:300], np.full(40, 0.5)])
        at = [mean_loss(np.clip(np.maximum(products, 1e-12) ** (1 / t), 1e-8, 1 - 1e-8), labels) for t in grid]
        assert fit_temperature(products, labels) == pytest.approx(grid[int(np.argmin(at))], rel=3e-3)
    assert fit_temperature(np.full(9, 0.9), np.full(9, 0.1)) == pytest.approx(0.05, rel=1e-2)  # ends of the range
    assert fit_temperature(np.full(9, 1e-6), np.full(9, 0.9)) == pytest.approx(20.0, rel=1e-2)
    per_token = Calibration((ProbabilityMap("platt"),), temperature=2.5)
    logits = torch.randn(7, dtype=torch.float64)
    product = per_token.probs(logits).prod()
    assert product == pytest.approx(float(per_token.token_probs(logits).prod() ** (1 / 2.5)))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_line_through_knots_is_numpys(count):
    """Also beyond its ends, at its knots, at a jump between equal knots, and for any layout of the logits."""
    generator = np.random.default_rng(count)
    knots, levels = np.sort(generator.normal(size=count)), np.sort(generator.uniform(0.1, 0.9, size=count))
    one = ProbabilityMap("isotonic", knots=tuple(knots), levels=tuple(levels))
    at = np.concatenate([np.linspace(-4, 4, 33), knots, [-1e6, 1e6]])
    logits = torch.from_numpy(at)
    with torch.device("meta"):  # nothing is made elsewhere than where the logits are
        found = one(torch.stack([logits, -logits]).T)
    assert found.shape == (len(at), 2)
    assert found[:, 0].numpy() == pytest.approx(np.interp(at, knots, levels), abs=1e-12)
    assert found[:, 1].numpy() == pytest.approx(np.interp(-at, knots, levels), abs=1e-12)
    jump = ProbabilityMap("isotonic", knots=(0.0, 0.0, 1.0), levels=(0.2, 0.6, 0.8))
    assert jump(torch.tensor([-1e-6, 1e-6, 0.5])).tolist() == pytest.approx([0.2, 0.6, 0.7], abs=1e-4)


def test_no_probability_is_nearer_to_0_and_1_than_the_limit():
    logits = torch.tensor([-1e4, 1e4], dtype=torch.float64)
    for one in (
        ProbabilityMap("platt"),
        ProbabilityMap("temperature", scale=3.0),
        ProbabilityMap("isotonic", knots=(0.0, 1.0), levels=(0.0, 1.0)),
    ):
        assert one(logits).tolist() == [NEAREST, 1 - NEAREST]


def test_maps_and_calibrations_that_are_none_are_refused():
    assert ProbabilityMap("platt", scale=0.0, shift=1.0)(torch.tensor([-5.0, 5.0])).unique().numel() == 1
    for wrong, message in (
        ({"kind": "platt", "scale": -1e-9}, "a scale of at least 0"),
        ({"kind": "isotonic"}, "one level per knot"),
        ({"kind": "isotonic", "knots": (0.0, 1.0), "levels": (0.5,)}, "one level per knot"),
        ({"kind": "isotonic", "knots": (0.0, 1.0), "levels": (0.5, 0.4)}, "both ascending"),
    ):
        with pytest.raises(InputError, match=message):
            ProbabilityMap(**wrong)
    one = (ProbabilityMap("platt"),)
    for maps, temperature in (((), 1.0), (one, 0.0), (one, -1.0), (one, float("inf")), (one, float("nan"))):
        with pytest.raises(InputError, match="expected maps and a temperature above 0"):
            Calibration(maps, temperature)
    said = Calibration(one, 2.0).as_json()
    assert Calibration.from_json(said) == Calibration(one, 2.0)
    for wrong in ({**said, "more": 1}, {"maps": said["maps"]}, ["maps", "temperature"], None):
        with pytest.raises(InputError, match="expected maps and temperature, and nothing else"):
            Calibration.from_json(wrong)
    for maps in (3, [3], [{"kind": "platt", "scale": "x", "shift": 0}], [{"scale": 1, "shift": 0}]):
        with pytest.raises(InputError, match="expected numbers, got"):
            Calibration.from_json({**said, "maps": maps})


def test_every_output_has_its_map():
    maps = (ProbabilityMap("platt", scale=2.0, shift=1.0), ProbabilityMap("temperature", scale=0.5))
    logits = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([torch.sigmoid(2 * logits[..., 0] + 1), torch.sigmoid(logits[..., 1] / 2)], -1)
    assert torch.allclose(Calibration(maps, 3.0).token_probs(logits), expected)
    assert torch.allclose(Calibration(maps, 3.0).probs(logits), expected ** (1 / 3))


@pytest.fixture
def folder(tmp_path):
    return testing.random_heads(tmp_path / "heads", 16, 16, depth=0)


def test_a_calibration_is_kept_with_its_head_and_read_strictly(folder):
    assert stored.load(folder, AcceptanceHead) is None
    before = head_hash(folder)
    kept = Calibration((ProbabilityMap("isotonic", knots=(-1.0, 0.5), levels=(0.1, 0.9)),), 1.25)
    path = stored.save(folder, AcceptanceHead, kept, {"fitted_to": "x"})
    assert stored.load(folder, AcceptanceHead) == kept and stored.load(folder, PrereadHead) is None
    assert head_hash(folder) != before  # what is replayed with it is another head
    value = json.loads(path.read_text())
    broken = {
        "to other weights": {**value, "weights": "0" * 16},
        "nothing else": {**value, "more": 1},
        "both ascending": {**value, "maps": [{"kind": "isotonic", "knots": [1, 0], "levels": [0, 1]}]},
        "expected a kind": {**value, "maps": [{"kind": "beta", "scale": 1, "shift": 0}]},
        "temperature above 0": {**value, "temperature": 0},
        "knots and levels": {**value, "maps": [{"kind": "isotonic", "knots": [1]}]},
    }
    for message, one in broken.items():
        path.write_text(json.dumps(one))
        with pytest.raises(InputError, match=message):
            stored.load(folder, AcceptanceHead)


def test_estimators_give_calibrated_probabilities_if_asked(folder):
    pair = testing.llama_pair()
    pair.head = str(folder)
    with pytest.raises(InputError, match="expected a calibration"):
        HeadEstimator(calibrated=True).bind(pair)
    with pytest.raises(InputError, match="expected a calibration"):
        PrereadEstimator(calibrated=True).bind(pair)
    plain = HeadEstimator(corrected=True).bind(pair)
    one, two = ProbabilityMap("platt", scale=0.5, shift=0.3), ProbabilityMap("temperature", scale=2.0)
    stored.save(folder, AcceptanceHead, Calibration((one,), 2.0), {})
    stored.save(folder, PrereadHead, Calibration((one, two), 2.0), {})
    calibrated, preread = (kind(calibrated=True).bind(pair) for kind in (HeadEstimator, PrereadEstimator))
    step = a_step(16)
    logit = torch.logit(plain.read_prob(step))
    assert torch.allclose(calibrated.read_prob(step), torch.sigmoid(0.5 * logit + 0.3) ** 0.5)
    assert torch.allclose(HeadEstimator(corrected=True).bind(pair).read_prob(step), plain.read_prob(step))
    raw = preread.scorer(step)
    accepted, following = preread.drawn_probs(step)
    assert torch.allclose(accepted, torch.sigmoid(0.5 * raw[:, 0] + 0.3) ** 0.5)
    assert torch.allclose(following, torch.sigmoid(2 * raw[:, 1]) ** 0.5)


def a_step(hidden_size):
    """What heads look at, of three rows."""
    from types import SimpleNamespace

    generator = torch.Generator().manual_seed(0)
    return SimpleNamespace(
        hidden=torch.randn(3, hidden_size, generator=generator), tokens=torch.tensor([3, 4, 5]), depth=2,
        draft_prob=torch.full((3,), 0.5), token_prob=torch.full((3,), 0.4), entropy=torch.ones(3),
        top_probs=torch.tensor([[0.5, 0.2]] * 3),
    )  # fmt: skip
