"""How an SAE lies in a folder, in this tool's own format and in other libraries'.

Own format: `sae.safetensors`, whose tensors are `SAE.tensors()` and whose header entry `saecli` is a JSON
object with `format_version`, `activation` and `origin`. It MUST hold W_enc (d_in, d_sae), b_enc, W_dec and
b_dec in one floating dtype, and the activation's parameters beside them; it acts on raw activations.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .activations import activation_from_json, activation_to_json
from .errors import FormatError
from .files import appearing_whole
from .sae import SAE

FORMAT_VERSION = 1
FILE_NAME = "sae.safetensors"


@dataclass(frozen=True)
class SavedSAE:
    """An SAE as found in a folder.

    Args:
        sae: the autoencoder.
        origin: where its training rows came from, as far as the file says: `model`, `layer`, `site`.
    """

    sae: SAE
    origin: dict[str, Any] = field(default_factory=dict)


def save_native(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE in this tool's own format; the file appears whole or not at all."""
    header = {"format_version": FORMAT_VERSION, "activation": activation_to_json(saved.sae.activation),
              "origin": saved.origin}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in saved.sae.tensors().items()}
    with appearing_whole(folder / FILE_NAME) as path:
        save_file(tensors, path, metadata={"saecli": json.dumps(header)})


def load_native(folder: Path) -> SavedSAE:
    """Read an SAE in this tool's own format.

    Raises:
        FormatError: the file is damaged, of a newer version, or lists other tensors than its activation needs.
    """
    path = folder / FILE_NAME
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("saecli", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise FormatError(f"cannot read {path}: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path} was not written by this tool: its header has no entry `saecli`")
    if header["format_version"] > FORMAT_VERSION:
        raise FormatError(f"{path} has format version {header['format_version']}, this tool reads up to "
                          f"{FORMAT_VERSION}; upgrade it with `pip install --upgrade saecli`")
    activation = activation_from_json(header["activation"])
    weights = {"W_enc", "b_enc", "W_dec", "b_dec"}
    wanted = weights | activation.parameters(1).keys()
    if tensors.keys() != wanted:
        raise FormatError(f"{path}: expected the tensors {sorted(wanted)}, got {sorted(tensors)}")
    parameters = {name: tensors.pop(name) for name in wanted - weights}
    return SavedSAE(SAE(**tensors, activation=activation, parameters=parameters), header["origin"])
