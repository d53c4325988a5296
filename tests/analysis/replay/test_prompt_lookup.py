"""Replay of prompt lookup against rounds that are copied and judged one at a time."""

from __future__ import annotations

import pytest
import torch

from analysis.replay.prompt_lookup import replay_prompt_lookup
from toolkit import ModelPair
from toolkit.decoding import Method, PromptLookupProposer
from toolkit.engine import TabularModel
from toolkit.stopping import Fixed, Heuristic
from toolkit.verification import get

END = 2


def texts_of(count):
    """Prompts and responses that repeat themselves; some end by an end of text, some by the limit."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    for number in range(count):
        tokens = torch.randint(0, 2, (14,), generator=generator).tolist()
        prompt = tokens[: 2 + number % 5]
        produced = tokens[7 : 7 + 1 + number % 7]
        texts.append((prompt, [*produced[:-1], END] if number % 3 else [*produced, *[0, 1] * 5][:8]))
    return texts


def slowly(method, prompt, produced, limit):
    """One text: policy objects are asked as the loop asks them, on a batch of one."""
    proposer, policy = method.proposer, method.policy
    at, rounds, state = 0, [], policy.init(1, torch.device("cpu"))
    while at < len(produced):
        text = [*prompt, *produced[:at]]
        most = min(limit - at - 1, method.limit)
        tokens, drafted, state = proposer.copied([text], [most], (END,), policy, state, torch.tensor([True]))
        count = int(drafted)
        good = 0
        while good < min(count, len(produced) - at) and tokens[0, good] == produced[at + good]:
            good += 1
        made = min(good + 1, len(produced) - at)
        rounds.append((count, good, made))

        class Sent:
            num_nodes, num_drafted, num_calls = len(tokens[0]), drafted, 0 * drafted

        class Judged:
            length = torch.tensor([good])

        state = policy.observe(Sent(), Judged(), state)
        at += made
    return rounds


@pytest.mark.parametrize("policy", [Fixed(3), Fixed(1), Heuristic(2)], ids=str)
def test_rounds_are_those_of_one_text_at_a_time(policy):
    pair = ModelPair(target=TabularModel.random(3, 1, torch.Generator().manual_seed(5)), end_ids=(END,))
    method = Method("lookup", policy, get("rejection"), PromptLookupProposer(), max_drafted=5).bind(pair)
    texts = texts_of(40)
    found = replay_prompt_lookup(method, texts, 8, (END,))
    whole = 0
    for row, (prompt, produced) in enumerate(texts):
        rounds = slowly(method, prompt, produced, 8)
        whole += sum(count for count, *_ in rounds)
        assert {name: int(values[row]) for name, values in found.counts.items()} == {
            "num_drafted": sum(count for count, *_ in rounds), "num_draft_calls": 0, "num_target_calls": len(rounds),
            "num_generated": len(produced), "num_discarded": sum(count + 1 - made for count, _, made in rounds),
        }  # fmt: skip
        sizes = range(method.limit + 1)
        for histogram, column in (
            (found.accepted, [good for _, good, _ in rounds]),
            (found.drafted, [count for count, *_ in rounds]),
            (found.judged, [min(count, good + 1) for count, good, _ in rounds]),
        ):
            assert histogram[row].tolist() == [column.count(size) for size in sizes]
    assert found.total.num_drafted == whole > 50 and found.total.num_discarded > 0
