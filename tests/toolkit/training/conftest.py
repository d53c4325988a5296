"""Short trainings of a head on the tiny data set."""

import pytest

from toolkit import train
from toolkit.config import compose


@pytest.fixture
def run(tiny_overrides, tiny_mix, tmp_path):
    """Train with these overrides into a folder of this name."""

    def trained(name, *words):
        every = [*tiny_overrides, f"data.path={tiny_mix}", *words, f"paths.output_dir={tmp_path}/{name}"]
        return train.run(compose("train", every))

    return trained
