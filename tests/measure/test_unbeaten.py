"""Which runs of a table no other beats."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saecli.measure.evaluate import unbeaten


def of(l0: float, *errors: float) -> dict[str, float]:
    return {"l0": l0, **dict(zip(("fvu", "ce_recovered", "kl"), errors, strict=False))}


@pytest.mark.parametrize(
    ("runs", "marks"),
    [
        ([of(16, 0.2), of(65, 0.1)], [True, True]),  # fewer latents, or less error
        ([of(16, 0.2), of(65, 0.3)], [True, False]),
        ([of(15.9, 0.2), of(16, 0.1)], [False, True]),  # of like L0
        ([of(15, 0.2), of(15.76, 0.1)], [True, True]),
        ([of(16, 0.2), of(16, 0.2)], [True, True]),
        # Better in one and worse in another.
        ([of(16, 0.1, 0.8, 0.5), of(16, 0.2, 0.9, 0.4)], [True, True]),
        ([of(16, 0.1, 0.8, 0.5), of(16, 0.2, 0.8, 0.5)], [True, False]),
        ([of(16, 0.1, 0.9, 0.5), of(16, 0.1, 0.8, 0.5)], [True, False]),
        ([of(16, 0.1), of(16, math.nan), of(16, math.inf)], [True, False, False]),
        ([of(1, math.nan), of(16, 0.1)], [False, True]),
        ([of(0, 0.9), of(0, 0.8)], [False, True]),
        ([of(100, 0.1), of(104, 0.09), of(108, 0.08), of(112, 0.07)], [False, False, False, True]),
    ],
)
def test_a_run_is_beaten_by_a_sparser_one_that_is_no_worse(
    runs: list[dict[str, float]], marks: list[bool]
):
    assert unbeaten(runs) == marks
    assert unbeaten(runs[::-1]) == marks[::-1]


RUN = st.tuples(st.floats(0, 100), *[st.sampled_from([0.1, 0.2, 0.3])] * 3)


@given(st.lists(RUN, min_size=1, max_size=12))
def test_of_runs_with_finite_errors_at_least_one_is_unbeaten(runs: list[tuple[float, ...]]):
    assert any(unbeaten([of(*run) for run in runs]))
