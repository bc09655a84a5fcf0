"""Folders of SAEs as libraries save and publish them, of random weights, and their formulas in float64.

D: rows' width, E: targets', F latents. Scopes follow the descriptions of their releases, whose files are large.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from saecli.sae.dictionary import SAE

D, E, F, K, PLACES = 8, 6, 20, 4, 3
ROWS = np.random.default_rng(9).normal(size=(200, D)) + 1.5
WIDE_ROWS = np.random.default_rng(8).normal(size=(200, PLACES * D)) + 1.5


@dataclass(frozen=True)
class Published:
    """A folder or file, and what its formula says of `ROWS`, or of `WIDE_ROWS` for a crosscoder."""

    path: Path
    codes: np.ndarray
    predicted: np.ndarray


def assert_reads(sae: SAE, expected: Published) -> None:
    """An SAE read has the codes and predictions of its formula, some but not all of which are zero."""
    assert 0.02 < (expected.codes != 0).mean() < 0.9
    x = torch.from_numpy(WIDE_ROWS if sae.widths else ROWS).float()
    np.testing.assert_allclose(sae.encode(x), expected.codes, rtol=1e-4, atol=5e-5)
    error = np.abs(sae(x).numpy() - expected.predicted).max()
    assert error < 1e-5 * np.abs(expected.predicted).max()


def relu(pre: np.ndarray) -> np.ndarray:
    return np.maximum(pre, 0)


def jumprelu(pre: np.ndarray, threshold: np.ndarray) -> np.ndarray:
    return relu(pre) * (pre > threshold)


def top_k(pre: np.ndarray, rank: np.ndarray | None = None) -> np.ndarray:
    """The K of each row that rank highest, with their signs."""
    rank = pre if rank is None else rank
    return np.where(rank >= np.sort(rank, 1)[:, [-K]], pre, 0)


GATES = {
    "r_mag": np.linspace(-0.5, 0.5, F, dtype=np.float32),
    "b_mag": np.linspace(2, -1, F, dtype=np.float32),
}


def gates(w: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with b_enc as the bias of gates."""
    return {"b_gate" if name == "b_enc" else name: array for name, array in w.items()} | GATES


def gated(pre: np.ndarray) -> np.ndarray:
    """Of the gates' pre-activations."""
    return (pre > 0) * relu(np.exp(GATES["r_mag"]) * (pre - weights()["b_enc"]) + GATES["b_mag"])


def write(
    path: Path, arrays: dict[str, np.ndarray], dtype: torch.dtype = torch.float32
) -> dict[str, np.ndarray]:
    """Write a safetensors or .pt file, and return its numbers, rounded as there, in float64."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: torch.tensor(array).to(dtype).contiguous() for name, array in arrays.items()}
    (torch.save if path.suffix in (".pt", ".pth") else save_file)(tensors, path)
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def write_json(path: Path, entries: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries))


def linear(w: dict[str, np.ndarray], part: str = "") -> dict[str, np.ndarray]:
    """Weights but for the decoder's bias as those of two nn.Linear."""
    return {
        f"encoder{part}.weight": w["W_enc"].T,
        f"encoder{part}.bias": w["b_enc"],
        f"decoder{part}.weight": w["W_dec"].T,
    }


def normals(seed: int, **shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape) for name, shape in shapes.items()}


def weights(width: int = D, skip: bool = False, shift: float = 0) -> dict[str, np.ndarray]:
    """Of an SAE or a transcoder; few pre-activations are positive if they are shifted by -6."""
    shapes = {"W_enc": (D, F), "b_enc": (F,), "W_dec": (F, width), "b_dec": (width,)}
    w = normals(0, **shapes, **({"W_skip": (D, width)} if skip else {}))
    w["b_enc"] += shift
    return {name: array.astype(np.float32).astype(float) for name, array in w.items()}


def with_unit_rows(w: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    norms = np.linalg.norm(w["W_dec"], axis=1)
    W_dec = w["W_dec"] / norms[:, None]
    return w | {"W_dec": W_dec, "W_enc": w["W_enc"] * norms, "b_enc": w["b_enc"] * norms}


def formula(
    path: Path,
    w: dict[str, np.ndarray],
    act: Callable[[np.ndarray], np.ndarray],
    subtract: bool = False,
    factor: float = 1,
) -> Published:
    """`factor`: of rows and targets."""
    x = ROWS * factor
    codes = act((x - w["b_dec"] if subtract else x) @ w["W_enc"] + w["b_enc"])
    predicted = codes @ w["W_dec"] + w["b_dec"] + (x @ w["W_skip"] if "W_skip" in w else 0)
    return Published(path, codes, predicted / factor)


def saelens(
    folder: Path,
    architecture: str = "standard",
    width: int = D,
    subtract: bool = False,
    shift: float = 0,
    metadata: dict[str, Any] | None = None,
    changed: dict[str, np.ndarray] | None = None,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Published:
    """`subtract`: what its formula does, whatever the configuration says; `changed`: other tensors."""
    w = weights(width, "skip" in architecture, shift)
    threshold = np.linspace(-1, 2, F).astype(np.float32)
    stored = w | ({"threshold": threshold} if "jumprelu" in architecture else {})
    stored |= {"W_skip": w["W_skip"].T} if "W_skip" in w else {}
    stored = gates(stored) if architecture == "gated" else stored
    write(folder / "sae_weights.safetensors", stored | (changed or {}), dtype)
    read = {"model_name": "gpt2", "hook_name": "blocks.8.hook_mlp_out", "context_size": 64}
    metadata = metadata or {"sae_lens_version": "6.54.12", **read, "prepend_bos": False}
    sizes = {"d_in": D, "d_sae": F, "dtype": "float32", "device": "cpu"}
    none = {"normalize_activations": "none", "reshape_activations": "none"}
    document = {"architecture": architecture, **sizes, **none, "metadata": metadata} | config
    write_json(folder / "cfg.json", document)
    if config.get("rescale_acts_by_decoder_norm"):
        w = with_unit_rows(w)
    acts = {
        "gated": gated,
        "topk": lambda pre: relu(top_k(pre)),
        "abstopk": lambda pre: top_k(pre, np.abs(pre)),
    }
    if "jumprelu" in architecture:
        return formula(folder, w, lambda pre: jumprelu(pre, threshold), subtract)
    return formula(folder, w, acts.get(architecture, relu), subtract)


def saelens_checkpoint(
    folder: Path,
    threshold: float = 0.5,
    factor: float | None = None,
    widths: tuple[int, ...] = (),
    **config: Any,
) -> Published:
    """Of training a batchtopk, or a nested one; `factor` of rows and targets is in a file of its own."""
    kind = {"architecture": "matryoshka_batchtopk" if widths else "batchtopk", "k": 3.5}
    details = kind | ({"matryoshka_widths": [*widths]} if widths else {})
    scaling = "expected_average_only_in" if factor else "none"
    saelens(
        folder,
        changed={"topk_threshold": np.array(threshold)},
        metadata={"sae_lens_version": "6.54.12", "training_architecture_details": details},
        **details
        | {"normalize_activations": scaling, "rescale_acts_by_decoder_norm": True}
        | config,
    )
    write_json(
        folder / "activation_scaler.json", {"scaling_factor": factor, "has_whitening": False}
    )
    w = with_unit_rows(weights())
    return formula(folder, w, lambda pre: jumprelu(pre, threshold), True, factor or 1)


def saelens_5(
    folder: Path,
    extra: dict[str, np.ndarray] | None = None,
    subtract: bool = True,
    factor: float = 1,
    **config: Any,
) -> Published:
    """As SAELens wrote it before version 6; `factor` of rows and targets, in its formula."""
    w, act = weights(), relu
    stored = w
    if config.get("architecture") == "gated":
        stored, act = gates(w), gated
    elif config.get("activation_fn_str") == "topk":
        act = lambda pre: relu(top_k(pre))  # noqa: E731
    write(folder / "sae_weights.safetensors", stored | (extra or {}))
    write_json(folder / "cfg.json", {"d_in": D, "d_sae": F, "dtype": "torch.float32"} | config)
    return formula(folder, w, act, subtract, factor)


def sparsify(folder: Path, transcode: bool = False, skip: bool = False, **config: Any) -> Published:
    w = weights(skip=skip, shift=-6)
    stored = linear(w) | {"W_dec": w["W_dec"], "b_dec": w["b_dec"]}
    del stored["decoder.weight"]
    stored |= {"W_skip": w["W_skip"].T} if skip else {}
    write(folder / "sae.safetensors", stored)
    settings = {"activation": "topk", "num_latents": F, "k": K, "d_in": D}
    kind = {"transcode": transcode, "skip_connection": skip}
    write_json(folder / "cfg.json", settings | kind | config)
    return formula(folder, w, lambda pre: relu(top_k(pre)), not transcode)


def dictionary_learning(
    folder: Path, name: str = "AutoEncoder", old: bool = False, **trainer: Any
) -> Published:
    """`old`: with k in the configuration alone, and without a threshold that top-k does not use."""
    w, single, per_latent = weights(), np.float32(0.7), np.linspace(0, 2, F).astype(np.float32)
    bias = {"AutoEncoder": "bias", "AutoEncoderNew": "decoder.bias"}.get(name, "b_dec")
    layers = linear(w) | {bias: w["b_dec"]}
    of_gates = linear(w) | {"decoder_bias": w["b_dec"], "gate_bias": w["b_enc"]}
    of_gates |= {"mag_bias": GATES["b_mag"], "r_mag": GATES["r_mag"]}
    del of_gates["encoder.bias"]
    state, act = {
        "GatedAutoEncoder": (of_gates, gated),
        "AutoEncoder": (layers, relu),
        "AutoEncoderNew": (layers, relu),
        "AutoEncoderTopK": (layers | {"threshold": np.float32(-1)}, lambda pre: relu(top_k(pre))),
        "BatchTopKSAE": (layers | {"threshold": single}, lambda pre: jumprelu(pre, single)),
        "MatryoshkaBatchTopKSAE": (w | {"threshold": single}, lambda pre: jumprelu(pre, single)),
        "JumpReluAutoEncoder": (
            w | {"threshold": per_latent},
            lambda pre: jumprelu(pre, per_latent),
        ),
    }[name]
    tensors = {key: torch.tensor(array).float().contiguous() for key, array in state.items()}
    if "TopK" in name and not old:
        tensors["k"] = torch.tensor(K, dtype=torch.int)
    if "Matryoshka" in name:
        tensors["group_sizes"] = torch.tensor([5, F - 5])
    if name == "AutoEncoderTopK" and old:
        del tensors["threshold"]
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(tensors, folder / "ae.pt")
    settings = {"dict_class": name, "lm_name": "gpt2", "layer": 8}
    settings |= {"activation_dim": D, "dict_size": F}
    settings |= {"k": K, "submodule_name": "resid_post_layer_8"} if old else {}
    write_json(folder / "config.json", {"buffer": {"ctx_len": 128}, "trainer": settings | trainer})
    return formula(folder, w, act, name not in ("AutoEncoderNew", "JumpReluAutoEncoder"))


def gemma_scope(folder: Path, factor: float = 1) -> Published:
    folder.mkdir(parents=True, exist_ok=True)
    w, threshold = weights(), np.linspace(0, 2, F).astype(np.float32)
    arrays = {name: array.astype("f4") for name, array in w.items()}
    np.savez(folder / "params.npz", threshold=threshold, **arrays)
    return formula(folder, w, lambda pre: jumprelu(pre, threshold), factor=factor)


def goodfire(path: Path, part: str = "_linear") -> Published:
    w = weights()
    write(path, linear(w, part) | {f"decoder{part}.bias": w["b_dec"]})
    return formula(path, w, relu)


def attention_heads(path: Path) -> Published:
    """As Kissane et al. name it, with a configuration beside it."""
    w = weights()
    write(path, w)
    settings = {"act_size": D, "dict_size": F, "act_name": "blocks.0.attn.hook_z"}
    write_json(path.with_name(f"{path.stem}_cfg.json"), settings)
    return formula(path, w, relu, True)


def qwen_transcoder(path: Path) -> Published:
    """Without a config.yaml."""
    w = weights()
    write(path, w | {"W_enc": w["W_enc"].T})
    settings = {"d_model": D, "d_feature": F, "batch_size": 64}
    values = {name: {"value": value} for name, value in settings.items()}
    write_json(path.with_name("wanb-config.yaml"), values)
    return formula(path, w, relu)


TRACER = """model_name: "google/gemma-2-2b"
model_kind: transcoder_set
feature_input_hook: mlp.hook_in
feature_output_hook: hook_mlp_out
scan: gemma-2-2b
transcoders:
- hf://a/b/layer_0.safetensors
"""


def circuit_tracer(
    folder: Path,
    kind: str = "relu",
    skip: bool = False,
    text: str = "",
    layer: int | str = 5,
    threshold: float = 0.5,
) -> Published:
    w = weights(skip=skip, shift=-6 if kind == "topk" else 0)
    stored = w | {"W_enc": w["W_enc"].T}
    stored |= {"W_skip": w["W_skip"].T} if skip else {}
    if kind == "jumprelu":
        stored["activation_function.threshold"] = np.full(F, threshold)
    write(folder / f"layer_{layer}.safetensors", stored)
    settings = f"activation: topk\nk: {K}\n" if kind == "topk" else ""
    (folder / "config.yaml").write_text(text or TRACER + settings)
    act = {"relu": relu, "jumprelu": lambda pre: jumprelu(pre, threshold), "topk": top_k}[kind]
    return formula(folder, w, act)


def gemma_scope_2(
    folder: Path, kind: str = "sae", affine: bool = False, width: int = D, **config: Any
) -> Published:
    """An SAE or a transcoder of layer 17 of Gemma 3 4B."""
    shapes = {"w_enc": (D, F), "b_enc": (F,), "w_dec": (F, width), "b_dec": (width,)}
    shapes |= {"threshold": (F,)}
    shapes |= {"affine_skip_connection": (D, width)} if affine else {}
    w = write(folder / "params.safetensors", normals(0, **shapes))
    before, after = "", ""
    if kind != "sae":
        before, after = "pre_feedforward_layernorm.", "post_feedforward_layernorm."
    document = {
        "architecture": "jump_relu",
        "model_name": "google/gemma-3-4b-pt",
        "width": F,
        "l0": 60,
        "type": kind,
        "affine_connection": affine,
        "hf_hook_point_in": f"model.layers.17.{before}output",
        "hf_hook_point_out": f"model.layers.17.{after}output",
    }
    write_json(folder / "config.json", document | config)
    codes = jumprelu(ROWS @ w["w_enc"] + w["b_enc"], w["threshold"])
    skip = ROWS @ w["affine_skip_connection"] if affine else 0
    return Published(folder, codes, codes @ w["w_dec"] + w["b_dec"] + skip)


def gemma_scope_2_crosscoder(folder: Path, **config: Any) -> Published:
    """A weakly causal crosscoder of layers 5, 9 and 12 of Gemma 3 270M."""
    codes, predicted = [], np.zeros((len(WIDE_ROWS), PLACES, D))
    shapes = {"w_enc": (D, F), "b_enc": (F,), "w_dec": (F, PLACES, D), "b_dec": (D,)}
    for place in range(PLACES):
        arrays = normals(place, **shapes, threshold=(F,))
        arrays["w_dec"][:, :place] = 0  # earlier layers are not written to
        w = write(folder / f"params_layer_{place}.safetensors", arrays)
        x = WIDE_ROWS[:, place * D : (place + 1) * D]
        codes.append(jumprelu(x @ w["w_enc"] + w["b_enc"], w["threshold"]))
        predicted += np.einsum("bf,fpd->bpd", codes[-1], w["w_dec"])
        predicted[:, place] += w["b_dec"]
    document = {"architecture": "jump_relu", "model_name": "google/gemma-3-270m-pt"}
    document |= {"type": "crosscoder", "width": PLACES * F, "affine_connection": False}
    for end in ("in", "out"):
        document[f"hf_hook_point_{end}"] = "model.layers.{5,9,12}.output"
    write_json(folder / "config.json", document | config)
    return Published(folder, np.concatenate(codes, 1), predicted.reshape(len(WIDE_ROWS), -1))


def llama_scope(
    folder: Path,
    transcodes: bool = False,
    unit_norms: bool = False,
    dtype: torch.dtype = torch.float32,
    r1: bool = False,
    **hyperparams: Any,
) -> Published:
    """An SAE of layer 15, or a transcoder of its MLP; `r1`: with norms and logarithmic thresholds as tensors."""
    shapes = {"encoder.weight": (F, D), "encoder.bias": (F,)}
    shapes |= {"decoder.weight": (D, F), "decoder.bias": (D,)}
    arrays = normals(0, **shapes)
    if unit_norms:
        arrays["decoder.weight"] /= np.linalg.norm(arrays["decoder.weight"], axis=0)
    hooks, norms = ["blocks.15.hook_resid_post"] * 2, {"in": 12.5, "out": 12.5}
    if transcodes:
        hooks = ["blocks.15.ln2.hook_normalized", "blocks.15.hook_mlp_out"]
        norms["out"] = 3.25
    threshold, name = np.linspace(0.1, 0.8, F), "checkpoints/final.safetensors"
    if r1:
        name = "sae_weights.safetensors"
        arrays["log_jumprelu_threshold"] = np.log(threshold)
        for hook, norm in zip(hooks, norms.values(), strict=True):
            arrays[f"dataset_average_activation_norm.{hook}"] = np.array(norm)
    w = write(folder / name, arrays, dtype)
    document = {
        "dtype": "torch.bfloat16",
        "hook_point_in": hooks[0],
        "hook_point_out": hooks[1],
        "use_decoder_bias": True,
        "apply_decoder_bias_to_pre_encoder": False,
        "expansion_factor": 8,
        "d_model": D,
        "d_sae": F,
        "act_fn": "jumprelu",
        "jump_relu_threshold": 0.75,
        "norm_activation": "dataset-wise",
        "dataset_average_activation_norm": norms,
        "sparsity_include_decoder_norm": True,
        "use_glu_encoder": False,
        "top_k": 50,
    }
    write_json(folder / ("config.json" if r1 else "hyperparams.json"), document | hyperparams)
    # OpenMOSS' steps: scales into the weights, decoder rows to unit norm, then the threshold on raw units.
    c_in, c_out = (np.sqrt(D) / norms[end] for end in ("in", "out"))
    pre = ROWS @ w["encoder.weight"].T + w["encoder.bias"] / c_in
    decoder = w["decoder.weight"] * c_in / c_out
    lengths = np.linalg.norm(decoder, axis=0)
    fired = jumprelu(pre * lengths, threshold / c_out if r1 else 0.75)
    predicted = fired @ (decoder / lengths).T + w["decoder.bias"] / c_out
    return Published(folder, fired / lengths * c_in, predicted)


def qwen_scope(folder: Path, layer: int = 5) -> Published:
    """An SAE of one layer, few of whose pre-activations are positive; K is at best in the folder's name."""
    path = folder / f"layer{layer}.sae.pt"
    arrays = normals(layer, W_enc=(F, D), b_enc=(F,), W_dec=(D, F), b_dec=(D,))
    w = write(path, arrays | {"b_enc": arrays["b_enc"] - 6})
    codes = top_k(ROWS @ w["W_enc"].T + w["b_enc"])
    return Published(path, codes, codes @ w["W_dec"].T + w["b_dec"])
