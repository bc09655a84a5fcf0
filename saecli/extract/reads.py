"""How strongly a model's later blocks read each dimension of the residual stream: the weights of their norms.

A block reads the residual stream x through norms, before attention and before the MLP, each `g x / rms(x)`. Their
weights g differ between dimensions: from 1 to 119 in the last third of Gemma 3 270M, where those that vary much have
small ones. With rows scaled by the root of g (`--normalize model`) an SAE's error lies where the model looks least.
"""

import re
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.func import functional_call

from .model_source import named_file

# The first of each that a block has. A block without one before attention, such as OLMo 2's, reads x itself.
BEFORE_ATTENTION = ("input_layernorm", "ln_1", "norm_1", "self_attn_layer_norm", "operator_norm")
BEFORE_MLP = (
    "pre_feedforward_layernorm",
    "pre_ff_layernorm",
    "post_attention_layernorm",
    "ln_2",
    "norm_2",
    "final_layer_norm",
    "ffn_norm",
)
PACKED_NORMS = ("attn_norm", "ffn_norm")  # both in a GGUF file
LEAST = 1e-3  # of the mean over dimensions


@torch.no_grad()
def weights_read(blocks: nn.ModuleList, path: str, location: str, first: int) -> Tensor | None:
    """The root mean square, (D,), of the weights of the norms that read the residual stream in blocks from `first` on.

    None if there is no such block, or if the weights are in neither a GGUF file nor safetensors files in a folder.
    `blocks` may be without weights; `path` is theirs in the model. The weight of a norm that multiplies by 1 plus its
    parameter (Gemma) is that sum.
    """
    if all(not reading_norms(block) for block in blocks[first:]):
        return None
    packed = named_file(location)
    if packed is None:
        factors = _factors_in(Path(location), blocks, path, first)
    else:
        factors = _factors_packed(packed, range(first, len(blocks)))
    if not factors:
        return None
    reads = torch.stack(factors).square().mean(0).sqrt()
    return reads.clamp(min=LEAST * reads.mean().item())


def reading_norms(block: nn.Module) -> list[str]:
    """Names of a block's norms whose input is the residual stream."""
    first = [name for name in BEFORE_ATTENTION if hasattr(block, name)]
    second = [name for name in BEFORE_MLP if hasattr(block, name)]
    return [*first[:1], *second[:1]] if first else []


def _factors_in(folder: Path, blocks: nn.ModuleList, path: str, first: int) -> list[Tensor]:
    tail = path.rpartition(".")[2]
    norms: dict[str, nn.Module] = {}
    for layer in range(first, len(blocks)):
        for name in reading_norms(blocks[layer]):
            norms[f"{tail}.{layer}.{name}"] = getattr(blocks[layer], name)
    weights = _stored(folder, tail, {f"{name}.weight" for name in norms})
    if len(weights) < len(norms):
        return []
    return [_factor(norm, weights[f"{name}.weight"]) for name, norm in norms.items()]


def _factors_packed(file: Path, layers: range) -> list[Tensor]:
    """Of a GGUF file, whose weights of norms are what these multiply by."""
    from gguf import GGUFReader  # an extra

    wanted = {f"blk.{layer}.{name}.weight" for layer in layers for name in PACKED_NORMS}
    tensors = [tensor for tensor in GGUFReader(file).tensors if tensor.name in wanted]
    return [torch.from_numpy(tensor.data.astype("float32")) for tensor in tensors]


def _stored(folder: Path, tail: str, wanted: Collection[str]) -> dict[str, Tensor]:
    """Those of the wanted tensors that a folder's files have, without what stands before their names there."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - no dictionary
                match = re.search(rf"(?:^|\.)({re.escape(tail)}\.\d+\..*)$", key)
                if match and match[1] in wanted:
                    tensors[match[1]] = opened.get_tensor(key).float()
    return tensors


def _factor(norm: nn.Module, weight: Tensor) -> Tensor:
    """What a norm multiplies each dimension by, (D,), read off its values at vectors of mean 0 and variance 1."""
    signs = torch.ones_like(weight)
    signs[1::2] = -1
    parameters = {name: torch.zeros_like(weight) for name, _ in norm.named_parameters()}
    parameters["weight"] = weight
    return functional_call(norm, parameters, (signs,)) * signs
