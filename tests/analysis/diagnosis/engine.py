"""A small serving engine of the tests, with mistakes to plant: plain loops over transformers' own cache, one text at a time.

A round drafts DRAFTED tokens and keeps those that the text, the target's greedy one, goes on with.
"""

import copy
import json
from dataclasses import replace

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


class StatesEngine(Engine):
    """The same of a draft that reads the target's states, which a plain forward pass over the whole text gives.

    early, last   the states are read so many layers before, or are the last one in the place of all
    rows          output rows are taken for the token of so many rows after them
    """

    def __init__(self, pair, early=0, last=False, rows=0, **mistakes):
        super().__init__(pair, **mistakes)
        self.target, count = pair.target, pair.target.config.num_hidden_layers
        self.layers = [count if last else max(layer - early, 0) for layer in self.draft.target_layers]
        self.tokens = self.draft.lm_head.kept.roll(-rows)

    def states(self, ids):
        hidden = self.target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([hidden[layer][0] for layer in self.layers], -1).to(self.draft.dtype)

    def token(self, logits):
        return int(self.tokens[logits.argmax()])

    @torch.no_grad()
    def rounds(self, question, prompt, text):
        ids, start, counts = [*prompt, *text], 1, []
        states = self.states(ids)
        self.begin(len(prompt))
        while start < len(text):
            drafted = self.round(ids, states, len(prompt) + start - 1)
            accepted = 0
            while accepted < DRAFTED and text[start + accepted : start + accepted + 1] == [drafted[accepted]]:
                accepted += 1
            counts.append(accepted)
            self.end(accepted)
            start += accepted + 1
        return counts


class EagleEngine(StatesEngine):
    """Of an EAGLE-3 draft: every token beside the target's state before it, then beside the draft's own.

    normed   the draft hands on its state after the last norm
    guessed  accepted tokens stay in the cache as they were drafted
    """

    def __init__(self, pair, normed=False, guessed=False, **mistakes):
        super().__init__(pair, **mistakes)
        self.normed, self.guessed = normed, guessed

    def begin(self, prompt):
        self.cache, self.read, self.length = DynamicCache(), 1, prompt

    def forward(self, tokens, columns, before):
        """The state to hand on and the next token, after tokens [n] at columns of the text beside the states before them."""
        positions = torch.tensor([columns]) + self.shift * (torch.tensor([columns]) >= self.length)
        past, size = self.cache.get_seq_length(), len(tokens)
        mask = torch.full((size, past + size), -1e9, dtype=self.draft.dtype).triu(past + 1)[None, None]
        handed_on, final = self.draft.read(torch.tensor([tokens]), positions, mask, self.cache, before[None])
        state = (final if self.normed else handed_on)[0, -1:]
        return state, self.token(self.draft.lm_head(final[0, -1]))

    def round(self, ids, states, newest):
        if self.window:
            self.cache, self.read = DynamicCache(), max(newest + 2 - self.window, 1)
        columns = list(range(self.read, newest + 1))
        before = self.draft.projected(states[[column - 1 for column in columns]])
        state, token = self.forward(ids[self.read : newest + 1], columns, before)
        drafted = [token]
        while len(drafted) < DRAFTED:
            state, token = self.forward(drafted[-1:], [newest + len(drafted)], state)
            drafted.append(token)
        self.read = newest + 1
        return drafted

    def end(self, accepted):
        stay = min(accepted, DRAFTED - 1) if self.guessed else 0
        if forgotten := DRAFTED - 1 - stay:
            self.cache.crop(-forgotten)
        self.read += stay


class BlockEngine(StatesEngine):
    """Of a block draft, which reads the whole context again in every round.

    causal  the tokens of a block do not see those after them
    whole   they do, in layers with a window, too
    size    tokens of a block; None: those that the draft was trained with
    """

    def __init__(self, pair, causal=False, whole=False, size=None, **mistakes):
        super().__init__(pair, **mistakes)
        self.draft, seen = copy.deepcopy(self.draft), self.draft._seen
        if size is not None:
            self.draft.settings = replace(self.draft.settings, block_size=size)

        def changed(anchors, length):
            masks, block = seen(anchors, length), torch.arange(self.draft.settings.block_size)
            sees = block <= block[:, None] if causal else torch.full((len(block), len(block)), True)
            return tuple(torch.cat([mask[..., :length], sees.expand(*mask.shape[:-1], -1)], -1) for mask in masks)

        if causal or whole:
            self.draft._seen = changed

    def begin(self, prompt): ...

    def end(self, accepted): ...

    def round(self, ids, states, newest):
        first = max(newest + 1 - self.window, 0) if self.window else 0
        context = self.draft.context(states[None, first:newest], torch.arange(first, newest)[None])
        turned = self.draft.rotary_emb.register_forward_pre_hook(
            lambda _, args: (args[0], args[1] + self.shift + first)
        )
        with turned:
            final = self.draft(torch.tensor([[ids[newest]]]), torch.tensor([[newest - first]]), context)[0, 0]
        drafted, before = [], ids[newest]
        for state in final[:DRAFTED]:
            logits, _ = self.draft.outputs(state, self.draft.lm_head(state), torch.tensor(before))
            before = self.token(logits)
            drafted.append(before)
        return drafted
