"""Heads that speak of whole rounds under block verification: P_i of recorded chains, training, decoding, refusals."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from analysis.replay.recorded_heads import threshold_policy
from data_gen import traces
from tests.analysis.replay.plain import MOST, Text, small_trace
from toolkit import ModelPair, testing, train
from toolkit.acceptance import PrereadEstimator, PrereadHead
from toolkit.acceptance.inputs import Inputs, newest_features
from toolkit.acceptance.preread import embedding_table
from toolkit.config import compose, method
from toolkit.costs.load import LoadCost
from toolkit.decoding import Method, decode
from toolkit.errors import InputError
from toolkit.integrations.transformers import StoppedDraft
from toolkit.models.teacher import distributions_along
from toolkit.sampling import Sampling
from toolkit.stopping import BatchRate, Rate
from toolkit.trace import join
from toolkit.trace.step import RecordedStep
from toolkit.training import TracedData
from toolkit.training.recorded import BlockStates, block_probs, chosen_steps
from toolkit.types import DraftStep
from toolkit.verification.chain_enumeration import PrefixTables
from toolkit.verification.rules.block import Block, survival
from toolkit.verification.rules.rejection import Rejection

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.mark.parametrize("seed", range(4))
def test_a_token_is_kept_with_its_weight_whatever_is_drafted_behind_it(seed):
    """P(at least i tokens are kept | the first i) = P_i, by enumeration of the tokens behind them."""
    size, most = 3, 3
    tables = PrefixTables(size, most, seed)
    for kept in range(1, most + 1):
        for prefix in product(range(size), repeat=kept):
            weight = torch.ones((), dtype=torch.float64)
            if any(tables.q[prefix[:i]][token] == 0 for i, token in enumerate(prefix)):
                continue  # such a token is never drafted
            for i, token in enumerate(prefix):
                weight = survival(weight, tables.p[prefix[:i]][token], tables.q[prefix[:i]][token])
            found = 0.0
            for behind in product(range(size), repeat=most - kept):
                tokens, prob = prefix + behind, 1.0
                for i in range(kept, most):
                    prob *= float(tables.q[tokens[:i]][tokens[i]])
                if not prob:
                    continue
                p = torch.stack([tables.p[tokens[:i]] for i in range(most + 1)])
                q = torch.stack([tables.q[tokens[:i]] for i in range(most)])
                found += prob * float(Block().distribution(p, q, torch.tensor(tokens))[0][kept:].sum())
            assert found == pytest.approx(float(weight), abs=1e-12)


@pytest.fixture(scope="module")
def trace():
    return small_trace(upper_bound=True, hidden=True)


def test_probabilities_of_recorded_chains_are_those_of_the_rule(trace):
    """Every start and depth against the rule itself, on distributions computed anew."""
    pair, sampling = testing.table_pair(), Sampling(max_new_tokens=10)
    steps, chances = block_probs(trace)
    assert steps.shape == chances.shape == (MOST, trace.num_positions)
    compared, below = 0, 0
    for number in range(0, trace.num_texts, 3):
        text = Text(trace, number)
        prompt = [1] if number >= 38 else [0]
        own = trace.text_tokens[text.first : text.end].tolist()
        for start in range(text.first, text.end):
            visited = text.visited(start)[:MOST]
            assert chances[:, start].isnan().sum() == MOST - len(visited)
            tokens = trace.tokens[visited].tolist()
            context = prompt + own[: start - text.first]
            (p, q), *_ = distributions_along(pair, [(context, tokens)], sampling)
            p = torch.cat([p, p[:1]])  # what comes after the last token decides nothing about its length
            for depth in range(1, len(visited) + 1):
                assert int(steps[depth - 1, start]) == visited[depth - 1]
                lengths = Block().distribution(
                    p[: depth + 1].double(), q[:depth].double(), torch.tensor(tokens[:depth])
                )[0]
                assert float(chances[depth - 1, start]) == pytest.approx(float(lengths[-1]), abs=1e-5)
                compared += 1
                below += depth > 1 and float(chances[depth - 1, start]) > float(chances[depth - 2, start])
    assert compared > 100 and below > 0, "weights rise again behind unlikely tokens"


def test_examples_are_steps_of_every_start_with_the_next_probability_as_second_label(trace):
    steps, chances = block_probs(trace)
    table = torch.rand(3, 4)
    states = BlockStates(trace, [3, 9], table, Inputs(round_depth=MOST), seed=1)
    batch = states.batch([1, 0])
    starts = [*range(*trace.text_first[9:11].tolist()), *range(*trace.text_first[3:5].tolist())]
    depths = batch.hidden[:, -MOST:].argmax(1) + 1
    for row, (start, depth) in enumerate(zip(starts, depths.tolist(), strict=True)):
        assert float(batch.labels[row, 0]) == pytest.approx(float(chances[depth - 1, start]))
        known = depth < MOST and not chances[depth, start].isnan()
        assert bool(batch.labels[row, 1].isnan()) != known
        if known:
            assert float(batch.labels[row, 1]) == pytest.approx(float(chances[depth, start]))
    index = steps[depths - 1, torch.tensor(starts)]
    assert torch.equal(batch.hidden[:, :-MOST], newest_features(RecordedStep(trace, 1, index), table))
    again = BlockStates(trace, [3, 9], table, Inputs(round_depth=MOST), seed=1).batch([1, 0])
    assert torch.equal(again.hidden, batch.hidden)


def test_depths_weigh_as_the_probability_that_the_block_was_kept_so_far(trace):
    _, chances = block_probs(trace)
    start = int(((chances[1] < 0.9) & (chances[1] > 0.1) & ~chances[2].isnan()).nonzero()[0])
    before = torch.cat([torch.ones(1), chances[:-1, start]])
    weights = torch.where(chances[:, start].isnan(), 0.0, before.nan_to_num(0.0))
    many = join([trace] * 100)
    drawn = torch.stack([chosen_steps(many, torch.Generator().manual_seed(s))[1] for s in range(40)])
    shares = torch.bincount(drawn[:, start :: trace.num_positions].flatten(), minlength=MOST + 1)[1:] / 4000
    assert torch.allclose(shares.double(), weights.double() / weights.sum(), atol=0.035)


def test_recordings_that_lack_something_are_refused():
    plain = small_trace(count=4, hidden=True)
    older = replace(plain, target_prob=None)
    for lacking in (plain, older, join([plain, older])):
        with pytest.raises(InputError, match="which these traces lack: record them with upper_bound=true"):
            block_probs(lacking)
    with pytest.raises(InputError, match="these traces hold single ones"):
        chosen_steps(small_trace(count=4, most=1, upper_bound=True), torch.Generator())


# -- policies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """Says the same of every step."""

    judges_blocks: bool

    def bind(self, pair):
        return self

    def drawn_probs(self, step):
        return torch.full(step.tokens.shape, 0.5), torch.full(step.tokens.shape, 0.4)


def a_step(depth, rows=2):
    logits = torch.zeros(rows, 3)
    tokens, live = torch.zeros(rows, dtype=torch.long), torch.ones(rows, dtype=torch.bool)
    return DraftStep(depth, logits, logits.softmax(-1), torch.zeros(rows, 2), tokens, live)


def test_blocks_take_the_place_of_the_running_product():
    for blocks, expected in ((False, (0.5, 0.2, 0.25, 0.1)), (True, (0.5, 0.4, 0.5, 0.4))):
        policy = Rate(Told(blocks), rate=1.0)
        state, first = policy.score(a_step(1), policy.init(2, torch.device("cpu")))
        after, second = policy.score(a_step(2), state)
        found = [float(value[0]) for value in (state["survival"], first, after["survival"], second)]
        assert found == pytest.approx(expected)
        batch = replace(BatchRate(Told(blocks)), table=LoadCost.ratio(0.2, 0.0))
        state, _ = batch.begin(torch.ones(2, dtype=torch.bool), batch.init(2, torch.device("cpu")))
        assert float(batch.step(a_step(1), state)[0]["survival"][0]) == 0.5


@pytest.mark.parametrize("blocks", [False, True])
def test_equal_rows_decide_as_one_of_them_would(blocks):
    """Of rows and of blocks alike, what a batch compares with its price is the rows' mean."""
    decided = []
    for ratio in (0.02, 0.1, 0.2, 0.4):
        going = []
        for rows in (1, 2):
            batch = replace(BatchRate(Told(blocks)), table=LoadCost.ratio(ratio, 0.0))
            state, _ = batch.begin(torch.ones(rows, dtype=torch.bool), batch.init(rows, torch.device("cpu")))
            for depth in (1, 2):
                state, wanted = batch.step(a_step(depth, rows), state)
                going.append(wanted.tolist())
        decided.append(going[0][0])
        assert going[2] == going[0] * 2 and going[3] == going[1] * 2
    assert len(set(decided)) == 2, "some prices are exceeded, and some are not"


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    torch.manual_seed(2)
    found = PrereadHead(96, 96, width=16, round_depth=6, output="block")
    for parameter in found.parameters():
        parameter.data *= 2
    found.layers[-1].bias.data += 1
    return str(found.save(tmp_path_factory.mktemp("block") / "head"))


def test_rounds_end_where_the_next_probability_is_below_the_price(head):
    """Live, against the head asked of plain forwards at the same positions."""
    pair, level = ModelPair.toy(), 0.5
    policy = Rate(PrereadEstimator(head), cost_ratio=0.25, rate=2.0)
    blocks = Method("block_rate", policy, Block(), max_drafted=8)
    greedy = Sampling(temperature=0.0, max_new_tokens=30)
    prompts = ["Q: Spell river.\nA:", "Once"]
    found = decode(pair, prompts, blocks, greedy)
    plain = decode(pair, prompts, method("autoregressive"), greedy)
    module, table, lengths = PrereadHead.load(head)[0], embedding_table(pair.draft), set()
    for generation, other in zip(found, plain, strict=True):
        assert generation.token_ids == other.token_ids
        text = list(generation.prompt_ids)
        for one in generation.rounds:
            drafted, room = [], 30 - (len(text) - len(generation.prompt_ids)) - 1
            for depth in range(1, min(8, room) + 1):
                out = pair.draft(torch.tensor([text + drafted]), output_hidden_states=True)
                logits = out.logits[:, -1]
                token = logits.argmax(-1)
                probs = torch.nn.functional.one_hot(token, logits.shape[-1]).float()
                step = DraftStep(depth, logits, probs, out.hidden_states[-1][:, -1], token)
                drafted.append(int(token))
                if (
                    torch.sigmoid(module(module.inputs.features(step, table)))[0, 1] < level
                    or int(token) in pair.end_ids
                ):
                    break
            assert one.num_drafted == len(drafted)
            lengths.add(one.num_drafted)
            text = (
                generation.prompt_ids
                + generation.token_ids[: len(text) - len(generation.prompt_ids) + one.num_produced]
            )
    assert len(lengths) > 2


def test_such_heads_are_refused_where_blocks_are_not_verified(head):
    pair = ModelPair.toy()
    tokens = Method("rate", Rate(PrereadEstimator(head), rate=1.0), Rejection())
    with pytest.raises(
        InputError, match=r"the rule is rejection; expected method=block_rate, or a head with head.output=token"
    ):
        decode(pair, ["Once"], tokens, Sampling(max_new_tokens=4))
    with pytest.raises(InputError, match="verifies token by token"):
        StoppedDraft(pair.draft, Rate(PrereadEstimator(head), rate=1.0))
    with pytest.raises(InputError, match="which no recording can replay"):
        threshold_policy(PrereadHead.load(head)[0], "x", corrected=True)


def test_the_method_decodes_with_either_output(head):
    pair = ModelPair.toy()
    for folder in (head, pair.head):
        one = method("block_rate", [f"policy.estimator.head={folder}"])
        assert decode(pair, ["Once"], one, Sampling(max_new_tokens=12))[0].token_ids


# -- training ---------------------------------------------------------------------------------------------------------


def test_a_head_of_blocks_is_trained_on_roll_outs(tiny_overrides, tiny_responses, tmp_path):
    options = [
        f"responses={tiny_responses}", "hidden=true", "upper_bound=true", "max_drafted=4", "heads={}",
        f"paths.output_dir={tmp_path}/t",
    ]  # fmt: skip
    recorded = traces.run(compose("traces", [*tiny_overrides, *options]))
    words = [
        "model=preread_head", "data=traced", "head.width=8", "head.output=block", "head.round_depth=4",
        "trainer.max_epochs=2", "data.batch_size=8", "logger=none", f"data.path={recorded}",
    ]  # fmt: skip
    folder = train.run(compose("train", [*tiny_overrides, *words, f"paths.output_dir={tmp_path}/run"]))
    found, about = PrereadHead.load(folder / "head")
    assert found.output == "block" and found.inputs.round_depth == 4 and "P_k" in about["label"]
    assert json.loads((folder / "metrics.json").read_text())["val/log_loss_following"] > 0
    with pytest.raises(InputError, match="no acceptance draws of whole rounds"):
        train.run(
            compose("train", [*tiny_overrides, *words, "data.hard_labels=true", f"paths.output_dir={tmp_path}/no"])
        )
    data = TracedData(recorded, ModelPair.from_pretrained(**_names(tiny_overrides)).draft)
    data.read_by(found)
    data.setup()
    assert isinstance(data.states["train"], BlockStates)


def test_cards_name_the_method_that_takes_the_head(tmp_path):
    """The words after training decode: `block_rate` for blocks, and the layers that the draft must give."""
    folder = PrereadHead(4, 3, output="block", layers=(1,)).save(tmp_path / "head")
    said = (folder / "README.md").read_text()
    assert "`toolkit.decode method=block_rate +pair.draft_layers=[1] head=FOLDER`" in said
    assert "block verification keeps the round up to this token" in said
    more = PrereadHead(4, 3, earlier=2, likelihood=True, round_depth=8)
    card = (more.save(tmp_path / "more", {"hidden_state": "its state"}) / "README.md").read_text()
    reads = (
        "its state; 2 earlier positions of the text; the depth in the round, up to 8; the likelihood of the text so far"
    )
    assert f"| reads | {reads} |" in card
    plain = (PrereadHead(4, 3).save(tmp_path / "plain") / "README.md").read_text()
    assert "`toolkit.decode method=rate head=FOLDER`" in plain and PrereadHead.summary in plain


def _names(overrides):
    return {word.split(".")[1].split("=")[0]: word.split("=", 1)[1] for word in overrides if word.startswith("pair.")}


def test_plain_heads_do_not_say_that_they_are(tmp_path):
    assert "output" not in PrereadHead(4, 3).config
    assert PrereadHead.load(PrereadHead(4, 3, output="block").save(tmp_path))[0].config["output"] == "block"
