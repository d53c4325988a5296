"""A calibration beside the head it belongs to: <weights file's stem>.calibration.json, written whole and read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.acceptance.calibration.maps import Calibration
from toolkit.acceptance.saved import SavedHead
from toolkit.errors import InputError
from toolkit.files.atomic import file_hash, read_json, write_json


def path_of(folder: Path | str, kind: type[SavedHead]) -> Path:
    """The path of the calibration of a kind of head in its folder, whether there is one or not."""
    return Path(folder) / f"{Path(kind.weights_file).stem}.calibration.json"


def save(folder: Path | str, kind: type[SavedHead], calibration: Calibration, facts: Mapping[str, Any]) -> Path:
    """Write a calibration beside its head, with the hash of the head's weights. facts: what it was fitted on."""
    weights = file_hash(Path(folder) / kind.weights_file)
    return write_json(path_of(folder, kind), {"weights": weights, **calibration.as_json(), "about": dict(facts)})


def load(folder: Path | str, kind: type[SavedHead]) -> Calibration | None:
    """The calibration of a head; None if its folder holds none.

    Raises InputError if the file is not whole, or was made for other weights.
    """
    path = path_of(folder, kind)
    if not path.exists():
        return None
    value = read_json(path)
    if not isinstance(value, dict) or set(value) != {"weights", "maps", "temperature", "about"}:
        raise InputError(f"{path}: expected weights, maps, temperature and about, and nothing else; fit it again")
    here = file_hash(Path(folder) / kind.weights_file)
    if value["weights"] != here:
        raise InputError(
            f"{path} was fitted to other weights ({value['weights']}, the head's are {here}); fit it again"
        )
    try:
        return Calibration.from_json({name: value[name] for name in ("maps", "temperature")})
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def needed(folder: Path | str, kind: type[SavedHead]) -> Calibration:
    """The calibration of a head, as by `load`. Raises InputError if there is none."""
    calibration = load(folder, kind)
    if calibration is None:
        raise InputError(
            f"expected a calibration ({path_of(folder, kind).name}) beside the head in {folder}, found none: fit one with "
            "python -m analysis.heads fit=..., or leave calibrated=false"
        )
    return calibration
