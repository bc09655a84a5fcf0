from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from ..base.home import now
from ..train.finetune_options import FINETUNED
from .options import Data, Given, Json, Run, configured, home_of, start
from .train import Resume, demand_alone, train_and_print

Name = Annotated[
    str | None,
    typer.Option(
        help="Name of the new run.",
        show_default="finetune, activation and a number",
        autocompletion=lambda ctx: home_of(ctx).runs.unfinished(),
    ),
]


@configured(repeated=True, more=FINETUNED)
def command(
    ctx: typer.Context,
    options: tuple[Given, ...],
    run: Run = None,
    data: Data = None,
    name: Name = None,
    resume: Resume = False,
    json: Json = False,
) -> None:
    """Train an SAE on through the language model that it acts in.

    Minimises KL(clean || spliced) + fvu_weight FVU per token; the spliced model has RUN's reconstructions in place of
    its activations. L0 stays. RUN is an SAE, a transcoder or a crosscoder.

    The text is the tokens of RUN's store, or of --data; with --dataset a text that is streamed. Prints FVU, L0, KL and
    CE recovered on text kept out of training before and after. Saves a run, with the better SAE of the two.

    Options marked "..." can be given several times: one run per combination, trained together.

    Example: sae finetune first --model google/gemma-2-2b
    """
    from ..store.opening import note_when_stopped
    from ..train.finetune import Opened, Settings, resume_job
    from ..train.jobs import NewRun, claim_jobs, run_names

    session = start(ctx)
    with ExitStack() as claims:
        with note_when_stopped(session.console):
            if resume:
                demand_alone(session)
                groups = [[resume_job(session.home, name, session.console, claims)]]
            else:
                names = run_names(name, [option.varied for option in options])
                settings = [Settings.of(option.values) for option in options]
                opened = Opened.open(session.home, run, settings[0], data or [], session.console)
                created = now()
                new_runs = [
                    NewRun(name, opened.run(its_settings, created), option.values, option.varied)
                    for name, its_settings, option in zip(names, settings, options, strict=True)
                ]
                stem = f"finetune-{opened.text.hooked.sae.activation.name}"
                groups = claim_jobs(session.home, new_runs, stem, session.console, claims)
        train_and_print(session, groups)
