"""Folders as Gemma Scope 2, Llama Scope and Qwen-Scope are published, of random weights, and their formulas in float64.

Written from the descriptions of these releases, as their own files are large and on the hub. Shapes: D rows' width,
E targets', F latents, n places of a crosscoder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

D, E, F, K, PLACES = 8, 6, 20, 4, 3
ROWS = np.random.default_rng(9).normal(size=(200, D)) + 1.5
WIDE_ROWS = np.random.default_rng(8).normal(size=(200, PLACES * D)) + 1.5


@dataclass(frozen=True)
class Published:
    """A folder or file, and what its formula says of `ROWS`, or of `WIDE_ROWS` for a crosscoder."""

    path: Path
    codes: np.ndarray
    predicted: np.ndarray


def jumprelu(pre: np.ndarray, threshold: np.ndarray) -> np.ndarray:
    return np.maximum(pre, 0) * (pre > threshold)


def top_k(pre: np.ndarray) -> np.ndarray:
    """The largest K of each row, with their signs."""
    return np.where(pre >= np.sort(pre, 1)[:, [-K]], pre, 0)


def write(path: Path, arrays: dict[str, np.ndarray], dtype: torch.dtype = torch.float32) -> dict[str, np.ndarray]:
    """Write a safetensors or .pt file, and return its numbers, rounded as there, in float64."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.tensor(array).to(dtype).contiguous() for name, array in arrays.items()}
    (torch.save if path.suffix == ".pt" else save_file)(tensors, path)
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def normals(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape) for name, shape in shapes.items()}


def gemma_scope_2(folder: Path, kind: str = "sae", affine: bool = False, width: int = D, **config: Any) -> Published:
    """An SAE or a transcoder of layer 17 of Gemma 3 4B."""
    shapes = {"w_enc": (D, F), "b_enc": (F,), "w_dec": (F, width), "b_dec": (width,), "threshold": (F,)}
    w = write(folder / "params.safetensors", normals(
        0, **shapes, **({"affine_skip_connection": (D, width)} if affine else {})))
    ends = ("output", "output") if kind == "sae" else (
        "pre_feedforward_layernorm.output", "post_feedforward_layernorm.output")
    (folder / "config.json").write_text(json.dumps({
        "architecture": "jump_relu", "model_name": "google/gemma-3-4b-pt", "width": F, "l0": 60, "type": kind,
        "affine_connection": affine, "hf_hook_point_in": f"model.layers.17.{ends[0]}",
        "hf_hook_point_out": f"model.layers.17.{ends[1]}"} | config))
    codes = jumprelu(ROWS @ w["w_enc"] + w["b_enc"], w["threshold"])
    skip = ROWS @ w["affine_skip_connection"] if affine else 0
    return Published(folder, codes, codes @ w["w_dec"] + w["b_dec"] + skip)


def gemma_scope_2_crosscoder(folder: Path, stacked: bool = False, **config: Any) -> Published:
    """A weakly causal crosscoder of layers 5, 9 and 12 of Gemma 3 270M; `stacked`: in one file."""
    codes, predicted, parts = [], np.zeros((len(WIDE_ROWS), PLACES, D)), []
    for place in range(PLACES):
        arrays = normals(place, w_enc=(D, F), b_enc=(F,), w_dec=(F, PLACES, D), b_dec=(D,), threshold=(F,))
        arrays["w_dec"][:, :place] = 0  # earlier layers are not written to
        path = folder / f"params_layer_{place}.safetensors"
        w = write(path, arrays)
        parts.append(arrays)
        if stacked:
            path.unlink()
        x = WIDE_ROWS[:, place * D:(place + 1) * D]
        codes.append(jumprelu(x @ w["w_enc"] + w["b_enc"], w["threshold"]))
        predicted += np.einsum("bf,fpd->bpd", codes[-1], w["w_dec"])
        predicted[:, place] += w["b_dec"]
    if stacked:
        write(folder / "params.safetensors", {name: np.stack([part[name] for part in parts]) for name in parts[0]})
    hook = "model.layers.{5,9,12}.output"
    (folder / "config.json").write_text(json.dumps({
        "architecture": "jump_relu", "model_name": "google/gemma-3-270m-pt", "width": PLACES * F, "l0": 150,
        "type": "crosscoder", "affine_connection": False, "hf_hook_point_in": hook,
        "hf_hook_point_out": hook} | config))
    return Published(folder, np.concatenate(codes, 1), predicted.reshape(len(WIDE_ROWS), -1))


def llama_scope(folder: Path, moved: bool = False, transcodes: bool = False, unit_norms: bool = False,
                dtype: torch.dtype = torch.float32, **hyperparams: Any) -> Published:
    """An SAE of layer 15, or a transcoder of its MLP; `moved`: weights beside the hyperparameters."""
    arrays = normals(0, **{"encoder.weight": (F, D), "encoder.bias": (F,), "decoder.weight": (D, F),
                           "decoder.bias": (D,)})
    if unit_norms:
        arrays["decoder.weight"] /= np.linalg.norm(arrays["decoder.weight"], axis=0)
    w = write(folder / ("." if moved else "checkpoints") / "final.safetensors", arrays, dtype)
    hooks = ("blocks.15.ln2.hook_normalized", "blocks.15.hook_mlp_out") if transcodes else (
        "blocks.15.hook_resid_post",) * 2
    norms = {"in": 12.5, "out": 3.25 if transcodes else 12.5}
    (folder / "hyperparams.json").write_text(json.dumps({
        "device": "cuda:0", "dtype": "torch.bfloat16", "hook_point_in": hooks[0], "hook_point_out": hooks[1],
        "use_decoder_bias": True, "apply_decoder_bias_to_pre_encoder": False, "expansion_factor": 8, "d_model": D,
        "d_sae": F, "act_fn": "jumprelu", "jump_relu_threshold": 0.75, "norm_activation": "dataset-wise",
        "dataset_average_activation_norm": norms, "sparsity_include_decoder_norm": True, "use_glu_encoder": False,
        "top_k": 50} | hyperparams))
    # OpenMOSS' steps: scales into the weights, decoder rows to unit norm, then the threshold on raw units.
    c_in, c_out = (np.sqrt(D) / norms[end] for end in ("in", "out"))
    pre = ROWS @ w["encoder.weight"].T + w["encoder.bias"] / c_in
    decoder = w["decoder.weight"] * c_in / c_out
    lengths = np.linalg.norm(decoder, axis=0)
    fired = jumprelu(pre * lengths, 0.75)
    return Published(folder, fired / lengths * c_in, fired @ (decoder / lengths).T + w["decoder.bias"] / c_out)


def qwen_scope(folder: Path, layer: int = 5, **further: Any) -> Published:
    """An SAE of one layer, few of whose pre-activations are positive; k, which is K, is in the folder's name at best.
    `further` goes into the config.json beside it, which is else left out."""
    path, arrays = folder / f"layer{layer}.sae.pt", normals(
        layer, W_enc=(F, D), b_enc=(F,), W_dec=(D, F), b_dec=(D,))
    w = write(path, arrays | {"b_enc": arrays["b_enc"] - 6})
    if further:
        (folder / "config.json").write_text(json.dumps({"hook_point": "resid_post"} | further))
    codes = top_k(ROWS @ w["W_enc"].T + w["b_enc"])
    return Published(path, codes, codes @ w["W_dec"].T + w["b_dec"])
