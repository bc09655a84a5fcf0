"""Tiny language models as GGUF files, written by llama.cpp's own package, next to the same models as folders."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM

LETTERS = [chr(code) for code in range(97, 123)]
WORDS = ["<pad>", "<bos>", "<eos>", "Ġ", *LETTERS[:-1], ".", "ab", "cd"]  # 32


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of llama's queries and keys in llama.cpp's order: convert_hf_to_gguf.py's `permute`."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def save_both(
    folder: Path, config: Any, quantisation: str = "Q8_0", factors: bool = False
) -> tuple[Path, Path]:
    """A random llama or qwen2 as a GGUF file, and a folder with the weights that its blocks stand for."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    path, plain = folder / "tiny.gguf", folder / "plain"
    folder.mkdir(parents=True, exist_ok=True)
    architecture = config.model_type
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    kind = gguf.GGMLQuantizationType[quantisation]
    weights = model.state_dict()
    known = {gguf.MODEL_ARCH_NAMES[each]: each for each in gguf.MODEL_ARCH}[architecture]
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    for name, weight in weights.items():
        values = torch.randn_like(weight).numpy() * 0.3 + (1 if weight.dim() == 1 else 0)
        own = gguf.GGMLQuantizationType.F32 if weight.dim() == 1 else kind
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        part = next((letter for letter in heads if f".{letter}_proj." in name), None)
        moved = architecture == "llama" and part is not None
        packed = quantize(interleaved(values, heads[part]) if moved else values, own)
        name_there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(name_there, packed, raw_dtype=own)
        # Blocks lie within rows, so the order of rows does not matter to what they stand for.
        weights[name] = torch.from_numpy(dequantize(quantize(values, own), own).copy())
    if factors:
        writer.add_tensor("rope_freqs.weight", np.full(8, 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(weights)
    model.save_pretrained(plain)
    return path, plain
