"""The public functions that make pages, see `measure.functions`."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le

from ..base.console import listening
from ..base.errors import ConfigError
from ..base.files import expanded
from ..base.home import Home
from ..base.options import Count, Shown, checked
from ..measure.arguments import (
    Data,
    Device,
    HomeLike,
    Latents,
    Model,
    ModelOrNot,
    Out,
    Progress,
    SAELike,
    Split,
    Target,
    latents_shown,
)


@checked
def report(
    sae: SAELike,
    out: Out,
    data: Data = None,
    *,
    target: Target = None,
    split: Split = "all",
    latents: Annotated[Latents, latents_shown("Latent that gets its own page", "all")] = None,
    count: Annotated[
        Count | None,
        Shown(
            "This number of latents get their own page, the most frequent.",
            name="latents",
            default_words="4,096",
        ),
    ] = None,
    model: ModelOrNot = True,
    tokenizer: Any = None,
    examples: Annotated[
        int, Ge(1), Le(100), Shown("Texts per latent, strongest activation first.")
    ] = 12,
    neuronpedia: Annotated[
        str | None,
        Shown(
            "Neuronpedia's name of the SAE, such as gemma-2-2b/20-gemmascope-res-16k, to link latents to its pages.",
            "MODEL/SOURCE",
            default_words="none",
        ),
    ] = None,
    overwrite: Annotated[
        bool, Shown("Replace a folder that holds an index.html, such as an earlier report.")
    ] = False,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
) -> dict[str, Any]:
    """Write pages to look at an SAE's latents in a browser, from disk. CLI equivalent: `sae report`.

    Args:
        sae, data, target, device, home, progress: as in `evaluate`; data are a store or rows of one.
        out: appears whole or not at all, in place of an earlier report once that is whole.
        split: rows that the latents are shown on.
        model: of the rows, to show the tokens that each latent promotes, or a loaded one, with its `tokenizer`. True:
            the one that the store names, or a note where it cannot be loaded; None or False: without.
    """
    from ..measure.latents import latents_given
    from ..measure.measured import ChosenRows
    from ..measure.report import MOST_PAGES, most_frequent, report_latents
    from ..model.choice import model_given
    from .report import demand_sound, write_report

    folder, listener = expanded(out), listening(progress)
    demand_sound(folder, neuronpedia, overwrite)
    if latents is not None and count is not None:
        raise ConfigError("cannot use both --latent and --latents; leave one of them out")
    run = ChosenRows(Home.at(home), data, split, device, listener, target).with_sae(sae)
    chosen = latents_given(latents, run.sae.d_sae, run.subject.name)
    if chosen is None:
        chosen = most_frequent(run, count or MOST_PAGES, listener)
    given = model_given(model, tokenizer)
    found = report_latents(run, sorted(chosen), given, examples, listener)
    return write_report(found, folder, neuronpedia, overwrite, listener)


@checked
def serve(
    saes: SAELike | Sequence[SAELike] = None,
    data: Data = None,
    *,
    model: Model = None,
    tokenizer: Any = None,
    host: Annotated[
        str, Shown("Answer at this address of the machine; other than its own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, Ge(0), Le(65535), Shown("Answer at this port; 0 for one that is free.")
    ] = 8000,
    device: Device = "auto",
    home: HomeLike = None,
    progress: Progress = False,
    ready: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Pages of SAEs in one language model that answer while one types, until Ctrl-C. CLI equivalent: `sae serve`.

    Args:
        saes, data, device, home, progress: as in `evaluate`; data are a store or rows of one, to show latents on.
        model: by default the one that the SAEs' files name, or a loaded one, with its `tokenizer`.
        host: with any but this machine's own a token is asked for, which the address has.
        ready: called with the result, as soon as pages are answered.

    Returns:
        `url`, to open in a browser; `runs` and `model`.
    """
    from ..base.devices import as_usual
    from ..model.choice import model_given
    from .serve.start import bound, demand_installed, url_of

    demand_installed()
    from .serve.app import application, run_server
    from .serve.workbench import Workbench

    listener, given = listening(progress), model_given(model, tokenizer)
    chosen: Sequence[Any] = saes if isinstance(saes, list | tuple) else [saes]
    with bound(host, port) as listening_socket:
        bench = as_usual(Workbench)(Home.at(home), chosen, given, data, device, listener)
        url, token = url_of(listening_socket, host)
        about = bench.about
        document = {
            "url": url,
            "runs": [sae["run"] for sae in about["saes"]],
            "model": about["model"],
        }
        if ready is not None:
            ready(document)
        run_server(application(bench, listening_socket.getsockname()[1], token), listening_socket)
    return document
