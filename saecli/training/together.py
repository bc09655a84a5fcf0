"""What a training asks of the processes that take part in it."""

from ..distributed import everyone, latents_axis, rows_axis
from ..errors import ConfigError
from .plan import Plan


def demand_shareable(plan: Plan, trainings: int) -> None:
    """Refuse what several processes cannot do together.

    Args:
        plan: what is trained.
        trainings: how many are trained at once.

    Raises:
        ConfigError: it cannot be shared among the rows, or among the latents, of as many processes as there are.
    """
    if everyone().size == 1:
        return
    training, rows, latents = plan.training, rows_axis().size, latents_axis().size
    if trainings > 1:
        raise ConfigError(None, "options given several times train {trainings} SAEs in one process: expected one, got "
                                "{processes}", "run it without torchrun, or give each value to a command of its own",
                          trainings=trainings, processes=everyone().size)
    if training.batch_size < rows:
        raise ConfigError("batch_size", "must be at least the number of processes, {least}, which share every batch, "
                                        "got {got}", least=rows, got=training.batch_size)
    if training.sparsity == "kl" and rows > 1:
        raise ConfigError("sparsity", "kl takes each batch as a whole, since its firing rates are those of one: "
                                      "expected one process, or all to share latents and none the rows, got {got} that "
                                      "share rows", "give {latent_shards} {all}, or use another penalty", got=rows,
                          all=everyone().size)
    if latents == 1:
        return
    if training.d_sae % latents:
        raise ConfigError("d_sae", "must be a multiple of {latent_shards}, {factor}, got {got}", "use {near}",
                          factor=latents, got=training.d_sae,
                          near=training.d_sae - training.d_sae % latents or latents)
    if not plan.activation.shares_latents:
        raise ConfigError("act", "{name} looks at all latents of a row at once, which {latent_shards} {shards} spreads "
                                 "over processes", "leave that out, or use another activation",
                          name=plan.activation.name, shards=latents)
    plan.solver.check_shared_latents()
