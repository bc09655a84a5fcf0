"""Whether the Hugging Face hub can be reached, and why it refuses a repository."""

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def why_unreachable() -> str | None:
    """Why the hub cannot be reached; None if nothing indicates that.

    Fails at once without a network, where the hub's own client would retry for half a minute.
    """
    import socket  # each of these is slow to import, and most commands do not need them
    import urllib.request
    from urllib.parse import urlsplit

    from huggingface_hub import constants

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


def why_refused(repo: str, error: BaseException) -> str | None:
    """Why the hub refuses a model repository that is gated, private or missing, and what to do; None for any other
    error."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{repo} is gated: accept its licence at {constants.ENDPOINT}/{repo}, then {LOG_IN}"
    if isinstance(error, RepositoryNotFoundError):
        return (f"the Hugging Face hub has no model repository {repo}, or it is private: check the name; for a "
                f"private one, {LOG_IN}")
    return None
