"""A checkpoint's generation config: how its makers draw from it, compared with a sampling, or obeyed."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from toolkit.errors import warn
from toolkit.sampling import Sampling

SAME = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # called alike there and in `Sampling`
OBEYED = (*SAME, "stop")
OTHERS = {  # what else changes which tokens are drawn, and the value that changes nothing
    "bad_words_ids": None, "begin_suppress_tokens": None, "constraints": None, "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None, "force_words_ids": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "guidance_scale": 1.0, "min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0,
    "num_beam_groups": 1, "num_beams": 1, "penalty_alpha": 0.0, "sequence_bias": None, "suppress_tokens": None, "top_h": None,
    "typical_p": 1.0, "watermarking_config": None,
}  # fmt: skip


def resolved(sampling: Sampling, model: Any) -> Sampling:
    """The sampling with what the model's generation config says, if it is to be obeyed; otherwise as it is.

    Warns of the fields of that config which this sampling does not follow, unless it is to be left unread.
    """
    if sampling.generation_config is None:
        return sampling
    config = getattr(model, "generation_config", None)
    stored = {name: value for name in (*SAME, *OTHERS) if (value := getattr(config, name, None)) is not None}
    if getattr(config, "do_sample", None) is False:
        stored["temperature"] = 0.0
    if stops := getattr(config, "stop_strings", None):
        stored["stop"] = (stops,) if isinstance(stops, str) else tuple(stops)
    if sampling.temperature == 0 and not sampling.generation_config:  # asked for, and the others change nothing then
        for name in ("temperature", "top_k", "top_p", "min_p"):
            stored.pop(name, None)
    if sampling.generation_config:
        obeyed = {name: stored[name] for name in OBEYED if name in stored}
        sampling = replace(sampling, **obeyed, generation_config=False)
    neutral = {**{field.name: getattr(sampling, field.name) for field in fields(sampling)}, **OTHERS}
    different = [f"{name}={value}" for name, value in stored.items() if value != neutral[name] and value != []]
    if different:
        warn(
            f"the target's generation_config is not followed: it says {', '.join(different)} (sampling.generation_config="
            f"true follows {', '.join(OBEYED)})"
        )
    return sampling
