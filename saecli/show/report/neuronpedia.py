"""Where Neuronpedia shows an SAE of the Hugging Face hub.

`assets/neuronpedia.json` lists repositories. Each has Neuronpedia's name for its SAEs, in which {layer} and {width}
stand for parts of the folder's name; a pattern of the folders' names; and, where a repository has several SAEs of one
layer and width, the average L0 of the one that Neuronpedia shows, by width and layer.
"""

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from ...base.errors import ConfigError
from ...sae.hub import Address

SITE = "https://www.neuronpedia.org/"
_SOURCE = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def neuronpedia_url(name: str, source: str | None = None) -> str | None:
    """The address below which Neuronpedia has a page for each latent; None if it is not known to have any.

    Args:
        name: of the SAE; an address on the hub is looked up.
        source: Neuronpedia's own name of the SAE, `MODEL/SOURCE`, such as `gemma-2-2b/20-gemmascope-res-16k`; None to
            look it up.

    Raises:
        ConfigError: the source is no such name.
    """
    if source is None:
        source = _known(name)
    elif not _SOURCE.fullmatch(source):
        raise ConfigError("--neuronpedia must be MODEL/SOURCE such as gemma-2-2b/20-gemmascope-res-16k, got "
                          f"{source!r}", option="neuronpedia")
    return None if source is None else f"{SITE}{source}"


def _known(name: str) -> str | None:
    address = Address.parse(name)
    for entry in _table() if address is not None else ():
        if entry["repo"] == address.repo and (found := re.fullmatch(entry["folder"], address.folder)):
            parts = found.groupdict()
            shown = entry.get("l0", {}).get(parts.get("width"))
            if "l0" not in entry or (shown and shown.get(parts["layer"]) == int(parts["l0"])):
                return entry["source"].format_map(parts)
    return None


@cache
def _table() -> list[dict[str, Any]]:
    return json.loads((files(__package__) / "assets" / "neuronpedia.json").read_text(encoding="utf-8"))
