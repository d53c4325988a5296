"""Who can judge: a model that is loaded here, or an endpoint. Both are asked questions and give replies."""

from __future__ import annotations

from analysis.quality.judges.base import Judging, Reply
from analysis.quality.judges.endpoint import Endpoint
from analysis.quality.judges.local import LocalJudge

__all__ = ["Endpoint", "Judging", "LocalJudge", "Reply"]
