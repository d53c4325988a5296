"""hydra/sweeper=ask_tell: Optuna proposes the jobs of a multirun. Hydra imports this at each start, and the rest on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.errors import CompactHydraException
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf


class AskTell(Sweeper):
    """A sweeper. params: key -> values or an interval, as on the command line; others: `toolkit.search.study.Settings`."""

    def __init__(self, params: Mapping[str, Any] | None = None, **settings: Any):
        super().__init__()
        self.params, self.settings = dict(params or {}), settings

    def setup(self, **passed: Any) -> None:
        """Take the context, the task function and the config, as Hydra passes them on."""
        self.hydra_context, self.config = passed["hydra_context"], passed["config"]
        self.runs = Plugins.instance().instantiate_launcher(**passed)

    def sweep(self, arguments: list[str]) -> list[dict[str, str]]:
        """All trials that are left; returns the lines of the table. One line of error for what a user can fix."""
        from toolkit.errors import InputError
        from toolkit.search.study import Search, Settings, scores_of, write_results
        from toolkit.training.console import print_table

        assert self.config is not None and self.hydra_context is not None
        folder = Path(self.config.hydra.sweep.dir)
        words = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        try:
            scores = self.settings.get("metrics") or [self.config.get("optimized_metric") or "the command's number"]
            directions = directions_of(scores, self.settings.get("directions") or [])
            settings, command = (
                Settings(**{**self.settings, "directions": directions}),
                str(self.config.hydra.job.config_name),
            )
            search = Search(folder, settings, words, self.hydra_context.config_loader, command)
        except InputError as error:
            raise CompactHydraException(f"error: {error}") from error
        OmegaConf.save(self.config, folder / "multirun.yaml")
        while search.left:
            trials = search.ask()
            jobs = [[*search.fixed, *(f"{key}={value}" for key, value in trial.params.items())] for trial in trials]
            self.validate_batch_is_legal(jobs)
            results = self.runs.launch(jobs, initial_job_idx=trials[0].number)
            for trial, job, result in zip(trials, jobs, results, strict=True):
                scores = scores_of(result, folder, search.settings.metrics)
                for _ in range(search.settings.retries):
                    if isinstance(scores, Exception):
                        (result,) = self.runs.launch([job], initial_job_idx=trial.number)
                        scores = scores_of(result, folder, search.settings.metrics)
                search.tell(trial, scores)
            write_results(search)
        lines = write_results(search)
        print_table(f"search {folder.name}", lines, folder / "trials.csv")
        print(f"table: {folder / 'trials.csv'}")
        if (figure := folder / "search.png").exists():
            print(f"figure: {figure}")
        return lines


def directions_of(scores: Sequence[str], directions: Sequence[str]) -> Sequence[str]:
    """Whether each score is to be small or large: of validation scores that is known.

    Raises InputError for another score without a direction, and for a search for the worst validation score.
    """
    from toolkit.errors import InputError
    from toolkit.training.checkpoints import mode_of

    expected = [mode and f"{mode}imize" for mode in map(mode_of, scores)]
    if not directions and None in expected:
        raise InputError(f"hydra.sweeper.directions: expected minimize or maximize for each of {', '.join(scores)}")
    for score, own, direction in zip(scores, expected, directions, strict=False):  # their number is checked later
        if own not in (None, direction):
            raise InputError(f"hydra.sweeper.directions: expected {own} for {score}, got {direction}")
    return directions or [direction for direction in expected if direction is not None]
