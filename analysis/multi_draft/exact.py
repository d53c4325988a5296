"""What rules accept for given p and q: analysis.acceptance 'target_probs=[.5,.25,.25]' 'draft_probs=[[.5,.1,.4],...]'.

Every tuple of candidates is enumerated. The optimum is Khisti et al.'s (arXiv:2410.18234, Theorem 3) for two i.i.d. candidates,
and its counterpart for other numbers and schemes. The table `exact` has one line per row of draft_probs, K and method, with the
columns of `acceptance_table`; the optimum has lines of its own.

Shapes: P rows of draft_probs, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from analysis import keys
from analysis.multi_draft.target_texts import MethodRule
from analysis.tables.files import read_table, save_table, show
from toolkit.config import plain
from toolkit.errors import InputError
from toolkit.runs.stage import open_stage
from toolkit.runs.tracking import log_table, wandb_run
from toolkit.testing import draft_distributions
from toolkit.verification.enumeration import emission
from toolkit.verification.optimal import SCHEMES, optimal_acceptances

OPTIMUM = "optimum"
MOST = 200_000  # tuples of candidates: V^K


def enumerate_rules(cfg: keys.Acceptance) -> Path:
    p, q = distributions(plain(cfg.target_probs), plain(cfg.draft_probs))
    counts = sorted(set(plain(cfg.num_drafts)))
    if not counts or len(p) ** max(counts) > MOST:
        raise InputError(f"num_drafts: expected K of at least 1 with V^K up to {MOST:,} (V = {len(p)}), got {counts}")
    method_rules = [MethodRule.of(name, plain(cfg.overrides)) for name in plain(cfg.methods)]
    for method_rule in method_rules:
        if method_rule.scheme not in SCHEMES:
            raise InputError(
                f"methods: expected candidates of one draft ({', '.join(SCHEMES)}), got {method_rule.method} "
                f"with {method_rule.scheme}"
            )
    stage = open_stage("acceptance", cfg, ignore=("track",))
    if not stage.finished:
        table = pd.concat([enumerated(method_rules, p, q, count) for count in counts], ignore_index=True)
        save_table(table, stage.folder, "exact")
        with wandb_run("exact", plain(cfg), stage.folder, track=cfg.track, name=" ".join(plain(cfg.methods))) as wandb:
            log_table(wandb, "exact/table", table)
        stage.finish()
    first = ("method", "K", "acceptance", "drafted", "optimum")
    show(read_table(stage.folder, "exact"), "exact acceptance", stage.folder / "exact.csv", first)
    return stage.folder


def enumerated(method_rules: Sequence[MethodRule], p: Tensor, q: Tensor, num_drafts: int) -> pd.DataFrame:
    """The lines of one K, from p [V] and q [P, V]."""
    targets, frames = p.expand(len(q), -1), []
    rows = pd.DataFrame({f"q_{token + 1}": q[:, token].tolist() for token in range(q.shape[1])}).assign(K=num_drafts)
    best = {
        method_rule.scheme: optimal_acceptances(targets, q, num_drafts, method_rule.scheme).tolist()
        for method_rule in method_rules
    }
    for method_rule in method_rules:
        emitted = emission(
            method_rule.rule, method_rule.scheme, targets, draft_distributions(q, num_drafts, method_rule.scheme)
        )
        columns = {
            "acceptance": emitted.accepted.tolist(),
            "drafted": emitted.drafted.tolist(),
            "optimum": best[method_rule.scheme],
        }
        frames.append(rows.assign(method=method_rule.method, scheme=method_rule.scheme, **columns))
    for scheme, values in best.items():
        columns = {"acceptance": values, "drafted": values, "optimum": values}
        frames.append(rows.assign(method=OPTIMUM, scheme=scheme, **columns))
    return pd.concat(frames, ignore_index=True)


def distributions(target_probs: Any, draft_probs: Any) -> tuple[Tensor, Tensor]:
    """p [V] and q [P, V] in float64. Raises InputError unless they are distributions over the same tokens."""
    rows = [target_probs, *(draft_probs if isinstance(draft_probs, list) else [draft_probs])]
    for row in rows:
        numbers = isinstance(row, list) and all(isinstance(value, int | float) and value >= 0 for value in row)
        if not numbers or len(row) != len(target_probs) or abs(sum(row) - 1) > 1e-6:
            raise InputError(
                f"target_probs, draft_probs: expected probabilities of the same tokens that add up to 1 (a list, and a list of "
                f"lists), got {row}"
            )
    if len(rows) < 2 or len(target_probs) < 2:
        raise InputError("draft_probs: expected at least one distribution over two tokens or more")
    probs = torch.tensor(rows, dtype=torch.float64)
    probs = probs / probs.sum(-1, keepdim=True)
    return probs[0], probs[1:]
