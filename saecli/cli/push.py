"""Upload a run to the Hugging Face hub, with a model card.

The SAE is measured as by `sae eval` on held-out rows; the card in its folder has the figures, and a repository
without a card gets it too. Removes files of other formats from the folder. The token is that of `hf auth login` or
HF_TOKEN, and is not stored.

Example: sae push first someone/my-saes --private
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ..derive.functions import push
from .options import Json, configured, start


@configured(push)
def command(
    ctx: typer.Context,
    options: Mapping[str, Any],
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run name, folder that holds an SAE, or a pattern such as 't-*' of a set of transcoders, one per "
            "layer.",
        ),
    ],
    repo: Annotated[
        str,
        typer.Argument(
            metavar="USER/REPO",
            help="Repository, created if missing; USER/REPO/FOLDER names "
            "the folder, else it is RUN's name.",
        ),
    ],
    json: Json = False,
) -> None:
    session = start(ctx)
    names = session.home.runs.matching([run])
    document = session.call(push, sae=names, repo=repo, **options)
    pushed = document.get("run", f"{len(names)} transcoders")
    session.console.print_result(
        document,
        f"pushed {pushed} to {document['repo']}/{document['folder']} as "
        f"{document['format']}: {', '.join(document['files'])}",
        document["url"],
    )
