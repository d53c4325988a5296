"""Texts and recordings."""

import sys
from importlib.util import find_spec
from pathlib import Path

# A package of the user's, in the folder where a command runs, may have the name of one that is imported here.
for _package in ("toolkit",):
    _own, _spec = Path(__file__).resolve().parents[1] / _package / "__init__.py", find_spec(_package)
    if _own.is_file() and _spec is not None and (_spec.origin is None or Path(_spec.origin).resolve() != _own):
        _where = _spec.origin or next(iter(_spec.submodule_search_locations or ()))
        _line = f"{_where} hides this toolkit's {_package}: rename it, or run the command in another folder"
        if sys.argv[:1] == ["-m"]:
            sys.exit(f"error: {_line}")
        raise ImportError(_line)
