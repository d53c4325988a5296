"""Acceptance prediction: heads, estimators, calibration."""

from toolkit.acceptance.estimators import Confidence, HeadEstimator
from toolkit.acceptance.head import AcceptanceHead

__all__ = ["AcceptanceHead", "Confidence", "HeadEstimator"]
