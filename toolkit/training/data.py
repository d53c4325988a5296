"""Mixed data for training heads: the output folder of data_gen.mix as a LightningDataModule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from toolkit.acceptance.inputs import Inputs
from toolkit.acceptance.preread import embedding_table
from toolkit.acceptance.saved import SavedHead
from toolkit.config.notes import AtLeast, File
from toolkit.config.values import check_ranges
from toolkit.errors import InputError
from toolkit.files import journal
from toolkit.files.atomic import content_hash
from toolkit.files.text import first_line
from toolkit.models.fingerprint import configuration
from toolkit.models.teacher import hidden_size
from toolkit.training.cached import FORMAT, StoredStates, announce
from toolkit.training.examples import ExampleData, Positions
from toolkit.training.online import MixedSequences, OnlineStates

SPLITS = ("train", "validation")
HINT = "delete the folder dataset/ there and run data_gen.mix again"
STATES = "the draft's final hidden state, after the last norm, at the position that has read the drafted token"
LABELS = (
    "min(1, p/q) of the drafted token, both distributions warped by the sampling given here (analytic, not sampled)"
)


class MixedData(ExampleData):
    """Batches of positions, examples being the unit: `batch_size` examples of the data set make a batch, as in the paper.

    path              folder of data_gen.mix; an +experiment=NAME makes one
    draft             the model whose states are read: the one that the tokens were mixed with
    batch_size        examples per batch and process
    features          where the draft's states come from. online: computed for every batch. cached: from files of
                      float16 beside the data set, for all heads and epochs; what is missing is written before the training
    draft_batch_size  examples in one forward pass of the draft
    shuffle, seed     a new order of the training examples for every epoch

    Raises InputError if the folder is not finished, or the draft another one.
    """

    made_by = ("data_gen.mix", "dataset/", "data")

    def __init__(
        self,
        path: Annotated[str | Path, File()],
        draft: Any,
        batch_size: Annotated[int, AtLeast(1)] = 32,
        features: Literal["online", "cached"] = "cached",
        draft_batch_size: Annotated[int, AtLeast(1)] = 16,
        shuffle: bool = True,
        seed: int = 0,
    ):
        super().__init__(path, draft, batch_size, shuffle, seed)
        self.features, self.draft_batch_size = features, draft_batch_size
        check_ranges(self, "data.")
        self._online: dict[str, OnlineStates] = {}
        self.head_inputs = Inputs()

    def head_sizes(self) -> dict[str, int]:
        return {"hidden_size": hidden_size(self.draft)}

    def further_sizes(self) -> dict[str, int]:
        return {"embedding_size": embedding_table(self.draft).shape[1]}

    def read_by(self, head: SavedHead) -> None:
        if head.inputs != self.head_inputs:
            self.head_inputs, self.states, self._online = head.inputs, {}, {}

    @property
    def cache_folder(self) -> Path:
        """The folder that keeps the states of this draft over these data."""
        held: list[Any] = [self._owner, configuration(self.draft), str(FORMAT), Positions._fields]
        if self.head_inputs != Inputs():  # files hold what heads read: for other inputs there are others
            held += [self.head_inputs.read(), self.seed]
        return self.path / f"hidden-{content_hash(held)}"

    def prepare_data(self) -> None:
        """Write the states that the training needs from the start, in one process of each machine."""
        if self.features == "online":
            return
        splits = list(self._stored().values())
        announce(self.cache_folder, splits)
        for states in splits:
            states.fill()

    def setup(self, stage: str | None = None) -> None:
        if self.states:
            return
        online = self._computed()
        self.states = {**online} if self.features == "online" else {**self._stored()}
        for name in self.states:
            if not online[name].num_examples:
                raise InputError(f"{self.path}: no example of the {name} split has a drafted token; mix more responses")

    def about(self) -> dict[str, Any]:
        names = ("target_fingerprint", "target_weights", "sampling", "mixing_ratio")
        return {
            **{name: self.summary[name] for name in names if name in self.summary},
            **self.weights.facts(),
            "data": self.path.name,
            "num_positions": self.states["train"].num_positions,
            "hidden_state": STATES,
            "label": LABELS,
        }

    @property
    def _owner(self) -> dict[str, str]:
        """The draft, number format and data that the files' states belong to."""
        dtype = str(self.draft.dtype).removeprefix("torch.")
        return {"draft": self.weights.fingerprint, "dtype": dtype, "data": content_hash(self.summary["content"])}

    def _stored(self) -> dict[str, StoredStates]:
        online = self._computed()
        return {name: StoredStates(self.cache_folder, name, self._owner, online[name]) for name in SPLITS}

    def _computed(self) -> dict[str, OnlineStates]:
        """Both splits, read once.

        Raises InputError, one line, if a file of the data set is damaged, or if a label is not in [0, 1].
        """
        from datasets import load_from_disk

        if not self._online:
            folder = self.path / "dataset"
            for path in sorted(file for file in folder.rglob("*") if file.is_file()):
                journal.check(path, HINT)
            try:
                splits = load_from_disk(str(folder))
            except Exception as error:  # missing and foreign files fail in a way of each reader's own
                raise InputError(f"{folder} is not a whole data set ({first_line(error)}); {HINT}") from None
            for name, split in splits.items():
                sequences = MixedSequences(split, f"{folder} ({name})", HINT)
                self._online[name] = OnlineStates(
                    self.draft, sequences, self.draft_batch_size, self.head_inputs, self.seed
                )
        return self._online
