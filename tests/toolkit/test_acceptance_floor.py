"""The floor of acceptance under a target that moves, by enumeration of all its texts."""

from itertools import product

import numpy as np
import pytest

from toolkit.metrics import acceptance_floor

VOCAB, LENGTH = 3, 3


def tables(generator, near=None, step=1.0):
    """A distribution after every context of fewer than LENGTH tokens; near: of another table, moved by a step."""
    contexts = [context for length in range(LENGTH) for context in product(range(VOCAB), repeat=length)]
    own = {context: generator.dirichlet(np.ones(VOCAB)) for context in contexts}
    return own if near is None else {context: (1 - step) * near[context] + step * own[context] for context in contexts}


def over_texts(target, values):
    """Means over the texts of a target, exactly: of an array [contexts of a text] per text."""
    total = 0.0
    for text in product(range(VOCAB), repeat=LENGTH):
        prefixes = [text[:length] for length in range(LENGTH)]
        weight = np.prod([target[prefix][token] for prefix, token in zip(prefixes, text, strict=True)])
        total += weight * values(prefixes)
    return total


def divergence(p, q):
    return float(np.sum(p * np.log(p / q)))


@pytest.mark.parametrize("step", [0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("turned", [False, True])
def test_no_moved_target_accepts_less_than_the_floor(step, turned):
    generator, floors = np.random.default_rng(0), []
    for _ in range(20):
        old, draft = tables(generator), tables(generator)
        new = tables(generator, old, step)

        def alpha(target, prefixes, draft=draft):
            return np.array([np.minimum(target[prefix], draft[prefix]).sum() for prefix in prefixes])

        def floor(prefixes, old=old, new=new, alpha=alpha):
            order = (old, new) if turned else (new, old)
            moved = np.array([divergence(*(table[prefix] for table in order)) for prefix in prefixes])
            return acceptance_floor(alpha(old, prefixes), moved)

        accepted = over_texts(new, lambda prefixes, new=new, alpha=alpha: alpha(new, prefixes).mean())
        floors.append(over_texts(new, floor))
        assert floors[-1] <= accepted + 1e-12
    if step == 0.02:
        assert min(floors) > 0.3, "a small step leaves most of what was accepted"


def test_at_temperature_0_nothing_is_known():
    assert acceptance_floor(np.array([0.9, 0.8]), np.array([np.inf, 0.0])) == -np.inf
