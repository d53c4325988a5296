"""Advice and serving from a prompts file to the answer; what is exported; what is refused."""

import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import DbrxConfig, DbrxForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from analysis import advise, serving
from analysis.loads import advice
from analysis.loads.choosing import advised, best_lengths, sentences
from analysis.loads.modelled import DEVICES, SHAPES, Experts, Shape, modelled
from data_gen.held_out import load_frozen
from toolkit import ModelPair, config
from toolkit.costs.load import LoadCost
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt
from toolkit.testing import tiny_llama
from toolkit.trace.record import Recorder

SMALL = ["~grid.tail", "~grid.dynamic_confidence", "~grid.rate", "~grid.p_min", "grid.confidence.policy.threshold=[0.4]",
         "grid.speculative.policy.num_drafted=[1,3]", "sampling.max_new_tokens=12", "track=false"]  # fmt: skip


def prompts_file(folder, count=12):
    lines = [json.dumps({"id": f"p{i}", "prompt": e.prompt}) for i, e in enumerate(load_frozen("math", "dev")[:count])]
    path = folder / "mine.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def composed(name, folder, *words):
    return config.compose(name, [f"paths.root_dir={folder}", *SMALL, *words])


def test_from_two_drafts_and_a_file_to_an_answer(tmp_path, capsys):
    words = [f"prompts.path={prompts_file(tmp_path, 8)}", "prompts.limit=null", "pair.draft=[toy/draft,toy/target]"]
    shared = [*words, "hardware=h100", "resamples=50", "heads=[null,null]"]
    folder = advise.run(composed("advise", tmp_path, "batch_sizes=[1,8]", *shared))
    said = capsys.readouterr().out
    assert "batch 1: " in said and "batch 8: " in said
    assert "batch_rate left out" not in said  # weights that ship stand for a head
    assert "by batch size, the others for batch size 1)" in said
    (line,) = re.findall(r"^next: python -m toolkit.decode (.*)$", said, re.MULTILINE)
    cfg = config.compose("decode", shlex.split(line))
    assert cfg.pair.draft == "toy/draft" and cfg.sampling.max_new_tokens == 12 and cfg.prompts.path.endswith(".jsonl")
    assert cfg.batch_size == 1
    table = pd.read_csv(folder / "advice.csv")
    assert set(table.batch) == {1, 8} and set(table.draft) == {"draft", "target", "no draft model"}
    assert table[table.draft == "target"].speedup.max() < 1.3
    assert table.groupby("batch").advised.sum().tolist() == [1, 1]
    copying = {"prompt_lookup", "lookup_rate", "batch_lookup_rate"}
    chains = {"speculative", "autoregressive", "confidence", "batch_rate", "batch_rate_confidence"}
    assert chains | copying == set(table.method)
    assert copying.isdisjoint(table.method[table.draft != "no draft model"])
    assert LoadCost.load(folder / "costs-0.json").source == "modelled"
    vllm = json.loads((folder / "exports" / "vllm.json").read_text())
    assert vllm["num_speculative_tokens"] == max(k for _, _, k in vllm["num_speculative_tokens_per_batch_size"])
    assert vllm["draft_sample_method"] == "greedy" and vllm["model"] == "toy/draft"
    made = sorted(path.stat().st_mtime_ns for path in (folder / "settings").iterdir())
    again = advise.run(composed("advise", tmp_path, "batch_sizes=[4]", *shared))
    assert again == folder and set(pd.read_csv(folder / "advice.csv").batch) == {4}
    assert sorted(path.stat().st_mtime_ns for path in (folder / "settings").iterdir()) == made, "recorded again"


def test_an_advised_batch_rule_decodes_with_the_costs_it_was_simulated_with(tmp_path):
    """`toolkit.txt`, given to a command, makes the very rule."""
    costs = LoadCost.ratio(0.05, 0.01).save(tmp_path / "costs.json")
    words = [
        f"prompts.path={prompts_file(tmp_path, 16)}",
        "prompts.limit=null",
        "pair.draft=toy/draft",
        f"costs={costs}",
    ]
    words += ["~grid", "+grid={autoregressive: {}, batch_rate_confidence: {}}", "resamples=50", "batch_sizes=[2]"]
    words += ["heads=[null]", "sampling.max_new_tokens=12", "track=false", f"paths.root_dir={tmp_path}"]
    folder = advise.run(config.compose("advise", words))
    overrides = (folder / "exports" / "toolkit.txt").read_text().split("\n")[:-1]
    assert overrides[0] == "method=batch_rate_confidence"
    method = config.instantiate(config.compose("decode", overrides).method)
    assert Path(method.policy.costs) == (folder / "costs-0.json").resolve()
    assert LoadCost.load(method.policy.costs).draft(2) == 0.05


def test_a_target_alone_is_advised_on_copies_and_told_how_to_make_a_draft(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Recorder, "recorded", lambda *_: pytest.fail("texts are enough"))
    costs = LoadCost.ratio(0.3, 0.001).save(tmp_path / "costs.json")
    words = [f"prompts.path={prompts_file(tmp_path)}", "pair.target=toy/target", "pair.draft=null", "resamples=50"]
    shared = [*words, "sampling.temperature=0", f"costs={costs}", "sampling.max_new_tokens=24"]
    folder = advise.run(composed("advise", tmp_path, "batch_sizes=[1,4]", *shared))
    said = capsys.readouterr().out
    table = pd.read_csv(folder / "advice.csv")
    assert set(table.method) == {"autoregressive", "prompt_lookup", "lookup_rate", "batch_lookup_rate"}
    advised_line = table[table.advised & (table.batch == 1)].iloc[0]
    assert advised_line.method != "autoregressive" and "batch 1: no draft model, " in said
    assert re.search(
        r"about \d+ minutes .*: python -m toolkit.train \+experiment=draft pair.target=toy/target prompts.path=.*mine.jsonl$",
        said.strip(), re.MULTILINE,
    )  # fmt: skip
    (line,) = re.findall(r"^next: python -m toolkit.decode (.*)$", said, re.MULTILINE)
    cfg = config.compose("decode", shlex.split(line))
    assert cfg.pair.draft is None and cfg.method.name == advised_line.method
    assert {p.name for p in (folder / "exports").iterdir()} == {"transformers.json", "toolkit.txt"}
    with pytest.raises(InputError, match=r"needs a draft model, .* python -m toolkit.train \+experiment=draft"):
        advise.run(
            composed("advise", tmp_path, *shared, "~grid.prompt_lookup", "~grid.lookup_rate", "~grid.batch_lookup_rate")
        )


def test_lookup_rate_is_served_with_costs_and_batch(tmp_path):
    """What the advice simulated is what its overrides decode with."""
    costs = LoadCost.ratio(0.3, 0.001).save(tmp_path / "costs.json")
    words = [f"prompts.path={prompts_file(tmp_path, 16)}", "pair.target=toy/target", "pair.draft=null", "resamples=50"]
    words += ["sampling.temperature=0", f"costs={costs}", "~grid.prompt_lookup", "batch_sizes=[2]"]
    folder = advise.run(composed("advise", tmp_path, *words, "sampling.max_new_tokens=24"))
    overrides = (folder / "exports" / "toolkit.txt").read_text().split("\n")[:-1]
    policy = config.instantiate(config.compose("decode", overrides).method).policy
    assert policy.batch_size == 2 and Path(policy.costs) == (folder / "costs-0.json").resolve()


def test_advice_at_published_costs_ends_where_they_end(tmp_path, capsys):
    words = [f"prompts.path={prompts_file(tmp_path, 8)}", "prompts.limit=null", "resamples=50", "batch_sizes=[1]"]
    words.append("grid.speculative.policy.num_drafted=[1,6]")
    folder = advise.run(composed("advise", tmp_path, *words, "costs=published/deepseek-v4-flash:.02"))
    assert "speculative K=6 left out, beyond 5 a round" in capsys.readouterr().out
    speeds = pd.read_csv(folder / "advice.csv").set_index("method").tokens_per_second
    assert speeds["autoregressive"].tolist() == pytest.approx([1.0, 1.0])  # prompts are not counted
    assert speeds["speculative"].max() < 2 / 1.46
    with pytest.raises(InputError, match="batch size 4"):
        advise.run(
            composed("advise", tmp_path, *words[:-2], "batch_sizes=[4]", "costs=published/deepseek-v4-flash:.02")
        )


def test_drafts_of_one_name_are_told_apart():
    """As two heads of one draft are compared."""
    pair = ModelPair.toy()
    pair.drafts = (pair.draft, pair.draft)
    given, names = advice.drafts_of(config.compose("advise", ["pair.draft=[toy/draft,toy/draft]"]), pair)
    assert given == ["toy/draft", "toy/draft"] and names == ["toy/draft (0)", "toy/draft (1)"]


def test_serving_by_load(tmp_path, capsys):
    words = [f"prompts.path={prompts_file(tmp_path)}", "hardware=l40s", "shapes=[llama-70b,llama-1b]", "devices=8"]
    words += ["users=[1,8]", "rates=[50]", "slots=4", "requests=20"]
    folder = serving.run(composed("serving", tmp_path, *words))
    table = pd.read_csv(folder / "serving.csv")
    assert set(table.load) == {"1 users", "8 users", "50 requests/s"}
    plain = table[table.method == "autoregressive"]
    assert (plain.times_plain == 1).all()
    crowded, alone = (plain[plain.load == load].iloc[0] for load in ("8 users", "1 users"))
    assert crowded.latency > alone.latency and crowded.tokens_per_second > alone.tokens_per_second
    assert "drafting" in capsys.readouterr().out and (folder / "serving.png").exists()


def test_too_few_prompts_and_other_mistakes(tmp_path):
    many, flat = f"prompts.path={prompts_file(tmp_path)}", tmp_path / "flat.csv"
    flat.write_text("model,batch,width,context,seconds\ndraft,1,1,0,.1\ntarget,1,1,0,1\ntarget,1,5,0,1.1\n")
    for command, words, message in (
        (advise, ["hardware=h100", "heads=[null,null]"], "a head .* for each of 1 drafts"),
        (advise, ["hardware=h1000"], "hardware: expected one of h100, h200, .*, got .h1000."),
        (serving, ["users=[]"], "neither"),
        (advise, ["hardware=h100", "batch_sizes=[]"], r"batch_sizes: expected .*, got \[\]"),
        (advise, [f"costs={flat}", "batch_sizes=[1,64]"], "expected times of the draft at batch size 64, too"),
        (serving, [f"costs={flat}", "slots=4"], "expected times of the draft at batch size 4, too"),
    ):
        with pytest.raises(InputError, match=f"^.*{message}.*$"):
            command.run(composed(command.__name__.rpartition(".")[2], tmp_path, many, *words))


def test_prompts_stay_on_their_side_of_the_split():
    def halves(prompts):
        return [{prompt.id for prompt in part} for part in advice.split(prompts).values()]

    dev, test = halves([Prompt(str(number), f"p{number}") for number in range(20)])
    assert not dev & test and len(dev) == 10
    repeated = halves([Prompt(str(number), f"p{number % 20}") for number in range(60)])
    assert [{id_ for id_ in part if int(id_) < 20} for part in repeated] == [dev, test]
    assert all(len(part) == 30 and len({int(id_) % 20 for id_ in part}) == 10 for part in repeated)


def table_of(**speeds):
    lines = []
    for name, speed in speeds.items():
        method, _, length = name.partition("_K")
        setting = f"K={length}" if length else ""
        intervals = {"speedup": speed, "speedup_low": speed - 0.1, "speedup_high": speed + 0.1}
        about = {"batch": 1, "draft": "d", "method": method, "greedy": False, "setting": setting}
        about["requests"], about["drafted_per_round"] = 16, 0.02 if name in ("autoregressive", "batch_rate") else 3.0
        lines.append({**about, "dev_times_plain": speed, "dev_speedup_low": speed - 0.1, **intervals})
    table = pd.DataFrame(lines)
    table["advised"] = table.index == table.dev_times_plain.idxmax()
    return table


def test_the_sentence_says_do_not_draft_where_it_does_not_pay():
    assert sentences(table_of(autoregressive=1.0, speculative_K4=1.5, rate=2.0)) == [
        "batch 1: d, rate: 2.00 [1.90, 2.10] times autoregressive decoding; "
        "the best fixed length (d, fixed K=4): 1.50 [1.40, 1.60]"
    ]
    (said,) = sentences(table_of(autoregressive=1.0, speculative_K4=1.5), {1: "batch size 1 is beyond the cost table"})
    assert said.endswith("times autoregressive decoding (batch size 1 is beyond the cost table)")
    (said,) = sentences(table_of(autoregressive=1.0, speculative_K4=0.8))
    assert said.startswith("batch 1: do not draft; the best that drafts (d, fixed K=4) makes 0.80")
    (said,) = sentences(table_of(autoregressive=1.0, speculative_K4=0.8, batch_rate=0.99))
    assert "the best that drafts (d, fixed K=4)" in said, "a batch rule that rests does not draft"
    assert best_lengths(table_of(autoregressive=1.0, speculative_K4=0.8), "d", greedy=False) == {1: 0}
    assert best_lengths(table_of(autoregressive=1.0, speculative_K4=1.8), "d", greedy=False) == {1: 4}


def test_what_does_not_surely_pay_is_notadvised():
    """Fastest on dev, but its interval holds 1: plain decoding is advised, and engines are told a length of 0."""
    unsure = table_of(autoregressive=1.0, speculative_K4=1.05)
    assert unsure.method[advised(unsure)] == "autoregressive"
    assert best_lengths(unsure, "d", greedy=False) == {1: 0}
    sure = table_of(autoregressive=1.0, speculative_K4=1.2)
    assert sure.method[advised(sure)] == "speculative"


def test_a_batch_is_as_large_as_its_size_says_however_few_the_prompts_are(tmp_path):
    """Eight prompts at batch size 16: the halves are served again and again, and each prompt counts once in the intervals."""
    costs = LoadCost.ratio(0.3, 0.1).save(tmp_path / "costs.json")
    words = [f"prompts.path={prompts_file(tmp_path, 8)}", "pair.draft=null", f"costs={costs}", "resamples=50"]
    folder = advise.run(composed("advise", tmp_path, "batch_sizes=[1,16]", *words, "sampling.temperature=0"))
    table = pd.read_csv(folder / "advice.csv")
    assert (table[table.batch == 16].mean_batch > 14).all() and (table[table.batch == 1].mean_batch == 1).all()
    assert (table.requests == 4).all()


def test_modelled_costs():
    """Alone, a 70B model on one device reads 141 GB; in a large batch, arithmetic takes over."""
    costs = modelled(SHAPES["llama-70b"], SHAPES["llama-1b"], "h100", 1, [1, 256])
    assert costs.target(1) == pytest.approx(2 * 70.6e9 / 3.35e12 / 0.7, rel=0.05)
    assert costs.target(256, 9) > 3 * costs.target(1) and costs.target(1, 9) == pytest.approx(costs.target(1), rel=0.01)
    spread = modelled(SHAPES["llama-70b"], SHAPES["llama-1b"], "h100", 8, [1])
    assert costs.target(1) / 8 < spread.target(1) < costs.target(1) / 4
    toy = Shape.of(ModelPair.toy().target)
    assert toy.parameters == sum(p.numel() for p in ModelPair.toy().target.parameters())
    for name in DEVICES:
        assert modelled(toy, toy, name, 1, [1]).round(1, 4) > 0


def test_a_mixture_is_never_modelled_as_dense():
    """DBRX's config names the number of its experts otherwise than others do."""
    ffn = {"ffn_hidden_size": 8, "moe_num_experts": 4, "moe_top_k": 2}
    attention = {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 1e4}
    cfg = DbrxConfig(
        d_model=16, n_heads=2, n_layers=1, max_seq_len=32, vocab_size=32, ffn_config=ffn, attn_config=attention
    )
    with pytest.raises(InputError, match="expected a mixture whose config says num_experts"):
        Shape.of(DbrxForCausalLM(cfg))


def test_modelled_costs_of_a_mixture():
    """Reached experts are those of a simulation where tokens are routed independently, and of the published counts with .79."""
    experts = Experts(256, 8, 90e9)
    draws = torch.rand(4000, 15, 256, generator=torch.Generator().manual_seed(0)).topk(8).indices
    for width in (1, 8, 15):
        distinct = torch.zeros(4000, 256).scatter_(1, draws[:, :width].flatten(1), 1.0).sum(1).mean()
        assert experts.reached(1, width, 1.0) == pytest.approx(distinct.item(), rel=0.01)
    assert experts.reached(1, 8, 0.79) == pytest.approx(39.4, rel=0.03)
    assert experts.reached(1, 15, 0.79) == pytest.approx(58.9, rel=0.03)
    mixture = Shape(100e9, 60, 4096, 2 * 60 * 8 * 128, experts)
    costs = modelled(mixture, SHAPES["llama-1b"], "h100", 1, [1, 64], 0.79)
    times = [costs.target(1, width) for width in (1, 2, 3)]
    assert times[1] - times[0] > times[2] - times[1] > 0, "the first extra token is the dearest"
    assert costs.target(64, 9) < 1.5 * costs.target(64, 1), (
        "in a large batch nearly all experts are read for one token each"
    )
    assert (
        costs.about["overlap"] == 0.79
        and "overlap" not in modelled(SHAPES["llama-8b"], SHAPES["llama-1b"], "h100", 1, [1]).about
    )


def test_the_shape_of_a_mixture_counts_its_routed_experts():
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        moe_intermediate_size=12, intermediate_size=24, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    shape = Shape.of(Qwen3MoeForCausalLM(config))
    assert shape.experts == Experts(8, 2, 2 * 8 * 3 * 12 * 16)
    model = tiny_llama(32, 2, 1, torch.float32)
    model.config.num_experts = 4
    with pytest.raises(InputError, match="expected a mixture whose config says"):
        Shape.of(model)
