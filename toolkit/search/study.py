"""A search: Optuna proposes trials and gets their scores. A journal keeps them, so an interrupted search goes on.

What varies is read from overrides: `depth=0,1,3`, `range(1,9)`, `interval(.1,.9)`, `tag(log,interval(1e-5,1e-2))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash

JOURNAL = "search.journal"


@dataclass
class Settings:
    """Settings of a search. Without `metrics` its one score is the number that the command returns."""

    trials: Annotated[int, AtLeast(1)] = 20  # that end, in all runs together
    at_once: Annotated[int, AtLeast(1)] = 1  # jobs that the launcher is given at a time
    directions: Sequence[Literal["minimize", "maximize"]] = ("minimize",)  # one per score
    metrics: Sequence[str] = ()  # names of the scores in a job's folder
    sampler: Literal["tpe", "random", "nsgaii"] = "tpe"  # who proposes; nsgaii is for several scores
    retries: Annotated[int, AtLeast(0)] = 1  # of a job that fails
    seed: int = 0  # of the sampler

    def __post_init__(self) -> None:
        check_ranges(self, "hydra.sweeper.")
        self.names = list(self.metrics) or ["score"]
        if (count := len(self.directions)) != len(self.names):
            raise InputError(f"hydra.sweeper.directions: expected one per score ({len(self.names)}), got {count}")


class Search:
    """One search in one folder. Raises InputError if Optuna is not installed, or the folder holds another search.

    words   overrides: those that vary become `space` (key -> Optuna's distribution), the others are `fixed`
    loader  Hydra's, for globs over a config group
    """

    def __init__(self, folder: Path, settings: Settings, words: Sequence[str], loader: Any = None):
        try:
            from optuna import create_study, get_all_study_names, logging, samplers
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend
        except ImportError:
            raise InputError("hydra/sweeper=ask_tell needs Optuna: pip install 'acceptance-toolkit[optuna]'") from None
        self.folder, self.settings = folder, settings
        self.space, self.fixed = read_space(words, loader)
        space, directions = {key: repr(values) for key, values in self.space.items()}, list(settings.directions)
        name = content_hash([sorted(self.fixed), space, list(settings.metrics), directions])
        folder.mkdir(parents=True, exist_ok=True)
        logging.set_verbosity(logging.WARNING)
        storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
        if {*get_all_study_names(storage)} - {name}:
            raise InputError(f"{folder} holds another search (other overrides): choose another hydra.sweep.dir")
        self.study = create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
        seed = settings.seed + len(self.study.trials)  # another one when the search goes on
        kinds = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler, "nsgaii": samplers.NSGAIISampler}
        self.study.sampler = kinds[settings.sampler](seed=seed)

    def in_state(self, *names: str) -> list[Any]:
        """Trials in these states of Optuna, in order; those that a kill has left without all parameters are passed over."""
        return [
            trial
            for trial in self.study.trials
            if trial.state.name in names and trial.params.keys() == self.space.keys()
        ]

    @property
    def left(self) -> int:
        return max(self.settings.trials - len(self.in_state("COMPLETE", "FAIL")), 0)

    def ask(self) -> list[Any]:
        """The next trials, at most `at_once`; first those that ran when a process was killed."""
        count = min(self.settings.at_once, self.left)
        trials = self.in_state("RUNNING")[:count]
        return [*trials, *(self.study.ask(self.space) for _ in range(count - len(trials)))]

    def tell(self, trial: Any, scores: Sequence[float] | Exception) -> None:
        """Record how a trial ended: its scores, or why it has none."""
        from optuna.trial import TrialState

        if isinstance(scores, Exception):
            self.study.set_user_attr(f"error {trial.number}", " ".join(str(scores).split()))
            self.study.tell(trial.number, state=TrialState.FAIL)
        else:
            self.study.tell(trial.number, list(scores))


def read_space(words: Sequence[str], loader: Any = None) -> tuple[dict[str, Any], list[str]]:
    """Optuna's distribution of every key that varies, and the overrides that do not. Raises InputError if nothing varies."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import RangeSweep
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    values: dict[str, Any] = {}
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(words))
    for key, override in {
        override.get_key_element(): override for override in parsed
    }.items():  # the last of a key wins
        swept: Any = override.value()
        log = "log" in getattr(swept, "tags", ())
        try:
            if not override.is_sweep_override():
                values[key] = f"{key}={override.get_value_element_as_str()}"
            elif override.is_interval_sweep():
                kind = IntDistribution if {type(swept.start), type(swept.end)} == {int} else FloatDistribution
                values[key] = kind(swept.start, swept.end, log=log)
            elif isinstance(swept, RangeSweep) and isinstance(numbers := swept.range(), range):
                values[key] = IntDistribution(numbers[0], numbers[-1], log=log, step=1 if log else numbers.step)
            else:
                values[key] = CategoricalDistribution(list(override.sweep_string_iterator()))
        except (ValueError, IndexError, AttributeError) as error:
            raise InputError(f"{key}: expected values or an interval to search in ({error})") from None
    space = {key: value for key, value in values.items() if not isinstance(value, str)}
    if not space:
        raise InputError("nothing varies: expected KEY=A,B or 'KEY=interval(LOW,HIGH)' on the command line, with -m")
    return space, [value for value in values.values() if isinstance(value, str)]
