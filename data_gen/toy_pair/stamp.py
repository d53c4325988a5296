"""Write again how the toy pair's heads know their models: needed when `toolkit.models.fingerprint` changes, not the weights.

    python -m data_gen.toy_pair.stamp

Only the fingerprints and sketches of the models' weights change in the heads' configs; weights stay as they are. The
files' checksums are written again.
"""

from __future__ import annotations

from pathlib import Path

from toolkit import ModelPair
from toolkit.acceptance.folder import KINDS
from toolkit.errors import answer_signals
from toolkit.models.fingerprint import Weights
from toolkit.models.pair import TOY


def stamp(folder: Path, pair: ModelPair) -> None:
    for kind in KINDS.values():
        if kind.is_in(folder):
            head, card = kind.load(folder)
            facts = {**Weights.of(pair.target).facts("target"), **Weights.of(pair.draft).facts("draft")}
            head.save(folder, {**{name: fact for name, fact in card.items() if name != "head"}, **facts})


if __name__ == "__main__":
    answer_signals()
    stamp(TOY / "head", ModelPair.toy())
