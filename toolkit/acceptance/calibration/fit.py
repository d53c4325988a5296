"""Fitting calibrations with scikit-learn to soft labels. A label P counts as P accepted and 1 - P rejected samples.

The prompts must differ from those that the head was trained on, because a head is more certain on prompts it has seen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toolkit.acceptance.calibration.maps import KINDS, NEAREST, ProbabilityMap
from toolkit.errors import InputError, unknown_name

Array = NDArray[np.float64]
LOWEST, HIGHEST = 0.05, 20.0  # temperatures of the product that are looked at


def fit_map(kind: str, logits: Array, labels: Array) -> ProbabilityMap:
    """The map of a kind (`maps.KINDS`) that best fits corrected logits [n] to probabilities of acceptance [n].

    Platt and temperature minimise the log loss, isotonic the squared error. Raises InputError without samples.
    """
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression

    if kind not in KINDS:
        raise unknown_name("calibration", kind, KINDS)
    if not len(logits):
        raise InputError("calibration: expected samples, got none")
    if kind == "isotonic":
        isotonic = IsotonicRegression().fit(logits, labels)
        levels = np.maximum.accumulate(isotonic.y_thresholds_)
        return ProbabilityMap(
            "isotonic", knots=tuple(map(float, isotonic.X_thresholds_)), levels=tuple(map(float, levels))
        )
    twice = np.concatenate([logits, logits])[:, None]  # each sample counts as accepted and as rejected, by its label
    outcomes, weights = np.repeat([1, 0], len(logits)), np.concatenate([labels, 1 - labels])
    model = LogisticRegression(C=np.inf, fit_intercept=kind == "platt", tol=1e-8, max_iter=1000)
    model.fit(twice, outcomes, sample_weight=weights)
    scale = max(float(model.coef_[0, 0]), 0.0)
    return ProbabilityMap(kind, scale=scale, shift=float(np.ravel(model.intercept_)[0]))  # 0 without an intercept


def fit_temperature(products: Array, labels: Array) -> float:
    """T that gives products of probabilities [n] the least log loss as products^(1/T).

    labels [n]  probabilities that all tokens of a product are accepted
    """
    from scipy.optimize import minimize_scalar

    logs = np.log(np.maximum(products, 1e-12))

    def loss(log_temperature: float) -> float:
        probs = np.clip(np.exp(logs / np.exp(log_temperature)), NEAREST**2, 1 - NEAREST**2)
        return float(-(labels * np.log(probs) + (1 - labels) * np.log1p(-probs)).mean())

    optimum = minimize_scalar(loss, bounds=(np.log(LOWEST), np.log(HIGHEST)), method="bounded")
    return float(np.exp(optimum.x))
