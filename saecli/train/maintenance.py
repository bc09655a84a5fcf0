"""Maintenance of a dictionary between steps: silencing, revival and balancing.

Shapes: n rows, D = d_in, E = d_out, F = d_sae, P places of a crosscoder; one otherwise.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.devices import moved
from ..sae.dictionary import Coupled, Dictionary

LEAST_SIZE = 1e-2  # least size of encoder and decoder, over the encoder's norm at the start
LEAST_NORM = 1e-3  # decoder norm over the mean one, below which a penalty is replaced by a quadratic
LEAST_EFFECT = 0.3  # effect over the median one, below which a latent is re-aimed
MOST_REAIMED = 0.02  # fraction of the latents, that are re-aimed for it at a decoder step, at most
SILENT = 1e-7  # a latent's mean contribution over a row's norm, below which a penalty has silenced it


def directions_of_worst(residuals: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Unit directions of the residuals of rows drawn with probability proportional to their squared error.

    Args:
        residuals: `y - y_hat` of some rows, (n, E).
        count: number of directions; drawn with replacement only if fewer rows have an error.
        generator: on the CPU.

    Returns:
        (count, E); zero if no row has an error.
    """
    scaled = residuals.double() / residuals.abs().max().clamp(min=torch.finfo(residuals.dtype).tiny)
    weights = scaled.square().sum(1).cpu()
    if not weights.any():
        return residuals.new_zeros(count, residuals.shape[1])
    again = int(weights.count_nonzero()) < count
    drawn = torch.multinomial(weights, count, replacement=again, generator=generator)
    chosen = scaled[moved(drawn, scaled.device)]
    return (chosen / chosen.norm(dim=1, keepdim=True)).to(residuals.dtype)


def least_useful(effect: Tensor, fired: Tensor) -> Tensor:
    """The latents that fire but that the others could replace: those whose effect is far below the median.

    In worlds of known features these are mostly duplicates and mixtures of features that others have; re-aimed, they
    find features that none has.

    Args:
        effect: of each latent, (F,), NaN where unknown; see `DecoderState.effect`.
        fired: the latents that fired, a mask, (F,).

    Returns:
        A mask, (F,), of the least ones, at most `MOST_REAIMED` of all latents; of fewer than 50 none.
    """
    if not fired.any():
        return fired
    ascending, order = effect.masked_fill(~fired, torch.inf).sort()
    low = ascending < LEAST_EFFECT * effect[fired].median()
    low[int(MOST_REAIMED * len(effect)):] = False
    return torch.zeros_like(fired).index_put((order,), low)


def unit(columns: Tensor) -> Tensor:
    """Columns, (D, m), each divided by its norm; zero where it is zero."""
    norms = columns.norm(dim=0)
    return columns / norms.masked_fill(norms == 0, 1)


@torch.no_grad()
def revive(dictionary: Dictionary, dead: Tensor, directions: Tensor, B: Tensor | None = None) -> None:
    """Re-aim dead latents, with the mean norms and the mean parameters of the others.

    The encoder is aimed along `B d`, the direction of rows in which the targets' regression grows most along d. A
    decoder that descends is aimed at d. One that is solved for waits for the next decoder step, until
    when it is tied, or zero if it is free.

    Args:
        dictionary: changed in place.
        dead: a mask, (F,), neither all false nor all true.
        directions: a unit vector d per dead latent, (m, E).
        B: the regression, (D, E); None where the targets are the rows.
    """
    def mean_of_others(values: Tensor) -> Tensor:
        return values.masked_fill(dead, 0).sum() / (~dead).sum()

    W_enc = dictionary.W_enc
    along = directions.T if B is None else unit(B @ directions.T)
    W_enc[:, dead] = mean_of_others(W_enc.norm(dim=0)) * along
    dictionary.b_enc.masked_fill_(dead, 0)
    for name, parameter in dictionary.activation_parameters.items():
        if dictionary.latent_dimension(name) is not None:
            parameter.masked_fill_(dead, mean_of_others(parameter))
    for name, parameter in dictionary.named_parameters():
        if name in ("W_dec", "Delta"):
            norm = mean_of_others(parameter.norm(dim=1)) if parameter.requires_grad else 0.0
            parameter[dead] = norm * directions


@torch.no_grad()
def silence(dictionary: Dictionary, norm_weights: Tensor, rows: float) -> bool:
    """Turn off latents whose contribution a penalty has driven to nothing: otherwise they shrink until they underflow,
    and a decoder step without the penalty would bring them back.

    Args:
        dictionary: its encoder is changed in place.
        norm_weights: the penalty's weight of each decoder norm, a sum over rows, (F,).
        rows: number of rows.

    Returns:
        Whether there were any.
    """
    W_dec = dictionary.decoder()
    contribution = norm_weights * W_dec.double().norm(dim=1) / rows  # (F,)
    gone = (norm_weights > 0) & (contribution < SILENT * math.sqrt(W_dec.shape[1]))
    dictionary.W_enc.masked_fill_(gone, 0)
    dictionary.b_enc.masked_fill_(gone, 0)
    return bool(gone.any())


def penalty_decay(W_dec: Tensor, weights: Tensor, size: float, places: Sequence[slice]) -> Tensor:
    """Weights, (P, F), of the quadratics in `||W_i||` at each place that majorise a penalty and equal it at the current
    decoder.

    `a ||W|| <= a (||W||^2 / ||W_t|| + ||W_t||) / 2`, so a step that lowers the right side lowers the left: encoder and
    decoder step then descend on one objective. A decoder step without the penalty would undo the encoder step's gain,
    and the two together would drive the codes to zero.

    Args:
        W_dec: the decoder before the step, (F, E).
        weights: the penalty's derivative in each decoder norm, a sum over rows, (F,), float64.
        size: the encoder's norm at the start of training.
        places: where each is in the targets.
    """
    norms = torch.stack([W_dec[:, place].double().norm(dim=1) for place in places])
    mean = max(norms.mean().item(), LEAST_SIZE * size / math.sqrt(norms.numel()))
    return weights / (2 * norms.clamp(min=LEAST_NORM * mean))


@torch.no_grad()
def balance(dictionary: Coupled, size: float) -> float | None:
    """Scale the codes, and the decoder by the inverse, so that encoder and decoder have one norm.

    Otherwise a penalty shrinks the codes a little in each encoder step, the decoder step compensates, and after some
    hundred iterations Adam's steps are large compared to the encoder. Under a penalty too strong for any code this
    stops at `LEAST_SIZE`, so that biases can silence the codes.

    Args:
        dictionary: changed in place.
        size: the encoder's norm at the start of training.

    Returns:
        The codes' factor; None if there is none, as for an activation that cannot be rescaled.
    """
    norm = dictionary.W_enc.norm().item()
    tiny = torch.finfo(dictionary.W_enc.dtype).tiny
    square = dictionary.c or dictionary.Delta.norm().item() / max(norm, tiny)
    if not 0 < square < math.inf or not norm:
        return None
    factor = max(math.sqrt(square), LEAST_SIZE * size / norm)
    rescaled = dictionary.activation.rescaled(dictionary.activation_parameters, factor)
    if rescaled is None:
        return None
    dictionary.W_enc.mul_(factor)
    dictionary.b_enc.mul_(factor)
    for name, value in rescaled.items():
        getattr(dictionary, name).copy_(value)
    dictionary.c /= factor**2
    dictionary.Delta.div_(factor)
    return factor
