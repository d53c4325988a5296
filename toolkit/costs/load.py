"""What a forward pass costs under load: seconds by rows of the batch, tokens per row and context, for draft and target.

A table over a grid of points: measured on this machine (`analysis.timing`), regressed on an engine's answers
(`analysis.timing engine=`), modelled from a device's peak figures (`analysis.loads.costs`), published, or a CSV of one's own.
It is linear between its points, continued by its last slope beyond them (flat where that falls), and flat before its first
point: `LoadCost.lacks` and `beyond` say where it is asked for more. A published table ends at its last point.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges, checked
from toolkit.costs.published import PREFIX, published
from toolkit.costs.table import CostTable, interpolate
from toolkit.errors import InputError, warn
from toolkit.files.atomic import write_text
from toolkit.files.text import first_line, lines_of

Array = NDArray[np.float64]
COLUMNS = ("model", "batch", "width", "context", "seconds")
MODELS = ("draft", "target")
RATIO = "ratio"  # source of a table that no batch changes
FALLS = 0.01  # of a time, from one width to the next, beyond which a line says so
Size = Annotated[float, AtLeast(0)]


@dataclass(frozen=True)
class CostGrid:
    """Seconds of one model's forward pass at grid points [b, w, x]: batch sizes, tokens per row and contexts, all ascending."""

    batch: tuple[float, ...]
    width: tuple[float, ...]
    context: tuple[float, ...]
    seconds: Array

    def __call__(self, batch: float, width: float = 1, context: float = 0) -> float:
        """Seconds of a forward pass of `batch` rows that reads `width` tokens in each, after `context` others."""
        values: Any = self.seconds
        for points, at in ((self.batch, batch), (self.width, width), (self.context, context)):
            values = interpolate(points, values, at)
        return float(values)

    @property
    def fall(self) -> str | None:
        """Where the seconds fall most from one width to the next, in words; None: nowhere by more than FALLS."""
        if len(self.width) == 1 or not (ratios := self.seconds[:, 1:] / self.seconds[:, :-1]).min() < 1 - FALLS:
            return None
        b, w, x = (int(i) for i in np.unravel_index(ratios.argmin(), ratios.shape))
        before, after = self.seconds[b, w : w + 2, x]
        return (
            f"fall from {before:.3g} s at width {self.width[w]:g} to {after:.3g} s at width {self.width[w + 1]:g} (batch "
            f"size {self.batch[b]:g})"
        )


@dataclass(frozen=True)
class EngineFacts:
    """What a table of an engine's answers says beside its times (`analysis.timing engine=`).

    drafting  seconds in the target's times from width 2 on that a round with copied tokens does not take
    column    whether the time of a column is known apart from that of a draft forward pass
    widest    tokens of the widest round among the answers; points beyond are of prompts
    noise     why nothing is advised at these costs; None: the prices are sharp enough
    """

    drafting: Annotated[float, AtLeast(0)]
    column: bool
    widest: Annotated[int, AtLeast(1)]
    noise: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self, "engine.")


@dataclass(frozen=True)
class LoadCost:
    """Costs of both models' forward passes under load.

    source  "measured", "modelled", "ratio", the file it was read from, or an engine with its model's file
    about   machine, models, spread
    engine  of a table that was made of an engine's answers
    """

    draft: CostGrid
    target: CostGrid
    source: str
    about: Mapping[str, Any] = field(default_factory=dict)
    engine: EngineFacts | None = None

    @property
    def whose(self) -> str:
        """Whose costs these are, for captions."""
        if self.engine is not None:
            return ", ".join([f"costs of {self.source}", *filter(None, [self.about.get("processor")])])
        if self.is_published:
            return f"costs {self.source} ({self.about['source']}, {self.about['date']}), prompts not counted"
        return f"costs {self.source}" + ("" if self.source == "measured" else ", not measured")

    @property
    def is_published(self) -> bool:
        return self.source.startswith(PREFIX)

    def apart(self, what: str) -> LoadCost:
        """The table for rounds of `what`, which need the time of a column alone. Raises InputError where it is not known."""
        if self.engine is not None and not self.engine.column:
            raise InputError(
                f"costs of {self.source}: {what} need the time of a column, which drafts of one model do not tell: expected "
                "answers of the engine's own lookup, too (source: lookup)"
            )
        return self

    @property
    def copying(self) -> LoadCost:
        """The costs of rounds with copied tokens, for which no draft catches up. Raises InputError as `apart` does."""
        self.apart("copied tokens")
        if self.engine is None:
            return self
        seconds = self.target.seconds.copy()
        seconds[:, 1:] -= self.drafting
        return replace(self, target=replace(self.target, seconds=seconds), engine=replace(self.engine, drafting=0.0))

    @property
    def drafting(self) -> float:
        """Seconds in the target's times from width 2 on that a round takes once it has a draft forward pass."""
        return 0.0 if self.engine is None else self.engine.drafting

    @checked
    def round(self, batch: Size, num_drafted: Size, context: Size = 0, blocks: bool = False) -> float:
        """Seconds of a round of `batch` rows that draft `num_drafted` tokens each, the target's forward pass included.

        blocks  they come from one draft forward pass
        """
        num_calls = min(num_drafted, 1) if blocks else num_drafted
        return num_calls * self.draft(batch, 1, context) + self.target(batch, num_drafted + 1, context)

    @property
    def middle(self) -> float:
        """The middle of the contexts that the target was timed at, in tokens."""
        return float(np.median(self.target.context))

    @property
    def contexts(self) -> tuple[float, ...]:
        """The contexts that either model was timed at, ascending."""
        return tuple(sorted({*self.draft.context, *self.target.context}))

    def lacks(self, batches: Sequence[float], widest: float = 1) -> str | None:
        """Which time the table is asked for and cannot tell, in words; None: it tells all. It would read another one as flat.

        batches  rows of the rounds;  widest  tokens per row of a target forward pass, drafted ones included
        Below the first point of an axis, and beyond a single one, nothing is known. A ratio is flat by its definition.
        """
        if self.is_published and widest > self.target.width[-1]:
            most = self.target.width[-1] - 1
            return f"expected max_drafted, or policy.max_nodes of a tree, of at most {most:g}, where the published times end"
        for name, grid in ((name, getattr(self, name)) for name in MODELS if self.source != RATIO):
            widths = (1.0, widest) if name == "target" else (1.0,)
            for axis, points, wanted in (("batch size", grid.batch, batches), ("width", grid.width, widths)):
                for at in wanted:
                    if at < points[0] or (len(points) == 1 and at != points[0]):
                        covered = " and ".join(f"{point:g}" for point in points)
                        return (
                            f"expected times of the {name} at {axis} {at:g}, too, got those at {axis} {covered} alone"
                        )
        return None

    def warn(self, costs: str | CostTable | None, batches: Sequence[float], widest: float = 1) -> None:
        """Warn of what the table of a policy's `costs` lacks (None: it was not named). Raises InputError if it is published."""
        if isinstance(costs, str) and (lacking := self.lacks(batches, widest)):
            if self.is_published:
                raise InputError(f"policy.costs={costs}: {lacking}")
            warn(f"policy.costs={costs}: {lacking}; until then these count as equal")

    def beyond(self, batch: float, widest: float = 1) -> str | None:
        """Which of these is beyond the table, where the last slope continues, in words; None: neither. As in `lacks`."""
        if self.source == RATIO:
            return None
        last = self.target.width[-1] if self.engine is None else self.engine.widest
        ends = (min(self.draft.batch[-1], self.target.batch[-1]), last)
        parts = zip(("batch size", "width"), (batch, widest), ends, strict=True)
        over = [f"{axis} {at:g} is beyond the cost table, which ends at {end:g}" for axis, at, end in parts if at > end]
        return "; ".join(over) or None

    @property
    def fall(self) -> str | None:
        """Where times fall with the width, in words; None: nowhere by more than FALLS."""
        falls = [f"the {name}'s times {fall}" for name in MODELS if (fall := getattr(self, name).fall)]
        return f"{' and '.join(falls)}: noise of a busy machine, if not of this width" if falls else None

    def save(self, path: Path | str) -> Path:
        """Write the table as JSON, whole or not at all."""
        content: dict[str, Any] = {"source": self.source, "about": dict(self.about)}
        for name in MODELS:
            grid = asdict(getattr(self, name))
            content[name] = grid | {"seconds": grid["seconds"].tolist()}
        content |= {} if self.engine is None else {"engine": asdict(self.engine)}
        return write_text(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    @checked
    def ratio(cls, c: Annotated[float, AtLeast(0)], column: Annotated[float, AtLeast(0)] = 0.0) -> LoadCost:
        """The cost c of a draft forward pass, in target forward passes of one token per row; each further one adds `column`."""
        draft = CostGrid((1.0,), (1.0,), (0.0,), np.full((1, 1, 1), float(c)))
        target = CostGrid((1.0,), (1.0, 2.0), (0.0,), np.array([[[1.0], [1.0 + column]]]))
        return cls(draft, target, RATIO, {"c": c, "column": column})

    @classmethod
    def of(cls, tables: Sequence[CostTable]) -> LoadCost:
        """The costs under load of one pair's tables at several batch sizes, ascending, of the same widths.

        Large batches are measured at shorter contexts: a table is read by its own curve at the contexts of the others. Tables
        time the draft over one token per row; reading more costs it as many times more as it costs the target. The forward
        passes of a target without a draft stand for those of a draft.
        """
        first, contexts = tables[0], sorted({context for table in tables for context in table.contexts})
        axes = (
            tuple(float(table.batch_size) for table in tables),
            tuple(map(float, first.widths)),
            tuple(map(float, contexts)),
        )

        def at_contexts(table: CostTable, seconds: Sequence[Any]) -> Array:
            values = np.array(seconds, dtype=np.float64)
            if list(table.contexts) == contexts:
                return values
            return np.array([interpolate(table.contexts, values, context) for context in contexts])

        target = np.array([at_contexts(table, table.target_seconds) for table in tables]).transpose(0, 2, 1)
        draft = target
        if first.draft_seconds:
            by_batch = np.array([at_contexts(table, table.draft_seconds) for table in tables])
            draft = by_batch[:, None] * target / target[:, :1]
        return cls(CostGrid(*axes, draft), CostGrid(*axes, target), "measured", dict(first.machine))

    @classmethod
    @checked
    def load(cls, path: Path | str) -> LoadCost:
        """Read a JSON that `save` or `CostTable.save` wrote, a CSV with the columns model, batch, width, context, seconds, or
        published/NAME:C (`toolkit.costs.published`).

        Raises InputError for a missing or broken file, holes in the grid, and times that are not positive.
        """
        if str(path).startswith(PREFIX):
            return cls._published(str(path))
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"expected a cost table at {path}: {error.strerror}") from None
        except ValueError as error:  # a name with a zero byte, or no UTF-8
            raise InputError(f"expected a cost table as UTF-8 text at {path}: {first_line(error)}") from None
        return _from_csv(path, text) if path.suffix == ".csv" else _from_json(path, text)

    @classmethod
    def _published(cls, words: str) -> LoadCost:
        seconds, draft, about = published(words)
        of_target = grid_of({(1.0, width, 0.0): time for width, time in seconds.items()}, words)
        return cls(grid_of({(1.0, 1.0, 0.0): draft}, words), of_target, words, about)


def grid_of(points: Mapping[tuple[float, float, float], float], where: str) -> CostGrid:
    """A grid of {(batch, width, context): seconds}. Raises InputError for holes and for times that are not positive."""
    if not points:
        raise InputError(f"{where}: expected at least one time, got none")
    axes = tuple(tuple(sorted({key[axis] for key in points})) for axis in range(3))
    if (
        not np.isfinite([value for axis in axes for value in axis]).all()
        or min(axes[0][0], axes[1][0], axes[2][0] + 1) < 1
    ):
        raise InputError(
            f"{where}: expected batch and width of at least 1 and context of at least 0, all of them numbers"
        )
    seconds = np.empty([len(axis) for axis in axes])
    for at in np.ndindex(*seconds.shape):
        key = tuple(axis[i] for axis, i in zip(axes, at, strict=True))
        value = points.get((key[0], key[1], key[2]))
        cell = "batch={:g} width={:g} context={:g}".format(*key)
        if value is None:
            raise InputError(f"{where}: the grid has a hole at {cell}; give every combination of the values in use")
        if not np.isfinite(value) or value <= 0:
            raise InputError(f"{where}: expected seconds above 0 at {cell}, got {value}")
        seconds[at] = value
    return CostGrid(axes[0], axes[1], axes[2], seconds)


def _from_csv(path: Path, text: str) -> LoadCost:
    try:
        lines = list(csv.DictReader(lines_of(text)))
    except csv.Error as error:
        raise InputError(f"{path}: expected a CSV with the columns {', '.join(COLUMNS)}, got {error}") from None
    if not lines or set(COLUMNS) - set(lines[0]):
        raise InputError(f"{path}: expected a CSV with the columns {', '.join(COLUMNS)}")
    points: dict[str, dict[tuple[float, float, float], float]] = {name: {} for name in MODELS}
    for number, line in enumerate(lines, start=2):
        if line["model"] not in MODELS:
            raise InputError(f"{path}, line {number}: expected model draft or target, got {line['model']}")
        try:
            batch, width, context, seconds = (float(line[name]) for name in COLUMNS[1:])
        except (TypeError, ValueError):
            raise InputError(f"{path}, line {number}: expected numbers in {', '.join(COLUMNS[1:])}") from None
        if (batch, width, context) in points[line["model"]]:
            raise InputError(f"{path}, line {number}: this model, batch, width and context have a time already")
        points[line["model"]][batch, width, context] = seconds
    draft, target = (grid_of(points[name], f"{path}, {name}") for name in MODELS)
    return LoadCost(draft, target, str(path))


def _from_json(path: Path, text: str) -> LoadCost:
    try:
        content = json.loads(text)
        if "target_seconds" in content:
            return LoadCost.of([CostTable(**content)])
        grids = []
        for name in MODELS:
            part = content[name]
            names = ("batch", "width", "context")
            if any(isinstance(part[axis], str) for axis in names):
                raise ValueError("expected lists of numbers")
            axes = [tuple(float(v) for v in part[axis]) for axis in names]
            seconds = np.array(part["seconds"], dtype=np.float64)
            if seconds.shape != tuple(map(len, axes)) or any(len(set(axis)) < len(axis) for axis in axes):
                sizes = [len(axis) for axis in axes]
                raise ValueError(
                    f"seconds of shape {list(seconds.shape)} for {sizes} different points of {', '.join(names)}"
                )
            index = list(np.ndindex(*seconds.shape))
            points = {(axes[0][b], axes[1][w], axes[2][x]): float(seconds[b, w, x]) for b, w, x in index}
            grids.append(grid_of(points, f"{path}, {name}"))
        source, shapes = str(content["source"]), [grid.seconds.shape for grid in grids]
        is_ratio = source == RATIO and shapes == [(1, 1, 1), (1, 2, 1)]  # flat by definition; a table is not
        source = source if is_ratio or source != RATIO else str(path)
        engine, about = EngineFacts(**content["engine"]) if "engine" in content else None, content.get("about", {})
        if not isinstance(about, dict):
            raise TypeError(f"expected about as an object, got {type(about).__name__}")
        if source.startswith(PREFIX) and not {"source", "date"} <= about.keys():
            raise ValueError(f"expected about with source and date, for a source that begins {PREFIX}")
        return LoadCost(grids[0], grids[1], source, about, engine)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{path} is not a cost table ({reason}); write it with analysis.timing") from None
