"""`sae push`."""

from typing import Annotated, Literal

import typer

from ...measure.evaluate import TOKENS
from ...measure.push import PushOptions, pushed
from ...sae.fetch import Address
from ...sae.formats import WRITABLE, named
from ..options import Device, Json, run_names, start
from .eval import Data, Model, Tokens, given

Run = Annotated[str, typer.Argument(metavar="RUN", help="Run name, or folder that holds an SAE.",
                                    autocompletion=run_names)]
Repo = Annotated[str, typer.Argument(metavar="USER/REPO", help="Repository on the Hugging Face hub, which is made if "
                                     "need be; /FOLDER after it names the folder in it, else a folder of RUN's name.")]
Private = Annotated[bool, typer.Option("--private", help="Create the repository as private; an existing public one is "
                                                         "refused.")]
Form = Annotated[Literal[("auto", *WRITABLE)], typer.Option(
    "--format", help="Format of the files. auto: saelens if it gives the same codes on all held-out rows, else "
                     "native.")]


def command(ctx: typer.Context, run: Run, repo: Repo, private: Private = False, form: Form = "auto", data: Data = None,
            model: Model = None, tokens: Tokens = TOKENS, device: Device = "auto", json: Json = False) -> None:
    """Put a run on the Hugging Face hub, with a model card.

    The SAE is measured as by `sae eval` on its held-out rows, and the card has the table. An existing folder is
    replaced, in one commit; of an existing card, only the part that this command wrote. The token is that of
    `hf auth login` or HF_TOKEN, and is not stored.

    Example: sae push first someone/my-saes --private
    """
    session = start(ctx, json)
    options = PushOptions(private, form, model, given(ctx, "tokens"), device)
    document = pushed(session.home, run, repo, data, options, session.console)
    address = Address(document["repo"], document["folder"])
    session.console.result(document, f"pushed {document['run']} to {address} as {document['format']}: "
                                     f"{', '.join(document['files'])}", document["url"])


command.spelling = named
