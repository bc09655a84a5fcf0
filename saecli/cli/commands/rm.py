"""`sae rm`."""

import sys
from typing import Annotated, Literal

import typer

from ...base.errors import ConfigError, counted, size_words
from ..options import Json, all_names, start

Names = Annotated[list[str], typer.Argument(metavar="NAME", help="Names of stores and runs.", autocompletion=all_names)]
KindOption = Annotated[Literal["store", "run"] | None, typer.Option(
    "--kind", help="Disambiguate a name that a store and a run share.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def command(ctx: typer.Context, names: Names, kind: KindOption = None, yes: Yes = False, json: Json = False) -> None:
    """Remove stores and runs with all their files.

    They are listed first, with their size and, for a store, the runs that were trained on it.

    Example: sae rm first --yes
    """
    from ...store.opening import folder_bytes, removable

    session = start(ctx, json)
    found = {one: folder_bytes(one.path) for one in removable(session.home, names, kind)}
    for one, size in found.items():
        users = f"; trained on it: {', '.join(run.name for run in one.users)}" if one.users else ""
        session.console.note(f"{one.kind} {one.path.name}: {size_words(size)} in {one.path}{users}")
    if not yes:  # asked on stderr, so that stdout holds the result alone
        what = "it" if len(found) == 1 else f"these {len(found)}"
        print(f"remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
        if not (answer := sys.stdin.readline()):
            raise ConfigError("--yes is needed where nobody can be asked; give it to remove them", option="yes")
        if not answer.strip().lower().startswith("y"):
            session.console.note("nothing was removed")
            found = {}
    for one in found:
        one.remove()
    document = {"removed": [{"kind": one.kind, "name": one.path.name, "path": str(one.path), "bytes": size}
                            for one, size in found.items()], "bytes": sum(found.values())}
    words = f"removed {counted(len(found), 'folder')}, {size_words(sum(found.values()))}"
    session.console.result(document, *[words] * bool(found))
