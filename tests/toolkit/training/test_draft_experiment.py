"""+experiment=draft: a draft for a target that has none, from one prompts file."""

import json

import pytest

from toolkit import ModelPair, generate, train
from toolkit.config import compose
from toolkit.models.pair import load_draft
from toolkit.models.reduced import kept_tokens


@pytest.mark.slow
def test_one_experiment_makes_a_draft_and_exports_it_whole(tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": i, "prompt": f"Q: What is {i} plus {i % 7}?\nA:"}) + "\n" for i in range(60)]
    file.write_text("".join(lines))
    words = ["+experiment=draft", "pair.target=toy/target", f"prompts.path={file}", "prompts.limit=32"]
    words += ["sampling.max_new_tokens=24", f"paths.root_dir={tmp_path}/out"]
    worth = train.run(compose("train", words))
    drafts = json.loads((worth / "manifest.json").read_text())["config"]["drafts"]
    draft, plain = load_draft(drafts["draft"]), load_draft(drafts["plain"])
    assert draft.config.num_hidden_layers == plain.config.num_hidden_layers in (1, 2, 4)
    assert kept_tokens(plain) is None
    assert "best/ is" in (printed := capsys.readouterr().out) and "4 layers" in printed
    pair = ModelPair.from_pretrained("toy/target", drafts["draft"])
    prompt = "Q: What is 3 plus 4?\nA:"
    (alone,) = generate(pair, [prompt], "autoregressive", temperature=0.0, max_new_tokens=16)
    (drafted,) = generate(pair, [prompt], "speculative", temperature=0.0, max_new_tokens=16)
    assert drafted.token_ids == alone.token_ids and drafted.counts.num_drafted > 0
    assert train.run(compose("train", words)) == worth  # everything is found finished
    assert "epoch 1" not in capsys.readouterr().out
