"""This tool's own format.

One file, `sae.safetensors`, whose tensors are `SAE.tensors()` and whose header entry `saecli` is a JSON object
with `format_version`, `activation` and `origin`; for a nested SAE `prefixes` too, the numbers of latents, for a
crosscoder `widths`, of its places. It MUST hold W_enc (d_in, d_sae), b_enc, W_dec (d_sae, d_out) and b_dec in one
floating dtype, of a transcoder with a skip W_skip (d_in, d_out), and the activation's parameters beside them; it acts
on raw activations. `origin` has `target_layer` and `target_site` of a transcoder's targets.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.documents import Origin, demand_version, parse_json
from ...base.errors import FormatError
from ...base.files import to_json
from ..activations import activation_from_json, activation_to_json
from .common import SavedSAE, assemble, read_safetensors, write_safetensors

FORMAT_VERSION = 1
FILE_NAME = "sae.safetensors"


@dataclass(frozen=True)
class Header:
    """The entry `saecli` of the file's header.

    Args:
        activation: the activation's name and settings.
        origin: where the training rows came from.
        prefixes: of a nested SAE.
        widths: of a crosscoder's places.
    """

    activation: dict[str, Any]
    origin: Origin
    prefixes: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()


def save_native(saved: SavedSAE, folder: Path) -> None:
    """Write an SAE in this tool's own format, atomically."""
    header = {"format_version": FORMAT_VERSION, "activation": activation_to_json(saved.sae.activation),
              "origin": saved.origin}
    header |= {name: value for name in ("prefixes", "widths") if (value := getattr(saved.sae, name))}
    write_safetensors(folder / FILE_NAME, saved.sae.tensors(), {"saecli": to_json(header)})


def load_native(folder: Path) -> SavedSAE:
    """Read an SAE in this tool's own format; FormatError if the file is damaged, of a newer version, or has other
    tensors than its activation needs."""
    path = folder / FILE_NAME
    tensors, metadata = read_safetensors(path)
    if "saecli" not in metadata:
        raise FormatError(f"{path} was not written by this tool: expected an entry `saecli` in its header, got none")
    try:
        demand_version(metadata["saecli"], FORMAT_VERSION)
        header = parse_json(metadata["saecli"], Header)
        activation = activation_from_json(header.activation)
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from error
    return SavedSAE.of(assemble(path, tensors, activation, prefixes=header.prefixes, transcodes=True,
                             widths=header.widths), header.origin)
