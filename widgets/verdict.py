"""The outcome of a checked exercise, and what every check does first."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

NOT_YET = "Not yet: write your answer where the dots are, then run the cell again."


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, and one or two sentences that say why."""

    passed: bool
    message: str


class NotYet(Exception):
    """The answer is still empty."""


def is_empty(answer: Any) -> bool:
    """Whether nothing was written yet: None or dots."""
    return answer is None or answer is ...


def call(answer: Callable, *args: Any) -> Any:
    """Call the reader's function.

    Args:
        answer: What the reader wrote.
        *args: Its arguments.

    Returns:
        What it returns, never None.

    Raises:
        NotYet: When there is no function, or it returns nothing.
    """
    if not callable(answer):
        raise NotYet
    try:
        result = answer(*args)
    except NotImplementedError:
        raise NotYet from None
    if is_empty(result):
        raise NotYet
    return result


def hint(value: float, wrong: Mapping[str, float], close: float = 1e-6) -> str | None:
    """Find the mistake that gives this value.

    Args:
        value: What the reader's answer gives.
        wrong: {hint: the value that the mistake gives}.
        close: Relative difference that counts as equal.

    Returns:
        The hint, or None when no known mistake gives `value`.
    """
    for text, mistaken in wrong.items():
        if math.isclose(value, mistaken, rel_tol=close) or (
            math.isnan(value) and math.isnan(mistaken)
        ):
            return text
    return None
