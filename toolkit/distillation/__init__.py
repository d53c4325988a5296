"""Training drafts on their targets: the parts of `python -m toolkit.distill`."""

from toolkit.distillation.data import TextData
from toolkit.distillation.losses import (
    AcceptanceLikelihood,
    CrossEntropy,
    DistillBatch,
    ForwardKL,
    JensenShannon,
    Loss,
    Mixture,
    ReverseKL,
    Term,
    TotalVariation,
)
from toolkit.distillation.teachers import CachedTeacher, OnlineTeacher

__all__ = [
    "AcceptanceLikelihood",
    "CachedTeacher",
    "CrossEntropy",
    "DistillBatch",
    "ForwardKL",
    "JensenShannon",
    "Loss",
    "Mixture",
    "OnlineTeacher",
    "ReverseKL",
    "Term",
    "TextData",
    "TotalVariation",
]  # fmt: skip
