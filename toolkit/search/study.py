"""A search: Optuna proposes trials and gets their scores. A journal keeps them, so an interrupted search goes on.

It writes trials.csv (a line per trial), best.json and search.png.

What varies is read from overrides: `depth=0,1,3`, `range(1,9)`, `interval(.1,.9)`, `tag(log,interval(1e-5,1e-2))`.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd

from toolkit import config as configs
from toolkit.config.identity import contents_of
from toolkit.config.notes import AtLeast, Between
from toolkit.config.values import check_ranges
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, read_json, write_json, write_text
from toolkit.files.text import lines_of
from toolkit.runs.stage import FREE_KEYS, OUTPUT

JOURNAL = "search.journal"
NO_CHOICE = ("oracle", "upper_bound", "autoregressive")  # methods that are not searched for


@dataclass
class Settings:
    """Settings of a search. Without `metrics` its one score is the number that the command returns."""

    trials: Annotated[int, AtLeast(1)] = 20  # that end, in all runs together
    at_once: Annotated[int, AtLeast(1)] = 1  # jobs that the launcher is given at a time
    directions: Sequence[Literal["minimize", "maximize"]] = ("minimize",)  # one per score
    metrics: Sequence[str] = ()  # names of the scores in a job's folder
    sampler: Literal["tpe", "random", "nsgaii"] = "tpe"  # who proposes; nsgaii is for several scores
    retries: Annotated[int, AtLeast(0)] = 1  # of a job that fails
    seed: Annotated[int, Between(0, 2**32 - 1)] = 0  # of the sampler

    def __post_init__(self) -> None:
        check_ranges(self, "hydra.sweeper.")
        self.names = list(self.metrics) or ["score"]
        if (count := len(self.directions)) != len(self.names):
            raise InputError(f"hydra.sweeper.directions: expected one per score ({len(self.names)}), got {count}")


class Search:
    """One search in one folder. Raises InputError if Optuna is not installed, or the folder holds another search.

    words   overrides: those that vary become `space` (key -> Optuna's distribution), the others are `fixed`
    loader  Hydra's, for globs over a config group
    command the root config: other content of the files that it reads makes another search; empty: none are known
    """

    def __init__(self, folder: Path, settings: Settings, words: Sequence[str], loader: Any = None, command: str = ""):
        try:
            from optuna import create_study, get_all_study_names, logging, samplers
            from optuna.storages import JournalStorage
            from optuna.storages.journal import JournalFileBackend
        except ImportError:
            raise InputError("hydra/sweeper=ask_tell needs Optuna: pip install 'acceptance-toolkit[optuna]'") from None
        self.folder, self.settings = folder, settings
        self.space, self.fixed = read_space(words, loader)
        space, directions = {key: repr(values) for key, values in self.space.items()}, list(settings.directions)
        files = _files_read(command, self.fixed) if command else {}
        name = content_hash(
            [sorted(self.fixed), space, list(settings.metrics), directions, *([files] if files else [])]
        )
        folder.mkdir(parents=True, exist_ok=True)
        logging.set_verbosity(logging.WARNING)
        storage = JournalStorage(JournalFileBackend(str(folder / JOURNAL)))
        if {*get_all_study_names(storage)} - {name}:
            what = "other overrides, or other content of the files that it reads"
            raise InputError(f"{folder} holds another search ({what}): choose another hydra.sweep.dir")
        self.study = create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
        seed = (settings.seed + len(self.study.trials)) % 2**32  # another one when the search goes on
        kinds = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler, "nsgaii": samplers.NSGAIISampler}
        self.study.sampler = kinds[settings.sampler](seed=seed)

    def in_state(self, *names: str) -> list[Any]:
        """Trials in these states of Optuna, in order; those that a kill has left without all parameters are passed over."""
        trials = [trial for trial in self.study.trials if trial.state.name in names]
        return [trial for trial in trials if trial.params.keys() == self.space.keys()]

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


def _files_read(command: str, fixed: Sequence[str]) -> dict[str, Any]:
    """Digests of the files and models that all trials read, by key."""
    plain = configs.plain(configs.compose(command, fixed, checked=False))
    contents = contents_of({key: value for key, value in plain.items() if key not in FREE_KEYS}, command)
    digests = configs.flatten(contents.identity)
    return {key: digests.get(key) for key in contents.paths}


def read_space(words: Sequence[str], loader: Any = None) -> tuple[dict[str, Any], list[str]]:
    """Optuna's distribution of every key that varies, and the overrides that do not. Raises InputError if nothing varies."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import RangeSweep
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    values: dict[str, Any] = {}
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(words))
    last = {override.get_key_element(): override for override in parsed}  # of a key
    for key, override in last.items():
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


def scores_of(job: Any, folder: Path, names: Sequence[str]) -> list[float] | Exception:
    """The scores of a job of Hydra's, the number that it returns if there are no names; or why it has none."""
    try:
        value = job.return_value  # raises what the job has raised
        home = folder / job.hydra_cfg.hydra.sweep.subdir
        return read_scores(Path(read_json(home / OUTPUT)["folder"]), names) if names else [float(value)]
    except Exception as error:  # whatever it is, the search goes on
        return error


def read_scores(folder: Path, names: Sequence[str]) -> list[float]:
    """These scores of an output folder. Raises InputError if one is missing, or there are several settings."""
    files = [folder / name for name in ("metrics.json", "summary.json")]  # of trainings and of decoding
    values = {key: value for file in files if file.is_file() for key, value in read_json(file).items()}
    if not values and (path := folder / "summary.csv").is_file():  # of a sweep: a line per setting
        table = pd.read_csv(path)
        rows = table[~table.method.isin(NO_CHOICE)]
        if len(rows) != 1:
            raise InputError(f"{path}: expected one setting to score (a grid of one), got {len(rows)}")
        values = rows.select_dtypes("number").iloc[0].to_dict()
    scores = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    for name in names:
        if name not in scores:
            expected = f"{sorted(scores)} (the scores in {folder})"
            raise InputError(f"hydra.sweeper.metrics: expected of {expected}, got {name}")
    return [scores[name] for name in names]


def write_results(search: Search) -> list[dict[str, str]]:
    """Write what is known so far; returns the lines of the table."""
    names, best, errors = search.settings.names, search.study.best_trials, search.study.user_attrs
    lines = []
    for trial in search.in_state("COMPLETE", "FAIL"):
        scores = dict(zip(names, trial.values or [None] * len(names), strict=True))
        failed = f"failed: {errors.get(f'error {trial.number}', 'its score is not a number')}"
        marks = {"best": "yes" if trial in best else "", "status": failed if trial.values is None else "done"}
        lines.append({"trial": trial.number, **trial.params, **scores, **marks})
    text = pd.DataFrame(lines).to_csv(index=False, float_format="%.6g")
    write_text(search.folder / "trials.csv", text)
    scored = [(trial, dict(zip(names, trial.values, strict=True))) for trial in best]
    facts = [{"trial": trial.number, "params": trial.params, "scores": scores} for trial, scores in scored]
    write_json(search.folder / "best.json", facts)
    if best and len(names) <= 2 and not search.left:
        from optuna.visualization import matplotlib as plots

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names of scores and these figures count as experimental
            search.study.set_metric_names(names)
            plot: Any = plots.plot_pareto_front if len(names) == 2 else plots.plot_optimization_history
            plot(search.study).figure.savefig(search.folder / "search.png")
    return list(csv.DictReader(lines_of(text)))
