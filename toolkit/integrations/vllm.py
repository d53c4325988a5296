"""Copied tokens for vLLM: what `lookup_rate` drafts here, behind vLLM's class of proposers. No draft model.

    vllm serve TARGET --speculative-config '{"method": "custom_class", "model": "toolkit.integrations.vllm.Copies",
                                             "num_speculative_tokens": 20}'
    ... --additional-config '{"copies": {"match": "FOLDER/match.json", "costs": "costs.json"}}'      its settings

vLLM hands the class token ids, neither requests nor verdicts, and rows move between steps. A row is recognised by a hash of its
text without the newest tokens; their number less one was accepted. A copied token is accepted iff the text goes on with it, so
equal texts have equal states, and may share one. The first token of an answer comes from vLLM's reading of
the prompt, without a draft. So a text begins after it, as if it were the prompt's last.

Theirs -> ours: num_speculative_tokens -> max_drafted, num_tokens_no_spec -> tokens of the text.
Deviation: the class is told of no length limit but the model's own. Drafts reach beyond a request's.
Deviation: where vLLM takes a request's memory away and reads it again, the draft that was lost counts as rejected.

Written for vLLM 0.32.0, which calls the class experimental. This package has to be importable there (PYTHONPATH); of its
requirements torch, transformers and safetensors are enough, which vLLM has. vLLM itself is not imported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.acceptance.match import MatchEstimator
from toolkit.decoding.proposers import SuffixProposer
from toolkit.decoding.proposers.base import where_active
from toolkit.errors import unknown_name
from toolkit.stopping import Bounded, LookupRate
from toolkit.stopping.base import State, in_context
from toolkit.types import RoundCounts

MOST_TEXTS = 65_536  # that are remembered; the oldest are forgotten
OF_PROPOSER = ("max_match", "min_match", "responses")
OF_POLICY = ("costs", "column_cost", "batch_size", "initial_rate", "memory")


class Remembered(NamedTuple):
    """What is known of a text: the tokens that were drafted after it, and the policy's state, a number per name."""

    num_drafted: int
    state: dict[str, float]


class Copies:
    """vLLM's custom class: copies from the longest match, as many tokens as pay at the rate of each text.

    Settings are `additional_config["copies"]`: `match`, a file of `analysis.heads copies=`; the policy's `costs`,
    `column_cost`, `batch_size`, `initial_rate`, `memory`; the proposer's `max_match`, `min_match`, `responses`.
    Raises InputError for others.
    """

    def __init__(self, vllm_config: Any):
        proposer, policy = parts((vllm_config.additional_config or {}).get("copies") or {})
        model = vllm_config.model_config
        proposer.check(model.get_vocab_size())
        self.proposer, self.max_length = proposer, int(model.max_model_len)
        self.most = int(vllm_config.speculative_config.num_speculative_tokens)
        self.policy = Bounded(policy, 0, self.most).bind(None)
        self.end_ids = ends_of(model)
        self.texts: OrderedDict[bytes, Remembered] = OrderedDict()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """The tokens to copy after every row, at most `num_speculative_tokens`.

        sampled_token_ids   the newest tokens of each row: accepted ones and one more; none while its prompt is read
        num_tokens_no_spec  tokens of each row's text, the newest included;  token_ids_cpu  the texts [rows, at least as many]
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = [row for row, newest in enumerate(sampled_token_ids) if newest]
        if not rows:
            return drafts
        sequences = [token_ids_cpu[row, : int(num_tokens_no_spec[row])] for row in rows]
        state = self._in_context(self._state(sequences, [len(sampled_token_ids[row]) for row in rows]), sequences)
        room = [max(0, min(self.most, self.max_length - len(text) - 1)) for text in sequences]
        state, starts = self.policy.begin(torch.tensor(room) > 0, state)
        texts = [text.tolist() for text in sequences]
        tokens, counts, state = self.proposer.copied(texts, room, self.end_ids, self.policy, state, starts)
        for number, (row, text, count) in enumerate(zip(rows, sequences, counts.tolist(), strict=True)):
            drafts[row] = tokens[number, :count].tolist()
            self.texts[_key(text)] = Remembered(count, {name: float(each[number]) for name, each in state.items()})
            self.texts.move_to_end(_key(text))
        while len(self.texts) > MOST_TEXTS:
            self.texts.popitem(last=False)
        return drafts

    def _state(self, sequences: Sequence[NDArray[Any]], num_newest: Sequence[int]) -> State:
        """The policy's state of every text [B], what became of its last draft included; of a new text its first one."""
        state = self._in_context(self.policy.init(len(sequences), torch.device("cpu")), sequences)
        entries = [
            self.texts.get(_key(text[: len(text) - count])) for text, count in zip(sequences, num_newest, strict=True)
        ]
        for row, entry in enumerate(entries):
            for name, value in entry.state.items() if entry else ():
                state[name][row] = value
        drafted = torch.tensor([entry.num_drafted if entry else 0 for entry in entries])
        accepted = torch.minimum(torch.tensor(num_newest) - 1, drafted)
        counts = RoundCounts(drafted, torch.zeros_like(drafted), accepted)
        observed = self.policy.observe(counts, counts, state)
        return where_active(observed, state, torch.tensor([entry is not None for entry in entries]))

    def _in_context(self, state: State, sequences: Sequence[NDArray[Any]]) -> State:
        """The state before rounds after these texts: costs are read at their lengths."""
        return in_context(self.policy, state, torch.tensor([len(text) for text in sequences]))


def parts(settings: Mapping[str, Any]) -> tuple[SuffixProposer, LookupRate]:
    """The proposer and the policy of `lookup_rate` with these settings. Raises InputError for unknown ones."""
    names = ("match", *OF_PROPOSER, *OF_POLICY)
    for name in settings:
        if name not in names:
            raise unknown_name("setting of copies", name, names)
    proposer = SuffixProposer(**{name: settings[name] for name in OF_PROPOSER if name in settings})
    policy = {name: settings[name] for name in OF_POLICY if name in settings}
    return proposer, LookupRate(MatchEstimator(settings.get("match")), **policy)


def ends_of(model: Any) -> tuple[int, ...]:
    """Tokens that end a text, of vLLM's config of the model: its generation config's and its own."""
    named = [model.try_get_generation_config().get("eos_token_id"), getattr(model.hf_config, "eos_token_id", None)]
    ends = [end if isinstance(end, list | tuple) else [end] for end in named if end is not None]
    return tuple(dict.fromkeys(int(token) for part in ends for token in part))


def _key(text: NDArray[Any]) -> bytes:
    """A digest of a text's tokens."""
    return blake2b(np.ascontiguousarray(text, np.int64).tobytes(), digest_size=16).digest()
