"""`sae report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from ..errors import ConfigError
from ..html_report import Details, Readings, overview, write_pages
from ..latent_survey import COLUMNS, Examples, in_blocks, neighbours, survey
from ..training import read_metrics
from ..wording import size_words
from .eval_measures import evaluated
from .options import Device, Json, Run, Session, start
from .report_words import Words, facts, heading, words_for
from .subjects import Data, Measured, SplitName, held_out, measured

if TYPE_CHECKING:  # transformers takes seconds to import, and stores without tokens need none of it
    from ..language_model import OutputTokens

MOST_PAGES = 4096  # that are written unasked
NEIGHBOURS, OUTPUT_TOKENS = 10, 10

Out = Annotated[Path, typer.Option("--out", help="Folder to write; new or empty.")]
Latents = Annotated[str | None, typer.Option(
    "--latents", metavar="all|NUMBERS", help="Latents that get a page of their own: all, or numbers and ranges such as "
                                             "0,5,10-19.",
    show_default=f"all; of more than {MOST_PAGES:,}, so many of those that fire most often")]
Top = Annotated[int | None, typer.Option(
    "--top", min=1, help="In place of --latents: so many of those that fire most often.", show_default="none")]
Model = Annotated[str | None, typer.Option(
    "--model", help="Hub id or folder of the language model that the rows came from, to show the next tokens that each "
                    "latent promotes and suppresses.", show_default="none, which leaves that out")]
Count = Annotated[int, typer.Option("--examples", min=1, max=100, help="Texts a latent: those that it fires strongest "
                                                                       "in.")]


def command(ctx: typer.Context, out: Out, run: Run = None, data: Data = None, split: SplitName = "all",
            latents: Latents = None, top: Top = None, model: Model = None, examples: Count = 12,
            device: Device = "auto", json: Json = False) -> None:
    """Write pages to look at latents in a browser, from disk.

    index.html shows how the run learned, how often its latents fire, and a table of all latents to search and sort.
    Each chosen latent has a page with the texts that it fires strongest in, a histogram of its activations, the latents
    nearest to it and, with --model, the tokens that it promotes. FVU, L0 and cosine are those of `sae eval`, on
    held-out rows, whichever rows the latents are shown on. The folder needs no network, and can be moved or sent as it
    is; it appears whole or not at all.

    Example: sae report first --model tiny-gemma2 --out pages
    """
    if latents is not None and top is not None:
        raise ConfigError("cannot use both --latents and --top; leave one of them out")
    session = start(ctx, json, out=out)
    try:
        one = measured(session, run, data, split, device)
        chosen = None if latents is None else _numbers(latents, one)
        document = _report(session, one, chosen, top or MOST_PAGES, model, examples, out)
    except KeyboardInterrupt:
        session.console.note("stopped; nothing was written")
        raise
    for note in document["notes"]:
        session.console.note(note)
    session.console.result(document, f"wrote {document['index']}, with pages of {document['pages']:,} of "
                                    f"{document['latents']:,} latents, {size_words(document['bytes'])} in all; open it "
                                    f"in a browser")


def _numbers(text: str, one: Measured) -> list[int]:
    """The latents that `--latents` names, ascending.

    Raises:
        ConfigError: it is neither all nor numbers and ranges, or the SAE has not so many latents.
    """
    d_sae = one.sae.d_sae
    if text == "all":
        return list(range(d_sae))
    found: set[int] = set()
    for word in text.split(","):
        ends = [end.strip() for end in word.split("-")]
        if len(ends) > 2 or not all(end.isdecimal() for end in ends) or int(ends[0]) > int(ends[-1]):
            raise ConfigError(f"--latents must be all, or numbers and ranges such as 0,5,10-19, got {text!r}")
        if int(ends[-1]) >= d_sae:
            raise ConfigError(f"--latents names latent {ends[-1]}, but {one.subject.name} has {d_sae:,}, counted from "
                              f"0; choose lower numbers")
        found.update(range(int(ends[0]), int(ends[-1]) + 1))
    return sorted(found)


def _report(session: Session, one: Measured, chosen: list[int] | None, most: int, model: str | None, count: int,
            out: Path) -> dict[str, Any]:
    """Measure, write the pages, and give the command's result.

    Args:
        session: the command's session.
        one: the SAE and its rows.
        chosen: latents to write pages of; None for those that fire most often, `most` of them.
        most: see `chosen`.
        model: name of the language model; None for none.
        count: examples a latent.
        out: the folder to write.
    """
    headline, lacking = _headline(one)
    sae, words = one.sae, words_for(one, model, set(COLUMNS) <= set(one.rows.store.meta.columns))
    examples = Examples(chosen or range(sae.d_sae), sae.d_sae, count, words.has_tokens)
    found = survey(sae, in_blocks(one.batches(session), one.rows, one.batch_rows), examples)
    if chosen is None:
        chosen = sorted(found.firing.frequency.argsort(descending=True, stable=True)[:most].tolist())
    details = Details(found, _readings(session, one, chosen, words))
    (measures,) = evaluated(session, [headline], None, 0)
    notes = [*words.notes, *lacking, *_which(chosen, sae.d_sae)]
    content = overview(heading(one), measures, found, read_metrics(one.subject.folder), facts(session.home, one), notes)
    content["latents"] |= details.columns()
    with session.console.progress("writing", len(chosen), "latents") as show:
        write_pages(out, f"{one.subject.name}: latents", content, details.contents(show))
    files = [path for path in out.rglob("*") if path.is_file()]
    return {**one.heading, "path": str(out), "index": str(out / "index.html"), "latents": sae.d_sae,
            "pages": len(chosen), "files": len(files), "bytes": sum(path.stat().st_size for path in files),
            "index_bytes": (out / "index.html").stat().st_size, "measures": content["measures"],
            "firing": content["firing"], "notes": notes}


def _headline(one: Measured) -> tuple[Measured, list[str]]:
    """The SAE on held-out rows, or for want of any on the rows that the pages show, and a sentence that says so."""
    store = one.rows.store
    if store.split("train", seed=one.subject.split_seed).rows < store.rows:
        return held_out(one), []
    return one, [f"{store.name} holds out no rows, so FVU, L0 and cosine are of {one.split} rows"]


def _which(chosen: Sequence[int], d_sae: int) -> list[str]:
    return [] if len(chosen) == d_sae else [f"{len(chosen):,} of {d_sae:,} latents have pages of their own"]


def _readings(session: Session, one: Measured, chosen: list[int], words: Words) -> Readings:
    """What the pages of some latents tell beside what the rows show."""
    W_dec, numbers = one.sae.W_dec, torch.tensor(chosen, device=one.sae.W_dec.device)
    with session.console.progress("comparing latents", len(chosen), "latents") as show:
        near = neighbours(W_dec, numbers, NEIGHBOURS, show)
    outputs: OutputTokens | None = None
    if words.unembedding is not None:
        with session.console.progress("reading off output tokens", len(chosen), "latents") as show:
            outputs = words.unembedding.output_tokens(W_dec[numbers], OUTPUT_TOKENS, show)
    return Readings(chosen, near, words.texts, outputs)
