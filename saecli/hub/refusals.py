"""What the hub's client raises, as sentences."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import HubError, SaeError, one_line
from .address import Address

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def is_passing(error: BaseException | None) -> bool:
    """Whether an error is of the network or of a hub that is busy, not of what was asked."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 425, 429) or error.response.status_code >= 500
    return isinstance(error, HTTPError | ConnectionError | TimeoutError)


@contextmanager
def told(address: Address, writing: bool = False) -> Iterator[None]:
    """Turn what the hub's client raises inside into one sentence.

    Args:
        address: what is asked of the hub.
        writing: whether it is written to.

    Raises:
        HubError: the hub cannot be reached, or refuses.
    """
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except SaeError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:  # what the client raises by design
        if isinstance(error, OSError) and error.errno is not None and not is_passing(error):
            raise  # the disk's
        raise explained(address, error, writing) from error


@contextmanager
def bars_on_terminals() -> Iterator[None]:
    """Let the hub's client draw its progress bars on a terminal alone."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def explained(address: Address, error: Exception, writing: bool = False) -> HubError:
    """Why the hub did not do what it was asked, and what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # that of one upload among several
    repo, status = address.repo, getattr(getattr(error, "response", None), "status_code", None)
    if is_passing(error):
        return HubError(f"the Hugging Face hub cannot be reached for {repo}: expected an answer, got "
                        f"{one_line(error)}; connect to the network, or try again later")
    if isinstance(error, GatedRepoError):
        return HubError(f"{repo} is gated: accept its licence at {constants.ENDPOINT}/{repo}, then {LOG_IN}")
    if isinstance(error, RevisionNotFoundError):
        return HubError(f"{repo} has no revision {address.revision}: expected a branch, a tag or a commit; check the "
                        f"part after @")
    if isinstance(error, RepositoryNotFoundError):
        return HubError(f"the Hugging Face hub has no model repository {repo}, or it is private: check the name; for a "
                        f"private one, {LOG_IN}")
    if status == 401:
        return HubError(f"the Hugging Face hub does not accept the token: expected a valid one, got {_said(error)}; "
                        f"{LOG_IN} to another")
    if status == 403:
        right = "write to" if writing else "read"
        return HubError(f"the token may not {right} {repo}: got {_said(error)}; use one with that right, made at "
                        f"{constants.ENDPOINT}/settings/tokens")
    return HubError(f"the Hugging Face hub refused a request for {repo}: {_said(error)}")


def _said(error: Exception) -> str:
    """What the hub itself says, where it says anything."""
    said = getattr(error, "server_message", None)
    return said if said else one_line(error)
