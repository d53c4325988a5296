"""What an engine's rounds cost: prices that answers were made with are found again, and poor answers are one line."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis import advise, timing
from analysis.loads import engine_costs
from analysis.loads.simulator import Load, serve
from tests.analysis.loads.test_commands import prompts_file
from toolkit import ModelPair, config
from toolkit.costs.load import LoadCost
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.trace.record import Recorder

ROUND, DRAFTING, TOKEN, COLUMN, PROMPT, DRAFT_PROMPT = PRICES = 0.076, 0.055, 0.09, 0.029, 0.015, 0.0074
SERVERS = [("none", 0), ("draft", 1), ("draft", 2), ("draft", 4), ("draft", 8), ("lookup", 8)]
VLLM = Path(__file__).parents[2] / "fixtures" / "vllm" / "copies-0.jsonl"


def counted(source, longest, generator, tokens=96):
    """Rounds, drafting rounds, drafted and accepted tokens of an answer: drafts are accepted at .7 each."""
    rounds = drafting = drafted = accepted = 0
    while rounds + accepted < tokens - 1:
        length = longest if source == "draft" or (source == "lookup" and generator.random() < 0.3) else 0
        length = min(length, tokens - 2 - rounds - accepted)
        rounds, drafting, drafted = rounds + 1, drafting + (length > 0), drafted + length
        accepted += min(int(generator.geometric(0.3)) - 1, length)
    return rounds, drafting, drafted, accepted


def answer(source, longest, generator, noise=0.0, form="llama.cpp", prices=PRICES):
    rounds, drafting, drafted, accepted = counted(source, longest, generator)
    columns = np.array(
        [rounds, drafting * (source == "draft"), drafted * (source == "draft"), drafted * (source == "lookup")]
    )
    length = int(generator.integers(40, 200))
    seconds = float(columns @ prices[:4]) * generator.normal(1, noise)
    prompt = length * (prices[4] + prices[5] * (source == "draft")) * generator.normal(1, noise)
    line = {"model": "/models/big.gguf", "file_type": "Q4_K_M", "processor": "some processor", "source": source}
    if form == "llama.cpp":
        timings = {"predicted_n": rounds + accepted + 1, "predicted_ms": 1e3 * seconds, "prompt_n": length}
        timings |= {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
        return line | {"timings": {**timings, "prompt_ms": 1e3 * prompt}}
    line |= {"rounds": rounds, "drafted": drafted, "drafting_rounds": drafting, "tokens": rounds + accepted + 1}
    apart = {"seconds": seconds, "prompt_seconds": prompt} if form == "apart" else {"seconds": seconds + prompt}
    return line | apart | {"prompt_tokens": length}


def written(folder, servers=SERVERS, each=3, seed=0, **options):
    generator, files = np.random.default_rng(seed), []
    for source, longest in servers:
        files.append(folder / f"{source}-{longest}.jsonl")
        lines = [json.dumps(answer(source, longest, generator, **options)) for _ in range(each)]
        files[-1].write_text("\n".join(lines) + "\n")
    return files


def priced(folder, files):
    words = [f"engine=[{','.join(map(str, files))}]", "track=false", f"paths.output_dir={folder / 'priced'}"]
    return timing.run(config.compose("timing", words))


@pytest.mark.parametrize("form", ["llama.cpp", "own", "apart"])
def test_the_prices_of_answers_become_a_cost_table(form, tmp_path, capsys):
    """llama.cpp tells drafting rounds but for those at a text's end, which have no room."""
    folder = priced(tmp_path, written(tmp_path, form=form))
    prices = pd.read_csv(folder / "engine.csv").set_index("price").seconds
    assert prices.tolist() == pytest.approx(PRICES, rel=0.05 if form == "llama.cpp" else 1e-6)
    costs, printed = LoadCost.load(folder / "costs.json"), capsys.readouterr().out
    engine = "llama.cpp" if form == "llama.cpp" else "an engine"
    assert f"costs of {engine}, big.gguf (Q4_K_M), some processor: 18 answers" in printed
    assert pd.read_csv(folder / "files.csv").residual.abs().max() < 0.02
    if form != "llama.cpp":
        assert costs.round(1, 4) == pytest.approx(ROUND + DRAFTING + 4 * TOKEN)
        assert costs.copying.target(1, 5) == pytest.approx(ROUND + 4 * COLUMN)
        assert costs.target(1, 300) == pytest.approx(300 * PROMPT) and costs.draft(1, 300) == pytest.approx(
            300 * DRAFT_PROMPT
        )
        assert costs.beyond(1, 9) is None and "width 13 is beyond" in costs.beyond(1, 13)
    assert LoadCost.load(costs.save(tmp_path / "again.json")).engine == costs.engine


def test_intervals_hold_the_prices():
    held = []
    for seed in range(60):
        generator = np.random.default_rng(seed)
        lines = [answer(*server, generator, 0.05, "apart") for server in SERVERS for _ in range(3)]
        _, low, high = engine_costs.regress([engine_costs.engine_answer(line) for line in lines])[0].T
        held.append((low <= PRICES) & (high >= PRICES))
    assert np.mean(held, 0).min() > 0.85 and 0.92 < np.mean(held) < 0.995


def test_vllms_counts_are_read_with_the_seconds_beside_them():
    line = json.loads(VLLM.read_text().split("\n")[0])
    (choice,) = line["choices"]
    line["usage"] = {"completion_tokens": len(choice["token_ids"]), "prompt_tokens": len(choice["prompt_token_ids"])}
    counts = line["metrics"]["speculative_decoding"]
    read = engine_costs.engine_answer({**line, "seconds": 2.5, "source": "lookup"})
    assert read.drafting_rounds == counts["num_spec_steps"] and read.drafted == counts["num_draft_tokens"]
    produced = read.rounds + counts["num_accepted_draft_tokens"] + 1
    assert line["usage"]["completion_tokens"] <= produced <= line["usage"]["completion_tokens"] + read.most
    assert read.prompt_seconds is None and read.prompt_tokens == line["usage"]["prompt_tokens"]


def test_without_lookup_a_chain_is_priced_and_copies_are_refused(tmp_path, capsys):
    folder = priced(tmp_path, written(tmp_path, SERVERS[:-1], form="own"))
    costs = LoadCost.load(folder / "costs.json")
    assert "column: unknown" in capsys.readouterr().out
    assert costs.round(1, 4) == pytest.approx(ROUND + DRAFTING + 4 * TOKEN)
    for name, words in (
        ("lookup_rate", r"copied tokens need the time of a column.*source: lookup"),
        ("block_draft_rate", "drafts that give blocks need"),
    ):
        policy = config.method(name, [f"policy.costs={folder / 'costs.json'}"]).policy
        with pytest.raises(InputError, match=words):
            policy.bind(None)
    words = ["pair.target=toy/target", "pair.draft=null", f"prompts.path={prompts_file(tmp_path)}", "batch_sizes=[1]"]
    with pytest.raises(InputError, match="copied tokens need"):
        advise.run(config.compose("advise", [*words, f"costs={folder / 'costs.json'}", f"paths.root_dir={tmp_path}"]))


def test_one_length_of_drafts_has_no_drafting_price_of_its_own(tmp_path):
    folder = priced(
        tmp_path, written(tmp_path, [("none", 0), ("draft", 4)], form="own", prices=(0.076, 0, 0.09, 0, 0, 0))
    )
    prices = pd.read_csv(folder / "engine.csv").set_index("price").seconds
    assert prices["drafted token"] == pytest.approx(0.09) and "drafting round" not in prices


def test_noise_is_said_and_nothing_is_advised(tmp_path, capsys):
    folder = priced(tmp_path, written(tmp_path, each=2, noise=0.6))
    noise = "too noisy to advise on: a (round|drafted token) takes .* s \\["
    assert re.search(noise, capsys.readouterr().out)
    words = [f"costs={folder / 'costs.json'}", "batch_sizes=[1]", "prompts=toy_math", f"paths.root_dir={tmp_path}"]
    with pytest.raises(InputError, match=noise):
        advise.run(config.compose("advise", words))


def test_a_start_under_load_is_noise(tmp_path, capsys):
    """All answers of one start take twice as long: intervals alone would not tell."""
    files = written(tmp_path, form="apart", each=8)
    lines = [json.loads(line) for line in files[2].read_text().split("\n")[:-1]]
    files[2].write_text("".join(json.dumps({**line, "seconds": 2 * line["seconds"]}) + "\n" for line in lines))
    folder = priced(tmp_path, files)
    assert "the prices miss the seconds of a file by" in capsys.readouterr().out
    assert LoadCost.load(folder / "costs.json").engine.noise


GOOD = {"model": "m", "rounds": 40, "drafted": 80, "seconds": 9.0, "source": "draft", "tokens": 96}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": None}, "expected seconds, a number of at least 0, got None"),
        ({"seconds": 0}, "this engine reports none"),
        ({"source": None}, "expected source: draft or lookup of 80 drafted tokens, got None"),
        ({"source": "none"}, "expected source: draft or lookup"),
        ({"drafting_rounds": 41}, "drafted tokens in some of the rounds"),
        ({"rounds": -1}, "rounds, a number of at least 0"),
        ({"rounds": True}, "rounds, a number of at least 0"),
    ],
)
def test_a_line_that_says_too_little_is_named(change, message, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **change}) + "\n")
    with pytest.raises(InputError, match=f"a.jsonl, line 2: .*{message}"):
        engine_costs.read_answers(path)
    path.write_text('{"text": "hello"}\n')
    with pytest.raises(InputError, match=r"line 1: expected counts: `timings`"):
        engine_costs.read_answers(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{**GOOD, "drafted": 0, "source": "none"}] * 4, "K = 0.*got no drafts"),
        ([GOOD] * 4, "K = 0.*got drafts alone"),
        ([GOOD] * 4 + [{**GOOD, "drafted": 0, "source": "none"}], "do not tell the prices .* two or more of every K"),
        ([GOOD, {**GOOD, "model": "other"}], "one engine, model and processor, got m and other"),
    ],
)
def test_answers_that_tell_no_price_are_refused(lines, message):
    with pytest.raises(InputError, match=message):
        engine_costs.regress([engine_costs.engine_answer(line) for line in lines])


def test_prices_below_zero_are_refused():
    generator = np.random.default_rng(0)
    prices = (0.1, 0, -0.05, 0, 0, 0)
    servers = [("none", 0), ("draft", 1), ("draft", 1)]
    lines = [answer(*server, generator, form="own", prices=prices) for server in servers for _ in range(3)]
    with pytest.raises(InputError, match="prices above 0, got -0.05 s for a drafted token"):
        engine_costs.regress([engine_costs.engine_answer(line) for line in lines])


def test_a_round_that_pays_a_forward_pass_and_sends_nothing_costs_what_the_engine_takes(tmp_path):
    """By counts of the simulation, for the engine's threshold and for a fixed length."""
    costs = LoadCost.load(priced(tmp_path, written(tmp_path, form="own")) / "costs.json")
    pair, sampling = ModelPair.toy(), Sampling(0.0, max_new_tokens=24)
    (text,) = decode(pair, ["3 + 4 * 2 ="], config.method("autoregressive"), sampling)
    trace = Recorder(pair, sampling, 8).record([(text.prompt_ids, text.token_ids)], [0])
    for name, words in (("p_min", ["policy.threshold=.9"]), ("speculative", ["policy.num_drafted=3"])):
        results = serve(trace, [1], config.method(name, words).bind(pair).policy, costs, Load(1), [0])
        calls, rounds = results.forwards
        drafted = int(results.num_drafted.sum())
        least = ROUND * rounds + (TOKEN - COLUMN) * calls + COLUMN * drafted
        per_round = (results.seconds.sum() - least) / DRAFTING
        assert per_round == pytest.approx(round(per_round)) and 0 < round(per_round) <= rounds
        if name == "p_min":
            assert drafted < calls, "a forward pass showed that its token is not sent"
            assert round(per_round) == rounds or calls < rounds


def test_the_advice_says_whose_costs_it_is_and_exports_the_engines_threshold(tmp_path, capsys):
    """Drafts that cost next to nothing pay; those of the measured engine do not."""
    files = written(tmp_path, form="own", prices=(0.076, 0.0, 0.0021, 0.002, 0, 0))
    cheap = priced(tmp_path, files) / "costs.json"
    (tmp_path / "dear").mkdir()
    dear = priced(tmp_path / "dear", written(tmp_path / "dear", form="own")) / "costs.json"
    words = ["pair=toy", f"prompts.path={prompts_file(tmp_path)}", "prompts.limit=null", "sampling.temperature=0"]
    words += [
        "~grid",
        "+grid={autoregressive: {}, p_min: {policy: {threshold: [.3]}}, speculative: {policy: {num_drafted: [1]}}}",
    ]
    words += [
        "sampling.max_new_tokens=12",
        "resamples=50",
        "batch_sizes=[1]",
        "track=false",
        f"paths.root_dir={tmp_path}",
    ]
    for costs, drafts in ((cheap, True), (dear, False)):
        folder = advise.run(config.compose("advise", [*words, f"costs={costs}"]))
        text, exported = (folder / "advice.md").read_text(), (folder / "exports" / "llama_cpp.txt").read_text()
        whose = "costs of an engine, big.gguf (Q4_K_M), some processor"
        assert text.startswith(f"# Advice ({whose})") and f"({whose})" in text.split("batch 1: ")[1].split("\n")[0]
        assert f"batch size 1; {whose};" in capsys.readouterr().out and "not measured" not in text
        assert ("--spec-draft-n-max 8 --spec-draft-p-min 0.3" in exported) == drafts
        assert exported.startswith("# do not draft") != drafts and ("do not draft" in text) != drafts
