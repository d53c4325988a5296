"""A judge that is loaded here through transformers and decodes greedily, in the toolkit's own loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from analysis.quality.judge_templates import SYSTEM
from analysis.quality.judges.base import Reply
from toolkit.config import method
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair, fingerprint, load_tokenizer
from toolkit.types import Prompt


class LocalJudge:
    """A checkpoint folder or a name of the hub. A tokenizer without a chat template is given the question as it is."""

    def __init__(
        self, model: str, revision: str | None, dtype: str, device: str | None, batch_size: int, max_tokens: int
    ):
        self.model, self.revision, self.dtype, self.device = model, revision, dtype, device
        self.batch_size = batch_size
        self.sampling = Sampling(temperature=0.0, max_new_tokens=max_tokens)
        self.pair: ModelPair | None = None
        load_tokenizer(model, revision)  # a wrong name is said before anything is decoded

    @property
    def identity(self) -> dict[str, Any]:
        """Name, weights and number format."""
        identity = {"model": self.model, "revision": self.revision, "max_tokens": self.sampling.max_new_tokens}
        if self.pair is not None:
            target = self.pair.target
            identity |= {"weights": fingerprint(target), "dtype": str(target.dtype).removeprefix("torch.")}
        return identity

    @property
    def about(self) -> str:
        """Name, weights and number format."""
        identity = self.identity
        weights = f" (weights {identity['weights']}, {identity['dtype']})" if "weights" in identity else ""
        return f"{self.model}{weights}, greedily"

    def open(self, pair: Any) -> None:
        """Load the model."""
        if self.pair is None:
            device = self.device or ("cpu" if pair is None else str(pair.device))
            self.pair = ModelPair.from_pretrained(self.model, device=device, dtype=self.dtype, revision=self.revision)

    def ask(self, questions: Sequence[str]) -> Iterator[Reply]:
        """In batches of neighbours; a question that the model cannot read has no reply."""
        assert self.pair is not None
        for first in range(0, len(questions), self.batch_size):
            prompts = [self._prompt(text) for text in questions[first : first + self.batch_size]]
            generations = decode(
                self.pair, prompts, method("autoregressive"), self.sampling, batch_size=self.batch_size
            )
            for generation in generations:
                if generation.error is None:
                    yield Reply(generation.text)
                else:
                    yield Reply(None, f"the judge could not read it: {generation.error.partition(': ')[2]}")

    def _prompt(self, question: str) -> Prompt:
        """As a chat, without the system's turn where the template has none; or as it is."""
        assert self.pair is not None
        if not getattr(self.pair.tokenizer, "chat_template", None):
            return question
        turn = {"role": "user", "content": question}
        chat = [{"role": "system", "content": SYSTEM}, turn]
        try:
            self.pair.encode(chat)
        except InputError:
            return [turn]
        return chat
