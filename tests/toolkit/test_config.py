"""Methods and their configs are composed once per process, and anew when a file has changed."""

import os

import pytest

from toolkit import config
from toolkit.errors import InputError

MINE = """defaults:
  - base/drafting@_here_
  - /stopping@policy: confidence
  - /rule@rule: rejection
  - _self_

name: mine
policy:
  threshold: {threshold}
"""


def test_every_caller_gets_a_config_of_its_own():
    first = config.method_config("confidence")
    kept = first.policy.threshold
    first.policy.threshold = kept / 2
    assert config.method_config("confidence").policy.threshold == kept
    assert config.method("confidence").policy.threshold == kept


def test_overrides_and_heads_are_told_apart():
    thresholds = [
        config.method_config("confidence", [f"policy.threshold={t}"]).policy.threshold for t in (0.25, 0.5, 0.25)
    ]
    assert thresholds == [0.25, 0.5, 0.25]
    heads = [config.plain(config.method_config("specdec_pp", head=name)) for name in ("one", "two")]
    assert heads[0] != heads[1]


def test_a_changed_file_counts(tmp_path):
    file = tmp_path / "method" / "mine.yaml"
    file.parent.mkdir()
    with config.searching(tmp_path):
        for second, threshold in enumerate((0.25, 0.75)):
            file.write_text(MINE.format(threshold=threshold))
            later = 2_000_000_000 + second
            os.utime(file, (later, later))
            assert config.method_config("mine").policy.threshold == threshold
            assert config.method("mine").policy.threshold == threshold
    with pytest.raises(InputError, match="mine"):
        config.method_config("mine")


def test_a_fault_is_said_every_time():
    for _ in range(2):
        with pytest.raises(InputError, match="treshold"):
            config.method_config("confidence", ["policy.treshold=.3"])
