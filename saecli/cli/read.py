"""Show the latents that fire on a prompt, token by token.

Then lists the strongest latents: the largest code and its token, the number of tokens that each fires on, and how
often it fires in the run's store. A transcoder's codes are of what it reads.

Special tokens (BOS, a chat's control tokens) and a text's first token, the attention sink without BOS, have no codes.
A text over 4,096 tokens, or the model's limit, is read in windows of that length.

With --why, the latents that made the model say a token after the text: attributions along their codes, with the
reconstruction error kept, and the measured change when the strongest are removed, each alone and together. One step
predicts single removals best: in SmolLM2 the correlation is 0.88, with 10 steps 0.63, whose sum over all latents is the
nearer one (off by 0.4 nats, with one step 9). A step or a removal there takes 0.2 seconds for 30 tokens. --also asks an
SAE at another hook point, and removes the latents of all at once too.

Example: sae read first --prompt "Once upon a time"
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.errors import ConfigError, one_line
from ..base.options import all_arguments
from ..measure.functions import read
from .options import PATH, Json, Run, configured, start

MESSAGES = "a JSON list of messages, each with role and content"


@configured(read)
def command(
    ctx: typer.Context,
    options: Mapping[str, Any],
    run: Run = None,
    prompt: Annotated[str | None, typer.Option(help="Read this text.")] = None,
    text: Annotated[
        Path | None, typer.Option(help="Read the text in this UTF-8 file.", **PATH)
    ] = None,
    chat: Annotated[
        Path | None,
        typer.Option(
            help=f"Read the chat in this file: {MESSAGES}, for the chat template.",
            **PATH,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Write a page here: the text coloured, with each token's latents under the pointer.",
            **PATH,
        ),
    ] = None,
    json: Json = False,
) -> None:
    words = _given(prompt, text, chat)
    from ..show.prompts import coloured, prompt_tables, why_tables, write_prompt_page

    session, arguments = start(ctx), all_arguments(read, options)
    is_coloured = arguments["latents"] is not None
    if html is not None and not is_coloured:
        arguments["latents"] = "listed"
    document = session.call(read, sae=run, text=words, **arguments)
    if html is not None:
        write_prompt_page(html, document)
        session.console.note(f"wrote {html}; open it in a browser")
    for listing in (document, document["compare"]):
        if listing is not None:
            listing["latents"] = listing["latents"][: arguments["top"]]
    if document["why"] is not None:
        shown = why_tables(document)
    else:
        shown = coloured(document) if is_coloured else prompt_tables(document)
    session.console.print_result(document, *shown)


def _given(prompt: str | None, text: Path | None, chat: Path | None) -> Any:
    """The text, or the messages, that the user gave in one of three ways."""
    given = {"--prompt": prompt, "--text": text, "--chat": chat}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        got = " and ".join(names) or "none"
        raise ConfigError(f"expected one of {', '.join(given)}, got {got}; give one")
    return prompt if prompt is not None else _file(text, chat)


def _file(text: Path | None, chat: Path | None) -> Any:
    from ..base.files import read_json

    try:
        if text is not None:
            return text.read_text(encoding="utf-8-sig")
        assert chat is not None  # one of them is given
        return read_json(chat, list[dict[str, Any]])
    except (OSError, ValueError) as error:
        expected = MESSAGES if text is None else "UTF-8; give a text itself by --prompt"
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(f"cannot read {text or chat}: {reason}; expected {expected}") from error
