"""A search: trials asked of Optuna and told to it, kept in a journal, so that it goes on where it was interrupted.

The journal lies in the search's folder. Trials that ran when a process was killed are proposed again. A trial whose job
fails is proposed again, too, `retries` times; then it counts as failed, and the search goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges
from toolkit.errors import InputError
from toolkit.io import content_hash

JOURNAL = "search.journal"
STUDY = "search"
ATTEMPT, INSTEAD, JOB, ERROR = "attempt", "instead_of", "job", "error"  # what is noted of a trial


@dataclass(frozen=True)
class Settings:
    """How a search goes.

    trials      how many end, in all runs of it together
    at_once     jobs that the launcher is given at a time
    directions  one per score: minimize or maximize
    metrics     names of the scores in a job's folder; none: the number that the command returns
    sampler     who proposes: tpe, random, or nsgaii (for several scores)
    retries     of a job that fails
    seed        of the sampler
    """

    trials: Annotated[int, AtLeast(1)] = 20
    at_once: Annotated[int, AtLeast(1)] = 1
    directions: tuple[Literal["minimize", "maximize"], ...] = ("minimize",)
    metrics: tuple[str, ...] = ()
    sampler: Literal["tpe", "random", "nsgaii"] = "tpe"
    retries: Annotated[int, AtLeast(0)] = 1
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "directions", tuple(self.directions))
        object.__setattr__(self, "metrics", tuple(self.metrics))
        check_ranges(self, "hydra.sweeper.")
        if len(self.directions) != max(len(self.metrics), 1):
            raise InputError(
                f"hydra.sweeper.directions: expected one per score ({max(len(self.metrics), 1)}), got {len(self.directions)}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """What tables call the scores."""
        return self.metrics or ("score",)


class Search:
    """One search in one folder. Raises InputError if Optuna is not installed, or the folder holds another search.

    space  key -> Optuna's distribution
    asked  what else the scores depend on: the overrides that do not vary
    """

    def __init__(self, folder: Path, settings: Settings, space: dict[str, Any], asked: Sequence[str]):
        self.optuna = optuna = import_optuna()
        self.folder, self.settings, self.space = folder, settings, space
        folder.mkdir(parents=True, exist_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL))
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            study_name=STUDY,
            storage=optuna.storages.JournalStorage(backend),
            directions=list(settings.directions),
            load_if_exists=True,
        )
        self.study.sampler = self._sampler(len(self.study.get_trials(deepcopy=False)))
        told = content_hash([sorted(asked), {key: repr(one) for key, one in space.items()}, settings.metrics])
        known = self.study.user_attrs.get("asked", told)
        if known != told or [one.name.lower() for one in self.study.directions] != list(settings.directions):
            raise InputError(
                f"{folder} holds another search (other overrides, intervals or scores): choose another hydra.sweep.dir"
            )
        self.study.set_user_attr("asked", told)
        for trial in self._in_state("RUNNING"):  # a process was killed
            self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            self._again(trial, trial.user_attrs.get(ATTEMPT, 0))

    @property
    def left(self) -> int:
        """Trials that have not ended yet."""
        again = {one.user_attrs.get(INSTEAD) for one in self.study.get_trials(deepcopy=False)}
        return max(self.settings.trials - sum(one.number not in again for one in self.trials), 0)

    @property
    def trials(self) -> list[Any]:
        """Trials that have ended, in order; one that was proposed again is named by another's note INSTEAD."""
        return self._in_state("COMPLETE", "FAIL")

    @property
    def num_jobs(self) -> int:
        """How many jobs were begun: the number of the next one."""
        jobs = [one.user_attrs.get(JOB, -1) for one in self.study.get_trials(deepcopy=False)]
        return max(jobs, default=-1) + 1

    def ask(self) -> list[Any]:
        """The next trials: as many as run at once."""
        first = self.num_jobs
        trials = [self.study.ask(self.space) for _ in range(min(self.settings.at_once, self.left))]
        for number, trial in enumerate(trials):
            trial.set_user_attr(JOB, first + number)
        return trials

    def tell(self, trial: Any, scores: Sequence[float] | Exception) -> None:
        """How a trial ended: its scores, or why it has none."""
        if not isinstance(scores, Exception):
            self.study.tell(trial, list(scores))
            return
        trial.set_user_attr(ERROR, " ".join(str(scores).split()))
        attempt = trial.user_attrs.get(ATTEMPT, 0)
        self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        if attempt < self.settings.retries:
            self._again(trial, attempt + 1)

    def best(self) -> list[Any]:
        """The trials that no other one beats in every score; the best one of a single score."""
        return list(self.study.best_trials) if self._in_state("COMPLETE") else []

    def _again(self, trial: Any, attempt: int) -> None:
        """Propose a trial once more."""
        self.study.enqueue_trial(trial.params, user_attrs={ATTEMPT: attempt, INSTEAD: trial.number})

    def _in_state(self, *names: str) -> list[Any]:
        return [one for one in self.study.get_trials(deepcopy=False) if one.state.name in names]

    def _sampler(self, known: int) -> Any:
        """Who proposes; another seed when the search goes on, or it would propose what it has proposed."""
        kinds, seed = self.optuna.samplers, self.settings.seed + known
        if self.settings.sampler == "random":
            return kinds.RandomSampler(seed=seed)
        return kinds.NSGAIISampler(seed=seed) if self.settings.sampler == "nsgaii" else kinds.TPESampler(seed=seed)


def import_optuna() -> Any:
    """Optuna. Raises InputError, one line, if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise InputError("hydra/sweeper=ask_tell needs Optuna: pip install 'acceptance-toolkit[optuna]'") from None
    return optuna
