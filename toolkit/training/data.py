"""Mixed data for training heads: the output folder of data_gen.mix as a LightningDataModule."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from toolkit import journal
from toolkit.errors import InputError
from toolkit.io import content_hash
from toolkit.lines import first_line
from toolkit.schema.ranges import AtLeast
from toolkit.stage import MANIFEST, read_manifest
from toolkit.teacher import hidden_size
from toolkit.training.examples import ExampleData
from toolkit.training.states import CachedStates, LiveStates, Positions, write_cache

SUMMARY = "summary.json"
MEND = "delete the folder dataset/ there and run data_gen.mix again"
STATES = "the draft's final hidden state, after the last norm, at the position that has read the drafted token"
LABELS = (
    "min(1, p/q) of the drafted token, both distributions warped by the sampling given here (analytic, not sampled)"
)


class MixedData(ExampleData):
    """Batches of positions, examples being the unit: `batch_size` examples of the data set make a batch, as in the paper.

    path              folder of data_gen.mix; an +experiment=NAME makes one
    draft             the model whose states are read: the one that the tokens were mixed with
    batch_size        examples per batch and process
    cache_hidden      compute the draft's states once and keep them beside the data set, for all heads and epochs;
                      False: compute them anew for every batch
    draft_batch_size  examples in one forward of the draft
    shuffle, seed     a new order of the training examples for every epoch

    Raises InputError if the folder is not finished, or the draft another one.
    """

    def __init__(
        self,
        path: str | Path,
        draft: Any,
        batch_size: Annotated[int, AtLeast(1)] = 32,
        cache_hidden: bool = True,
        draft_batch_size: Annotated[int, AtLeast(1)] = 16,
        shuffle: bool = True,
        seed: int = 0,
    ):
        super().__init__(path, draft, batch_size, shuffle, seed)
        if draft_batch_size < 1:
            raise InputError(f"data.draft_batch_size: expected at least 1, got {draft_batch_size}")
        self.draft_batch_size, self.cache_hidden = draft_batch_size, cache_hidden

    @staticmethod
    def inputs(folder: Path) -> list[Path]:
        if not (folder / MANIFEST).exists() or not (folder / "dataset").exists():
            raise InputError(
                f"data.path: expected a folder of data_gen.mix (with {MANIFEST} and dataset/), got {folder}"
            )
        if read_manifest(folder).get("status") != "finished":
            raise InputError(f"the data in {folder} are not finished: run data_gen.mix again first")
        return [folder / SUMMARY]

    def head_sizes(self) -> dict[str, int]:
        return {"hidden_size": hidden_size(self.draft)}

    @property
    def cache_folder(self) -> Path:
        """Where the states of this draft over these data are kept."""
        held = [self.weights.fingerprint, self.summary["content"], str(self.draft.dtype), Positions._fields]
        return self.path / f"hidden-{content_hash(held)}"

    def prepare_data(self) -> None:
        """Write the cache, on one process of a machine."""
        if self.cache_hidden:
            write_cache(self.cache_folder, self.draft, self._load(), self.draft_batch_size)

    def setup(self, stage: str | None = None) -> None:
        """Open the states of both splits."""
        if self.states:
            return
        if self.cache_hidden:
            self.states = {name: CachedStates(self.cache_folder, name) for name in ("train", "validation")}
        else:
            splits = self._load().items()
            self.states = {name: LiveStates(self.draft, split, self.draft_batch_size) for name, split in splits}
        for name, states in self.states.items():
            if not states.num_examples:
                raise InputError(
                    f"{self.path}: no example of the {name} split holds a drafted token; mix more responses"
                )

    def about(self) -> dict[str, Any]:
        kept = ("target_fingerprint", "sampling", "mixing_ratio")
        return {
            **{name: self.summary[name] for name in kept},
            **self.weights.facts(),
            "data": self.path.name,
            "num_positions": self.states["train"].num_positions,
            "hidden_state": STATES,
            "label": LABELS,
        }

    def _load(self) -> Any:
        """Raises InputError, one line, if a file of the data set is damaged."""
        from datasets import load_from_disk

        place = self.path / "dataset"
        for path in sorted(found for found in place.rglob("*") if found.is_file()):
            journal.check(path, MEND)
        try:
            return load_from_disk(str(place))
        except Exception as error:  # missing and foreign files fail in as many ways as there are readers
            raise InputError(f"{place} is not a whole data set ({first_line(error)}); {MEND}") from None
