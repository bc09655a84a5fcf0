"""The public functions that make SAEs of SAEs, see `measure.functions`."""

from collections.abc import Sequence
from typing import Annotated, Any

from ..base.console import listening
from ..base.files import expanded
from ..base.home import Home
from ..base.options import Shown, checked
from ..measure.arguments import (
    SAE,
    Data,
    Device,
    HomeLike,
    Out,
    Progress,
    SAELike,
    SplicedModel,
    Target,
    Tokens,
)


@checked
def refit(
    sae: SAELike = None,
    data: Data = None,
    *,
    target: Target = None,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> SAE:
    """An SAE with the exact decoder for given rows, its codes as they are; writes no files.

        sum over rows of ||z W_dec + b_dec - y||^2 + alpha ||W_dec - c T0||_F^2

    is minimised over W_dec, b_dec and c, in the metric of the SAE's training, raw if unknown. T0 is the SAE's W_dec (on
    its own training rows W_enc', or 0 for a transcoder or crosscoder), alpha the best by leave-one-out; y are the rows
    x, or a transcoder's targets, and its skip, `x W_skip`, is fitted too.

    Args:
        sae, target, device, home, progress: as in `evaluate`.
        data: stores or their names, whose training rows are read; otherwise as in `evaluate`.

    Returns the SAE, on the device, acting on raw activations. Cost: one pass over the rows.
    """
    from ..measure.measured import ChosenRows
    from ..store.reader import JoinedRows, Rows
    from .refit import is_trained_on, refit_decoder, training_rows

    listener = listening(progress)
    measured = ChosenRows(Home.at(home), data, "train", device, listener, target).with_sae(sae)
    rows = measured.rows
    if rows.inputs and not isinstance(data, Rows | JoinedRows):
        rows = training_rows(measured)
    return refit_decoder(measured.sae, rows, listener, is_trained_on(measured)).sae


@checked
def refit_run(
    sae: SAELike = None,
    data: Data = None,
    *,
    target: Target = None,
    name: Annotated[
        str | None,
        Shown("Save the new run under this name.", default_words="refit- and the name of RUN"),
    ] = None,
    model: SplicedModel = None,
    tokens: Tokens = None,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """`refit` an SAE on a store's training rows, measure both on held-out rows, and save a run; RunError if FVU in its
    metric did not fall. CLI equivalent: `sae refit`."""
    from ..measure.evaluate import check_model, check_tokens
    from ..measure.measured import ChosenRows
    from .refit import refit_measured, run_folder

    check_tokens(tokens, model)
    at, listener = Home.at(home), listening(progress)
    before = ChosenRows(at, data, "test", device, listener, target).with_sae(sae)
    folder = run_folder(at, before, name)
    if model is not None:
        check_model(before, model)
    return refit_measured(before, folder, model, tokens, listener)


@checked
def export(
    sae: SAELike | Sequence[SAELike],
    to: Annotated[
        str,
        Shown(
            "Write for saelens, sparsify or dictionary-learning; a transcoder also for circuit-tracer.",
            "FORMAT",
        ),
    ],
    out: Out,
    *,
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """Write an SAE in another library's format, a topk as relu-topk, with a note, if it has no other; CLI equivalent:
    `sae export`.

    Args:
        sae, home, progress: as in `evaluate`; or several transcoders, one for each layer, for circuit-tracer.
        to: also native.
        out: appears whole or not at all.

    Returns the document that `sae export --json` prints, for several SAEs with their entries in `runs`.
    """
    from .export import demand_format, listed, write_export

    several = listed(sae)
    demand_format("to", to, len(several))
    return write_export(Home.at(home), several, to, expanded(out), listening(progress))


@checked
def push(
    sae: SAELike | Sequence[SAELike],
    repo: str,
    data: Data = None,
    *,
    target: Target = None,
    private: Annotated[
        bool, Shown("Create the repository as private; refuse an existing public one.")
    ] = False,
    format: Annotated[
        str,
        Shown(
            "native, or a format of sae export. auto: saelens if it can express the SAE, else native; "
            "circuit-tracer for a set.",
            "auto|FORMAT",
        ),
    ] = "auto",
    model: SplicedModel = None,
    tokens: Tokens = None,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """Measure an SAE on held-out rows, and push it to the Hugging Face hub, with the token of `hf auth login`, or
    HF_TOKEN; CLI equivalent: `sae push`. Its folder gets a model card, and so does a repository that has none.

    Args:
        sae: an SAE, or several transcoders, one for each layer, for circuit-tracer; other arguments as in `evaluate`.
        repo: `user/repo`, created if missing, or `user/repo/folder`; the default folder has the run's name.

    Returns the document that `sae push --json` prints.
    """
    from ..measure.evaluate import check_tokens
    from ..measure.measured import ChosenRows
    from ..sae.hub import demand_writable
    from .export import demand_format, exact_format, folder_address, listed, upload_measured

    several = listed(sae)
    if len(several) > 1 and format == "auto":
        format = "circuit-tracer"
    if format != "auto":
        demand_format("format", format, len(several), "auto")
    check_tokens(tokens, model)
    address, listener = folder_address(repo, several), listening(progress)
    chosen_rows = ChosenRows(Home.at(home), data, "test", device, listener, target)
    measured = [chosen_rows.with_sae(each) for each in several]
    demand_writable(address, private)
    if format == "auto":
        format = exact_format(measured[0], listener)
    return upload_measured(address, private, format, measured, model, tokens, listener)
