"""Sources of prompts: the toy domains, local files, and data sets of the Hugging Face hub.

Each config in `conf/prompts/` names one of these classes. `path: FILE.jsonl` replaces any of them by a prompts file.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from data_gen.domains import DOMAINS, SPLITS, get
from data_gen.held_out import COUNTS, load_frozen
from data_gen.templates import Conversation, NullValueError, Row, check_chat, conversation, render, write_chat
from toolkit.config.notes import AtLeast, Between, File, HubData
from toolkit.errors import InputError, unknown_name
from toolkit.models.prompts import Prompt, PromptSource, first_ids, read_jsonl

TRAIN_PROMPTS = 1000  # of a toy domain, unless `limit` says otherwise
SHARES = {"dev": 0.15, "test": 0.15}  # of a prompts file; the rest is train
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}  # loaders of `datasets`
SPLIT = re.compile(r"([\w.]+)(?:\[(\d*):(\d*)\])?")  # "train", "train[40000:50000]"


class ToyPrompts(PromptSource):
    """One toy domain: frozen prompts for dev and test, freshly generated ones for train.

    domain  one of the three
    split   which part: dev and test are frozen, train is generated
    limit   how many; None: all frozen ones, or 1,000 generated ones
    seed    of the generated ones; the frozen ones do not depend on it
    """

    def __init__(
        self,
        domain: Literal["instruct", "math", "code"],
        split: Literal["train", "dev", "test"] = "test",
        limit: Annotated[int, AtLeast(1)] | None = None,
        seed: int = 0,
        path: Annotated[str | Path | None, File()] = None,
    ):
        super().__init__(path, limit)
        if domain not in DOMAINS:
            raise unknown_name("toy domain", domain, DOMAINS)
        if split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
        self.domain, self.split, self.seed = domain, split, seed

    def _load(self) -> list[Prompt]:
        if self.split in COUNTS:
            examples = load_frozen(self.domain, self.split)
        else:
            examples = get(self.domain).examples(self.split, self.limit or TRAIN_PROMPTS, self.seed)
        return [
            Prompt(example.id, example.prompt, example.answer, extra={"response": example.response})
            for example in examples
        ]


class JsonlPrompts(PromptSource):
    """A prompts file (see `toolkit.models.prompts`), or one of three disjoint parts of it.

    split   train, dev or test; None: all of the file
    shares  of dev and test; train is the rest. A hash of its id says which part a prompt is in, of its first id if the
            file holds it several times: prompts that are added to the end of the file later move no other
    limit   how many of the part
    """

    def __init__(
        self,
        path: Annotated[str | Path, File()],
        limit: Annotated[int, AtLeast(1)] | None = None,
        split: Literal["train", "dev", "test"] | None = None,
        shares: Mapping[str, Annotated[float, Between(0, 1, "()")]] | None = None,
    ):
        super().__init__(path, limit)
        if split is not None and split not in SPLITS:
            raise unknown_name("split", split, SPLITS)
        self.split, self.shares = split, dict(SHARES if shares is None else shares)
        if set(self.shares) != set(SHARES) or not all(0 < share < 1 for share in self.shares.values()):
            raise InputError(f"prompts.shares: expected {{dev: SHARE, test: SHARE}} in (0, 1), got {self.shares}")
        if sum(self.shares.values()) >= 1:
            raise InputError(
                f"prompts.shares: expected a sum below 1, or no training prompt is left, got {self.shares}"
            )

    def load(self) -> list[Prompt]:
        prompts = self._load()
        parts = [part_of(first, self.shares) for first in first_ids(prompts)]
        chosen = [prompt for prompt, part in zip(prompts, parts, strict=True) if self.split in (None, part)]
        chosen = chosen[: self.limit]
        if not chosen:
            part = "" if self.split is None else f" of the {self.split} part"
            raise InputError(f"expected prompts{part}, found none among the {len(prompts)} in {self.path}; add some")
        return chosen

    def _load(self) -> list[Prompt]:
        assert self.path is not None
        return read_jsonl(self.path)


def part_of(prompt_id: str, shares: Mapping[str, float]) -> str:
    """Which part of a file a prompt belongs to, by its id alone: dev, test (by their shares) or train."""
    fraction = int(hashlib.sha256(prompt_id.encode(errors="surrogatepass")).hexdigest()[:12], 16) / 16**12
    if fraction < shares["dev"]:
        return "dev"
    return "test" if fraction < shares["dev"] + shares["test"] else "train"


class HubPrompts(PromptSource):
    """A data set of the Hugging Face hub, or local files of the same schema, through `datasets`.

    name          prefix of the ids, NAME-SPLIT-INDEX: the index is the row's position in the data set, so an id means
                  the same row whatever is selected
    dataset       hub name; None: the data set is not on the hub, and data_files is needed
    config_name   configuration of the data set, if it has several
    split         which part to take: a key of `splits`
    splits        part -> split of the data set, or a slice of one, "train[:40000]". A slice is cut after the shuffle:
                  parts are disjoint random samples as long as shuffle_seed is the same
    template      Jinja text of the prompt over the row's fields; or
    turns         the field that holds a conversation (see `templates.conversation`)
    answer        Jinja text of the reference; an empty one, or a null in it, means there is none
    extra         fields copied into `Prompt.extra`, which also holds a user's `later_turns`
    join          {file, key}: a local JSON list of objects; the one whose `key` equals the row's is the row's `joined`
    chat          how conversations are written: none, llama2 or tokenizer (see `templates.write_chat`)
    shuffle_seed  rows are shuffled with it before anything is cut; None: in the data set's order
    limit         the most prompts; rows whose prompt is empty, or would hold a null, are passed over
                  and counted
    limits        part -> its limit where `limit` is None: so a paper's number of test prompts cuts no training part
    data_files    local .json, .jsonl, .parquet or .csv files instead of the hub. A file or a list of files *is* the
                  part; a mapping from splits to files stands for the data set, and `splits` cuts it
    revision      commit or tag of the data set
    cache_dir     where `datasets` keeps what it has converted
    """

    def __init__(
        self,
        name: str,
        dataset: Annotated[str | None, HubData(("data_files", "path"))] = None,
        config_name: str | None = None,
        split: str = "test",
        splits: Mapping[str, str] | None = None,
        template: str | None = None,
        turns: str | None = None,
        answer: str | None = None,
        extra: Sequence[str] = (),
        join: Annotated[Mapping[str, str | None] | None, File()] = None,
        chat: Literal["none", "llama2", "tokenizer"] = "none",
        shuffle_seed: int | None = None,
        limit: Annotated[int, AtLeast(1)] | None = None,
        limits: Mapping[str, Annotated[int, AtLeast(1)]] | None = None,
        path: Annotated[str | Path | None, File()] = None,
        data_files: Annotated[str | Sequence[str] | Mapping[str, str | Sequence[str]] | None, File()] = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
    ):
        super().__init__(path, dict(limits or {}).get(split) if limit is None else limit)
        check_chat(chat)
        if (template is None) == (turns is None):
            raise InputError(f"{name}: expected either a template or turns")
        self.name, self.dataset, self.config_name, self.revision = name, dataset, config_name, revision
        self.split, self.splits = split, dict(splits or {"test": "test"})
        if split not in self.splits:
            raise unknown_name(f"split of {name}", split, self.splits)
        self.template, self.turns, self.answer, self.extra, self.chat = template, turns, answer, tuple(extra), chat
        self.join, self.shuffle_seed = dict(join or {}), shuffle_seed
        self.data_files, self.cache_dir = data_files, cache_dir

    def describe(self) -> str:
        return f"{self.name} ({self.split})"

    def _load(self) -> list[Prompt]:
        rows, indices = self._rows()
        joined = self._joined()
        prompts: list[Prompt] = []
        num_empty = 0
        for index in indices:
            try:
                prompt = self._prompt(index, rows[index], joined)
            except InputError as error:
                raise InputError(f"{self.describe()}, row {index}: {error}") from None
            if prompt is not None:
                prompts.append(prompt)
            num_empty += prompt is None
            if len(prompts) == self.limit:
                break
        if num_empty:
            rows_read = len(prompts) + num_empty
            warnings.warn(
                f"{self.describe()}: {num_empty} of {rows_read} rows ask nothing (null or empty) and are passed over",
                RuntimeWarning,
                stacklevel=1,
            )
        return prompts

    def _rows(self) -> tuple[Any, list[int]]:
        """The rows of the data set's split, and the indices of those that are wanted, in order."""
        part = self.splits[self.split]
        match = SPLIT.fullmatch(part)
        if match is None:
            raise InputError(f"expected a split like train or train[100:200], got {part!r}")
        split, start, stop = match[1], int(match[2]) if match[2] else None, int(match[3]) if match[3] else None
        if self.data_files is not None and not isinstance(self.data_files, Mapping):
            split, start, stop = "train", None, None  # what `datasets` calls the rows of plain files
        rows = self._load_rows(split)
        indices = list(range(len(rows)))
        if self.shuffle_seed is not None:
            random.Random(self.shuffle_seed).shuffle(indices)
        return rows, indices[start:stop]

    def _load_rows(self, split: str) -> Any:
        import datasets

        source: str
        options: dict[str, Any]
        if self.data_files is not None:
            source, options = loader_of(self.data_files), {"data_files": self.data_files}
        elif self.dataset is None:
            raise InputError(f"{self.name} is not on the hub: expected its file as prompts.data_files=FILE")
        else:
            source, options = self.dataset, {"name": self.config_name, "revision": self.revision}
        cache_dir = None if self.cache_dir is None else str(self.cache_dir)
        try:
            return datasets.load_dataset(source, split=split, cache_dir=cache_dir, **options)
        except Exception as error:  # the loaders raise whatever their transport and their parsers raise
            reason = (str(error).strip() or type(error).__name__).split("\n")[0]
            if self.data_files is not None:
                message = f"could not read split {split} of {self.name} from {self.data_files}: {reason}"
                raise InputError(message) from error
            part = "/".join(filter(None, (self.dataset, self.config_name)))
            raise InputError(
                f"could not load split {split} of {part} from the Hugging Face hub: {reason}. Local files work without it: "
                "prompts.data_files=FILE (same fields) or prompts.path=FILE.jsonl (ready prompts)"
            ) from error

    def _joined(self) -> dict[str, Any]:
        if not self.join:
            return {}
        file, key = self.join.get("file"), self.join["key"]
        if file is None:
            raise InputError(f"{self.name} needs a second file, joined by {key}: expected prompts.join.file=FILE.json")
        try:
            return {entry[key]: entry for entry in json.loads(Path(file).read_text(encoding="utf-8"))}
        except FileNotFoundError:
            raise InputError(f"expected a JSON file at {file}, found none") from None
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise InputError(f"expected a JSON list of objects with {key!r} in {file}: {error!r}") from None

    def _prompt(self, index: int, row: Row, joined: Mapping[str, Any]) -> Prompt | None:
        extra = {key: _field(row, key) for key in self.extra}
        if self.join:
            key, value = self.join["key"], _field(row, str(self.join["key"]))
            if value not in joined:
                raise InputError(f"the joined file has no entry with {key} {value!r}")
            row = {**row, "joined": joined[value]}
        try:
            if self.turns is not None:
                question = conversation(_field(row, self.turns))
            else:
                question = Conversation([{"role": "user", "content": render(str(self.template), row)}])
        except NullValueError:
            return None
        if not any(message["content"].strip() for message in question.messages):
            return None
        if question.later_turns:
            extra["later_turns"] = list(question.later_turns)
        try:
            answer = question.reply if self.answer is None else render(self.answer, row).strip()
        except NullValueError:
            answer = None
        content = write_chat(question.messages, self.chat)
        text, messages = (content, None) if isinstance(content, str) else (None, content)
        return Prompt(f"{self.name}-{self.split}-{index:05d}", text, answer or None, messages, extra)


def loader_of(data_files: Any) -> str:
    """The loader of `datasets` for local files, by their ending; they must all have the same kind."""
    groups = data_files.values() if isinstance(data_files, Mapping) else [data_files]
    files = [file for group in groups for file in ([group] if isinstance(group, str | Path) else group)]
    endings = {Path(file).suffix for file in files}
    loaders = {FORMATS.get(ending) for ending in endings}
    if len(loaders) != 1 or None in loaders:
        got = " and ".join(sorted(ending or "no ending" for ending in endings)) or "no files"
        raise InputError(f"prompts.data_files: expected files of one kind out of {', '.join(FORMATS)}, got {got}")
    return str(loaders.pop())


def _field(row: Row, key: str) -> Any:
    if key not in row:
        raise InputError(f"expected a field {key!r}; the row's fields are {', '.join(row)}")
    return row[key]
