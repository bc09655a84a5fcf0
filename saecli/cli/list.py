"""List the stores and runs in the home folder, newest first.

Example: sae list --check
"""

from typing import Annotated

import typer

from ..base.errors import StoreError
from ..base.words import counted
from .options import Json, start


def command(
    ctx: typer.Context,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare every shard with its checksum; exit status 1 if one is damaged.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    from ..show.tables import listing_tables
    from ..train.listing import list_home

    session = start(ctx)
    document = session.call(list_home, check=check)
    session.console.print_result(document, *listing_tables(document))
    if not check:
        return
    if document["problems"]:
        problems = counted(len(document["problems"]), "problem")
        raise StoreError(f"found {problems}; the list says where, and what to do")
    shards = counted(sum(store["shards"] for store in document["stores"]), "shard")
    session.console.note(
        f"checked {counted(len(document['stores']), 'store')}, {shards}: all whole"
    )
