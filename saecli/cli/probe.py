"""Compare sparse probes on latents with dense probes on activations.

The package sae-probes (pip install 'saecli[probes]') has 113 sets of texts in two classes. A probe is a logistic
regression on a text's last token. A sparse probe sees the k latents whose mean codes differ most between the
classes of its training part; the dense probe sees all dimensions of the activations that the SAE encodes.

AUC and accuracy are cross-validated in 5 folds; chance is 0.5. Means over sets, and of the difference from the dense
probe set by set, have 95% intervals (Student's t).

Cost: by default about 3 minutes per run of tiny-gemma2 on one core. Each text runs through the model up to the
SAEs' last block; each probe and set takes 65 small regressions.

Example: sae probe first second --sets 87_glue_cola,*emotion* --plot probes.png
"""

from collections.abc import Mapping
from typing import Any

import typer

from ..measure.functions import probe
from .options import Json, Plot, Runs, configured, start


@configured(probe)
def command(
    ctx: typer.Context,
    options: Mapping[str, Any],
    runs: Runs = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    from ..show.measures import probe_tables

    session = start(ctx)
    document = session.call(probe, saes=runs or [], **options)
    if plot is not None:
        from ..show.pictures import draw_probes  # matplotlib takes a second to import

        draw_probes(plot, document)
        session.console.note(f"drew {plot}")
    session.console.print_result(document, *probe_tables(document))
