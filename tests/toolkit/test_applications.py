"""Calls from inside other people's Hydra applications, threads and notebooks: the same tokens; nothing of theirs changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from toolkit import ModelPair, config, generate
from toolkit.config import CONF
from toolkit.errors import InputError

METHODS = ("specdec_pp", "rate", "spectr", "block")
PROMPT, LENGTH = "What is 2 + 3?", 6

APPLICATION = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from toolkit import ModelPair, config, decode, generate

OmegaConf.register_new_resolver("now", lambda pattern: "noon", replace=True)
for name, group in (("rate", "method"), ("block", "stopping"), ("decode_keys", None), ("method_only", None)):
    ConfigStore.instance().store(name, {"of_the_application": True}, group=group)

def entries(repo):
    return {name: entries(node) if isinstance(node, dict) else (id(node), str(node.node)) for name, node in repo.items()}

def state():
    running = GlobalHydra.instance().hydra
    loader = running and running.config_loader
    job = HydraConfig.get() if HydraConfig.initialized() else None
    store = {**entries(ConfigStore.instance().repo), "hydra": None}  # Hydra enters its own launchers when it begins
    resolvers = {name: id(function) for name, function in BaseContainer._resolvers.items()}
    path = loader and str(loader.get_search_path())
    return [id(running), id(loader), path, str(job), store, resolvers, JobRuntime.instance().get("name"), os.getcwd(), sys.argv]

def texts():
    before, pair = state(), ModelPair.toy()
    def decoded(name):
        (answer,) = generate(pair, [PROMPT], method=name, max_new_tokens=LENGTH)
        return answer.token_ids
    with ThreadPoolExecutor(8) as pool:
        print("texts:", json.dumps([*pool.map(decoded, METHODS * 2)]))
    assert state() == before

texts()

@hydra.main(version_base="1.1", config_path="conf", config_name="config")
def main(cfg):
    texts()
    before, folder = state(), os.path.abspath(f"out/{cfg.number}")
    words = ["prompts=toy_math", "prompts.limit=1", "method=rate", "sampling.max_new_tokens=2", "track=false"]
    assert str(decode.run(config.compose("decode", [*words, f"paths.output_dir={folder}"]))) == folder
    assert state() == before

main()
"""
PLUGIN = """
from hydra.plugins.search_path_plugin import SearchPathPlugin
class OfTheApplication(SearchPathPlugin):
    def manipulate_search_path(self, search_path):
        search_path.prepend("application", "file://FOLDER")
"""


@pytest.fixture(scope="module")
def expected():
    pair = ModelPair.toy()
    return [generate(pair, [PROMPT], method=name, max_new_tokens=LENGTH)[0].token_ids for name in METHODS]


def application(folder):
    """A folder with configs of an application that are called as ours, and a plugin that puts more of them first."""
    constants = f"PROMPT, LENGTH, METHODS = {PROMPT!r}, {LENGTH}, {METHODS!r}"
    other = "of_the_application: true\n"
    files = {
        "app.py": constants + APPLICATION,
        "conf/config.yaml": "defaults: [method: specdec_pp, _self_]\nnumber: 0\n",
        "conf/method/specdec_pp.yaml": other,
        "first/method_only.yaml": other,
        "first/method/spectr.yaml": other,
        "hydra_plugins/of_the_application.py": PLUGIN.replace("FOLDER", str(folder / "first")),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_in_a_users_application_and_before_it_from_eight_threads(tmp_path, expected):
    folder = application(tmp_path)
    done = subprocess.run(
        [sys.executable, "app.py", "-m", "number=1,2"], capture_output=True, text=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(CONF.parent), str(folder)]), "HYDRA_FULL_ERROR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("texts: ") for line in done.stdout.split("\n") if line.startswith("texts: ")]
    assert [json.loads(line) for line in lines] == [expected * 2] * 3  # before the application, and in its two jobs


def test_again_and_again_inside_a_users_context(tmp_path, expected, monkeypatch):
    """As in a notebook: a context that is never left, cells that are run again, the user's own composing in between."""
    folder, pair = application(tmp_path), ModelPair.toy()
    monkeypatch.setattr(ConfigStore.instance(), "repo", {**ConfigStore.instance().repo})
    ConfigStore.instance().store("decode_keys", {"of_the_application": True})
    with hydra.initialize_config_dir(str(folder / "conf"), version_base=None):
        running = GlobalHydra.instance().hydra
        for _ in range(2):
            for name, tokens in zip(METHODS, expected, strict=True):
                assert generate(pair, [PROMPT], method=name, max_new_tokens=LENGTH)[0].token_ids == tokens
            assert config.compose("decode", ["method=rate"]).method.name == "rate"
            with pytest.raises(InputError, match="unknown method 'raet': did you mean rate"):
                generate(pair, [PROMPT], method="raet")
            own = hydra.compose("config", ["number=3"])
            assert OmegaConf.to_container(own) == {"method": {"of_the_application": True}, "number": 3}
            assert GlobalHydra.instance().hydra is running


def test_a_folder_that_one_thread_searches_is_no_other_threads(tmp_path):
    """`generate(config_dir=...)` from many threads, each with a method of the same name."""
    started = threading.Barrier(4)

    def depth(number: int) -> int:
        folder = tmp_path / str(number)
        (folder / "method").mkdir(parents=True)
        (folder / "method" / "mine.yaml").write_text(f"defaults: [speculative, _self_]\nmax_drafted: {number}\n")
        with config.searching(folder):
            started.wait(timeout=60)
            drafted = config.method("mine").max_drafted
            started.wait(timeout=60)
        return drafted

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(depth, range(1, 5))] == [1, 2, 3, 4]
    assert config.user_folders() == ()


def test_pairs_are_loaded_in_several_threads_at_once():
    code = (
        "from concurrent.futures import ThreadPoolExecutor\nfrom toolkit import ModelPair\n"
        "with ThreadPoolExecutor(4) as pool: list(pool.map(lambda _: ModelPair.toy(), range(4)))\nModelPair.toy()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
