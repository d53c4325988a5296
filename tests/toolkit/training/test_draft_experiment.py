"""+experiment=draft: a draft for a target that has none, from one prompts file."""

import json

import pytest
import torch
import transformers as hf

from toolkit import ModelPair, distill, generate, train
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.models.pair import load_draft, load_tokenizer
from toolkit.models.reduced import kept_tokens


@pytest.mark.slow
def test_one_experiment_makes_a_draft_and_exports_it_whole(tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"id": i, "prompt": f"Q: What is {i} plus {i % 7}?\nA:"}) + "\n" for i in range(60)]
    file.write_text("".join(lines))
    words = ["+experiment=draft", "pair.target=toy/target", f"prompts.path={file}", "prompts.limit=32"]
    words += ["sampling.max_new_tokens=24", f"paths.root_dir={tmp_path}/out"]
    worth = train.run(compose("train", words))
    drafts = json.loads((worth / "manifest.json").read_text())["given"]
    draft, plain = load_draft(drafts["drafts.draft"]), load_draft(drafts["drafts.plain"])
    assert draft.config.num_hidden_layers == plain.config.num_hidden_layers in (1, 2, 4)
    assert kept_tokens(plain) is None
    (worth_of,) = json.loads((worth / "manifest.json").read_text())["domains"]
    assert worth_of == "test", "reported on other responses than those that chose"
    assert "best/ is" in (printed := capsys.readouterr().out) and "4 layers" in printed
    pair = ModelPair.from_pretrained("toy/target", drafts["drafts.draft"])
    prompt = "Q: What is 3 plus 4?\nA:"
    (alone,) = generate(pair, [prompt], "autoregressive", temperature=0.0, max_new_tokens=16)
    (drafted,) = generate(pair, [prompt], "speculative", temperature=0.0, max_new_tokens=16)
    assert drafted.token_ids == alone.token_ids and drafted.counts.num_drafted > 0
    assert train.run(compose("train", words)) == worth  # everything is found finished
    assert "epoch 1" not in capsys.readouterr().out


GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 1024}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 1024,
}


def target_folder(folder, config):
    """A random model of a config with the toy pair's tokenizer."""
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer("toy/target").save_pretrained(folder)
    return folder


def test_a_target_whose_layers_do_not_go_alone_is_one_line_before_it_answers_anything(tmp_path):
    target = target_folder(tmp_path / "target", hf.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True))
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"id": i, "prompt": f"{i} plus 1?"}) + "\n" for i in range(40))
    )
    words = ["+experiment=draft", f"pair.target={target}", f"prompts.path={tmp_path}/prompts.jsonl"]
    with pytest.raises(InputError, match=r"^layers: no GPT2LMHeadModel of layers \[2\] alone [^\n]*$"):
        train.run(compose("train", [*words, f"paths.root_dir={tmp_path}/out"]))
    assert not list((tmp_path / "out").glob("responses-*"))


@pytest.mark.parametrize(
    ("config", "words", "reason"),
    [
        (hf.GPT2Config(**GPT2), ["layers=1", "vocabulary=50"], None),
        (hf.PhiConfig(**LLAMA), ["layers=[0,2]", "vocabulary=50", "exports=[plain]"], None),
        (hf.Gemma2Config(**LLAMA, head_dim=8), ["layers=1", "vocabulary=50"], None),
        (hf.GPT2Config(**GPT2), ["layers=5"], "layers: expected at most 4, got 5"),
        (hf.GPT2Config(**GPT2), ["layers=2", "exports=[gguf]"], "can be written of a LlamaForCausalLM, got GPT2LMHead"),
        (hf.DiffLlamaConfig(**LLAMA), ["layers=1"], "no DiffLlamaForCausalLM of layers"),
    ],
)
def test_what_is_wanted_of_a_target_is_rehearsed(config, words, reason, tmp_path, monkeypatch):
    target = target_folder(tmp_path / "target", config)
    cfg = compose(
        "distill",
        [f"pair.target={target}", "pair.draft=null", f"paths.root_dir={tmp_path}/out", *words, "rehearse=true"],
    )
    if reason is not None:
        with pytest.raises(InputError, match=reason) as error:
            distill.run(cfg)
        assert "\n" not in str(error.value)
        return
    folder = distill.run(cfg)
    monkeypatch.setattr("toolkit.drafts.separate.rehearsal.instantiate", None)  # it is remembered
    assert distill.run(cfg) == folder
