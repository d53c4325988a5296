"""Stopping policies inside transformers' assisted generation: the same rounds as in this package's own loop, and exact."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from data_gen.held_out import load_frozen
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.integrations.transformers import StoppedDraft, assistant
from toolkit.stopping import Fixed
from toolkit.testing import chi_square, tiny_llama

POLICIES = ["specdec_pp", "rate", "confidence", "dynamic_confidence", "heuristic", "svip", "adaedl", "batch_rate"]


@pytest.fixture(scope="module")
def toy():
    """The toy pair, and a pair of equal models that hooks on the first do not slow down."""
    return ModelPair.toy(), ModelPair.toy()


def counted(pair):
    """How many forwards each model has made since, by role."""
    calls = Counter()
    hooks = [
        model.register_forward_pre_hook(lambda *_, role=role: calls.update([role]))
        for role, model in (("target", pair.target), ("draft", pair.draft))
    ]
    return calls, hooks


@pytest.mark.parametrize("method", POLICIES)
def test_the_rounds_are_those_of_the_own_loop(toy, method):
    """At temperature 0 texts are equal, and so must the forwards be: every decision of every round was the same."""
    pair, quiet = toy
    wrapped, own = assistant(pair.draft, method, head=pair.head), config.method(method, head=pair.head)
    calls, hooks = counted(pair)
    for domain in ("math", "code"):
        ids = pair.encode(load_frozen(domain, "dev")[0].prompt)
        (ours,) = decode(quiet, [ids], own, Sampling(0.0, max_new_tokens=32))
        calls.clear()
        theirs = pair.target.generate(
            torch.tensor([ids]), assistant_model=wrapped, max_new_tokens=32, do_sample=False, pad_token_id=0
        )
        assert theirs[0, len(ids) :].tolist() == ours.token_ids
        assert calls == {"target": ours.counts.num_target_calls, "draft": ours.counts.num_draft_calls}
    for hook in hooks:
        hook.remove()


def test_the_draft_is_left_as_it_was(toy):
    pair, _ = toy
    before = pair.draft.generation_config.to_dict()
    wrapped = assistant(pair.draft, "specdec_pp", head=pair.head)
    ids = torch.tensor([pair.encode("Q: Repeat coral 5 times.\nA:")])
    plain = pair.draft.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert wrapped.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist() == plain.tolist()
    pair.target.generate(ids, assistant_model=wrapped, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert pair.draft.generation_config.to_dict() == before
    assert not pair.draft._forward_hooks and not pair.draft.get_output_embeddings()._forward_pre_hooks
    assert wrapped.config is pair.draft.config


def test_what_cannot_be_said_to_transformers_is_refused(toy):
    draft, head = toy[0].draft, toy[0].head
    with pytest.raises(InputError, match="drafts them, got specinfer"):
        assistant(draft, "specinfer")
    with pytest.raises(InputError, match="lag=1"):
        assistant(draft, "specdec_pp", head=head, overrides=["policy.lag=0"])
    with pytest.raises(InputError, match="max_drafted: expected at least 1, got 0"):
        StoppedDraft(draft, Fixed(2), 0, 0)
    with pytest.raises(InputError, match="needs an acceptance head"):
        assistant(draft, "specdec_pp")
    with pytest.raises(InputError, match="another draft"):
        assistant(tiny_llama(96, 1, 0, torch.float32, vocab_size=1024), "specdec_pp", head=head)


def test_a_head_drafts_less_than_the_default_at_no_more_target_forwards(toy):
    """The setting that dev prompts chose, on test prompts; at temperature 0, where all texts are equal."""
    pair, _ = toy
    calls, hooks = counted(pair)
    level = ["policy.rate=1", "policy.cost_ratio=.3"]
    counts = []
    for helper in (pair.draft, assistant(pair.draft, "rate", head=pair.head, overrides=level)):
        calls.clear()
        for example in load_frozen("instruct", "test")[:8]:
            ids = torch.tensor([pair.encode(example.prompt)])
            pair.target.generate(ids, assistant_model=helper, max_new_tokens=48, do_sample=False, pad_token_id=0)
        counts.append(dict(calls))
    for hook in hooks:
        hook.remove()
    default, headed = counts
    assert headed["target"] <= default["target"] and headed["draft"] < default["draft"]


# -- sampling -----------------------------------------------------------------------------------------------------------


VOCAB, ENDS, NEW = 6, 5, 4


def small(layers, seed):
    return tiny_llama(16, layers, seed, torch.float32, vocab_size=VOCAB)


def exact_distribution(target, prompt, sampled):
    """Probability of every text of at most NEW tokens; token 5 ends one."""
    probs = {(): 1.0}
    for _ in range(NEW):
        grown = {}
        for text, prob in probs.items():
            if text and text[-1] == ENDS:
                grown[text] = prob
                continue
            logits = target(torch.tensor([[*prompt, *text]])).logits[0, -1] / sampled["temperature"]
            for token, p in enumerate(logits.softmax(-1).tolist()):
                grown[(*text, token)] = grown.get((*text, token), 0.0) + prob * p
        probs = grown
    return probs


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["default", "head", "preread"])
def test_sampled_texts_follow_the_targets_distribution(tmp_path, kind):
    """Every text of at most four tokens, by chi-square: transformers' unmodified assistant, and ours in its place."""
    from toolkit.testing import random_heads

    target, draft = small(2, 0), small(1, 1)
    head = random_heads(tmp_path, 16, 16)
    methods = {"head": ("specdec_pp", ["policy.threshold=.5", "min_drafted=1"]), "preread": ("rate", [])}
    wrapped = draft if kind == "default" else assistant(draft, methods[kind][0], head=head, overrides=methods[kind][1])
    prompt, sampled, runs = [1, 3], {"temperature": 1.3, "top_k": 0, "top_p": 1.0}, 3000
    expected = exact_distribution(target, prompt, sampled)
    torch.manual_seed(0)
    seen, lengths = Counter(), Counter()
    draft.register_forward_pre_hook(lambda *_: lengths.update(["draft"]))
    for _ in range(runs):
        out = target.generate(
            torch.tensor([prompt]),
            assistant_model=wrapped,
            do_sample=True,
            max_new_tokens=NEW,
            pad_token_id=0,
            **sampled,
        )
        seen[tuple(out[0, len(prompt) :].tolist())] += 1
    assert set(seen) <= set(expected)
    likely = [text for text, prob in expected.items() if prob * runs >= 5]
    rest = runs * (1 - sum(expected[text] for text in likely))
    counts = [seen[text] for text in likely]
    assert lengths["draft"] > runs  # rounds of several tokens happened
    p = chi_square(
        torch.tensor([*counts, runs - sum(counts)]).double(),
        torch.tensor([*(expected[text] * runs for text in likely), rest]).double(),
    )
    assert p > 1e-3
