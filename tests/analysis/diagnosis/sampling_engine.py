"""A serving engine of the tests that draws its drafts, with mistakes to plant: whole forward passes, all texts side by side."""

import json

import torch

from tests.analysis.diagnosis.engine import DRAFTED
from toolkit.models.teacher import pad_right


def warped(logits, temperature, top_p=1.0):
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    probs = (logits / temperature).softmax(-1)
    if top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        dropped = torch.zeros_like(probs).scatter(-1, order, (ordered.cumsum(-1) - ordered >= top_p).float()).bool()
        probs = probs.masked_fill(dropped, 0)
    return probs / probs.sum(-1, keepdim=True)


class SamplingEngine:
    """Speculative sampling (arXiv:2211.17192, algorithm 1), and what the engine gets wrong.

    temperature  of p and q; draft_temperature, top_p: of q alone
    greedy       the draft's top tokens are taken
    as_greedy    a drafted token is tested as if q were 1 there: it is accepted with probability p
    beyond       a text ends at its end token, and the counts go on
    """

    def __init__(
        self,
        pair,
        temperature=1.0,
        draft_temperature=None,
        top_p=1.0,
        greedy=False,
        as_greedy=False,
        beyond=False,
        seed=0,
    ):
        self.target, self.draft, self.end_ids = pair.target, pair.draft, pair.end_ids
        self.temperature = temperature
        self.draft_temperature = temperature if draft_temperature is None else draft_temperature
        self.top_p, self.greedy, self.as_greedy, self.beyond = top_p, greedy, as_greedy, beyond
        self.generator = torch.Generator().manual_seed(seed)

    def logits(self, model, sequences, last):
        """Logits [b, last, V] after the last tokens of sequences."""
        logits = model(input_ids=pad_right(sequences), use_cache=False).logits.float()
        return torch.stack([row[len(ids) - last : len(ids)] for row, ids in zip(logits, sequences, strict=True)])

    def drawn(self, probs):
        return torch.multinomial(probs, 1, generator=self.generator)[..., 0]

    def tested(self, drafted, p, q):
        """How many drafted tokens [K] are accepted, and the token after them, from p [K + 1, V] and q [K, V]."""
        for k, token in enumerate(drafted):
            if self.as_greedy:
                draft = torch.zeros_like(p[k])
                draft[token] = 1
            else:
                draft = q[k]
            if torch.rand((), generator=self.generator) >= p[k, token] / draft[token]:
                return k, int(self.drawn((p[k] - draft).clamp(min=0)))
        return len(drafted), int(self.drawn(p[-1]))

    @torch.no_grad()
    def answer(self, questions, encode, most, path):
        """Write a line per question; returns the path."""
        prompts = [encode(question) for _, question in questions]
        first = self.drawn(warped(self.logits(self.target, prompts, 1)[:, 0], self.temperature)).tolist()
        texts, counts = [[token] for token in first], [[] for _ in prompts]
        while live := [n for n, text in enumerate(texts) if len(text) < most and not self.ended(text)]:
            sequences = [prompts[n] + texts[n] for n in live]
            q = []
            for _ in range(DRAFTED):
                q.append(warped(self.logits(self.draft, sequences, 1)[:, 0], self.draft_temperature, self.top_p))
                tokens = q[-1].argmax(-1) if self.greedy else self.drawn(q[-1])
                sequences = [[*ids, int(token)] for ids, token in zip(sequences, tokens, strict=True)]
            p = warped(self.logits(self.target, sequences, DRAFTED + 1), self.temperature)
            for row, n in enumerate(live):
                drafted = sequences[row][-DRAFTED:]
                accepted, extra = self.tested(drafted, p[row], torch.stack(q, 1)[row])
                texts[n] += [*drafted[:accepted], extra]
                counts[n].append(accepted)
        lines = []
        for (name, _), prompt, text, accepted in zip(questions, prompts, texts, counts, strict=True):
            text = text[: self.end_of(text)]
            line = {"prompt_token_ids": prompt, "token_ids": text, "category": name}
            lines.append({**line, "per_step_drafted": [DRAFTED] * len(accepted), "per_step_accepted": accepted})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def end_of(self, text):
        """The length of a text up to its first end token."""
        return next((n + 1 for n, token in enumerate(text) if token in self.end_ids), len(text))

    def ended(self, text):
        return self.end_of(text) < len(text) or text[-1] in self.end_ids
