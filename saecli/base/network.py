"""Whether the Hugging Face hub and other endpoints can be reached, and why not."""

import math
import time

from .errors import one_line

CONNECT_SECONDS, ANSWER_SECONDS = 3, 10
ANSWER_HOLDS = 60  # seconds
# When endpoints were asked, and why they were silent.
_answers: dict[str, tuple[float, str | None]] = {}
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def why_unreachable() -> str | None:
    """Why the hub cannot be reached, within seconds; None if it answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    endpoint, now = constants.ENDPOINT, time.monotonic()
    asked, answer = _answers.get(endpoint, (-math.inf, None))
    if now - asked > ANSWER_HOLDS:
        answer = why_silent(endpoint, ANSWER_SECONDS)
        _answers[endpoint] = now, answer
    return answer


def why_silent(endpoint: str, seconds: float) -> str | None:
    """None if it answers. In a thread, since nothing limits the time to look up a name."""
    import socket  # each of these is slow to import, and most commands do not need them
    import urllib.request
    from threading import Thread
    from urllib.parse import urlsplit

    import requests

    url = urlsplit(endpoint)
    host, port = url.hostname, url.port or (80 if url.scheme == "http" else 443)
    answers: list[str | None] = []

    def ask() -> None:
        try:
            if not urllib.request.getproxies():  # a proxy looks names up and connects by itself
                socket.create_connection((host, port), CONNECT_SECONDS).close()
            requests.head(endpoint, timeout=seconds)
            answers.append(None)
        except socket.gaierror:
            answers.append(f"no address for {host}")
        except OSError as error:
            answers.append(f"no connection to {host}, port {port}: {one_line(error)}")

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer from {host} within {seconds} s"


def why_refused(repo: str, error: BaseException) -> str | None:
    """Why the hub refuses a gated, private or missing repository, and what to do; None for any other error."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{repo} is gated: accept its licence at {constants.ENDPOINT}/{repo}, then {LOG_IN}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"the Hugging Face hub has no model repository {repo}, or it is private: check the name; for a "
            f"private one, {LOG_IN}"
        )
    return None


def is_passing(error: BaseException | None) -> bool:
    """Whether the network or a busy hub caused an error, not the request."""
    from huggingface_hub.errors import HTTPError
    from requests.exceptions import ChunkedEncodingError, Timeout
    from requests.exceptions import ConnectionError as RefusedError
    from requests.exceptions import HTTPError as StatusError

    of_requests = StatusError | RefusedError | Timeout | ChunkedEncodingError
    status = getattr(getattr(error, "response", None), "status_code", 503)
    is_of_network = isinstance(error, HTTPError | ConnectionError | TimeoutError | of_requests)
    return is_of_network and (status in (408, 425, 429) or status >= 500)
