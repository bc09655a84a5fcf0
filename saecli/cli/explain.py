"""Label latents by rules on tokens, and score the labels on held-out texts.

A label is the rule that best tells, on training rows, where a latent fires: at some tokens, after or before some,
at words that end or begin alike, digits, capitals or punctuation, or at a position. Its scores are balanced
accuracies on held-out excerpts of 32 tokens, firing ones against random ones and those where a latent near it fires
(by cosine, by co-firing): does any token match, and which tokens do. Chance is 0.5; the same labels shuffled among
latents show it.

Labels are added to labels.json in the run's folder, and shown by read, report, steer and sparsity, but for rules
and a model's labels that score near chance. Labels given by hand or taken with --labels go before.

With --endpoint and --model-name a language model labels latents too, and judges all labels: given one, in which
excerpts does the latent fire (detection), and are the marked tokens those on which it does (fuzzing)? Beside the
model's labels and the rules' stand the model's, shuffled: the floor. The key is OPENAI_API_KEY. Answers are
kept in answers.jsonl, next to the labels: the same command again sends what has no answer. See --dry-run first: a
latent takes about 40 requests.

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
