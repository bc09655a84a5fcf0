"""How strongly a model's later blocks read each dimension of the residual stream: the weights of their norms.

A block reads the residual stream x through norms, before attention and before the MLP, each `g x / rms(x)`. Their
weights g differ between dimensions: from 1 to 119 in the last third of Gemma 3 270M, where those that vary much have
small ones. With rows scaled by the root of g (`--normalize model`) an SAE's error lies where the model looks least.
"""

import re
from collections.abc import Collection, Mapping, Sequence
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


def weights_read(factors: Mapping[int, Sequence[Tensor]], first: int) -> Tensor | None:
    """The root mean square, (D,), of the weights of the norms that read the residual stream in blocks from `first` on.

    None if there are none, or they are not known; `factors` are those of `norm_factors`. The weight of a norm that
    multiplies by 1 plus its parameter (Gemma) is that sum.
    """
    later = [factor for layer, own in factors.items() if layer >= first for factor in own]
    if not later:
        return None
    reads = torch.stack(later).square().mean(0).sqrt()
    return reads.clamp(min=LEAST * reads.mean().item())


@torch.no_grad()
def norm_factors(blocks: nn.ModuleList, path: str, location: str) -> dict[int, list[Tensor]]:
    """What each norm that reads the residual stream multiplies by, (D,), by its block's layer.

    `blocks` may be without weights; `path` is theirs in the model. Empty if the weights are in neither a GGUF file nor
    safetensors files in a folder. Cost: reads a GGUF file's whole header, 10 s for a vocabulary of 262,144.
    """
    norms = {
        (layer, name): getattr(block, name)
        for layer, block in enumerate(blocks)
        for name in reading_norms(block)
    }
    packed = named_file(location)
    if packed is not None:
        return _packed_factors(packed, {layer for layer, _ in norms})
    weights = _stored(Path(location), path.rpartition(".")[2])
    if not norms.keys() <= weights.keys():
        return {}
    factors: dict[int, list[Tensor]] = {}
    for (layer, name), norm in norms.items():
        factors.setdefault(layer, []).append(_factor(norm, weights[layer, name]))
    return factors


@torch.no_grad()
def loaded_norm_factors(blocks: nn.ModuleList) -> dict[int, list[Tensor]]:
    """The same of blocks with their weights."""
    return {
        layer: [
            _factor(norm, norm.weight.float()).cpu()
            for norm in (getattr(block, name) for name in reading_norms(block))
        ]
        for layer, block in enumerate(blocks)
    }


def reading_norms(block: nn.Module) -> list[str]:
    """Names of a block's norms whose input is the residual stream."""
    first = [name for name in BEFORE_ATTENTION if hasattr(block, name)]
    second = [name for name in BEFORE_MLP if hasattr(block, name)]
    return [*first[:1], *second[:1]] if first else []


def _packed_factors(file: Path, layers: Collection[int]) -> dict[int, list[Tensor]]:
    """Of a GGUF file, whose weights of norms are what these multiply by."""
    from gguf import GGUFReader  # an extra

    tensors = {tensor.name: tensor.data for tensor in GGUFReader(file).tensors}
    names = {
        layer: [f"blk.{layer}.{norm}.weight" for norm in PACKED_NORMS] for layer in sorted(layers)
    }
    return {
        layer: [
            torch.from_numpy(tensors[name].astype("float32")) for name in own if name in tensors
        ]
        for layer, own in names.items()
    }


def _stored(folder: Path, tail: str) -> dict[tuple[int, str], Tensor]:
    """The weights of norms in a folder's files, by layer and name; before these their names have `tail` there."""
    names = "|".join((*BEFORE_ATTENTION, *BEFORE_MLP))
    pattern = re.compile(rf"(?:^|\.){re.escape(tail)}\.(\d+)\.({names})\.weight$")
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - no dictionary
                match = pattern.search(key)
                if match:
                    weights[int(match[1]), match[2]] = opened.get_tensor(key).float()
    return weights


def _factor(norm: nn.Module, weight: Tensor) -> Tensor:
    """What a norm multiplies each dimension by, (D,), read off its values at vectors of mean 0 and variance 1."""
    signs = torch.ones_like(weight)
    signs[1::2] = -1
    parameters = {name: torch.zeros_like(weight) for name, _ in norm.named_parameters()}
    parameters["weight"] = weight
    return functional_call(norm, parameters, (signs,)) * signs
