import typer

from .options import Data, Device, Json, Plot, Runs, SplitName, Target, start


def command(
    ctx: typer.Context,
    runs: Runs = None,
    data: Data = None,
    target: Target = None,
    split: SplitName = "test",
    device: Device = "auto",
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Show how often latents fire, and which are silent or dense.

    A latent is silent if it fires on none of the rows measured, dense if it fires on more than a tenth of them, and
    dead if it fired on none of the training rows, known only for SAEs trained here.

    --plot saves histograms of L0 and of firing frequencies, and for each run a picture of the first rows' codes.

    For a crosscoder, counts the latents that all hook points share and those of one alone, by decoder norms and by
    latent scaling.

    Example: sae sparsity first second --plot sparsity.png
    """
    from ..measure.evaluate import sparsity_document
    from ..measure.measured import ChosenRows
    from ..sae.metrics import firing
    from ..show.measures import PICTURED_ROWS, SPARSITY, comparison, extremes, places_table

    session = start(ctx)
    chosen_rows = ChosenRows(session.home, data, split, device, session.console, target)
    everything = chosen_rows.with_all(runs or [])
    pictured = 0 if plot is None else PICTURED_ROWS
    tallies = [
        firing(measured.sae, measured.inputs(session.console), pictured) for measured in everything
    ]
    documents = [
        sparsity_document(measured, counts, session.console)
        for measured, counts in zip(everything, tallies, strict=True)
    ]
    if plot is not None:
        from ..show.pictures import draw_sparsity  # matplotlib takes a second to import

        session.console.note(
            f"drew {', '.join(str(path) for path, _ in draw_sparsity(plot, tallies, documents))}"
        )
    session.console.print_result(
        {"runs": documents},
        comparison(documents, SPARSITY),
        *map(extremes, documents),
        *(places_table(run) for run in documents if "places" in run),
    )
