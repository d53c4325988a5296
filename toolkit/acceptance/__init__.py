"""Acceptance prediction: heads, estimators, calibration."""

from toolkit.acceptance.candidates import CandidateEstimator
from toolkit.acceptance.estimators import ConfidenceEstimator as Confidence
from toolkit.acceptance.estimators import HeadEstimator, PrereadEstimator
from toolkit.acceptance.head import AcceptanceHead
from toolkit.acceptance.match import MatchEstimator
from toolkit.acceptance.online import OnlineLogistic
from toolkit.acceptance.preread import PrereadHead
from toolkit.acceptance.statistics import StatisticsEstimator

__all__ = [
    "AcceptanceHead", "CandidateEstimator", "Confidence", "HeadEstimator", "MatchEstimator", "OnlineLogistic",
    "PrereadEstimator", "PrereadHead", "StatisticsEstimator",
]  # fmt: skip
