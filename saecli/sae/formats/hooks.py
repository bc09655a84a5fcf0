"""Other tools' names of hook points, and the sites that they are here; README.md has a table.

TransformerLens' follow `blocks.L.`; names of transformers' modules follow `layers.L.` or `h.L.`, and end there with
`.input` or `.output`, here with `:in` or `:out`. A hook point that is no site here keeps its name in an SAE's origin,
which tells its rows from a store's. Some are sites in some models only: see `Family.sites`, and ln2.hook_normalized,
`mlp_in` before the norm's weight and bias, which `settled` folds into the SAE if the model is on this machine.

TransformerLens' options change rows too. With LayerNorm, ln2.hook_normalized is before weight and bias in versions from
3 on and with `fold_ln`, else after them: without `fold_ln` it is no site here. In models with LayerNorm
`center_writing_weights` subtracts from rows of the residual stream, and of what is added to it, their mean over
dimensions.

Sources: `components/rms_norm.py`, `layer_norm.py`, `transformer_block.py` and `HookedTransformer.py` of TransformerLens
2.18 and 3.9; `replacement_model_transformerlens.py` and `utils/tl_nnsight_mapping.py` of circuit-tracer 0.5.0.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ...base.documents import read_json
from ...store.arrays import naming
from ..dictionary import SAE
from .common import TO_FIT, SavedSAE

SITES = {  # by TransformerLens' name, exact in all models
    "hook_resid_pre": "resid_pre",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
    "hook_resid_mid": "resid_mid",
    "mlp.hook_in": "mlp_in",
}
Z = "attn.hook_z"
HOOKS = {site: hook for hook, site in SITES.items()} | {"attn_z": Z}
NORMALIZED = "ln2.hook_normalized"
PROJECTIONS = ("self_attn.o_proj", "attn.c_proj", "attention.dense", "self_attn.out_proj")
SIDES = {"input": "in", "output": "out"}
ENDINGS = (":in", ":out")
MODULES = {  # by transformers' name and its side, exact in all models
    ":in": "resid_pre",
    ":out": "resid_post",
    "mlp:in": "mlp_in",
    "pre_feedforward_layernorm:out": "mlp_in",
    "post_feedforward_layernorm:out": "mlp_out",
    **dict.fromkeys((f"{path}:in" for path in PROJECTIONS), "attn_z"),
}
WITHOUT_SECOND_NORM = {  # sites in models whose attention and MLP do not end with a norm
    "mlp.hook_out": "mlp_out",
    "mlp:out": "mlp_out",
    "attn:out": "attn_out",
    "self_attn:out": "attn_out",
    "attention:out": "attn_out",
}
FOLDED = {  # sites after what is folded in, and what the rows lack
    NORMALIZED: ("mlp_in", "before the norm's weight"),
    Z: ("attn_z", "without value biases"),
}
# Of rows, and of a transcoder's targets: before `layer` and `site` of an origin.
ENDS = ("", "target_")
CENTRED = ("resid_pre", "resid_post", "attn_out", "mlp_out", "resid_mid")

_HOOK = re.compile(r"blocks\.(\d{1,9})\.(\S+)")
_MODULE = re.compile(r"(?:\S+\.)?(?:layers|h)\.(\d{1,9})(?:\.(\S+))?")


class Family(NamedTuple):
    """The norm before the MLP in a family of models."""

    norm: str  # name of its module
    offset: float = 0.0  # added to its weight
    layer_norm: bool = False  # else RMSNorm
    sites: dict[str, str] = WITHOUT_SECOND_NORM  # by others' names, besides the names in all models


# Not where values have a bias, which TransformerLens' `fold_value_biases` moves out of hook_z.
HEADS = {Z: "attn_z"}
LLAMA = Family("post_attention_layernorm", sites=WITHOUT_SECOND_NORM | HEADS)
# BLOOM's MLP adds the residual stream.
BLOOM = {"mlp:out": "resid_post", "mlp.dense_4h_to_h:out": "mlp_out"}
FAMILIES = {  # by `model_type`
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3", "qwen3", "qwen3_moe"), LLAMA),
    "qwen2": Family("post_attention_layernorm"),
    "gemma": LLAMA._replace(offset=1.0),
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma3_text"), Family("pre_feedforward_layernorm", 1.0, sites=HEADS)
    ),
    **dict.fromkeys(("gpt2", "gpt_neo"), Family("ln_2", layer_norm=True)),
    "gpt_neox": Family("post_attention_layernorm", layer_norm=True),
    "bloom": Family("post_attention_layernorm", layer_norm=True, sites=BLOOM),
    "gptj": Family("ln_1", layer_norm=True),
    "opt": Family("final_layer_norm", layer_norm=True),
    "phi": Family("input_layernorm", layer_norm=True),
}
MODEL_TYPES = {  # by the hub's name, for models that are not on this machine
    r"google/gemma-2-.+": "gemma2",
    r"google/gemma-3-.+": "gemma3",
    r"google/gemma-\d+b.*": "gemma",
    r"(openai-community/)?(distil)?gpt2.*": "gpt2",
    r"EleutherAI/(pythia|gpt-neox).+": "gpt_neox",
    r"EleutherAI/gpt-neo-.+": "gpt_neo",
    r"EleutherAI/gpt-j.+": "gptj",
    r"(meta-llama|HuggingFaceTB)/.+": "llama",
    r"mistralai/.+": "mistral",
    r"Qwen/Qwen3.+": "qwen3",
    r"Qwen/.+": "qwen2",
}
BUNDLED = Path(__file__).parents[2] / "assets"


class Affine(NamedTuple):
    """What a norm does last, `rows * weight + bias`, (D,) each, float64."""

    bias: Tensor
    weight: Tensor


def origin_of_hook(name: Any, of: str = "") -> dict[str, Any]:
    """`layer` and `site` in TransformerLens' name, after `of`; empty for other names."""
    match = _HOOK.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return {}
    return {f"{of}layer": int(match[1]), f"{of}site": SITES.get(match[2], match[2])}


def hook_name(origin: Mapping[str, Any], of: str = "") -> str | None:
    """TransformerLens' name of a hook point, if its layer and site, after `of`, have one; a module's with its side."""
    layer, site = origin.get(f"{of}layer"), origin.get(f"{of}site", "")
    if ":" in site:
        return site if layer is None else f"layers.{layer}.{site}"
    hook = HOOKS.get(site, site)
    return f"blocks.{layer}.{hook}" if layer is not None and "hook_" in hook else None


def origin_of_module(name: Any, side: str = "", of: str = "") -> dict[str, Any]:
    """`layer` and `site` in transformers' name of a module, with `side` if it names none; see `origin_of_hook`."""
    match = _MODULE.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        return {f"{of}site": name} if isinstance(name, str) and name.endswith(ENDINGS) else {}
    if name.endswith(ENDINGS):
        return {f"{of}layer": int(match[1]), f"{of}site": match[2]}
    module = ".".join(part for part in (match[2], side) if part)
    path, _, end = module.rpartition(".")
    if end in SIDES:
        module = f"{path}:{SIDES[end]}"
    return {f"{of}layer": int(match[1]), f"{of}site": MODULES.get(module, module)}


def settled(saved: SavedSAE, model: str | None = None) -> SavedSAE:
    """The SAE on the rows of a site, where its hook point is one only in some models, or its model was processed, and
    its model is known, by default `model`."""
    origin, remarks = dict(saved.origin), list(saved.remarks)
    model = origin.get("model", model)
    folder = _folder(model)
    family = _family(model, folder)
    norms = {}
    if family is not None:
        for key in origin.keys() & {"site", "target_site"}:
            origin[key] = family.sites.get(origin[key], origin[key])
        if folder is not None and (saved.processing.get("fold_ln") or not family.layer_norm):
            norms = _norms(saved, family, folder)
        if saved.processing.get("fold_value_biases") and origin.get("site") == Z:
            norms |= _value_biases(saved, folder)
    for end in norms:
        hook = origin[f"{end}site"]
        origin[f"{end}site"], lacking = FOLDED[hook]
        remarks.append(
            f"reads rows {lacking} ({hook}); what {model} has is folded in here, so that it reads "
            f"{origin[f'{end}site']}"
        )
    sae = _folded(saved, norms)
    centred = saved.processing.get("center_writing_weights") is True
    sites = {origin.get(f"{end}site") for end in ENDS}
    if centred and (family is None or family.layer_norm) and sites & {*CENTRED}:
        if origin.get("site") in CENTRED:
            sae = sae.changed(W_enc=sae.W_enc - sae.W_enc.mean(0))
        remarks.append(
            "was trained on rows less their mean over dimensions (center_writing_weights): that mean does "
            "not change its codes here, and its predictions lack it"
        )
    processing = saved.processing | {"center_writing_weights": False}
    if norms:
        processing |= {"fold_ln": False, "fold_value_biases": False}
    return replace(saved, sae=sae, origin=origin, processing=processing, remarks=tuple(remarks))


def notes_on_writing(origin: Mapping[str, Any]) -> list[str]:
    """What the user of an SAE that is written with TransformerLens' names should know, each a predicate."""
    notes = []
    if "mlp_in" in (origin.get("site"), origin.get("target_site")):
        notes.append(
            "is written for mlp.hook_in, which TransformerLens' TransformerBridge has and its "
            "HookedTransformer lacks"
        )
    for name in (hook_name(origin, of) for of in ENDS):
        if name is not None and ":" in name:
            notes.append(
                f"is written for {name}, a side of transformers' module: TransformerLens has no such hook"
            )
    model = origin.get("model")
    family = _family(model, _folder(model))
    if origin.get("site") == "attn_z" and (family is None or Z not in family.sites):
        notes.append(
            f"is written for {Z}, which TransformerLens' fold_value_biases changes where values have a bias; "
            "load the model without it"
        )
    return notes


def why_unsettled(origin: Mapping[str, Any], rows: Mapping[str, Any]) -> str | None:
    """Why an SAE that is not settled reads other rows than a store of that origin holds, although nearly the same."""
    if rows.get("site") != "mlp_in" or origin.get("site") != NORMALIZED:
        return None
    model = origin.get("model", rows.get("model"))
    return (
        f"it reads rows before the norm's weight ({NORMALIZED}), which mlp_in has after it; fetch {model} "
        "by `hf download` to fold that weight in (with LayerNorm set fold_ln)"
    )


def _folded(saved: SavedSAE, norms: Mapping[str, Affine]) -> SAE:
    """The SAE on what the norms, by end, make of its rows and targets."""
    sae = saved.sae
    if not norms:
        return sae
    mean = torch.zeros(sae.d_in + sae.d_out, dtype=torch.float64)
    scale = torch.ones_like(mean)
    of_targets = "target_" if saved.is_transcoder else ""
    for end, part in (("", slice(sae.d_in)), (of_targets, slice(sae.d_in, None))):
        if end in norms:
            mean[part], scale[part] = norms[end]
    norm = replace(sae.normalisation, mean=mean, scale=scale)
    return sae.copy_to(torch.float64).on_raw_rows(norm).copy_to(sae.W_enc.dtype)


def _folder(model: str | None) -> Path | None:
    """The folder of a model that is on this machine."""
    if model is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        for folder in (Path(model), BUNDLED / model):
            if folder.is_dir():
                return folder
        config = try_to_load_from_cache(model, "config.json")
    except (HFValidationError, OSError):  # no name of a repository, too long for a path
        return None
    return Path(config).parent if isinstance(config, str) else None


def _family(model: str | None, folder: Path | None) -> Family | None:
    """A model's family by its configuration on this machine, else by its name on the hub."""
    if folder is None:
        kinds = (kind for name, kind in MODEL_TYPES.items() if model and re.fullmatch(name, model))
        return FAMILIES.get(next(kinds, ""))
    try:
        config = read_json(folder / "config.json", dict[str, Any])
    except (OSError, ValueError):
        return None
    text = config.get("text_config")
    own = text if isinstance(text, dict) else config
    return FAMILIES.get(str(own.get("model_type")))


def _norms(saved: SavedSAE, family: Family, folder: Path) -> dict[str, Affine]:
    """The norms before the MLP at an SAE's ends that are before their weight, if these are here, fit and have no 0."""
    norms = {}
    for end in ENDS:
        if saved.origin.get(f"{end}site") != NORMALIZED:
            continue
        width = saved.sae.d_out if end else saved.sae.d_in
        parts = _weights(folder, rf"{saved.origin[f'{end}layer']}\.{family.norm}")
        bias = parts.get("bias", torch.zeros(width, dtype=torch.float64))
        weight = parts.get("weight", torch.zeros(0)) + family.offset
        if weight.shape == bias.shape == (width,) and weight.abs().min() > 0:
            norms[end] = Affine(bias, weight)
    return norms


def _value_biases(saved: SavedSAE, folder: Path | None) -> dict[str, Affine]:
    """What TransformerLens' `fold_value_biases` moves out of hook_z, of GPT-2's fused queries, keys and values, if its
    model is here: attention's weights sum to 1, so that each head's values are off by their bias."""
    width = saved.sae.d_in
    parts = _weights(folder, rf"{saved.origin['layer']}\.attn\.c_attn") if folder else {}
    if len(parts.get("bias", ())) != 3 * width:
        return {}
    return {"": Affine(parts["bias"][-width:], torch.ones(width, dtype=torch.float64))}


def _weights(folder: Path, module: str) -> dict[str, Tensor]:
    """Weight and bias of a module, named by a pattern after `layers.`, in a model's safetensors files."""
    wanted = re.compile(rf"(?:.+\.)?(?:layers|h)\.{module}\.(weight|bias)")
    parts = {}
    for path in sorted(folder.glob("*.safetensors")):
        with naming(str(path), TO_FIT), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if match := wanted.fullmatch(name):
                    parts[match[1]] = file.get_tensor(name).double()
    return parts
