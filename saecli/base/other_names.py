"""Options of other tools (SAELens, sparsify, dictionary_learning), and what takes their place here."""

from collections.abc import Collection
from typing import NamedTuple

from .errors import flag_of


class Ours(NamedTuple):
    """The option here, how its value differs, and the command that has it (empty: `sae` itself)."""

    option: str
    words: str = ""
    command: str = "train"


_LATENTS = Ours("d_sae")
_FACTOR = Ours("d_sae", "the number of latents, which is the factor times d_in")
_WEIGHT = Ours("sparsity_weight", "the same value if rows were normalised to a mean squared norm of d_in, as SAELens' "
                                  "expected_average_only_in nearly does")
_ACT = Ours("act", "standard is relu, and Matryoshka SAEs are made by --prefixes")
_PLACE = Ours("layer", "blocks.12.hook_resid_post is --layer 12 --site resid_post")
_MODEL = Ours("model")
_TEXT = Ours("dataset")
_CONTEXT = Ours("context")
_TOKENS = Ours("rows", "a row is a token's activations; training passes over those of a store --epochs times, or for "
                       "--steps steps")
_FOLDER = Ours("home", "the folder of stores and runs, before the command; --name is the run's name in it", "")
_LOG = Ours("log_to", "wandb; WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE are read as by wandb itself")
_RISE = Ours("lr_warm_up", "a fraction of all steps, not their number")
_FALL = Ours("lr_decay", "a fraction of all steps, not their number")
_PENALTY_RISE = Ours("sparsity_warm_up", "a fraction of all steps, not their number")
_WIDTHS = Ours("prefixes", "numbers of latents with commas between, each counted from the first latent")

OTHERS: dict[str, Ours] = {
    "l1_coefficient": _WEIGHT, "l1_coeff": _WEIGHT, "l1_penalty": _WEIGHT, "l1_alpha": _WEIGHT,
    "sparsity_penalty": _WEIGHT, "sparsity_coefficient": _WEIGHT, "l1_weight": _WEIGHT,
    "l0_coefficient": Ours("sparsity_weight", "with --act jumprelu and --sparsity l0, the same value if rows were "
                                              "normalised to a mean squared norm of d_in; or --target-l0 for a given "
                                              "L0"),
    "expansion_factor": _FACTOR, "expansion": _FACTOR, "num_latents": _LATENTS, "n_latents": _LATENTS,
    "dict_size": _LATENTS, "dictionary_size": _LATENTS, "d_hidden": _LATENTS, "n_features": _LATENTS,
    "architecture": _ACT, "activation": _ACT, "activation_fn": _ACT, "activation_function": _ACT,
    "learning_rate": Ours("lr"), "k_sparse": Ours("k"), "topk": Ours("k", "with --act topk or batchtopk"),
    "train_batch_size_tokens": Ours("batch_size", "in rows, of which each is a token's"),
    "train_batch_size": Ours("batch_size"), "sae_batch_size": Ours("batch_size"),
    "n_epochs": Ours("epochs"), "num_epochs": Ours("epochs"), "total_training_steps": Ours("steps"),
    "lr_warm_up_steps": _RISE, "lr_warmup_steps": _RISE, "warmup_steps": _RISE, "lr_decay_steps": _FALL,
    "decay_start": _FALL, "l1_warm_up_steps": _PENALTY_RISE, "l1_warmup_steps": _PENALTY_RISE,
    "l0_warm_up_steps": _PENALTY_RISE, "sparsity_warmup_steps": _PENALTY_RISE,
    "normalize_activations": Ours("normalize", "scale, the default, is SAELens' expected_average_only_in after "
                                               "subtracting the mean"),
    "matryoshka_widths": _WIDTHS, "group_sizes": _WIDTHS, "group_fractions": _WIDTHS,
    "jumprelu_bandwidth": Ours("bandwidth"), "jumprelu_init_threshold": Ours("threshold"),
    "auxk_alpha": Ours("revive", "dead latents are re-aimed, by no term of the loss"),
    "aux_loss_coefficient": Ours("revive", "dead latents are re-aimed, by no term of the loss"),
    "hook_name": _PLACE, "hook_layer": _PLACE, "hook_point": _PLACE, "hookpoints": _PLACE, "hookpoint": _PLACE,
    "layers": _PLACE, "model_name": _MODEL, "model_name_or_path": _MODEL, "dataset_path": _TEXT, "dataset_name": _TEXT,
    "context_size": _CONTEXT, "ctx_len": _CONTEXT, "context_length": _CONTEXT, "training_tokens": _TOKENS,
    "num_tokens": _TOKENS, "max_examples": _TOKENS, "cached_activations_path": Ours("data"), "run_name": Ours("name"),
    "output_path": _FOLDER, "output_dir": _FOLDER, "save_dir": _FOLDER, "checkpoint_path": _FOLDER,
    "n_checkpoints": Ours("keep_every", "epochs between those that are kept"), "log_to_wandb": _LOG,
}


def in_place_of(name: str, options: Collection[str]) -> str:
    """Advice on another tool's option, given to a command with these options; empty if unknown."""
    ours = OTHERS.get(name) or (_LOG if name.startswith("wandb") else None)
    if ours is None:
        return ""
    written = flag_of(ours.option) if ours.option in options else (
        f"`{' '.join(['sae', *[ours.command] * bool(ours.command), flag_of(ours.option)])}`")
    return f"here {written}" + (f": {ours.words}" if ours.words else "")
