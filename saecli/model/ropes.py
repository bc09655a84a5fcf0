"""Rotary embeddings that depend on the longest window of a batch, and on passes before (dynamic NTK, longrope)."""

import re
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import calling


def of_each_window(model: nn.Module, mask: Tensor) -> AbstractContextManager[None]:
    """While open, each window, of the tokens where the mask is not 0, has the embedding of its own length."""
    lengths = mask.sum(1).tolist()
    return calling(
        {
            module: partial(_embedded, module, lengths)
            for module in model.modules()  # of several kinds of layers, rope_type is a mapping
            if re.search("dynamic|longrope", str(getattr(module, "rope_type", "")))
        }
    )


def _embedded(
    module: Any, lengths: list[int], x: Tensor, position_ids: Tensor, *args: Any, **more: Any
) -> tuple[Tensor, ...]:
    parts = []
    for row, length in enumerate(lengths):
        positions = position_ids[row % len(position_ids), None].clamp(max=length - 1)
        fresh = type(module)(module.config).to(x.device)  # which knows no lengths of earlier passes
        parts.append(fresh(x[:1], positions, *args, **more))
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))
