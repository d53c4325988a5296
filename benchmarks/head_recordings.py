"""What heads with other inputs are trained and judged on: recordings of the toy pair, or of another one, with states.

Training texts come from the training split, prices from dev prompts, every reported number from frozen test prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.resized import resized, save
from benchmarks.standing import DOMAINS, MAX_DRAFTED, SAMPLING
from data_gen import responses, traces
from data_gen.frozen import load_frozen
from data_gen.recording import Recorder
from toolkit import ModelPair
from toolkit.config import compose, method
from toolkit.decoding import decode
from toolkit.io import content_hash
from toolkit.pair import fingerprint
from toolkit.session.states import layers_of
from toolkit.trace import Trace, join
from toolkit.trace.folders import read_traces

FOLDER = Path(__file__).resolve().parent.parent / "outputs" / "inputs"
TRAINING = {"instruct": 3000, "math": 1500, "code": 4000}  # prompts; code has 3,004
SPLITS = {"dev": 100, "test": 200}
SLICED = 64  # dimensions of the second pair's draft
SLICED_TEXTS = {"instruct": 1200, "math": 500, "code": 500}  # of its training
SLICED_SPLITS = {"dev": 50, "test": 100}
ROWS = 50_000  # apart from those of other recordings


def sliced_draft() -> Path:
    """The toy draft cut to its principal directions, another and weaker draft; made if it is not there."""
    folder, pair = FOLDER / f"draft-{SLICED}", ModelPair.toy()
    if not (folder / "config.json").exists():
        examples = [example for domain in DOMAINS for example in load_frozen(domain, "dev")[:60]]
        known = [pair.tokenizer(example.prompt).input_ids for example in examples]
        save(resized(pair.draft, SLICED, known), pair.tokenizer, folder)
    return folder


def training_texts(domain: str, count: int) -> Path:
    """Responses to so many training prompts of a domain."""
    words = [f"prompts=toy_{domain}", "prompts.split=train", f"prompts.limit={count}", "batch_size=64"]
    return responses.run(compose("responses", [*words, "shard_size=1000", f"paths.root_dir={FOLDER}"]))


def training(
    draft: str = "toy/draft",
    limits: Mapping[str, int] | None = None,
    more: Sequence[str] = (),
    prompts: Mapping[str, int] = TRAINING,
) -> Trace:
    """Positions of training texts of all domains, with the states of a draft; no roll-outs.

    limits  of texts; more: further options of the recording; prompts: how many responses there are
    """
    shared = [f"paths.root_dir={FOLDER}"]
    parts = []
    for domain, count in prompts.items():
        texts = training_texts(domain, count)
        options = ["hidden=true", "upper_bound=false", "max_drafted=1", "heads={}", "batch_size=32", "shard_size=1000"]
        if limits is not None:
            options += [f"limit={limits[domain]}", f"pair.draft={draft}"]
        folder = traces.run(compose("traces", [f"responses={texts}", *options, *more, *shared]))
        parts.append(read_traces(folder))
    return join(parts)


def judging(pair: ModelPair, domain: str, split: str, splits: Mapping[str, int] = SPLITS) -> Trace:
    """Texts of frozen prompts with roll-outs, states, and p and q everywhere; kept below outputs/ for the next time."""
    count = splits[split]
    models = [fingerprint(m) for m in (pair.target, pair.draft)]
    about = [models, vars(SAMPLING), MAX_DRAFTED, ROWS, count, "target_prob", *layers_of(pair.draft)]
    path = FOLDER / f"{domain}-{split}-{content_hash(about)}.safetensors"
    if not path.exists():
        prompts = [example.prompt for example in load_frozen(domain, split)[:count]]
        first = ROWS + 1000 * (DOMAINS.index(domain) * len(SPLITS) + list(SPLITS).index(split))
        rows: Sequence[int] = range(first, first + count)
        plain = decode(pair, prompts, method("autoregressive"), SAMPLING, batch_size=64, row_ids=rows)
        recorder = Recorder(pair, SAMPLING, MAX_DRAFTED, hidden=True, upper_bound=True)
        recorder.record_all([(one.prompt_ids, one.token_ids) for one in plain], rows).save(path)
    return Trace.load(path)
