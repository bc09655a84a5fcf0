"""Whether the Hugging Face hub can be reached."""

import socket
import urllib.request
from urllib.parse import urlsplit


def why_unreachable() -> str | None:
    """Why the hub cannot be reached, or None where nothing speaks against it.

    Takes no time without a network, where the hub's own client would retry for half a minute.
    """
    from huggingface_hub import constants  # takes a while, and most commands do without

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if urllib.request.getproxies():
        return None  # a proxy looks names up itself
    host = urlsplit(constants.ENDPOINT).hostname
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        return f"no address for {host}"
    return None
