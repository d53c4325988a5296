"""What every judge is: somebody with an identity who answers questions in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Reply:
    """What a judge said. text: None if nothing came, `reason` says why. by: what the judge calls itself, if it does."""

    text: str | None
    reason: str = ""
    by: str = ""


class Judging(Protocol):
    """A judge. identity: all that its replies depend on, beside the question; about: the same in words."""

    @property
    def identity(self) -> dict[str, Any]:
        """What JSON can hold; known once the judge is open."""

    @property
    def about(self) -> str:
        """For people."""

    def open(self, pair: Any) -> None:
        """Get ready; the pair whose texts are judged says where. Called again, nothing happens."""

    def ask(self, questions: Sequence[str]) -> Iterator[Reply]:
        """Replies in the order of the questions, each as soon as it is there. Raises InputError: out of reach."""
