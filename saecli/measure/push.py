"""`push`: an SAE on the Hugging Face hub, in another library's format, with a model card of its measures."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from ..base.console import Listener, listening
from ..base.errors import ConfigError, number
from ..base.home import Home
from ..extract.options import BUNDLED
from ..sae import formats
from ..sae.dictionary import SAE
from ..sae.formats import WRITABLE
from ..sae.hub import Address, upload, writable
from ..sae.library import SAELike
from .evaluate import check_tokens_of_model, evaluated
from .export import Conversion, can_be_written, converted
from .measured import Measured, RowsLike, measured

LOCAL = ("data", "data_hash", "beside", "target")  # of an origin: names in the home
MEASURES = ("rows", "l0", "fvu", "explained_variance", "cosine", "dead_fraction", "ce_recovered", "kl")
START, END = "<!-- sae push: the table keeps a line for each SAE -->", "<!-- end of sae push -->"
LIBRARIES = {  # by format: how the library loads the SAE from the hub
    "saelens": 'sae_lens.SAE.from_pretrained("{0.repo}", "{0.folder}")',
    "sparsify": 'sparsify.SparseCoder.load_from_hub("{0.repo}", hookpoint="{0.folder}")',
    "circuit-tracer": 'circuit_tracer.utils.hf_utils.load_transcoder_from_hub("{0.repo}/{0.folder}")  # all layers'}


def push(sae: SAELike, repo: str, data: RowsLike = None, *, private: bool = False, format: str = "auto",
         model: str | None = None, tokens: int | None = None, device: str = "auto",
         home: str | Path | Home | None = None, progress: bool | Listener = False) -> dict[str, Any]:
    """Push an SAE to the Hugging Face hub, with the token of `hf auth login` or HF_TOKEN; CLI equivalent: `sae push`.

    It is measured on held-out rows of a store, with the other arguments as in `evaluate`; returns the document that
    `sae push --json` prints.

    Args:
        repo: `user/repo`, created if missing, or `user/repo/folder`; the default folder has the run's name.
        private: create the repository as private; an existing public one is refused.
        format: auto: saelens if it gives the same codes on all held-out rows, else native.
    """
    form, listener, home = formats.named(format), listening(progress), Home.at(home)
    if form not in ("auto", *WRITABLE):
        raise ConfigError(f"--format must be one of {', '.join(('auto', *WRITABLE))}, got {form!r}", option="format")
    check_tokens_of_model(tokens, model)
    name = "sae" if sae is None or isinstance(sae, SAE) else Path(sae).resolve().name
    address = Address.parse(repo)
    if address is None or address.revision is not None or Address.parse(f"{address.repo}/{name}") is None:
        raise ConfigError(f"cannot push to {repo!r}: expected USER/REPO or USER/REPO/FOLDER, without a revision, such "
                          "as someone/my-saes", option="repo")
    address = address if address.folder else address.at(name)
    one = measured(home, sae, data, "test", device, listener)
    present = writable(address, private)
    found = _conversion(one, form, listener)
    (measures,) = evaluated([replace(one, saved=found.written)], model, tokens, listener)
    card = _card(present, address, found, one, measures)
    if card is None:
        listener.note(f"README.md of {address.repo} was not written by `sae push` and is left as it is")
    with TemporaryDirectory() as scratch:
        formats.save(found.written, found.format, Path(scratch, address.folder))
        files = sorted(path.name for path in Path(scratch, address.folder).iterdir())
        if card is not None:
            card.save(Path(scratch, "README.md"))
        url = upload(Path(scratch), address, private)
    if found.remark is not None:
        listener.note(found.remark)
    return {"run": one.subject.name, "repo": address.repo, "folder": address.folder, "format": found.format,
            "written_as": found.written.sae.activation.name, "deviation": found.deviation, "files": files,
            "card": card is not None, "url": url, "measures": measures}


def _conversion(one: Measured, form: str, listener: Listener) -> Conversion:
    # Without what is local: paths of a model, names of stores.
    origin = {name: Path(value).name if name == "model" and Path(value).is_absolute() else value
              for name, value in one.saved.origin.items() if name not in LOCAL}
    saved = replace(one.saved, origin=origin)
    if form != "auto":
        return converted(saved, form, lambda: one, listener)
    why = f"saelens has no {'transcoder with ' if saved.is_transcoder else ''}{saved.sae.activation.name}"
    if can_be_written(saved, "saelens"):
        found = converted(saved, "saelens", lambda: one, listener)
        if (change := found.deviation) is None or not change["rows_that_differ"]:
            return found
        why = (f"with saelens' {found.written.sae.activation.name} {change['rows_that_differ']:,} of "
               f"{change['rows']:,} held-out rows differ; --format saelens writes it all the same")
    listener.note(f"{one.subject.name} is written as native: {why}")
    return converted(saved, "native", lambda: one, listener)


def _card(present: ModelCard | None, address: Address, found: Conversion, one: Measured,
          measures: dict[str, Any]) -> ModelCard | None:
    """The repository's card with a line for the SAE; None if `sae push` did not write the present one."""
    sae, origin, source = found.written.sae, found.written.origin, one.store.meta.source
    if present is None:
        model = one.saved.origin.get("model", "")
        data = ModelCardData(
            library_name=found.format if found.format in LIBRARIES else "saecli",
            base_model=None if Path(model).is_absolute() or model in ("", *BUNDLED) else model,
            datasets=[source["dataset"]] if one.subject.data and "dataset_revision" in source else None,
            tags=["sparse-autoencoder", "mechanistic-interpretability", "saecli"])
        present = ModelCard(f"---\n{data.to_yaml()}\n---\n\n# {address.repo}\n\n{START}{END}\n")
    before, start, rest = present.text.partition(START)
    inside, end, after = rest.partition(END)
    if not end:
        return None
    hooks = [f"{to}layer {origin[f'{of}layer']}, {origin.get(f'{of}site')}"
             for of, to in (("", ""), ("target_", "to ")) if f"{of}layer" in origin]
    row = {"SAE": f"`{address.folder}`",
           "activations": ", ".join(filter(None, [origin.get("model"), *hooks])) or one.store.name,
           "activation": f"{sae.activation.name} {sae.k or ''}".strip(), "d_in": number(sae.d_in),
           "d_sae": number(sae.d_sae), **{name: number(measures.get(name)) for name in MEASURES},
           "remark": found.remark or ""}
    lines = {line.split(" | ")[0]: line for line in inside.splitlines() if line.startswith("| `")}
    lines[f"| {row['SAE']}"] = f"| {' | '.join(row.values())} |"
    stores = "--data STORE --target STORE" if one.saved.is_transcoder else "--data STORE"
    present.text = before + "\n".join([
        start, "Sparse autoencoders, measured by `sae eval` on held-out rows. fvu: `E||x_hat - x||^2 / (E||x||^2 - "
        "||E x||^2)`; ce_recovered: `(ce_zero - ce_spliced) / (ce_zero - ce_clean)`; kl: nats per token.", "",
        f"| {' | '.join(row)} |", "|---" * len(row) + "|", *sorted(lines.values()), "",
        "```", f"sae eval {address} {stores}", f'saecli.load_sae("{address}")',
        *(code.format(address) for form, code in LIBRARIES.items() if form == found.format), "```", end]) + after
    return present
