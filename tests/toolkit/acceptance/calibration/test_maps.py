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
from toolkit.acceptance.calibration.maps import NEAREST, Calibration, ChanceMap
from toolkit.acceptance.folder import head_hash
from toolkit.errors import InputError

N = 4000


@pytest.fixture(scope="module")
def samples():
    """Corrected logits, and true chances whose logits are .5 z + 1."""
    logits = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    return logits.numpy(), torch.sigmoid(0.5 * logits + 1).numpy()


def mean_loss(chances, labels):
    return float(-(labels * np.log(chances) + (1 - labels) * np.log1p(-chances)).mean())


def test_platt_finds_scale_and_shift(samples):
    found = fit_map("platt", *samples)
    assert (found.scale, found.shift) == pytest.approx((0.5, 1.0), abs=1e-3)


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
    per_token = Calibration((ChanceMap("platt"),), temperature=2.5)
    logits = torch.randn(7, dtype=torch.float64)
    product = per_token.probs(logits).prod()
    assert product == pytest.approx(float(per_token.chances(logits).prod() ** (1 / 2.5)))


@pytest.fixture
def folder(tmp_path):
    return testing.random_heads(tmp_path / "heads", 16, 16, depth=0)


def test_a_calibration_is_kept_with_its_head_and_read_strictly(folder):
    assert stored.load(folder, AcceptanceHead) is None
    before = head_hash(folder)
    kept = Calibration((ChanceMap("isotonic", knots=(-1.0, 0.5), levels=(0.1, 0.9)),), 1.25)
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


def test_estimators_give_calibrated_chances_if_asked(folder):
    pair = testing.llama_pair()
    pair.head = str(folder)
    with pytest.raises(InputError, match="expected a calibration"):
        HeadEstimator(calibrated=True).bind(pair)
    with pytest.raises(InputError, match="expected a calibration"):
        PrereadEstimator(calibrated=True).bind(pair)
    plain = HeadEstimator(corrected=True).bind(pair)
    one, two = ChanceMap("platt", scale=0.5, shift=0.3), ChanceMap("temperature", scale=2.0)
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
