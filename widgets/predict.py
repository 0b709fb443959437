"""Ask for a guess before the measurement, and set both side by side after it."""

import re

_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "%": 1e-2}
_NUMBER = (
    r"([-+]?(?:[1-9]\d{0,2}(?:[,_\s]\d{3})+(?!\d)|\d*)(?:\.\d*)?(?:e[-+]?\d+)?)"  # 12 000 or 12000
    r"\s*([kmg%]?)"
)


def predict(question: str, unit: str = "") -> float | None:
    """Ask the reader for a number before the next cell measures it.

    A wrong guess that was written down teaches more than a right answer that was read.
    Pass the result to the next picture or to `reveal`, which set it beside the measurement.

    Args:
        question: What to guess.
        unit: What one unit of the answer is, for instance "thousand tokens".

    Returns:
        The guess in `unit`, or None when it was skipped (an empty line) or nobody is there
        to ask: a notebook run as a whole by a program, or a script.
    """
    prompt = f"{question} [{unit}] " if unit else f"{question} "
    while True:
        try:
            text = input(f"{prompt}(a number, or Enter to skip) ")
        except (EOFError, OSError, RuntimeError):  # RuntimeError: a kernel that may not ask
            print(f"{prompt.rstrip()} (no guess)")
            return None
        if not text.strip():
            return None
        try:
            return parse_number(text, unit)
        except ValueError as error:
            print(error)


def parse_number(text: str, unit: str = "") -> float:
    """Read a number as people write it.

    Args:
        text: For instance "12", "1e-7", "32k", "1.5M", "40%" or "12 000 tokens". A comma, space
            or underscore is a separator of thousands; the decimal point is a point.
        unit: May follow the number, with or without its last s. No other word may.

    Returns:
        The number; k, M and G are powers of a thousand.

    Raises:
        ValueError: When `text` is not one number.
    """
    words = "|".join(re.escape(word) for word in (unit, unit.removesuffix("s")))
    match = re.fullmatch(rf"{_NUMBER}\s*(?:{words})?", text.strip(), re.IGNORECASE)
    try:
        number, suffix = match.groups()
        return float(re.sub(r"[,_\s]", "", number)) * _SUFFIXES[suffix.lower()]
    except (AttributeError, ValueError):
        after = f", in {unit}" if unit else ""
        raise ValueError(
            f"{text!r} is not a number; write for instance 12, 0.5, 32k or 1e-7{after}"
        ) from None


def reveal(guess: float | None, measured: float, unit: str = "", *, exact: bool = False) -> None:
    """Print the measured value and how far the guess was from it.

    Args:
        guess: What `predict` returned.
        measured: The truth.
        unit: Unit of both.
        exact: The answer is right or wrong, and being near does not count.
    """
    print(f"measured: {_write(measured)} {unit}".rstrip())
    if guess is None:
        return
    line = f"your guess: {_write(guess)} {unit}".rstrip()
    if exact:
        line += ", right" if guess == measured else ", not this time"
    elif guess > 0 and measured > 0:
        ratio = max(guess / measured, measured / guess)
        side = "high" if guess > measured else "low"
        line += ", close" if ratio < 1.1 else f", {ratio:.3g} times too {side}"
    print(line)


def _write(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"
