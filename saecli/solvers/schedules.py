"""What changes from one outer iteration to the next: weights, and whether alpha is chosen anew.

A schedule of weights is a number; `A:B`, geometric from A at the first outer iteration to B at the last; or `A,B,C`,
one value per outer iteration, of which the last holds on. Outer iterations are counted from 0.

Source: the paper's Algorithm 3.1, whose proximal weights carry the index of the outer iteration.
"""

import math

CHOICE_GROWTH = 1.25  # ratio of the outer iterations at which alpha is chosen anew, once there are several
SPELLING = "a number, FIRST:LAST with both above 0, or numbers of at least 0 with commas between them"


def check_schedule(text: str) -> None:
    """Refuse a schedule's spelling.

    Args:
        text: what is no plain number.

    Raises:
        ValueError: it is none; the message completes "the option must be".
    """
    try:
        values = _values(text)
    except ValueError:
        raise ValueError(SPELLING) from None
    if not all(math.isfinite(value) and (value > 0 or (value == 0 and ":" not in text)) for value in values):
        raise ValueError(SPELLING)


def weight_at(schedule: float | str, outer: int, outers: int) -> float:
    """The weight of an outer iteration.

    Args:
        schedule: a number, or a text that `check_schedule` lets pass.
        outer: the outer iteration.
        outers: how many there are in all.
    """
    if not isinstance(schedule, str):
        return schedule
    values = _values(schedule)
    if ":" not in schedule:
        return values[min(outer, len(values) - 1)]
    first, last = values
    share = min(1.0, outer / (outers - 1)) if outers > 1 else 0.0
    return math.exp((1 - share) * math.log(first) + share * math.log(last))


def _values(text: str) -> list[float]:
    values = [float(part) for part in text.split(":" if ":" in text else ",")]
    if len(values) < 2 or (":" in text and len(values) != 2):
        raise ValueError(text)
    return values


def is_choosing_step(outer: int) -> bool:
    """Whether alpha is chosen anew at an outer iteration, counted from 0: at the first few, then ever more rarely,
    since it moves ever more slowly and choosing costs about a solve."""
    choice = 0
    while choice < outer:
        choice = max(choice + 1, math.floor(CHOICE_GROWTH * choice))
    return choice == outer


def outer_iterations(batches: int, per_epoch: int, every: float) -> int:
    """How many decoder steps training comes to, the last one of each epoch included.

    Args:
        batches: in the whole of training.
        per_epoch: batches of an epoch.
        every: batches between decoder steps within an epoch; infinite for none.
    """
    every = min(every, per_epoch)
    epochs, rest = divmod(batches, per_epoch)
    return epochs * math.ceil(per_epoch / every) + math.ceil(rest / every)
