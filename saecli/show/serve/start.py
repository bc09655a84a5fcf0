"""The server's socket and address. Imports neither Starlette nor torch."""

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from ...base.errors import ConfigError, MachineError

PACKAGES = ("starlette", "uvicorn")
LOCAL = ("127.0.0.1", "::1", "localhost")


def demand_installed() -> None:
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise MachineError(
            f"sae serve needs {' and '.join(missing)}, which this environment lacks; pip install 'saecli[serve]'"
        )


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound before a model is loaded; ConfigError for an address or a port that cannot be had."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address, family=family)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}; name another --port, or --host"
        ) from error
    with listening:
        yield listening


def url_of(listening: socket.socket, host: str) -> tuple[str, str | None]:
    """The address to open, and the token in it, if the host is not this machine's own."""
    port = listening.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    if host in LOCAL:
        return f"http://{shown}:{port}/", None
    token = secrets.token_urlsafe(24)
    return f"http://{shown}:{port}/?token={token}", token
