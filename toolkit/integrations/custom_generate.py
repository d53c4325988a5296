"""Every method of this package inside `model.generate(custom_generate=...)` of transformers: batches, trees, copies, heads.

    from toolkit.integrations.custom_generate import custom_generate
    model.generate(**inputs, custom_generate=custom_generate, draft=FOLDER, method="rate", head=FOLDER)

transformers prepares the call: prompts, `GenerationConfig`, logits processors, stopping criteria. Decoding is the package's
own (`toolkit.decoding`). transformers hands a function neither its `streamer` nor its `tokenizer`. With these, a folder is
named instead of the function, which every exported draft and head is (`toolkit.files.generate_folder`):

    model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True, draft=FOLDER, streamer=streamer)

Greedy output is that of `model.generate`; sampled output has its distribution. What would be another distribution is refused
by name: beams, guidance, processors and criteria of one's own. Written for transformers 5.23.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from toolkit import config
from toolkit.costs.kept import with_costs
from toolkit.decoding import Sampling, decode
from toolkit.engine.facts import block_length
from toolkit.errors import DecodingError, InputError
from toolkit.models.generation_config import OTHERS
from toolkit.models.pair import (
    ModelPair,
    lacks_tokenizer,
    load_draft,
    load_tokenizer,
    resolve,
    unshared_by,
    unshared_tokens,
)
from toolkit.types import Counts, Generation

WARPERS = {  # of transformers, in the order of `toolkit.sampling.warp`: what each one's number is called here and there
    "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", "penalty"),
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
    "LogitNormalization": None,  # changes no distribution
}
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
PREPARED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "cache_position", "logits_to_keep")
KEPT = "_acceptance_pairs"  # the model's attribute that keeps its pairs, and so their engines


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `return_dict_in_generate=True` returns: transformers' output, with the counts of every row.

    counts  forwards, drafted and discarded tokens per row;  finish_reasons  "end", "stop" or "length" per row
    """

    counts: list[Counts] | None = None
    finish_reasons: list[str] | None = None


@dataclass
class KeptPairs:
    """The pairs of a model by draft: loaded once, gone with the model, left out of its copies."""

    pairs: dict[Any, ModelPair] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> KeptPairs:
        return KeptPairs()

    def __reduce__(self) -> tuple[Any, ...]:
        return KeptPairs, ()


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any = (),
    stopping_criteria: Any = (),
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    *,
    draft: Any = None,
    method: str | None = None,
    head: str | Path | None = None,
    statistics: str | Path | None = None,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
    overrides: Sequence[str] = (),
    text_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Decode input_ids [B, T] (padded left or right, see attention_mask) with a method of `conf/method/`.

    draft      a folder or hub name (of any kind that pairs take), a model, or a list of these; None: methods that need none
    method     None: "rate" with a head or statistics, else "best_source" with a draft ("block_draft_rate" if it gives
               blocks), else "lookup_rate"; of several rows "batch_rate", "batch_best_source", "batch_lookup_rate"
    head       folder of an acceptance head, for methods that need one
    statistics  file of `analysis.heads statistics=`: acceptance where there is no head
    stop       strings that end a row, as `stop_strings` do
    seed       row r draws from a generator seeded with (seed, r); None: drawn from torch's own generator
    overrides  relative to the method: ["policy.rate=1.2", "max_drafted=12"]
    text_tokenizer  for `stop`; None: that of the folder or hub name the model came from

    Returns [B, T + new]: the input, and new tokens that are padded right. With `return_dict_in_generate` that and counts.
    Raises InputError for what is not followed, DecodingError if a row failed.
    """
    stops = _strings(stop)
    sampling = _sampling(input_ids.shape[1], logits_processor, stopping_criteria, generation_config, stops, seed)
    prompts = _prompts(input_ids, synced_gpus, model_kwargs)
    if streamer is not None and len(prompts) != 1:
        raise InputError(f"streamer: expected one prompt, got {len(prompts)}")
    pair = pair_of(model, draft, text_tokenizer or (_own_tokenizer(model) if stops else None))
    predicts = head is not None or statistics is not None
    if method is None:
        method = "rate" if predicts else "best_source" if pair.drafts else "lookup_rate"
        method = method if len(prompts) == 1 else f"batch_{method}"
        if pair.drafts and not predicts and block_length(pair.draft) is not None:
            method = "block_draft_rate"
    decoder = config.method(method, overrides, *(None if path is None else str(path) for path in (head, statistics)))
    decoder = replace(decoder, policy=with_costs(decoder.policy, pair, len(prompts)))
    stream = None
    if streamer is not None:
        streamer.put(input_ids.cpu())  # as transformers does
        stream = lambda generation, tokens: streamer.put(torch.tensor(tokens))
    generations = decode(pair, prompts, decoder, sampling, batch_size=len(prompts), on_tokens=stream)
    if streamer is not None:
        streamer.end()
    if failed := [generation.error for generation in generations if generation.error]:
        raise DecodingError(failed[0], generations)
    sequences = _joined(input_ids, generations, generation_config)
    if not generation_config.return_dict_in_generate:
        return sequences
    return SpeculativeOutput(
        sequences=sequences,  # type: ignore[arg-type]  # a tensor of integers
        counts=[generation.counts for generation in generations],
        finish_reasons=[generation.finish_reason for generation in generations],
    )


def generate(model: Any, streamer: Any = None, tokenizer: Any = None, **arguments: Any) -> Any:
    """What a folder's `custom_generate/generate.py` is: `model.generate` with the function above, streamer and stop strings.

    Arguments are those of `model.generate`, and `custom_generate`'s own.
    """
    settings = arguments.get("generation_config") or model.generation_config
    configured = settings.stop_strings or model.generation_config.stop_strings
    named = arguments.get("stop_strings", configured)
    if named or configured:  # transformers would look for a tokenizer
        arguments["stop_strings"] = None
    stops = [*_strings(arguments.pop("stop", ())), *_strings(named or ())]
    function = functools.partial(custom_generate, streamer=streamer, text_tokenizer=tokenizer, stop=stops)
    return model.generate(custom_generate=function, **arguments)


def pair_of(model: Any, draft: Any, tokenizer: Any = None) -> ModelPair:
    """The pair of a loaded target and what `draft` names, the same one in every call.

    Drafts that are folders or names are loaded like the model (device, dtype). Raises InputError for a draft of another
    tokenizer. Whether a *loaded* draft's tokenizer is the model's is looked up where both came from, if they say so.
    """
    drafts = [] if draft is None else list(draft) if isinstance(draft, list | tuple) else [draft]
    key = tuple(str(source) if isinstance(source, str | Path) else id(source) for source in drafts)
    pairs = vars(model).setdefault(KEPT, KeptPairs()).pairs
    if key not in pairs:
        pairs[key] = _make_pair(model, drafts)
    pairs[key].tokenizer = tokenizer
    return pairs[key]


def _make_pair(model: Any, drafts: Sequence[Any]) -> ModelPair:
    device, dtype = str(model.device), str(model.dtype).removeprefix("torch.")
    loaded, unshared = [], set[int]()
    for source in drafts:
        if isinstance(source, str | Path):
            path = resolve(source)
            if not lacks_tokenizer(path):  # then it is of the target's tokens
                unshared |= set(unshared_by(_own_tokenizer(model), [path], None, False))
            loaded.append(load_draft(source, device, dtype, target=model))
        else:
            tokenizers = [_own_tokenizer(each, needed=False) for each in (model, source)]
            if None not in tokenizers:
                unshared |= set(unshared_tokens(*tokenizers))
            loaded.append(source)
    return ModelPair(model, drafts=loaded, end_ids=(), unshared=tuple(sorted(unshared)))


def _own_tokenizer(model: Any, needed: bool = True) -> Any:
    """The tokenizer of the folder or hub name that a model came from. Where it is not needed, None if there is none."""
    try:
        return load_tokenizer(getattr(model, "name_or_path", "") or "a model without a name")
    except InputError as error:
        if not needed:
            return None
        raise InputError(
            f"{error}; the model's tokenizer is read from where the model came from: expected a model of `from_pretrained`"
        ) from None


def _sampling(
    width: int,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    settings: Any,
    stops: tuple[str, ...],
    seed: int | None,
) -> Sampling:
    """How tokens are drawn and when rows end, as transformers' own objects say it; width: T of the prompts.

    Raises InputError for a processor, criterion or field of the config that would need another distribution or end.
    """
    values: dict[str, Any] = {"temperature": 1.0 if settings.do_sample else 0.0}
    order = []
    for processor in processors:
        name = type(processor).__name__
        ignored = getattr(
            processor, "prompt_ignore_length", None
        )  # the padding in front of each row, if not an own number
        if name not in WARPERS or type(processor).__module__ != "transformers.generation.logits_process":
            raise _refused("logits_processor", name, f"one of the config's own ({', '.join(WARPERS)})")
        if isinstance(ignored, int) and ignored:
            raise _refused("RepetitionPenaltyLogitsProcessor.prompt_ignore_length", ignored, "none")
        order.append(list(WARPERS).index(name))
        if called := WARPERS[name]:
            values[called[0]] = getattr(processor, called[1])
    if order != sorted(set(order)) or (not settings.do_sample and set(values) - {"temperature", "repetition_penalty"}):
        raise _refused(
            "logits_processor", [type(each).__name__ for each in processors], "each at most once, in this order"
        )
    most, ends = settings.max_length - width, ()
    for criterion in criteria:
        name = type(criterion).__name__
        if name == "MaxLengthCriteria":
            most = criterion.max_length - width
        elif name == "EosTokenCriteria":
            ends = tuple(criterion.eos_token_id.reshape(-1).tolist())
        else:
            raise _refused("stopping_criteria", name, "lengths, end tokens and stop=...")
    for name, neutral in OTHERS.items():
        value = getattr(settings, name, None)
        if value not in (None, neutral, []):
            raise _refused(name, value, f"{neutral}")
    for name in OUTPUTS:
        if getattr(settings, name, False):
            raise _refused(name, True, "False")
    drawn = int(torch.randint(2**31, (1,)).item()) if seed is None and settings.do_sample else seed or 0
    return Sampling(**values, max_new_tokens=most, stop=stops, end_ids=ends, generation_config=None, seed=drawn)


def _refused(name: str, value: Any, expected: str) -> InputError:
    """The error for what transformers' call asks for and decoding here does not follow."""
    return InputError(f"custom_generate does not follow {name}={value}: expected {expected}, or generate without it")


def _prompts(input_ids: Tensor, synced_gpus: bool, others: Mapping[str, Any]) -> list[list[int]]:
    """Token ids of every row [B, T] without its padding. Raises InputError for holes in a mask and for other inputs."""
    if not input_ids.shape[1]:
        raise InputError("input_ids: expected at least one token per prompt, got none")
    if synced_gpus:
        raise _refused("synced_gpus", True, "one process per model")
    for name, value in others.items():
        if name not in PREPARED and value is not None:
            raise _refused(name, type(value).__name__, "input_ids and attention_mask alone")
    cache = others.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        raise _refused("past_key_values", f"{cache.get_seq_length()} tokens", "an empty cache: prompts are read whole")
    mask, positions = others.get("attention_mask"), others.get("position_ids")
    mask = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.to(input_ids.device).bool()
    changes = mask[:, 1:] != mask[:, :-1]
    if mask.shape != input_ids.shape or bool((changes.sum(-1) > (~mask[:, 0]).long() + (~mask[:, -1]).long()).any()):
        raise InputError(
            f"attention_mask: expected {tuple(input_ids.shape)} with padding left or right of each prompt, no holes"
        )
    counted = (mask.cumsum(-1) - 1)[mask]
    if positions is not None and not torch.equal(positions.expand_as(mask)[mask].to(counted), counted):
        raise _refused("position_ids", "of your own", "each prompt's from 0")
    return [ids[keep].tolist() for ids, keep in zip(input_ids, mask, strict=True)]


def _joined(input_ids: Tensor, generations: Sequence[Generation], settings: Any) -> Tensor:
    """The prompts as they came, and every row's new tokens after them [B, T + new], padded with the config's token."""
    padding = settings.pad_token_id
    if padding is None:
        tensor = settings._pad_token_tensor
        padding = 0 if tensor is None else int(tensor)
    longest = max(len(generation.token_ids) for generation in generations)
    rows = [generation.token_ids + [padding] * (longest - len(generation.token_ids)) for generation in generations]
    return torch.cat([input_ids, torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device)], 1)


def _strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)
