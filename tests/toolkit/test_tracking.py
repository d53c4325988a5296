"""W&B: when it is online, offline runs on disk, and runs that end as their stage did."""

import json
import re
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from time import perf_counter
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig

from analysis.figures.plots import pareto
from tests.offline_runs import inventory, logged, records, table
from toolkit import config, sync, train
from toolkit.config import parts
from toolkit.config.store import register
from toolkit.errors import InputError
from toolkit.runs import tracking
from toolkit.runs.pipeline import run_stages
from toolkit.training.loggers import what_is_trained


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """No key anywhere."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return monkeypatch


def test_runs_are_online_with_a_key_of_the_server_unless_the_environment_says_otherwise(environment, tmp_path):
    assert tracking.wandb_mode() == "offline"
    environment.setenv("WANDB_API_KEY", "x" * 40)
    assert tracking.wandb_mode() == "online"
    environment.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "x" * 40)
    assert tracking.wandb_mode() == "online"
    for word, mode in {"offline": "offline", "DISABLED": "disabled", "online": "online", "dryrun": "offline"}.items():
        environment.setenv("WANDB_MODE", word)
        assert tracking.wandb_mode() == mode
    environment.setenv("WANDB_MODE", "of")
    with pytest.raises(InputError, match="WANDB_MODE: expected online, offline or disabled, got 'of'"):
        tracking.wandb_mode()
    environment.delenv("WANDB_MODE")
    environment.setenv("WANDB_BASE_URL", "https://wandb.example")
    assert tracking.wandb_mode() == "offline", "the key is another server's"


def test_no_run_if_nothing_is_to_be_tracked(environment, tmp_path):
    with tracking.wandb_run("sweep", {}, tmp_path, track=False) as run:
        assert run is None
        tracking.log_table(run, "table", None)
    assert not list(tmp_path.iterdir())


def test_an_offline_run_keeps_everything_until_it_is_synced(environment, tmp_path, capsys):
    """Name, group, tags, config, links, tables, summary and the exit code, as the file that is synced holds them."""
    frame = pd.DataFrame({"method": ["a", "b"], "x": [1.0, 2.0], "y": [3.0, 1.0], "text": ["<b>", [1]]})
    with tracking.wandb_run("sweep", {"depth": 2}, tmp_path / "out" / "one", name="math test", tags=["math"]) as run:
        tracking.log_table(run, "table", frame)
        tracking.log_summary(run, {"throughput": 2.5, "share": None, "gain": float("nan")})
        tracking.log_lines(run, "lines", frame, "x", "y", "method", "title")
        cells = frame.assign(setting="", verification_rate=frame.x, discard_rate=frame.y, undominated=True)
        tracking.log_image(run, "image", pareto(cells, tmp_path / "figure.png", "title"))
        tracking.log_folder(run, "head of one", "head", tmp_path / "out" / "one" / tracking.RUN_FILE)
    assert "toolkit.sync folder=" in capsys.readouterr().out
    media = {path.name.split("_")[0] for path in (tmp_path / "out" / "one").rglob("files/media/*/*.*")}
    assert {"image", "lines", "table"} <= media
    inputs = [tmp_path / "out" / "one", tmp_path / "out" / "nothing"]
    with pytest.raises(KeyError), tracking.wandb_run("frontier", {}, tmp_path / "out" / "two", inputs=inputs):
        raise KeyError("a stage that fails")
    saved = records(tmp_path / "out" / "one")
    (about,) = saved["run"][:1]
    assert (about.display_name, about.run_group, about.job_type) == ("math test", "out", "sweep")
    assert list(about.tags) == ["sweep", "math"]
    assert {item.key: json.loads(item.value_json) for item in about.config.update}["depth"] == 2
    values = logged(saved)
    assert values["throughput"] == 2.5 and not {"share", "gain"} & set(values)
    assert values["table/_type"] == "table-file" and values["table/nrows"] == 2
    (table,) = (tmp_path / "out" / "one").rglob("media/table/table_*.json")
    assert json.loads(table.read_text())["data"][0] == ["a", 1.0, 3.0, "&lt;b&gt;"], "texts are escaped"
    assert saved["exit"][0].exit_code == 0
    assert any("head-of-one" in str(record) for record in saved.get("request", []) + saved.get("artifact", []))
    other = records(tmp_path / "out" / "two")
    assert other["exit"][0].exit_code == 1
    links = {item.key: json.loads(item.value_json) for item in other["run"][0].config.update}["input_runs"]
    assert links["one"]["id"] == about.run_id and links["nothing"] is None


POINTS = pd.DataFrame({"method": ["a", "a", "b"], "x": [1.0, 2.0, 3.0], "y": [3.0, 1.0, 2.0]})


def test_a_relative_folder_is_the_programs_own_where_the_process_that_writes_is_anothers(environment, tmp_path):
    """W&B's process is shared through WANDB_SERVICE: by a notebook and the commands it starts, say."""
    with tracking.wandb_run("train", {}, tmp_path / "first"):
        pass
    (tmp_path / "elsewhere").mkdir()
    environment.chdir(tmp_path / "elsewhere")
    with tracking.wandb_run("train", {}, "out") as run:
        run.log({"loss": 1})
    assert inventory(tmp_path / "elsewhere" / "out")["scalars"]["loss"] == 1


def test_scatter_plots_have_a_dimension_of_methods(environment, tmp_path):
    """With a team the chart is ours, its colours the method's; without one it is W&B's, the method in its table alone."""
    for name, preset, fields in (
        ("plain", "wandb/scatter/v0", {"x": "x", "y": "y"}),
        ("team", "lab/acceptance-toolkit-scatter", {"x": "x", "y": "y", "group": "method"}),
    ):
        if name == "team":
            environment.setenv("WANDB_ENTITY", "lab")
        with tracking.wandb_run("sweep", {}, tmp_path / name) as run:
            tracking.log_scatter(run, "sweep/settings", POINTS, "x", "y", "title")
        saved = inventory(tmp_path / name)
        assert saved["charts"] == {"sweep/settings": (preset, fields)}
        columns, rows = table(tmp_path / name, "sweep/settings_table")
        assert columns == ["method", "x", "y"] and [row[0] for row in rows] == ["a", "a", "b"]


def test_our_scatter_plot_draws_every_method_in_its_colour():
    """The specification with its fields put in, as the server does, drawn by Vega."""
    import vl_convert

    text = tracking.SPEC.read_text()
    for word, value in {"field:x": "x", "field:y": "y", "field:group": "method", "string:title": "the title"}.items():
        text = text.replace("${" + word + "}", value)
    assert "${" not in text
    svg = vl_convert.vegalite_to_svg({**json.loads(text), "data": {"values": POINTS.to_dict("records")}})
    (marks,) = re.findall(r'<g class="mark-symbol role-mark marks".*?</g>', svg)
    colours = re.findall(r'fill="(#\w+)"', marks)
    assert len(colours) == 3 and colours[0] == colours[1] != colours[2] and "the title" in svg


def test_the_chart_is_put_on_the_server_once(environment, monkeypatch, capsys):
    import wandb

    asked = []

    def create(**options):
        asked.append((options["entity"], json.loads(options["spec"])["data"]))
        if options["entity"] == "known":
            raise wandb.Error("a chart of that name already exists")
        if options["entity"] == "closed":
            raise wandb.Error("permission denied")

    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(create_custom_chart=create))
    tracking.register_chart.cache_clear()
    run = lambda entity: SimpleNamespace(entity=entity, settings=SimpleNamespace(_offline=False))
    names = [tracking.scatter_preset(run(entity)) for entity in ("lab", "lab", "known", "closed")]
    assert names == ["lab/acceptance-toolkit-scatter"] * 2 + ["known/acceptance-toolkit-scatter", "wandb/scatter/v0"]
    assert asked == [(entity, {"name": "wandb"}) for entity in ("lab", "known", "closed")]
    assert "permission denied" in capsys.readouterr().out


def test_runs_are_called_by_what_differs():
    for words, name in (
        (["+experiment=toy_head", "head.depth=2", "loss.w_rej=6"], "toy_head depth=2 w_rej=6"),
        (["paths.root_dir=/a/b", "batch_size=4", "track=false"], None),
        (["pair=toy_padded", "pair.draft='/a/b c/'", "responses=[/a,/b]"], "pair=toy_padded draft=b c"),
        (["seed=3", "overwrite=true"], "seed=3"),
    ):
        assert tracking.overrides_name(words) == name
    words = ["+experiment=heads", "pair.target=/a/b", "prompts.path=/c/d.jsonl", "sampling.max_new_tokens=8"]
    without = ("pair", "prompts", "sampling")  # what all heads of a table share
    assert tracking.overrides_name([*words, "head.depth=2"], without=without) == "heads depth=2"


@pytest.fixture
def job():
    """Makes this process a job of a Hydra application."""

    def begin(config_name: str, *words: str) -> None:
        register(ConfigStore.instance(), config_name)
        with initialize_config_dir(str(config.CONF), version_base="1.3"):
            HydraConfig.instance().set_config(compose(config_name, list(words), return_hydra_config=True))

    parts.register(ConfigStore.instance(), [config.CONF])
    yield begin
    HydraConfig.instance().cfg = None


def test_the_jobs_of_a_multirun_have_names_of_their_own(environment, tmp_path, job):
    names = []
    for temperature in ("0", "1"):
        job("sweep", "prompts=toy_math", "prompts.split=dev", f"sampling.temperature={temperature}")
        with tracking.wandb_run("sweep", {}, tmp_path / temperature, name="toy_math dev traces"):
            pass
        (about,) = records(tmp_path / temperature)["run"][:1]
        names.append(about.display_name)
    assert names == [f"toy_math dev traces temperature={temperature}" for temperature in ("0", "1")]


def test_runs_of_an_experiments_stages_have_its_group_and_its_tags(environment, tmp_path, job, monkeypatch):
    """Training tags the runs of its stages."""

    def stages(*_):
        with tracking.wandb_run("sweep", {}, tmp_path / "out" / "a", tags=["math"]):
            return {"x": tmp_path}

    job("train", "+experiment=toy_head")
    monkeypatch.setattr(train, "run_stages", stages)
    cfg = config.compose("train", ["+experiment=toy_head"])
    cfg.model, cfg.after = None, {}
    train.run(cfg)
    with tracking.wandb_run("sweep", {}, tmp_path / "out" / "b", group="mine"):
        pass
    within, after = (inventory(tmp_path / "out" / name) for name in "ab")
    assert within["group"] == "toy_head" and list(within["tags"]) == ["sweep", "math", "toy", "head"]
    assert after["group"] == "mine" and list(after["tags"]) == ["sweep"]


def logged_stage(cfg):
    """What a stage of an experiment may do."""
    with tracking.wandb_run("train", {}, Path(cfg.paths.root_dir) / str(cfg.seed), name="acceptance_head"):
        return Path(cfg.paths.root_dir) / str(cfg.seed)


def test_the_stages_of_an_experiment_are_called_by_their_names(environment, tmp_path, job):
    """Two trainings of one kind; after them names are what they were."""
    job("train", "+experiment=toy_head")
    stage = {"run": f"{__name__}.logged_stage", "config": "mix"}
    stages = {f"head_{seed}": {**stage, "overrides": ["responses=a", f"seed={seed}"]} for seed in (1, 2)}
    folders = {
        **run_stages(stages, tmp_path),
        "train": logged_stage(config.compose("mix", [f"paths.root_dir={tmp_path}"])),
    }
    names = {records(folder)["run"][0].display_name for folder in folders.values()}
    assert names == {"head_1 toy_head", "head_2 toy_head", "acceptance_head toy_head"}


def test_every_kind_of_head_and_draft_has_a_name():
    heads = ("acceptance_head", "preread_head")
    for head in heads:
        assert what_is_trained(config.plain(config.compose("train", [f"model={head}"]))) == head
    kinds = [path.stem for path in (config.CONF / "kind").glob("*.yaml")]
    for kind in kinds:
        assert what_is_trained(config.plain(config.compose("distill", [f"kind={kind}"]))) == kind
    assert what_is_trained(config.plain(config.compose("distill"))) == "draft"


@pytest.mark.parametrize("silent", [False, True])
def test_a_server_that_is_down_makes_the_run_an_offline_one_within_10_seconds(environment, tmp_path, capsys, silent):
    """Nothing listens at the port; or something does, and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if silent:
            server.listen()
        environment.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        environment.setenv("WANDB_API_KEY", "x" * 40)
        started = perf_counter()
        reason = tracking.unreachable()
        assert reason is not None and perf_counter() - started < 10
        if silent:
            return  # the rest is the same
        with tracking.wandb_run("sweep", {}, tmp_path) as run:
            tracking.log_summary(run, {"throughput": 1.0})
    assert "this run is logged offline" in capsys.readouterr().out
    assert logged(records(tmp_path))["throughput"] == 1.0


def test_a_server_that_answers_anything_is_there(environment):
    class NotFound(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), NotFound) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        environment.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        assert tracking.unreachable() is None
        server.shutdown()


def test_one_command_syncs_every_offline_run_below_a_folder(environment, tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        with tracking.wandb_run("sweep", {}, tmp_path / name):
            pass
    (run,) = (tmp_path / "a").glob("wandb/offline-run-*")
    (file,) = run.glob("run-*.wandb")
    file.with_name(file.name + ".synced").touch()  # as `wandb sync` does
    called = []

    def client(command):
        called.append(command)
        return SimpleNamespace(returncode=int(f"{tmp_path}/c" in command[-1]))

    monkeypatch.setattr(sync.subprocess, "run", client)
    with pytest.raises(InputError, match="1 of 2 runs could not be uploaded"):
        sync.run(config.compose("sync", [f"folder={tmp_path}", "project=lab"]))
    assert sorted(str(Path(command[-1]).parent.parent.name) for command in called) == ["b", "c"]
    assert all(command[1:6] == ["-m", "wandb", "sync", "--project", "lab"] for command in called)
    with pytest.raises(InputError, match="expected offline runs"):
        sync.run(config.compose("sync", [f"folder={tmp_path / 'empty'}"]))


def test_parameters_are_counted():
    counts = tracking.parameter_counts({"head": torch.nn.Linear(3, 2), "table": object()})
    assert counts == {"parameters/head": 8, "parameters/table": 0}
