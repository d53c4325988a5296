"""A command: its line checked, its module imported, its stage run by Hydra, every fault of a user said in one line.

    if __name__ == "__main__":
        from toolkit.runs.command import main

        main("decode")

stands at the top of a command's module. The rest of the module, and what that imports, is read once the words are right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit.config.command_line import parsed, prepare
from toolkit.config.commands import command_of
from toolkit.errors import InputError, answer_signals, interrupted, missing_package
from toolkit.files.atomic import write_failure, write_json
from toolkit.files.digests import ensure_home
from toolkit.files.text import visible
from toolkit.runs.stage import OUTPUT, in_multirun, job_dir


def main(name: str, notice: str = "") -> None:
    """Run the command of this config: `run` of its module, whose `score` is what a sweeper optimizes. Ends the process.

    The exit code is the module's `exit_code` of what `run` has returned, if it has one; of several jobs the largest.

    notice  is printed before the module is imported, where that takes long
    From here on Ctrl-C and SIGTERM end the process with one line.
    """
    answer_signals()
    ensure_home()  # before libraries look for their caches
    module = command_of(name).module  # type: ignore[union-attr]
    exit_codes = [0]

    def run(cfg: Any) -> Any:
        if notice:
            print(f"{name}: {notice}", file=sys.stderr, flush=True)
        result = import_module(module).run(cfg)
        exit_codes.append(getattr(import_module(module), "exit_code", lambda _: 0)(result))
        return result

    def score(cfg: Any, result: Any) -> Any:
        scored = getattr(import_module(module), "score", None)
        return result if scored is None else scored(cfg, result)

    command(name, run, score)
    sys.exit(max(exit_codes))


def command(config_name: str, run: Callable[[Any], Any], score: Callable[[Any, Any], Any] | None = None) -> None:
    """Run a stage by the words of `sys.argv`: Hydra's flags and overrides of conf/<config_name>.yaml.

    score  what a sweeper gets, as a function of the config and of what `run` has returned; None: that itself
    """
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import CompactHydraException
    from omegaconf import DictConfig

    from toolkit.config.check import check
    from toolkit.config.store import register

    is_checked = False

    @hydra.main(version_base="1.3", config_path=str(configs.CONF), config_name=config_name)
    def work(cfg: DictConfig) -> Any:
        job = HydraConfig.get()
        try:
            root = job.job.config_name or config_name
            if in_multirun() or not is_checked:
                sources = job.runtime.config_sources  # a launcher's process has not read the command line
                configs.use_folders(*(source.path for source in sources if source.provider == "command-line"))
                check(cfg, root)
            result = run(cfg)
        except (InputError, OSError, ModuleNotFoundError) as error:
            if (line := one_line(error, str(getattr(command_of(config_name), "module", "")))) is None:
                raise
            if in_multirun():  # the sweep's other jobs go on; Hydra names this one's overrides and prints one line
                raise CompactHydraException(f"error: {line}") from error
            sys.exit(f"error: {line}")
        if isinstance(result, Path):
            print(f"output: {result}")
            if in_multirun():
                write_json(job_dir() / OUTPUT, {"folder": str(result)})
        return result if score is None else score(cfg, result)

    try:
        sys.argv[1:] = prepare(config_name, sys.argv[1:])
        is_checked = parsed(sys.argv[1:]).config_path is None
        register(ConfigStore.instance(), config_name)
        work()
    except InputError as error:
        sys.exit(f"error: {visible(str(error))}")
    except (KeyboardInterrupt, SystemExit) as error:
        for cause in (error, error.__context__):  # Lightning exits with 1 after Ctrl-C
            if isinstance(cause, KeyboardInterrupt):
                interrupted(cause)
        raise


def one_line(error: Exception, module: str) -> str | None:
    """What a user can fix: bad input, files that cannot be written or read, an extra of `module`; None for other errors."""
    if isinstance(error, InputError):
        return visible(str(error))
    if isinstance(error, ModuleNotFoundError):
        return missing_package(error, module)
    reason, file = write_failure(error), getattr(error, "filename", None)
    if getattr(error, "errno", None) is None:
        return None
    return f"could not read or write {file}: {reason}" if file else reason
