"""The clairvoyant oracle: it never drafts a token that will be rejected. No policy can do better with this pair.

Let X_1..X_N be a text drawn from the target. Speculative sampling has a joint distribution of (drafted token, accepted, emitted
token). Given the text, it makes position i an accepted draft with probability

    a_i = min(1, q(X_i) / p(X_i)),        p and q warped as in decoding, given X_<i,

independently for all i. An oracle that knows these acceptance draws drafts exactly the accepted positions. Every other
position costs a target forward, which produces its token as the extra one of a round. The last token is never drafted,
because the forward that ends the last round yields it for free. So nothing is discarded, and

    E[draft calls]  = sum of a_i over i < N          E[target calls] = 1 + sum of (1 - a_i) over i < N

A round has at most `max_drafted` drafted tokens. The position that follows a full round is produced by the round's target
forward, whatever its acceptance draw says. The expectation then is a dynamic program over the tokens drafted so far in the
round.

Shapes: N produced tokens, M max_drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.models.teacher import Text, distributions_along, picked
from toolkit.sampling import Sampling

Array = NDArray[np.float64]


def expected_counts(accept_probs: Array, max_drafted: int | None = None) -> dict[str, float]:
    """Expected counts of the oracle on one text, from a_1..a_N, by the names of `toolkit.types.Counts`.

    max_drafted  most drafted tokens in a round; None: no limit
    """
    if max_drafted is not None and max_drafted < 0:
        raise InputError(f"oracle.max_drafted: expected 0 or more, or null, got {max_drafted}")
    free = accept_probs[:-1]
    drafted = float(free.sum())
    if max_drafted is not None:
        depth = np.zeros(max_drafted + 1)  # probability of each number of tokens drafted so far in the round
        depth[0], drafted = 1.0, 0.0
        for prob in free:
            goes_on = depth[:-1] * prob
            drafted += float(goes_on.sum())
            depth = np.concatenate([[1.0 - goes_on.sum()], goes_on])
    length = float(len(accept_probs))
    counts = {"num_drafted": drafted, "num_draft_calls": drafted, "num_target_calls": length - drafted}
    return {**counts, "num_generated": length, "num_discarded": 0.0}


def acceptance_probs(
    pair: ModelPair,
    texts: Sequence[Text],
    sampling: Sampling,
    draft_temperature: float | None = None,
    batch_size: int = 8,
    on_text: Callable[[int], object] = lambda count: None,
) -> list[Array]:
    """a_1..a_N of every text, by one teacher-forced pass of the target and one of the (first) draft.

    on_text  called after each text with the number of its tokens
    """
    pair.check_has_draft("the oracle")
    for prompt, produced in texts:
        if len(prompt) + len(produced) > pair.max_length:
            raise InputError(f"oracle: a text of {len(prompt) + len(produced)} tokens exceeds {pair.context}")
    order = [number for number, (prompt, produced) in enumerate(texts) if len(prompt) and len(produced)]
    order.sort(key=lambda number: len(texts[number][0]) + len(texts[number][1]))  # little padding
    accept_probs: list[Array] = [np.zeros(0)] * len(texts)
    for first in range(0, len(order), batch_size):
        numbers = order[first : first + batch_size]
        batch = [texts[number] for number in numbers]
        distributions = distributions_along(pair, batch, sampling, draft_temperature)
        for number, (_, produced), (target_probs, draft_probs) in zip(numbers, batch, distributions, strict=True):
            tokens = torch.tensor(list(produced), device=target_probs.device)
            p, q = picked(target_probs, tokens), picked(draft_probs, tokens)
            # A token of target probability 0 comes from rounding or from elsewhere; the draft may still have it.
            ratio = torch.where(p <= 0, q.sign(), q / p)
            accept_probs[number] = ratio.clamp(max=1).double().cpu().numpy()
            on_text(len(produced))
    return accept_probs
