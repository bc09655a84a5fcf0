"""Opening an SAE on the rows of a model's sites: what a model that is here does before these is folded in.

ln2.hook_normalized is `mlp_in` before the norm's weight and bias; with LayerNorm only in TransformerLens from 3 on and
with `fold_ln`: else it is no site here. With LayerNorm, `center_writing_weights` subtracts from rows of the residual
stream, and of what is added to it, their mean over dimensions.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ..base.console import Listener, Silent
from ..base.files import read_json
from ..base.home import Home
from ..sae.dictionary import SAE
from ..sae.formats.common import NORMALIZED, TO_FIT, SavedSAE, Z, hook_name
from ..sae.library import SAELike, Subject, read_sae
from ..store.arrays import naming
from ..store.origin import HookPoint, Origin
from . import BUNDLED
from .families import FAMILIES, MODEL_TYPES, Family

FOLDED = {  # sites after what is folded in, and what the rows lack
    NORMALIZED: ("mlp_in", "before the norm's weight"),
    Z: ("attn_z", "without value biases"),
}
CENTRED = {"resid_pre", "resid_post", "attn_out", "mlp_out", "resid_mid"}


class Affine(NamedTuple):
    """`rows * weight + bias`, (D,) each, float64."""

    bias: Tensor
    weight: Tensor


def load_sae(run: str | Path | None = None, home: str | Path | None = None) -> SAE:
    """Load an SAE trained by `sae train` or another library, on the CPU, in its file's precision.

    It takes raw activations: `encode` maps (..., D) to codes (..., F), `decode` codes to reconstructions. `cfg` has its
    settings and hook point.

    Args:
        run: a run's name; a folder with an SAE in any known format, or a layer's file there; such a folder or file on
            the Hugging Face hub, as `user/repo/folder@revision`; or `release/id` of the installed SAELens; None for
            the newest run.
        home: the folder of stores and runs; by default $SAE_HOME, else ./sae-data.
    """
    return open_sae(Home.at(home), run, Silent())[1].sae


def open_sae(home: Home, sae: SAELike, listener: Listener) -> tuple[Subject, SavedSAE]:
    """An SAE, on its own device or the CPU, and where it comes from; row-major, from memory too, for the same bits."""
    return read_sae(home, sae, listener, fold_in)


def fold_in(saved: SavedSAE, model: str | None = None) -> SavedSAE:
    """The SAE on a site's rows, where its hook point is one in some models only, or its model, by default `model`, was
    processed."""
    model = saved.origin.model or model
    folder = _folder(model)
    family = _family(model, folder)
    if family is not None:
        saved = _at_sites(saved, family)
        if folder is not None:
            saved = _folded(saved, family, folder, str(model))
    return _centred(saved, family)


def _at_sites(saved: SavedSAE, family: Family) -> SavedSAE:
    origin = saved.origin
    written = origin.written and family.at_site(origin.written)
    read = tuple(map(family.at_site, origin.read))
    return replace(saved, origin=replace(origin, read=read, written=written))


def _folded(saved: SavedSAE, family: Family, folder: Path, model: str) -> SavedSAE:
    origin, sae = saved.origin, saved.sae
    points = [origin.read[0], origin.written or HookPoint()]
    widths = sae.d_in, sae.d_out
    affines: list[Affine | None] = [None, None]
    if saved.processing.get("fold_ln") or not family.layer_norm:
        affines = [_norm(*end, family, folder) for end in zip(points, widths, strict=True)]
    if saved.processing.get("fold_value_biases") and points[0].site == Z:
        affines[0] = _value_biases(points[0], sae.d_in, folder)
    if not any(affines):
        return saved
    remarks = list(saved.remarks)
    for end, point in enumerate(points):
        if affines[end] is not None:
            site, lacking = FOLDED[point.site]
            points[end] = point._replace(site=site)
            remarks.append(
                f"reads rows {lacking} ({point.site}); what {model} has is folded in here, so that it reads {site}"
            )
    written = origin.written and points[1]
    origin = replace(origin, read=(points[0], *origin.read[1:]), written=written)
    return replace(
        saved,
        sae=_through(sae, affines if saved.is_transcoder else affines[:1] * 2),
        origin=origin,
        processing=saved.processing | {"fold_ln": False, "fold_value_biases": False},
        remarks=tuple(remarks),
    )


def _through(sae: SAE, affines: Sequence[Affine | None]) -> SAE:
    mean = torch.zeros(sae.d_in + sae.d_out, dtype=torch.float64)
    scale = torch.ones_like(mean)
    for affine, part in zip(affines, (slice(sae.d_in), slice(sae.d_in, None)), strict=True):
        if affine is not None:
            mean[part], scale[part] = affine
    made = replace(sae.normalisation, mean=mean, scale=scale)
    return sae.copy_to(torch.float64).on_raw_rows(made).copy_to(sae.W_enc.dtype)


def _centred(saved: SavedSAE, family: Family | None) -> SavedSAE:
    """The same codes of rows that are not centred, if it was trained on centred ones."""
    sae, remarks, origin = saved.sae, saved.remarks, saved.origin
    read = origin.read[0].site
    sites = {read, origin.written.site if origin.written else read}
    has_layer_norm = family is None or family.layer_norm
    centres = saved.processing.get("center_writing_weights") is True and has_layer_norm
    if centres and sites & CENTRED:
        if read in CENTRED:
            sae = sae.changed(W_enc=sae.W_enc - sae.W_enc.mean(0))
        remarks = (
            *remarks,
            "was trained on rows less their mean over dimensions (center_writing_weights): that mean does "
            "not change its codes here, and its predictions lack it",
        )
    processing = saved.processing | {"center_writing_weights": False}
    return replace(saved, sae=sae, processing=processing, remarks=remarks)


def notes_on_writing(origin: Origin) -> list[str]:
    """What the user of TransformerLens' names should know, each a predicate."""
    notes = []
    points = [origin.read[0], *([origin.written] if origin.written else [])]
    if any(point.site == "mlp_in" for point in points):
        notes.append(
            "is written for mlp.hook_in, which TransformerLens' TransformerBridge has and its HookedTransformer lacks"
        )
    for name in map(hook_name, points):
        if name is not None and ":" in name:
            notes.append(
                f"is written for {name}, a side of transformers' module: TransformerLens has no such hook"
            )
    family = _family(origin.model, _folder(origin.model))
    if points[0].site == "attn_z" and (family is None or Z not in family.sites):
        notes.append(
            f"is written for {Z}, which TransformerLens' fold_value_biases changes where values have a bias; "
            "load the model without it"
        )
    return notes


def why_not_folded(origin: Origin, rows: Origin) -> str | None:
    """Why an SAE reads rows before the weight of a norm that a store's have, if so."""
    if rows.read[0].site != "mlp_in" or origin.read[0].site != NORMALIZED:
        return None
    return (
        f"it reads rows before the norm's weight ({NORMALIZED}), and mlp_in is after it; fetch "
        f"{origin.model or rows.model} by `hf download` to fold that weight in (with LayerNorm set fold_ln)"
    )


def _folder(model: str | None) -> Path | None:
    if model is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        for folder in (Path(model), BUNDLED.get(model, Path(model))):
            if folder.is_dir():
                return folder
        config = try_to_load_from_cache(model, "config.json")
    except (HFValidationError, OSError):  # no name of a repository, too long for a path
        return None
    return Path(config).parent if isinstance(config, str) else None


def _family(model: str | None, folder: Path | None) -> Family | None:
    """By its configuration on this machine, else by its name on the hub."""
    if folder is None:
        kinds = (kind for name, kind in MODEL_TYPES.items() if model and re.fullmatch(name, model))
        return FAMILIES.get(next(kinds, ""))
    try:
        config = read_json(folder / "config.json", dict[str, Any])
    except (OSError, ValueError):
        return None
    text = config.get("text_config")
    entries = text if isinstance(text, dict) else config
    return FAMILIES.get(str(entries.get("model_type")))


def _norm(point: HookPoint, width: int, family: Family, folder: Path) -> Affine | None:
    """The norm before the MLP, if the hook point is before its weight, which must be there, fit and have no 0."""
    if point.site != NORMALIZED:
        return None
    parts = _weights(folder, rf"{point.layer}\.{family.norm}")
    bias = parts.get("bias", torch.zeros(width, dtype=torch.float64))
    weight = parts.get("weight", torch.zeros(0)) + family.offset
    fits = weight.shape == bias.shape == (width,) and weight.abs().min() > 0
    return Affine(bias, weight) if fits else None


def _value_biases(point: HookPoint, width: int, folder: Path) -> Affine | None:
    """What TransformerLens' `fold_value_biases` takes from hook_z, of GPT-2's fused queries, keys and values: attention
    weights sum to 1, so that each head's values lack their bias."""
    parts = _weights(folder, rf"{point.layer}\.attn\.c_attn")
    if len(parts.get("bias", ())) != 3 * width:
        return None
    return Affine(parts["bias"][-width:], torch.ones(width, dtype=torch.float64))


def _weights(folder: Path, module: str) -> dict[str, Tensor]:
    """Weight and bias of a module, by a pattern after `layers.`."""
    wanted = re.compile(rf"(?:.+\.)?(?:layers|h)\.{module}\.(weight|bias)")
    parts = {}
    for path in sorted(folder.glob("*.safetensors")):
        with naming(str(path), TO_FIT), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if match := wanted.fullmatch(name):
                    parts[match[1]] = file.get_tensor(name).double()
    return parts
