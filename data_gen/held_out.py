"""Held-out prompts of the toy domains, frozen as JSONL files so that every result speaks about the same ones.

`python -m data_gen.held_out` writes them again (code prompts depend on the installed Python).
"""

import json
from itertools import product
from pathlib import Path

from data_gen.domains import DOMAINS, Example, get
from toolkit.errors import answer_signals
from toolkit.files.atomic import write_text
from toolkit.files.text import lines_of

FOLDER = Path(__file__).parent / "assets" / "prompts"
COUNTS = {"dev": 200, "test": 400}


def freeze(folder: Path = FOLDER, counts: dict[str, int] = COUNTS, seed: int = 0) -> list[Path]:
    """Write `{domain}-{split}.jsonl` for every domain; a line has id, prompt, reference response and answer, if any."""
    paths = []
    for domain, (split, count) in product(DOMAINS, counts.items()):
        examples = get(domain).examples(split, count, seed)
        rows = [{key: value for key, value in vars(example).items() if value is not None} for example in examples]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        paths.append(write_text(folder / f"{domain}-{split}.jsonl", lines))
    return paths


def load_frozen(domain: str, split: str, folder: Path = FOLDER) -> list[Example]:
    if domain not in DOMAINS or split not in COUNTS:
        raise KeyError(f"no frozen prompts {domain}-{split}; there are {', '.join(DOMAINS)} with {', '.join(COUNTS)}")
    lines = lines_of((folder / f"{domain}-{split}.jsonl").read_text(encoding="utf-8"))
    return [Example(**{"answer": None, **json.loads(line)}) for line in lines]


if __name__ == "__main__":
    answer_signals()
    for path in freeze():
        print(path)
