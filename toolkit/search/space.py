"""What a search varies, read from overrides: `depth=0,1,3`, `range(1,9)`, `interval(.1,.9)`, `tag(log,interval(1e-5,1e-2))`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.errors import InputError

LOG = "log"  # the tag of a scale


def read_space(words: Sequence[str], loader: Any = None) -> tuple[dict[str, Any], list[str]]:
    """Optuna's distribution of every key that varies, and the overrides that do not. Values of choices are texts.

    loader  Hydra's, for globs over a config group
    Raises InputError if nothing varies, or for a space that is none.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    space: dict[str, Any] = {}
    fixed = []
    for override in OverridesParser.create(config_loader=loader).parse_overrides(list(words)):
        key = override.get_key_element()
        if override.is_sweep_override():
            space[key] = _distribution(key, override)
        else:
            fixed.append(f"{key}={override.get_value_element_as_str()}")
            space.pop(key, None)
    if not space:
        raise InputError("nothing varies: expected KEY=A,B or 'KEY=interval(LOW,HIGH)' on the command line, with -m")
    return space, [word for word in fixed if word.partition("=")[0] not in space]


def words_of(params: dict[str, Any]) -> list[str]:
    """Overrides of one trial."""
    return [f"{key}={value!r}" if isinstance(value, float) else f"{key}={value}" for key, value in params.items()]


def _distribution(key: str, override: Any) -> Any:
    from hydra.core.override_parser.types import RangeSweep
    from optuna import distributions as kinds

    swept: Any = override.value()
    log = LOG in getattr(swept, "tags", ())
    try:
        if override.is_interval_sweep():
            low, high = swept.start, swept.end
            whole = isinstance(low, int) and isinstance(high, int)
            return kinds.IntDistribution(low, high, log=log) if whole else kinds.FloatDistribution(low, high, log=log)
        if isinstance(swept, RangeSweep) and isinstance(numbers := swept.range(), range):
            return kinds.IntDistribution(numbers[0], numbers[-1], log=log, step=1 if log else numbers.step)
        return kinds.CategoricalDistribution(list(override.sweep_string_iterator()))
    except (ValueError, IndexError, AttributeError) as error:
        raise InputError(f"{key}: expected values or an interval to search in ({error})") from None
