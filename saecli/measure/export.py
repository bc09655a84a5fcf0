"""An SAE in another library's format, and on the Hugging Face hub with a model card of its measures.

Where a library lacks the activation, a stand-in is written and the difference measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from ..base.console import Listener, listening
from ..base.errors import ConfigError, FormatError, StoreError, number, unknown_choice
from ..base.home import Home
from ..extract.options import BUNDLED, at_revisions
from ..sae import formats
from ..sae.dictionary import SAE, Batch
from ..sae.formats import FORMATS, WRITABLE, SavedSAE, stand_in
from ..sae.formats.hooks import unsettled
from ..sae.hub import Address, upload, writable
from ..sae.library import SAELike, hook_points, open_sae
from ..sae.metrics import Reconstruction
from ..store.joined import in_words
from .evaluate import check_tokens_of_model, evaluated
from .measured import Measured, RowsLike, measured, with_rows

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

CLIPPING = (
    "the topk of {to} applies a ReLU to the k largest pre-activations, and topk here keeps their "
    "signs"
)  # why `stand_in` stands in
LOCAL = ("data", "data_hash", "beside", "target")  # of an origin: names in the home
MEASURES = (
    "rows",
    "l0",
    "fvu",
    "explained_variance",
    "cosine",
    "dead_fraction",
    "ce_recovered",
    "kl",
)
START, END = "<!-- sae push: the table keeps a line for each SAE -->", "<!-- end of sae push -->"
LIBRARIES = {  # by format: how the library loads the SAE from the hub
    "saelens": 'sae_lens.SAE.from_pretrained("{0.repo}", "{0.folder}")',
    "sparsify": 'sparsify.SparseCoder.load_from_hub("{0.repo}", hookpoint="{0.folder}")',
    "circuit-tracer": 'circuit_tracer.utils.hf_utils.load_transcoder_from_hub("{0.repo}/{0.folder}")  # all layers',
}


@dataclass(frozen=True)
class Conversion:
    """An SAE to write in a format, or its stand-in with the deviation of `_deviation`."""

    format: str
    written: SavedSAE
    deviation: dict[str, Any] | None = None

    @property
    def remark(self) -> str | None:
        if (found := self.deviation) is None:
            return None
        change = (
            f"{CLIPPING.format(to=self.format)}: wrote {self.written.sae.activation.name}, which {self.format} "
            "calls topk"
        )
        if not found["rows_that_differ"]:
            return f"{change}; both give the same codes on all {found['rows']:,} held-out rows of {found['data']}"
        return (
            f"{change}; {found['rows_that_differ'] / found['rows']:.2%} of the {found['rows']:,} held-out rows of "
            f"{found['data']} have negative codes, which become 0: predictions change by up to "
            f"{found['max_difference']:.3g}, and fvu goes from {found['fvu']:.4g} to {found['fvu_written']:.4g}"
        )


def converted(
    saved: SavedSAE, to: str, held_out: Callable[[], Measured], listener: Listener
) -> Conversion:
    """Convert an SAE to a format; if that takes a stand-in, measure the difference on rows that `held_out` opens."""
    lacking, instead = FORMATS[to].lacks(saved), stand_in(saved)
    if lacking is None:
        return Conversion(to, saved)
    if instead is None or not can_be_written(saved, to):
        others = [name for name in FORMATS if name != "native" and can_be_written(saved, name)]
        advice = (
            f"use {' or '.join(others)}"
            if others
            else "no library here can: hand on the run folder, whose "
            "sae.safetensors this tool reads"
        )
        raise FormatError(f"{to} cannot express {lacking}; {advice}")
    try:
        one = held_out()
    except StoreError as error:
        raise ConfigError(
            f"{CLIPPING.format(to=to)}; writing {instead.sae.activation.name} instead needs rows to "
            f"measure the difference on, but {error}"
        ) from error
    return Conversion(to, instead, _deviation(one, instead.sae, listener))


def can_be_written(saved: SavedSAE, to: str) -> bool:
    return any(one is not None and not FORMATS[to].lacks(one) for one in (saved, stand_in(saved)))


@torch.no_grad()
def _deviation(one: Measured, instead: SAE, listener: Listener) -> dict[str, Any]:
    """The differences between an SAE and its stand-in on the held-out rows."""
    sae, instead = one.sae, instead.copy_to(one.sae.W_enc.device)
    exact, changed = (Reconstruction(sae.d_out, sae.d_sae) for _ in range(2))
    differ, largest = 0, 0.0
    for rows in one.batches(listener):
        batch = Batch.of(rows, sae.d_in)
        z, other = sae.codes(batch.x), instead.codes(batch.x)
        y_hat, other_hat = (
            sae.predicted(batch.x, z)[:, -1],
            instead.predicted(batch.x, other)[:, -1],
        )
        exact.update(batch.y, y_hat, z)
        changed.update(batch.y, other_hat, other)
        differ += int((z.dense() != other.dense()).any(1).sum())
        largest = max(largest, float((y_hat - other_hat).abs().max()))
    return {
        "data": one.heading["data"],
        "rows": one.rows.rows,
        "rows_that_differ": differ,
        "max_difference": largest,
        "fvu": exact.result()["fvu"],
        "fvu_written": changed.result()["fvu"],
    }


def export(
    sae: SAELike,
    to: str,
    out: str | Path,
    data: RowsLike = None,
    *,
    target: str | None = None,
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Write an SAE in another library's format; CLI equivalent: `sae export`.

    If the format lacks the activation but has a stand-in, that is written, and the difference is measured on held-out
    rows; `save_sae` refuses instead.

    Args:
        sae, home, progress: as in `evaluate`.
        to: saelens, sparsify, dictionary-learning, gemma-scope, gemma-scope-2, circuit-tracer or native; also with _
            for -.
        out: folder to write, new or empty; it appears whole or not at all.
        data, target: rows to measure the difference on, as in `evaluate`.

    Returns:
        The document that `sae export --json` prints; its `deviation` is the difference measured, None without one.
    """
    if (to := formats.named(to)) not in WRITABLE:
        raise unknown_choice("to", to, WRITABLE)
    home, listener, out = Home.at(home), listening(progress), Path(out)
    subject, saved = open_sae(home, sae, listener)
    found = converted(
        saved,
        to,
        lambda: with_rows(home, (subject, saved), data, "test", "auto", listener, target),
        listener,
    )
    if found.deviation is None:
        for option, given in (("data", data), ("target", target)):
            if given is not None:
                raise ConfigError(
                    f"--{option} does nothing here: {to} expresses {saved.sae.activation.name} exactly; "
                    "leave it out"
                )
    written = unsettled(found.written) if to == "saelens" else found.written
    formats.save(written, to, out)
    for remark in (*written.remarks, *_without_hook_points(written, to)):
        listener.note(f"{subject.name} {remark}")
    if found.remark is not None:
        advice = (
            f"; train with --act {found.written.sae.activation.name} to have the same SAE in both"
        )
        listener.note(
            found.remark
            + (advice if found.deviation and found.deviation["rows_that_differ"] else "")
        )
    return {
        "run": subject.name,
        "format": to,
        "path": str(out),
        "activation": saved.sae.activation.name,
        "written_as": found.written.sae.activation.name,
        "deviation": found.deviation,
        "files": sorted(path.name for path in out.iterdir()),
    }


def _without_hook_points(saved: SavedSAE, to: str) -> tuple[str, ...]:
    if not saved.sae.widths or to == "native":
        return ()
    points, _ = hook_points(saved.origin)
    return (
        f"reads {len(saved.sae.widths)} hook points side by side, which {to} cannot name: the file names "
        f"none; give it rows of {' + '.join(points) or 'all'}, in this order",
    )


def push(
    sae: SAELike,
    repo: str,
    data: RowsLike = None,
    *,
    target: str | None = None,
    private: bool = False,
    format: str = "auto",
    model: str | None = None,
    model_revision: str | None = None,
    tokens: int | None = None,
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Push an SAE to the Hugging Face hub, with the token of `hf auth login` or HF_TOKEN; CLI equivalent: `sae push`.

    It is measured on held-out rows of a store, with the other arguments as in `evaluate`; returns the document that
    `sae push --json` prints.

    Args:
        repo: `user/repo`, created if missing, or `user/repo/folder`; the default folder has the run's name.
        private: create the repository as private; an existing public one is refused.
        format: auto: saelens if it gives the same codes on all held-out rows, else native.
    """
    form, listener, home = formats.named(format), listening(progress), Home.at(home)
    if form not in ("auto", *WRITABLE):
        raise ConfigError(f"--format must be one of {', '.join(('auto', *WRITABLE))}, got {form!r}")
    check_tokens_of_model(tokens, model)
    models = at_revisions(model, model_revision)
    name = "sae" if sae is None or isinstance(sae, SAE) else Path(sae).resolve().name
    address = Address.parse(repo)
    if (
        address is None
        or address.revision is not None
        or Address.parse(f"{address.repo}/{name}") is None
    ):
        raise ConfigError(
            f"cannot push to {repo!r}: expected USER/REPO or USER/REPO/FOLDER, without a revision, such "
            "as someone/my-saes"
        )
    address = address if address.folder else address.at(name)
    one = measured(home, sae, data, "test", device, listener, target)
    present = writable(address, private)
    found = _conversion(one, form, listener)
    (measures,) = evaluated([replace(one, saved=found.written)], models, tokens, listener)
    card = _card(present, address, found, one, measures)
    if card is None:
        listener.note(
            f"README.md of {address.repo} was not written by `sae push` and is left as it is"
        )
    for remark in _without_hook_points(found.written, found.format):
        listener.note(f"{one.subject.name} {remark}")
    with TemporaryDirectory() as scratch:
        formats.save(found.written, found.format, Path(scratch, address.folder))
        files = sorted(path.name for path in Path(scratch, address.folder).iterdir())
        if card is not None:
            card.save(Path(scratch, "README.md"))
        url = upload(Path(scratch), address, private)
    if found.remark is not None:
        listener.note(found.remark)
    return {
        "run": one.subject.name,
        "repo": address.repo,
        "folder": address.folder,
        "format": found.format,
        "written_as": found.written.sae.activation.name,
        "deviation": found.deviation,
        "files": files,
        "card": card is not None,
        "url": url,
        "measures": measures,
    }


def _conversion(one: Measured, form: str, listener: Listener) -> Conversion:
    # Without what is local: paths of a model, names of stores.
    origin = {
        name: Path(value).name if name == "model" and Path(value).is_absolute() else value
        for name, value in one.saved.origin.items()
        if name not in LOCAL
    }
    saved = replace(one.saved, origin=origin)
    if form != "auto":
        return converted(saved, form, lambda: one, listener)
    why = f"saelens has no {'transcoder with ' if saved.is_transcoder else ''}{saved.sae.activation.name}"
    if can_be_written(saved, "saelens"):
        found = converted(saved, "saelens", lambda: one, listener)
        if (change := found.deviation) is None or not change["rows_that_differ"]:
            return found
        why = (
            f"with saelens' {found.written.sae.activation.name} {change['rows_that_differ']:,} of "
            f"{change['rows']:,} held-out rows differ; --format saelens writes it all the same"
        )
    listener.note(f"{one.subject.name} is written as native: {why}")
    return converted(saved, "native", lambda: one, listener)


def _card(
    present: "ModelCard | None",
    address: Address,
    found: Conversion,
    one: Measured,
    measures: dict[str, Any],
) -> "ModelCard | None":
    """The repository's card with a line for the SAE; None if `sae push` did not write the present one."""
    from huggingface_hub import ModelCard, ModelCardData  # takes long to import

    sae, origin, source = found.written.sae, found.written.origin, one.store.meta.source
    if present is None:
        model = one.saved.origin.get("model", "")
        data = ModelCardData(
            library_name=found.format if found.format in LIBRARIES else "saecli",
            base_model=None if Path(model).is_absolute() or model in ("", *BUNDLED) else model,
            datasets=[source["dataset"]]
            if one.subject.data and "dataset_revision" in source
            else None,
            tags=["sparse-autoencoder", "mechanistic-interpretability", "saecli"],
        )
        present = ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {address.repo}\n\n{START}{END}\n")
    before, start, rest = present.text.partition(START)
    inside, end, after = rest.partition(END)
    if not end:
        return None
    points, target = hook_points(origin)
    at = in_words(points, target) if points else None
    row = {
        "SAE": f"`{address.folder}`",
        "activations": ", ".join(filter(None, [origin.get("model"), at])) or one.store.name,
        "activation": f"{sae.activation.name} {sae.k or ''}".strip(),
        "d_in": number(sae.d_in),
        "d_sae": number(sae.d_sae),
        **{name: number(measures.get(name)) for name in MEASURES},
        "remark": found.remark or "",
    }
    lines = {line.split(" | ")[0]: line for line in inside.splitlines() if line.startswith("| `")}
    lines[f"| {row['SAE']}"] = f"| {' | '.join(row.values())} |"
    stores = "--data STORE --target STORE" if one.saved.is_transcoder else "--data STORE"
    present.text = (
        before
        + "\n".join(
            [
                start,
                "Sparse autoencoders, measured by `sae eval` on held-out rows. fvu: `E||x_hat - x||^2 / (E||x||^2 - "
                "||E x||^2)`; ce_recovered: `(ce_zero - ce_spliced) / (ce_zero - ce_clean)`; kl: nats per token.",
                "",
                f"| {' | '.join(row)} |",
                "|---" * len(row) + "|",
                *sorted(lines.values()),
                "",
                "```",
                f"sae eval {address} {stores}",
                f'saecli.load_sae("{address}")',
                *(code.format(address) for form, code in LIBRARIES.items() if form == found.format),
                "```",
                end,
            ]
        )
        + after
    )
    return present
