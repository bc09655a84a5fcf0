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
        raise ConfigError(f"options given several times train {trainings} SAEs in one process: expected one, got "
                          f"{everyone().size}; run it without torchrun, or give each value to a command of its own")
    if training.batch_size < rows:
        raise ConfigError(f"--batch-size must be at least the number of processes, {rows}, which share every batch, "
                          f"got {training.batch_size}")
    if training.sparsity == "kl" and rows > 1:
        raise ConfigError(f"--sparsity kl takes each batch as a whole, since its firing rates are those of one: "
                          f"expected one process, or all to share latents and none the rows, got {rows} that share "
                          f"rows; give --latent-shards {everyone().size}, or use another penalty")
    if latents == 1:
        return
    if training.d_sae % latents:
        raise ConfigError(f"--d-sae must be a multiple of --latent-shards, {latents}, got {training.d_sae}; use "
                          f"{training.d_sae - training.d_sae % latents or latents}")
    if not plan.activation.shares_latents:
        raise ConfigError(f"--act {plan.activation.name} looks at all latents of a row at once, which --latent-shards "
                          f"{latents} spreads over processes; leave that out, or use another activation")
    plan.solver.check_shared_latents()
