"""Published suites, which are only read: Gemma Scope, Gemma Scope 2, Llama Scope, Qwen-Scope and single files.

README.md has the files of each, and says where other tools differ. Gemma Scope 2 names hook points as Gemma 3's modules
in transformers; a skip is applied as `x @ affine_skip_connection`.

A crosscoder of n layers, `model.layers.{5,9,12,15}.output`, is weakly causal: file `params_layer_I.safetensors` has
latents that read layer I alone, w_enc (D, F), and write to all n, w_dec (F, n, D); b_dec (D,) is layer I's. Here it is
one SAE of n F latents on concatenated rows, whose encoder is zero outside its diagonal blocks.

Llama Scope's weights act on rows scaled to a norm of about sqrt(D), `c_in * x` with c = `sqrt(d_model) /
dataset_average_activation_norm`, and predict `c_out * y`. `jump_relu_threshold` is one number, in units of the targets:
a code z adds `z * W_dec / c_out` to the raw prediction, and fires if the norm of this exceeds the threshold. The R1
distillations have a threshold for each latent and the norms with the weights: a latent fires if its code, or with
`sparsity_include_decoder_norm` its code times its decoder norm, exceeds the threshold in normalised units
(`SparseAutoEncoder.encode` there).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...base.errors import FormatError
from ..activations import JumpRelu, Relu, TopK
from . import common, hooks
from .common import SavedSAE

GEMMA_ARRAYS = "params.npz"
GEMMA_CONFIG = "config.json"
GEMMA_WHOLE, GEMMA_LAYERS = "params.safetensors", "params_layer_*.safetensors"
GEMMA_WEIGHTS = f"{GEMMA_WHOLE}|{GEMMA_LAYERS}"
GEMMA_NAMES = {name.lower(): name for name in (*common.WEIGHTS, "threshold")}
SKIP = {"affine_skip_connection": "W_skip"}
# Modules by site.
GEMMA_MODULES = {
    "resid_post": "output",
    "mlp_in": "pre_feedforward_layernorm.output",
    "mlp_out": "post_feedforward_layernorm.output",
    "attn_z": "self_attn.o_proj.input",
}
GEMMA_KINDS = {"res": "resid_post", "mlp": "mlp_out", "att": "attn_z", "embedding": "resid_pre"}

_GEMMA = re.compile(
    r"gemma-scope-(\d+b)-(pt|it)-(res|mlp|att|transcoders)/(?:.*/)?(?:layer_(\d{1,9})|embedding)/"
)
_GEMMA_2 = re.compile(
    r"gemma-scope-2-(\w+-[ip]t)/(?:.*/)?(resid_post|mlp_out|attn_out|transcoder)(?:_all)?"
    r"/layer_(\d{1,9})_\w+?(_affine)?/"
)
_HOOK = re.compile(r"model\.layers\.(\d{1,9}|\{\d{1,9}(?:, ?\d{1,9})*\})\.(.+)")


def load_gemma_scope(folder: Path) -> SavedSAE:
    path = folder / GEMMA_ARRAYS
    sae = common.assemble(path, common.read_npz(path), JumpRelu())
    match = _GEMMA.search(f"{folder.absolute().as_posix()}/")
    if match is None:
        return SavedSAE(sae)
    size, tuned, kind, layer = match.groups()
    if layer is None:  # rows are embeddings before Gemma scales them
        sae, kind, layer = common.unscaled(sae, 1 / math.sqrt(sae.d_in)), "embedding", "0"
    model = f"google/gemma-2-{size}-it" if tuned == "it" else f"google/gemma-2-{size}"
    origin: dict[str, Any] = {"model": model, "layer": int(layer)}
    if kind == "transcoders":
        origin |= {"site": hooks.NORMALIZED, "target_layer": int(layer), "target_site": "mlp_out"}
    elif kind in GEMMA_KINDS:
        origin["site"] = GEMMA_KINDS[kind]
    return SavedSAE(sae, origin)


def _named_by(folder: Path) -> dict[str, Any]:
    """The configuration that the names of folders on the hub imply."""
    match = _GEMMA_2.search(f"{folder.absolute().as_posix()}/")
    if match is None:
        raise FormatError(
            f"{folder} has no {GEMMA_CONFIG}: expected one, or folders named as on the hub, such as "
            "gemma-scope-2-4b-pt/resid_post/layer_17_width_16k_l0_big"
        )
    size, kind, layer, affine = match.groups()
    sites = ("mlp_in", "mlp_out") if kind == "transcoder" else (kind, kind)
    modules = GEMMA_MODULES | {"attn_out": GEMMA_MODULES["attn_z"]}
    return {
        "model_name": f"gemma-3-{size}",
        "affine_connection": affine is not None,
        "hf_hook_point_in": f"model.layers.{layer}.{modules[sites[0]]}",
        "hf_hook_point_out": f"model.layers.{layer}.{modules[sites[1]]}",
    }


def load_gemma_scope_2(folder: Path) -> SavedSAE:
    path = folder / GEMMA_CONFIG
    config = common.read_config(path, dict[str, Any]) if path.is_file() else _named_by(folder)
    common.refuse_unless(path, config, "architecture", "jump_relu")
    common.refuse_unless(path, config, "type", "sae", "transcoder", "crosscoder")
    common.refuse_unless(path, config, "affine_connection", False, True)
    rows, targets = (config.get(f"hf_hook_point_{end}") for end in ("in", "out"))
    origin = {"model": config.get("model_name"), **_origin(rows)}
    if config.get("type") == "crosscoder":
        tensors, widths = _concatenated(folder, len(_layers_and_module(rows)[0]))
        sae = common.assemble(folder, tensors, JumpRelu(), widths=widths)
        return SavedSAE(sae, common.origin_from(origin))
    path = folder / GEMMA_WHOLE
    skip = SKIP if config.get("affine_connection", False) else {}
    tensors = common.read_renamed(path, GEMMA_NAMES | skip)
    differ = None not in (rows, targets) and rows != targets
    transcodes = config.get("type") == "transcoder" or bool(skip) or differ
    origin |= _origin(targets, "target_") if transcodes else {}
    sae = common.assemble(path, tensors, JumpRelu(), transcodes=transcodes)
    return SavedSAE(sae, common.origin_from(origin), transcodes)


def _concatenated(folder: Path, layers: int) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """A crosscoder's tensors over all its layers, and their widths."""
    files = [folder / GEMMA_LAYERS.replace("*", str(layer)) for layer in range(layers)]
    parts = [common.read_renamed(path, GEMMA_NAMES) for path in files]
    width, latents = parts[0]["b_dec"].numel(), parts[0]["b_enc"].numel()
    entries = layers**2 * width * latents  # of either matrix
    common.check_memory(str(folder), 2 * entries * parts[0]["W_enc"].dtype.itemsize, common.TO_FIT)
    W_enc = torch.block_diag(*(part.pop("W_enc") for part in parts))
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    tensors["W_dec"] = tensors["W_dec"].flatten(1)
    return tensors | {"W_enc": W_enc}, (width,) * layers


def _layers_and_module(hook: Any) -> tuple[list[int], str]:
    """The layers and the module in a hook point's name, if any."""
    match = _HOOK.fullmatch(hook) if isinstance(hook, str) else None
    if match is None:
        return [], ""
    return [int(layer) for layer in match[1].strip("{}").split(",")], match[2]


def _origin(hook: Any, of: str = "") -> dict[str, Any]:
    """As `hooks.origin_of_hook`, for these names; of a crosscoder, its first layer."""
    layers, module = _layers_and_module(hook)
    if not module:
        return {}
    return {f"{of}layer": layers[0], f"{of}site": hooks.site_of(module)}


LLAMA_CONFIG = "hyperparams.json"
LLAMA_R1_CONFIG, LLAMA_R1_WEIGHTS = "config.json", "sae_weights.safetensors"
# As published, or next to the hyperparameters.
LLAMA_WEIGHTS = ("checkpoints/final.safetensors", "final.safetensors")
LLAMA_MODELS = {  # by a part of the folder
    "Llama3_1-8B-Base": "meta-llama/Llama-3.1-8B",
    "Llama-Scope-R1-Distill": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
}
LLAMA_NAMES = common.LINEAR | {"decoder.bias": "b_dec"}
QWEN_CONFIG, QWEN_WEIGHTS = "config.json", "layer[0-9]*.sae.pt"
ONE_FILE = "*-SAE-l*.pt|*-SAE-l*.pth|gpt2-small_L*_Hcat_z_*.pt"
ONE_FILE_NAMES = (
    LLAMA_NAMES,
    {name.replace(".", "_linear."): own for name, own in LLAMA_NAMES.items()},
    common.PLAIN,
)
QWEN_NAMES = {"W_enc": "W_enc.T", "b_enc": "b_enc", "W_dec": "W_dec.T", "b_dec": "b_dec"}

_ONE_FILE = re.compile(r"(?:(.+)-SAE-l(\d{1,9})\.pth?|gpt2-small_L(\d{1,9})_Hcat_z_.*\.pt)")
_K = re.compile(r"(?:.*[-_.])?(?:L0_|[kK]_?)(\d{1,9})")
_MODEL = re.compile(r"(?:.*--)?SAE-Res-(.+)-W\d+K-L0_\d+")


@dataclass(frozen=True)
class Hyperparameters:
    """The entries used here; a `Literal` is the one value that can be expressed."""

    jump_relu_threshold: float = math.nan  # the R1 distillations have both with the weights
    dataset_average_activation_norm: dict[str, float] = field(default_factory=dict)
    hook_point_in: Any = None
    hook_point_out: Any = None
    sparsity_include_decoder_norm: bool = True
    act_fn: Literal["jumprelu"] = "jumprelu"
    norm_activation: Literal["dataset-wise"] = "dataset-wise"
    use_decoder_bias: Literal[True] = True
    apply_decoder_bias_to_pre_encoder: Literal[False] = False
    use_glu_encoder: Literal[False] = False


def load_llama_scope(folder: Path) -> SavedSAE:
    config = common.read_config(folder / LLAMA_CONFIG, Hyperparameters)
    path = next(path for name in LLAMA_WEIGHTS if (path := folder / name).is_file())
    tensors = common.read_renamed(path, LLAMA_NAMES)
    threshold = torch.full_like(tensors["b_enc"], config.jump_relu_threshold, dtype=torch.float32)
    tensors["threshold"] = threshold
    return _folded(path, tensors, config, config.dataset_average_activation_norm, raw=True)


def load_llama_scope_r1(folder: Path) -> SavedSAE:
    config = common.read_config(folder / LLAMA_R1_CONFIG, Hyperparameters)
    path = folder / LLAMA_R1_WEIGHTS
    norm_names = {
        "in": f"dataset_average_activation_norm.{config.hook_point_in}",
        "out": f"dataset_average_activation_norm.{config.hook_point_out}",
    }
    further = [*norm_names.values(), "log_jumprelu_threshold"]
    names = LLAMA_NAMES | {name: name for name in further}
    stored = common.read_renamed(path, names)
    tensors = {name: stored[name] for name in common.WEIGHTS}
    tensors["threshold"] = stored["log_jumprelu_threshold"].exp()
    norms = {end: float(stored[name]) for end, name in norm_names.items()}
    return _folded(path, tensors, config, norms)


def _folded(
    path: Path,
    tensors: dict[str, Tensor],
    config: Hyperparameters,
    norms: Mapping[str, float],
    raw: bool = False,
) -> SavedSAE:
    """The SAE on raw rows; thresholds are in `raw` or normalised units."""
    transcodes = config.hook_point_out not in (None, config.hook_point_in)
    sae = common.assemble(path, tensors, JumpRelu(), transcodes=transcodes)
    c_in, c_out = (math.sqrt(sae.d_in) / norms[end] for end in ("in", "out"))
    # What is compared with the threshold, of a code of 1.
    compared, unit = torch.ones_like(sae.b_enc), c_in
    if config.sparsity_include_decoder_norm:
        compared, unit = sae.W_dec.norm(dim=1), c_out
    compared = compared / unit if raw else compared
    threshold = sae.activation_parameters["threshold"] / compared.masked_fill(compared == 0, 1)
    sae = common.unscaled(sae.changed(threshold=threshold), c_in, c_out)
    models = (model for part, model in LLAMA_MODELS.items() if part in str(path.absolute()))
    origin = {"model": next(models, None), **hooks.origin_of_hook(config.hook_point_in)}
    origin |= hooks.origin_of_hook(config.hook_point_out, "target_") if transcodes else {}
    return SavedSAE(sae, common.origin_from(origin), transcodes)


def load_qwen_scope(file: Path) -> SavedSAE:
    """Read one layer's SAE; k may be in the name of any folder above, as in the hub client's cache."""
    path = file.parent / QWEN_CONFIG
    config = common.read_config(path, dict[str, Any]) if path.is_file() else {}
    names = [folder.name for folder in file.absolute().parents]
    ks = [int(match[1]) for match in map(_K.fullmatch, names) if match]
    if "k" in config:
        activation = common.configured(path, TopK, k=config["k"])
    elif ks:
        activation = common.configured(file, TopK, k=ks[0])
    else:
        raise FormatError(
            f"{file} does not say k, the number of latents that fire: expected a folder whose name ends "
            f"with it, such as L0_50 or k50, got {names[0]!r}; rename the folder"
        )
    sae = common.assemble(
        file, common.renamed(file, common.read_torch(file), QWEN_NAMES), activation
    )
    models = [f"Qwen/{match[1]}" for match in map(_MODEL.fullmatch, names) if match]
    model = config.get("base_model", models[0] if models else None)
    layer = int(re.findall(r"\d+", file.name)[0])
    origin = {"model": model, "layer": layer, "site": "resid_post"}
    return SavedSAE(sae, common.origin_from(origin))


def load_one_file(file: Path) -> SavedSAE:
    """Read a single file; SAEs of attention heads subtract the decoder bias from rows, which no site here has."""
    match = _ONE_FILE.fullmatch(file.name)
    if match is None:
        raise FormatError(
            f"{file}: expected MODEL-SAE-lL.pt or gpt2-small_LL_Hcat_z_....pt, L the number of its layer"
        )
    stored = common.read_torch(file)
    names = next((names for names in ONE_FILE_NAMES if names.keys() == stored.keys()), LLAMA_NAMES)
    sae = common.assemble(
        file, common.renamed(file, stored, names), Relu(), subtracts=match[1] is None
    )
    if match[1] is None:
        return SavedSAE(sae, {"model": "gpt2", "layer": int(match[3])})
    owner = "deepseek-ai" if match[1].startswith("DeepSeek") else "meta-llama"
    return SavedSAE(
        sae, {"model": f"{owner}/{match[1]}", "layer": int(match[2]), "site": "resid_post"}
    )
