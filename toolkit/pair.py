"""A target, its draft (or several), and the tokenizer they share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.session import Session, open_session
from toolkit.session.capture import Captures, captures_for, static_flow
from toolkit.session.packing import PackedLinears, packed_for

Sessions = tuple[Session, list[Session]]
CAPACITY_GRANULE = 128  # caches come in multiples of it, so that few shapes recur
SEEN_BEFORE = 8  # tokens in front of a text that decoding it starts with
IDLE = 3  # sets of caches that wait for another call of their number of rows, where captures belong to them
ASSETS = Path(__file__).parent / "assets"
TOY = ASSETS / "toy"


@dataclass
class ModelPair:
    """A target and its draft models over one tokenizer.

    target, draft  Hugging Face causal language models, or anything with `open_session` (a TabularModel)
    tokenizer      shared; None if prompts are lists of token ids and no text is wanted
    drafts         several drafts instead of one; `draft` is the first of them
    end_ids        tokens that end a text; taken from the target's generation config or the tokenizer if None
    name           how tables call the pair
    cuda_graphs    "auto" or "off": forwards of recurring shapes are captured and replayed on GPUs
    cpu_traces     "auto" or "off": the same on CPUs, through TorchScript traces (pays for small models in long runs)
    cpu_packing    "auto", "on" or "off": large float32 layers keep a second copy of their weights in a layout that makes
                   reading a few tokens at a time as cheap as reading one. auto: up to 4 GiB of copies
    One call of `decode` at a time: caches and captures are the pair's. Models whose parameters ask for gradients are not
    captured.
    """

    target: Any
    draft: Any = None
    tokenizer: Any = None
    drafts: Sequence[Any] = ()
    end_ids: tuple[int, ...] | None = None
    name: str = ""
    head: str | None = None  # the acceptance head that ships with the pair, if one does
    cuda_graphs: str | bool = "auto"
    cpu_traces: str | bool = "auto"
    cpu_packing: str | bool = "auto"
    heads: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  # those loaded and checked so far
    captures: list[Captures | None] = field(default_factory=list, init=False, repr=False)  # the target's, the drafts'
    packed: list[PackedLinears | None] = field(default_factory=list, init=False, repr=False)  # likewise
    idle: list[Sessions] = field(default_factory=list, init=False, repr=False)
    cache_bytes: int = field(default=0, init=False, repr=False)  # the most the last call's caches took

    def __post_init__(self) -> None:
        if self.drafts and self.draft is not None:
            raise InputError("expected draft=... or drafts=[...], got both")
        for name in ("cuda_graphs", "cpu_traces", "cpu_packing"):
            if (option := getattr(self, name)) not in ("auto", "on", "off", True, False):
                raise InputError(f"{name}: expected auto, on or off, got {option!r}")
        self.drafts = tuple(self.drafts) or ((self.draft,) if self.draft is not None else ())
        self.draft = self.drafts[0] if self.drafts else None
        if self.end_ids is None:
            self.end_ids = _end_ids(self.target, self.tokenizer)
        known = 0 if self.tokenizer is None else max(self.tokenizer.get_vocab().values()) + 1
        for role, model in (("target", self.target), *(("draft", model) for model in self.drafts)):
            if vocab_size(model) < known:
                raise InputError(
                    f"the {role} has {vocab_size(model)} output tokens, the tokenizer {known}: they do not belong together"
                )

    @classmethod
    def toy(cls, device: str = "cpu", dtype: str = "float32") -> ModelPair:
        """The embedded pair: a 2 M target and a 0.2 M draft trained on three toy domains, with an acceptance head."""
        pair = cls.from_pretrained(TOY / "target", TOY / "draft", device=device, dtype=dtype)
        pair.name = "toy"
        return pair

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        drafts: Sequence[str | Path] = (),
        device: str = "cpu",
        dtype: str = "float32",
        device_map: str | dict[str, Any] | None = None,
        quantization: str | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        name: str = "",
        cuda_graphs: str | bool = "auto",
        cpu_traces: str | bool = "auto",
        cpu_packing: str | bool = "auto",
    ) -> ModelPair:
        """Load both models and compare their tokenizers token by token.

        target, draft  hub names, local folders, or "toy/target" and "toy/draft"
        dtype          "float32", "bfloat16", ... or "auto"; device_map as in transformers (needs accelerate)
        quantization   "8bit" or "4bit" through bitsandbytes, for the target; None: none
        Raises InputError if the tokenizers differ, naming the first token that does.
        """
        sources = [_resolve(source) for source in (tuple(drafts) or ((draft,) if draft is not None else ()))]
        target = _resolve(target)
        options: dict[str, Any] = {"dtype": _dtype(dtype), "trust_remote_code": trust_remote_code}
        if attn_implementation is not None:
            options["attn_implementation"] = attn_implementation
        big = dict(options, revision=revision, **_placement(device_map, quantization))
        tokenizer = _load_tokenizer(target, revision, trust_remote_code)
        for source in sources:
            check_same_tokenizer(tokenizer, _load_tokenizer(source, draft_revision, trust_remote_code))
        model = _load_model(target, big, None if device_map or quantization else device)
        small = [_load_model(source, dict(options, revision=draft_revision), device) for source in sources]
        shipped = TOY / "head" if Path(target) == TOY / "target" and sources == [TOY / "draft"] else None
        return cls(
            target=model,
            tokenizer=tokenizer,
            drafts=small,
            name=name or Path(target).name,
            head=str(shipped) if shipped is not None and shipped.exists() else None,
            cuda_graphs=cuda_graphs,
            cpu_traces=cpu_traces,
            cpu_packing=cpu_packing,
        )

    @cached_property
    def vocab_size(self) -> int:
        """Length of every law: the target's output size."""
        return vocab_size(self.target)

    @cached_property
    def device(self) -> torch.device:
        """Where laws are compared: the target's device when first asked (models of a pair stay where they are)."""
        return self.target.device

    @property
    def max_length(self) -> int:
        """Longest text, prompt included, that every model of the pair can read."""
        return min(_max_length(model) for model in (self.target, *self.drafts))

    def open_sessions(self, num_rows: int, capacity: int) -> Sessions:
        """Empty caches for the target and for each draft, of at least this capacity.

        Where captured forwards belong to the caches they were made with, those of an earlier call are used again.
        """
        capacity = -(-capacity // CAPACITY_GRANULE) * CAPACITY_GRANULE
        for sessions in self.idle:
            if sessions[0].index.num_rows == num_rows and all(s.index.capacity >= capacity for s in _both(sessions)):
                self.idle.remove(sessions)
                return sessions
        models = (self.target, *self.drafts)
        self.captures = self.captures or [self._captures(model) for model in models]
        self.packed = self.packed or [self._packed(model) for model in models]
        for packed in self.packed:
            if packed is not None:
                packed.refresh()
        target, *drafts = (
            open_session(model, num_rows, capacity, self._own(captures), packed)
            for model, captures, packed in zip(models, self.captures, self.packed, strict=True)
        )
        for draft, session in zip(self.drafts, drafts, strict=True):
            session.clips_tokens = vocab_size(draft) < self.vocab_size
        return target, drafts

    def close_sessions(self, sessions: Sessions) -> None:
        """Give caches back. The last few sets are kept if captured forwards belong to them; memory of others is free."""
        if not any(session.fixed_rows for session in _both(sessions)):
            return
        for session in _both(sessions):
            for row in range(session.index.num_rows):
                session.reset(row)
        self.idle[:] = [sessions, *self.idle][:IDLE]

    def _captures(self, model: Any) -> Captures | None:
        if not _settled(model) or not static_flow(model):
            return None
        layers = model.config.get_text_config().num_hidden_layers
        return captures_for(model.device, self.cuda_graphs, self.cpu_traces, layers)

    def _packed(self, model: Any) -> PackedLinears | None:
        return packed_for(model, self.cpu_packing) if _settled(model) else None

    @staticmethod
    def _own(captures: Captures | None) -> Captures | None:
        """Captures of a new session: shared ones, or empty ones of the same kind if they belong to its buffers."""
        return captures.afresh() if captures is not None and captures.fixed_buffers else captures

    def fit(self, logits: Tensor) -> Tensor:
        """A draft's logits [..., V'] on the target's device and vocabulary [..., V].

        Models that share a tokenizer may pad their output layers differently: missing tokens cannot be drawn, tokens
        beyond the target's are cut. The tokenizer itself reaches into neither part (checked on construction).
        """
        logits = logits.to(self.device)
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[..., : self.vocab_size]

    def encode(self, prompt: str | Sequence[int] | Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a prompt: a string, a list of ids, or a list of chat messages (through the chat template)."""
        if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], dict)):
            if self.tokenizer is None:
                raise InputError("this pair has no tokenizer: expected prompts as lists of token ids, got text")
            if isinstance(prompt, str):
                return list(self.tokenizer(prompt).input_ids) if prompt else []
            if not getattr(self.tokenizer, "chat_template", None):
                raise InputError("the prompt is a list of messages, but the tokenizer has no chat template")
            return list(
                self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
            )
        return [int(token) for token in prompt]  # type: ignore[arg-type]

    def text(self, token_ids: Sequence[int], before: Sequence[int] = ()) -> str:
        """Decoded without special tokens; empty if the pair has no tokenizer.

        before  the tokens in front: some tokenizers drop a blank at the beginning of what they decode
        """
        if self.tokenizer is None:
            return ""
        start = self._decoded(before[-SEEN_BEFORE:])
        whole = self._decoded([*before[-SEEN_BEFORE:], *token_ids])
        return whole[len(start) :] if whole.startswith(start) else self._decoded(token_ids)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _settled(model: Any) -> bool:
    """Whether a model is a transformers one on one device and not in training: its forward is the same on every call."""
    return (
        not hasattr(model, "open_session")
        and len(set(getattr(model, "hf_device_map", {0: 0}).values())) <= 1
        and not any(parameter.requires_grad for parameter in model.parameters())
    )


def _both(sessions: Sessions) -> list[Session]:
    return [sessions[0], *sessions[1]]


def load_draft(
    source: str | Path,
    device: str = "cpu",
    dtype: str = "float32",
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """A draft without its target: training a head needs only the draft's states. Arguments as in `from_pretrained`."""
    options: dict[str, Any] = {"dtype": _dtype(dtype), "trust_remote_code": trust_remote_code, "revision": revision}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    return _load_model(_resolve(source), options, device)


def vocab_size(model: Any) -> int:
    """Output size of a model: a transformers one, or one that says so itself."""
    if hasattr(model, "vocab_size") and not hasattr(model, "config"):
        return int(model.vocab_size)
    return int(model.get_output_embeddings().weight.shape[0])


def check_same_tokenizer(target: Any, draft: Any) -> None:
    """Raises InputError naming the first token that differs. Padding of the output layers is not looked at."""
    left = {index: token for token, index in target.get_vocab().items()}
    right = {index: token for token, index in draft.get_vocab().items()}
    for index in sorted(left.keys() | right.keys()):
        if left.get(index) != right.get(index):
            raise InputError(
                f"target and draft need the same tokenizer: token {index} is {left.get(index)!r} in the target's "
                f"and {right.get(index)!r} in the draft's"
            )
    probe = "Probe 0123: naïve café, x = [1.5, -2]\n\tif a_b != 'c':  日本 😀"
    if target(probe).input_ids != draft(probe).input_ids:
        raise InputError(
            "target and draft need the same tokenizer: they hold the same tokens but split text differently"
        )


def fingerprint(model: Any) -> str:
    """A short identity of a model's weights: shapes, and a few entries of every tensor, in float16."""
    from toolkit.io import content_hash

    if not hasattr(model, "state_dict"):
        return content_hash(model.probs.tolist())
    parts = []
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().flatten()
        step = max(len(flat) // 16, 1)
        parts.append([name, list(tensor.shape), [round(x, 4) for x in flat[::step][:16].float().half().tolist()]])
    return content_hash(parts)


def _end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    end = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if end is None and tokenizer is not None:
        end = tokenizer.eos_token_id
    return () if end is None else tuple(end) if isinstance(end, list | tuple) else (int(end),)


def _max_length(model: Any) -> int:
    if not hasattr(model, "config"):
        return 2**31
    from toolkit.session.hf import max_positions

    return max_positions(model)


def _resolve(source: str | Path) -> str | Path:
    if str(source) in ("toy/target", "toy/draft"):
        return ASSETS / str(source)
    if Path(source).exists():
        return Path(source)
    if str(source).startswith((".", "/", "~")):
        raise InputError(f"expected a model folder at {source}, found none")
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
        raise InputError(
            f"quantization={quantization} needs bitsandbytes: pip install 'acceptance-toolkit[quant]'"
        ) from None
    from transformers import BitsAndBytesConfig

    bits = BitsAndBytesConfig(load_in_8bit=quantization == "8bit", load_in_4bit=quantization == "4bit")
    return {"device_map": "auto", **options, "quantization_config": bits}


def _load_tokenizer(source: str | Path, revision: str | None, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise InputError(f"could not load a tokenizer from {source}: {_first_line(error)}") from error


def _load_model(source: str | Path, options: dict[str, Any], device: str | None) -> Any:
    import transformers
    from transformers import AutoModelForCausalLM

    if not sys.stderr.isatty():
        transformers.logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        raise InputError(f"could not load a causal language model from {source}: {_first_line(error)}") from error
    model.requires_grad_(False)
    if device is not None:
        model.to(torch.device(device))  # type: ignore[arg-type]
    return model.eval()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
