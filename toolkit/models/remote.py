"""A pair whose models run elsewhere: the tokenizer, the sizes and the ends of text of its checkpoints, and no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import InputError
from toolkit.files.text import first_line
from toolkit.models.pair import ModelPair, load_tokenizer, resolve, unshared_by

LOADER = "toolkit.models.pair.ModelPair.from_pretrained"


@dataclass(eq=False)
class RemoteModel:
    """What a checkpoint says of itself beside its weights. output_size: V, of its output layer."""

    config: Any
    generation_config: Any
    output_size: int


def remote_pair(config: Mapping[str, Any]) -> ModelPair:
    """The pair of a plain config `pair`, to encode prompts and decode texts with; its models cannot be run.

    Raises InputError for a pair of another kind than two checkpoints, and for checkpoints that do not go together.
    """
    if config.get("_target_") != LOADER:
        raise InputError(
            f"pair: expected checkpoints ({LOADER}) where endpoints run the target, got {config['_target_']}"
        )
    trust = bool(config.get("trust_remote_code", False))
    revision, draft_revision = config.get("revision"), config.get("draft_revision")
    tokenizer = load_tokenizer(config["target"], revision, trust)
    draft = config.get("draft")
    sources = [*([draft] if isinstance(draft, str) else draft or ()), *(config.get("drafts") or ())]
    return ModelPair(
        target=_described(config["target"], revision, trust),
        drafts=[_described(source, draft_revision, trust) for source in sources],
        tokenizer=tokenizer,
        name=config.get("name") or str(config["target"]),
        end_ids=config.get("end_ids"),
        unshared=unshared_by(tokenizer, sources, draft_revision, trust),
        chat_template_options=config.get("chat_template_options") or {},
    )


def _described(source: str, revision: str | None, trust: bool) -> RemoteModel:
    """A checkpoint's configurations, read without its weights."""
    from transformers import AutoConfig, GenerationConfig

    path = resolve(source)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust)
    except Exception as error:  # whatever its files make it raise
        raise InputError(f"could not load a configuration from {source}: {first_line(error)}") from error
    try:
        generation = GenerationConfig.from_pretrained(str(path), revision=revision or "main")
    except OSError:
        generation = GenerationConfig.from_model_config(config)
    return RemoteModel(config, generation, int(config.get_text_config().vocab_size))
