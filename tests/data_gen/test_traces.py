"""Traces: their acceptance draws follow the distribution of speculative sampling, and the stage is resumable and
refuses what does not fit.
"""

import json
import shutil
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from analysis.replay.fit_samples import samples
from data_gen import mix, responses, traces
from data_gen.held_out import load_frozen
from data_gen.texts import read_jsonl, read_responses, read_sequences
from toolkit import ModelPair
from toolkit import decode as decode_command
from toolkit.config import compose, method
from toolkit.decoding import decode
from toolkit.engine.tabular import TabularModel
from toolkit.errors import InputError
from toolkit.runs.stage import checksum, read_manifest
from toolkit.sampling import Sampling, warp
from toolkit.stopping import Bounded, Confidence, Fixed
from toolkit.trace import Trace, join
from toolkit.trace.record import Recorder
from toolkit.trace.record_by_start import DEEPEST, depth_of, depth_that_pays
from toolkit.trace.replay import by_starts, replay
from toolkit.trace.store import read_traces
from toolkit.trace.trace import Rows
from toolkit.training.recorded import TracedData

V, END, ROWS = 3, 0, 6000
PLAIN = Sampling()


def table_pair(seed=0):
    generator = torch.Generator().manual_seed(seed)
    target, draft = (TabularModel.random(V, 1, generator, sharpness=1.2) for _ in range(2))
    return ModelPair(target=target, draft=draft, tokenizer=Digits(), end_ids=(END,))


class Digits:
    """A tokenizer whose tokens are digits."""

    def get_vocab(self):
        return {str(token): token for token in range(V)}

    def decode(self, token_ids, skip_special_tokens):
        return "".join(map(str, token_ids))


def warped(table, text, sampling):
    """What the token after a text is drawn from, by a table of one token's memory."""
    seen = torch.zeros(V, dtype=torch.bool)
    seen[text] = True
    return warp(table[text[-1]].log(), sampling, seen)


def is_whole(text, length, sampling):
    written = "".join(map(str, text))
    return bool(text) and (text[-1] == END or len(text) == length or any(stop in written for stop in sampling.stop))


def texts_of(target, prompt, length, sampling):
    """Probability of every text that plain decoding can end in."""
    whole, open_ = {}, {(): 1.0}
    while open_:
        text, prob = open_.popitem()
        for token, share in enumerate(warped(target.probs, [*prompt, *text], sampling).tolist()):
            longer = (*text, token)
            (whole if is_whole(list(longer), length, sampling) else open_)[longer] = prob * share
    return whole


def sampled_texts(target, prompt, length, count, sampling=PLAIN):
    distribution = texts_of(target, prompt, length, sampling)
    sequences, probs = zip(*distribution.items(), strict=True)
    chosen = torch.multinomial(torch.tensor(probs), count, replacement=True, generator=torch.Generator().manual_seed(1))
    return [list(sequences[i]) for i in chosen.tolist()], distribution


def live_distribution(pair, prompt, length, num_drafted, threshold, sampling=PLAIN):
    """Distribution of (text, draft calls, target calls, discarded) of live decoding, by enumeration of drafts,
    acceptance draws and extras.
    """
    q = pair.draft.probs
    p_of, q_of = (
        cache(lambda text, table=m.probs: warped(table, list(text), sampling)) for m in (pair.target, pair.draft)
    )
    distribution = {}

    def rounds(text, calls, targets, discarded, prob):
        if is_whole(text, length, sampling):
            key = (tuple(text), calls, targets, discarded)
            distribution[key] = distribution.get(key, 0.0) + prob
            return
        drafting(text, [], calls, targets, discarded, prob)

    def drafting(text, drafted, calls, targets, discarded, prob):
        probs = q_of((*prompt, *text, *drafted)).tolist()
        limit = min(num_drafted, length - len(text) - 1)
        ended = bool(drafted) and drafted[-1] == END
        before = (prompt + text + drafted)[-2] if drafted else None
        stopped = bool(drafted) and threshold is not None and float(q[before, drafted[-1]]) < threshold
        if len(drafted) == limit or ended or stopped:
            judge(text, drafted, 0, calls + len(drafted), targets + 1, discarded, prob)
            return
        for token in range(V):
            drafting(text, [*drafted, token], calls, targets, discarded, prob * probs[token])

    def judge(text, drafted, accepted, calls, targets, discarded, prob):
        if prob < 1e-15:
            return
        p, q = (one((*prompt, *text, *drafted[:accepted])) for one in (p_of, q_of))
        if accepted == len(drafted):
            for token in range(V):
                finish(text, drafted, accepted, token, calls, targets, discarded, prob * float(p[token]))
            return
        token = drafted[accepted]
        accept = min(1.0, float(p[token] / q[token]))
        judge(text, drafted, accepted + 1, calls, targets, discarded, prob * accept)
        rest = (p - q).clamp(min=0)
        for extra in range(V):
            share = float(rest[extra] / rest.sum()) if accept < 1 else 0.0
            finish(text, drafted, accepted, extra, calls, targets, discarded, prob * (1 - accept) * share)

    def finish(text, drafted, accepted, extra, calls, targets, discarded, prob):
        if prob < 1e-15:
            return
        new = [*drafted[:accepted], extra]
        ends = (n for n in range(1, len(new)) if is_whole([*text, *new[:n]], length, sampling))
        new = new[: next(ends, len(new))]
        rounds(text + new, calls, targets, discarded + len(drafted) + 1 - len(new), prob)

    rounds([], 0, 0, 0, 1.0)
    return distribution


ENDED = {"stop": ("21", "12")}
PENALIZED = {"repetition_penalty": 1.8}


@pytest.mark.parametrize(("num_drafted", "threshold", "options"), [
    (3, 0.4, {}), (2, None, {**ENDED, **PENALIZED}), pytest.param(2, 0.4, PENALIZED, marks=pytest.mark.slow),
    *(pytest.param(k, None, options, marks=pytest.mark.slow) for k in (1, 3) for options in ({}, ENDED, PENALIZED)),
])  # fmt: skip
def test_replayed_texts_and_counts_follow_the_distribution_of_live_decoding(num_drafted, threshold, options):
    pair, prompt, length = table_pair(), [1], 4
    sampling = Sampling(max_new_tokens=length, **options)
    sequences, distribution = sampled_texts(pair.target, prompt, length, ROWS, sampling)
    recorder = Recorder(pair, sampling, max_drafted=3)
    trace = recorder.record([(prompt, text) for text in sequences], range(ROWS))
    policy = Fixed(num_drafted) if threshold is None else Confidence(threshold)
    counts = by_starts(trace, Bounded(policy, 1, num_drafted)).counts
    exact = live_distribution(pair, prompt, length, num_drafted, threshold, sampling)
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-9)
    for text, prob in distribution.items():
        assert sum(c for key, c in exact.items() if key[0] == text) == pytest.approx(prob, abs=1e-9)
    counted = {}
    for i, text in enumerate(sequences):
        key = (tuple(text), *(int(counts[n][i]) for n in ("num_draft_calls", "num_target_calls", "num_discarded")))
        counted[key] = counted.get(key, 0) + 1
    assert counted.keys() <= {key for key, prob in exact.items() if prob > 0}
    tested = {key: prob for key, prob in exact.items() if prob * ROWS >= 5}
    statistic = sum((counted.get(key, 0) - ROWS * c) ** 2 / (ROWS * c) for key, c in tested.items())
    freedom = len(tested)
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5 + 5


def test_every_drawn_token_has_a_draw_of_its_own():
    """The target says 0, the draft anything: what is drafted in its place and what follows are independent and uniform."""
    count, rows = 4, 3000
    target = torch.full((count, count), 1e-9, dtype=torch.float64)
    target[:, 0] = 1 - 3e-9
    even = torch.full((count, count), 1 / count, dtype=torch.float64)
    pair = ModelPair(target=TabularModel(target), draft=TabularModel(even), end_ids=())
    trace = Recorder(pair, Sampling(max_new_tokens=5), 4).record([([1], [0] * 5)] * rows, range(rows))
    firsts = trace.text_first[:-1]
    rejected = firsts[~trace.accepted[firsts]]
    assert len(rejected) == pytest.approx(0.75 * rows, rel=0.1)
    assert bool((trace.roll_length[rejected] == 3).all())
    path = torch.stack(
        [trace.tokens[rejected], *(trace.tokens[trace.roll_first[rejected] + depth] for depth in range(3))]
    )
    assert bool((path[0] > 0).all())
    following = firsts + 1  # of the same text: rejected here, too, in three texts of four
    both = ~trace.accepted[firsts] & ~trace.accepted[following]
    pairs = [(path[0], path[1]), (path[1], path[2]), (path[2], path[3]), (path[0], path[2])]
    pairs += [(trace.tokens[firsts[both]], trace.tokens[following[both]])]
    for one, other in pairs:
        table = torch.zeros(count, count).index_put_((one.long(), other.long()), torch.ones(len(one)), accumulate=True)
        table = table[table.sum(1) > 0][:, table.sum(0) > 0]
        expected = float(table.sum()) / table.numel()
        freedom = table.numel() - 1
        statistic = float(((table - expected) ** 2 / expected).sum())
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_texts_that_a_stop_string_would_have_ended_are_refused():
    recorder = Recorder(table_pair(), Sampling(max_new_tokens=4, stop=("21",)), 3)
    recorder.record([([1], [1, 2, 1]), ([2], [1, 1, 1, 2])], [0, 1])
    with pytest.raises(InputError, match="goes on after a stop string"):
        recorder.record([([1], [2, 1, 1, 1])], [0])
    with pytest.raises(InputError, match="neither by an end of text, nor by a stop string nor by max_new_tokens=4"):
        recorder.record([([1], [1, 2])], [0])


def test_folders_that_end_by_different_limits_are_not_recorded_together(tiny_responses, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_responses, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["sampling"]["max_new_tokens"] += 1
    manifest["checksum"] = checksum(manifest)
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="differ in target or sampling"):
        read_sequences([str(tiny_responses), str(other)], None)


def config(folder, responses, *overrides):
    return compose("traces", [f"responses={responses}", f"paths.output_dir={folder}", "max_drafted=6", *overrides])


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory):
    from toolkit import generate

    pair = ModelPair.toy()
    prompts = [f"Q: Spell {word}.\nA:" for word in ("river", "moon", "stone", "cloud", "tree")]
    generations = generate(pair, prompts, method="autoregressive", max_new_tokens=12)
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt_ids": g.prompt_ids, "token_ids": g.token_ids}) for g in generations))
    return path


SAMPLED = "sampling={temperature: 1.0, max_new_tokens: 12}"


def test_an_interrupted_recording_goes_on_to_the_same_traces(texts_file, tmp_path, monkeypatch):
    options = (SAMPLED, "shard_size=2", "replicates=2", "hidden=true")
    whole = read_traces(traces.run(config(tmp_path / "apart" / "whole", texts_file, *options)), None)
    recorded = Recorder.recorded
    calls = []

    def dies_at_third(self, sequences, rows, others):
        calls.append(rows)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return recorded(self, sequences, rows, others)

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "recorded", dies_at_third)
        with pytest.raises(KeyboardInterrupt):
            traces.run(config(tmp_path / "cut", texts_file, *options))
    with pytest.raises(InputError, match="not finished"):
        read_traces(tmp_path / "cut")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) == 2
    again = read_traces(traces.run(config(tmp_path / "cut", texts_file, *options)), None)
    assert whole.num_texts == 10
    for name, value in vars(whole).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(-1), getattr(again, name).nan_to_num(-1)), name
    first, second = (read_traces(tmp_path / "apart" / "whole", replicate) for replicate in (0, 1))
    assert not torch.equal(first.accepted, second.accepted)


def draft_without(tiny_pair, folder, tokens):
    """The tiny draft with embeddings that are not numbers for these tokens."""
    shutil.copytree(tiny_pair / "draft", folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][tokens] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("command", ["decode", "traces", "mix"])
def test_rows_that_a_broken_draft_spoils_fail_with_their_reason(command, tiny_pair, tiny_responses, tmp_path, capsys):
    """The others are made as ever; where all of them fail, the command does."""
    rows = [json.loads(line) for line in (tiny_responses.parent / "prompts.jsonl").read_text().splitlines()]
    seen = Counter(token for row in read_sequences(str(tiny_responses), None).rows for token in set(row["prompt_ids"]))
    some = [token for token, count in seen.items() if 0 < count <= 12][:1]
    given = [f"responses={tiny_responses}"]
    if command == "decode":
        given = ["prompts=jsonl", f"prompts.path={tiny_responses.parent}/prompts.jsonl", "method=speculative"]
        given += ["sampling.max_new_tokens=3", "batch_size=16"]
    run = {"decode": decode_command.run, "traces": traces.run, "mix": mix.run}[command]
    for tokens in (some, list(seen)):
        draft = draft_without(tiny_pair, tmp_path / f"draft-{len(tokens)}", tokens)
        options = [
            f"pair.target={tiny_pair}/target",
            f"pair.draft={draft}",
            f"paths.output_dir={tmp_path}/{len(tokens)}",
        ]
        cfg = compose(command, [*given, *options, *(["max_drafted=1"] if command == "traces" else [])])
        if tokens is not some:
            with pytest.raises(InputError, match=f"^every one of {len(rows)} prompts failed, first: .*not numbers"):
                run(cfg)
            continue
        facts = read_manifest(run(cfg))
        assert 0 < facts["num_failed"] < len(rows)
        assert "the models' distributions hold values that are not numbers" in facts["first_error"]
        if command != "decode":
            assert facts["first_error"] in capsys.readouterr().out


def test_one_impossible_token_is_refused_and_a_tie_is_not():
    probs = torch.tensor([[0.0, 0.2, 0.8], [0.0, 0.5, 0.5], [0.1, 0.6, 0.3]], dtype=torch.float64)
    pair = ModelPair(target=TabularModel(probs), draft=TabularModel(probs.flip(0)), end_ids=())
    greedy = Recorder(pair, Sampling(temperature=0.0, max_new_tokens=4), 2)
    greedy.record([([0], [2, 1, 1, 1]), ([0], [2, 1, 2, 1])], [0, 1])  # behind 1, both 1 and 2 are most probable
    with pytest.raises(InputError, match=r"response 5: token 2 \(2\) has probability 0"):
        greedy.record([([0], [2, 2, 1, 1])], [5])
    nucleus = Recorder(pair, Sampling(top_p=0.6, max_new_tokens=2), 2)
    nucleus.record([([0], [2, 2])], [0])  # behind 2, token 1 alone reaches it, by rounding
    with pytest.raises(InputError, match=r"token 1 \(1\) has probability 0"):
        nucleus.record([([0], [1, 2])], [0])
    cut = Recorder(pair, Sampling(top_k=1, max_new_tokens=2), 2)
    with pytest.raises(InputError, match=r"token 2 \(2\) has probability 0"):
        cut.record([([0], [2, 2])], [0])


def test_states_of_several_files_stay_where_they_are(texts_file, tmp_path, capsys):
    options = [SAMPLED, "hidden=true", "shard_size=2"]
    folder = traces.run(config(tmp_path / "states", texts_file, *options))
    assert " files, about " in capsys.readouterr().err, "the size is said before the work"
    mapped = read_traces(folder)
    assert isinstance(mapped.hidden, Rows)
    whole = join([Trace.load(path) for path in sorted(folder.glob("*-r0.safetensors"))])
    assert isinstance(whole.hidden, torch.Tensor)
    assert mapped.hidden.shape == whole.hidden.shape and mapped.num_bytes == whole.num_bytes
    for index in (torch.arange(len(whole.hidden)), torch.tensor([[7, 0], [3, len(whole.hidden) - 1]])):
        assert torch.equal(mapped.hidden[index], whole.hidden[index])
    again = Trace.load(mapped.save(tmp_path / "again.safetensors"))
    assert torch.equal(again.hidden, whole.hidden)


def test_texts_beside_the_tokens_tell_the_tokenizer(texts_file, tmp_path):
    pair, lines = ModelPair.toy(), [json.loads(line) for line in texts_file.read_text().splitlines()]
    for line in lines:
        line["text"] = pair.text(line["token_ids"], line["prompt_ids"]).rstrip()[:20]
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text("\n".join(map(json.dumps, lines)))
    assert traces.run(config(tmp_path / "a", good, SAMPLED)).exists()
    lines[2]["text"] = "Es war einmal"
    bad.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(InputError, match="line 3: the text begins 'Es war einmal', .* another tokenizer"):
        traces.run(config(tmp_path / "b", bad, SAMPLED))


def test_what_does_not_fit_is_refused(texts_file, tmp_path, tiny_responses, capsys):
    traces.run(config(tmp_path / "dry", texts_file, SAMPLED, "dry_run=true"))
    assert "would take about" in capsys.readouterr().out and not (tmp_path / "dry").exists()
    for answers, words, message in (
        (texts_file, [], "does not say how its tokens were drawn"),
        (tiny_responses, [], "another target"),
        (texts_file, ["sampling={temperature: 0.0, max_new_tokens: 12}"], "probability 0 under this target"),
    ):
        with pytest.raises(InputError, match=message):
            traces.run(config(tmp_path / "refused", answers, *words, "overwrite=true"))
    with pytest.raises(InputError, match="manifest says temperature"):
        read_sequences(str(tiny_responses), Sampling(temperature=0.3))
    bad = tmp_path / "bad.jsonl"
    for ids in ('"no"', "[]", "[true]", "[-100]", "[1.5]", f"[{2**63}]"):
        bad.write_text('{"prompt_ids": [1], "token_ids": ' + ids + "}")
        with pytest.raises(InputError, match="line 1"):
            read_jsonl(bad, Sampling())
    whole = texts_file.read_text().rstrip() + "\n"
    bad.write_text(whole + '{"prompt_ids": [1], "token_ids": [1024]}\n')
    with pytest.raises(InputError, match=r"response \d+: expected token ids in \[0, 1024\), .* got 1024"):
        traces.run(config(tmp_path / "beyond", bad, SAMPLED))
    assert not (tmp_path / "beyond").exists(), "told before anything is recorded"


# -- how deep a recording rolls out -----------------------------------------------------------------------------------


def test_depth_by_hand():
    assert depth_of([torch.full((30,), 0.2)]) == 3, ".04 at two tokens, .008 at three"
    assert depth_of([torch.full((30,), 0.01)]) == 1
    assert depth_of([torch.full((30,), 0.99)]) == DEEPEST
    assert depth_of([torch.full((5,), 0.99)]) == 6, "no text is longer"
    greedy = torch.tensor([1.0, 1.0, 0.0, 1.0])  # at temperature 0 alpha is 0 or 1; one of three pairs is accepted
    assert depth_of([greedy]) == 3


def test_a_draft_that_knows_nothing_pays_one_token_and_one_that_knows_all_pays_any():
    toy = ModelPair.toy()
    nothing = deepcopy(toy.draft)
    for parameter in nothing.parameters():
        parameter.data.zero_()
    prompts, sampling = [e.prompt for e in load_frozen("math", "dev")[:4]], Sampling(1.0, max_new_tokens=24, seed=1)
    plain = decode(toy, prompts, method("autoregressive"), sampling)
    sequences = [(g.prompt_ids, g.token_ids) for g in plain]
    assert depth_that_pays(ModelPair(toy.target, toy.target, toy.tokenizer), sequences, sampling) == DEEPEST
    assert depth_that_pays(ModelPair(toy.target, nothing, toy.tokenizer), sequences, sampling, [None, 0.0]) <= 2


def test_a_recording_says_how_deep_it_is_and_refuses_deeper_policies(tmp_path):
    pair, sampling = ModelPair.toy(), Sampling(0.0, max_new_tokens=8)
    plain = decode(pair, [e.prompt for e in load_frozen("code", "dev")[:4]], method("autoregressive"), sampling)
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": g.prompt_ids, "token_ids": g.token_ids}) + "\n" for g in plain))
    words = [f"responses={path}", "sampling={temperature: 0, max_new_tokens: 8}", f"paths.root_dir={tmp_path}"]
    folder = traces.run(compose("traces", [*words, "max_drafted=auto", "heads={}"]))
    depth = read_manifest(folder)["max_drafted"]
    assert depth == read_traces(folder).max_drafted <= 9
    with pytest.raises(InputError, match=f"max_drafted={depth}"):
        replay(read_traces(folder), Bounded(Fixed(depth + 1), 1, depth + 1))


def test_responses_keep_the_grammars_that_their_recordings_are_made_under(tmp_path):
    """A row with its own, one with the sampling's; what knows no grammar refuses the folders in one line."""
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": 1, "prompt": "Q: 3 + 4 =\nA:", "grammar": {"type": "boolean"}},
        {"id": 2, "prompt": "Q: 3 + 4 =\nA:"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"prompts.path={path}", "sampling.max_new_tokens=12", f"paths.output_dir={tmp_path / 'responses'}"]
    folder = responses.run(
        compose("responses", [*words, 'sampling.grammar="(sum: [0-9]{2}, )+"', "prompts.limit=null"])
    )
    done = read_sequences(str(folder), None).rows
    assert [row.get("grammar") for row in done] == [{"type": "boolean"}, None] and done[0]["text"] in ("true", "false")
    recorded = traces.run(config(tmp_path / "traces", folder, "hidden=true"))
    trace = read_traces(recorded, grammars=True)
    assert 0 < int(trace.certain[: trace.num_positions].sum()) < trace.num_positions
    whole, asked = samples(replace(trace, certain=None), 6), samples(trace, 6)
    assert len(whole.steps) == trace.num_positions and not bool(trace.certain[asked.steps].any())
    for call in (lambda: read_traces(recorded), lambda: TracedData(recorded, ModelPair.toy().draft).setup()):
        with pytest.raises(InputError, match="expected a recording without a grammar"):
            call()
    with pytest.raises(InputError, match="expected responses without a grammar"):
        read_responses(folder)
    with pytest.raises(InputError, match="expected a number beside a grammar"):
        traces.run(config(tmp_path / "auto", folder, "max_drafted=auto"))
