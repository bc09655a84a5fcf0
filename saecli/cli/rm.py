"""Remove stores and runs with all their files.

Lists them first, with sizes and the runs trained on a store.

Example: sae rm first --yes
"""

import sys
from typing import Annotated, Literal

import typer

from ..base.errors import ConfigError
from ..base.words import counted, size_words
from .options import Json, start


def command(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Names of stores and runs.")],
    kind: Annotated[
        Literal["store", "run"] | None,
        typer.Option(help="Disambiguate a name that a store and a run share.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    from ..train.listing import removable, remove

    session = start(ctx)
    entries = removable(session.home, names, kind)
    for entry in entries:
        users = f"; trained on it: {', '.join(entry['users'])}" if entry["users"] else ""
        session.console.note(
            f"{entry['kind']} {entry['name']}: {size_words(entry['bytes'])} in {entry['path']}{users}"
        )
    if not yes:  # asked on stderr, so that stdout holds the result alone
        print(
            f"remove {counted(len(entries), 'folder')}? [y/N] ", end="", file=sys.stderr, flush=True
        )
        if not (answer := sys.stdin.readline()):
            print(file=sys.stderr)  # so that the sentence has a line of its own
            raise ConfigError("--yes is needed where nobody can be asked; give it to remove them")
        if not answer.strip().lower().startswith("y"):
            session.console.note("nothing was removed")
            entries = []
    for entry in entries:
        remove(session.home, entry)
    freed = sum(entry["bytes"] for entry in entries)
    removed = f"removed {counted(len(entries), 'folder')}, {size_words(freed)}"
    session.console.print_result(
        {"removed": entries, "bytes": freed}, *([removed] if entries else [])
    )
