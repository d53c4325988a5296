"""Every method of this package inside `model.generate(custom_generate=...)` of transformers: batches, trees, copies, heads.

    from toolkit.integrations.custom_generate import custom_generate
    model.generate(**inputs, custom_generate=custom_generate, draft=FOLDER, method="rate", head=FOLDER)

transformers prepares the call: prompts, `GenerationConfig`, logits processors, stopping criteria. Decoding is the package's
own (`toolkit.decoding`). transformers hands a function neither `streamer` nor `assistant_model`: both are read from its own
frame (`_left_out`). Its `tokenizer` is gone by then. For `stop_strings` a folder is named instead of the function, which every
exported draft and head is (`toolkit.files.generate_folder`):

    stops = {"stop_strings": ["\\n\\n"], "tokenizer": tokenizer}
    model.generate(**inputs, **stops, custom_generate=FOLDER, trust_remote_code=True, draft=FOLDER)

Greedy output is that of `model.generate`; sampled output has its distribution. What would be another distribution is refused
by name: beams, guidance, processors and criteria of one's own. Written for transformers 5.23.

Loaded drafts and engines stay with the model from call to call (`kept_drafts`).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from toolkit import config
from toolkit.costs.kept import with_costs
from toolkit.decoding import Sampling, decode
from toolkit.drafts.kinds import gives_blocks
from toolkit.errors import DecodingError, InputError
from toolkit.integrations.kept_drafts import own_tokenizer, pair_of
from toolkit.models.generation_config import OTHERS
from toolkit.types import Counts, Generation

# Processors of transformers in the order of `toolkit.sampling.warp`: what their attributes are called in `Sampling`.
WARPERS: dict[str, dict[str, str | None]] = {
    "RepetitionPenaltyLogitsProcessor": {"penalty": "repetition_penalty"},
    "TemperatureLogitsWarper": {"temperature": "temperature"},
    "TopKLogitsWarper": {"top_k": "top_k", "min_tokens_to_keep": None},  # `top_k` is at least that
    "TopPLogitsWarper": {"top_p": "top_p"},
    "MinPLogitsWarper": {"min_p": "min_p"},
    "LogitNormalization": {},  # changes no distribution
}
NEUTRAL = {"filter_value": -math.inf, "min_tokens_to_keep": 1, "logits_indices": None, "cu_seq_lens_q": None}
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
PREPARED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "cache_position", "logits_to_keep")


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `return_dict_in_generate=True` returns: transformers' output, with the counts of every row.

    counts  forwards, drafted and discarded tokens per row;  finish_reasons  "end", "stop" or "length" per row
    """

    counts: list[Counts] | None = None
    finish_reasons: list[str] | None = None


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
    assistant_model: Any = None,
    method: str | None = None,
    head: str | Path | None = None,
    statistics: str | Path | None = None,
    stop: str | Sequence[str] = (),
    grammar: str | None = None,
    seed: int | None = None,
    overrides: Sequence[str] = (),
    text_tokenizer: Any = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Decode input_ids [B, T] (padded left or right, see attention_mask) with a method of `conf/method/`.

    draft      a folder or hub name (of any kind that pairs take), a model, or a list of these; None: `assistant_model`, else
               methods that need none
    method     None: "rate" with a head or statistics, else "best_source" with a draft ("block_draft_rate" if it gives
               blocks), else "lookup_rate"; of several rows "batch_rate", "batch_best_source", "batch_lookup_rate"
    head       folder of an acceptance head, for methods that need one
    statistics  file of `analysis.heads statistics=`: acceptance where there is no head
    stop       strings that end a row, as `stop_strings` do
    grammar    what the rows may be: a JSON schema, a regular expression, a Lark grammar (`toolkit.grammar`), not beside `stop`
    seed       row r draws from a generator seeded with (seed, r); None: drawn from torch's own generator
    overrides  relative to the method: ["policy.rate=1.2", "max_drafted=12"]
    text_tokenizer  for `stop` and `grammar`; None: that of the folder or hub name the model came from

    Returns [B, T + new]: the input, and new tokens that are padded right. With `return_dict_in_generate` that and counts.
    Raises InputError for what is not followed, DecodingError if a row failed.
    """
    left_out = _left_out(model)
    assistant_model = left_out.get("assistant_model") if assistant_model is None else assistant_model
    if draft is not None and assistant_model is not None:
        raise InputError("expected draft=... or assistant_model=..., got both")
    stops = _strings(stop)
    mask = _mask(input_ids, synced_gpus, model_kwargs)
    sampling = _sampling(mask, logits_processor, stopping_criteria, generation_config, stops, seed)
    sampling = replace(sampling, grammar=grammar)
    prompts = [ids[keep].tolist() for ids, keep in zip(input_ids, mask, strict=True)]
    text_streamer = left_out.get("streamer") if streamer is None else streamer
    if text_streamer is not None and len(prompts) != 1:
        raise InputError(f"streamer: expected one prompt, got {len(prompts)}")
    if streamer is not None:
        streamer.put(input_ids.cpu())  # as transformers does with its own
    draft = assistant_model if draft is None else draft
    pair = pair_of(model, draft, text_tokenizer or (own_tokenizer(model) if stops or grammar else None))
    predicts = head is not None or statistics is not None
    if method is None:
        method = "rate" if predicts else "best_source" if pair.drafts else "lookup_rate"
        method = method if len(prompts) == 1 else f"batch_{method}"
        if pair.drafts and not predicts and gives_blocks(pair.draft):
            method = "block_draft_rate"
    decoder = config.method(method, overrides, *(None if path is None else str(path) for path in (head, statistics)))
    decoder = replace(decoder, policy=with_costs(decoder.policy, pair, len(prompts)))
    stream = None if text_streamer is None else lambda generation, tokens: text_streamer.put(torch.tensor(tokens))
    generations = decode(pair, prompts, decoder, sampling, batch_size=len(prompts), on_tokens=stream)
    if text_streamer is not None:
        text_streamer.end()
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


def generate(
    inputs: Any = None, generation_config: Any = None, *, model: Any, tokenizer: Any = None, **arguments: Any
) -> Any:
    """What a folder's `custom_generate/generate.py` is: `model.generate` with the function above and stop strings.

    Arguments are those of `model.generate`, and `custom_generate`'s own. transformers also binds the function to a model that
    was loaded from the folder with `trust_remote_code=True`: then `model.generate` is this function, and what it calls is the
    class's own. A call that names a `custom_generate`, and one of transformers' assisted decoding, are handed on as they are.
    """
    decode_with = functools.partial(type(model).generate, model, inputs, generation_config)
    settings = generation_config or model.generation_config
    if arguments.get("custom_generate") is not None or settings.is_assistant:
        return decode_with(tokenizer=tokenizer, **arguments)
    configured = settings.stop_strings or model.generation_config.stop_strings
    named = arguments.get("stop_strings", configured)
    if named or configured:  # transformers would look for a tokenizer
        arguments["stop_strings"] = None
    stops = [*_strings(arguments.pop("stop", ())), *_strings(named or ())]
    function = functools.partial(custom_generate, text_tokenizer=tokenizer, stop=stops)
    return decode_with(**{**arguments, "custom_generate": function})


def _left_out(model: Any) -> Mapping[str, Any]:
    """Arguments of the `model.generate` that calls this function: transformers hands some to its own methods alone.

    Empty where the function was not called by it.
    """
    code, frame = inspect.unwrap(GenerationMixin.generate).__code__, inspect.currentframe()
    while frame is not None and not (frame.f_code is code and frame.f_locals.get("self") is model):
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _sampling(
    mask: Tensor,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    settings: Any,
    stops: tuple[str, ...],
    seed: int | None,
) -> Sampling:
    """How tokens are drawn and when rows end, as transformers' own objects say it; mask [B, T]: where the prompts are.

    Raises InputError for a processor, criterion or field of the config that would need another distribution or end.
    """
    values: dict[str, Any] = {}
    for processor in processors:
        values |= _followed(processor, mask)
    order = [list(WARPERS).index(type(processor).__name__) for processor in processors]
    if order != sorted(set(order)) or (not settings.do_sample and set(values) - {"temperature", "repetition_penalty"}):
        raise _refused(
            "logits_processor", [type(each).__name__ for each in processors], "each at most once, in this order"
        )
    if not settings.do_sample:
        values["temperature"] = 0.0
    width = mask.shape[1]
    lengths, ends = list[int](), list[int]()  # a criterion of the caller's replaces the config's
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length - width)
        elif type(criterion) is EosTokenCriteria:
            ends += criterion.eos_token_id.reshape(-1).tolist()
        else:
            raise _refused("stopping_criteria", type(criterion).__name__, "lengths, end tokens and stop=...")
    for name, neutral in OTHERS.items():
        value = getattr(settings, name, None)
        if value not in (None, neutral, []):
            raise _refused(name, value, f"{neutral}")
    for name in OUTPUTS:
        if getattr(settings, name, False):
            raise _refused(name, True, "False")
    drawn = int(torch.randint(2**31, (1,)).item()) if seed is None and settings.do_sample else seed or 0
    return Sampling(
        **values,
        max_new_tokens=min(lengths, default=settings.max_length - width),
        stop=stops,
        end_ids=tuple(ends),
        generation_config=None,
        seed=drawn,
    )


def _followed(processor: Any, mask: Tensor) -> dict[str, Any]:
    """The fields of `Sampling` that one of transformers' processors says; mask [B, T]: where the prompts are.

    Raises InputError for another processor, and for an attribute that changes the distribution and is not followed.
    """
    name = type(processor).__name__
    if name not in WARPERS or type(processor).__module__ != "transformers.generation.logits_process":
        raise _refused("logits_processor", name, f"one of the config's own ({', '.join(WARPERS)})")
    values: dict[str, Any] = {}
    for attribute, value in vars(processor).items():
        if attribute in WARPERS[name]:
            if field_name := WARPERS[name][attribute]:
                values[field_name] = value
        elif attribute == "prompt_ignore_length":  # prompts are read without the padding in front of them, and whole
            padding = mask.int().argmax(1).cpu()
            ignored = torch.zeros_like(padding) if value is None else torch.as_tensor(value).cpu().expand_as(padding)
            if not torch.equal(ignored, padding):
                raise _refused(f"{name}.{attribute}", value, f"the padding in front of each prompt, {padding.tolist()}")
        elif attribute not in NEUTRAL or value != NEUTRAL[attribute]:
            raise _refused(f"{name}.{attribute}", value, f"{NEUTRAL.get(attribute, 'no such attribute')}")
    return values


def _refused(name: str, value: Any, expected: str) -> InputError:
    """The error for what transformers' call asks for and decoding here does not follow."""
    return InputError(f"custom_generate does not follow {name}={value}: expected {expected}, or generate without it")


def _mask(input_ids: Tensor, synced_gpus: bool, others: Mapping[str, Any]) -> Tensor:
    """Where the prompts are in their padded rows [B, T] bool. Raises InputError for holes in a mask and for other inputs."""
    if synced_gpus:
        raise _refused("synced_gpus", True, "one process per model")
    for name, value in others.items():
        if name not in PREPARED and value is not None:
            raise _refused(name, type(value).__name__, "input_ids and attention_mask alone")
    if not input_ids.shape[1]:
        raise InputError("input_ids: expected at least one token per prompt, got none")
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
    return mask


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
