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
    from ...store.removal import removable

    session = start(ctx, json)
    found = removable(session.home, names, kind)
    for one in found:
        users = f"; trained on it: {', '.join(run.name for run in one.users)}" if one.users else ""
        session.console.note(f"{one.kind} {one.name}: {size_words(one.bytes)} in {one.path}{users}")
    if not yes and not _agreed(f"remove {'it' if len(found) == 1 else f'these {len(found)}'}?"):
        session.console.note("nothing was removed")
        found = []
    for one in found:
        one.remove()
    total = sum(one.bytes for one in found)
    document = {"removed": [{"kind": one.kind, "name": one.name, "path": str(one.path), "bytes": one.bytes}
                            for one in found], "bytes": total}
    words = f"removed {counted(len(found), 'folder')}, {size_words(total)}"
    session.console.result(document, *[words] * bool(found))


def _agreed(question: str) -> bool:
    """Whether the answer begins with y; asked on stderr, so that stdout holds the result alone."""
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline()
    if not answer:
        print(file=sys.stderr)
        raise ConfigError("--yes is needed where nobody can be asked; give it to remove them", option="yes")
    return answer.strip().lower().startswith("y")
