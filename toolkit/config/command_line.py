"""The command line before anything is run: tidied, `--help` answered, every fault said in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from toolkit import config as configs
from toolkit.config import files, papers, parts
from toolkit.errors import InputError, unknown_name

APPENDED = ("experiment=", "hparams_search=", "debug=")  # groups that take a +, which people leave out


def prepare(config_name: str, argv: Sequence[str]) -> list[str]:
    """The tidied command line. Prints the help and exits if it is asked for. Raises InputError at the first fault."""
    tidy = tidy_overrides(argv)
    flags = parsed(tidy)
    for flag in ("config_name", "config_dir", "config_path"):
        if getattr(flags, flag) == "":
            raise InputError(f"--{flag.replace('_', '-')}: expected a name, got an empty one")
    configs.use_folders(*([flags.config_dir] if flags.config_dir else []))
    if flags.help:
        from toolkit.config.help import help_text

        try:
            print(help_text(flags.config_name or config_name, flags.overrides), flush=True)
        except BrokenPipeError:  # the reader stops early: --help | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    from hydra.core.config_store import ConfigStore

    store, folders = ConfigStore.instance(), (files.CONF, *files.user_folders())
    parts.register(store, folders)
    if not (flags.hydra_help or flags.shell_completion or flags.config_path or flags.experimental_rerun):
        from toolkit.config.check import check
        from toolkit.config.store import composed

        check_choices(flags.overrides)
        papers.register(store, flags.overrides, folders)  # of every job of a sweep
        overrides = _first_job(flags.overrides) if flags.multirun else flags.overrides
        runs = not (flags.cfg or flags.info or flags.multirun)  # each job of a sweep is checked when it runs
        root = flags.config_name or config_name
        check(composed(root, overrides), root, complete=runs, values=runs)
    return tidy


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Hydra's flags and the overrides of a command line. Raises InputError for a flag that there is none of."""
    return _parser().parse_args(words)


def tidy_overrides(argv: Sequence[str]) -> list[str]:
    """`experiment=x` (the usual template's spelling) means `+experiment=x`, and keys of grids take no + either.

    Debug comes last, so that it wins. Flags keep their order: those in front stay there, all others follow the overrides.
    """
    words, front, last = list[str](), list[str](), list[str]()
    waiting, options = list(argv), _parser()._option_string_actions
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("-"):
            words.append(files.settable(f"+{word}" if word.startswith(APPENDED) else word))
            continue
        if "=" in word and not word.startswith("--") and word.partition("=")[0] not in options:
            raise InputError(f"expected KEY=VALUE, got {word!r}: an override takes no -")
        flag = [word]
        action = options.get(word)
        if action is not None and action.nargs != 0 and waiting and not ("=" in waiting[0] and action.nargs == "?"):
            flag.append(waiting.pop(0))
        (last if words else front).extend(flag)
    return [*front, *sorted(words, key=lambda word: word.startswith("+debug=")), *last]


def check_choices(words: Sequence[str]) -> None:
    """Raises InputError with the nearest names if `group=choice` names no file of that config group."""
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        group = key.partition("@")[0]
        names = configs.choices(group) if group and "." not in group and not group.startswith("hydra/") else []
        if not names or value == "null" or any(bracket in value for bracket in "({["):
            continue
        for name in map(str.strip, value.split(",")):
            if name not in names:
                raise unknown_name(group, name, names)


def _first_job(overrides: Sequence[str]) -> list[str]:
    """The overrides of a sweep's first job; what a sweeper draws from an interval is left out."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from toolkit.config.store import complaint

    job = []
    for word in overrides:
        try:
            (parsed,) = OverridesParser.create().parse_overrides([word])
        except HydraException as error:
            raise complaint(error, "", [word]) from error
        if not parsed.is_sweep_override():
            job.append(word)
        elif parsed.is_discrete_sweep():
            job.append(f"{parsed.get_key_element()}={next(iter(parsed.sweep_string_iterator()))}")
    return job


def _parser() -> argparse.ArgumentParser:
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise InputError(f"{message} (--help lists the keys, --hydra-help the flags)")

    parser: argparse.ArgumentParser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    return parser
