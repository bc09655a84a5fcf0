"""Upkeep between steps: dead and needless latents revived, silenced ones turned off, the decoder released.

m latents re-aimed, n sampled rows, D = d_in, E = d_out, F = d_sae.
"""

import math

import torch
from torch import Tensor

from ..base.devices import moved
from ..sae.dictionary import Coupled, Dictionary
from .descent import Adam, Descent, Draws
from .moments import Moments
from .options import REVIVAL_ROWS, Revival
from .rows import TrainingRows

REVIVAL = 0.9  # fraction of all steps during which dead latents are revived; the rest is for them to settle
WORSE = 1.1  # most squared error on the sample after several latents are re-aimed, over that before
SILENT = 1e-3  # part of a row's norm: a penalty has silenced latents that contribute less where they fire
REAIMED = 0.02  # largest fraction of the latents re-aimed at a decoder step as missed least


def revives(solver: Descent) -> bool:
    asked = isinstance(solver.config, Revival) and solver.config.revive
    end = 1 if solver.task.from_sae else REVIVAL * solver.task.steps
    return asked and not solver.task.fixed and solver.steps < end


@torch.no_grad()
def revive(solver: Descent, fired: Tensor, rows: float) -> None:
    """Re-aim latents that did not fire (mask `fired`, (F,)) on this number of rows at the sample's worst reconstructed
    rows: each at a row of its own, so with fewer rows than latents only the first.

    Many aimed at once can fire together, most of all on rows of large norm, and overshoot by orders of magnitude; the
    gradient then silences other latents, which are re-aimed in turn. So half as many are, until the error bears it.
    """
    dead, task = ~fired, solver.task
    count = int(dead.sum())
    if not revives(solver) or rows < REVIVAL_ROWS * len(dead) or not 0 < count < len(dead):
        return
    dictionary, residuals = solver.dictionary, _residuals(solver)
    directions = _directions(solver, residuals, count)
    if not len(directions):
        return
    before = {name: tensor.clone() for name, tensor in dictionary.state_dict().items()}
    while True:
        aimed = dead & (dead.cumsum(0) <= len(directions))
        re_aim(dictionary, aimed, fired, directions, task.B, task.training.penalised)
        if len(directions) == 1 or _bears(solver, residuals):
            break
        dictionary.load_state_dict(before)
        directions = directions[: len(directions) // 2]
    solver.optimizer.forget(aimed, fired, dictionary.latent_dimension)
    solver.revived += len(directions)


@torch.no_grad()
def revive_by(solver: Descent, rows: TrainingRows) -> None:
    """Revive latents that fire on no row. Cost: a pass over the rows."""
    if revives(solver):
        fired = torch.zeros_like(solver.dictionary.b_enc, dtype=torch.bool)
        for batch in rows.some(rows.rows, 0):
            fired |= solver.dictionary.codes(batch.x).fired()
        revive(solver, solver.communicator.all_reduce(fired.to(torch.int32)) > 0, rows.rows)


def needless(solver: Descent, moments: Moments) -> int:
    """The most latents to re-aim as missed least, with the dead ones."""
    # With fewer rows each latent's codes are near a combination of the others'.
    d_sae = solver.dictionary.d_sae
    enough = revives(solver) and moments.rows >= REVIVAL_ROWS * d_sae
    return int(REAIMED * d_sae) if enough else 0


def _residuals(solver: Descent) -> Tensor:
    return solver.task.sample.y - solver.dictionary(solver.task.sample.x)


def _bears(solver: Descent, before: Tensor) -> bool:
    """Whether the sample is reconstructed about as well as with the residuals before, (n, E), on rank 0."""
    worse = _residuals(solver).square().sum() > WORSE * before.square().sum()
    return not solver.communicator.broadcast(worse.to(torch.int32))


def _directions(solver: Descent, residuals: Tensor, count: int) -> Tensor:
    sample, communicator = solver.task.sample, solver.communicator
    directions = residuals[:0]
    # If training has diverged, the check of the loss will say so.
    if communicator.is_main and residuals.isfinite().all():
        draws = solver.task.draws(solver.steps, Draws.REVIVAL)
        directions = directions_of_worst(sample.x, residuals, count, draws)
    return communicator.broadcast_rows(directions)


@torch.no_grad()
def re_aim(
    dictionary: Dictionary,
    dead: Tensor,
    others: Tensor,
    directions: Tensor,
    B: Tensor | None,
    biased: bool,
) -> None:
    """Re-aim m dead latents at unit vectors d, (m, E), with the mean norms and parameters of others; masks (F,).

    The encoder is aimed along `B d`, B as in `Task`; a decoder that descends at d; one that is solved for stays tied
    until the next step. b_enc is 0, which finds most features, or if `biased` the others' mean: under a penalty latents
    that start dense can stay so, with small codes.
    """

    def mean_of_others(values: Tensor) -> Tensor:
        return values.masked_fill(~others, 0).sum() / others.sum()

    W_enc, along = dictionary.W_enc, directions.T
    if B is not None:
        along = B @ along
        norms = along.norm(dim=0)
        along = along / norms.masked_fill(norms == 0, 1)
    W_enc[:, dead] = mean_of_others(W_enc.norm(dim=0)) * along
    dictionary.b_enc.masked_fill_(dead, mean_of_others(dictionary.b_enc) if biased else 0.0)
    for name, parameter in dictionary.activation_parameters.items():
        if dictionary.latent_dimension(name) is not None:
            parameter.masked_fill_(dead, mean_of_others(parameter))
    for name, parameter in dictionary.named_parameters():
        if name in ("W_dec", "Delta"):
            norm = mean_of_others(parameter.norm(dim=1)) if parameter.requires_grad else 0.0
            parameter[dead] = norm * directions


def directions_of_worst(
    x: Tensor, residuals: Tensor, count: int, generator: torch.Generator
) -> Tensor:
    """Unit directions, (m, E), of residuals, (n, E), drawn without replacement with probability proportional to their
    square: `count`, or all there are. Of equal rows x, (n, D), one: latents aimed at one row would stay copies."""
    scaled = residuals.double() / residuals.abs().max().clamp(min=torch.finfo(residuals.dtype).tiny)
    groups = torch.unique(x, dim=0, return_inverse=True)[1].cpu()  # (n,), the same for equal rows
    numbers = torch.arange(len(x))
    first = numbers.new_full((len(x),), len(x)).scatter_reduce_(0, groups, numbers, "amin")
    weights = torch.where(first[groups] == numbers, scaled.square().sum(1).cpu(), 0.0)
    count = min(count, int(weights.count_nonzero()))
    if not count:
        return residuals[:0]
    drawn = torch.multinomial(weights, count, generator=generator)
    chosen = scaled[moved(drawn, scaled.device)]
    return (chosen / chosen.norm(dim=1, keepdim=True)).to(residuals.dtype)


@torch.no_grad()
def silence(dictionary: Dictionary, moments: Moments) -> Tensor:
    """Turn off latents, a mask (F,), whose contribution where they fire a penalty has driven to nothing; a decoder step
    without the penalty would bring them back."""
    W_dec = dictionary.decoder()
    contributed = moments.norm_weights * W_dec.double().norm(dim=1) / math.sqrt(W_dec.shape[1])
    gone = (moments.norm_weights > 0) & (contributed < SILENT * moments.firings)
    dictionary.W_enc.masked_fill_(gone, 0)
    dictionary.b_enc.masked_fill_(gone, 0)
    return gone


def release(dictionary: Coupled, optimizer: Adam) -> None:
    """Train W_dec, b_dec and a skip by gradient from here on."""
    dictionary.untie()
    for name in ("Delta", "b_dec", *(() if dictionary.W_skip is None else ("W_skip",))):
        tensor = getattr(dictionary, name).requires_grad_(True)
        if name not in optimizer.tensors:
            optimizer.include(name, tensor)
