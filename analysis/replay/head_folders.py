"""Heads to be compared: every head of a list of folders, checked against the traces that they are to be replayed on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.acceptance import HeadEstimator, PrereadEstimator, PrereadHead
from toolkit.acceptance.calibration.by_depth import Calibration
from toolkit.acceptance.folder import (
    KINDS,
    SurvivalScorer,
    head_hash,
    inside,
    loaded,
    reads_embeddings,
    scorer_with,
    target_of,
    warn_of_target,
)
from toolkit.acceptance.preread import PrereadScorer
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.models.fingerprint import Weights
from toolkit.runs.stage import MANIFEST, read_manifest
from toolkit.stopping import Rate, Survival
from toolkit.trace import Trace
from toolkit.trace.score import with_logits
from toolkit.trace.store import SUMMARY, check_final_states
from toolkit.training.export import HEAD


@dataclass(frozen=True)
class CandidateHead:
    """One head.

    name      folder and weights, as a reader tells heads apart
    kind      "survival" or "preread" (`toolkit.acceptance.folder.KINDS`)
    card      what its folder says of its training
    recorded  whether the traces hold its logits; else they are computed from the recorded states
    """

    name: str
    kind: str
    folder: Path
    head: Any
    card: Mapping[str, Any]
    recorded: bool

    @property
    def needs_draft(self) -> bool:
        """Whether its logits have to be computed with the draft's embeddings."""
        return not self.recorded and reads_embeddings(self.head)

    @property
    def files(self) -> list[Path]:
        """The files that the head depends on."""
        return [self.folder / name for name in (self.head.weights_file, self.head.config_file)]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its training, as far as its folder says: depth, w_rej, mixing ratio, KL on its validation data."""
        scores = self.card.get("metrics", {})
        validation = scores.get("val/binary_kl", scores.get("val/binary_kl_accepted"))
        return {
            "kind": self.kind, "depth": self.head.depth, "tied": getattr(self.head, "tied", None),
            "w_rej": self.card.get("w_rej", round(math.exp(self.head.log_w_rej), 6)),
            "mixing": self.card.get("mixing_ratio"),
            "train_kl": scores.get("train/binary_kl"), "validation_kl": validation,
        }  # fmt: skip

    def policy(self, corrected: bool) -> Rate | Survival:
        """Its `threshold_policy`, calibrated by depth where its folder says how."""
        return threshold_policy(self.head, corrected, Calibration.beside(self.folder))

    def scored(self, trace: Trace, draft: Any) -> Trace:
        """The trace with this head's logits."""
        return trace if self.recorded else with_logits(trace, {self.head.key: scorer_with(self.head, draft, "cpu")})


def find_heads(folders: Sequence[str | Path], traces: Sequence[Path]) -> list[CandidateHead]:
    """Every head in `folders` (or below them, in head/; of toolkit.train_heads, all of its heads).

    Raises InputError unless all can be replayed on all traces.
    """
    if not folders or isinstance(folders, str):
        raise InputError(f"heads: expected folders of heads, heads=[FOLDER,...], got {folders or 'none'}")
    summaries = [read_json(folder / SUMMARY) for folder in traces]
    candidates: dict[tuple[str, str], CandidateHead] = {}
    for path in [path for folder in folders for path in side_by_side(Path(folder))]:
        folder = inside(path)
        digest = head_hash(folder)
        for kind in [kind for kind, head in KINDS.items() if head.is_in(folder)]:
            if (digest, kind) in candidates:
                raise InputError(
                    f"heads: {path} holds the same head as {candidates[digest, kind].folder}; give it once"
                )
            candidates[digest, kind] = _candidate(Path(path), folder, kind, digest, traces, summaries)
    return list(candidates.values())


def side_by_side(folder: Path) -> list[Path]:
    """The folders of heads in an output folder of toolkit.train_heads, in order; any other folder is its own."""
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
    return [folder / name for name in manifest["heads"]] if manifest.get("stage") == "train_heads" else [folder]


def _candidate(
    path: Path, folder: Path, kind: str, digest: str, traces: Sequence[Path], summaries: Sequence[Mapping[str, Any]]
) -> CandidateHead:
    head, card = loaded(folder, kind)
    for recording, summary in zip(traces, summaries, strict=True):
        check_final_states(summary, recording)
        trained, recorded_with = Weights.recorded(card), Weights.recorded(summary)
        reason = None if trained is None or recorded_with is None else trained.other_than(recorded_with)
        if reason is not None:
            raise InputError(
                f"the head in {folder} was trained for another draft than the traces in {recording} were recorded "
                f"with ({reason})"
            )
        target, replayed = target_of(card), target_of(summary)
        reason = None if target is None or replayed is None else target.other_than(replayed)
        warn_of_target(reason, str(folder), f"that of the traces in {recording}")
    recorded = all(digest in summary["heads"].values() for summary in summaries)
    states = all(read_manifest(recording)["config"]["hidden"] for recording in traces)
    if not recorded and not states:
        raise InputError(
            f"the traces hold neither states nor logits of the head in {folder}: record them with hidden=true, or with "
            f"heads={{NAME: {folder}}}"
        )
    short = path.resolve().parent.name if path.resolve().name == HEAD else path.resolve().name
    name = f"{short}@{digest[:6]}" + (" (pre-read)" if kind == "preread" else "")
    return CandidateHead(name, kind, folder, head, card, recorded)


def threshold_policy(head: Any, corrected: bool, calibration: Calibration | None = None) -> Rate | Survival:
    """The policy of a head whose logits a trace holds, to be swept over levels 1 - h.

    SpecDec++'s rule; of a pre-read head the rate rule's score, P(all accepted and the next one, too), in its place.
    corrected  undo the class weight's shift of an acceptance head (a pre-read head's is undone always)
    """
    shared = {"log_w_rej": head.config["log_w_rej"], "calibration": calibration or Calibration()}
    if isinstance(head, PrereadHead):
        return Rate(PrereadEstimator(head.key, scorer=PrereadScorer(head), **shared), rate=1.0)
    return Survival(HeadEstimator(head.key, corrected, scorer=SurvivalScorer(head), **shared))
