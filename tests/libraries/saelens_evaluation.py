"""SAELens' own evaluation of SAEs in a model: run by the Python of an environment that has sae-lens.

    python saelens_evaluation.py MODEL HOOK WINDOWS.json SAE...

The windows are lists of token ids, each a batch of its own; HOOK is a module of the Hugging Face model, which SAELens
loads itself. Prints a JSON object for each SAE.
"""

import json
import sys
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
from sae_lens import SAE
from sae_lens.evals import get_eval_everything_config, run_evals
from sae_lens.load_model import load_model
from sae_lens.training.activation_scaler import ActivationScaler

model_folder, hook, windows_file, *folders = sys.argv[1:]


class Windows:
    """What the evaluation asks of an ActivationsStore, over windows of any length."""

    context_size = 0  # of which it makes nothing but a count of tokens that is not looked at

    def __init__(self) -> None:
        self.windows: list[list[int]] = json.loads(Path(windows_file).read_text())
        self.reset_input_dataset()

    def reset_input_dataset(self) -> None:
        """Begins with the first window."""
        self.coming: Iterator[list[int]] = cycle(self.windows)

    def get_batch_tokens(self, prompts: int) -> torch.Tensor:
        """The next window."""
        assert prompts == 1
        return torch.tensor([next(self.coming)])


model = load_model("AutoModelForCausalLM", model_folder, device="cpu", hook_names=[hook],
                   model_from_pretrained_kwargs={"dtype": torch.float32})  # as saecli runs it on a CPU
store = Windows()
count = len(store.windows)
for folder in folders:
    sae = SAE.load_from_disk(folder)
    sae.cfg.metadata.hook_name = hook
    metrics, _ = run_evals(sae, store, model, ActivationScaler(), get_eval_everything_config(1, count, count))
    store.reset_input_dataset()
    print(json.dumps({name: value for group in metrics.values() for name, value in group.items()}))
