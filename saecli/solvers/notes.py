"""What a user should read about the last decoder step."""

from ..ridge import TOLERANCE, DecoderState

THRESHOLD_FRACTION = 0.8  # of the rows, above which degrees of freedom are said to be too many
THRESHOLD_RATIO = 2  # of rows and latents, either way, within which


def notes_on(decoder: DecoderState, chosen: bool, rows: int, latents: int, raised: float) -> list[str]:
    """What the last decoder step came to, and what was wrong with it where something was.

    Args:
        decoder: as the last step left it.
        chosen: whether its alpha was chosen, not given.
        rows: N.
        latents: F.
        raised: the largest ridge that a decoder step took in place of a smaller one; 0 for none.
    """
    alpha, dof = decoder.alpha, decoder.dof
    notes = [f"decoder: alpha {alpha:.3g} {'chosen by leave-one-out' if chosen else 'as given'} leaves {dof:,.0f} "
             f"effective degrees of freedom of {rows:,} rows ({rows / latents:.2g} rows a latent); "
             f"condition {decoder.condition:.0e}"]
    if not chosen and dof > THRESHOLD_FRACTION * rows and 1 / THRESHOLD_RATIO <= rows / latents <= THRESHOLD_RATIO:
        notes.append(f"--alpha {alpha:.3g} lets the decoder fit nearly every one of {rows:,} rows by itself with "
                     f"{latents:,} latents, which is where the error on other rows peaks; use --alpha auto, or a "
                     "larger --alpha")
    if decoder.residual > 2 * TOLERANCE:
        notes.append(f"the last decoder step was solved to a residual of {decoder.residual:.1g} only, where "
                     f"{TOLERANCE:g} was wanted; give a larger --alpha, or --solve direct")
    if raised:
        advice = ("the codes are degenerate: see `sae sparsity`, and try a lower --lr" if chosen
                  else "give a larger --alpha, or leave the choice to --alpha auto")
        notes.append(f"a decoder step could not be solved with the ridge asked for, and took "
                     f"{raised:.3g} instead; {advice}")
    return notes
