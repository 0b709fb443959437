"""Check a reader's answer: is it right, what does it cost, and if wrong, which mistake is it?"""

from collections.abc import Callable
from typing import Any

from oomb_widgets.exercise_bytes import judge_page_bytes
from oomb_widgets.exercise_loss import judge_chunked_loss
from oomb_widgets.exercise_occupancy import judge_programs
from oomb_widgets.exercise_recurrence import judge_recurrent_step
from oomb_widgets.verdict import NOT_YET, NotYet, Verdict, is_empty

EXERCISES: dict[str, Callable[[Any], Verdict]] = {
    "page_bytes": judge_page_bytes,
    "programs": judge_programs,
    "chunked_loss": judge_chunked_loss,
    "recurrent_step": judge_recurrent_step,
}


def check(exercise: str, answer: Any) -> None:
    """Print the verdict on an answer."""
    print(judge(exercise, answer).message)


def judge(exercise: str, answer: Any) -> Verdict:
    """Try an answer.

    Args:
        exercise: A key of `EXERCISES`.
        answer: The function the exercise asks for; None, `...` or a function that returns
            nothing is "not yet".

    Returns:
        Whether it is right, and why; code that fails gives a verdict too.

    Raises:
        ValueError: When there is no such exercise.
    """
    if exercise not in EXERCISES:
        raise ValueError(f"no exercise {exercise!r}; there are {', '.join(EXERCISES)}")
    if not callable(answer) and not is_empty(answer):
        return Verdict(
            False,
            f"Give check your function, not its result: check({exercise!r}, {exercise}), with "
            "nothing called.",
        )
    try:
        return EXERCISES[exercise](answer)
    except NotYet:
        return Verdict(False, NOT_YET)
    except Exception as error:  # the reader's own code failed: say so, without a long traceback
        return Verdict(False, f"Your answer raised {type(error).__name__}: {error}")
