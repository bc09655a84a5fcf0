"""Label latents by rules on tokens, and score the labels on held-out texts.

A label is the rule that best predicts, on training rows, where a latent fires: at, after or before some tokens, at
words that end or begin alike, digits, capitals or punctuation, or at a position. Its scores are balanced accuracies
on held-out excerpts of 32 tokens, firing ones against random ones and those where a latent near it fires (by cosine,
by co-firing): does any token match, and which do. Chance is 0.5, shown by the same labels shuffled among latents.

Labels are added to labels.json in the run's folder. read, report, steer and sparsity show them, those by hand or
--labels first, but no rule or model's label that scores near chance.

With --endpoint and --model-name a language model labels latents too, and judges all labels: given one, in which
excerpts does the latent fire (detection), and do the marked tokens fire (fuzzing)? The model's labels, shuffled, are
the floor. The key is OPENAI_API_KEY. Answers are kept in answers.jsonl, next to the labels: the same command again
sends what has no answer. See --dry-run first: a latent takes about 40 requests.

Cost: encodes at most 131,072 training and 32,768 held-out rows; about 10 seconds for 2,304 latents.

Example: sae explain first
"""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ..measure.functions import explain
from .options import Json, Run, configured, start


@configured(explain)
def command(
    ctx: typer.Context,
    options: Mapping[str, Any],
    run: Run = None,
    top: Annotated[int, typer.Option(min=1, help="List this number of latents here.")] = 40,
    json: Json = False,
) -> None:
    from ..show.measures import explanation_tables

    session = start(ctx)
    document = session.call(explain, sae=run, **options)
    session.console.print_result(document, *explanation_tables(document, top))
