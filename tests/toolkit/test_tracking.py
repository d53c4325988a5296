"""W&B: when it is online, offline runs on disk, and runs that end as their stage did."""

import pandas as pd
import pytest

from analysis.figures.plots import pareto
from toolkit import tracking
from toolkit.errors import InputError


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """No key anywhere."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return monkeypatch


def test_offline_without_a_key(environment):
    assert tracking.wandb_mode() == "offline"


def test_online_with_a_key(environment, tmp_path):
    environment.setenv("WANDB_API_KEY", "x" * 40)
    assert tracking.wandb_mode() == "online"
    environment.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "x" * 40)
    assert tracking.wandb_mode() == "online"
    environment.setenv("WANDB_BASE_URL", "https://wandb.example")
    assert tracking.wandb_mode() == "offline", "the key is another server's"


@pytest.mark.parametrize(
    ("asked", "mode"), [("offline", "offline"), ("DISABLED", "disabled"), ("online", "online"), ("dryrun", "offline")]
)
def test_the_environment_wins(environment, asked, mode):
    environment.setenv("WANDB_API_KEY", "x" * 40)
    environment.setenv("WANDB_MODE", asked)
    assert tracking.wandb_mode() == mode


def test_an_unknown_mode_is_refused(environment):
    environment.setenv("WANDB_MODE", "of")
    with pytest.raises(InputError, match="WANDB_MODE: expected online, offline or disabled, got 'of'"):
        tracking.wandb_mode()


def test_an_offline_run_is_on_disk_with_tables_charts_and_images(environment, tmp_path, capsys):
    frame = pd.DataFrame(
        {"method": ["a", "a", "b"], "x": [1.0, 2.0, 3.0], "y": [3.0, 1.0, 2.0], "mixed": [[1], None, float("nan")]}
    )
    cells = frame.assign(setting="", verification_rate=frame.x, discard_rate=frame.y, undominated=True)
    with tracking.wandb_run("sweep", {"a": {"b": 1}}, tmp_path / "stage", tags=["t"]) as run:
        tracking.log_table(run, "table", frame)
        tracking.log_scatter(run, "scatter", frame, "x", "y", "title")
        tracking.log_lines(run, "lines", frame, "x", "y", "method", "title")
        tracking.log_image(run, "image", pareto(cells, tmp_path / "figure.png", "title"))
    (folder,) = (tmp_path / "stage" / "wandb").glob("offline-run-*")
    assert any(folder.glob("run-*.wandb"))
    media = sorted(path.name.split("_")[0] for path in (folder / "files" / "media").rglob("*.*"))
    assert media == ["image", "lines", "scatter", "table"]
    assert "wandb sync" in capsys.readouterr().out


def test_a_run_ends_as_its_stage_did(environment, tmp_path, monkeypatch):
    codes = []

    class Run:
        settings = type("Settings", (), {"_offline": False})

        def finish(self, exit_code):
            codes.append(exit_code)

    monkeypatch.setattr(tracking, "_start", lambda *args: Run())
    with tracking.wandb_run("sweep", {}, tmp_path):
        pass
    with pytest.raises(KeyError), tracking.wandb_run("sweep", {}, tmp_path):
        raise KeyError
    assert codes == [0, 1]


def test_no_run_if_nothing_is_to_be_tracked(environment, tmp_path):
    with tracking.wandb_run("sweep", {}, tmp_path, track=False) as run:
        assert run is None
        tracking.log_table(run, "table", None)
    assert not list(tmp_path.iterdir())
