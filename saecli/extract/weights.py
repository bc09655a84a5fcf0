"""Loading a model's weights: none of the blocks that are not wanted, and without a second copy of the others.

The configuration stays the whole model's, and with it all that depends on its number of layers: a block computes the
same whether those after it are there or not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import modeling_utils

from ..base.errors import ModelError
from .model_source import ModelSource


class Outline:
    """A model without its weights.

    Args:
        source: where the model is.
        loader: the library's class that loads it.
        settings: what `loader` takes besides.

    Attributes:
        size: number of parameters.
        path: name of the module list of its blocks.

    Raises:
        ModelError: it has no such list.
    """

    def __init__(self, source: ModelSource, loader: Any, settings: dict[str, Any]) -> None:
        with torch.device("meta"):
            self._whole = loader.from_config(source.config, **settings)
        self._source, self._settings = source, settings
        self.size = sum(parameter.numel() for parameter in self._whole.parameters())
        self.path = _path_of_blocks(self._whole, source.layers, source.name)

    def load(self, blocks: int) -> nn.Module:
        """The model with its weights, up to a number of blocks if no later block shares weights with the rest.

        Raises:
            ModelError: the checkpoint lacks weights that a forward pass through these blocks needs.
        """
        loaded = type(self._whole)
        if blocks < self._source.layers and not self._shares_after(blocks):
            loaded = _cut(loaded, self.path, blocks)
        with _unmapped():
            model, info = loaded.from_pretrained(self._source.location, config=self._whole.config,
                                                 revision=self._source.revision, output_loading_info=True,
                                                 **self._settings)
        if lacking := sorted(set(info["missing_keys"]) & self._needed()):
            raise ModelError(f"cannot load the model {self._source.name}: expected weights for all of its parts, got "
                             f"none for {lacking[0]}" + f" and {len(lacking) - 1} more" * (len(lacking) > 1)
                             + "; use a checkpoint that is whole")
        return model

    def _shares_after(self, blocks: int) -> bool:
        """Whether a block after the first ones has parameters that are used elsewhere too."""
        after = self._whole.get_submodule(self.path)[blocks:]
        shared = {name for name, _ in self._whole.named_parameters(remove_duplicate=False)} - {
            name for name, _ in self._whole.named_parameters()}
        own = {id(parameter) for parameter in after.parameters()}
        return any(id(self._whole.get_parameter(name)) in own for name in shared)

    def _needed(self) -> set[str]:
        """Names of the parameters up to the last block's; with a head, which comes last, of all.

        What an architecture has after its blocks, such as BERT's pooler, may be missing from a checkpoint that was
        saved for another task.
        """
        names = [name for name, _ in self._whole.named_parameters()]
        if self._whole.get_output_embeddings() is not None:
            return set(names)
        last = max(index for index, name in enumerate(names) if name.startswith(f"{self.path}."))
        return set(names[: last + 1])


def _path_of_blocks(model: nn.Module, layers: int, name: str) -> str:
    """Name of the model's transformer blocks: the outermost module list of the configured length.

    Args:
        model: the model.
        layers: number of blocks, as its configuration says.
        name: the model's, for messages.

    Raises:
        ModelError: it has no such list.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return path
    raise ModelError(f"cannot find the blocks of {name}: expected a module list of length {layers}, as its "
                     f"configuration says, got none")


def blocks_of(model: nn.Module, layers: int, name: str) -> nn.ModuleList:
    """The model's transformer blocks; arguments and errors as of `_path_of_blocks`."""
    return model.get_submodule(_path_of_blocks(model, layers, name))


def _cut(architecture: type[nn.Module], path: str, blocks: int) -> type[nn.Module]:
    """An architecture whose models are made with the first blocks only; the library does not load what they lack.

    It keeps its name and module, by which the library looks up how to read older checkpoints.
    """
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        architecture.__init__(self, *args, **kwargs)
        del self.get_submodule(path)[blocks:]

    return type(architecture.__name__, (architecture,), {"__init__": init, "__module__": architecture.__module__})


@contextmanager
def _unmapped() -> Iterator[None]:
    """While open, the library reads checkpoints tensor by tensor, where the installed safetensors can.

    It would map them, and the pages of all tensors read so far would stay in memory, beside the tensors made of them.
    """
    def opened(*args: Any, **kwargs: Any) -> Any:
        return safe_open(*args, **kwargs | {"backend": "pread"})

    if modeling_utils.safe_open is not safe_open or "backend" not in (safe_open.__text_signature__ or ""):
        yield
        return
    modeling_utils.safe_open = opened
    try:
        yield
    finally:
        modeling_utils.safe_open = safe_open
