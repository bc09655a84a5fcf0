"""Published suites, which are only read: Gemma Scope, Gemma Scope 2, Llama Scope, Qwen-Scope and single files.

README.md has the files of each. Gemma Scope 2 names hook points as Gemma 3's modules in transformers; a skip is
`x @ affine_skip_connection`.

A crosscoder of n layers, `model.layers.{5,9,12,15}.output`, is weakly causal: latents in `params_layer_I.safetensors`
read layer I alone, w_enc (D, F), and write to all n, w_dec (F, n, D); b_dec (D,) is layer I's. Here it is one SAE of
n F latents on rows side by side, its encoder zero outside diagonal blocks.

Llama Scope's weights act on rows scaled to a norm of about sqrt(D), `c_in * x` with c = `sqrt(d_model) /
dataset_average_activation_norm`, and predict `c_out * y`. `jump_relu_threshold` is one number in units of the targets:
a code z fires if the norm of its part of the raw prediction, `z * W_dec / c_out`, exceeds it
(`SparseAutoEncoder.encode` there). The R1 distillations have a threshold for each latent, in units of the scaled
targets, and the norms with the weights.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from ...base.errors import FormatError
from ...store.origin import HookPoint, Origin
from ..activations import JumpRelu, Relu, TopK
from . import common
from .common import SavedSAE
from .libraries import SAELENS_WEIGHTS

GEMMA_ARRAYS = "params.npz"
CONFIG = "config.json"
GEMMA_WEIGHTS, GEMMA_LAYER = "params.safetensors", "params_layer_{}.safetensors"
GEMMA_NAMES = {name.lower(): name for name in (*common.WEIGHTS, "threshold")}
AFFINE_SKIP = {"affine_skip_connection": "W_skip"}
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
    read, written = HookPoint(int(layer), GEMMA_KINDS.get(kind, "")), None
    if kind == "transcoders":
        read, written = HookPoint(int(layer), common.NORMALIZED), HookPoint(int(layer), "mlp_out")
    return SavedSAE(sae, common.origin_of(model, read, written))


def _named_by(folder: Path) -> dict[str, Any]:
    """The configuration that folders' names on the hub imply."""
    match = _GEMMA_2.search(f"{folder.absolute().as_posix()}/")
    if match is None:
        raise FormatError(
            f"{folder} has no {CONFIG}: expected one, or folders named as on the hub, such as "
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
    path = folder / CONFIG
    config = common.read_config(path, dict[str, Any]) if path.is_file() else _named_by(folder)
    common.refuse_unless(path, config, "architecture", "jump_relu")
    common.refuse_unless(path, config, "type", "sae", "transcoder")
    common.refuse_unless(path, config, "affine_connection", False, True)
    rows, targets = (config.get(f"hf_hook_point_{end}") for end in ("in", "out"))
    path = folder / GEMMA_WEIGHTS
    skip = AFFINE_SKIP if config.get("affine_connection", False) else {}
    tensors = common.read_renamed(path, GEMMA_NAMES | skip)
    differ = None not in (rows, targets) and rows != targets
    transcodes = config.get("type") == "transcoder" or bool(skip) or differ
    sae = common.assemble(path, tensors, JumpRelu(), transcodes=transcodes)
    written = common.point_of_module(targets) if transcodes else None
    origin = common.origin_of(config.get("model_name"), common.point_of_module(rows), written)
    return SavedSAE(sae, origin, transcodes)


def load_gemma_scope_2_crosscoder(folder: Path) -> SavedSAE:
    config = common.read_config(folder / CONFIG, dict[str, Any])
    common.refuse_unless(folder / CONFIG, config, "architecture", "jump_relu")
    common.refuse_unless(folder / CONFIG, config, "type", "crosscoder")
    begin, layers, end = re.split("[{}]", config["hf_hook_point_in"])
    points = [common.point_of_module(f"{begin}{int(layer)}{end}") for layer in layers.split(",")]
    files = [folder / GEMMA_LAYER.format(number) for number in range(len(points))]
    parts = [common.read_renamed(path, GEMMA_NAMES) for path in files]
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    tensors["W_dec"] = tensors["W_dec"].flatten(1)
    entries = tensors["b_dec"].numel() * tensors["b_enc"].numel()
    common.check_memory(str(folder), entries * tensors["W_enc"].element_size(), common.TO_FIT)
    tensors["W_enc"] = torch.block_diag(*(part["W_enc"] for part in parts))
    widths = tuple(part["b_dec"].numel() for part in parts)
    sae = common.assemble(folder, tensors, JumpRelu(), widths=widths)
    read = tuple(point or HookPoint() for point in points)
    return SavedSAE(sae, Origin(common.models_named(config.get("model_name")), read))


LLAMA_CONFIG, LLAMA_WEIGHTS = "hyperparams.json", "checkpoints/final.safetensors"
LLAMA_NAMES = common.LINEAR | {"decoder.bias": "b_dec"}
LLAMA_MODELS = {  # by a part of the folder
    "Llama3_1-8B-Base": "meta-llama/Llama-3.1-8B",
    "Llama-Scope-R1-Distill": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
}
QWEN_WEIGHTS = "layer[0-9]*.sae.pt"
QWEN_NAMES = {"W_enc": "W_enc.T", "b_enc": "b_enc", "W_dec": "W_dec.T", "b_dec": "b_dec"}
HEADS_WEIGHTS = "gpt2-small_L[0-9]*_Hcat_z_*.pt"
GOODFIRE_WEIGHTS = "*-SAE-l[0-9]*.pt*"  # .pth, or .pt
GOODFIRE_NAMES = {name.replace(".", "_linear."): own for name, own in LLAMA_NAMES.items()}

_K = re.compile(r"(?:.*[-_.])?(?:L0_|[kK]_?)(\d{1,9})")
_MODEL = re.compile(r"(?:.*--)?SAE-Res-(.+)-W\d+K-L0_\d+")


@dataclass(frozen=True)
class Hyperparameters:
    """Entries used here; a `Literal` is the one value that can be expressed."""

    # The R1 distillations have both with the weights.
    jump_relu_threshold: Annotated[float, Ge(0)] = 0.0
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
    tensors = common.read_renamed(folder / LLAMA_WEIGHTS, LLAMA_NAMES)
    norms = config.dataset_average_activation_norm
    norm = norms["out" if config.sparsity_include_decoder_norm else "in"]
    scaled = config.jump_relu_threshold * math.sqrt(len(tensors["b_dec"])) / norm
    tensors["threshold"] = torch.full_like(tensors["b_enc"], scaled, dtype=torch.float32)
    return _unscaled(folder / LLAMA_WEIGHTS, tensors, config, norms)


def load_llama_scope_r1(folder: Path) -> SavedSAE:
    config, path = common.read_config(folder / CONFIG, Hyperparameters), folder / SAELENS_WEIGHTS
    stored, _ = common.read_safetensors(path)
    average = "dataset_average_activation_norm."
    points = {"in": config.hook_point_in, "out": config.hook_point_out}
    norms = {end: stored[f"{average}{point}"].item() for end, point in points.items()}
    weights = {name: tensor for name, tensor in stored.items() if not name.startswith(average)}
    tensors = common.renamed(path, weights, LLAMA_NAMES | {"log_jumprelu_threshold": "threshold"})
    tensors["threshold"] = tensors["threshold"].exp()
    return _unscaled(path, tensors, config, norms)


def _unscaled(
    path: Path, tensors: dict[str, Tensor], config: Hyperparameters, norms: Mapping[str, float]
) -> SavedSAE:
    """The SAE on raw rows; thresholds are in units of the scaled targets."""
    transcodes = config.hook_point_out not in (None, config.hook_point_in)
    sae = common.assemble(path, tensors, JumpRelu(), transcodes=transcodes)
    if config.sparsity_include_decoder_norm:
        lengths = sae.W_dec.norm(dim=1)
        threshold = sae.activation_parameters["threshold"] / lengths.masked_fill(lengths == 0, 1)
        sae = sae.changed(threshold=threshold)
    sae = common.unscaled(sae, *(math.sqrt(sae.d_in) / norms[end] for end in ("in", "out")))
    models = (model for part, model in LLAMA_MODELS.items() if part in str(path.absolute()))
    read, written = map(common.point_of_hook, (config.hook_point_in, config.hook_point_out))
    origin = common.origin_of(next(models, None), read, written if transcodes else None)
    return SavedSAE(sae, origin, transcodes)


def load_qwen_scope(file: Path) -> SavedSAE:
    """k is in the name of a folder above, as on the hub and in its client's cache."""
    names = [folder.name for folder in file.absolute().parents]
    ks = [int(match[1]) for match in map(_K.fullmatch, names) if match]
    if not ks:
        raise FormatError(
            f"{file} does not say k: expected a folder such as L0_50 or k50, got {names[0]!r}; rename it"
        )
    activation = common.with_config(file, TopK, k=ks[0])
    tensors = common.renamed(file, common.read_torch(file), QWEN_NAMES)
    models = (f"Qwen/{match[1]}" for match in map(_MODEL.fullmatch, names) if match)
    layer = int(re.findall(r"\d+", file.name)[0])
    origin = common.origin_of(next(models, None), HookPoint(layer, "resid_post"))
    return SavedSAE(common.assemble(file, tensors, activation), origin)


def load_goodfire(file: Path) -> SavedSAE:
    """Also qresearch's of DeepSeek R1, whose tensors are named as Llama Scope's."""
    stored = common.read_torch(file)
    names = LLAMA_NAMES if "encoder.weight" in stored else GOODFIRE_NAMES
    sae = common.assemble(file, common.renamed(file, stored, names), Relu())
    model, _, end = file.name.rpartition("-SAE-l")
    owner = "deepseek-ai" if model.startswith("DeepSeek") else "meta-llama"
    layer = int(re.findall(r"\d+", end)[0])
    return SavedSAE(sae, common.origin_of(f"{owner}/{model}", HookPoint(layer, "resid_post")))


def load_attention_heads(file: Path) -> SavedSAE:
    """Kissane et al.'s, of GPT-2 and TransformerLens' hook_z, heads side by side."""
    tensors = common.renamed(file, common.read_torch(file), common.PLAIN)
    sae = common.assemble(file, tensors, Relu(), subtracts=True)
    layer = int(re.findall(r"_L(\d+)_", file.name)[0])
    origin = common.origin_of("gpt2", HookPoint(layer, common.Z))
    return SavedSAE(sae, origin, processing={"fold_value_biases": True})
