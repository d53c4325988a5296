"""A target, its draft (or several), and the tokenizer they share."""

from __future__ import annotations

import operator
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # not by several threads at once

from toolkit.config.others import DEVICE
from toolkit.config.values import check_ranges, checked, shown
from toolkit.drafts.folders import kind_in
from toolkit.drafts.kinds import reading_kinds
from toolkit.engine.device import check_device, tensor_on
from toolkit.engine.engine import EngineOptions, OnOff
from toolkit.engine.facts import devices_of, end_ids, fit_logits, max_positions, vocab_size
from toolkit.errors import InputError, warn
from toolkit.files.machine import check_memory
from toolkit.files.shards import is_gguf
from toolkit.files.tensors import num_weights
from toolkit.files.text import first_line
from toolkit.models import gguf, reduced
from toolkit.models.chat import check_options, encode_chat, read_request
from toolkit.models.fingerprint import fingerprint as fingerprint
from toolkit.sampling import Sampling
from toolkit.types import Prompt

Device = Annotated[str, DEVICE]
TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "merges.txt")
SEEN_BEFORE = 8  # tokens in front of a text that decoding it starts with
ASSETS = Path(__file__).parents[1] / "assets"
TOY = ASSETS / "toy"


class Tokenizer(Protocol):
    """What a pair asks of a tokenizer; those of transformers have it."""

    def __call__(self, text: str) -> Any:
        """Something with `input_ids`."""

    def get_vocab(self) -> dict[str, int]:
        """Every token's id."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> Any:
        """The text of token ids."""


@dataclass(eq=False)
class ModelPair:
    """A target and its draft models over one tokenizer: values. What decoding needs beside them is the engine's.

    target, draft  Hugging Face causal language models, or anything with `open_session` (a TabularModel)
    tokenizer      shared; None if prompts are lists of token ids and no text is wanted
    drafts         several drafts instead of one; `draft` is the first of them
    end_ids        tokens that end a text; None: those of the target's generation config and of the tokenizer
    head           folder of the acceptance head that ships with the pair, if one does
    chat_template_options  what the chat template is told beside the messages: {"enable_thinking": False}
    unshared       token ids that no draft proposes: special tokens that a draft's tokenizer calls otherwise or lacks
    costs          of forward passes, for rules that weigh them and name none: "measured" on this machine, or "assumed" by
                   the rules (the toy pair's)
    """

    target: Any
    draft: Any = None
    tokenizer: Tokenizer | None = None
    drafts: Sequence[Any] = ()
    end_ids: tuple[int, ...] | None = None
    name: str = ""
    head: str | None = None
    options: EngineOptions = field(default_factory=EngineOptions)
    chat_template_options: Mapping[str, Any] = field(default_factory=dict)
    unshared: tuple[int, ...] = ()
    costs: Literal["measured", "assumed"] = "measured"

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.drafts and self.draft is not None:
            raise InputError("expected draft=... or drafts=[...], got both")
        self.drafts = tuple(self.drafts) or ((self.draft,) if self.draft is not None else ())
        self.draft = self.drafts[0] if self.drafts else None
        if self.end_ids is None:
            self.end_ids = end_ids(self.target, self.tokenizer)
        self.chat_template_options = dict(self.chat_template_options)
        check_options(self.chat_template_options, self.tokenizer)
        tokens = set() if self.tokenizer is None else set(self.tokenizer.get_vocab().values())
        for role, model in (("target", self.target), *(("draft", model) for model in self.drafts)):
            num_tokens = max(tokens - (set(self.unshared) if role == "draft" else set()), default=-1) + 1
            if vocab_size(model) < num_tokens:
                raise InputError(
                    f"the {role} has {vocab_size(model)} output tokens, the tokenizer {num_tokens}: they do not belong together"
                )

    @classmethod
    @checked
    def toy(cls, device: Device = "cpu", dtype: str = "float32") -> ModelPair:
        """The embedded pair: a 2 M target and a 0.2 M draft trained on three toy domains, with an acceptance head."""
        pair = cls.from_pretrained(TOY / "target", TOY / "draft", device=device, dtype=dtype)
        pair.name = "toy"
        return pair

    @classmethod
    @checked
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | Sequence[str | Path] | None = None,
        *,
        drafts: Sequence[str | Path] = (),
        device: Device = "cpu",
        dtype: str = "float32",
        device_map: str | dict[str, Any] | None = None,
        quantization: str | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        name: str = "",
        cuda_graphs: OnOff = "auto",
        self_check: Literal["auto", "off"] | bool = "auto",
        packed: OnOff = "auto",
        writable: bool = True,
        chat_template_options: Mapping[str, Any] | None = None,
        end_ids: Sequence[int] | None = None,
    ) -> ModelPair:
        """Load both models and compare their tokenizers token by token. Special tokens that differ are never drafted.

        target, draft  hub names, local folders, GGUF files, or "toy/target" and "toy/draft"; a list of drafts: several
        dtype          "float32", "bfloat16", ... or "auto"; device_map as in transformers (needs accelerate)
        quantization   "8bit" or "4bit" through bitsandbytes, for the target; None: none
        packed, writable  weights laid out for a few tokens on a CPU, and whether somebody may write to them: `EngineOptions`
        chat_template_options  for prompts that are messages: {"enable_thinking": False}
        end_ids        tokens that end a text; None: those of the target's generation config and of the tokenizer
        Raises InputError if the tokenizers differ in another token, naming the first one.
        """
        check_device(device)
        name = name or (Path(target).stem if is_gguf(target) else Path(target).name)
        names = [] if draft is None else [draft] if isinstance(draft, (str, Path)) else list(draft)
        if names and drafts:
            raise InputError("expected draft=... or drafts=[...], got both")
        target, sources = resolve(target), [resolve(source) for source in (*names, *drafts)]
        options: dict[str, Any] = {"dtype": _dtype(dtype), "trust_remote_code": trust_remote_code}
        options |= {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        big = dict(options, revision=revision, **_placement(device_map, quantization))
        if (kind := kind_in(target)).reads_target:
            raise InputError(f"{target} is {kind.phrase}, no target: give pair.target=TARGET pair.draft={target}")
        tokenizer = load_tokenizer(target, revision, trust_remote_code)
        with_tokenizer = [source for source in sources if not lacks_tokenizer(source)]
        unshared = unshared_by(tokenizer, with_tokenizer, draft_revision, trust_remote_code)
        model = _load_model(target, big, None if device_map or quantization else device)
        small = [_load_draft(source, dict(options, revision=draft_revision), device, model) for source in sources]
        embedded = all(Path(source).parent == TOY for source in (target, *sources))
        is_toy = Path(target) == TOY / "target" and sources == [TOY / "draft"] and (TOY / "head").exists()
        return cls(
            target=model,
            tokenizer=tokenizer,
            drafts=small,
            name=name,
            head=str(TOY / "head") if is_toy else None,
            options=EngineOptions(cuda_graphs, self_check, packed, writable),
            chat_template_options=dict(chat_template_options or {}),
            end_ids=None if end_ids is None else tuple(end_ids),
            unshared=unshared,
            costs="assumed" if embedded else "measured",
        )

    @property
    def vocab_size(self) -> int:
        """Length of every distribution: the target's output size."""
        return vocab_size(self.target)

    @property
    def device(self) -> torch.device:
        """Where distributions are compared: the target's device."""
        return self.target.device  # type: ignore[no-any-return]

    @property
    def devices(self) -> list[str]:
        """Every device that a model of the pair lies on: a large target may be spread over several."""
        return list(dict.fromkeys(name for model in (self.target, *self.drafts) for name in devices_of(model)))

    @property
    def max_length(self) -> int:
        """Longest text, prompt included, that every model of the pair can read."""
        return min(max_positions(model) for model in (self.target, *self.drafts))

    @property
    def context(self) -> str:
        """Whose limit `max_length` is, as messages say it."""
        return f"the {'target' if max_positions(self.target) == self.max_length else 'draft'}'s context of {self.max_length}"

    def check_has_draft(self, reader: str) -> None:
        """Raises InputError, which says how one is made, if the pair has no draft model. reader: what needs it."""
        if not self.drafts:
            advice = f"give pair.draft=NAME, or make one: {draft_command(getattr(self.target, 'name_or_path', '') or 'TARGET')}"
            raise InputError(f"{reader} needs a draft model, the pair has none: {advice}")

    @property
    def fit(self) -> Callable[[Tensor], Tensor]:
        """What puts a draft's logits [..., V'] on the target's device and vocabulary [..., V], -inf at `unshared`.

        It is of the target's form at this moment: asked for in each round, not in each forward pass.
        """
        size, device = self.vocab_size, self.device
        ids = [token for token in self.unshared if token < size]
        if not ids:
            return lambda logits: fit_logits(logits, size, device)
        undrafted = tensor_on(device, ids)
        return lambda logits: fit_logits(logits, size, device).index_fill(-1, undrafted, -torch.inf)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a string, a list of ids, or, through the chat template, messages or a request (`Prompt`)."""
        if isinstance(prompt, Mapping) and prompt.get("grammar") is not None:
            raise InputError("a prompt's grammar is for decoding alone (generate, toolkit.decode): leave it out here")
        is_chat = isinstance(prompt, list | tuple) and any(isinstance(turn, dict) for turn in prompt)
        content: Any = {"messages": prompt} if is_chat else prompt
        options: dict[str, Any] = {}
        if isinstance(content, Mapping) and "messages" in content:
            content, options = read_request(**content)
            check_options(options, self.tokenizer)
        elif not isinstance(content, str):
            return _token_ids(content)
        tokenizer: Any = self.tokenizer
        if tokenizer is None:
            raise InputError("this pair has no tokenizer: expected prompts as lists of token ids, got text")
        try:
            for text in [content] if isinstance(content, str) else [turn["content"] for turn in content]:
                text.encode("utf-8")
            if isinstance(content, str):
                ids = [int(token) for token in tokenizer(content).input_ids]
            else:
                ids = encode_chat(tokenizer, content, {**self.chat_template_options, **options})
        except InputError:
            raise
        except UnicodeEncodeError as error:  # half a character, of which there is no UTF-8
            raise InputError(
                f"the prompt holds a lone surrogate ({error.object[error.start]!a} at character {error.start + 1}), which is "
                "no Unicode text"
            ) from None
        except Exception as error:  # tokenizers and chat templates have errors of their own
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"the prompt could not be encoded ({reason})") from error
        start = getattr(tokenizer, "bos_token_id", None)
        if start is not None and ids[:2] == [start, start]:  # a chat template wrote one, and the tokenizer another
            warn(
                f"the prompt begins with {tokenizer.bos_token} twice: the tokenizer puts one in front, so leave it out of the "
                "text, or pass messages"
            )
        return ids

    def text(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Decoded without special tokens; empty if the pair has no tokenizer.

        before  the tokens in front: some tokenizers drop a blank at the beginning of what they decode
        """
        if self.tokenizer is None:
            return ""
        start = self._decoded(before[-SEEN_BEFORE:])
        whole = self._decoded([*before[-SEEN_BEFORE:], *token_ids])
        return whole[len(start) :] if whole.startswith(start) else self._decoded(token_ids)

    def ends(self, sampling: Sampling) -> tuple[int, ...]:
        """Tokens that end a response: the pair's, the sampling's, and special tokens among its stop strings.

        Raises InputError for a stop string that is more than a special token: texts show none, so it would never match.
        """
        ends = [*(self.end_ids or ()), *sampling.end_ids]
        special = getattr(self.tokenizer, "added_tokens_decoder", {}) if sampling.stop else {}
        for stop in sampling.stop:
            hidden = {str(token): index for index, token in special.items() if str(token) in stop}
            hidden = {token: index for token, index in hidden.items() if not self._decoded([index])}
            if hidden and stop not in hidden:
                raise InputError(
                    f"stop: expected text or a special token alone, got {stop!r}: texts do not show {next(iter(hidden))}"
                )
            ends += [hidden[stop]] if hidden else []
        return tuple(dict.fromkeys(ends))

    def stop_position(self, stops: Sequence[str], token_ids: Sequence[int], before: Sequence[int] = ()) -> int | None:
        """Where the first of some strings starts in `text(token_ids, before)`; None: nowhere, or there is no tokenizer."""
        if not stops or self.tokenizer is None:
            return None
        text = self.text(token_ids, before)
        return min((position for stop in stops if (position := text.find(stop)) >= 0), default=None)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        tokenizer: Any = self.tokenizer
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _token_ids(prompt: Any) -> list[int]:
    """A prompt's token ids as plain integers. Raises InputError if they are something else, truth values included."""
    if type(prompt) is list and set(map(type, prompt)) <= {int}:
        return list(prompt)
    try:
        truths = (token for token in prompt if isinstance(token, bool) or getattr(token, "dtype", None) is torch.bool)
        wrong = next(truths, None)
        if wrong is None and not isinstance(prompt, bytes | set | dict):
            return [operator.index(token) for token in prompt]
    except TypeError:
        wrong = prompt
    got = shown(prompt if wrong is None else wrong)
    raise InputError(f"expected a prompt as text, a list of token ids or a list of messages, got {got}")


@checked
def load_draft(
    source: str | Path | None,
    device: Device = "cpu",
    dtype: str = "float32",
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    target: Any = None,
) -> Any:
    """A draft alone: training a head needs only its states. Arguments as in `from_pretrained`.

    target  the model that a draft takes from what its folder lacks, loaded or by name; None: it must hold all of it
    """
    if source is None:
        raise InputError(f"expected a draft: pair.draft=FOLDER; {draft_command('TARGET')} makes one")
    check_device(device)
    options: dict[str, Any] = {"dtype": _dtype(dtype), "trust_remote_code": trust_remote_code, "revision": revision}
    options |= {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    path = resolve(source)
    if isinstance(target, str | Path):
        target = _load_model(resolve(target), options, device) if reduced.is_compact(path) else None
    return _load_draft(path, options, device, target)


def _load_draft(source: str | Path, options: dict[str, Any], device: Device, target: Any) -> Any:
    if (kind := kind_in(source)).load is not None:
        return kind.part("load")(Path(source), options["dtype"], target, device)
    return _load_model(source, options, device, target)


def lacks_tokenizer(source: str | Path) -> bool:
    """Whether a draft's folder is of a kind that has no tokenizer, for its target's is meant."""
    return kind_in(source).reads_target or reduced.is_compact(source)


def load_tokenizer(source: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder, a hub name, or toy/target."""
    path = resolve(source)
    # the class of a model's family would build another one than what was made of a GGUF file
    kind: Any = PreTrainedTokenizerFast if gguf.is_converted(path) else AutoTokenizer
    try:
        return kind.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever their files make them raise
        reason = first_line(error)
        if isinstance(path, Path) and not any(any(path.glob(files)) for files in TOKENIZER_FILES):
            reason = f"the folder has none; expected a whole checkpoint, or {reading_kinds()}, which needs none"
        raise InputError(f"could not load a tokenizer from {path}: {reason}") from error


def unshared_by(
    tokenizer: Any, drafts: Sequence[str | Path], revision: str | None, trust_remote_code: bool
) -> tuple[int, ...]:
    """The tokens of a target's tokenizer that its drafts must not propose (`unshared_tokens`), by the drafts' tokenizers."""
    tokens = set[int]()
    for source in drafts:
        try:
            other = load_tokenizer(source, revision, trust_remote_code)
        except InputError as error:
            if isinstance(source, Path):
                raise
            reason, folder = str(error).rstrip("."), f"hf download {source} --local-dir FOLDER, then pair.draft=FOLDER"
            raise InputError(
                f"{reason}; {reading_kinds()}, which has no tokenizer, is read from a folder: {folder}"
            ) from error
        tokens |= set(unshared_tokens(tokenizer, other, f"draft {source}"))
    return tuple(sorted(tokens))


def check_same_tokenizer(target: Any, draft: Any, name: str = "the draft") -> None:
    """Raises InputError naming the first token that differs. Padding of the output layers is not looked at."""
    _different_tokens(target, draft, name, set())


def unshared_tokens(target: Any, draft: Any, name: str = "the draft") -> list[int]:
    """Ids of special tokens that the draft's tokenizer calls otherwise, lacks, or has alone; warns of them.

    Raises InputError naming the first other token that differs.
    """
    special = {index for tokenizer in (target, draft) for index in getattr(tokenizer, "added_tokens_decoder", {})}
    different = _different_tokens(target, draft, name, special)
    if different:
        warn(
            f"special tokens differ between target and {name}, which never proposes them: {', '.join(map(str, different))}"
        )
    return different


def _different_tokens(target: Any, draft: Any, name: str, may_differ: set[int]) -> list[int]:
    left = {index: token for token, index in target.get_vocab().items()}
    right = {index: token for token, index in draft.get_vocab().items()}
    different = [index for index in sorted(left.keys() | right.keys()) if left.get(index) != right.get(index)]
    for index in different:
        if index not in may_differ:
            raise InputError(
                f"target and draft need the same tokenizer: token {index} is {left.get(index)!r} in the target's "
                f"and {right.get(index)!r} in {name}'s; expected a draft of this target, or pair.draft=null"
            )
    probe = "Probe 0123: naïve café, x = [1.5, -2]\n\tif a_b != 'c':  日本 😀"
    if target(probe).input_ids != draft(probe).input_ids:
        raise InputError(
            f"target and draft need the same tokenizer: {name}'s holds the same tokens but splits text differently"
        )
    return different


def draft_command(target: str, prompts: str = "FILE.jsonl") -> str:
    """The command line that makes a draft of a target, on these prompts."""
    words = [f"pair.target={target}", f"prompts.path={prompts}"]
    return f"python -m toolkit.train +experiment=draft {shlex.join(words)}"


def resolve(source: str | Path) -> str | Path:
    """What a library can load: a folder (for a GGUF file, that of its converted weights), or a name of the hub.

    Raises InputError for a folder or file that is not there, and for a draft of a kind that is not supported.
    """
    if str(source) in ("toy/target", "toy/draft"):
        return ASSETS / str(source)
    if is_gguf(source) and os.path.isfile(source):
        return gguf.folder_of(Path(source))
    if os.path.exists(source):  # False for names that are no paths, as too long ones
        kind_in(source)
        return Path(source)
    if is_gguf(source) or str(source).startswith((".", "/", "~")):
        raise InputError(f"expected a {'GGUF file' if is_gguf(source) else 'model folder'} at {source}, found none")
    return str(source)


def _dtype(name: str) -> Any:
    if name == "auto":
        return "auto"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"dtype: expected float32, float64, float16, bfloat16 or auto, got {name!r}")
    return dtype


def _placement(device_map: Any, quantization: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    if quantization is None:
        return options
    if quantization not in ("8bit", "4bit"):
        raise InputError(f"quantization: expected 8bit, 4bit or null, got {quantization!r}")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        extra = "pip install 'acceptance-toolkit[quant]'"
        raise InputError(f"quantization={quantization} needs bitsandbytes: {extra}") from None
    from transformers import BitsAndBytesConfig

    # With a threshold above 0, columns that are large in one row of a batch are computed otherwise in all of them.
    options = {"load_in_8bit": True, "llm_int8_threshold": 0.0} if quantization == "8bit" else {"load_in_4bit": True}
    bits = BitsAndBytesConfig(**options)
    return {"device_map": "auto", **options, "quantization_config": bits}


def _check_memory(folder: Path, dtype: torch.dtype | Literal["auto"]) -> None:
    """Raises InputError where the weights of a folder, in a dtype ("auto": as stored), do not fit into the free memory."""
    files = list(folder.glob("*.safetensors"))
    needed, name = sum(file.stat().st_size for file in files), "its number format"
    if dtype != "auto":
        try:
            needed = dtype.itemsize * sum(map(num_weights, files))
        except Exception:  # the loader says what is wrong with a file
            return
        name = str(dtype).removeprefix("torch.")
    instead = "expected a smaller model, or another machine"
    if dtype in (torch.float32, torch.float64):
        instead = f"expected pair.dtype=bfloat16 ({needed / dtype.itemsize * 2e-9:.1f} GB), or a smaller model"
    check_memory(needed, f"{folder} in {name}", instead)


def _load_model(source: str | Path, options: dict[str, Any], device: str | None, target: Any = None) -> Any:
    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    if isinstance(source, Path) and "device_map" not in options and torch.device(device or "cpu").type == "cpu":
        _check_memory(source, options["dtype"])
    if isinstance(source, Path) and "device_map" not in options and torch.device(device or "cpu").type == "cpu":
        _check_memory(source, options["dtype"])
    try:
        if reduced.is_reduced(source):
            loaded: Any = reduced.load(Path(source), options["dtype"], target), {"missing_keys": ()}
        else:
            with gguf.LOADING:
                loaded = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
    except InputError:
        raise
    except Exception as error:  # as above
        raise InputError(f"could not load a causal language model from {source}: {first_line(error)}") from error
    model, loading_info = loaded
    if missing := sorted(loading_info["missing_keys"]):  # they would be random numbers, other ones at every load
        raise InputError(
            f"{source} lacks {missing[0]}, a weight of {type(model).__name__}: expected the checkpoint of a whole causal "
            "language model"
        )
    model.requires_grad_(False)
    if device is not None:
        model.to(torch.device(device))  # type: ignore[arg-type]
    return model.eval()
