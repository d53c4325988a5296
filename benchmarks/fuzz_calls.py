# ruff: noqa: E501
"""Calls of the Python API with something wrong in their arguments; what is accepted then decodes two prompts, four tokens each."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.fuzz_values import misspelt, prompt_files, python_values, scratch_paths
from toolkit import ModelPair, config, generate
from toolkit.acceptance import AcceptanceHead
from toolkit.decoding import (
    BeamChainProposer,
    Beams,
    ForestProposer,
    Method,
    PromptLookupProposer,
    Sampling,
    TreeProposer,
    decode,
)
from toolkit.engine import EngineOptions
from toolkit.errors import InputError
from toolkit.load_cost import LoadCost
from toolkit.pair import TOY, load_draft
from toolkit.prompts import Prompt, read_jsonl
from toolkit.stopping import StoppingPolicy
from toolkit.types import Generation
from toolkit.verification import LayerRule, Rule
from toolkit.verification import names as rule_names

ASKED = ["Q: Repeat coral 2 times.\nA:", [5, 6, 7]]
FOUR = {"max_new_tokens": 4}
BY_SCHEME = {"iid": "speculative", "beams": "mtad"}
OWNERS = {  # a method that a part is put into
    "Beams": ("dsbd", "beams"), "ForestProposer": ("dsbd", "proposer"), "BeamChainProposer": ("mtad", "proposer"),
    "TreeProposer": ("mcsd", "proposer"), "PromptLookupProposer": ("prompt_lookup", "proposer"),
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call; `how` says what was done to the good one."""

    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    how: str

    def __str__(self) -> str:
        said = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs.items())]
        return f"{self.target}({', '.join(' '.join(one.split())[:90] for one in said)})"


@dataclass
class Calls:
    """Draws calls and makes them. targets: name -> what is called, and good arguments."""

    root: Path
    chance: random.Random
    pair: ModelPair = field(default_factory=ModelPair.toy)
    targets: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.files, self.paths = prompt_files(self.root), scratch_paths(self.root)
        ratio = LoadCost.ratio(0.2)
        table = ratio.save(self.root / "costs.json")
        self.tables = _cost_tables(self.root)
        self.targets |= {
            "generate": (generate, {"pair": self.pair, "prompts": ASKED, "method": "speculative", "temperature": 1.0, "top_k": 0,
                "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "stop": (), "seed": 0, "batch_size": 2, "head": None,
                "overrides": (), "config_dir": None, "max_length": None, "keep_prompt_tokens": None, **FOUR}),
            "decode": (decode, {"pair": self.pair, "prompts": ASKED, "method": config.method("tail"), "sampling": Sampling(**FOUR),
                "batch_size": 2, "row_ids": None, "on_finish": None}),
            "from_pretrained": (ModelPair.from_pretrained, {"target": TOY / "target", "draft": TOY / "draft", "drafts": (),
                "device": "cpu", "dtype": "float32", "device_map": None, "quantization": None, "revision": None,
                "attn_implementation": None, "trust_remote_code": False, "name": "", "cuda_graphs": "auto", "self_check": "auto"}),
            "ModelPair": (ModelPair, {"target": self.pair.target, "draft": self.pair.draft, "tokenizer": self.pair.tokenizer,
                "drafts": (), "end_ids": None, "name": "", "head": None, "options": self.pair.options}),
            "ModelPair.toy": (ModelPair.toy, {"device": "cpu", "dtype": "float32"}),
            "load_draft": (load_draft, {"source": TOY / "draft", "device": "cpu", "dtype": "float32", "revision": None}),
            "EngineOptions": (EngineOptions, {"cuda_graphs": "auto", "cpu_packing": "off", "self_check": "auto"}),
            "Sampling": (Sampling, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
                "max_new_tokens": 4, "max_length": None, "keep_prompt_tokens": None, "stop": (), "seed": 0}),
            "Method": (Method, {**_parts("tail"), "name": "m", "min_drafted": 1, "max_drafted": 4, "draft_temperature": None, "beams": None}),
            "encode": (self.pair.encode, {"prompt": "Q: 1+1?"}),
            "config.method": (config.method, {"name": "tail", "overrides": ["policy.threshold=.3"], "head": None}),
            "config.compose": (config.compose, {"config_name": "decode", "overrides": ["method=tail"]}),
            "LoadCost.load": (LoadCost.load, {"path": table}),
            "LoadCost.ratio": (LoadCost.ratio, {"c": 0.2, "column": 0.0}),
            "LoadCost.round": (ratio.round, {"batch": 2, "num_drafted": 3, "context": 10}),
            "Prompt": (Prompt, {"id": "1", "prompt": "Q: 1+1?", "answer": None, "messages": None, "extra": {}}),
            "read_jsonl": (read_jsonl, {"path": self.files[3]}),
            "AcceptanceHead": (AcceptanceHead, {"hidden_size": 16, "depth": 1, "tied": False, "log_w_rej": 0.0}),
            "AcceptanceHead.load": (AcceptanceHead.load, {"folder": TOY / "head"}),
        }  # fmt: skip
        self.targets |= {name: (kind, {}) for name, kind in _part_kinds().items()}
        for kind, good in self.targets.values():
            if not good:
                good |= _defaults(kind)

    def draw(self, target: str) -> Call:
        """Good arguments with one thing wrong, now and then two."""
        good = dict(self.targets[target][1])
        args: tuple[Any, ...] = ()
        how = self.chance.choice(["value"] * 9 + ["file"] * 2 + ["misspelt", "missing", "one too many"])
        names = [name for name in good if name != "pair" or self.chance.random() < 0.2]
        for name in self.chance.sample(names, min(len(names), 1 if self.chance.random() < 0.85 else 2)):
            if how == "value":
                good[name] = self.chance.choice(python_values())
            elif how == "file":
                good[name] = self.chance.choice(
                    [*self.files, *self.tables, *self.paths.values(), *map(Path, self.paths.values())]
                )
            elif how == "misspelt":
                good[misspelt(name, self.chance)] = good.pop(name)
            elif how == "missing":
                good.pop(name)
        if how == "one too many":
            args = (*good.values(), self.chance.choice(python_values()))
            good = {}
        return Call(target, args, good, how)

    def run(self, call: Call) -> str:
        """Make the call, and decode with what it returns. Raises what is raised."""
        made = self.targets[call.target][0](*call.args, **call.kwargs)
        _raise_failed(made)
        return "decoded" if self._used(made) else "returned"

    def _used(self, made: Any) -> bool:
        """Two prompts and four tokens with what was made, if it is a part of decoding."""
        pair, method, sampling = self.pair, config.method("speculative"), Sampling(**FOUR)
        if isinstance(made, ModelPair):
            pair = made
            method = method if pair.drafts else config.method("autoregressive")
        elif isinstance(made, Sampling):
            sampling = replace(made, max_new_tokens=min(made.max_new_tokens, 4))
        elif isinstance(made, Method):
            method = made
        elif isinstance(made, StoppingPolicy):
            method = replace(method, policy=made)
        elif isinstance(made, Rule):
            base = config.method(
                "dsbd" if isinstance(made, LayerRule) else "speculative" if "iid" in made.schemes else "mtad"
            )
            base = config.method("mcsd") if "without_replacement" in made.schemes else base
            method = replace(base, rule=made) if base.proposer.scheme in made.schemes else base
        elif type(made).__name__ in OWNERS:
            name, part = OWNERS[type(made).__name__]
            method = replace(config.method(name), **{part: made})
        else:
            return False
        prompts = ASKED if pair.tokenizer is not None else [[5, 6], [7]]
        _raise_failed(decode(pair, prompts, method, sampling))
        return True


def _raise_failed(made: Any) -> None:
    """Raises InputError if all of a call's generations say why they could not be decoded: a refusal."""
    if isinstance(made, list) and made and all(isinstance(one, Generation) and one.error for one in made):
        raise InputError(made[0].error)


def _parts(name: str) -> dict[str, Any]:
    method = config.method(name)
    return {"policy": method.policy, "rule": method.rule, "proposer": method.proposer}


def _part_kinds() -> dict[str, type]:
    """Every policy, every rule with arguments, proposers and beams."""
    from toolkit import stopping, verification

    files = [OmegaConf.load(config.find("stopping", name)) for name in config.choices("stopping")]
    kinds = [getattr(stopping, one._target_.rpartition(".")[2]) for one in files]
    rules = [type(verification.get(name)) for name in rule_names()]
    others = [Beams, TreeProposer, ForestProposer, BeamChainProposer, PromptLookupProposer]
    return {kind.__name__: kind for kind in (*kinds, *rules, *others) if _defaults(kind)}


def _defaults(kind: Any) -> dict[str, Any]:
    """The arguments of a constructor with their defaults; an estimator where one is asked for."""
    import inspect

    from toolkit.acceptance import Confidence, HeadEstimator

    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name == "estimator":
            found[name] = HeadEstimator() if kind.__name__ == "Survival" else Confidence()
        elif parameter.default is not parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
            found[name] = parameter.default if type(parameter.default).__name__ != "_HAS_DEFAULT_FACTORY_CLASS" else {}
    return found


def _cost_tables(root: Path) -> list[Path]:
    """Odd cost tables."""
    head = "model,batch,width,context,seconds\n"
    texts = {
        "empty.csv": "", "head.csv": head, "nan.csv": head + "draft,1,1,0,nan\n", "word.csv": head + "draft,one,1,0,1\n",
        "negative.csv": head + "draft,-1,1,0,1\ntarget,1,1,0,-1\n", "inf.csv": head + "draft,inf,1,0,1\ntarget,1,nan,0,1\n",
        "short.csv": head + "draft,1\n", "long.csv": head + "draft,1,1,0,1,1,1\n", "model.csv": head + "other,1,1,0,1\n",
        "zero byte.csv": head + "draft,\0,1,0,1\n", "list.json": "[]", "cut.json": "{", "null.json": "null", "empty.json": "",
        "ragged.json": '{"draft":{"batch":[1],"width":[1],"context":[0],"seconds":[[1]]},"target":{},"source":"x"}',
        "words.json": '{"draft":{"batch":"ab","width":[1],"context":[0],"seconds":"x"},"target":3,"source":"x"}', "deep.json": "[" * 100_000,
    }  # fmt: skip
    for name, text in texts.items():
        (root / name).write_text(text)
    return [root / name for name in texts]
