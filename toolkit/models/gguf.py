"""GGUF files, the format of llama.cpp: read as targets and drafts, written for a draft that is served there.

Reading: transformers multiplies quantised weights out in float32, which holds their values exactly. What it passes over is set
here (`gguf_config`, `gguf_tokenizer`); afterwards every tensor of the file is one of the model's, and the other way round. The
result is saved in a folder of the user's cache that is named by the file's content and by what converted it.

Writing: models of the Llama class. llama.cpp rotates neighbouring pairs of a head's rows, transformers rows that are half a
head apart, so the rows of q and k change their order. What was written is read back: the same logits and tokens, or no file.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import InputError
from toolkit.files import lock
from toolkit.files.atomic import content_hash, write_atomic, write_folder, write_json
from toolkit.files.digests import cache_folder, digests
from toolkit.files.machine import check_disk, check_memory
from toolkit.files.shards import ENDING, is_gguf, shards
from toolkit.files.text import first_line
from toolkit.models import gguf_config, gguf_tokenizer
from toolkit.models.gguf_file import GGUFFile, finish

CONVERTER = 2  # of this module: a higher one makes every conversion again
NOTE = "converter.json"
BETAS = (32, 1)  # of yarn in llama.cpp, fast and slow
OVERHEAD = 1.5  # memory of a conversion over that of its weights in float32
CHECKED = 64  # tokens that a written file is compared on
UNUSED = r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"  # read elsewhere, or nowhere


LOADING = threading.RLock()  # while it loads, transformers replaces a method of all models, for all threads


def folder_of(path: Path) -> Path:
    """The folder with the weights (float32) and the tokenizer of a GGUF file; it is made if it is not there.

    path: any shard of a split file. Raises InputError without the packages, and for a file that cannot be read as it says.
    """
    made_of = {
        "files": [digest[:32] for digest in digests(shards(path))],
        "converter": CONVERTER,
        "versions": {name: version(name) for name in ("transformers", "gguf") if importlib.util.find_spec(name)},
    }
    folder = cache_folder() / "gguf" / content_hash(made_of, 32)
    if folder.is_dir():
        return folder
    check_packages(path, "gguf", "accelerate")
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock.take(folder.parent, f"{folder.name}.lock", wait=True)  # of several processes one converts
    try:
        if not folder.is_dir():
            size = sum(shard.stat().st_size for shard in shards(path)) / 1e6
            print(f"converting {path} ({size:,.0f} MB) to float32 weights in {folder}, once", file=sys.stderr)
            write_folder(folder, lambda temporary: _convert(path, temporary, made_of))
    finally:
        lock.release(folder.parent, f"{folder.name}.lock")
    return folder


def is_converted(source: Path | str) -> bool:
    """Whether a folder is one that `folder_of` made."""
    return isinstance(source, Path) and (source / NOTE).is_file()


def check_packages(path: Path, *names: str) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{path} needs {' and '.join(missing)}: pip install 'acceptance-toolkit[gguf]'")


def _convert(path: Path, folder: Path, made_of: dict[str, Any]) -> None:
    """Read a GGUF file and save it as a plain checkpoint with its tokenizer."""
    file = GGUFFile.read(path)
    size = 4 * sum(int(tensor.n_elements) for tensor in file.tensors.values())
    check_disk(size, folder, f"{path} in float32")
    check_memory(
        round(OVERHEAD * size), f"converting {path} to float32", "expected a smaller model, or another machine"
    )
    tokenizer = gguf_tokenizer.build(file)
    model = _load(file, folder)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    write_json(folder / NOTE, made_of)


def _load(file: GGUFFile, folder: Path) -> Any:
    """The model of a GGUF file, with all that the file says. folder: for a link, or the whole file if it is split."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    loaded: Any
    report: Any
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / f"whole{ENDING}"
    file.link(whole)
    try:
        config = gguf_config.complete(AutoConfig.from_pretrained(folder, gguf_file=whole.name), file)
        options: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below
        with LOADING:
            loaded, report = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
                folder, gguf_file=whole.name, config=config, dtype=torch.float32, **options
            )
    except InputError:
        raise
    except Exception as error:  # what the file and its architecture make transformers raise
        raise InputError(f"transformers could not read {file.path}: {first_line(error)}") from error
    finally:
        whole.unlink()
    _check_taken(loaded, report, file)
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    with no_init_weights():  # the weights are the loaded model's own, not copies
        model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.generation_config.eos_token_id = gguf_tokenizer.end_ids(file) or None
    gguf_config.check_rope(model, file)
    return model


@torch.no_grad()
def _check_taken(model: Any, report: dict[str, Any], file: GGUFFile) -> None:
    """Raises InputError unless each tensor of the file is in the model, and nothing else is; biases that it lacks are zero."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    state = model.state_dict()
    for name, num_in_file, num_in_model in report["mismatched_keys"]:
        raise InputError(
            f"{file.path}: {name} is {list(num_in_file)}, transformers' {type(model).__name__} has {list(num_in_model)}"
        )
    missing = set(report["missing_keys"])
    for name in sorted(missing):
        if not name.endswith(".bias"):
            raise InputError(f"{file.path} lacks {name}, a weight of transformers' {type(model).__name__}")
        state[name].zero_()
    unused = set(file.names(UNUSED))
    if further := file.get("nextn_predict_layers", 0):  # for several tokens at once; transformers leaves them out
        first = file.get("block_count") - further
        unused |= {name for name in file.names(r"blk\.\d+\..*") if int(name.split(".")[1]) >= first}
    num_in_file = sum(int(tensor.n_elements) for name, tensor in file.tensors.items() if name not in unused)
    num_in_model = sum({t.data_ptr(): t.numel() for name, t in state.items() if name not in missing}.values())
    if num_in_file != num_in_model:
        kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == file.architecture), MODEL_ARCH.LLAMA)
        names = get_tensor_name_map(kind, model.config.num_hidden_layers)
        taken = {names.get_name(name, (".weight", ".bias")) for name in state}
        left = [name for name in file.tensors if name not in taken | unused]
        raise InputError(
            f"{file.path} holds {num_in_file:,} weights, transformers' {type(model).__name__} took {num_in_model:,} of them"
            + (f": {', '.join(left[:3])}{' ...' if len(left) > 3 else ''} have no place in it" if left else "")
        )


# -- writing ------------------------------------------------------------------------------------------------------------


def write(path: Path, model: Any, tokenizer: Any, like: Path | None = None) -> Path:
    """Write a Llama model as GGUF in float32, and read it back.

    like  a GGUF file with the same tokenizer, whose description of it is copied; None: it is written from the tokenizer
    Raises InputError for another class of model, for what GGUF cannot say of a model or tokenizer, and for what would be read
    as another one; then no file is left.
    """
    _check_class(path, model)

    def write_checked(temporary: Path) -> None:
        _write(temporary, model, tokenizer, like)
        _read_model_back(temporary, model)
        _read_tokenizer_back(temporary, tokenizer)

    return write_atomic(path, write_checked)


def tokenizer_file(target: str | Path | None) -> Path | None:
    """The GGUF file whose description of the tokenizer an export copies; None: the target is none."""
    return Path(str(target)) if is_gguf(str(target)) else None


def check_writable(model: Any, tokenizer: Any, like: Path | None = None) -> None:
    """Raises InputError as `write` does, whatever the weights."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"empty{ENDING}"
        _check_class(path, model)
        _write(path, model, tokenizer, like, weights=False)
        _read_tokenizer_back(path, tokenizer)


def _check_class(path: Path, model: Any) -> None:
    check_packages(path, "gguf", "accelerate")
    if type(model).__name__ != "LlamaForCausalLM":
        raise InputError(f"a GGUF file can be written of a LlamaForCausalLM, got {type(model).__name__}")


def _write(path: Path, model: Any, tokenizer: Any, like: Path | None, weights: bool = True) -> None:
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
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_rope(writer, model, head_dim)
    if like is None:
        gguf_tokenizer.describe(writer, tokenizer, config.vocab_size, model.generation_config)
    else:
        source = GGUFFile.read(like)
        for name in source.keys:
            if name.startswith("tokenizer."):
                writer.add_key_value(name, source.keys[name], *source.types[name])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items() if weights else ():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        values = tensor.detach().float().cpu()
        if ".q_proj." in name or ".k_proj." in name:
            values = _interleaved(values, heads if ".q_proj." in name else kv_heads)
        gguf_name = names.get_name(name, (".weight", ".bias"))
        if gguf_name is None:
            raise InputError(f"a GGUF file of a Llama has no name for {name}")
        writer.add_tensor(gguf_name, values.numpy())
    finish(writer)


def _add_rope(writer: Any, model: Any, head_dim: int) -> None:
    """The scaling of positions. Raises InputError for one that llama.cpp does not have."""
    from gguf import RopeScalingType

    rope, context = model.config.rope_parameters, model.config.max_position_embeddings
    kind, attention = rope.get("rope_type", "default"), float(model.model.rotary_emb.attention_scaling)
    plain = gguf_config.unscaled(head_dim, rope["rope_theta"])
    writer.add_rope_freq_base(rope["rope_theta"])
    yarn = tuple(rope.get(f"beta_{end}") or usual for end, usual in zip(("fast", "slow"), BETAS, strict=True))
    divisors, usual = None, 1.0
    if kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn" and rope.get("truncate", True) and yarn == BETAS:
        usual = 0.1 * math.log(max(rope["factor"], 1.0)) + 1.0
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings") or context)
    elif kind == "llama3":
        divisors = gguf_config.llama3_divisors(plain, rope)
    elif kind == "longrope" and rope["long_factor"] == rope["short_factor"]:
        divisors = torch.tensor(rope["long_factor"], dtype=torch.float64)
    elif kind != "default":
        raise InputError(f"a GGUF file of a Llama cannot scale positions as {kind!r} does here: {rope}")
    if not math.isclose(attention, usual, rel_tol=1e-6):
        writer.add_rope_scaling_attn_factors(attention / usual)
    if divisors is not None:
        writer.add_tensor(gguf_config.DIVISORS, divisors.float().numpy())


def _interleaved(weights: Tensor, heads: int) -> Tensor:
    """Rows of q or k of `heads` heads in llama.cpp's order: (0, d/2, 1, d/2 + 1, ...) within each head of d rows."""
    halves = weights.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(weights.shape).contiguous()


@torch.no_grad()
def _read_model_back(path: Path, model: Any) -> None:
    """Raises InputError if a file is read as another model, by its logits on some tokens all over the context."""
    with TemporaryDirectory() as folder:
        again = _load(GGUFFile.read(path), Path(folder)).eval()
    source = type(model)(copy.deepcopy(model.config)).float().eval()
    source.load_state_dict(model.state_dict())
    ids = torch.arange(CHECKED)[None] * 7919 % model.config.vocab_size
    last = min(model.config.max_position_embeddings, 2**12) - 1
    positions = torch.linspace(0, last, CHECKED).long()[None]
    ours, theirs = (m(ids, position_ids=positions).logits for m in (source, again))
    if not torch.allclose(ours, theirs, rtol=0, atol=1e-3 * float(ours.std())):
        off = float((ours - theirs).abs().max())
        raise InputError(f"a GGUF file cannot hold this model: read back, its logits differ by up to {off:.2g}")


def _read_tokenizer_back(path: Path, tokenizer: Any) -> None:
    """Raises InputError if a file is read as another tokenizer, here or by transformers' own reader."""
    from transformers import AutoTokenizer

    if tokenizer is None:
        return
    file = GGUFFile.read(path)
    with TemporaryDirectory() as folder:
        file.link(Path(folder) / f"whole{ENDING}")
        theirs: Any = AutoTokenizer.from_pretrained(folder, gguf_file=f"whole{ENDING}")
    readers = {"here": gguf_tokenizer.build(file), "by transformers": theirs}
    for text in gguf_tokenizer.probes(tokenizer):
        ids = list(tokenizer(text).input_ids)
        for reader, other in readers.items():
            if (read := list(other(text).input_ids)) != ids:
                raise InputError(
                    f"a GGUF file cannot hold this tokenizer: read back {reader}, {text[:60]!r} is {len(read)} tokens instead "
                    f"of {len(ids)}, or others"
                )
