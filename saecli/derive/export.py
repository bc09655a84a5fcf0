"""An SAE in another library's format, and on the Hugging Face hub with a model card of its measures."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..base.console import Listener, listening
from ..base.errors import ConfigError
from ..base.files import expanded
from ..base.home import Home
from ..base.words import number, unknown_choice
from ..measure.evaluate import check_tokens, evaluate_all
from ..measure.measured import ChosenRows, Measured, RowsLike
from ..model.names import BUNDLED
from ..model.saes import notes_on_writing, open_sae
from ..sae import formats
from ..sae.dictionary import SAE
from ..sae.formats import FORMATS, WRITABLE, SavedSAE, stand_in
from ..sae.hub import Address, demand_writable, upload
from ..sae.library import SAELike
from ..store.reader import in_words

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

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
CARD = """---
{metadata}
---

# {address}

{what}, measured by `sae eval` on held-out rows.

{table}

fvu: `E||x_hat - x||^2 / (E||x||^2 - ||E x||^2)`; ce_recovered: `(ce_zero - ce_spliced) / (ce_zero - ce_clean)`;
kl: nats per token.

```
sae eval {at} {stores}
saecli.load_sae("{at}")
{library}
```

Each folder of this repository with an SAE has a card.
"""


def writable(saved: SavedSAE, to: str, name: str, listener: Listener) -> SavedSAE:
    """The SAE, or its stand-in, with a note, if only that can be written in a format."""
    substitute = stand_in(saved, to)
    if substitute is None:
        return saved
    listener.warn(
        f"{name}: the topk of {to} applies a ReLU to the k largest pre-activations, and topk here keeps their "
        f"signs; wrote {substitute.sae.activation.name}, negative codes become 0"
    )
    return substitute


def export(
    sae: SAELike | Sequence[SAELike],
    to: str,
    out: str | Path,
    *,
    home: str | Path | Home | None = None,
    progress: bool | Listener = False,
) -> dict[str, Any]:
    """Write an SAE in another library's format; CLI equivalent: `sae export`.

    A topk is written as relu-topk, with a note, if the format has no other; `save_sae` refuses instead.

    Args:
        sae, home, progress: as in `evaluate`; or several transcoders, one for each layer, for circuit-tracer.
        to: saelens, sparsify, dictionary-learning, circuit-tracer or native.
        out: folder to write, new or empty; it appears whole or not at all.

    Returns:
        The document that `sae export --json` prints. Of several SAEs `runs` has the entries of each.
    """
    if to not in WRITABLE:
        raise unknown_choice("to", to, WRITABLE)
    home, listener, out = Home.at(home), listening(progress), expanded(out)
    several = _listed(sae)
    demand_takes_sets(to, len(several))
    entries: list[dict[str, Any]] = []

    def written() -> Iterator[SavedSAE]:
        for one in several:  # opened one at a time, since a set may be larger than memory
            subject, saved = open_sae(home, one, listener)
            ready = writable(_without_local(saved), to, subject.name, listener)
            entries.append(
                {
                    "run": subject.name,
                    "activation": saved.sae.activation.name,
                    "written_as": ready.sae.activation.name,
                }
            )
            yield ready
            for note in notes_on_writing(ready.origin) if to == "saelens" else ():
                listener.warn(f"{subject.name} {note}")

    formats.save_all(written(), to, out)
    files = sorted(path.name for path in out.iterdir())
    document = {"format": to, "path": str(out), "files": files}
    return document | (entries[0] if len(entries) == 1 else {"runs": entries})


def demand_takes_sets(to: str, count: int) -> None:
    if count > 1 and not (to in FORMATS and FORMATS[to].demand_set):
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
        format: auto: of one SAE saelens if that can express it exactly, else native; of several circuit-tracer.
    """
    several = _listed(sae)
    if len(several) > 1 and format == "auto":
        format = "circuit-tracer"
    choices = ("auto", *WRITABLE)
    if format not in choices:
        raise unknown_choice("format", format, choices)
    check_tokens(tokens, model)
    demand_takes_sets(format, len(several))
    address = _folder_address(repo, several)
    listener = listening(progress)
    chosen_rows = ChosenRows(Home.at(home), data, "test", device, listener, target)
    measured_saes = [chosen_rows.with_sae(one) for one in several]
    demand_writable(address, private)
    if format == "auto":
        format = _exact_format(measured_saes[0], listener)
    saves = [
        writable(_without_local(each.saved), format, each.subject.name, listener)
        for each in measured_saes
    ]
    written = [replace(each, saved=saved) for each, saved in zip(measured_saes, saves, strict=True)]
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, address.folder)
        formats.save_all(saves, format, folder)
        files = sorted(path.name for path in folder.iterdir())
        measures = evaluate_all(written, model, tokens, listener)
        card = _card(address, format, measured_saes, saves, measures)
        card.save(folder / "README.md")
        card.save(Path(scratch, "README.md"))
        url = upload(Path(scratch), address, private)
    entries = [
        {
            "run": each.subject.name,
            "written_as": each.sae.activation.name,
            "measures": measured,
        }
        for each, measured in zip(written, measures, strict=True)
    ]
    return {
        "repo": address.repo,
        "folder": address.folder,
        "format": format,
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
        if address is None or address.folder != name:
            raise ConfigError(f"{name!r} cannot be a folder on the hub; push to {repo}/FOLDER")
    if address is None or address.revision is not None:
        raise ConfigError(
            f"cannot push to {repo!r}: expected USER/REPO or USER/REPO/FOLDER, without a revision, such "
            "as someone/my-saes"
        )
    return address


def _without_local(saved: SavedSAE) -> SavedSAE:
    """The SAE without names that only this machine knows: folders, stores."""
    return replace(saved, origin=saved.origin.published(), transcodes=saved.is_transcoder)


def _exact_format(measured: Measured, listener: Listener) -> str:
    """Saelens if it can express the SAE exactly, else native, with a note."""
    lacking = FORMATS["saelens"].lacks(measured.saved)
    if lacking is None:
        return "saelens"
    clipped = stand_in(measured.saved, "saelens") is not None
    advice = "; --format saelens writes it clipped" if clipped else ""
    listener.warn(
        f"{measured.subject.name} is written as native: saelens cannot express {lacking}{advice}"
    )
    return "native"


def _card(
    address: Address,
    to: str,
    measured_saes: Sequence[Measured],
    saves: Sequence[SavedSAE],
    measures: Sequence[dict[str, Any]],
) -> "ModelCard":
    """The figures of an SAE, or of each of a set, and how to load it."""
    from huggingface_hub import ModelCard, ModelCardData  # takes long to import

    measured = measured_saes[0]
    source = measured.store.meta.source
    model = measured.saved.origin.model or ""
    library = LIBRARIES.get(to)
    metadata = ModelCardData(
        library_name="saecli" if library is None else to,
        base_model=None if Path(model).is_absolute() or model in ("", *BUNDLED) else model,
        datasets=[source["dataset"]] if "dataset_revision" in source else None,
        tags=["sparse-autoencoder", "mechanistic-interpretability", "saecli"],
    )
    figures = [
        _figures(one, each, of_one)
        for one, each, of_one in zip(saves, measured_saes, measures, strict=True)
    ]
    of_set = len(figures) > 1
    rows = [[*own.values()] for own in figures]
    lines = [[*figures[0]], ["---"] * len(figures[0]), *rows]
    at = f"{address}/layer_0.safetensors" if of_set else str(address)
    text = CARD.format(
        metadata=metadata.to_yaml(),
        address=address,
        at=at,
        what=f"{len(figures)} transcoders, one for each layer"
        if of_set
        else "A sparse autoencoder",
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        stores="--data STORE --target STORE" if measured.saved.is_transcoder else "--data STORE",
        library="" if library is None else library.format(address),
    )
    return ModelCard(text)


def _figures(saved: SavedSAE, measured: Measured, measures: dict[str, Any]) -> dict[str, str]:
    points, target = saved.origin.hook_points()
    places = [saved.origin.model, in_words(points, target) if points else None]
    return {
        "activations": ", ".join(place for place in places if place) or measured.store.name,
        "activation": f"{saved.sae.activation.name} {saved.sae.k or ''}".strip(),
        "d_in": number(saved.sae.d_in),
        "d_sae": number(saved.sae.d_sae),
        **{name: number(measures.get(name)) for name in MEASURES},
    }
