"""A small serving engine of the tests, with mistakes to plant: plain loops over transformers' own cache, one text at a time.

A round drafts DRAFTED tokens and keeps those that the text, the target's greedy one, goes on with.
"""

import copy
import json

import torch
from transformers import DynamicCache

from data_gen.prompts import ToyPrompts
from toolkit.config import method
from toolkit.decoding import Sampling, decode

DRAFTED = 4
NAMES = ("math", "instruct", "code")


def questions(count, first=0):
    """Prompts of the three toy domains in turn, with their domain."""
    prompts = {name: ToyPrompts(name, "test", 60).load() for name in NAMES}
    return [(NAMES[n % 3], prompts[NAMES[n % 3]][(first + n // 3) % 60].prompt) for n in range(count)]


def penalized(logits, ids, penalty):
    if penalty == 1.0:
        return logits
    rows = torch.tensor(sorted(set(ids)))
    values = logits[rows]
    return logits.index_put((rows,), torch.where(values > 0, values / penalty, values * penalty))


def texts(pair, count, most, first=0, penalty=1.0):
    """Domain, question, prompt and greedy text of some questions."""
    sampling = Sampling(temperature=0, max_new_tokens=most, repetition_penalty=penalty)
    asked = questions(count, first)
    answers = decode(pair, [question for _, question in asked], method("autoregressive"), sampling, batch_size=count)
    return [(*each, answer.prompt_ids, answer.token_ids) for each, answer in zip(asked, answers, strict=True)]


class Engine:
    """A draft and what the engine gets wrong with it.

    stale      rejected tokens that stay in the draft's cache after a round
    shift      of positions after the prompt
    prompt     of the draft: "no begin", "two begins", "no template"
    window     tokens of the context that the draft reads; 0: all
    penalty    the target's repetition penalty, without which the draft drafts if it is `unpenalized`
    """

    def __init__(self, pair, stale=0, shift=0, prompt="", window=0, penalty=1.0, unpenalized=False, dtype=None):
        self.tokenizer, self.stale, self.shift, self.prompt, self.window = pair.tokenizer, stale, shift, prompt, window
        self.draft = pair.draft if dtype is None else copy.deepcopy(pair.draft).to(dtype)
        self.penalty = 1.0 if unpenalized else penalty

    def draft_prompt(self, prompt, question):
        match self.prompt:
            case "no begin":
                return prompt[1:]
            case "two begins":
                return [prompt[0], *prompt]
            case "no template" if question.startswith("Q: "):
                return self.tokenizer(question.removeprefix("Q: ").removesuffix("\nA:")).input_ids
        return prompt

    @torch.no_grad()
    def rounds(self, question, prompt, text):
        """Accepted tokens of every round along the text."""
        shown = self.draft_prompt(prompt, question)
        cache, unread, start, counts = DynamicCache(), [*shown, text[0]], 1, []
        while start < len(text):
            if self.window:
                cache, unread = DynamicCache(), [*shown, *text[:start]][-self.window :]
            drafted = []
            for _ in range(DRAFTED):
                positions = torch.arange(cache.get_seq_length(), cache.get_seq_length() + len(unread))
                positions = positions + self.shift * (positions >= len(shown))
                output = self.draft(
                    torch.tensor([unread]), position_ids=positions[None], past_key_values=cache, use_cache=True
                )
                logits = output.logits[0, -1].float()
                unread = [int(penalized(logits, [*prompt, *text[:start], *drafted], self.penalty).argmax())]
                drafted += unread
            accepted = 0
            while accepted < DRAFTED and text[start + accepted : start + accepted + 1] == [drafted[accepted]]:
                accepted += 1
            counts.append(accepted)
            if rejected := DRAFTED - 1 - min(accepted + self.stale, DRAFTED - 1):
                cache.crop(-rejected)
            unread = drafted[-1:] * (accepted == DRAFTED) + text[start + accepted : start + accepted + 1]
            start += accepted + 1
        return counts

    def answer(self, written, path):
        """Write a line per text; returns the path."""
        lines = []
        for name, question, prompt, text in written:
            counts = self.rounds(question, prompt, text)
            line = {"prompt_token_ids": prompt, "token_ids": text, "category": name}
            lines.append({**line, "per_step_drafted": [DRAFTED] * len(counts), "per_step_accepted": counts})
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path
