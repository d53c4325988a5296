"""hydra/sweeper=ask_tell: the jobs of a multirun are proposed by Optuna (`toolkit.search`).

Hydra looks for sweepers in packages of this name alone, and imports all of them at every start. So nothing else is imported
here before a search begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class AskTell(Sweeper):
    """A sweeper. params: key -> values or an interval, as on the command line; other arguments: `toolkit.search.Settings`."""

    def __init__(self, params: Mapping[str, Any] | None = None, **settings: Any):
        super().__init__()
        self.params, self.settings = dict(params or {}), settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """As Hydra asks for it."""
        from hydra.core.plugins import Plugins

        self.hydra_context = self.context = hydra_context
        self.config, self.folder = config, Path(config.hydra.sweep.dir)
        self.runs = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> list[dict[str, str]]:
        """All trials that are left; returns the lines of the table. One line of error for what a user can mend."""
        from hydra.errors import CompactHydraException

        from toolkit.errors import InputError

        try:
            return self._search(arguments)
        except InputError as error:
            raise CompactHydraException(f"error: {error}") from error

    def _search(self, arguments: Sequence[str]) -> list[dict[str, str]]:
        from omegaconf import OmegaConf

        from toolkit.config import plain
        from toolkit.search.results import draw, write_results
        from toolkit.search.space import read_space, words_of
        from toolkit.search.study import Search, Settings, import_optuna
        from toolkit.training.console import print_table

        import_optuna()
        folder = self.folder
        words = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        space, fixed = read_space(words, self.context.config_loader)
        given = {name: plain(value) if OmegaConf.is_config(value) else value for name, value in self.settings.items()}
        search = Search(folder, Settings(**given), space, fixed)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        while search.left:
            trials = search.ask()
            jobs = [[*fixed, *words_of(trial.params)] for trial in trials]
            self.validate_batch_is_legal(jobs)
            first = trials[0].user_attrs["job"]
            for trial, returned in zip(trials, self.runs.launch(jobs, initial_job_idx=first), strict=True):
                search.tell(trial, _scores(returned, folder, search.settings))
            write_results(search)
        lines = write_results(search)
        print_table(f"search {folder.name}", lines, folder / "trials.csv")
        print(f"table: {folder / 'trials.csv'}")
        if (path := draw(search)) is not None:
            print(f"figure: {path}")
        return lines


def _scores(returned: JobReturn, folder: Path, settings: Any) -> list[float] | Exception:
    """What a job found, or why it found nothing."""
    from toolkit.io import read_json
    from toolkit.search.scores import scores_of
    from toolkit.stage import OUTPUT

    try:
        value = returned.return_value  # raises what the job has raised
        if not settings.metrics:
            return [float(value)]
        home = folder / str(returned.hydra_cfg.hydra.sweep.subdir) if returned.hydra_cfg is not None else folder
        return scores_of(Path(read_json(home / OUTPUT)["folder"]), settings.metrics)
    except Exception as error:  # whatever it is, the search goes on
        return error
