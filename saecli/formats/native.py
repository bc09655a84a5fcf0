"""This tool's own format.

One file, `sae.safetensors`, whose tensors are `SAE.tensors()` and whose header entry `saecli` is a JSON object
with `format_version`, `activation` and `origin`. It MUST hold W_enc (d_in, d_sae), b_enc, W_dec and b_dec in one
floating dtype, and the activation's parameters beside them; it acts on raw activations.
"""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..activations import activation_from_json, activation_to_json
from ..errors import ConfigError, FormatError
from .common import WEIGHTS, SavedSAE, assemble, write_safetensors

FORMAT_VERSION = 1
FILE_NAME = "sae.safetensors"


def save_native(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE in this tool's own format; the file appears whole or not at all."""
    header = {"format_version": FORMAT_VERSION, "activation": activation_to_json(saved.sae.activation),
              "origin": saved.origin}
    write_safetensors(folder / FILE_NAME, saved.sae.tensors(), {"saecli": json.dumps(header)})


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
    if not isinstance(header, dict) or not {"format_version", "activation", "origin"} <= header.keys():
        raise FormatError(f"{path} was not written by this tool: its header has no entry `saecli` with "
                          f"format_version, activation and origin")
    if header["format_version"] > FORMAT_VERSION:
        raise FormatError(f"{path} has format version {header['format_version']}, this tool reads up to "
                          f"{FORMAT_VERSION}; upgrade it with `pip install --upgrade saecli`")
    try:
        activation = activation_from_json(header["activation"])
    except ConfigError as error:
        raise FormatError(f"{path}: {error}") from error
    sae = assemble(path, tensors, activation, {*WEIGHTS, *activation.parameters(1)})
    return SavedSAE(sae, header["origin"])
