"""Progress of rows that are being decoded, in tokens, with an estimate of what is left.

Until a row ends it counts as memoryless: its expected rest is the tokens made so far over the rows that have ended (the
maximum-likelihood mean of censored lengths), and no more than the limit leaves.
"""

from __future__ import annotations

import sys


class TokenBar:
    """A bar over the tokens of some rows, each of at most `most`; work: a line that is printed before."""

    def __init__(self, title: str, num_rows: int, most: int, work: str | None = None):
        from tqdm.auto import tqdm

        self.num_rows, self.most = num_rows, most
        self.made = self.ended = 0
        self.bar = tqdm(total=num_rows * most, desc=title, unit="token", unit_scale=True)
        self.say(work or f"{title}: {num_rows:,} rows of at most {most:,} tokens, {num_rows * most:,} in all")
        self._show()

    def __enter__(self) -> TokenBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def say(self, line: str) -> None:
        self.bar.write(line, file=sys.stderr)

    def skip(self, count: int) -> None:
        """Rows that need no work: made before, or left out."""
        self.num_rows -= count
        self._show()

    def tokens(self, count: int) -> None:
        """One more round, of this many tokens."""
        self.made += count
        self._show()
        self.bar.update(count)

    def row(self, _: object = None) -> None:
        self.ended += 1
        self._show()

    def count(self, num_tokens: int) -> None:
        """One more row has come as a whole."""
        self.tokens(num_tokens)
        self.row()

    @property
    def expected(self) -> float:
        """Tokens in all, as far as is known."""
        left = self.num_rows - self.ended
        mean = min(self.most, self.made / self.ended) if self.ended else self.most
        return min(self.made + left * mean, max(self.num_rows * self.most, self.made))

    def _show(self) -> None:
        self.bar.total = round(self.expected)
        self.bar.set_postfix_str(f"{self.ended}/{self.num_rows} rows", refresh=False)
