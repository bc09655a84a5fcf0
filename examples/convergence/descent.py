"""The paper's convergence theory on a small case; run by `run.sh`.

PAM with exact subproblems: the encoder step to tolerance, by L-BFGS in float64 on all rows, and the decoder's closed
form, both with proximal terms, on smooth activations. The objective is that of Algorithm 3.1 over all N rows, and a
decay of the encoder, without which it would grow without bound, the decoder shrinking:

    L = sum ||z W + b - x||^2 + alpha ||W||^2 + beta ||b||^2 + gamma ||W_enc||^2

The theory says that L never rises, that squared steps have a finite sum, which mu bounds, and that iterates converge
at a rate that the Kurdyka-Lojasiewicz exponent theta of L gives: linearly at 1/2, as a power of t above it. With
gap_t = L_t - L_*, descent and the inequality give L_t - L_{t+1} ~ gap_t^(2 theta), so that theta is half the slope of
the one against the other, both logarithmic. L_* is what makes them straightest.
"""

from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from measured import arguments, rows_of, write_series
from torch import Tensor
from verdicts import Claim, write_claims

from saecli.sae.activations import Activation, KeepsK, Parameters
from saecli.sae.codes import Codes
from saecli.sae.dictionary import SAE, Batch
from saecli.show.style import COLOURS, figure, legend_below, log_scale
from saecli.train.ridge import Sums, Terms, optimal_decoder
from saecli.train.start import initial_sae

ROWS, LATENTS, OUTERS = 100, 16, 120
ALPHA, BETA, GAMMA, MU = 5.0, 1.0, 5.0, 1.0
TOLERANCE = 1e-9  # of L-BFGS: the largest entry of the gradient, and the change of loss and weights
TEMPERATURE = 0.5  # of soft-topk, in units of the codes
TAIL = 0.5  # share of the iterations, the last, from which the exponent is estimated
ROUNDING = 1e-11  # of the objective: differences below are float64's


@dataclass(frozen=True)
class Swish(Activation):
    """`z = pre * sigmoid(pre)`."""

    name: ClassVar[str] = "swish"

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        return Codes(pre * pre.sigmoid())


@dataclass(frozen=True)
class SoftTopK(KeepsK):
    """The paper's smooth TopK: `z_i = pre_i * P(i in S)`, S a set of k latents, with `P(S) ~ exp(sum_{j in S} pre_j /
    TEMPERATURE)`, by enumeration."""

    name: ClassVar[str] = "soft-topk"

    def __call__(self, pre: Tensor, parameters: Parameters) -> Codes:
        latents = range(pre.shape[1])
        chosen = torch.tensor(list(combinations(latents, self.k)))
        subsets = pre.new_zeros(len(chosen), pre.shape[1]).scatter_(1, chosen, 1.0)
        return Codes(pre * ((pre @ subsets.T / TEMPERATURE).softmax(1) @ subsets))


ACTIVATIONS: dict[str, Activation] = {"swish": Swish(), "soft-topk": SoftTopK(k=3)}


def descended(
    x: Tensor, activation: Activation, outers: int = OUTERS
) -> tuple[list[float], list[float]]:
    """The objective after each half step, from the start, and the squared step of each outer iteration."""
    rows = Batch.of(x)
    sae = initial_sae(activation, LATENTS, rows, seed=0).requires_grad_()
    values, points = [objective(sae, rows)], [point(sae)]
    for _ in range(outers):
        for half in (encoder_step, decoder_step):
            half(sae, rows)
            values.append(objective(sae, rows))
        points.append(point(sae))
    return values, [(after - before).square().sum().item() for before, after in pairwise(points)]


def encoder_step(sae: SAE, rows: Batch) -> None:
    """Minimise L + mu (||W_enc - W_enc^t||^2 + ||b_enc - b_enc^t||^2) over the encoder, to tolerance."""
    encoder = [sae.W_enc, sae.b_enc]
    held = [tensor.detach().clone() for tensor in encoder]
    optimizer = torch.optim.LBFGS(
        encoder,
        max_iter=100,
        history_size=20,
        tolerance_grad=TOLERANCE,
        tolerance_change=TOLERANCE,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        moved = sum(
            (tensor - before).square().sum() for tensor, before in zip(encoder, held, strict=True)
        )
        value = sae.loss(rows).value + (GAMMA * sae.W_enc.square().sum() + MU * moved) / rows.size
        value.backward()
        return value

    before = optimizer.step(loss)
    if not loss() <= before:  # by rounding, a line search can end higher
        with torch.no_grad():
            for tensor, start in zip(encoder, held, strict=True):
                tensor.copy_(start)


@torch.no_grad()
def decoder_step(sae: SAE, rows: Batch) -> None:
    """The minimum over the decoder of the same sum, mu (||W_dec - W_dec^t||^2 + ||b_dec - b_dec^t||^2) added."""
    system = Sums(LATENTS, sae.d_out)
    system.add(sae.codes(rows.x), rows.y)
    terms = Terms(W_t=sae.W_dec, b_t=sae.b_dec, alpha=ALPHA, beta=BETA, mu=MU, nu=MU)
    state = optimal_decoder(system, terms)
    sae.W_dec.copy_(state.Delta)
    sae.b_dec.copy_(state.b)


def point(sae: SAE) -> Tensor:
    """All unknowns in a row."""
    return torch.cat(
        [tensor.detach().flatten() for tensor in (sae.W_enc, sae.b_enc, sae.W_dec, sae.b_dec)]
    )


@torch.no_grad()
def objective(sae: SAE, rows: Batch) -> float:
    """L where the SAE stands."""
    terms = ((ALPHA, sae.W_dec), (BETA, sae.b_dec), (GAMMA, sae.W_enc))
    return sae.loss(rows).squared_error.item() * rows.size + sum(
        weight * part.square().sum().item() for weight, part in terms
    )


def exponent(values: list[float]) -> tuple[float, float, float]:
    """The exponent theta from the tail of an objective by outer iterations, its limit, and how straight the line is."""
    tail = np.array(values[round((1 - TAIL) * len(values)) :])
    falls = -np.diff(tail)
    known = falls > ROUNDING * tail[-1]
    best = (np.nan, tail[-1], -np.inf)
    for share in np.geomspace(
        1e-3, 1e2, 400
    ):  # how far below the last value the limit lies, in last falls
        limit = tail[-1] - share * falls[known][-1]
        logs = np.log(tail[:-1][known] - limit), np.log(falls[known])
        slope, straight = np.polyfit(*logs, 1)[0], np.corrcoef(*logs)[0, 1] ** 2
        if straight > best[2]:
            best = (slope / 2, limit, straight)
    return best


def draw(
    out: Path, found: dict[str, tuple[list[float], list[float]]], limits: dict[str, float]
) -> None:
    """The gap to the limit, the steps and their sum, by iterations."""
    with figure(out / "descent.png", 10.5, 3.4) as drawn:
        panels = drawn.subplots(1, 3)
        for (name, (values, steps)), colour in zip(found.items(), COLOURS, strict=False):
            whole = np.array(values[::2])
            panels[0].plot(whole - limits[name], color=colour, label=name)
            panels[1].plot(range(1, len(steps) + 1), steps, color=colour)
            panels[2].plot(range(1, len(steps) + 1), np.cumsum(steps), color=colour)
            panels[2].axhline((whole[0] - whole[-1]) / MU, color=colour, linestyle=":", linewidth=1)
        for axes, label in zip(
            panels,
            ("objective above its limit", "squared step", "sum of squared steps, and its bound"),
            strict=True,
        ):
            axes.set(xlabel="outer iteration t", ylabel=label)
            log_scale(axes, "y")
        legend_below(drawn, *panels[0].get_legend_handles_labels())


def main() -> None:
    given = arguments(__doc__.splitlines()[0], acts=f"activations, of {', '.join(ACTIVATIONS)}")
    torch.set_num_threads(1)  # on so few rows a second one costs more than it brings
    x = rows_of(given.out, "digits", "train")[:ROWS].double()
    x = (x - x.mean(0)) / x.std()
    found = {name: descended(x, ACTIVATIONS[name]) for name in given.acts}
    estimates = {name: exponent(values[::2]) for name, (values, _) in found.items()}
    draw(given.out, found, {name: limit for name, (_, limit, _) in estimates.items()})
    write_series(
        given.out,
        "descent",
        {
            f"{name} {what}": series
            for name, (values, steps) in found.items()
            for what, series in (("objective", values[::2]), ("squared step", steps))
        },
    )
    rises = {
        name: max(after - before for before, after in pairwise(values)) / values[0]
        for name, (values, _) in found.items()
    }
    spent = {
        name: MU * sum(steps) / (values[0] - values[-1]) for name, (values, steps) in found.items()
    }
    later = {name: sum(steps[OUTERS // 2 :]) / sum(steps) for name, (_, steps) in found.items()}
    write_claims(
        given.out,
        "Convergence",
        given.command,
        [
            Claim(
                "PAM with exact subproblems and a smooth activation never raises its objective",
                "holds" if max(rises.values()) <= ROUNDING else "does not hold",
                "largest rise of a half step, of the objective at the start: "
                + "; ".join(f"{name} {max(rise, 0):.1g}" for name, rise in rises.items()),
                "descent.png",
            ),
            Claim(
                "Its steps are square-summable, mu times their sum at most the decrease of the objective",
                "holds" if max(spent.values()) <= 1 else "does not hold",
                "mu times the sum over the decrease: "
                + "; ".join(f"{name} {share:.2g}" for name, share in spent.items())
                + "; fraction of the sum in the second half of the iterations: "
                + "; ".join(f"{name} {share:.1g}" for name, share in later.items()),
                "descent.png",
            ),
            Claim(
                "It converges at a rate that a Kurdyka-Lojasiewicz exponent gives",
                "holds"
                if all(
                    0 < theta < 1 and straight > 0.95 for theta, _, straight in estimates.values()
                )
                else "does not hold",
                "exponent from the last half of the iterations: "
                + "; ".join(
                    f"{name} {theta:.2f} (R^2 {straight:.3f})"
                    for name, (theta, _, straight) in estimates.items()
                )
                + "; 0.5 is linear convergence, more is slower",
                "descent.png",
            ),
        ],
    )


if __name__ == "__main__":
    main()
