"""The copy source for vLLM, driven as vLLM drives it: plain arrays, rows that move, no requests and no verdicts."""

from types import SimpleNamespace

import numpy as np
import pytest

from data_gen.held_out import load_frozen
from toolkit import ModelPair, config
from toolkit.costs.table import CostTable
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.integrations.vllm import Copies, parts

MOST, NEW = 6, 40


@pytest.fixture(scope="module")
def pair():
    return ModelPair.toy()


@pytest.fixture(scope="module")
def prompts(pair):
    """Six prompts, two of them equal; the toy target's instructions repeat themselves."""
    sequences = [pair.encode(load_frozen("instruct", "dev")[number].prompt) for number in range(5)]
    return [*sequences, sequences[0]]


def configured(pair, **copies):
    model = SimpleNamespace(
        max_model_len=512,
        get_vocab_size=lambda: pair.vocab_size,
        try_get_generation_config=lambda: {"eos_token_id": list(pair.end_ids)},
        hf_config=SimpleNamespace(eos_token_id=None),
    )
    speculative = SimpleNamespace(num_speculative_tokens=MOST)
    additional = {"copies": copies} if copies else {}
    return SimpleNamespace(model_config=model, speculative_config=speculative, additional_config=additional)


def driven(copies, texts, rows_of):
    """Every text's drafted and accepted tokens in rounds that drafted, as an engine counts them; and its rounds in all.

    texts    prompts with the first token of each answer, and what follows
    rows_of  the texts of a step in the order of the batch's rows, given those that go on
    """
    at, counts = [len(prompt) for prompt, _ in texts], [[] for _ in texts]
    newest = [[prompt[-1]] for prompt, _ in texts]
    while live := [number for number, (prompt, rest) in enumerate(texts) if at[number] < len(prompt) + len(rest)]:
        rows = rows_of(live)
        matrix = np.zeros((len(rows) + 1, 512), np.int32)
        for row, number in enumerate(rows):
            whole = [*texts[number][0], *texts[number][1]]
            matrix[row, : at[number]] = whole[: at[number]]
        lengths = np.array([at[number] for number in rows] + [7])
        answer = copies.propose([newest[number] for number in rows] + [[]], lengths, matrix)
        assert answer.pop() == [], "a row whose prompt is still read drafts nothing"
        for number, draft in zip(rows, answer, strict=True):
            following = [*texts[number][0], *texts[number][1]][at[number] :]
            agreeing = [token == other for token, other in zip(draft, following, strict=False)]
            accepted = agreeing.index(False) if False in agreeing else len(agreeing)
            if draft:
                counts[number].append((len(draft), accepted))
            newest[number] = following[: accepted + 1]
            at[number] += accepted + 1
    return counts


def ours(pair, prompts, overrides=()):
    """The texts, their first token counted to the prompt, and the rounds of `lookup_rate` that drafted in them."""
    plain = decode(pair, prompts, config.method("autoregressive"), Sampling(0.0, max_new_tokens=NEW))
    texts = [([*prompt, *each.token_ids[:1]], each.token_ids[1:]) for prompt, each in zip(prompts, plain, strict=True)]
    method = config.method("lookup_rate", [f"max_drafted={MOST}", "policy.column_cost=.05", *overrides])
    answers = decode(pair, [prompt for prompt, _ in texts], method, Sampling(0.0, max_new_tokens=NEW - 1))
    assert [each.token_ids for each in answers] == [rest for _, rest in texts]
    counts = [
        [(each.num_drafted, each.num_accepted) for each in answer.rounds if each.num_drafted] for answer in answers
    ]
    return texts, counts


@pytest.mark.parametrize("order", ["one at a time", "together", "moving"])
def test_counts_are_those_of_decoding_here(pair, prompts, order):
    texts, expected = ours(pair, prompts)
    generator = np.random.default_rng(0)

    def rows_of(live):
        if order == "one at a time":
            return live[:1]
        return live if order == "together" else generator.permutation(live)[: max(1, len(live) - 1)].tolist()

    counts = driven(Copies(configured(pair)), texts, rows_of)
    for rounds, theirs in zip(expected, counts, strict=True):
        assert rounds[:-2] == theirs[: len(rounds[:-2])]
        assert all(few <= many for few, many in zip(rounds[-2:], theirs[len(rounds) - 2 :], strict=False))
    assert sum(accepted for rounds in expected for _, accepted in rounds[:-2]) > 8
    assert len({drafted for rounds in expected for drafted, _ in rounds[:-2]}) > 2, "the rule decides how many"


def test_settings_are_those_of_the_method_and_others_are_refused(pair, prompts, tmp_path):
    proposer, policy = parts({})
    method = config.method("lookup_rate")
    assert (proposer, policy) == (method.proposer, method.policy)
    texts, expected = ours(
        pair, prompts[:2], ["policy.initial_rate=3", "policy.column_cost=.2", "proposer.min_match=2"]
    )
    counts = driven(Copies(configured(pair, initial_rate=3, column_cost=0.2, min_match=2)), texts, lambda live: live)
    assert [rounds[:-2] for rounds in expected] == [
        theirs[: len(rounds[:-2])] for rounds, theirs in zip(expected, counts, strict=True)
    ]
    with pytest.raises(InputError, match="unknown setting of copies 'memry': did you mean memory"):
        Copies(configured(pair, memry=3))
    (tmp_path / "r.jsonl").write_text('{"token_ids": [1, 99999999]}\n')
    with pytest.raises(InputError, match="token ids in"):
        Copies(configured(pair, responses=str(tmp_path / "r.jsonl")))


def test_costs_are_read_at_the_length_of_each_text(pair, prompts, tmp_path):
    """Copied tokens are free after short texts, and after longer ones they cost more than they bring."""
    lengths = sorted(map(len, prompts))
    contexts = [lengths[0], lengths[-1] + NEW]
    seconds = [[1.0, 1.0, 1.0], [1.0, 2.0, 8.0]]
    path = CostTable(1, (1, 2, 1 + MOST), contexts, seconds).save(tmp_path / "costs.json")
    texts, expected = ours(pair, prompts, [f"policy.costs={path}"])
    counts = driven(Copies(configured(pair, costs=str(path))), texts, lambda live: live)
    for rounds, theirs in zip(expected, counts, strict=True):
        assert rounds[:-2] == theirs[: len(rounds[:-2])]
    assert len({drafted for rounds in expected for drafted, _ in rounds[:-2]}) > 1
