"""Write anew by what the toy pair's heads know their models: needed when `toolkit.weights` changes, not the weights.

    python -m data_gen.toy_pair.stamp

Only the two fingerprints and the sketch of the draft's weights change in the heads' configs; weights stay as they are.
"""

from __future__ import annotations

from pathlib import Path

from toolkit import ModelPair
from toolkit.acceptance.folder import KINDS
from toolkit.io import read_json, write_json
from toolkit.pair import TOY, fingerprint
from toolkit.weights import sketch


def stamp(folder: Path, pair: ModelPair) -> None:
    """Stamp every head in a folder with the pair's models."""
    for kind in KINDS.values():
        if kind.is_in(folder):
            path = folder / kind.config_file
            facts = {
                "target_fingerprint": fingerprint(pair.target),
                "draft_fingerprint": fingerprint(pair.draft),
                "draft_weights": sketch(pair.draft),
            }
            write_json(path, {**read_json(path), **facts})


if __name__ == "__main__":
    stamp(TOY / "head", ModelPair.toy())
