"""`sae export`."""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import typer

from .. import formats
from ..errors import ConfigError, FormatError, StoreError
from ..formats import FORMATS, STAND_INS, SavedSAE
from ..metrics import Reconstruction
from ..runs import find_subject
from ..sae import SAE
from .options import Json, Session, run_names, start
from .subjects import Data, measured

Run = Annotated[str | None, typer.Argument(
    help="Run name, or folder that holds an SAE.", show_default="the newest run", autocompletion=run_names)]
Library = Literal["saelens", "sparsify", "dictionary-learning"]
To = Annotated[Library, typer.Option("--to", help="The library.")]
Out = Annotated[Path, typer.Option("--out", help="Folder to write; new or empty.")]


def command(ctx: typer.Context, to: To, out: Out, run: Run = None, data: Data = None, json: Json = False) -> None:
    """Write a run in another library's format.

    The folder appears whole or not at all. What the library cannot express is refused by name. These libraries'
    TopK clips at zero where topk here does not: such a run is written with it, and the difference measured on the
    held-out rows of --data.

    Example: sae export first --to saelens --out exported
    """
    session = start(ctx, json)
    subject = find_subject(session.home, run)
    if run is None:
        session.report.note(f"using the newest run, {subject.name}")
    saved = formats.load(subject.folder)
    written, deviation = saved, None
    kind = type(saved.sae.activation)
    if kind not in FORMATS[to].activations and kind in STAND_INS:
        written = SavedSAE(STAND_INS[kind](saved.sae), saved.origin)
        deviation = _deviation(session, subject.name, saved.sae, written.sae, to, data)
    elif kind not in FORMATS[to].activations:
        raise _inexpressible(saved.sae, to)
    elif data is not None:
        raise ConfigError(f"--data does nothing here: {to} expresses {saved.sae.activation.name} exactly; leave it out")
    formats.save(written, to, out)
    document = {"run": subject.name, "format": to, "path": str(out), "activation": saved.sae.activation.name,
                "written_as": written.sae.activation.name, "deviation": deviation,
                "files": sorted(path.name for path in out.iterdir())}
    if deviation is not None:
        session.report.note(_told(document))
    session.report.result(document, f"wrote {subject.name} to {out} for {to}: {', '.join(document['files'])}")


def _inexpressible(sae: SAE, to: str) -> FormatError:
    able = [name for name in get_args(Library) if type(sae.activation) in FORMATS[name].activations]
    advice = (f"use --to {able[0]}" if able else "no library here can: hand on the run folder, whose sae.safetensors "
                                                 "this tool reads")
    return FormatError(f"{to} cannot express the activation {sae.activation.name}; expected one of "
                       f"{', '.join(kind.name for kind in FORMATS[to].activations)}; {advice}")


@torch.no_grad()
def _deviation(session: Session, run: str, sae: SAE, stand_in: SAE, to: str, data: str | None) -> dict[str, Any]:
    """How far an SAE and the one written in its place lie apart, on the held-out rows."""
    try:
        one = measured(session, run, data, "test", "auto")
    except StoreError as error:
        raise ConfigError(f"{to} lacks the activation {sae.activation.name}; writing {stand_in.activation.name} in its "
                          f"place needs rows to measure the difference on, but {error}") from error
    sae, stand_in = one.sae, stand_in.to(one.sae.W_enc.device)
    exact, instead = (Reconstruction(sae.d_in, sae.d_sae) for _ in range(2))
    differ, largest = 0, 0.0
    for x in one.batches(session):
        z, other = sae.encode(x), stand_in.encode(x)
        x_hat, other_hat = sae.decode(z), stand_in.decode(other)
        exact.update(x, x_hat, z)
        instead.update(x, other_hat, other)
        differ += int((z != other).any(1).sum())
        largest = max(largest, float((x_hat - other_hat).abs().max()))
    return {"data": one.rows.store.name, "rows": one.rows.rows, "rows_that_differ": differ,
            "max_difference": largest, "fvu": exact.result()["fvu"], "fvu_written": instead.result()["fvu"]}


def _told(document: dict[str, Any]) -> str:
    found = document["deviation"]
    change = (f"{document['format']} has no {document['activation']}: wrote {document['written_as']}, which clips at "
              f"zero")
    if not found["rows_that_differ"]:
        return f"{change}; the two agree on all {found['rows']:,} held-out rows of {found['data']}"
    return (f"{change}; of the {found['rows']:,} held-out rows of {found['data']} "
            f"{found['rows_that_differ'] / found['rows']:.2%} differ, by up to {found['max_difference']:.3g}, and fvu "
            f"goes from {found['fvu']:.4g} to {found['fvu_written']:.4g}")
