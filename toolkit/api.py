"""`generate`: methods by name, for people with a pair and some prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from toolkit import config
from toolkit.config.notes import AtLeast
from toolkit.config.values import checked
from toolkit.costs.kept import with_costs
from toolkit.decoding import Method, Sampling, decode
from toolkit.decoding.decode import PROMPTS
from toolkit.errors import DecodingError
from toolkit.models.pair import ModelPair
from toolkit.types import Generation, Prompt


@checked
def generate(
    pair: ModelPair,
    prompts: Annotated[Sequence[Prompt], PROMPTS],
    method: str | Method = "specdec_pp",
    *,
    max_new_tokens: int = 64,
    max_length: int | None = None,
    keep_prompt_tokens: int | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    end_ids: Sequence[int] = (),
    grammar: str | None = None,
    grammar_whitespace: bool = False,
    generation_config: bool = False,
    seed: int = 0,
    batch_size: Annotated[int, AtLeast(1)] = 8,
    head: str | None = None,
    statistics: str | Path | None = None,
    overrides: Sequence[str] = (),
    config_dir: str | Path | None = None,
) -> list[Generation]:
    """Decode prompts with a method of `conf/method/`.

    prompts    strings, lists of token ids, lists of chat messages, or requests: {"messages": [...], "tools": [...]}; a request
               {"prompt": ..., "grammar": ...} has a grammar of its own
    method     a name, or a Method built by hand (then `head`, `statistics` and `overrides` have no meaning)
    head       folder of an acceptance head, for methods that need one; None: the pair's own
    statistics  file of `analysis.heads statistics=`: acceptance where there is no head; None: weights that ship
    overrides  relative to the method: ["policy.threshold=.3"]
    config_dir a folder of your own, laid out like conf/, whose methods, policies, rules ... are found by name, too
    batch_size  prompts decoded together; a rule that weighs the costs of forward passes reads them at this size. If it names
               none, they are measured once on this machine and kept (`toolkit.costs.kept`)
    The other arguments are those of `toolkit.sampling.Sampling`. Needs hydra; `toolkit.decoding.decode` does not.
    Raises InputError for bad arguments, DecodingError (with all generations) if single prompts failed.
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        keep_prompt_tokens=keep_prompt_tokens,
        stop=tuple(stop) if not isinstance(stop, str) else (stop,),
        end_ids=tuple(end_ids),
        grammar=grammar,
        grammar_whitespace=grammar_whitespace,
        generation_config=generation_config,
        seed=seed,
    )
    with nullcontext() if config_dir is None else config.searching(config_dir):
        built = (
            config.method(method, overrides, head, None if statistics is None else str(statistics))
            if isinstance(method, str)
            else method
        )
    policy = with_costs(built.policy, pair, batch_size)
    built = built if policy is built.policy else replace(built, policy=policy)
    generations = decode(pair, prompts, built, sampling, batch_size=batch_size)
    failed = [generation.error for generation in generations if generation.error is not None]
    if failed:
        raise DecodingError(f"{len(failed)} of {len(generations)} prompts failed: {failed[0]}", generations)
    return generations
