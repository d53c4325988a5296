"""Tokenizers of GGUF files: built from the file's keys, and described by them.

llama.cpp has two kinds. `gpt2` is a byte-level BPE whose way of splitting text has a name (`tokenizer.ggml.pre`). `llama` is
SentencePiece's BPE with byte fallback: of two neighbouring tokens that make a third one, those with the highest score of it are
merged first. A `tokenizer.json` lists merges instead; they follow from the scores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import InputError, warn
from toolkit.models.gguf_file import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of tokens in llama.cpp
SPACE = "▁"  # as SentencePiece writes it
NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # transformers' name -> llama.cpp's
KEY = "tokenizer.ggml."
PROBES = (
    "Hello world, it's 12345 apples.  Two  spaces\n\nand\ttabs; naïve café, Straße — 日本語 한국어 العربية 😀 ﷺ",
    "def f(x_1):\n    return x**2 + 10_000  # isn't it? THEY'LL I'VE",
    "   leading",
    "trailing   ",
    "a\r\nb\r\n\r\n c",
    "€100,000.00 (3/4) [x]{y}<z> 'quoted' \"text\" e\u2019s",
    "a",
    " ",
    "\n",
)

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"


def _cased(digits: str, ending: str = "") -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{UPPER}*{LOWER}+{ending}|{start}{UPPER}+{LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _bytes(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


DIGITS = {"type": "Digits", "individual_digits": True}
GPT2 = (_bytes(True),)
GPT2_DIGITS = (DIGITS, _bytes(True))
LLAMA3 = (_split(_words(r"\p{N}{1,3}")), _bytes(False))
QWEN2 = (_split(_words(r"\p{N}")), _bytes(False))
MARKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + SPACES
TEKKEN = (_split(_cased(r"\p{N}")), _bytes(False))
GPT4O = (_split(_cased(r"\p{N}{1,3}", f"{CONTRACTIONS}?")), _bytes(False))
FALCON = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    _bytes(True),
    {"type": "Digits", "individual_digits": False},
    _split("[0-9][0-9][0-9]"),
)
BLOOM = (_split(r" ?[^(\s|[.,!?…。，、।۔،])]+"), _bytes(False))
CODER = (*map(_split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")), DIGITS, _bytes(False))
# Ways of splitting text by their names in llama.cpp. Of those with the same parts a file is written with the first.
SPLITS: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "mellum"), GPT2
    ),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), GPT2_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan", "kormo", "f2llmv2"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), GPT4O),
    "qwen35": (_split(MARKS), _bytes(False)),
    "tekken": TEKKEN,
    "falcon": FALCON,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), BLOOM),
    "deepseek-coder": CODER,
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
COMPOSED = ("qwen2", "qwen35")  # their tokenizers compose accents first (NFC)


def build(file: GGUFFile) -> Any:
    """The tokenizer of a GGUF file, as transformers has it. Raises InputError for a kind that is not one of the two."""
    from transformers import PreTrainedTokenizerFast

    kind = file.keys.get(f"{KEY}model")
    tokens = list(file.keys.get(f"{KEY}tokens") or ())
    if kind not in ("gpt2", "llama", "gemma4") or not tokens:
        raise InputError(f"{file.path} has a tokenizer of the kind {kind!r}: expected gpt2 or llama, with its tokens")
    if kind != "gpt2" and file.architecture.startswith("gemma"):  # llama.cpp spells those of spaces with spaces
        tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    types = list(file.keys.get(f"{KEY}token_type") or [NORMAL] * len(tokens))
    if len(types) < len(tokens):
        raise InputError(f"{file.path}: {len(types)} kinds of tokens ({KEY}token_type) for {len(tokens)} tokens")
    ids = {name: file.keys.get(f"{KEY}{key}_token_id") for name, key in NAMED.items()}
    if ids["unk"] is None and UNKNOWN in types:
        ids["unk"] = types.index(UNKNOWN)
    ends = {name: file.keys.get(f"{KEY}{name}_token_id") for name in ("eot", "eom")}
    for name, index in {**ids, **ends}.items():
        if index is not None and not (isinstance(index, int) and 0 <= index < len(tokens)):
            raise InputError(f"{file.path}: its {name} token is {index!r}, of {len(tokens)} tokens")
    named = {index for index in ids.values() if index is not None}
    vocab = {token: index for index, token in enumerate(tokens) if token != f"[PAD{index}]" or index in named}
    pieces = _byte_level(file, vocab) if kind == "gpt2" else _sentencepiece(file, vocab, tokens, ids["unk"])
    is_phi3 = any(name in str(file.keys.get("general.name", "")).lower() for name in ("phi-3", "phi3"))
    strips = is_phi3 and "<|end|>" in vocab  # as llama.cpp does, which goes by the name, too
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(
                index, token, types[index] != USER_DEFINED, strips and token not in ("<unk>", "<s>", "<|endoftext|>")
            )
            for token, index in vocab.items()
            if types[index] in (CONTROL, USER_DEFINED) or index in named
        ],
        "post_processor": _ends(file, tokens, ids),
        **pieces,
    }
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # whatever the parser raises
        raise InputError(f"{file.path}: its tokenizer cannot be built: {error}") from error
    special = {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = file.keys.get("tokenizer.chat_template")
    return tokenizer


def end_ids(file: GGUFFile) -> list[int]:
    """The tokens that end a text: of the whole, of a turn, of a message."""
    ends = [file.keys.get(f"{KEY}{name}_token_id") for name in ("eos", "eot", "eom")]
    return list(dict.fromkeys(end for end in ends if end is not None))


def _added(index: int, token: str, special: bool, strips: bool) -> dict[str, Any]:
    """An added token; strips: white space after it belongs to it, if it is special."""
    flags = {"single_word": False, "lstrip": False, "rstrip": special and strips, "normalized": False}
    return {"id": index, "content": token, **flags, "special": special}


def _ends(file: GGUFFile, tokens: Sequence[str], ids: Mapping[str, int | None]) -> dict[str, Any] | None:
    """What is put before and after each text."""
    is_default = file.keys[f"{KEY}model"] == "llama" or file.keys.get(f"{KEY}pre") in WHOLE_WORDS
    before = file.keys.get(f"{KEY}add_bos_token", is_default) and ids["bos"] is not None
    after = file.keys.get(f"{KEY}add_eos_token", False) and ids["eos"] is not None
    first, last = (None if ids[name] is None else tokens[ids[name]] for name in ("bos", "eos"))  # type: ignore[index]
    single: list[dict[str, Any]] = [{"SpecialToken": {"id": first, "type_id": 0}}] if before else []
    single += [{"Sequence": {"id": "A", "type_id": 0}}]
    single += [{"SpecialToken": {"id": last, "type_id": 0}}] if after else []
    second = [{"Sequence": {"id": "B", "type_id": 1}}]
    used = {name: ids[key] for name, key, use in ((first, "bos", before), (last, "eos", after)) if use}
    special = {name: {"id": name, "ids": [index], "tokens": [name]} for name, index in used.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": single + second, "special_tokens": special}


def _byte_level(file: GGUFFile, vocab: Mapping[str, int]) -> dict[str, Any]:
    name = file.keys.get(f"{KEY}pre", "default")
    if name not in SPLITS and name != "default":
        raise InputError(f"{file.path} splits text by {name!r}, which is not read here: expected {', '.join(SPLITS)}")
    if name == "default":
        warn(f"{file.path} does not say how its tokenizer splits text: it is split as for GPT-2")
    merges = file.keys.get(f"{KEY}merges")
    if merges is None:
        raise InputError(f"{file.path} has a tokenizer without merges ({KEY}merges)")
    parts = SPLITS.get(name, GPT2)
    return {
        "normalizer": {"type": "NFC"} if name in COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(parts)},
        "decoder": _bytes(True) | {"add_prefix_space": True},
        "model": _bpe(vocab, [merge.split(" ") for merge in merges]) | {"ignore_merges": name in WHOLE_WORDS},
    }


def _sentencepiece(
    file: GGUFFile, vocab: Mapping[str, int], tokens: Sequence[str], unknown: int | None
) -> dict[str, Any]:
    architecture, pairs = file.architecture, file.keys.get(f"{KEY}merges")
    is_gemma = architecture.startswith("gemma")
    prefix = not is_gemma and bool(file.keys.get(f"{KEY}add_space_prefix", True))
    spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    decoders += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    before: dict[str, Any] | None = None
    splits: dict[str, Any] | None = None
    if is_gemma:
        before, splits = (
            spaces,
            {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        )
    elif architecture == "phi3":  # its blank comes first always, others' only where the text starts with none
        blank = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
        before = {"type": "Sequence", "normalizers": [*blank, spaces]}
    else:
        scheme = "first" if prefix else "never"
        splits = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    scores = file.keys.get(f"{KEY}scores") or []
    if pairs is None and not is_gemma and not scores:
        raise InputError(f"{file.path} has a tokenizer without scores ({KEY}scores)")
    # the order of Gemma's tokens is that of its merges, which its scores are not
    if pairs is None:
        merges = merges_of(vocab, {t: float(i) if is_gemma else -float(scores[i]) for t, i in vocab.items()})
    else:
        merges = [merge.split(" ") for merge in pairs]
    model = _bpe(vocab, merges) | {"fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": before,
        "pre_tokenizer": splits,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model | {"unk_token": None if unknown is None else tokens[unknown]},
    }


def merges_of(vocab: Mapping[str, int], ranks: Mapping[str, float]) -> list[list[str]]:
    """All pairs of tokens that make a third one, by its rank: the lowest first, of one token the longest left part."""
    pairs = [
        (rank, -i, i - len(token), token[:i], token[i:])
        for token, rank in ranks.items()
        for i in range(1, len(token))
        if token[:i] in vocab and token[i:] in vocab
    ]
    pairs.sort(key=lambda pair: pair[:3])
    return [[left, right] for *_, left, right in pairs]


def _bpe(vocab: Mapping[str, int], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    nothing = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **nothing, **flags, "vocab": dict(vocab), "merges": [list(merge) for merge in merges]}


# -- writing ------------------------------------------------------------------------------------------------------------


def describe(writer: Any, tokenizer: Any, size: int, generation_config: Any = None) -> None:
    """Give a gguf writer a tokenizer, and placeholders up to `size` tokens. Raises InputError for what GGUF cannot say."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, vocab = content["model"], tokenizer.get_vocab()
    if model["type"] != "BPE":
        raise InputError(f"a GGUF file can hold a BPE tokenizer, got {model['type']}")
    if max(vocab.values()) >= size:
        raise InputError(
            f"the tokenizer has {max(vocab.values()) + 1} tokens, the model {size}: they do not belong together"
        )
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [UNUSED] * size
    for token, index in vocab.items():
        tokens[index], types[index] = token, NORMAL
    for index, added in tokenizer.added_tokens_decoder.items():
        types[index] = CONTROL if added.special else USER_DEFINED
    if model["byte_fallback"]:
        _describe_sentencepiece(writer, content, tokens, types, tokenizer.unk_token_id)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_name_of(content))
        writer.add_token_list(tokens)
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_token_types(types)
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
    for name in NAMED:
        if (index := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    ends = getattr(generation_config, "eos_token_id", None)
    others = [end for end in (ends if isinstance(ends, list) else [ends]) if end not in (None, tokenizer.eos_token_id)]
    for add, index in zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False):
        add(index)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _name_of(content: Mapping[str, Any]) -> str:
    """llama.cpp's name for a byte-level tokenizer's way of splitting text. Raises InputError if it has none."""
    splits = content["pre_tokenizer"] or {"type": "none"}
    parts = [_plain(part) for part in splits.get("pretokenizers", [splits])]
    composes = (content["normalizer"] or {}).get("type")
    for name, pattern in SPLITS.items():
        is_same = parts == [_plain(part) for part in pattern] and composes == ("NFC" if name in COMPOSED else None)
        if is_same and bool(content["model"].get("ignore_merges")) == (name in WHOLE_WORDS):
            return name
    kinds = " and ".join(part["type"] for part in parts)
    raise InputError(
        f"llama.cpp has no name for this tokenizer's way of splitting text ({kinds}): expected one of {', '.join(SPLITS)}"
    )


def _plain(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a pre-tokenizer without what does not matter for tokens."""
    return {key: value for key, value in part.items() if key != "trim_offsets"}


def _describe_sentencepiece(
    writer: Any, content: Mapping[str, Any], tokens: Sequence[str], types: list[int], unknown: int | None
) -> None:
    """Scores that give the merges back. Raises InputError if there are none: of a token, SentencePiece merges any two parts."""
    added = {token["content"] for token in content["added_tokens"]}
    merges = [list(merge) for merge in content["model"]["merges"]]
    for index, token in enumerate(tokens):
        if types[index] == NORMAL and re.fullmatch("<0x[0-9A-F]{2}>", token):
            types[index] = BYTE
    if unknown is not None:
        types[unknown] = UNKNOWN
    first = dict(reversed([(left + right, float(i)) for i, (left, right) in enumerate(merges)]))
    ranks = {token: first.get(token, float(len(merges) + i)) for i, token in enumerate(tokens) if types[i] == NORMAL}
    vocab = {token: index for index, token in enumerate(tokens)}
    own = [merge for merge in merges if merge[0] + merge[1] not in added]
    by_token = sorted(own, key=lambda merge: (ranks.get(merge[0] + merge[1], 0.0), -len(merge[0])))
    order = [first[left + right] for left, right in own]
    if order != sorted(order) or by_token != merges_of(vocab, ranks):
        raise InputError(
            "a GGUF file can hold merges as of SentencePiece, which follow from the scores of tokens; this tokenizer's do not"
        )
    scores = [-ranks.get(token, 0.0) for token in tokens]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    splits, before = json.dumps(content["pre_tokenizer"]), json.dumps(content["normalizer"])
    writer.add_add_space_prefix('"Prepend"' in before or ('"Metaspace"' in splits and '"never"' not in splits))


def probes(tokenizer: Any) -> list[str]:
    """Texts that tell tokenizers apart: words, numbers, spaces, signs, scripts, and every added token alone and in texts."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    texts = [*PROBES, " ".join(added), "".join(added), "".join(f"{token}word {token} more\n" for token in added)]
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": "Why 12.5?"}, {"role": "assistant", "content": " Because.\n"}]
        texts.append(tokenizer.apply_chat_template(messages, tokenize=False))
    return texts
