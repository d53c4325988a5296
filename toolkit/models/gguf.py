"""GGUF files, the format of llama.cpp: read as targets and drafts, written for a draft that is served there.

Reading: transformers multiplies quantised weights out in float32, which holds their values exactly. The result is saved in a
folder of the user's cache that is named by the file's content.

Writing: models of the Llama class. llama.cpp rotates neighbouring pairs of a head's rows, transformers rows that are half a
head apart, so the rows of q and k change their order.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.files import lock
from toolkit.files.atomic import read_json, write_atomic, write_folder, write_json
from toolkit.files.digests import cache_folder, digest
from toolkit.files.text import first_line

ENDING = ".gguf"
NORMAL, CONTROL = 1, 3  # kinds of tokens in llama.cpp


def folder_of(path: Path) -> Path:
    """The folder with the weights (float32) and the tokenizer of a GGUF file; it is made if it is not there.

    Raises InputError without the packages, and for a file or an architecture that transformers cannot read.
    """
    folder = cache_folder() / "gguf" / digest(path)[:32]
    if folder.is_dir():
        return folder
    check_packages(path, "gguf", "accelerate")
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock.take(folder.parent, f"{folder.name}.lock", wait=True)  # of several processes one converts
    try:
        if not folder.is_dir():
            size = path.stat().st_size / 1e6
            print(f"converting {path} ({size:,.0f} MB) to float32 weights in {folder}, once", file=sys.stderr)
            write_folder(folder, lambda temporary: _convert(path, temporary))
    finally:
        lock.release(folder.parent, f"{folder.name}.lock")
    return folder


def check_packages(path: Path, *names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{path} needs {' and '.join(missing)}: pip install 'acceptance-toolkit[gguf]'")


def _convert(path: Path, folder: Path) -> None:
    """Read a GGUF file and save it as a plain checkpoint with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except Exception as error:  # what the file and its architecture make transformers raise
        raise InputError(f"transformers could not read {path}: {first_line(error)}") from error
    del loaded.config.quantization_config
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers' byte-level tokenizer adds <|endoftext|> to a vocabulary that has none; the model has no row for it
    content = read_json(folder / "tokenizer.json")
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < model.config.vocab_size]
    write_json(folder / "tokenizer.json", content)


def write(path: Path, model: Any, tokenizer: Any, like: Path | None = None) -> Path:
    """Write a Llama model as GGUF in float32.

    like  a GGUF file with the same tokenizer, whose description of it is copied (llama.cpp names its ways of splitting
          text, which no tokenizer.json does); None: it is written from the tokenizer, a byte-level BPE, as "default"
    Raises InputError for another class of model or tokenizer.
    """
    check_packages(path, "gguf")
    if type(model).__name__ != "LlamaForCausalLM":
        raise InputError(f"a GGUF file can be written of a LlamaForCausalLM, got {type(model).__name__}")
    return write_atomic(path, lambda temporary: _write(temporary, model, tokenizer, like))


def _write(path: Path, model: Any, tokenizer: Any, like: Path | None) -> None:
    import gguf

    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if like is None:
        _describe_tokenizer(writer, tokenizer, config.vocab_size)
    else:
        for name, field in gguf.GGUFReader(like).fields.items():
            if name.startswith("tokenizer."):
                kinds = field.types
                writer.add_key_value(name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        weights = tensor.detach().float().cpu()
        if ".q_proj." in name or ".k_proj." in name:
            weights = _interleaved(weights, heads if ".q_proj." in name else kv_heads)
        gguf_name = names.get_name(name, (".weight", ".bias"))
        if gguf_name is None:
            raise InputError(f"a GGUF file of a Llama has no name for {name}")
        writer.add_tensor(gguf_name, weights.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weights: Tensor, heads: int) -> Tensor:
    """Rows of q or k of `heads` heads in llama.cpp's order: (0, d/2, 1, d/2 + 1, ...) within each head of d rows."""
    halves = weights.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(weights.shape).contiguous()


def _describe_tokenizer(writer: Any, tokenizer: Any, size: int) -> None:
    """Tokens, merges and special tokens of a byte-level BPE. Raises InputError for another kind."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model["type"] != "BPE":
        raise InputError(f"a GGUF file can be written of a byte-level BPE tokenizer, got {model['type']}")
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    tokens += [f"[PAD{i}]" for i in range(len(tokenizer), size)]
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
        writer.add_add_bos_token(tokenizer("a").input_ids[0] == tokenizer.bos_token_id)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
