"""Exactness under grammars by enumeration, in float64: everything that can be drawn and emitted, through the loop's own code.

Rows with two grammars and rows without one lie in one batch: a row for every text so far and every tuple of draws.
"""

from collections import defaultdict, deque
from itertools import product

import numpy as np
import pytest
import torch

from toolkit import config
from toolkit.decoding import Sampling, batch, text
from toolkit.decoding.proposers import ChainProposer, tree
from toolkit.engine.engine import engine_of
from toolkit.grammar import TextGrammar
from toolkit.grammar.walk import along
from toolkit.testing import table_pair
from toolkit.testing.blocks import block_pair
from toolkit.types import Generation

PROMPT, END, SIZE, NEW = [0, 1, 0, 1], 2, 3, 4


class Written(TextGrammar):
    """A grammar that is written down: the tokens that may come after those produced so far."""

    def __init__(self, rule, tokens=()):
        self.rule, self.tokens = rule, tokens

    @property
    def allowed(self):
        return np.isin(np.arange(SIZE), self.rule(self.tokens))

    def after(self, token):
        if token == END or token not in self.rule(self.tokens):
            return None
        return Written(self.rule, (*self.tokens, token))


def pairs(tokens):
    """(0 1 | 0 0)* and then the end: every other token is certain, or two are left."""
    return ([0], [0, 1])[len(tokens) % 2] if len(tokens) < 2 else ([0, END], [0, 1])[len(tokens) % 2]


def after_one(tokens):
    """After 1 comes 0 alone, after 0 0 the end alone."""
    return [0] if tokens[-1:] == (1,) else [END] if tokens[-2:] == (0, 0) else [0, 1]


GRAMMARS = (Written(pairs), Written(after_one), None)


def expected(pair, grammar, sampling):
    """The distribution of outputs: p at a temperature, of what the grammar leaves, token by token."""
    outputs, going = defaultdict(float), [((), 1.0)]
    while going:
        tokens, prob = going.pop()
        if len(tokens) == NEW or tokens[-1:] == (END,):
            outputs[tokens] += prob
            continue
        p = pair.target.probs[pair.target.state([*PROMPT, *tokens])].clone()
        p[[token not in (range(SIZE) if grammar is None else grammar.rule(tokens)) for token in range(SIZE)]] = 0
        p = p ** (1 / sampling.temperature) if sampling.temperature else (p == p.max()).double()
        going += [((*tokens, token), prob * share) for token, share in enumerate((p / p.sum()).tolist()) if share]
    return outputs


def emitted_by_tree(rule, proposal, row, p):
    """(tokens, probability) of what a walk down a row's tree emits."""
    nodes = [node for node in proposal.candidates[row].tolist() if node >= 0]
    sources = proposal.drawn_from[row].tolist()
    parents, tokens = proposal.parents[row].tolist(), proposal.tokens[row].tolist()

    def walk(node, path, prob):
        children = [m for m, child in enumerate(nodes) if parents[child] == node]
        law, drawn = p[node + 1], torch.tensor([tokens[nodes[m]] for m in children])
        if children:
            q = torch.stack([proposal.draft_probs[row, sources[m]] for m in children])
            accept, residual = rule.distribution(law, q.double(), drawn)
            law = (residual * (1 - accept.sum())).index_add(0, drawn, accept)
        for token, share in enumerate(law.tolist()):
            child = [nodes[m] for m in children if tokens[nodes[m]] == token]
            if share > 0:
                yield from walk(child[0], (*path, token), prob * share) if child else [((*path, token), prob * share)]

    return walk(-1, (), 1.0)


def emitted_by_chain(rule, proposal, row, p):
    count = int(proposal.num_drafted[row])
    drafted, (lengths, extras) = proposal.tokens[row, :count], (torch.ones(1), p)
    if count:
        q = proposal.draft_probs[row, :count].double()
        lengths, extras = rule.distribution(p[: count + 1], q, drafted)
    for length, token in product(range(count + 1), range(SIZE)):
        yield (*drafted[:length].tolist(), token), float(lengths[length] * extras[length, token])


def one_round(pair, method, sampling, texts):
    """What a round from every text of every grammar emits: {(grammar, text): {tokens: probability}}."""
    most = method.max_nodes
    slots = most if method.proposer.needs_draft_model else 0
    chosen = [(number, tokens, drawn) for number, tokens in texts for drawn in product(range(SIZE), repeat=slots)]
    rows = []
    for number, tokens, _ in chosen:
        generation = Generation(0, list(PROMPT), list(tokens))
        grammar = along(GRAMMARS[number], tokens)[-1]
        rows.append(batch.Row(generation, [*PROMPT, *tokens], torch.Generator(), grammar))
    job = batch.Job(pair, method, sampling, deque(), lambda _: None, lambda _: None)
    with torch.inference_mode(), engine_of(pair).sessions(len(rows), 32) as sessions:
        running = text.TextBatch(job, sessions, rows)
        context = running.context(torch.tensor([[*drawn, *[0] * (most - slots)] for *_, drawn in chosen]).double())
        proposal, _ = running.propose(context)
        scores = running.score(context, proposal)
    rounds = defaultdict(dict)
    for row, (number, tokens, _) in enumerate(chosen):
        chain = proposal.candidates is None
        if chain:
            sent = tuple(proposal.tokens[row, : int(proposal.num_drafted[row])].tolist())
            prob = float(proposal.draft_probs[row, range(len(sent)), list(sent)].prod())
        else:
            nodes = [node for node in proposal.candidates[row].tolist() if node >= 0]
            sent = tuple(proposal.tokens[row, nodes].tolist())
            prob = float(proposal.draft_probs[row, proposal.drawn_from[row, : len(nodes)], list(sent)].prod())
        if prob > 0 and sent not in rounds[number, tokens]:
            emitted = emitted_by_chain if chain else emitted_by_tree
            rounds[number, tokens][sent] = prob, list(emitted(method.rule, proposal, row, scores[row]))
    return rounds


def outputs(pair, method, sampling, monkeypatch):
    """The distribution of whole outputs under every grammar."""
    drawn = lambda self, context, depth, probs: context.uniforms[:, depth - 1].long()
    monkeypatch.setattr(ChainProposer, "draw", drawn)
    full = lambda scheme, q, uniforms: (uniforms.long(), torch.full(uniforms.shape[:2], uniforms.shape[2]))
    monkeypatch.setattr(tree, "candidates", full)
    method = method.bind(pair).at(sampling)
    laws = [defaultdict(float) for _ in GRAMMARS]
    going = {(number, ()): 1.0 for number in range(len(GRAMMARS))}
    while going:
        following = defaultdict(float)
        for (number, tokens), proposals in one_round(pair, method, sampling, list(going)).items():
            assert sum(prob for prob, _ in proposals.values()) == pytest.approx(1, abs=1e-6)
            for prob, emitted in proposals.values():
                for new, share in emitted:
                    whole = (*tokens, *new)[:NEW]
                    whole = whole[: whole.index(END) + 1] if END in whole else whole
                    ended = len(whole) == NEW or whole[-1] == END
                    (laws[number] if ended else following)[whole if ended else (number, whole)] += (
                        going[number, tokens] * prob * share
                    )
        going = {key: mass for key, mass in following.items() if mass > 0}
    return laws


def error(pair, method, sampling, monkeypatch):
    """The largest difference of a probability of any output, by grammar."""
    laws, errors = outputs(pair, method, sampling, monkeypatch), []
    for grammar, law in zip(GRAMMARS, laws, strict=True):
        wanted = expected(pair, grammar, sampling)
        errors.append(max(abs(law[each] - wanted[each]) for each in {*law, *wanted}))
    return errors


METHODS = {
    "rejection": ("speculative", ["policy.num_drafted=2", "max_drafted=2"]),
    "block rule": ("block", ["policy.num_drafted=2", "max_drafted=2"]),
    "copies": ("prompt_lookup", ["max_drafted=3"]),
    "block draft": ("speculative", ["policy.num_drafted=2", "max_drafted=2"]),
    "tree": ("specinfer", ["proposer.k_config=2x1"]),
}


def case(name):
    method, words = METHODS[name]
    return block_pair(length=2, vocab_size=SIZE) if name == "block draft" else table_pair(), config.method(
        method, words
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("name", METHODS)
def test_whole_outputs_are_exact(name, temperature, monkeypatch):
    pair, method = case(name)
    assert max(error(pair, method, Sampling(temperature, max_new_tokens=NEW), monkeypatch)) < 1e-9


@pytest.mark.parametrize("name", ["rejection", "copies", "tree"])
def test_a_mask_of_the_parent_is_noticed(name, monkeypatch):
    """The control: the first node's mask is that of the context. Rows without a grammar stay exact."""
    allowed = text._allowed_at_nodes

    def late(*args):
        masks = allowed(*args)
        return torch.cat([masks[:, :1], masks[:, :1], masks[:, 2:]], 1) if masks.shape[1] > 1 else masks

    monkeypatch.setattr(text, "_allowed_at_nodes", late)
    pair, method = case(name)
    wrong = error(pair, method, Sampling(max_new_tokens=NEW), monkeypatch)
    assert min(wrong[:2]) > 1e-3 and wrong[2] < 1e-9
