"""SAEs in other libraries' formats, and on the Hugging Face hub with a model card of their measures."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..base.console import Listener
from ..base.errors import ConfigError
from ..base.home import Home
from ..base.words import number, unknown_choice
from ..measure.evaluate import evaluate_all
from ..measure.measured import Measured
from ..model import BUNDLED
from ..model.saes import notes_on_writing, open_sae
from ..sae import formats
from ..sae.dictionary import SAE
from ..sae.formats import FORMATS, WRITABLE, SavedSAE, stand_in
from ..sae.hub import Address, upload
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
    """Without names that only this machine knows, folders and stores; with a note a stand-in, if a format has only
    that."""
    saved = replace(saved, origin=saved.origin.published(), transcodes=saved.is_transcoder)
    substitute = stand_in(saved, to)
    if substitute is None:
        return saved
    listener.warn(
        f"{name}: the topk of {to} applies a ReLU to the k largest pre-activations, and topk here keeps their "
        f"signs; wrote {substitute.sae.activation.name}, negative codes become 0"
    )
    return substitute


def listed(sae: SAELike | Sequence[SAELike]) -> list[SAELike]:
    return [*sae] if isinstance(sae, Sequence) and not isinstance(sae, str) else [sae]


def demand_format(option: str, to: str, count: int, *others: str) -> None:
    if to not in WRITABLE:
        raise unknown_choice(option, to, [*others, *WRITABLE])
    if count > 1 and not FORMATS[to].demand_set:
        raise ConfigError(
            f"{to} has one SAE in a folder, got {count}: expected circuit-tracer for a set of transcoders, one for "
            "each layer; name one run, or --to circuit-tracer"
        )


def write_export(
    home: Home, saes: Sequence[SAELike], to: str, out: Path, listener: Listener
) -> dict[str, Any]:
    entries: list[dict[str, Any]] = []

    def written() -> Iterator[SavedSAE]:
        for sae in saes:  # opened one at a time, since a set may be larger than memory
            subject, saved = open_sae(home, sae, listener)
            ready = writable(saved, to, subject.name, listener)
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
    document = {"format": to, "path": str(out), "files": sorted(os.listdir(out))}
    return document | (entries[0] if len(entries) == 1 else {"runs": entries})


def upload_measured(
    address: Address,
    private: bool,
    to: str,
    measured_saes: Sequence[Measured],
    model: str | None,
    tokens: int | None,
    listener: Listener,
) -> dict[str, Any]:
    saves = [writable(each.saved, to, each.subject.name, listener) for each in measured_saes]
    written = [replace(each, saved=saved) for each, saved in zip(measured_saes, saves, strict=True)]
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, address.folder)
        formats.save_all(saves, to, folder)
        files = sorted(os.listdir(folder))
        measures = evaluate_all(written, model, tokens, listener)
        card = _card(address, to, measured_saes, saves, measures)
        card.save(folder / "README.md")
        card.save(Path(scratch, "README.md"))
        url = upload(Path(scratch), address, private)
    entries = [
        {
            "run": each.subject.name,
            "written_as": each.sae.activation.name,
            "measures": of_sae,
        }
        for each, of_sae in zip(written, measures, strict=True)
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


def folder_address(repo: str, saes: Sequence[SAELike]) -> Address:
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
            f"cannot push to {repo!r}: expected USER/REPO or USER/REPO/FOLDER without a revision"
        )
    return address


def exact_format(measured: Measured, listener: Listener) -> str:
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
    figures = [*map(_figures, saves, measured_saes, measures)]
    of_set = len(figures) > 1
    rows = [[*row.values()] for row in figures]
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
