"""Families of models, as data: names of modules, and other tools' hook points.

To add one, add the names of its parts where they are new, and for SAEs of other tools a line to `FAMILIES` and
`MODEL_TYPES`.
"""

from dataclasses import dataclass, field, replace
from itertools import product

from ..sae.formats.common import Z
from ..store.origin import HookPoint

ATTENTIONS = ("self_attn", "attention", "attn", "self_attention")
MLPS, EXPERTS = ("mlp", "feed_forward", "ffn"), ("block_sparse_moe", "shared_mlp")
PROJECTIONS = (
    "o_proj",
    "c_proj",
    "out_proj",
    "dense",
    "attention.out_proj",
    "output.dense",
    "Wo",
    "out_lin",
)
# Norms before the residual stream (Gemma 2, GLM 4); last layers, where attention or MLP return their sum with the
# residual stream (BLOOM, MPT; `output.dense` of BERT and ESM).
NORMS = ("post_feedforward_layernorm", "post_mlp_layernorm")
LAST_LAYERS = ("mlp.dense_4h_to_h", "ffn.down_proj")
# The first of these parts of a block that it has; "" is the block itself. fc1 and fc2 stand in blocks that have no
# module for the MLP (OPT). resid_mid is found by what a block computes, see `blocks`.
PARTS: dict[str, tuple[str, list[str]]] = {
    "resid_pre": ("in", [""]),
    "resid_post": ("out", [""]),
    "mlp_in": ("in", [*MLPS, "fc1", *EXPERTS, "intermediate"]),
    "mlp_out": ("out", [*NORMS, *LAST_LAYERS, *MLPS, "fc2", *EXPERTS, "output.dense"]),
    "attn_out": (
        "out",
        ["post_self_attn_layernorm", "self_attention.dense", "attention.output.dense", *ATTENTIONS],
    ),
    "attn_z": ("in", [".".join(names) for names in product(ATTENTIONS, PROJECTIONS)]),
}
# Both add to the residual stream at once (Falcon-H1, Granite with shared experts): neither alone is the site.
PAIRS = {"attn_out": {"mamba", "self_attn"}, "mlp_in": {*EXPERTS}, "mlp_out": {*EXPERTS}}
# Where a block also has one of these norms (Gemma 2, AFMoE, OLMo 2), `post_attention_layernorm` ends attention; else
# it is before the MLP.
AFTER_ATTENTION = "post_attention_layernorm"
WITH_NORM_AFTER_ATTENTION = {"post_feedforward_layernorm", "pre_mlp_layernorm"}

WITHOUT_SECOND_NORM = {  # sites in models whose attention and MLP do not end with a norm
    "mlp.hook_out": "mlp_out",
    "mlp:out": "mlp_out",
    "attn:out": "attn_out",
    "self_attn:out": "attn_out",
    "attention:out": "attn_out",
}
# Not where values have a bias, which TransformerLens' `fold_value_biases` moves out of hook_z.
HEADS = {Z: "attn_z"}
# BLOOM's MLP adds the residual stream.
BLOOM = {"mlp:out": "resid_post", "mlp.dense_4h_to_h:out": "mlp_out"}


@dataclass(frozen=True)
class Family:
    """The norm before the MLP in a family of models."""

    norm: str  # name of its module
    offset: float = 0.0  # added to its weight
    layer_norm: bool = False  # else RMSNorm
    # By other tools' names of hook points, besides the names in all models.
    sites: dict[str, str] = field(default_factory=lambda: WITHOUT_SECOND_NORM)

    def at_site(self, point: HookPoint) -> HookPoint:
        """The hook point by the site that it is in these models."""
        return point._replace(site=self.sites.get(point.site, point.site))


LLAMA = Family("post_attention_layernorm", sites=WITHOUT_SECOND_NORM | HEADS)
FAMILIES = {  # by `model_type`
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3", "qwen3", "qwen3_moe"), LLAMA),
    "qwen2": Family("post_attention_layernorm"),
    "gemma": replace(LLAMA, offset=1.0),
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma3_text"), Family("pre_feedforward_layernorm", 1.0, sites=HEADS)
    ),
    **dict.fromkeys(("gpt2", "gpt_neo"), Family("ln_2", layer_norm=True)),
    "gpt_neox": Family("post_attention_layernorm", layer_norm=True),
    "bloom": Family("post_attention_layernorm", layer_norm=True, sites=BLOOM),
    "gptj": Family("ln_1", layer_norm=True),
    "opt": Family("final_layer_norm", layer_norm=True),
    "phi": Family("input_layernorm", layer_norm=True),
}
MODEL_TYPES = {  # by the hub's name, for models that are not on this machine
    r"google/gemma-2-.+": "gemma2",
    r"google/gemma-3-.+": "gemma3",
    r"google/gemma-\d+b.*": "gemma",
    r"(openai-community/)?(distil)?gpt2.*": "gpt2",
    r"EleutherAI/(pythia|gpt-neox).+": "gpt_neox",
    r"EleutherAI/gpt-neo-.+": "gpt_neo",
    r"EleutherAI/gpt-j.+": "gptj",
    r"(meta-llama|HuggingFaceTB)/.+": "llama",
    r"mistralai/.+": "mistral",
    r"Qwen/Qwen3.+": "qwen3",
    r"Qwen/.+": "qwen2",
}
