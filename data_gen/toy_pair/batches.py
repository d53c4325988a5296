"""Training documents and an endless, resumable stream of batches with little padding."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from data_gen.domains import Example

CHUNK = 1024  # documents that are sorted by length together


@dataclass(frozen=True)
class Document:
    """Token ids of begin + prompt + response + end, and how many of them belong to the prompt."""

    tokens: np.ndarray  # [T] int16
    num_prompt: int


def encode(tokenizer: PreTrainedTokenizerFast, examples: list[Example], max_length: int) -> list[Document]:
    """Tokenize prompt and response apart, as in decoding; documents longer than `max_length` are left out."""
    prompts = tokenizer([example.prompt for example in examples])["input_ids"]
    responses = tokenizer([example.response for example in examples], add_special_tokens=False)["input_ids"]
    documents = [
        Document(np.array(prompt + response + [tokenizer.eos_token_id], dtype=np.int16), len(prompt))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return [document for document in documents if len(document.tokens) <= max_length]


class BatchStream(IterableDataset):
    """Batches `{"input_ids" [B, T], "weights" [B, T]}` from batch number `start` on; equal seeds give equal streams.

    `pools` are the domains' documents and `shares` the part of all training tokens that each domain gets.
    `weights` is the loss weight of a token: 1 in responses, `prompt_weight` in prompts, 0 for begin and padding.
    """

    def __init__(
        self,
        pools: dict[str, list[Document]],
        shares: dict[str, float],
        tokens_per_batch: int,
        prompt_weight: float,
        seed: int,
        start: int = 0,
    ) -> None:
        self.pools, self.shares = pools, shares
        self.tokens_per_batch, self.prompt_weight = tokens_per_batch, prompt_weight
        self.seed, self.start = seed, start

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(self._collate, islice(self._groups(), self.start, None))

    def _groups(self) -> Iterator[list[Document]]:
        """Documents that make up a batch: chunks are drawn by share, sorted by length, cut, and the cuts shuffled."""
        rng = random.Random(self.seed)
        domains = [domain for domain in self.pools if self.shares.get(domain, 0) > 0]
        mean_lengths = {d: sum(len(doc.tokens) for doc in self.pools[d]) / len(self.pools[d]) for d in domains}
        odds = [self.shares[domain] / mean_lengths[domain] for domain in domains]
        streams = {domain: _cycle(self.pools[domain], random.Random(f"{self.seed}/{domain}")) for domain in domains}
        while True:
            chunk = [next(streams[domain]) for domain in rng.choices(domains, odds, k=CHUNK)]
            groups = list(_cut(sorted(chunk, key=lambda doc: len(doc.tokens)), self.tokens_per_batch))
            rng.shuffle(groups)
            yield from groups

    def _collate(self, group: list[Document]) -> dict[str, Tensor]:
        width = max(len(document.tokens) for document in group)
        input_ids = torch.zeros(len(group), width, dtype=torch.long)
        weights = torch.zeros(len(group), width)
        for row, document in enumerate(group):
            length = len(document.tokens)
            input_ids[row, :length] = torch.from_numpy(document.tokens.astype(np.int64))
            weights[row, 1 : document.num_prompt] = self.prompt_weight
            weights[row, document.num_prompt : length] = 1.0
        return {"input_ids": input_ids, "weights": weights}


def _cycle(pool: list[Document], rng: random.Random) -> Iterator[Document]:
    """All documents in a random order, again and again, each time in another one."""
    pool = list(pool)
    while True:
        rng.shuffle(pool)
        yield from pool


def _cut(documents: list[Document], tokens_per_batch: int) -> Iterator[list[Document]]:
    """Cut documents, sorted by length, where the padded batch would exceed `tokens_per_batch`."""
    group: list[Document] = []
    for document in documents:
        if group and (len(group) + 1) * len(document.tokens) > tokens_per_batch:
            yield group
            group = []
        group.append(document)
    yield group
