"""Show how often latents fire, and which are silent or dense.

Silent latents fire on none of the rows measured, dense ones on more than a tenth of them; dead ones fired on none of
the training rows, known only for SAEs trained here.

--plot saves histograms of L0 and of firing frequencies, and for each run a picture of the first rows' codes.

For a crosscoder, counts latents that all hook points share and those of one alone, by decoder norms and by latent
scaling.

Example: sae sparsity first second --plot sparsity.png
"""

from collections.abc import Mapping
from typing import Any

import typer

from ..base.options import all_arguments
from ..measure.functions import sparsity
from .options import Json, Plot, Runs, configured, start


@configured(sparsity)
def command(
    ctx: typer.Context,
    options: Mapping[str, Any],
    runs: Runs = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    from ..measure.evaluate import sparsity_document
    from ..measure.measured import ChosenRows
    from ..sae.metrics import firing
    from ..show.measures import PICTURED_ROWS, SPARSITY, comparison, extremes, places_table

    session = start(ctx)
    chosen_rows = ChosenRows(
        session.home, **all_arguments(sparsity, options), listener=session.console
    )
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

        drawn = draw_sparsity(plot, tallies, documents)
        session.console.note(f"drew {', '.join(str(path) for path, _ in drawn)}")
    session.console.print_result(
        {"runs": documents},
        comparison(documents, SPARSITY),
        *map(extremes, documents),
        *(places_table(run) for run in documents if "places" in run),
    )
