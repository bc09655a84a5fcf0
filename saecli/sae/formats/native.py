"""This tool's own format: one file, `sae.safetensors`, of an SAE on raw activations.

It MUST hold W_enc (d_in, d_sae), b_enc, W_dec (d_sae, d_out) and b_dec in one floating dtype, the activation's
parameters, and W_skip (d_in, d_out) of a transcoder with a skip. The header's entry `saecli` is a JSON object with
`format_version`, `activation` and `origin`; of a nested SAE `prefixes`, numbers of latents; of a crosscoder `widths`.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...base.documents import Origin, demand_version, parse_json
from ...base.errors import FormatError
from ...base.files import to_json
from ..activations import activation_from_json, activation_to_json
from .common import SavedSAE, assemble, read_safetensors, write_tensors

FORMAT_VERSION = 1
FILE_NAME = "sae.safetensors"


@dataclass(frozen=True)
class Header:
    """The entry `saecli` of the file's header."""

    activation: dict[str, Any]
    origin: Origin
    prefixes: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()


def save_native(saved: SavedSAE, folder: Path) -> None:
    header = {
        "format_version": FORMAT_VERSION,
        "activation": activation_to_json(saved.sae.activation),
        "origin": saved.origin,
    }
    if saved.sae.prefixes:
        header["prefixes"] = saved.sae.prefixes
    if saved.sae.widths:
        header["widths"] = saved.sae.widths
    write_tensors(folder / FILE_NAME, saved.sae.tensors(), {"saecli": to_json(header)})


def load_native(folder: Path) -> SavedSAE:
    """Read an SAE; FormatError also for a file of a newer version."""
    path = folder / FILE_NAME
    tensors, metadata = read_safetensors(path)
    if "saecli" not in metadata:
        raise FormatError(
            f"{path} was not written by this tool: expected an entry `saecli` in its header, got none"
        )
    try:
        demand_version(metadata["saecli"], FORMAT_VERSION)
        header = parse_json(metadata["saecli"], Header)
        activation = activation_from_json(header.activation)
    except ValueError as error:
        raise FormatError(f"{path}: {error}") from error
    sae = assemble(path, tensors, activation, False, header.prefixes, True, header.widths)
    origin = asdict(header.origin).items()
    return SavedSAE(sae, {name: value for name, value in origin if value is not None})
