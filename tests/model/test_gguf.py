"""Models in GGUF files, against folders with the weights that their blocks stand for."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from homes import CommandLine
from tiny_models import save_tokenizer, stored
from transformers import LlamaConfig, Qwen2Config

from saecli.model.language_model import LanguageModel, load_tokenizer
from saecli.model.source import find_model

pytest.importorskip("gguf", exc_type=ImportError)
pytest.importorskip("transformers", minversion="5.23")
from gguf_files import WORDS, save_both

CPU = torch.device("cpu")
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config}
TEXT = "\n\n".join("ab cab dab. " * length for length in range(1, 30))


def saved(
    folder: Path, architecture: str = "llama", quantisation: str = "Q8_0", factors: bool = False
) -> tuple[Path, Path]:
    layers = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": len(WORDS)}
    sizes |= {"max_position_embeddings": 64, "tie_word_embeddings": False}
    config = CONFIGS[architecture](**sizes, **layers)
    path, plain = save_both(folder, config, quantisation, factors)
    load_tokenizer(find_model(str(path))).save_pretrained(plain)
    return path, plain


@pytest.mark.parametrize(
    ("architecture", "quantisation"), [("llama", "Q8_0"), ("llama", "F32"), ("qwen2", "Q4_0")]
)
def test_rows_are_those_of_the_dense_weights(sae, tmp_path, text, architecture, quantisation):
    path, plain = saved(tmp_path / "model", architecture, quantisation)
    found = []
    for name, model in (("packed", path), ("dense", plain)):
        options = ("--layer", "1", "--dataset", text, "--dtype", "float32", "--name", name)
        sae("extract", "--model", model, *options).succeeds()
        found.append(stored(sae.home / "activations" / name))
    (rows, columns), (expected, expected_columns) = found
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)
    for name in columns:
        assert np.array_equal(columns[name], expected_columns[name])
    packed, dense = (
        json.loads((sae.home / "activations" / name / "store.json").read_text())
        for name in ("packed", "dense")
    )
    assert packed["source"]["model"] == str(path)
    np.testing.assert_allclose(packed["reads"], dense["reads"], rtol=1e-5)


def test_first_blocks_and_head_are_loaded_as_of_a_folder(tmp_path: Path):
    path, plain = saved(tmp_path)
    cut = LanguageModel(find_model(str(path)), CPU, last=0)
    whole = LanguageModel(find_model(str(path)), CPU, head=True)
    expected = LanguageModel(find_model(str(plain)), CPU, head=True)
    assert (len(cut.blocks), len(whole.blocks)) == (1, 3)
    for name, weight in expected.model.state_dict().items():
        assert torch.equal(whole.model.state_dict()[name], weight)
    for name, weight in cut.model.state_dict().items():
        assert torch.equal(weight, expected.model.state_dict()[f"model.{name}"])


@pytest.mark.slow
def test_every_command_reads_the_file(sae: CommandLine, tmp_path: Path, text: Path):
    path, _ = saved(tmp_path / "model")
    for command in (
        f"extract --model {path} --layer 1 --dataset {text} --name rows",
        "train --data rows --act topk --k 4 --d-sae 16 --steps 20 --name first",
        f"eval first --model {path}",
        f"finetune first --model {path} --tokens 500 --name tuned",
        f"steer first --model {path} --latent 1 --scale 2 --prompt ab --max-new-tokens 3",
        f"report first --model {path} --out {tmp_path / 'pages'}",
        f"controls first --model {path}",
        f"train --model {path} --layer 1 --dataset {text} --rows 200 --act topk --k 4 --d-sae 16 --name streamed",
    ):
        sae(*command.split()).succeeds()


def test_the_request_is_the_files_content(sae: CommandLine, tmp_path: Path, text: Path):
    path, _ = saved(tmp_path / "model")
    command = ("extract", "--model", path, "--layer", "0", "--dataset", text, "--name", "rows")
    assert sae(*command).status == 0
    shutil.copyfile(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)  # another time, the same bytes
    assert "stored already" in sae(*command).out
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    sae(*command).fails(1, "made from something else")


def test_rotary_factors_that_are_not_read_are_told(sae: CommandLine, tmp_path: Path, text: Path):
    for factors in (False, True):
        path, _ = saved(tmp_path / f"factors-{factors}", factors=factors)
        result = sae("extract", "--model", path, "--dataset", text).succeeds()
        assert ("leaves out rope_freqs.weight" in result.err) == factors


def test_files_next_to_it_are_not_read(tmp_path: Path):
    path, _ = saved(tmp_path)
    save_tokenizer(tmp_path, bos=True)  # of another model
    tokenizer = load_tokenizer(find_model(str(path)))
    assert tokenizer("ab c")["input_ids"] == [1, WORDS.index("ab"), WORDS.index("Ġ"), 6]


DAMAGE = {
    "cut in its tensors": lambda content: content[:-500],
    "cut in its head": lambda content: content[:700],
    "another architecture": lambda content: content.replace(b"llama", b"lemma"),
    "merges without tokens": lambda content: content.replace(b"a b", b"x y"),
    "empty": lambda content: b"",
    "text": lambda content: b"Once upon a time" * 100,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_gets_one_sentence(sae: CommandLine, tmp_path: Path, text: Path, how: str):
    path, _ = saved(tmp_path)
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    refused = sae("extract", "--model", path, "--dataset", text)
    refused.fails(1, "cannot load the ", str(path))
    assert refused.err.count("\n") == 1
