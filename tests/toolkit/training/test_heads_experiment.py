"""+experiment=heads: both heads for a pair of local folders, from one prompts file."""

import json

import pytest

from toolkit import train
from toolkit.acceptance import AcceptanceHead, PrereadHead
from toolkit.config import compose
from toolkit.files.atomic import read_json
from toolkit.testing import save_checkpoint


@pytest.mark.slow
def test_one_experiment_trains_both_heads_and_replays_them(tmp_path, capsys):
    """Of another size than the toy pair and the other tests' pair; the three parts of the file share no prompt."""
    target, draft = save_checkpoint(tmp_path / "target", 48, 0), save_checkpoint(tmp_path / "draft", 24, 1)
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": i, "prompt": f"the {'cat' if i % 3 else 'dog'} {i}"}) + "\n" for i in range(60)]
    file.write_text("".join(lines))
    words = [
        "+experiment=heads", f"pair.target={target}", f"pair.draft={draft}", f"prompts.path={file}", "logger=csv",
        "sampling.max_new_tokens=12", "trainer.max_epochs=2", f"paths.root_dir={tmp_path}/out",
    ]  # fmt: skip
    folder = train.run(compose("train", words))
    head, about = AcceptanceHead.load(folder / "head")
    assert head.hidden_size == 24 and about["learning_rate"] > 0
    assert PrereadHead.is_in(next(one for one in tmp_path.glob("out/train-*/head") if one.parent != folder))
    (frontier,) = tmp_path.glob("out/frontier-*")
    table = (frontier / "frontier.csv").read_text()
    assert all(f"{method}," in table for method in ("speculative", "confidence", "specdec_pp", "rate"))
    sets = [
        {
            row["id"]
            for path in place.glob("shard-*.jsonl")
            for row in map(json.loads, path.read_text().splitlines())
            if "id" in row
        }
        for place in tmp_path.glob("out/responses-*")
    ]
    swept = [read_json(place / "manifest.json")["num_prompts"] for place in tmp_path.glob("out/sweep-*")]
    assert len(sets) == 1 and len(sets[0]) + sum(swept) == 60 and min(swept) > 0
    capsys.readouterr()
    assert train.run(compose("train", words)) == folder  # everything is found finished
    assert "epoch 1" not in capsys.readouterr().out
