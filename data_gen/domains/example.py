"""One prompt with its reference response."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A prompt, the response that a perfect model could give, and the answer to check a response against."""

    id: str
    prompt: str
    response: str
    answer: str | None
