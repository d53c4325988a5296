"""Whether two revisions compute the same, bit for bit: digests of texts, recordings, drafts, heads, advice and tables.

    python -m benchmarks.identical BEFORE     writes BEFORE/digests.txt, lines `name<TAB>sha256` sorted by name
    diff BEFORE/digests.txt AFTER/digests.txt

It uses public entries alone, so that a copy of this file in the checkout of another revision runs there, too. Everything is
computed on the CPU by one thread in float32, with fixed seeds and costs. Left out are times, dates, versions, machines, hashes
of configurations, paths, pictures, and code that names modules. An item that fails has the first line of its error in the
place of a digest. What was made stays in the folder, to look at where two digests differ. Some five minutes of one core.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import toolkit
from toolkit.errors import answer_signals

ROOT = Path(toolkit.__file__).resolve().parent.parent
FIXTURES = ROOT / "tests" / "fixtures" / "eagle3"

FEW = "data.batch_size=4 trainer.max_epochs=1"  # three steps on twelve texts
DISTILL = "toolkit.distill responses=[{responses}] data.validation_fraction=.25 data.batch_size=4 optimizer.lr=3e-3"
SHORTLY = f"{DISTILL} trainer.max_epochs=1"
LONGER = f"{DISTILL} trainer.max_epochs=12 trainer.check_val_every_n_epoch=12"  # until some tokens are accepted
RECORD = "data_gen.traces responses={responses} hidden=true max_drafted=4"
SHORT = "prompts=toy_math sampling.max_new_tokens=24"
ADVISE = f"analysis.advise {SHORT} prompts.limit=8 track=false resamples=100 max_drafted=8 batch_sizes=[1,4]"
FIXED = "~grid +grid={{autoregressive:{{}},speculative:{{policy:{{num_drafted:[1,3]}}}}}} costs={cheap}"
COMPARED = "{{separate:{draft-separate}/draft,layers:{draft-layers}/draft}}"
RUNS = {  # name: command; {name} stands for the output folder of an earlier one, {costs} and {cheap} for cost tables
    "responses": f"data_gen.responses {SHORT} prompts.split=train prompts.limit=16",
    "draft-separate": f"{SHORTLY} lmbda=.5",
    "draft-layers": f"{SHORTLY} pair.draft=null layers=2 vocabulary=200 exports=[plain,gguf,compact] loss=forward_kl",
    "draft-eagle3": f"{LONGER} kind=eagle3 vocabulary=300 teacher=cached",
    "draft-dflash": f"{LONGER} kind=dflash loss=cross_entropy",
    "draft-dspark": f"{LONGER} kind=dspark vocabulary=300 loss=dspark",
    "traces-separate": f"{RECORD} upper_bound=true",
    "traces-eagle3": f"{RECORD} pair.draft={{draft-eagle3}}/draft",
    "traces-dflash": f"{RECORD} pair.draft={{draft-dflash}}/draft",
    "traces-dspark": f"{RECORD} pair.draft={{draft-dspark}}/draft",
    "mix": "data_gen.mix responses={responses} validation_fraction=.25",
    "head-acceptance": f"toolkit.train data.path={{mix}} {FEW} logger=csv",
    "head-preread": f"toolkit.train model=preread_head data=traced data.path={{traces-separate}} {FEW} logger=csv "
    "data.validation_fraction=.25",
    "drafts": f"analysis.heads drafts={COMPARED} responses={{{{math:{{responses}}}}}} resamples=100 max_drafted=4 depth=4 "
    "track=false",
    "advice": f"{ADVISE} costs={{costs}}",
    "advice-eagle3": f"{ADVISE} {FIXED} pair.draft=[{{draft-eagle3}}/draft]",
    "advice-dflash": f"{ADVISE} {FIXED} pair.draft=[{{draft-dflash}}/draft]",
    "advice-dspark": f"{ADVISE} {FIXED} pair.draft=[{{draft-dspark}}/draft]",
    "sweep": f"analysis.sweep {SHORT} prompts.limit=8 grid=policies max_drafted=6 track=false",
    "frontier": "analysis.frontier dev=[{sweep}] resamples=100 track=false",
    "report": "analysis.report inputs=[{frontier},{sweep},{head-acceptance},{advice}]",
}
DRAFTS = {  # name: folder or file, and whether every method decodes with it
    "separate": ("draft-separate/draft", False),
    "layers": ("draft-layers/draft", False),
    "layers plain": ("draft-layers/draft_plain", False),
    "layers compact": ("draft-layers/draft_compact", False),
    "layers gguf": ("draft-layers/draft.gguf", False),
    "eagle3": ("draft-eagle3/draft", True),
    "dflash": ("draft-dflash/draft", True),
    "dspark": ("draft-dspark/draft", True),
}
SOME_METHODS = ("speculative", "rate", "mcsd", "dsbd")
DIGESTED = re.compile(r"\.(safetensors|gguf|arrow|json|jsonl|csv|md|txt|yaml)$")  # files
SKIPPED = re.compile(
    r"/(manifest\.json|config\.yaml|\.written\.jsonl|wandb|checkpoints/|settings/|tokenizer|report\.json|dataset.*\.json$)"
)
VOLATILE = re.compile(
    r"version|revision|^machine$|^seconds$|^setting_seconds$|^perf/|^job$|^time$|^sha256$"
)  # keys and columns
DATED = re.compile(r"\d{4}-\d\d-\d\dT|^\| (code|trained on) \|")  # lines of pages: times, revisions and machines


class Digests:
    """Digests of everything by name, and the folder that it is made in."""

    def __init__(self, folder: Path):
        self.folder, self.lines, self.started = folder, dict[str, str](), perf_counter()

    def add(self, name: str, content: Any) -> None:
        """Digest bytes, or values as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content, sort_keys=True).encode()
        self._note(name, hashlib.sha256(data).hexdigest())

    def fail(self, name: str, error: Exception) -> None:
        """Note the first line of an error."""
        self._note(name, self.without_paths("failed: " + str(error).strip().split("\n")[0]))

    def _note(self, name: str, line: str) -> None:
        self.lines[name] = line
        print(f"{perf_counter() - self.started:5.0f} s  {name}: {line[:100]}", flush=True)

    def without_paths(self, text: str) -> str:
        """The text with names in the place of the output folder and of the checkout."""
        return text.replace(str(self.folder), "FOLDER").replace(str(ROOT), "CHECKOUT")

    def write(self) -> Path:
        path = self.folder / "digests.txt"
        path.write_text("".join(f"{name}\t{line}\n" for name, line in sorted(self.lines.items())))
        return path


# -- commands -----------------------------------------------------------------------------------------------------------


def run_commands(digests: Digests) -> None:
    """Run every command of RUNS in a process of its own, and digest the files that it leaves."""
    paths = {name: digests.folder / name for name in RUNS}
    paths |= {
        name: write_costs(digests.folder / f"{name}.csv", cost) for name, cost in (("costs", 0.15), ("cheap", 0.01))
    }
    for name, command in RUNS.items():
        module, *words = command.split()
        words = [word.format(**paths) for word in words]
        print(f"      -- python -m {module} {' '.join(words)}", flush=True)
        try:
            run(module, [*words, f"paths.root_dir={digests.folder}/root", f"paths.output_dir={paths[name]}"])
        except Exception as error:
            digests.fail(name, error)
            continue
        for path in sorted(paths[name].rglob("*")):
            label = f"{name}/{path.relative_to(paths[name])}"
            if path.is_file() and DIGESTED.search(label) and not SKIPPED.search(label):
                add_file(digests, label, path)


def run(module: str, words: Sequence[str]) -> None:
    """Run `python -m MODULE WORDS`; raises RuntimeError with the last line of its errors if it fails."""
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True)
    if done.returncode:
        last_line = done.stderr.strip().split("\n")[-1]
        raise RuntimeError(f"{module}: {last_line or done.returncode}")


def write_costs(path: Path, draft: float) -> Path:
    """A cost table: a draft forward pass costs `draft` of a target's, and both more with rows, tokens and context."""
    lines = ["model,batch,width,context,seconds"]
    for (model, unit), batch, width, context in product(
        (("draft", draft), ("target", 1.0)), (1, 4), (1, 4, 16), (0, 64)
    ):
        lines.append(f"{model},{batch},{width},{context},{unit * (1 + 0.05 * batch + 0.02 * width + 0.001 * context)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def add_file(digests: Digests, name: str, path: Path) -> None:
    """Digest a file: its tensors, one by one of recordings; JSON, tables and pages without what varies; else its bytes."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        tensors = {key: tensor_digest(tensor) for key, tensor in load_file(path).items()}
        if name.startswith("traces"):
            for key, digest in tensors.items():
                digests.add(f"{name}/{key}", digest)
        else:
            digests.add(name, tensors)
        return
    if path.suffix in (".gguf", ".arrow"):
        digests.add(name, path.read_bytes())
        return
    text = digests.without_paths(path.read_text())
    if path.suffix == ".json":
        digests.add(name, without_volatile(json.loads(text)))
    elif path.suffix == ".jsonl":
        digests.add(name, [without_volatile(json.loads(line)) for line in text.split("\n") if line])
    elif path.suffix == ".csv":
        digests.add(name, [without_volatile(row) for row in csv.DictReader(io.StringIO(text))])
    else:
        digests.add(name, stable_lines(text))


def tensor_digest(tensor: Any) -> list[Any]:
    """Type, shape and digest of a tensor's values."""
    import torch

    values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(values).hexdigest()]


def without_volatile(value: Any) -> Any:
    """JSON values without the keys of VOLATILE."""
    if isinstance(value, list):
        return [without_volatile(entry) for entry in value]
    if isinstance(value, dict):
        return {key: without_volatile(entry) for key, entry in value.items() if not VOLATILE.search(key)}
    return value


def stable_lines(text: str) -> list[str]:
    """Lines of a page without those of DATED, and tables without the columns of VOLATILE."""
    lines, columns = list[str](), list[int]()
    for line in text.split("\n"):
        if DATED.search(line):
            continue
        cells = re.split(r"(?<!\\)\|", line) if line.startswith("|") else []
        if cells and not columns:  # the head of a table
            columns = [i for i, cell in enumerate(cells) if not VOLATILE.search(cell.strip())]
        elif not cells:
            columns = []
        lines.append("|".join(cells[i] for i in columns if i < len(cells)) if cells else line)
    return lines


# -- decoding -----------------------------------------------------------------------------------------------------------


def decode_all(digests: Digests) -> None:
    """Texts of every method on the toy pair, of trained heads and drafts, and of the EAGLE-3 drafts of the fixtures."""
    from data_gen.prompts import ToyPrompts
    from toolkit import ModelPair, config

    folder = digests.folder
    prompts = [ToyPrompts(domain, "dev", 1).load()[0].prompt for domain in ("instruct", "math", "code")]
    methods = sorted(config.choices("method"))
    digests.add("methods", methods)
    toy = ModelPair.toy()
    add_texts(digests, "toy", toy, prompts, methods, max_new_tokens=24)
    heads = {"head-acceptance": ["specdec_pp", "mtad_head", "dsbd_head"], "head-preread": ["rate", "block_rate"]}
    for name, names in heads.items():
        add_texts(digests, f"toy with {name}", toy, prompts, names, head=str(folder / name / "head"))
    for name, (path, whole) in DRAFTS.items():
        pair = load_pair(digests, name, "toy/target", folder / path)
        add_texts(digests, name, pair, prompts, methods if whole else SOME_METHODS)
    pair = load_pair(digests, "two drafts", "toy/target", "toy/draft", folder / DRAFTS["separate"][0])
    add_texts(digests, "two drafts", pair, prompts, ["specinfer"], overrides=["proposer.scheme=independent"])
    target, token_ids = fixture_target(folder / "fixture-target"), [[5, 9, 33], [7, 60, 12, 40, 21], [3]]
    for path in sorted(FIXTURES.glob("*/config.json")):
        name = f"fixture {path.parent.name}"
        add_texts(digests, name, load_pair(digests, name, target, path.parent), token_ids, SOME_METHODS)


def load_pair(digests: Digests, name: str, target: Path | str, *drafts: Path | str) -> Any:
    """The pair of these folders, with assumed costs; None if it cannot be loaded, with a note."""
    from toolkit import ModelPair

    try:
        pair = ModelPair.from_pretrained(target=str(target), draft=[str(draft) for draft in drafts])
    except Exception as error:
        digests.fail(f"decoded/{name}", error)
        return None
    pair.costs = "assumed"
    return pair


def add_texts(
    digests: Digests, name: str, pair: Any, prompts: Sequence[Any], methods: Sequence[str], **settings: Any
) -> None:
    """Digest tokens and beams, counts and rounds of every method at temperature 0 and 1; nothing where `pair` is None."""
    from toolkit import generate

    for method, temperature in product(methods if pair is not None else (), (0.0, 1.0)):
        label = f"decoded/{name}/{method}/T={temperature:.0f}"
        try:
            texts = generate(
                pair, prompts, method, **{"max_new_tokens": 12, "seed": 3, "temperature": temperature} | settings
            )
        except Exception as error:
            digests.fail(label, error)
            continue
        digests.add(f"{label}/ids", [[text.token_ids, text.beams, text.scores] for text in texts])
        rounds = [[[r.num_drafted, r.num_accepted, r.num_produced] for r in text.rounds] for text in texts]
        digests.add(f"{label}/counts", [rounds, [vars(text.counts) for text in texts]])


def fixture_target(folder: Path) -> Path:
    """A random target for the fixtures' drafts: 64 tokens, states of 16 numbers, four layers, a tokenizer of whole words."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=128, initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)
    return folder


def main(argv: list[str] | None = None) -> None:
    """Compute everything and write the digests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty folder")
    folder = parser.parse_args(argv).folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        parser.error(
            f"expected a new or empty folder, got files in {folder}: finished work of another run would be found"
        )
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", WANDB_MODE="offline", HF_HUB_OFFLINE="1",
        PYTHONHASHSEED="0", PYTHONPATH=str(ROOT), XDG_CACHE_HOME=str(folder / "cache"),
    )  # fmt: skip
    os.chdir(folder)  # what a command writes beside its output folder lands here
    import torch

    torch.set_num_threads(1)
    digests = Digests(folder)
    for step in (run_commands, decode_all):
        step(digests)
        path = digests.write()
    failed = sum(line.startswith("failed") for line in digests.lines.values())
    print(
        f"{len(digests.lines)} digests, {failed} of them failed; {perf_counter() - digests.started:.0f} s\noutput: {path}"
    )


if __name__ == "__main__":
    answer_signals()
    main()
