"""Train an SAE on through the language model that it acts in.

Minimises KL(clean || spliced) + fvu_weight FVU per token, with RUN's reconstructions in place of the spliced model's
activations. L0 stays. RUN is an SAE, a transcoder or a crosscoder, of one model.

The text is the tokens of RUN's store, or of --data; with --dataset a text that is streamed. Prints FVU, L0, KL and
CE recovered on held-out text before and after. Saves a run with the better SAE.

Options marked "..." can be given several times: one run per combination, one after another.

Example: sae finetune first --model google/gemma-2-2b
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.home import now
from ..train.options import FINETUNED
from .options import Given, Json, Run, Session, configured, start
from .train import ResumeOption, demand_alone, train_and_print

if TYPE_CHECKING:
    from ..train.jobs import Job


@configured(repeated=True, more=FINETUNED)
def command(
    ctx: typer.Context,
    options: tuple[Given, ...],
    run: Run = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Activation store, by name or folder; for a crosscoder several, in order.",
            show_default="the one that the run was trained on, else the newest",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the new run.", show_default="finetune, activation and a number"),
    ] = None,
    resume: ResumeOption = False,
    json: Json = False,
) -> None:
    from ..train.finetune import resume_finetuning

    session = start(ctx)
    with ExitStack() as claims:
        if resume:
            demand_alone(session)
            jobs = [resume_finetuning(session.home, name, session.console, claims)]
        else:
            jobs = _new_jobs(session, options, claims)
        train_and_print(session, jobs)


def _new_jobs(session: Session, options: Sequence[Given], claims: ExitStack) -> list[Job]:
    from ..train.finetune import FinetuneSettings, Opened
    from ..train.jobs import Job, claim_folder, run_names

    sae, data, name = (session.options[option] for option in ("run", "data", "name"))
    settings = [FinetuneSettings.of(option.values) for option in options]
    named = (data, None) if data else None
    opened = Opened.open(session.home, sae, settings[0], named, session.console)
    stem = f"finetune-{opened.text.placement.sae.activation.name}"
    created, jobs = now(), []
    names = run_names(name, [option.varied for option in options])
    for its_name, its_settings, option in zip(names, settings, options, strict=True):
        run = opened.run(its_settings, created)
        folder = claim_folder(session.home, its_name, stem, claims)
        jobs.append(Job(folder, run, option.values, option.varied))
    return jobs
