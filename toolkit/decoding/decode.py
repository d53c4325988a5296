"""`decode`: prompts in, generations out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from toolkit.config.notes import AtLeast, Called
from toolkit.config.values import checked, shown
from toolkit.decoding.batch import Job, Row
from toolkit.decoding.beams import BeamBatch
from toolkit.decoding.method import Method
from toolkit.decoding.text import TextBatch
from toolkit.engine.engine import engine_of
from toolkit.engine.facts import max_positions
from toolkit.errors import InputError
from toolkit.grammar import grammar_of
from toolkit.grammar.walk import FORCED
from toolkit.models.generation_config import resolved
from toolkit.models.pair import ModelPair
from toolkit.models.prompts import without_grammar
from toolkit.sampling import Sampling, row_generator
from toolkit.stopping import Bounded
from toolkit.types import Generation, Prompt

PROMPTS = Called("a list of prompts: texts, lists of token ids, lists of messages, requests")


@dataclass(frozen=True)
class Decoded:
    """The generations in the order of the prompts, and the most bytes that the caches of the call took."""

    generations: list[Generation]
    cache_bytes: int


def decode(
    pair: ModelPair,
    prompts: Sequence[Prompt],
    method: Method,
    sampling: Sampling,
    *,
    batch_size: int = 8,
    row_ids: Sequence[int] | None = None,
    on_finish: Callable[[Generation], object] | None = None,
    on_round: Callable[[int], object] | None = None,
    on_tokens: Callable[[Generation, list[int]], object] | None = None,
) -> list[Generation]:
    """Decode every prompt; the generations come back in the order of the prompts.

    prompts    strings, lists of token ids or lists of chat messages
    row_ids    what seeds each row beside `sampling.seed` and names it in errors; None: 0, 1, ...
    on_finish  called with each generation when it ends
    on_round   called after each round with the number of tokens that it made
    on_tokens  called after each round with each generation and the tokens that it made in it; methods with several beams
               make theirs in the last one

    A prompt that cannot be decoded (empty, too long, distributions that are not numbers) comes back with `.error` set; the
    others finish. Decoding needs torch and transformers only.
    """
    decoded = decode_measured(
        pair,
        prompts,
        method,
        sampling,
        batch_size=batch_size,
        row_ids=row_ids,
        on_finish=on_finish,
        on_round=on_round,
        on_tokens=on_tokens,
    )
    return decoded.generations


@checked
def decode_measured(
    pair: ModelPair,
    prompts: Annotated[Sequence[Prompt], PROMPTS],
    method: Method,
    sampling: Sampling,
    *,
    batch_size: Annotated[int, AtLeast(1)] = 8,
    row_ids: Sequence[int] | None = None,
    on_finish: Callable[[Generation], object] | None = None,
    on_round: Callable[[int], object] | None = None,
    on_tokens: Callable[[Generation, list[int]], object] | None = None,
    timed: bool = False,
    capacity: int = 0,
) -> Decoded:
    """Decode as `decode` does, and measure the caches of the call.

    timed     True: wait for the device between draft and target, so that the rounds' seconds are each model's own
    capacity  least number of tokens that a cache has room for: short texts are timed in the caches of longer ones
    """
    sampling = resolved(sampling, pair.target)
    sampling.check_vocab(pair.vocab_size, 1 if method.beams is None else method.beams.num_beams)
    method = method.bind(pair).at(sampling)
    row_ids = range(len(prompts)) if row_ids is None else row_ids
    rows = [_start(pair, prompt, row_id, sampling) for prompt, row_id in zip(prompts, row_ids, strict=True)]
    if any(row.grammar is not None for row in rows):
        _check_grammars(method, sampling, len(pair.drafts))
    finish = on_finish or (lambda generation: None)
    # Prompts that are read together are padded to the longest of them: those of similar length wait beside each other.
    queue = deque(sorted((row for row in rows if row.generation.error is None), key=lambda row: -len(row.context)))
    for row in rows:
        if row.generation.error is not None:
            finish(row.generation)
    cache_bytes = 0
    if queue:
        job = Job(pair, method, sampling, queue, finish, on_round or (lambda count: None), timed, on_tokens)
        kind = TextBatch if method.beams is None else BeamBatch
        num_slots = min(batch_size, len(queue))
        capacity = max(capacity, kind.capacity(method, sampling, max(len(row.context) for row in queue)))
        capacity += FORCED if any(row.grammar is not None for row in queue) else 0
        with engine_of(pair).sessions(num_slots, capacity) as sessions:
            cache_bytes = kind(job, sessions, [queue.popleft() for _ in range(num_slots)]).run()
    return Decoded([row.generation for row in rows], cache_bytes)


def prompt_ids(pair: ModelPair, prompt: Prompt, row_id: int, sampling: Sampling) -> list[int]:
    """The token ids that a prompt is decoded from. Raises InputError, which calls it `row_id`, for one that cannot be."""
    ids = pair.encode(prompt)[-(sampling.keep_prompt_tokens or 0) :]
    if not ids:
        raise InputError(f"prompt {row_id} is empty: expected at least one token")
    if min(ids) < 0 or max(ids) >= pair.vocab_size:
        got = f"{shown(min(ids))}..{shown(max(ids))}"
        raise InputError(f"prompt {row_id}: expected token ids in [0, {pair.vocab_size}), got {got}")
    if sampling.room(len(ids)) < 1:
        raise InputError(
            f"prompt {row_id}: {len(ids)} tokens leave no room below max_length={sampling.max_length}; shorten the prompt, "
            "raise max_length or set keep_prompt_tokens"
        )
    if len(ids) + sampling.room(len(ids)) > (longest := max_positions(pair.target)):
        raise InputError(
            f"prompt {row_id}: {len(ids)} tokens and max_new_tokens={sampling.max_new_tokens} exceed the target's context "
            f"of {longest}; shorten the prompt or lower max_new_tokens"
        )
    return ids


def _start(pair: ModelPair, prompt: Prompt, row_id: int, sampling: Sampling) -> Row:
    """A row ready to be queued, or one whose error says why it cannot be."""
    generation, grammar = Generation(index=row_id, prompt_ids=[], token_ids=[]), None
    try:
        prompt, text = without_grammar(prompt)
        grammar = grammar_of(pair, sampling, text)
        generation.prompt_ids = prompt_ids(pair, prompt, row_id, sampling)
    except InputError as error:
        generation.error, generation.finish_reason = str(error), "error"
    return Row(generation, list(generation.prompt_ids), row_generator(sampling.seed, row_id), grammar)


def _check_grammars(method: Method, sampling: Sampling, num_drafts: int) -> None:
    """Raises InputError where a grammar does not go with the method or the sampling."""
    history = isinstance(method.policy, Bounded) and method.policy.num_history
    for wrong, expected in (
        (not method.proposer.reads_grammars, "a method of chains, copies or trees"),
        (method.num_drafts(num_drafts) > 1, "one draft"),
        (history, "a head that reads no earlier positions"),
        (sampling.stop, "no stop strings: a text ends where its grammar does"),
    ):
        if wrong:
            raise InputError(f"method {method.name}: beside a grammar expected {expected}")
