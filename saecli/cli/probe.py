from typing import Annotated

import typer

from .options import Device, Json, Layer, Model, Module, Plot, Runs, Site, start


def command(
    ctx: typer.Context,
    runs: Runs = None,
    model: Model = None,
    layer: Layer = None,
    site: Site = None,
    module: Module = None,
    sets: Annotated[
        str | None,
        typer.Option(
            help="Probe these sets: names or patterns, such as 87_glue_cola,*emotion*.",
            show_default="all 113",
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=20, help="Read this number of texts per set, half of each class.")
    ] = 200,
    k: Annotated[
        list[int] | None,
        typer.Option(
            min=1, show_default="1, 2, 5, 16", help="Fit a probe on k latents; repeat for several."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Read at most this number of last tokens of a text.",
            show_default="1,024, or the model's positions",
        ),
    ] = None,
    device: Device = "auto",
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Compare sparse probes on latents with dense probes on activations.

    The package sae-probes (pip install 'saecli[probes]') has 113 sets of texts in two classes. A probe is a logistic
    regression on a text's last token. A sparse probe sees the k latents whose mean codes differ most between the
    classes of its training part; the dense probe sees all dimensions of the activations that the SAE encodes.

    AUC and accuracy are cross-validated in 5 folds; chance is 0.5. Means over sets have 95% intervals (Student's t).
    The difference from the dense probe is taken set by set.

    Cost: by default about 3 minutes per run of tiny-gemma2 on one core. Each text runs through the model up to the
    SAEs' last block; each probe and set takes 65 small regressions.

    Example: sae probe first second --sets 87_glue_cola,*emotion* --plot probes.png
    """
    from ..measure.probes import probe
    from ..show.measures import probe_tables

    session = start(ctx)
    document = session.call(probe, saes=runs or [], k=k or (1, 2, 5, 16))
    if plot is not None:
        from ..show.pictures import draw_probes  # matplotlib takes a second to import

        draw_probes(plot, document)
        session.console.note(f"drew {plot}")
    session.console.print_result(document, *probe_tables(document))
