"""SAELens' side of tests: run by the Python of an environment that has sae-lens.

python saelens.py formats FOLDER
    Reads FOLDER/ours/CASE, makes and trains FOLDER/theirs/CASE, and writes codes and reconstructions of
    FOLDER/rows.npy to CASE.npz; of a checkpoint, those of the SAE that it would save then.
python saelens.py scopes FOLDER NAME=PATH=FACTOR ...
    Reads PATH in FOLDER, laid out as on the hub, by the converter NAME up to a `-`, with rows times FACTOR.
python saelens.py evaluate MODEL HOOK WINDOWS.json SAE ...
    Prints SAELens' evaluation of each SAE, a JSON line each; the windows are lists of token ids, each a batch, HOOK a
    module of the Hugging Face model, which SAELens loads itself.
python saelens.py score TRUTH.npz SAE ...
    Prints the scores of each SAE on a world, a JSON line each.
"""

import json
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sae_lens import SAE, LoggingConfig
from sae_lens import saes as kinds
from sae_lens.evals import get_eval_everything_config, run_evals
from sae_lens.load_model import load_model
from sae_lens.loading import pretrained_sae_loaders as loaders
from sae_lens.synthetic import (
    FeatureDictionary,
    SyntheticModelConfig,
    SyntheticSAERunner,
    SyntheticSAERunnerConfig,
    eval_sae_on_synthetic_data,
)
from sae_lens.training.activation_scaler import ActivationScaler
from safetensors.torch import load_file, save_file

D, E, F, K = 24, 17, 60, 6

MADE = {
    "standard": ("StandardSAE", {}),
    "standard-subtracting": ("StandardSAE", {"apply_b_dec_to_input": True}),
    "jumprelu": ("JumpReLUSAE", {"apply_b_dec_to_input": True}),
    "gated": ("GatedSAE", {}),
    "gated-subtracting": ("GatedSAE", {"apply_b_dec_to_input": True}),
    "topk": ("TopKSAE", {"k": K}),
    "topk-rescaled": (
        "TopKSAE",
        {"k": K, "rescale_acts_by_decoder_norm": True, "apply_b_dec_to_input": True},
    ),
    "abstopk": ("AbsTopKSAE", {"k": K}),
    "transcoder": ("Transcoder", {"d_out": E}),
    "skip-transcoder": ("SkipTranscoder", {"d_out": E}),
    "jumprelu-transcoder": ("JumpReLUTranscoder", {"d_out": E}),
    "jumprelu-skip-transcoder": ("JumpReLUSkipTranscoder", {"d_out": D}),
}

RELU = {"activation_fn_str": "relu"}
OLD = {  # what versions before 6 wrote, by the case above whose weights it is said of
    "standard": RELU
    | {"apply_b_dec_to_input": False, "normalize_activations": False}
    | {"hook_point": "blocks.8.hook_resid_pre", "model_name": "gpt2-small"},
    "standard-subtracting": RELU | {"architecture": "standard", "normalize_activations": "none"},
    "jumprelu": {
        "architecture": "jumprelu",
        "activation_fn": "relu",
        "sae_lens_training_version": "3.0.0",
    },
    "gated-subtracting": RELU | {"architecture": "gated", "normalize_activations": "none"},
    "topk": {
        "architecture": "standard",
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": K},
        "apply_b_dec_to_input": False,
        "normalize_activations": None,
    },
}

TRAINED = {
    "batchtopk": ("BatchTopK", {"k": 4.5}),
    "batchtopk-scaled": (
        "BatchTopK",
        {"k": K, "normalize_activations": "expected_average_only_in"},
    ),
    "matryoshka": ("MatryoshkaBatchTopK", {"k": K, "matryoshka_widths": [10, 25, F]}),
    "matryoshka-plain": (
        "MatryoshkaBatchTopK",
        {"k": K, "matryoshka_widths": [10, F], "rescale_acts_by_decoder_norm": False},
    ),
    "jumprelu-trained": ("JumpReLU", {}),
    "topk-trained": ("TopK", {"k": K}),
}

CONVERTERS = {
    **dict.fromkeys(("gemma", "transcoder", "mlp_out"), ("google", "gemma_3")),
    "llama": ("fnlp", "llama_scope"),
    "r1": ("fnlp", "llama_scope_r1_distill"),
    "qwen": ("Qwen", "qwen_scope"),
    "gemma2": ("google", "gemma_2"),
    "gemma2transcoder": ("google", "gemma_2_transcoder"),
    "goodfire": ("Goodfire", "goodfire"),
    "deepseek": ("qresearch", "deepseek_r1"),
    "attention": ("ckkissane", "connor_rob_hook_z"),
    "mwhanna": ("mwhanna", "mwhanna_transcoder"),
    "learning": ("canrager", "dictionary_learning_1"),
    "saelens": ("jbloom", "sae_lens"),
}

BATCH = 500


def rows_in(folder: Path) -> torch.Tensor:
    return torch.from_numpy(np.load(folder / "rows.npy"))


@torch.no_grad()
def record(sae: SAE, rows: torch.Tensor, path: Path, factor: float = 1) -> None:
    """Keeps codes, times a factor, and reconstructions of the rows."""
    if sae.cfg.reshape_activations == "hook_z":  # rows by head
        rows = rows.unflatten(1, (2, -1))
    np.savez(path, codes=sae.encode(rows).numpy() * factor, x_hat=sae(rows).flatten(1).numpy())


@torch.no_grad()
def formats(folder: Path) -> None:
    """Reads ours, makes theirs."""
    rows = rows_in(folder)
    for path in sorted((folder / "ours").iterdir()):
        record(SAE.load_from_disk(path), rows, path.with_suffix(".npz"))
    torch.manual_seed(0)
    for case, (kind, settings) in MADE.items():
        settings = {"apply_b_dec_to_input": False} | settings
        config = getattr(kinds, f"{kind}Config")(d_in=D, d_sae=F, **settings)
        sae = getattr(kinds, kind)(config)
        for name, parameter in sae.named_parameters():
            parameter.data.normal_()
            if name == "threshold":
                parameter.data.abs_()
        sae.save_model(folder / "theirs" / case)
        record(sae, rows, folder / "theirs" / f"{case}.npz")
        if case in OLD:
            path = folder / "theirs" / f"{case}-old"
            path.mkdir()
            scaling = {} if case == "jumprelu" else {"scaling_factor": torch.ones(F)}
            save_file(sae.state_dict() | scaling, path / "sae_weights.safetensors")
            sizes = {"d_in": D, "d_sae": F, "dtype": "torch.float32"}
            (path / "cfg.json").write_text(json.dumps(sizes | OLD[case]))
            record(SAE.load_from_disk(path), rows, path.with_suffix(".npz"))
    train(folder)


def train(folder: Path) -> None:
    """Trains, and keeps a checkpoint half way and the final output of each kind, with codes and reconstructions."""
    rows = rows_in(folder)
    for case, (kind, settings) in TRAINED.items():
        config = getattr(kinds, f"{kind}TrainingSAEConfig")(d_in=D, d_sae=F, **settings)
        place = folder / "trained" / case
        runner = SyntheticSAERunner(
            SyntheticSAERunnerConfig(
                synthetic_model=SyntheticModelConfig(num_features=40, hidden_dim=D),
                sae=config,
                training_samples=20_000,
                batch_size=400,
                lr=3e-3,
                n_checkpoints=1,
                checkpoint_path=str(place),
                output_path=str(folder / "theirs" / f"{case}-final"),
                run_final_eval=False,
                n_batches_for_norm_estimate=5,
                logger=LoggingConfig(log_to_wandb=False),
            )
        )
        with torch.enable_grad():
            runner.run()
        final = folder / "theirs" / f"{case}-final"
        record(SAE.load_from_disk(final), rows, final.with_suffix(".npz"))
        (checkpoint,) = place.iterdir()
        halfway = folder / "theirs" / f"{case}-checkpoint"
        checkpoint.rename(halfway)
        resumed = type(runner.sae)(config)
        resumed.load_weights_from_checkpoint(halfway)
        scale = json.loads((halfway / "activation_scaler.json").read_text())["scaling_factor"]
        if scale:
            resumed.fold_activation_norm_scaling_factor(scale)
        resumed.save_inference_model(folder / "trained" / f"{case}-inference")
        inference = SAE.load_from_disk(folder / "trained" / f"{case}-inference")
        # Training sees codes of scaled rows.
        record(inference, rows, halfway.with_suffix(".npz"), scale or 1)


@torch.no_grad()
def scope(folder: Path, name: str, repo: Path, place: Path, factor: float) -> None:
    """Keeps codes and reconstructions of the rows."""
    rows = rows_in(folder)
    owner, converter = CONVERTERS[name.partition("-")[0]]

    def download(repo_id: str, filename: str, subfolder: str = "", **further: Any) -> str:
        if not (repo / subfolder / filename).exists():
            raise loaders.EntryNotFoundError(filename)
        return str(repo / subfolder / filename)

    loaders.hf_hub_download = download
    loaders.get_safetensors_tensor_shapes = lambda repo_id, filename: {
        key: list(tensor.shape) for key, tensor in load_file(repo / filename).items()
    }

    def load(cfg_overrides: dict[str, Any], **further: Any) -> tuple:
        widths = {"d_in": rows.shape[1], "d_sae": 20}  # else of the release's own models
        widths |= {"d_out": rows.shape[1]} if "transcoder" in converter else {}
        return loaders.NAMED_PRETRAINED_SAE_LOADERS[converter](
            cfg_overrides=cfg_overrides | widths | {"dtype": "float32"}, **further
        )

    settings = {"converter": load, "dtype": "float32"}
    sae = SAE.from_pretrained(f"{owner}/{repo.name}", place.as_posix(), **settings)
    if factor != 1:  # which SAELens folds in for the releases that it knows by name
        sae.fold_activation_norm_scaling_factor(factor)
    record(sae, rows, folder / f"{name}.npz")


def scopes(folder: Path, *words: str) -> None:
    """Reads them all."""
    for word in words:
        name, path, factor = word.split("=")
        repo, *inside = Path(path).parts
        scope(folder, name, folder / repo, Path(*inside), float(factor))


class Windows:
    """What the evaluation asks of an ActivationsStore, over windows of any length."""

    context_size = 0  # it only counts tokens by it, a count that is not looked at

    def __init__(self, windows: list[list[int]]) -> None:
        self.windows = windows
        self.reset_input_dataset()

    def reset_input_dataset(self) -> None:
        """Begins with the first window."""
        self.coming: Iterator[list[int]] = cycle(self.windows)

    def get_batch_tokens(self, prompts: int) -> torch.Tensor:
        """The next window."""
        assert prompts == 1
        return torch.tensor([next(self.coming)])


def evaluate(model_folder: Path, hook: str, windows_file: str, *folders: str) -> None:
    """Evaluates each SAE."""
    model = load_model(
        "AutoModelForCausalLM",
        str(model_folder),
        device="cpu",
        hook_names=[hook],
        model_from_pretrained_kwargs={"dtype": torch.float32},  # as saecli runs it on a CPU
    )
    store = Windows(json.loads(Path(windows_file).read_text()))
    count = len(store.windows)
    for folder in folders:
        sae = SAE.load_from_disk(folder)
        sae.cfg.metadata.hook_name = hook
        config = get_eval_everything_config(1, count, count)
        metrics, _ = run_evals(sae, store, model, ActivationScaler(), config)
        store.reset_input_dataset()
        print(json.dumps(dict(item for group in metrics.values() for item in group.items())))


class Replay:
    """Stands for a generator: gives codes that are there already, (R, G), batch by batch."""

    def __init__(self, codes: torch.Tensor) -> None:
        self._codes, self._at = codes, 0

    def sample(self, rows: int) -> torch.Tensor:
        self._at += rows
        return self._codes[self._at - rows : self._at]


def score(truth: Path, *saes: str) -> None:
    arrays = {name: torch.from_numpy(array) for name, array in np.load(truth).items()}
    features, d_in = arrays["directions"].shape
    world = FeatureDictionary(features, d_in, bias=True, initializer=None)
    world.feature_vectors.data, world.bias.data = arrays["directions"], arrays["bias"]
    for folder in saes:
        sae, codes = SAE.load_from_disk(folder), arrays["codes"]
        scores = eval_sae_on_synthetic_data(sae, world, Replay(codes), len(codes), BATCH)
        print(json.dumps(scores.to_dict()))


if __name__ == "__main__":
    actions = (formats, scopes, evaluate, score)
    action = {function.__name__: function for function in actions}[sys.argv[1]]
    action(Path(sys.argv[2]), *sys.argv[3:])
