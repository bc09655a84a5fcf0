"""Uploading an SAE to a repository on the Hugging Face hub, in one commit with a model card that describes the SAEs,
their measures, and how to load them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

from ..base.errors import ConfigError, HubError
from ..base.network import LOG_IN, why_unreachable
from ..base.wording import number
from .fetch import Address, bars_on_terminals, hub_errors
from .formats import FORMATS, format_of, matching

START = "<!-- `sae push` writes from here: it replaces the line of the SAE that it pushes, and keeps the others -->"
END = "<!-- to here; what stands before and after is left as it is -->"
MEASURES = ("rows", "l0", "fvu", "explained_variance", "cosine", "dead_fraction", "ce_recovered", "kl")
COLUMNS = ("SAE", "activations", "activation", "d_in", "d_sae", *(name.replace("_", " ") for name in MEASURES))
FORMULAS = ("fvu = `E||x_hat - x||^2 / (E||x||^2 - ||E x||^2)`, explained variance = 1 - fvu, l0: latents that fire on "
            "a row, dead fraction: latents that fire on none of the training rows, ce recovered = `(ce_zero - "
            "ce_spliced) / (ce_zero - ce_clean)`, kl in nats per token")
LOADING = {  # by format, the library that reads it from the hub, and how
    "saelens": ("SAELens", 'from sae_lens import SAE\nsae = SAE.from_pretrained("{0.repo}", "{0.folder}")'),
    "sparsify": ("sparsify", "from sparsify import SparseCoder\n"
                             'sae = SparseCoder.load_from_hub("{0.repo}", hookpoint="{0.folder}")'),
    "circuit-tracer": ("circuit-tracer, once every layer from 0 is in the folder",
                       "from circuit_tracer.utils.hf_utils import load_transcoder_from_hub\n"
                       'transcoders, config = load_transcoder_from_hub("{0.repo}/{0.folder}")')}


@dataclass(frozen=True)
class Entry:
    """A card's entry for one SAE.

    Args:
        address: its address, in a folder of its repository.
        format: the format of its files, one of `formats.FORMATS`.
        activations: the activations it was trained on, such as `gpt2, layer 8, resid_post`.
        activation: its activation function as written, with its K if any.
        d_in: width of the activations.
        d_sae: number of latents.
        measures: the results of `sae eval`; the card shows `MEASURES`.
        remark: a sentence on how the files differ from the run; None if they do not.
        base_model: the hub id of the language model; None if it is not on the hub.
        dataset: the hub id of the text; None if it is not on the hub.
        transcodes: whether it is a transcoder, measured on two stores.
    """

    address: Address
    format: str
    activations: str
    activation: str
    d_in: int
    d_sae: int
    measures: Mapping[str, Any]
    remark: str | None = None
    base_model: str | None = None
    dataset: str | None = None
    transcodes: bool = False


def card_with(entry: Entry, present: str | None) -> str | None:
    """A repository's card with an SAE's entry added.

    Args:
        entry: the SAE's.
        present: the present card; None for none.

    Returns:
        The text; None if the present card was not written by this tool, and so must be left alone.
    """
    if present is None:
        return f"{_metadata(entry)}\n# {entry.address.repo}\n\n{_written(entry, [], [])}\n"
    before, start, rest = present.partition(START)
    inside, end, after = rest.partition(END)
    if not (start and end):
        return None
    own = f"`{entry.address.folder}`"
    lines = [line for line in inside.splitlines() if line.startswith("| `") and not line.startswith(f"| {own} |")]
    remarks = [line for line in inside.splitlines() if line.startswith("- `") and not line.startswith(f"- {own}:")]
    return before + _written(entry, lines, remarks) + after


def _metadata(entry: Entry) -> str:
    """The YAML header, by which the hub's search finds the repository."""
    from huggingface_hub import ModelCardData

    library = entry.format if entry.format in LOADING else "saecli"
    data = ModelCardData(library_name=library, base_model=entry.base_model,
                         datasets=[entry.dataset] if entry.dataset else None,
                         tags=["sparse-autoencoder", "mechanistic-interpretability", "saecli"])
    return f"---\n{data.to_yaml()}\n---\n"


def _written(entry: Entry, lines: list[str], remarks: list[str]) -> str:
    """The text between `START` and `END`: the SAE, and the table lines and remarks of others."""
    own = f"`{entry.address.folder}`"
    shown = (own, entry.activations, entry.activation, number(entry.d_in), number(entry.d_sae),
             *(number(entry.measures.get(name)) for name in MEASURES))
    table = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *sorted([*lines, f"| {' | '.join(shown)} |"])]
    stores = "--data STORE --target STORE" if entry.transcodes else "--data STORE"
    remarks = sorted([*remarks, *([f"- {own}: {entry.remark}."] if entry.remark else [])])
    return "\n".join([
        START, f"Sparse autoencoders, measured by `sae eval` on held-out rows: {FORMULAS}.", "", *table, "",
        *([*remarks, ""] if remarks else []), "With saecli:", "", f"    sae eval {entry.address} {stores}", "",
        "```python", "import saecli", f'sae = saecli.load_sae("{entry.address}")', "```", "", _elsewhere(entry), END])


def _elsewhere(entry: Entry) -> str:
    """How to load the SAE in the library whose format it is in."""
    if entry.format not in LOADING:
        return f"The files are in the format {entry.format}."
    library, code = LOADING[entry.format]
    return f"With {library}:\n\n```python\n{code.format(entry.address)}\n```"


README = "README.md"


@dataclass(frozen=True)
class Repository:
    """A repository on the hub that the user may write to, or create.

    Args:
        address: the repository, and the folder in it for the SAE.
        files: the names of all its files; None if it does not exist yet.
        card: its README.md; None if it has none.
    """

    address: Address
    files: frozenset[str] | None = None
    card: str | None = None

    @classmethod
    def find(cls, address: Address, private: bool) -> Self:
        """Look up the repository, with the hub client's token.

        Args:
            address: as in the class.
            private: refuse an existing public repository.

        Raises:
            HubError: there is no token, or a read-only one, or the hub cannot be reached or refuses.
            ConfigError: the repository is public, and `private` is set.
        """
        from huggingface_hub import HfApi, get_token, hf_hub_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

        if reason := why_unreachable():
            raise HubError(f"the Hugging Face hub cannot be reached to push to {address.repo}: {reason}; connect to "
                           f"the network")
        if get_token() is None:
            raise HubError(f"pushing to {address.repo} needs a token that may write: {LOG_IN}")
        api = HfApi()
        with hub_errors(address, writing=True):
            token = api.whoami().get("auth", {}).get("accessToken", {})
            if token.get("role") == "read":
                raise HubError(f"the token may only read: expected one that may write to {address.repo}, {LOG_IN}")
            try:
                info = api.model_info(address.repo, timeout=30)
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return cls(address)
            if private and not info.private:
                raise ConfigError(f"{address.repo} exists and is public; leave --private out, push to another, or "
                                  "make it private in its settings on the hub")
            files = frozenset(file.rfilename for file in info.siblings or ())
            if README not in files:
                return cls(address, files)
            text = Path(hf_hub_download(address.repo, README)).read_text(encoding="utf-8")
            return cls(address, files, text)

    def push(self, folder: Path, card: str | None, private: bool, message: str) -> str:
        """Upload the files of a local folder to the repository's folder, in one commit.

        An SAE in another format there is removed by the same commit, since a reader might take that one; of the same
        format, circuit-tracer's other layers stay.

        Args:
            folder: holds the files, and nothing else.
            card: the new README.md; None leaves the present one.
            private: create the repository as private, if it does not exist.
            message: the commit's message.

        Returns:
            The commit's URL.

        Raises:
            HubError: the hub cannot be reached, or refuses.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

        api, repo = HfApi(), self.address.repo
        new = {self._inside(path.name): path for path in sorted(folder.iterdir())}
        own = format_of(path.name for path in folder.iterdir())
        others = [pattern for form in FORMATS if form != own for pattern in FORMATS[form].files]
        here = [name.name for name in map(PurePosixPath, self.files or ()) if self._inside(name.name) == str(name)]
        known = {self._inside(name) for pattern in others for name in matching(here, pattern)}
        additions: Mapping[str, Path | bytes] = new if card is None else {**new, README: card.encode()}
        operations = [*(CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
                        for name, content in additions.items()),
                      *(CommitOperationDelete(name) for name in sorted(known - new.keys()))]
        with hub_errors(self.address, writing=True), bars_on_terminals():
            if self.files is None:
                api.create_repo(repo, private=private or None, exist_ok=True)
            return api.create_commit(repo, operations, commit_message=message).commit_url

    def _inside(self, name: str) -> str:
        return f"{self.address.folder}/{name}" if self.address.folder else name
