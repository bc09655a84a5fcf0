from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.errors import ConfigError
from ..base.home import checked_name, now
from ..train.finetune_options import FINETUNED
from .options import Data, Given, Json, Runs, Session, configured, start
from .train import Resume, demand_alone, train_and_print

if TYPE_CHECKING:
    from ..train.jobs import Job


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
    from ..train.finetune import resume_jobs

    session = start(ctx)
    with ExitStack() as claims:
        if resume:
            demand_alone(session)
            groups = [resume_jobs(session.home, name, session.console, claims)]
        else:
            groups = _new_jobs(session, options, claims)
        train_and_print(session, groups)


def _new_jobs(session: Session, options: Sequence[Given], claims: ExitStack) -> list[list[Job]]:
    """The runs to train: of one SAE one for each combination of options, or one for each SAE of a set."""
    from ..train.finetune import Opened, Settings
    from ..train.jobs import Job, claim_folder, run_names

    saes, data, name = (session.options[option] for option in ("runs", "data", "name"))
    saes = saes or [None]
    together = options[0].values.get("together", False)
    if len(saes) > 1 and not together:
        raise ConfigError(
            f"sae finetune trains one run, or by --together several at once, got {len(saes)}; name one, or give "
            "--together"
        )
    if len(options) > 1 and together:
        raise ConfigError(
            f"--together takes each option once, got {len(options)} combinations; give one value of each"
        )
    settings = [Settings.of(option.values) for option in options]
    named = [(data, None)] * len(saes) if data else []
    opened = Opened.open(session.home, saes, settings[0], named, session.console)
    stem = f"finetune-{opened[0].text.hooked.sae.activation.name}"
    created, jobs = now(), []
    names = run_names(name, [option.varied for option in options])
    for one in opened:
        if together:
            names = [checked_name(f"{name or 'together'}-{Path(one.start.name).name}")]
        for its_name, its_settings, option in zip(names, settings, options, strict=True):
            run = one.run(its_settings, created)
            folder = claim_folder(session.home, its_name, stem, claims)
            jobs.append(Job(folder, run, option.values, option.varied))
    return [jobs]
