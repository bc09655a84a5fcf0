"""An SAE in another library's format, and on the Hugging Face hub with a model card of its measures.

Where a library lacks the activation, a stand-in is written and the difference measured.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from ..base.console import Listener, listening
from ..base.errors import ConfigError, FormatError, StoreError, number, unknown_choice
from ..base.home import Home
from ..extract.options import BUNDLED
from ..sae import formats
from ..sae.dictionary import SAE, Batch
from ..sae.formats import FORMATS, WRITABLE, SavedSAE, stand_in
from ..sae.formats.hooks import unsettled
from ..sae.hub import Address, demand_writable, upload
from ..sae.library import SAELike, hook_points, open_sae
from ..sae.metrics import Reconstruction
from ..store.reader import in_words
from .evaluate import check_tokens, evaluate_all
from .measured import ChosenRows, Measured, RowsLike

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

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
LIBRARIES = {  # by format: how the library loads the SAE from the hub
    "saelens": 'sae_lens.SAE.from_pretrained("{0.repo}", "{0.folder}")',
    "sparsify": 'sparsify.SparseCoder.load_from_hub("{0.repo}", hookpoint="{0.folder}")',
    "circuit-tracer": 'circuit_tracer.utils.hf_utils.load_transcoder_from_hub("{0.repo}/{0.folder}")  # all layers',
}
CLIPPING = (  # why `stand_in` stands in
    "the topk of {} applies a ReLU to the k largest pre-activations, and topk here keeps their signs"
)
CARD = """---
{metadata}
---

# {address}

{what}, measured by `sae eval` on held-out rows.

{table}

fvu: `E||x_hat - x||^2 / (E||x||^2 - ||E x||^2)`; ce_recovered: `(ce_zero - ce_spliced) / (ce_zero - ce_clean)`;
kl: nats per token.
{remark}
```
sae eval {at} {stores}
saecli.load_sae("{at}")
{library}
```

Each folder of this repository with an SAE has a card.
"""


@dataclass(frozen=True)
class Conversion:
    """An SAE to write in a format, or its stand-in with the deviation of `_deviation`."""

    format: str
    written: SavedSAE
    deviation: dict[str, Any] | None = None

    @property
    def remark(self) -> str | None:
        """How the stand-in differs, if one is written."""
        if self.deviation is None:
            return None
        rows, data = self.deviation["rows"], self.deviation["data"]
        name = self.written.sae.activation.name
        change = f"{CLIPPING.format(self.format)}: wrote {name}, which {self.format} calls topk"
        if not self.deviation["rows_that_differ"]:
            return f"{change}; both give the same codes on all {rows:,} held-out rows of {data}"
        return (
            f"{change}; {self.deviation['rows_that_differ'] / rows:.2%} of the {rows:,} held-out rows "
            f"of {data} have negative codes, which become 0: predictions change by up to "
            f"{self.deviation['max_difference']:.3g}, and fvu goes from {self.deviation['fvu']:.4g} to "
            f"{self.deviation['fvu_written']:.4g}"
        )

    def note_losses(self, name: str, listener: Listener) -> None:
        """Say what the file of the SAE of this name lacks."""
        if self.written.sae.widths and self.format != "native":
            points, _ = hook_points(self.written.origin)
            listener.note(
                f"{name} reads {len(self.written.sae.widths)} hook points side by side, which {self.format} "
                f"cannot name: the file names none; give it rows of {' + '.join(points) or 'all'}, in this "
                "order"
            )
        if self.remark is not None:
            listener.note(self.remark)


def converted(
    saved: SavedSAE, to: str, held_out: Callable[[], Measured], listener: Listener
) -> Conversion:
    """Convert an SAE to a format; if that takes a stand-in, measure the difference on rows that `held_out` opens."""
    lacking = FORMATS[to].lacks(saved)
    if lacking is None:
        return Conversion(to, saved)
    substitute = stand_in(saved)
    if substitute is None or not can_be_written(saved, to):
        others = [name for name in FORMATS if name != "native" and can_be_written(saved, name)]
        advice = f"use {' or '.join(others)}"
        if not others:
            advice = (
                "no library here can: hand on the run folder, whose sae.safetensors this tool reads"
            )
        raise FormatError(f"{to} cannot express {lacking}; {advice}")
    try:
        measured = held_out()
    except StoreError as error:
        raise ConfigError(
            f"{CLIPPING.format(to)}; writing {substitute.sae.activation.name} instead needs rows to measure "
            f"the difference on, but {error}"
        ) from error
    return Conversion(to, substitute, _deviation(measured, substitute.sae, listener))


def can_be_written(saved: SavedSAE, to: str) -> bool:
    candidates = [saved, stand_in(saved)]
    return any(sae is not None and not FORMATS[to].lacks(sae) for sae in candidates)


@torch.no_grad()
def _deviation(measured: Measured, substitute: SAE, listener: Listener) -> dict[str, Any]:
    """The differences between an SAE and its stand-in on the held-out rows."""
    sae, substitute = measured.sae, substitute.copy_to(measured.sae.W_enc.device)
    exact, changed = (
        Reconstruction(sae.d_out, sae.d_sae, device=sae.W_enc.device) for _ in range(2)
    )
    differing_rows = 0
    largest = 0.0
    for rows in measured.batches(listener):
        batch = Batch.of(rows, sae.d_in)
        codes, changed_codes = sae.codes(batch.x), substitute.codes(batch.x)
        y_hat = sae.predicted(batch.x, codes)[:, -1]
        changed_y_hat = substitute.predicted(batch.x, changed_codes)[:, -1]
        exact.update(batch.y, y_hat, codes)
        changed.update(batch.y, changed_y_hat, changed_codes)
        differing_rows += int((codes.dense() != changed_codes.dense()).any(1).sum())
        largest = max(largest, float((y_hat - changed_y_hat).abs().max()))
    return {
        "data": measured.heading["data"],
        "rows": measured.rows.rows,
        "rows_that_differ": differing_rows,
        "max_difference": largest,
        "fvu": exact.result()["fvu"],
        "fvu_written": changed.result()["fvu"],
    }


def export(
    sae: SAELike | Sequence[SAELike],
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
        sae, home, progress: as in `evaluate`; or several transcoders, one for each layer, for circuit-tracer.
        to: saelens, sparsify, dictionary-learning, gemma-scope, gemma-scope-2, circuit-tracer or native; also with _
            for -.
        out: folder to write, new or empty; it appears whole or not at all.
        data, target: rows to measure the difference on, as in `evaluate`.

    Returns:
        The document that `sae export --json` prints; its `deviation` is the difference measured, None without one. Of
        several SAEs `runs` has the entries of each.
    """
    to = formats.named(to)
    if to not in WRITABLE:
        raise unknown_choice("to", to, WRITABLE)
    home, listener, out = Home.at(home), listening(progress), Path(out)
    several = _listed(sae)
    demand_takes_sets(to, len(several))
    chosen_rows = ChosenRows(home, data, "test", "auto", listener, target)
    entries: list[dict[str, Any]] = []

    def written() -> Iterator[SavedSAE]:
        for one in several:  # opened one at a time, since a set may be larger than memory
            subject, saved = open_sae(home, one, listener)
            conversion = converted(
                saved, to, partial(chosen_rows.with_opened, subject, saved), listener
            )
            for option, value in (("data", data), ("target", target)):
                if conversion.deviation is None and value is not None:
                    raise ConfigError(
                        f"--{option} does nothing here: {to} expresses {saved.sae.activation.name} "
                        "exactly; leave it out"
                    )
            ready = unsettled(conversion.written) if to == "saelens" else conversion.written
            yield ready
            for remark in ready.remarks:
                listener.note(f"{subject.name} {remark}")
            conversion.note_losses(subject.name, listener)
            entries.append(
                {
                    "run": subject.name,
                    "activation": saved.sae.activation.name,
                    "written_as": conversion.written.sae.activation.name,
                    "deviation": conversion.deviation,
                }
            )

    formats.save_all(written(), to, out)
    note_unread(to, [entry["written_as"] for entry in entries], listener)
    files = sorted(path.name for path in out.iterdir())
    document = {"format": to, "path": str(out), "files": files}
    return document | (entries[0] if len(entries) == 1 else {"runs": entries})


def note_unread(to: str, activations: Collection[str], listener: Listener) -> None:
    """Say which version of circuit-tracer reads a topk; `activations` as they are written."""
    if to == "circuit-tracer" and "topk" in activations:
        listener.note(
            "circuit-tracer 0.5.0 does not read `activation: topk` of config.yaml, and takes it for relu: install a "
            "later one from its repository, or train with --act batchtopk, which 0.5.0 reads exactly"
        )


def demand_takes_sets(to: str, count: int) -> None:
    if count > 1 and not (to in FORMATS and FORMATS[to].takes_sets):
        raise ConfigError(
            f"{to} has one SAE in a folder, got {count}: expected circuit-tracer for a set of transcoders, one for "
            "each layer; name one run, or --to circuit-tracer"
        )


def push(
    sae: SAELike | Sequence[SAELike],
    repo: str,
    data: RowsLike = None,
    *,
    target: str | None = None,
    private: bool = False,
    format: str = "auto",
    model: str | None = None,
    tokens: int | None = None,
    device: str = "auto",
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Push an SAE to the Hugging Face hub, with the token of `hf auth login` or HF_TOKEN; CLI equivalent: `sae push`.

    It is measured on held-out rows of a store, with the other arguments as in `evaluate`; returns the document that
    `sae push --json` prints. Its folder gets a model card, and so does a repository that has none.

    Args:
        sae: an SAE, or several transcoders, one for each layer, for circuit-tracer.
        repo: `user/repo`, created if missing, or `user/repo/folder`; the default folder has the run's name.
        private: create the repository as private; an existing public one is refused.
        format: auto: of one SAE saelens if it gives the same codes on all held-out rows, else native; of several
            circuit-tracer.
    """
    several = _listed(sae)
    if len(several) > 1 and format == "auto":
        format = "circuit-tracer"
    choices = ("auto", *WRITABLE)
    if formats.named(format) not in choices:
        raise unknown_choice("format", format, choices)
    check_tokens(tokens, model)
    demand_takes_sets(formats.named(format), len(several))
    address = _folder_address(repo, several)
    listener = listening(progress)
    chosen_rows = ChosenRows(Home.at(home), data, "test", device, listener, target)
    measured_saes = [chosen_rows.with_sae(one) for one in several]
    demand_writable(address, private)
    conversions = [_conversion(each, formats.named(format), listener) for each in measured_saes]
    pairs = [*zip(measured_saes, conversions, strict=True)]
    written = [replace(each, saved=conversion.written) for each, conversion in pairs]
    measures = evaluate_all(written, model, tokens, listener)
    for each, conversion in pairs:
        conversion.note_losses(each.subject.name, listener)
    to = conversions[0].format
    note_unread(
        to, [conversion.written.sae.activation.name for conversion in conversions], listener
    )
    card = _card(address, conversions, measured_saes, measures)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, address.folder)
        formats.save_all((conversion.written for conversion in conversions), to, folder)
        files = sorted(path.name for path in folder.iterdir())
        card.save(folder / "README.md")
        card.save(Path(scratch, "README.md"))
        url = upload(Path(scratch), address, private)
    entries = [
        {
            "run": each.subject.name,
            "written_as": conversion.written.sae.activation.name,
            "deviation": conversion.deviation,
            "measures": measured,
        }
        for (each, conversion), measured in zip(pairs, measures, strict=True)
    ]
    return {
        "repo": address.repo,
        "folder": address.folder,
        "format": to,
        "files": files,
        "card": f"{address.folder}/README.md",
        "url": url,
        **(entries[0] if len(entries) == 1 else {"runs": entries}),
    }


def _listed(sae: SAELike | Sequence[SAELike]) -> list[SAELike]:
    return [*sae] if isinstance(sae, Sequence) and not isinstance(sae, str) else [sae]


def _folder_address(repo: str, saes: Sequence[SAELike]) -> Address:
    address, name = Address.parse(repo), "set"
    if len(saes) == 1:
        (sae,) = saes
        name = "sae" if sae is None or isinstance(sae, SAE) else Path(sae).resolve().name
    if address is not None and not address.folder:
        address = Address.parse(f"{repo.rstrip('/')}/{name}")
    if address is None or address.revision is not None:
        raise ConfigError(
            f"cannot push to {repo!r}: expected USER/REPO or USER/REPO/FOLDER, without a revision, such "
            "as someone/my-saes"
        )
    return address


def _conversion(measured: Measured, to: str, listener: Listener) -> Conversion:
    """The SAE in a format; for `auto` in saelens if its codes are the same there, else native."""
    # Without what is local: paths of a model, names of stores.
    origin = {name: value for name, value in measured.saved.origin.items() if name not in LOCAL}
    model = origin.get("model")
    if model is not None and Path(model).is_absolute():
        origin["model"] = Path(model).name
    saved = replace(measured.saved, origin=origin)
    if to != "auto":
        return converted(saved, to, lambda: measured, listener)
    kind = "transcoder with " if saved.is_transcoder else ""
    reason = f"saelens has no {kind}{saved.sae.activation.name}"
    if can_be_written(saved, "saelens"):
        conversion = converted(saved, "saelens", lambda: measured, listener)
        deviation = conversion.deviation
        if deviation is None or not deviation["rows_that_differ"]:
            return conversion
        reason = (
            f"with saelens' {conversion.written.sae.activation.name} {deviation['rows_that_differ']:,} "
            f"of {deviation['rows']:,} held-out rows differ; --format saelens writes it all the same"
        )
    listener.note(f"{measured.subject.name} is written as native: {reason}")
    return converted(saved, "native", lambda: measured, listener)


def _card(
    address: Address,
    conversions: Sequence[Conversion],
    measured_saes: Sequence[Measured],
    measures: Sequence[dict[str, Any]],
) -> "ModelCard":
    """The figures of an SAE, or of a set side by side, and how to load it."""
    from huggingface_hub import ModelCard, ModelCardData  # takes long to import

    measured, conversion = measured_saes[0], conversions[0]
    source = measured.store.meta.source
    model = measured.saved.origin.get("model", "")
    library = LIBRARIES.get(conversion.format)
    metadata = ModelCardData(
        library_name="saecli" if library is None else conversion.format,
        base_model=None if Path(model).is_absolute() or model in ("", *BUNDLED) else model,
        datasets=[source["dataset"]] if "dataset_revision" in source else None,
        tags=["sparse-autoencoder", "mechanistic-interpretability", "saecli"],
    )
    figures = [
        _figures(one, each, of_one)
        for one, each, of_one in zip(conversions, measured_saes, measures, strict=True)
    ]
    rows = [[name, *(own[name] for own in figures)] for name in figures[0]]
    of_set = len(figures) > 1
    if of_set:  # a row for each layer
        rows = [[*row] for row in zip(*rows, strict=True)]
    heading = rows.pop(0) if of_set else ["", ""]
    lines = [heading, ["---"] * len(heading), *rows]
    remarks = [one.remark for one in conversions if one.remark is not None]
    at = f"{address}/layer_0.safetensors" if of_set else str(address)
    text = CARD.format(
        metadata=metadata.to_yaml(),
        address=address,
        at=at,
        what=f"{len(figures)} transcoders, one for each layer"
        if of_set
        else "A sparse autoencoder",
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        remark="".join(f"\n{remark}.\n" for remark in remarks),
        stores="--data STORE --target STORE" if measured.saved.is_transcoder else "--data STORE",
        library="" if library is None else library.format(address),
    )
    return ModelCard(text)


def _figures(
    conversion: Conversion, measured: Measured, measures: dict[str, Any]
) -> dict[str, str]:
    saved = conversion.written
    points, target = hook_points(saved.origin)
    places = [saved.origin.get("model"), in_words(points, target) if points else None]
    return {
        "activations": ", ".join(place for place in places if place) or measured.store.name,
        "activation": f"{saved.sae.activation.name} {saved.sae.k or ''}".strip(),
        "d_in": number(saved.sae.d_in),
        "d_sae": number(saved.sae.d_sae),
        **{name: number(measures.get(name)) for name in MEASURES},
    }
