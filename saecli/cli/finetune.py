from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import ConfigError
from ..base.home import checked_name, now
from ..train.finetune_options import FINETUNED
from .options import Data, Given, Json, Runs, configured, home_of, start
from .train import Resume, demand_alone, train_and_print


@configured(repeated=True, more=FINETUNED)
def command(
    ctx: typer.Context,
    options: tuple[Given, ...],
    runs: Runs = None,
    data: Data = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the new run.",
            show_default="finetune, activation and a number",
            autocompletion=lambda ctx: home_of(ctx).runs.unfinished(),
        ),
    ] = None,
    resume: Resume = False,
    json: Json = False,
) -> None:
    """Train an SAE on through the language model that it acts in.

    Minimises KL(clean || spliced) + fvu_weight FVU per token; the spliced model has RUN's reconstructions in place of
    its activations. L0 stays. RUN is an SAE, a transcoder or a crosscoder.

    The text is the tokens of RUN's store, or of --data; with --dataset a text that is streamed. Prints FVU, L0, KL and
    CE recovered on text kept out of training before and after. Saves a run, with the better SAE of the two.

    Options marked "..." can be given several times: one run per combination, trained together.

    sae finetune 't-*' --together --name u trains a set on one objective, and keeps the better set;
    --resume --name 'u-*' goes on with it.

    Example: sae finetune first --model google/gemma-2-2b
    """
    from ..store.opening import note_when_stopped
    from ..train.finetune import Opened, Settings, resume_jobs
    from ..train.jobs import NewRun, claim_jobs, run_names

    session = start(ctx)
    together = options[0].values.get("together", False)
    with ExitStack() as claims:
        with note_when_stopped(session.console):
            if resume:
                demand_alone(session)
                groups = [resume_jobs(session.home, name, session.console, claims)]
            else:
                chosen: list[str | None] = [*runs] if runs else [None]
                _demand_one(len(chosen), len(options), together)
                settings = [Settings.of(option.values) for option in options]
                named = [(data, None)] * len(chosen) if data else []
                opened = Opened.open(session.home, chosen, settings[0], named, session.console)
                created = now()
                names = run_names(name, [option.varied for option in options])
                if together:
                    prefix = name or "together"
                    names = [
                        checked_name(f"{prefix}-{Path(one.start.name).name}") for one in opened
                    ]
                new_runs = [
                    NewRun(
                        its_name,
                        one.run(its_settings, created),
                        option.values,
                        option.varied,
                    )
                    for its_name, one, its_settings, option in zip(
                        names,
                        opened * len(options),
                        settings * len(opened),
                        options * len(opened),
                        strict=True,
                    )
                ]
                stem = f"finetune-{opened[0].text.hooked.sae.activation.name}"
                groups = claim_jobs(session.home, new_runs, stem, session.console, claims)
        train_and_print(session, groups)


def _demand_one(runs: int, combinations: int, together: bool) -> None:
    if runs > 1 and not together:
        raise ConfigError(
            f"sae finetune trains one run, or by --together several at once, got {runs}; name one, or give --together"
        )
    if combinations > 1 and together:
        raise ConfigError(
            f"--together takes each option once, got {combinations} combinations; give one value of each"
        )
