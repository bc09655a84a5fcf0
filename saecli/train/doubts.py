"""Warnings about settings and measures of a training that finished with doubtful results.

Each warning is one sentence: the doubtful measure, and the option to change.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..sae.activations import KeepsK
from ..sae.metrics import doubts
from .config import Plan
from .live import LiveRows


def doubts_at_start(plan: Plan) -> list[str]:
    """The warnings about settings."""
    d_in, d_sae, activation = plan.train_rows.d_in, plan.training.d_sae, plan.activation
    if not isinstance(activation, KeepsK) or activation.k < min(d_in, d_sae):
        return []
    words = f"is all of d_sae, {d_sae}" if activation.k == d_sae else f"is not below d_in, {d_in}"
    return [f"--k {activation.k} {words}, so codes are not sparse; lower --k"]


def doubts_at_end(plan: Plan, train: Mapping[str, Any], test: Mapping[str, Any]) -> list[str]:
    """The warnings about measures, without repeating those of `doubts_at_start`.

    Args:
        plan: what was trained.
        train: `metrics.reconstruction` on training rows.
        test: the same on held-out rows; if these do not vary, so that their FVU is not finite, `train` is used.
    """
    which, measures = ("held-out", test) if math.isfinite(test["fvu"]) else ("train", train)
    advice = {"fvu": _for_less_error(plan, overfitted=train["fvu"] <= 1, l0=measures["l0"]),
              "l0": _for_fewer_active(plan)}
    found = doubts(measures, plan.train_rows.d_in, plan.training.d_sae)
    if doubts_at_start(plan):
        found.pop("l0", None)
    rows = plan.train_rows
    cut = [f"the text ended after {rows.rows:,} of {rows.wanted:,} training rows, before the learning rate had fallen; "
           f"use --rows {rows.rows}, or a longer text"] if isinstance(rows, LiveRows) and rows.ended_early else []
    return [*cut, *(f"{which} {words}; {advice[name]}" for name, words in found.items())]


def _for_less_error(plan: Plan, overfitted: bool, l0: float) -> str:
    if l0 < 1 and plan.training.sparsity != "none":
        return "fewer than one latent is active per row: lower --sparsity-weight"
    if overfitted:
        return "train FVU is not: lower --d-sae, or train on more rows"
    return "lower --lr" + (" or --sparsity-weight" if plan.training.sparsity != "none" else "")


def _for_fewer_active(plan: Plan) -> str:
    if not plan.activation.exact_zeros:
        return f"hardly a code of --act {plan.activation.name} is exactly zero: use another --act, such as topk"
    if isinstance(plan.activation, KeepsK):
        return "lower --k"
    return "use --sparsity l1" if plan.training.sparsity == "none" else "raise --sparsity-weight"
