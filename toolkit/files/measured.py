"""What was measured on this machine, in the user's cache: one JSON file per kind of measurement, {key: value}.

A file that is missing, cut off or of another form is measured again. A folder that cannot be written to keeps nothing. What
comes to nothing on a busy machine (None) is measured again by the next process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from toolkit.errors import InputError
from toolkit.files import lock
from toolkit.files.atomic import read_json, write_json
from toolkit.files.digests import cache_folder


def measured(
    name: str, what: str, measures: Mapping[str, Callable[[], Any]], fits: Callable[[Any], bool], seconds: float
) -> dict[str, Any]:
    """The value of each key; those that the file `name` lacks are measured and kept, by one process at a time.

    what, seconds  what is measured, and how long a key takes, about: printed before
    fits           whether a value that was read is of the right form
    """
    path = cache_folder() / name

    def stored() -> dict[str, Any]:
        try:
            entries = read_json(path)
        except InputError:
            return {}
        return {k: v for k, v in entries.items() if fits(v)} if isinstance(entries, dict) else {}

    values = stored()
    if not measures.keys() <= values.keys():
        with lock.alone(path.parent, f"{path.stem}.lock"):
            values = stored()
            if missing := [key for key in measures if key not in values]:
                about = f"{len(missing)} times about {seconds:g} s"
                print(f"measuring {what}, once on this machine: {about}", file=sys.stderr)
                values |= {key: value for key in missing if (value := measures[key]()) is not None}
                if lacking := len(measures.keys() - values.keys()):
                    print(
                        f"{what}: this machine was too busy to measure {lacking}, the next run tries again",
                        file=sys.stderr,
                    )
                with suppress(InputError):
                    write_json(path, values)
    return {key: values.get(key) for key in measures}
