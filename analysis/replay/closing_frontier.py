"""A training's last act: replay the head it has made on recorded traces, and show its frontier. Nothing is decoded.

As a callback of `toolkit.train` (callbacks=replayed callbacks.frontier.traces=FOLDER), so that a multirun over heads yields
comparable Pareto curves. The traces are recorded once, with hidden=true: whatever a head may be, its logits follow.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pandas as pd
import pytorch_lightning as pl
from pytorch_lightning.loggers import WandbLogger

from analysis.figures import plots
from analysis.replay.head_folders import threshold_policy
from analysis.tables.files import save_table
from toolkit import metrics
from toolkit.acceptance.folder import scorer_with
from toolkit.config.notes import AtLeast, File
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.models.fingerprint import Weights
from toolkit.trace import Trace
from toolkit.trace.replay import sweep_levels
from toolkit.trace.score import with_logits
from toolkit.trace.store import check_final_states, read_traces
from toolkit.training.checkpoints import BEST, folder_of, read_checkpoint
from toolkit.training.recorded import TracedData

LEVELS = tuple(round(0.05 * i, 2) for i in range(1, 20))


class ReplayedFrontier(pl.Callback):
    """Replays the best state of a head at every threshold; writes replayed.csv and .png, and logs them.

    traces      folder of data_gen.traces, recorded with hidden=true and the same draft
    cost_ratio  c, for the throughput that tells the best threshold
    `results` holds what a sweep's table shows: replay/throughput and replay/threshold
    """

    CLOSING: ClassVar[tuple[str, ...]] = ("replay/throughput", "replay/threshold")

    def __init__(
        self,
        traces: Annotated[str, File()],
        cost_ratio: Annotated[float, AtLeast(0)] = 0.2,
        min_drafted: Annotated[int, AtLeast(1), "shortest round"] = 1,
    ):
        super().__init__()
        self.traces, self.cost_ratio, self.min_drafted = traces, cost_ratio, min_drafted
        self.results: dict[str, float] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What cannot be replayed is said before the training, not after it."""
        (summary,) = TracedData.inputs(Path(self.traces))
        check_final_states(read_json(summary), self.traces)
        recorded, trained_on = Weights.recorded(read_json(summary)), trainer.datamodule.weights  # type: ignore[attr-defined]
        reason = None if recorded is None else recorded.other_than(trained_on)
        if reason is not None:
            raise InputError(f"callbacks.frontier.traces: {self.traces} was recorded with another draft ({reason})")
        if read_traces(self.traces).hidden is None:
            raise InputError(
                f"callbacks.frontier.traces: {self.traces} holds no hidden states; record it with hidden=true"
            )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Replay, once everything is trained; on the first process."""
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        head, data = _best(pl_module, folder), trainer.datamodule
        table = replayed(read_traces(self.traces), head, data.draft, self.cost_ratio, self.min_drafted)
        save_table(table, folder, "replayed")
        figure = plots.pareto(table, folder / "replayed.png", "replayed frontier")
        best = table.loc[table.throughput.idxmax()]
        self.results = dict(zip(self.CLOSING, (float(best.throughput), float(best.threshold)), strict=True))
        for logger in trainer.loggers:
            logger.log_metrics(self.results, step=max(trainer.global_step - 1, 0))
            if isinstance(logger, WandbLogger):
                logger.log_table("replay/frontier", dataframe=table)
                logger.log_image("replay/pareto", [str(figure)])


def replayed(trace: Trace, head: Any, draft: Any, cost_ratio: float, min_drafted: int = 1) -> pd.DataFrame:
    """Counts and rates of a head's policy (SpecDec++'s, or the rate rule's) at every threshold, one line each."""
    trace = with_logits(trace, {head.key: scorer_with(head, draft, "cpu")})
    policy = threshold_policy(head, corrected=True)
    levels = [1 - h for h in LEVELS]
    lines = []
    for h, replay in zip(LEVELS, sweep_levels(trace, policy, levels, min_drafted), strict=True):
        counts = replay.total
        lines.append({
            "method": head.method, "setting": f"h={h:g}", "lossless": True, "threshold": h,
            **vars(counts), "discard_rate": metrics.discard_rate(counts),
            "verification_rate": metrics.verification_rate(counts), "throughput": metrics.throughput(counts, cost_ratio),
        })  # fmt: skip
    return pd.DataFrame(lines).assign(undominated=True)


def _best(module: Any, folder: Path) -> Any:
    """The head in the state that will be exported, on the CPU."""
    module = copy.deepcopy(module.head).cpu().float().eval()
    path = folder_of(folder) / BEST
    if path.exists():
        state = read_checkpoint(path)["state_dict"]
        module.load_state_dict({k.removeprefix("head."): v for k, v in state.items() if k.startswith("head.")})
    return module
