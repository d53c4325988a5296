"""Weights & Biases, never in the way: offline without a key, no prompts for one, one run per stage.

Everything logged here is on disk as well (an offline run cannot be read back): tables as CSV and Parquet, figures as
PNG. `python -m toolkit.sync folder=outputs` uploads all offline runs of an output folder later.
"""

from __future__ import annotations

import html
import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from time import perf_counter
from typing import Any, Literal

from toolkit.errors import InputError
from toolkit.files import journal
from toolkit.files.atomic import read_json, write_json
from toolkit.files.text import first_line
from toolkit.runs.stage import hydra_job, sweep_name

Mode = Literal["online", "offline", "disabled"]
PROJECT = "acceptance-toolkit"
SERVER = "https://api.wandb.ai"
RUN_FILE = "wandb_run.json"
SPEC = Path(__file__).parents[1] / "assets" / "charts" / "scatter-by-group.json"
CHART, PLAIN_SCATTER = "acceptance-toolkit-scatter", "wandb/scatter/v0"
PROBE_SECONDS = 6.0  # within which a server that is there answers
UNNAMED = (
    "paths", "hydra", "logger", "overwrite", "track", "tags", "ckpt_path", "before", "after", "batch_size", "export",
)  # fmt: skip  # keys that do not say what sets a run apart
LINKS = ("latest-run", "debug.log", "debug-internal.log")  # that wandb makes beside its runs
SPELLINGS: dict[str, Mode] = {"online": "online", "offline": "offline", "disabled": "disabled",
                              "run": "online", "shared": "online", "dryrun": "offline"}  # fmt: skip
_tags: tuple[str, ...] = ()  # of the experiment under way
_stage = ""  # of it that runs now


@contextmanager
def tagged(tags: Sequence[str]) -> Iterator[None]:
    """Within this context every run has these tags, too: those of an experiment's stages."""
    global _tags
    before, _tags = _tags, (*_tags, *tags)
    try:
        yield
    finally:
        _tags = before


@contextmanager
def stage_named(name: str) -> Iterator[None]:
    """Within this context runs are called by the name of an experiment's stage, which no other of its stages has."""
    global _stage
    before, _stage = _stage, name
    try:
        yield
    finally:
        _stage = before


def wandb_mode() -> Mode:
    """What WANDB_MODE says; else online if there is an API key (WANDB_API_KEY or netrc); else offline.

    Disabled, with one line, where wandb is not installed.
    """
    spelling = os.environ.get("WANDB_MODE", "").strip().lower()
    if spelling and spelling not in SPELLINGS:
        raise InputError(f"WANDB_MODE: expected online, offline or disabled, got {spelling!r}")
    if spelling and SPELLINGS[spelling] == "disabled":
        return "disabled"
    if find_spec("wandb") is None:
        print("wandb: not installed, nothing is logged (pip install 'acceptance-toolkit[train]')")
        return "disabled"
    if spelling:
        return SPELLINGS[spelling]
    from requests.utils import get_netrc_auth  # as wandb itself looks for the key

    has_key = os.environ.get("WANDB_API_KEY") or get_netrc_auth(os.environ.get("WANDB_BASE_URL", SERVER))
    return "online" if has_key else "offline"


@contextmanager
def wandb_run(
    job_type: str,
    config: Mapping[str, Any],
    folder: Path | str,
    group: str | None = None,
    tags: Sequence[str] = (),
    track: bool = True,
    *,
    name: str | None = None,
    inputs: Sequence[Path | str] = (),
    project: str | None = None,
    run_id: str | None = None,
    mode: Mode | None = None,
) -> Iterator[Any]:
    """A run around a stage; finished in any case, with exit code 1 if the stage raised.

    job_type  the stage's name; the run's first tag, too
    folder    the run's files go to <folder>/wandb, which run it is to <folder>/wandb_run.json
    group     None: WANDB_RUN_GROUP, the experiment, the sweep, or the name of the folder above
    tags      more of them, beside the experiment's (`tagged`); track: False: no run
    name      what it is called, before the command's overrides; without either, as its folder. A stage of an experiment is
              called by its own name (`stage_named`)
    inputs    folders that the stage read: the config's `inputs` says which runs made them
    project   None: WANDB_PROJECT, or the toolkit's; run_id: an earlier run to be continued; mode: None: `wandb_mode`'s
    Yields the wandb run, or None if there is none to log to; the `log_*` functions below take either.
    """
    mode = (mode or wandb_mode()) if track else "disabled"
    if mode == "disabled":
        yield None
        return
    if mode == "online" and (reason := unreachable()):
        print(f"wandb: {reason}; this run is logged offline")
        mode = "offline"
    folder, job = Path(folder), hydra_job()
    experiment = job and job.runtime.choices.get("experiment")
    group = group or os.environ.get("WANDB_RUN_GROUP") or (experiment and str(experiment)) or sweep_name()
    options = {
        "project": project or os.environ.get("WANDB_PROJECT", PROJECT),
        "id": run_id,
        "name": overrides_name(name=_stage or name or "") or folder.name,
        "group": group or folder.resolve().parent.name or None,
        "tags": list(dict.fromkeys([job_type, *filter(None, (*tags, *_tags))])),
    }
    if run_id is not None and mode == "online":  # offline ones are joined when synced
        options["resume"] = "allow"
    links = {"input_runs": {Path(path).name: run_of(path) for path in inputs}} if inputs else {}
    run = _start(mode, job_type, {**config, **links}, folder, options)
    exit_code = 1
    try:
        facts = {"id": run.id, **{key: options[key] for key in ("name", "group", "project")}}
        write_json(folder / RUN_FILE, {**facts, "url": None if run.settings._offline else run.url})
        # the run's folder, and the links to the newest one, belong to the stage
        for path in (Path(run.settings.sync_dir), *(folder / "wandb" / link for link in LINKS)):
            journal.note(path, folder=True)
        yield run
        exit_code = 0
    finally:
        run.finish(exit_code=exit_code)
        if run.settings._offline:
            print(f"wandb: offline run; upload it with: python -m toolkit.sync folder={folder}")


def overrides_name(words: Sequence[str] | None = None, name: str = "", without: Sequence[str] = ()) -> str | None:
    """What a command line changed, as a run is called: "toy_head depth=2 w_rej=6"; None if it changed nothing.

    words  overrides; None: those of the Hydra job that is running, of a multirun those that it varies. Output folders,
           logging and lists of folders do not name a run, and of a path its last part does
    name   what stands before them; values that occur in it are left out
    without  further top-level keys that do not name the run
    """
    if words is None:
        job = hydra_job()
        words, varied = list(job.overrides.task) if job is not None else [], _varied()
        words = [word for word in words if not varied or word.lstrip("+~").partition("=")[0] in varied]
    parts = [name]
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        value = value if "/" not in value else "" if value[0] in "[{" else value.strip("\"'/").rpartition("/")[2]
        if key.split(".")[0] in (*UNNAMED, *without) or not value or (value.isidentifier() and value in name.split()):
            continue
        parts.append(value if key == "experiment" else f"{key.split('.')[-1]}={value}")
    return " ".join(filter(None, parts))[:128] or None


def _varied() -> set[str]:
    """The keys that the command line of a multirun gives several values, and the experiment; empty if it is not at hand."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    if sweep_name() is None:
        return set()
    try:
        overrides = OverridesParser.create().parse_overrides([w for w in sys.argv[1:] if "=" in w and w[0] != "-"])
    except OverrideParseException:  # the command line has forms of its own
        return set()
    varied = {str(override.key_or_group) for override in overrides if override.is_sweep_override()}
    return {*varied, "experiment"} if varied else set()


def unreachable(timeout: float = PROBE_SECONDS) -> str | None:
    """Why the W&B server does not answer within `timeout` seconds; None if it does, whatever it says."""
    base = os.environ.get("WANDB_BASE_URL", SERVER)
    started, answers = perf_counter(), Queue[str | None]()

    def ask() -> None:
        try:
            with urllib.request.urlopen(base, timeout=timeout):
                answers.put(None)
        except urllib.error.HTTPError:
            answers.put(None)  # it is there
        except (OSError, ValueError) as error:
            answers.put(f"{base} does not answer ({getattr(error, 'reason', None) or error})")

    Thread(target=ask, daemon=True).start()  # looking up a name knows no timeout
    try:
        return answers.get(timeout=timeout)
    except Empty:
        return f"{base} does not answer within {perf_counter() - started:.0f} s"


def run_of(folder: Path | str) -> dict[str, Any] | None:
    """The W&B run of an output folder as it was remembered: id, name, project, url (None if it was offline)."""
    path = Path(folder) / RUN_FILE
    return read_json(path) if path.exists() else None


def log_summary(run: Any, values: Mapping[str, Any]) -> None:
    """Scalars that runs can be sorted by; missing ones (None, not a number) are left out."""
    if run is not None:
        run.summary.update({key: value for key, value in values.items() if value is not None and value == value})


def log_folder(run: Any, name: str, kind: str, path: Path | str) -> None:
    """A folder or file as an artifact: heads, traces. Opt-in: artifacts are uploaded whole."""
    if run is not None:
        import wandb

        artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "-", name), type=kind)
        artifact.add_dir(str(path)) if Path(path).is_dir() else artifact.add_file(str(path))
        run.log_artifact(artifact)


def parameter_counts(models: Mapping[str, Any]) -> dict[str, int]:
    """`parameters/<name>` of each model; one that has no parameters (a table) counts 0."""
    weights = {name: model.parameters() if hasattr(model, "parameters") else () for name, model in models.items()}
    return {f"parameters/{name}": sum(int(tensor.numel()) for tensor in tensors) for name, tensors in weights.items()}


def log_table(run: Any, name: str, frame: Any) -> None:
    """A pandas table, as wandb.Table; entries that are neither numbers nor text are logged as text."""
    if run is not None:
        run.log({name: _table(frame)})


def log_image(run: Any, name: str, path: Path | str) -> None:
    """A figure from its file."""
    if run is not None:
        import wandb

        run.log({name: wandb.Image(str(path))})


def log_scatter(run: Any, name: str, frame: Any, x: str, y: str, title: str, by: str = "method") -> None:
    """Two columns of a table as a custom chart, one colour per value of the column `by`.

    Its specification lies on the server, under a team or user. Where that is not known, for offline runs without
    WANDB_ENTITY, it is W&B's own scatter, which has one colour.
    """
    if run is not None:
        import wandb

        preset = scatter_preset(run)
        fields = {"x": x, "y": y, **({} if preset == PLAIN_SCATTER else {"group": by})}
        run.log({name: wandb.plot_table(preset, _table(frame), fields, {"title": title})})


def scatter_preset(run: Any) -> str:
    """The name of our scatter plot's specification for this run, put on the server if it is not there yet."""
    offline = run.settings._offline
    entity = os.environ.get("WANDB_ENTITY") if offline else run.entity
    return f"{entity}/{CHART}" if entity and (offline or register_chart(entity)) else PLAIN_SCATTER


@cache
def register_chart(entity: str) -> bool:
    """Put the specification of our scatter plot on the server, for a team or user; False, and a line, if it refuses."""
    import wandb

    try:
        wandb.Api().create_custom_chart(
            entity=entity,
            name=CHART,
            display_name="Scatter, one colour per group",
            spec_type="vega2",
            access="private",
            spec=SPEC.read_text(encoding="utf-8"),
        )
    except Exception as error:  # the client's kinds, the server's words
        if "exist" in str(error).lower():
            return True
        reason = f"the chart {CHART} could not be put on the server ({first_line(error)})"
        print(f"wandb: {reason}; scatter plots have one colour")
        return False
    return True


def log_lines(run: Any, name: str, frame: Any, x: str, y: str, by: str, title: str) -> None:
    """One line of (x, y) per value of the column `by`, as a custom chart."""
    if run is not None:
        import wandb

        groups = [(str(key), group.sort_values(x)) for key, group in frame.groupby(by, sort=False)]
        chart = wandb.plot.line_series(
            xs=[group[x].tolist() for _, group in groups],
            ys=[group[y].tolist() for _, group in groups],
            keys=[key for key, _ in groups],
            title=title,
            xname=x,
        )
        run.log({name: chart})


def _start(mode: Mode, job_type: str, config: Any, folder: Path, options: Mapping[str, Any]) -> Any:
    """wandb.init without output capture; a server that cannot be reached makes the run an offline one."""
    import wandb

    def init(mode: Mode) -> Any:
        return wandb.init(
            dir=str(folder.absolute()),  # W&B's process may be an earlier program's, in another folder
            mode=mode,
            config=dict(config),
            job_type=job_type,
            reinit="create_new",  # a training run of the same process goes on
            settings=wandb.Settings(console="off", quiet=True, silent=True, init_timeout=30),
            **options,
        )

    folder.mkdir(parents=True, exist_ok=True)
    try:
        return init(mode)
    except wandb.errors.Error as error:
        if mode == "offline":
            raise
        print(f"wandb: {first_line(error)}; this run is logged offline")
        return init("offline")


def _table(frame: Any) -> Any:
    """A column of a wandb.Table has one type: numbers where all are, else text; None where a value is missing.

    Texts of models and prompts are shown, never read as markup: they are escaped.
    """
    import wandb

    columns = []
    for name in frame.columns:
        values = [None if isinstance(value, float) and value != value else value for value in frame[name].tolist()]
        if not all(isinstance(value, bool | int | float | None) for value in values):
            values = [None if value is None else html.escape(str(value), quote=False) for value in values]
        columns.append(values)
    names: list[Any] = [str(name) for name in frame.columns]
    return wandb.Table(columns=names, data=[list(row) for row in zip(*columns, strict=True)])
