"""Malformed command lines and calls, drawn from good ones: each is right, or refused in one line; never a traceback or a hang.

FUZZ_INPUTS  how many (default 200; `make fuzz` takes 3000)
FUZZ_SEED    which ones (default 0)

An input that is not refused is run on two prompts of four tokens. Commands that take longer (not in RUN) end after their config
is checked; what a call returns has to decode.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import logging
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from toolkit import ModelPair, config, generate, stopping, verification
from toolkit.acceptance import AcceptanceHead, Confidence, HeadEstimator
from toolkit.decoding import Method, Sampling, decode
from toolkit.errors import InputError
from toolkit.models.pair import TOY
from toolkit.models.prompts import read_jsonl
from toolkit.runs.command import command

INPUTS, SEED = int(os.environ.get("FUZZ_INPUTS", "200")), int(os.environ.get("FUZZ_SEED", "0"))
SECONDS = 480  # per input: a busy machine makes no hang
TWO = ["prompts=toy_math", "prompts.limit=2", "sampling.max_new_tokens=4"]
SWEEP = [*TWO, "track=false", "grid=quickstart_live", "max_drafted=4"]
# Good lines, by module; {NAME} is the folder that an earlier one has made.
GOOD = {
    "data_gen.responses": [*TWO, "shard_size=1"],
    "toolkit.decode": [*TWO, "method=specdec_pp"],
    "data_gen.mix": ["responses={responses}", "validation_fraction=.5"],
    "data_gen.traces": ["responses={responses}", "hidden=true", "max_drafted=4"],
    "analysis.sweep": [*SWEEP, "prompts.split=dev"],
    "analysis.frontier": ["dev=[{sweep}]", "test=[{other}]", "resamples=20", "track=false"],
    "analysis.report": ["inputs=[{decode}]"],
    "toolkit.train": ["data.path={mix}", "trainer.max_epochs=1", "logger=none", "callbacks=none", "optimizer.lr=.001"],
    "toolkit.train_heads": ["data.path={mix}", "data.features=cached", "depths=[0]", "w_rejs=[1]", "max_epochs=1"],
    "toolkit.distill": ["responses=[{responses}]", "loss=lk"],
    "toolkit.sync": ["folder={decode}", "dry_run=true"],
    "analysis.acceptance": [*TWO, "methods=[specinfer]", "num_drafts=[2]", "draws=8", "positions=2", "resamples=20"],
    "analysis.heads": ["traces={traces}", "heads=[{head}]", "dev={traces}", "resamples=20", "thresholds=[.5]"],
    "analysis.compare": [*TWO, "resamples=20", "warmup=0"],
    "analysis.timing": [*TWO, "batch_sizes=[]", "num_drafted=[1,2]", "warm_up=0"],
    "analysis.advise": [*TWO, "hardware=h100", "batch_sizes=[1]"],
    "analysis.serving": [*TWO, "hardware=h100", "users=[1]", "requests=2"],
}  # fmt: skip
RUN = tuple(GOOD)[:7]
# Odd values as they are written on a command line; {file}, {empty}, ... stand for paths.
WORDS = (
    "nan", "inf", "-inf", "-1", "0", "1", "2", "1.5", "-0.0", "1e400", "1e-320", "0x10", "1_0", "1000000000000000000",
    "1e18", "true", "false", "null", "'null'", "'1'", "'nan'", "\"\"", "''", "", "hello", "ünï", "日本", "\"a b\"",
    "'é\u2028'", "[]", "[[]]", "[1,[2]]", "[1.5]", "[-1]", "[0]", "[nan]", "[null]", "[true]", "['']", "[a,a]",
    "[1,1]", "{}", "{a:1}", "{a:{b:1}}", "{_target_:os.getcwd}", "{_target_:os.nope}", "{_target_:1}", "???",
    "${nope}", "${oc.env:NOPE}", "${seed}", "${", "[1,2", "{a", "a:b", "1,2", "a=b", "\\", "$(ls)", "`ls`", "a\tb",
    "x" * 5000, ".", "~", "/dev/null", "{nowhere}", "{file}", "{empty}", "{odd}", "range(1,3)", "choice(a,b)",
    "interval(0,1)", "glob(*)", "int('x')", "str(1)", "[[[[[[[[1]]]]]]]]", "val/typo", "toy/target", "gpt2x/y z",
)  # fmt: skip
LINES = (  # whole words
    "", " ", "=", "==", "a=", "=b", "a", "+", "~", "++", "~~a", "+=1", "+a", "+a=1", "++a=1", "~a=1", "~pair",
    "~sampling", "~paths", "[a]=1", "a.b.c=1", ".a=1", "a.=1", "a..b=1", "@a=1", "a@b=c", "pair@=toy", "/pair=toy",
    "pair/base=large", "ü=1", "日本=2", "a b=1", "--nope", "-x", "--", "---", "--help=3", "--cfg=nope", "--cfg",
    "--config-dir=/nowhere", "--config-dir", "--config-name=nope", "--config-name=", "--multirun=1", "--info=nope",
    "--package", "hydra.nope=1", "hydra=nope", "hydra/nope=x", "hydra.job.name=[", "+experimnt=toy_head",
    "+experiment=toy_hed", "+debug=x", "debug=", "+hparams_search=nope", "method@rule=block", "rule@method.rule=blok",
    "override=1", "defaults=[]", "+defaults=[a]", "_target_=os.getcwd", "+_target_=os.nope", "_self_=1", "=nan",
    "\u202e=1", "-1", "nan", "methd=rate", "method=rat", "pair=toi", "prompts=toy_mth", "grid=polices",
    "sampling=gredy", "+sampling=greedy", "~method=rate",
)  # fmt: skip
PROMPTS = (  # contents of prompts files
    b"", b"\n", b'{"id":1,"prompt":"Q: 1+1?"}', b"hello\n", b'{"id":1,"prompt":"a"', b'[{"id":1,"prompt":"a"}]\n',
    b"3\n", b"null\n", b'{"prompt":"a"}\n', b'{"id":1}\n', b'{"id":1,"prompt":null}\n', b'{"id":1,"prompt":3}\n',
    b'{"id":1,"prompt":["a"]}\n', b'{"id":1,"prompt":""}\n', b'{"id":[1],"prompt":"a"}\n',
    b'{"id":true,"prompt":"a"}\n', b'{"id":NaN,"prompt":"a"}\n', b'{"id":1,"prompt":"a"}\n{"id":"1","prompt":"b"}\n',
    b'\xef\xbb\xbf{"id":1,"prompt":"Q: 1+1?"}\n', b'{"id":1,"prompt":"\xe9"}\n',
    '{"id":1,"prompt":"a"}\n'.encode("utf-16"), b'{"id":1,"prompt":"a\\u0000"}\n', b'{"id":1,"prompt":"a\x00"}\n',
    b"[" * 100_000, b'{"id":1,"prompt":"\\ud800"}\n', b'{"id":"\\ud800","prompt":"a"}\n',
    json.dumps({"id": 1, "prompt": "word " * 200_000}).encode(), b'{"id":1' + b"0" * 5000 + b',"prompt":"a"}\n',
    b'{"id":1,"prompt":"Q: 1+1?"}\r\n{"id":2,"prompt":"Q: 2+2?"}\r\n', b'{"id":1,"id":2,"prompt":"Q: 1?"}\n',
    b'{"id":1,"messages":[{"role":"user","content":"Hello"}]}\n', bytes(range(256)),
    b'{"id":1,"messages":[{"content":"x"}]}\n', b'{"id":1,"prompt":"a","messages":[]}\n', b'{"id":1,"messages":[]}\n',
    b'{"id":1,"messages":[{"role":"user","content":"x"}],"tools":[1]}\n', b'{"id":1,"prompt":"a","tools":[]}\n',
)  # fmt: skip


def values():
    """Odd arguments of a call."""
    return [
        None, True, False, 0, 1, -1, 2, 1.5, -0.5, math.nan, math.inf, -math.inf, 10**18, -(10**18), 10**30, 1e300,
        5e-324, 1j, "", "hello", "nan", "1", "ü\x00", "\ud800", "x" * 5000, b"x", b"", [], [1], ["a"], ["a", 3], [""],
        [None], [[1]], [[]], [[-1]], [[True]], [[1.5]], [[[1]]], [[10**30]], [["a"]], [{}], [{"role": "user"}],
        [math.nan], [True], (), ("a",), {}, {"a": 1}, {1: 2}, set(), {1}, object(), object, len, range(3), np.int64(3),
        np.float32(0.5), np.array([1, 2]), np.ones((2, 2)), torch.tensor(3), torch.tensor(0.5), torch.ones(2, 2),
        torch.float32, Path("/nowhere"), Path(), iter([1]), ValueError("x"), NotImplemented, ...,
    ]  # fmt: skip


def misspelt(name, rng):
    """A name with a letter left out, doubled, swapped or added."""
    at = rng.randrange(max(len(name), 1))
    swapped = name[:at] + name[at + 1 : at + 2] + name[at : at + 1] + name[at + 2 :]
    doubled = name[:at] + name[at : at + 1] * 2 + name[at + 1 :]
    return rng.choice([name[:at] + name[at + 1 :], doubled, swapped, name.upper(), name + rng.choice("s_1 .")])


# -- command lines ------------------------------------------------------------------------------------------------------


class Commands:
    """Draws command lines with something wrong, and runs them in this process."""

    def __init__(self, root, rng):
        self.root, self.rng, self.keys = root, rng, {}
        self.paths = {name: str(root / name) for name in ("nowhere", "file", "empty", "odd")}
        (root / "file").write_text("hello\n")
        for name in ("empty", "odd"):
            (root / name).mkdir()
        for name in ("manifest.json", "summary.json", "rows.parquet", "config.yaml", "generations.jsonl"):
            (root / "odd" / name).write_text("{")
        for number, content in enumerate(PROMPTS):
            (root / f"prompts-{number}.jsonl").write_bytes(content)
        self.folders = {"head": str(shutil.copytree(TOY / "head", root / "head"))}
        for module in RUN:
            name = module.rpartition(".")[2]
            if name == "frontier":
                self.folders["other"] = str(root / "other")
                self.run("analysis.sweep", [*SWEEP, "prompts.split=test", f"paths.output_dir={root}/other"])
            self.folders[name] = str(root / name)
            self.run(module, [*self.good(module), f"paths.output_dir={root}/{name}"])

    def good(self, module):
        return [word.format(**self.folders) for word in GOOD[module]]

    def draw(self, module):
        """A good line with one thing wrong, now and then two."""
        words = self.good(module)
        if module not in self.keys:
            composed = OmegaConf.to_container(config.compose(module.rpartition(".")[2], words), resolve=False)
            self.keys[module] = sorted(dotted(composed))
        for _ in range(1 if self.rng.random() < 0.85 else 2):
            words = self.spoilt(words, self.keys[module])
        return words

    def spoilt(self, words, keys):
        choose = self.rng.choice
        key, word, value = choose(keys), choose(words or ["seed=1"]), choose(WORDS)
        value = self.paths.get(value.strip("{}"), value)
        kind = choose(["value"] * 4 + ["misspelt", "missing", "twice", "prefix", "folder", "line", "prompts"])
        rest = [other for other in words if other != word]
        name, _, old = word.partition("=")
        if kind == "misspelt":
            return [*words, f"{choose(['', '', '+', '++', '~'])}{misspelt(key, self.rng)}={value}"]
        if kind == "missing":
            return choose([rest, [*words, f"~{key}"]])
        if kind == "twice":
            return [*words, f"{name}={value}"]
        if kind == "prefix":
            return [*rest, choose(["+", "~", "++", "+++", "-", "~+", "@", "."]) + word]
        if kind == "folder":
            path = choose([*self.paths.values(), *self.folders.values()])
            return [*rest, f"{name}={f'[{path}]' if old.startswith('[') else path}"]
        if kind == "line":
            return self.rng.sample([*words, choose(LINES)], len(words) + 1)
        if kind == "prompts":
            path = self.root / f"prompts-{self.rng.randrange(len(PROMPTS))}.jsonl"
            return [*words, "prompts=jsonl", f"prompts.path={path}"]
        return [*words, f"{key}={value}"]

    def run(self, module, words):
        """`python -m MODULE WORDS` within this process, in a working folder of its own."""
        run = importlib.import_module(module).run
        if module not in RUN:
            run = lambda cfg: None
        elif self.folders.get("report") and not any("paths" in word for word in words):
            words = [*words, f"paths.output_dir={tempfile.mkdtemp(dir=self.root)}/out"]
        argv, cwd, environment = sys.argv, Path.cwd(), dict(os.environ)
        sys.argv = [module, *words]
        os.environ["HYDRA_FULL_ERROR"] = "1"
        os.chdir(tempfile.mkdtemp(dir=self.root))
        try:
            command(module.rpartition(".")[2], run)
        finally:
            sys.argv = argv
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(environment)
            config.use_folders()


def dotted(tree, prefix=""):
    """The keys of a composed config, those of classes left out."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from dotted(value, f"{prefix}{key}.")
        elif not str(key).startswith("_"):
            yield f"{prefix}{key}"


# -- calls --------------------------------------------------------------------------------------------------------------


class Calls:
    """Draws calls of the Python interface with something wrong, and decodes with what they return."""

    def __init__(self, root):
        self.pair, self.files = ModelPair.toy(), [*root.glob("prompts-*"), root / "odd", root / "nowhere"]
        tail = config.method("tail")
        parts = {"name": "m", "policy": tail.policy, "rule": tail.rule, "proposer": tail.proposer}
        sampling = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": ()}
        sampling |= {"seed": 0, "max_new_tokens": 4}
        prompts = {"pair": self.pair, "prompts": ["Q: Repeat coral 2 times.\nA:", [5, 6, 7]], "batch_size": 2}
        loaded = {"target": self.pair.target, "draft": self.pair.draft}
        models = {"target": TOY / "target", "draft": TOY / "draft", "drafts": (), "revision": None}
        models |= {"device": "cpu", "dtype": "float32"}
        self.targets = {
            "generate": (generate, {**prompts, **sampling, "method": "speculative", "head": None, "overrides": ()}),
            "decode": (decode, {**prompts, "method": tail, "sampling": Sampling(max_new_tokens=4), "row_ids": None}),
            "from_pretrained": (ModelPair.from_pretrained, models),
            "ModelPair": (ModelPair, {**loaded, "tokenizer": self.pair.tokenizer, "end_ids": None}),
            "Sampling": (Sampling, sampling),
            "Method": (Method, {**parts, "min_drafted": 1, "max_drafted": 4, "draft_temperature": None, "beams": None}),
            "encode": (self.pair.encode, {"prompt": "Q: 1+1?"}),
            "config.method": (config.method, {"name": "tail", "overrides": ["policy.threshold=.3"], "head": None}),
            "config.compose": (config.compose, {"config_name": "decode", "overrides": ["method=tail"]}),
            "read_jsonl": (read_jsonl, {"path": self.files[0]}),
            "AcceptanceHead": (AcceptanceHead, {"hidden_size": 16, "depth": 1, "tied": False, "log_w_rej": 0.0}),
            "AcceptanceHead.load": (AcceptanceHead.load, {"folder": TOY / "head"}),
        }  # fmt: skip
        kinds = [kind for kind in vars(stopping).values() if inspect.isclass(kind) and not inspect.isabstract(kind)]
        policies = [
            kind for kind in kinds if issubclass(kind, stopping.StoppingPolicy) and kind is not stopping.Bounded
        ]
        for kind in (*policies, *(type(verification.get(name)) for name in verification.names())):
            if defaults := defaults_of(kind):
                self.targets[kind.__name__] = (kind, defaults)

    def draw(self, target, rng):
        """Good arguments with one thing wrong, now and then two."""
        arguments, extra = dict(self.targets[target][1]), []
        kind = rng.choice(["value"] * 9 + ["file"] * 2 + ["misspelt", "missing", "one too many"])
        for name in rng.sample(sorted(arguments), min(len(arguments), 1 if rng.random() < 0.85 else 2)):
            if kind == "misspelt":
                arguments[misspelt(name, rng)] = arguments.pop(name)
            elif kind == "missing":
                arguments.pop(name)
            else:
                arguments[name] = rng.choice(values() if kind != "file" else [*self.files, *map(str, self.files)])
        if kind == "one too many":
            extra = [*self.targets[target][1].values(), rng.choice(values())]
            arguments = {}
        return extra, arguments

    def run(self, target, extra, arguments):
        made = self.targets[target][0](*extra, **arguments)
        pair, method, sampling = self.pair, config.method("speculative"), Sampling(max_new_tokens=4)
        if isinstance(made, ModelPair):
            pair, method = made, method if made.drafts else config.method("autoregressive")
        elif isinstance(made, Sampling):
            sampling = replace(made, max_new_tokens=min(made.max_new_tokens, 4))
        elif isinstance(made, Method):
            method = made
        elif isinstance(made, stopping.StoppingPolicy):
            method = replace(method, policy=made)
        elif isinstance(made, verification.PathRule):
            method = replace(method, rule=made)
        elif isinstance(made, list) and made and all(getattr(one, "error", None) for one in made):
            raise InputError(made[0].error)
        else:
            return
        texts = decode(pair, [[5, 6, 7], [7]], method, sampling)
        if all(text.error for text in texts):
            raise InputError(texts[0].error)


def defaults_of(kind):
    """The arguments of a constructor with their defaults; an estimator where one is expected."""
    defaults = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name == "estimator":
            defaults[name] = HeadEstimator() if kind.__name__ == "Survival" else Confidence()
        elif parameter.default is not parameter.empty and "FACTORY" not in type(parameter.default).__name__:
            defaults[name] = parameter.default
    return defaults


# -- outcomes -----------------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """The limit is over; no handler of ordinary errors keeps it."""


def wrong(run, *arguments):
    """What is wrong with how an input ended; empty if it ran, or was refused in one line."""
    try:
        with limited(), quiet():
            run(*arguments)
        return ""
    except TooLong:
        return f"over {SECONDS} s"
    except InputError as error:
        return f"several lines: {error}" if "\n" in str(error) else ""
    except SystemExit as error:
        text = str(error.code)
        fine = error.code in (None, 0) or (text.startswith("error: ") and "\n" not in text)
        return "" if fine else f"exit {text}"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, TypeError) and frames[-1].filename == __file__ and "argument" in str(error):
            return ""  # Python's own refusal of arguments that a signature does not have
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[:-5:-1])
        return f"{type(error).__name__}: {str(error)[:200]} ({where})"


@contextmanager
def limited():
    """SECONDS by the clock."""

    def stop(*_):
        raise TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def quiet():
    """Nothing is printed; a handler that Hydra closes does not close what pytest prints to."""
    for known in logging._handlerList:
        handler = known()
        if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") in (sys.stdout, sys.stderr):
            handler.setStream(io.StringIO())
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_malformed_inputs_run_or_are_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # names of the hub are refused at once
    logging.disable(logging.ERROR)
    rng, failures = random.Random(SEED), []
    with quiet():
        commands = Commands(tmp_path, rng)
    calls = Calls(tmp_path)
    modules, targets = list(GOOD), list(calls.targets)
    for number in range(INPUTS):
        if number % 2:
            name = targets[number // 2 % len(targets)]
            extra, arguments = calls.draw(name, rng)
            shown, fault = f"{extra}, {arguments}", wrong(calls.run, name, extra, arguments)
        else:
            name = modules[number // 2 % len(modules)]
            shown = words = commands.draw(name)
            fault = wrong(commands.run, name, words)
        if fault:
            failures.append(f"{name} {str(shown)[:400]}: {fault}")
    logging.disable(logging.NOTSET)
    assert not failures, "\n".join(failures)
