"""Recordings of drafts that read the target's states: against one made step by step, against live decoding, refusals."""

from dataclasses import replace

import pytest
import torch

from analysis import sweep
from analysis.tables.files import read_table
from analysis.tables.rows import COUNTS
from data_gen import traces
from tests.analysis.table_sweeps import sweep_config
from tests.toolkit.test_eagle3 import unrolled_logits
from toolkit import ModelPair, config, train
from toolkit.acceptance import AcceptanceHead
from toolkit.decoding import Sampling, decode
from toolkit.drafts.eagle3 import format as eagle3
from toolkit.drafts.eagle3.training import Unrolled
from toolkit.errors import InputError
from toolkit.models.pair import load_draft
from toolkit.sampling import row_generator, warp
from toolkit.stopping import Bounded, Fixed
from toolkit.testing import ragged_prompts, tiny_eagle3, tiny_llama
from toolkit.trace import Trace, join
from toolkit.trace.bounds import oracle, true_probability
from toolkit.trace.record_by_start import recorder_of
from toolkit.trace.replay import by_starts, replay
from toolkit.trace.steps import Geometry, step_after, step_at
from toolkit.trace.store import read_traces
from toolkit.training import TracedData
from toolkit.training.recorded import visited

LENGTH, MOST = 9, 5


def pair_of(dtype=torch.float64, end_ids=(0, 5)):
    """A target, and a draft near enough that some of its tokens are accepted."""
    target = tiny_llama(32, 3, 1, dtype)
    draft = tiny_eagle3(target, kept=torch.arange(target.config.vocab_size))
    draft.lm_head.rows.weight.data *= 0.1
    target.lm_head.weight.data *= 0.3
    return ModelPair(target=target, draft=draft, end_ids=end_ids)


def texts_of(pair, count, sampling, prompts=None):
    prompts = prompts or [[*prompt, 7] for prompt in ragged_prompts(count)]
    plain = decode(pair, prompts, config.method("autoregressive"), sampling)
    return [(generation.prompt_ids, generation.token_ids) for generation in plain]


@torch.no_grad()
def target_probs(pair, tokens, sampling):
    """p of the next token, from a forward pass of its own."""
    seen = torch.zeros(1, pair.vocab_size, dtype=torch.bool)
    seen[0, tokens] = True
    return warp(pair.target(torch.tensor([tokens])).logits[:, -1], sampling, seen)[0]


class Reference:
    """The chain from one start, step by step: one uncached pass of each model per token."""

    def __init__(self, recorder, prompt, produced, row, start):
        pair, sampling, self.steps, self.run = recorder.pair, recorder.sampling, [], 0
        generator = row_generator(sampling.seed + 1_000_003 * (recorder.replicate + 1), row)
        draws = torch.rand(recorder.max_drafted, len(produced), 2, generator=generator, dtype=torch.float64)[:, start]
        text, chain = [*prompt, *produced[:start]], []
        for depth in range(recorder.max_drafted):
            position = start + depth
            if depth and (chain[-1] in pair.ends(sampling) or position >= sampling.max_new_tokens - 1):
                return
            logits = unrolled_logits(pair.target, pair.draft, text, chain)[-1]
            seen = torch.zeros(1, pair.vocab_size, dtype=torch.bool)
            seen[0, text + chain] = True
            q = warp(logits.unsqueeze(0), sampling, seen)[0]
            p = target_probs(pair, text + chain, sampling)
            follows = self.run == depth and position < len(produced)
            if follows:
                token = produced[position]
                accepted = bool(draws[depth, 0] < min(1.0, float(q[token] / p[token])))
                self.run += accepted
                weights = (q - p).clamp(min=0)
                token = token if accepted else inverse(weights, draws[depth, 1])
            else:
                token = inverse(q, draws[depth, 1])
            known = follows or recorder.upper_bound
            self.steps.append((
                token, float(q[token]), min(1.0, float(p[token] / q[token])) if known else None,
                float(torch.minimum(p, q).sum()) if known else None,
            ))  # fmt: skip
            chain.append(token)


def inverse(weights, uniform):
    sums = weights.cumsum(0)
    return int((sums <= uniform * sums[-1]).sum())


@pytest.mark.parametrize(("upper_bound", "penalty", "window"), [(False, 1.3, None), (True, 1.0, 3)])
def test_every_step_of_a_recording(upper_bound, penalty, window):
    pair = pair_of()
    pair.draft.config.sliding_window = window
    sampling = Sampling(2.0, max_new_tokens=LENGTH, seed=4, top_k=60, repetition_penalty=penalty)
    sequences = [*texts_of(pair, 3, sampling), *texts_of(pair, 1, replace(sampling, seed=9), [[11]])]
    recorder = recorder_of(pair, sampling, MOST, upper_bound=upper_bound, hidden=True)
    trace = recorder.record_all(sequences, range(4), batch_size=2)
    geometry, runs = Geometry.of(trace), []
    assert trace.hidden.shape == (trace.num_steps, pair.draft.config.hidden_size)
    for row, (prompt, produced) in enumerate(sequences):
        for start in range(len(produced)):
            step = torch.tensor([int(trace.text_first[row]) + start])
            expected = Reference(recorder, prompt, produced, row, start)
            runs.append(expected.run)
            assert int(geometry.run[step]) == expected.run
            for depth, (token, prob, accept_prob, alpha) in enumerate(expected.steps, 1):
                index, exists = step_at(trace, geometry, step, depth)
                assert bool(exists) and int(trace.tokens[index]) == token
                after, follows = step_after(trace, index)
                assert bool(follows) == (depth < len(expected.steps))
                assert not bool(follows) or int(after) == int(step_at(trace, geometry, step, depth + 1)[0])
                assert float(trace.draft_prob[index]) == pytest.approx(prob, abs=1e-6)
                for values, value in ((trace.accept_prob, accept_prob), (trace.alpha, alpha)):
                    got = float(values[index])
                    assert got != got if value is None else got == pytest.approx(value, abs=1e-6)
            assert not bool(step_at(trace, geometry, step, len(expected.steps) + 1)[1])
    assert min(runs) == 0 and max(runs) >= 2, "some rounds are rejected at once, some go on"


@pytest.mark.parametrize("method", ["speculative", "adaedl"])
def test_replay_counts_what_greedy_decoding_counts(method):
    pair, sampling = pair_of(end_ids=()), Sampling(temperature=0.0, max_new_tokens=24)
    pair.draft.lm_head.rows.weight.data.copy_(pair.target.lm_head.weight[:, :16])
    method = replace(config.method(method), max_drafted=MOST)
    live = decode(pair, [[7], *ragged_prompts(6)], method, sampling)  # a prompt of one token has no state before it
    sequences = [(generation.prompt_ids, generation.token_ids) for generation in live]
    trace = recorder_of(pair, sampling, MOST).record(sequences, range(len(sequences)))
    replayed = replay(trace, Bounded(method.policy, method.min_drafted, method.max_drafted))
    assert 0 < int(trace.run.sum()) < trace.num_positions * MOST
    for name, values in replayed.counts.items():
        assert values.tolist() == [getattr(generation.counts, name) for generation in live], name


@pytest.mark.parametrize("method", ["speculative", "adaedl"])
def test_replay_counts_what_decoding_counts_after_prompts_of_one_token(method):
    """Five tokens, so that some drafted tokens are accepted: five drafts, each with five prompts of one and one of two."""
    method, sampling = replace(config.method(method), max_drafted=MOST), Sampling(temperature=0.0, max_new_tokens=10)
    first_rounds = []
    for seed in range(5):
        target = tiny_llama(32, 3, seed, torch.float64, vocab_size=5)
        pair = ModelPair(target, tiny_eagle3(target, kept=torch.arange(5), seed=seed), end_ids=())
        live = decode(pair, [*([token] for token in range(5)), [3, 1]], method, sampling, batch_size=6)
        sequences = [(generation.prompt_ids, generation.token_ids) for generation in live]
        trace = recorder_of(pair, sampling, MOST).record(sequences, range(len(sequences)))
        replayed = replay(trace, Bounded(method.policy, method.min_drafted, method.max_drafted))
        for name, values in replayed.counts.items():
            assert values.tolist() == [getattr(generation.counts, name) for generation in live], (seed, name)
        first_rounds += [generation.rounds[0].num_accepted for generation in live]
    assert min(first_rounds) == 0 and max(first_rounds) > 1


@pytest.mark.parametrize("penalty", [1.0, 1.4])
def test_a_draft_with_fewer_rows_is_recorded_with_tokens_it_has(penalty):
    target = tiny_llama(32, 3, 0, torch.float64, 61)
    draft = tiny_eagle3(target)
    pair, sampling = (
        ModelPair(target=target, draft=draft, end_ids=()),
        Sampling(temperature=0.0, max_new_tokens=9, repetition_penalty=penalty),
    )
    prompts = [[9, 30, 12, 8, 6], [7]]
    sequences = [
        (prompt, generation.token_ids)
        for prompt, generation in zip(
            prompts, decode(pair, prompts, config.method("autoregressive"), sampling), strict=True
        )
    ]
    trace = recorder_of(pair, sampling, 4).record(sequences, range(2))
    assert set(trace.tokens.tolist()) <= set(draft.lm_head.kept.tolist())
    method = config.method("speculative", ["policy.num_drafted=3"])
    live = [generation.counts for generation in decode(pair, prompts, method, sampling)]
    assert [replay(trace, method.bind(pair).policy).per_text.sum(0)[0]] == [sum(count.num_drafted for count in live)]


def test_replay_counts_are_distributed_as_those_of_sampling():
    pair, sampling = pair_of(end_ids=()), Sampling(max_new_tokens=12, seed=1)
    prompts = [ragged_prompts(3)[number % 3] for number in range(200)]
    live = decode(pair, prompts, config.method("speculative", ["policy.num_drafted=3"]), sampling, batch_size=50)
    recorder = recorder_of(pair, sampling, 3)
    trace = recorder.record([(g.prompt_ids, g.token_ids) for g in live], range(200))
    replayed = by_starts(trace, Bounded(Fixed(3), 3, 3))
    drafted = torch.tensor([generation.counts.num_drafted for generation in live]).double()
    counted = torch.from_numpy(replayed.counts["num_drafted"]).double()
    difference = drafted - counted
    assert abs(float(difference.mean())) < 4 * float(difference.std()) / 200**0.5
    assert float(difference.std()) > 0, "the acceptance draws are its own"


def test_files_joins_and_labels(tmp_path):
    pair, sampling = pair_of(), Sampling(max_new_tokens=LENGTH, seed=4)
    sequences = texts_of(pair, 4, sampling)
    recorder = recorder_of(pair, sampling, MOST, upper_bound=True)
    trace = recorder.record(sequences, range(4))
    read = Trace.load(trace.save(tmp_path / "trace.safetensors"))
    again = join([recorder.record(sequences[:1], [0]), recorder.record(sequences[1:], [1, 2, 3])])
    for other in (read, again):
        assert torch.equal(other.run, trace.run) and torch.equal(other.tokens, trace.tokens)
        assert torch.allclose(other.accept_prob, trace.accept_prob)
    start, depth, step, more = visited(trace)
    geometry = Geometry.of(trace)
    assert torch.equal(
        step, torch.cat([step_at(trace, geometry, s[None], int(d))[0] for s, d in zip(start, depth, strict=True)])
    )
    assert bool((trace.run[start] >= depth - 1).all()) and bool((trace.run[start][more] >= depth[more]).all())
    assert not bool(trace.alpha[step].isnan().any())
    assert true_probability(trace, 0.1).rate > 0


def test_what_is_refused():
    pair, sampling = pair_of(), Sampling(max_new_tokens=LENGTH, seed=4)
    sequences = texts_of(pair, 1, sampling)

    def early(step):
        return step.tokens

    early.num_history = 2
    with pytest.raises(InputError, match="head early reads earlier positions"):
        recorder_of(pair, sampling, MOST, {"early": early}).record(sequences, [0])
    trace = recorder_of(pair, sampling, MOST).record(sequences, [0])
    with pytest.raises(InputError, match="the oracle needs a draft"):
        oracle(trace)


def test_commands_train_heads_of_either_kind_and_replay_counts_what_live_decoding_counts(
    tiny_pair, tiny_responses, tmp_path, capsys
):
    target = ModelPair.from_pretrained(tiny_pair / "target").target
    eagle3.save(tmp_path / "draft", Unrolled([0, 1]).begin(target, None, 0), "target")
    words = [f"pair.target={tiny_pair}/target", f"pair.draft={tmp_path}/draft", "logger=csv"]
    recorded = traces.run(config.compose("traces", [
        *words[:2], f"responses={tiny_responses}", "hidden=true", "max_drafted=auto", f"paths.output_dir={tmp_path}/traces",
    ]))  # fmt: skip
    assert read_traces(recorded).run is not None
    heads = {}
    for kind in ("acceptance", "preread"):
        options = [
            f"model={kind}_head",
            "data=traced",
            f"data.path={recorded}",
            "trainer.max_epochs=1",
            "optimizer.lr=1e-3",
        ]
        heads[kind] = train.run(config.compose("train", [*words, *options, f"paths.output_dir={tmp_path}/{kind}"]))
    data = TracedData(recorded, load_draft(tmp_path / "draft"))
    with pytest.raises(InputError, match="expected head.earlier=0"):
        data.read_by(AcceptanceHead(16, earlier=1, embedding_size=16))
    grid = {
        "speculative": {"policy.num_drafted": [2]},
        "specdec_pp": {"head": [str(heads["acceptance"] / "head")], "policy.threshold": [0.5]},
        "rate": {"head": [str(heads["preread"] / "head")], "policy.cost_ratio": [0.1]},
        "oracle": {"max_drafted": [None]},
    }
    pair = {"_target_": "toolkit.models.pair.ModelPair.from_pretrained", "target": str(tiny_pair / "target"),
            "draft": str(tmp_path / "draft")}  # fmt: skip
    live, traced = (
        sweep.run(sweep_config(tmp_path, grid=grid, source=source, sampling={"temperature": 0.0}, pair=pair))
        for source in ("live", "traces")
    )
    assert "oracle: left out" in capsys.readouterr().out
    index = ["method", "setting", "prompt"]
    live, traced = (read_table(folder, "rows").set_index(index).sort_index() for folder in (live, traced))
    shared = live.index.intersection(traced.index)
    assert set(shared.get_level_values("method")) == {"autoregressive", "speculative", "specdec_pp", "rate"}
    assert (traced.xs("rate").num_drafted > 0).any()
    assert (live.loc[shared, list(COUNTS)] == traced.loc[shared, list(COUNTS)]).all().all()
