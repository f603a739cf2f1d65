"""Smallest useful settings of a configuration class of transformers.

A configuration is walked field by field. The name of a field gives its meaning, because
the library uses the same names throughout (``num_attention_heads``, ``moe_topk``); the
class derives dependent fields itself (``head_dim`` if it is None). Each kind of layer
that the full model has appears once. A few classes need further settings: ``SPECIAL``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

__all__ = ["FIRST_TOKEN", "HEADS", "HIDDEN", "VOCAB", "shrink", "with_odd_heads"]

# 2 divides them all, so that no plan over 2 ranks is refused for its sizes; and
# HIDDEN is HEADS * HEAD_DIM, because some models compute one from the others
VOCAB = 64
HIDDEN = 32
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
FIRST_TOKEN = 24
"""First token that is a word; all tokens before it are special."""
MAX_LAYERS = 6
"""Largest number of layers, if a model lists more kinds of layers."""

_RULES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size.*|num_embeds|num_embeddings|codebook_size", VOCAB),
    (r".*_rank|hidden_size_per_layer_input|hc_lowrank|router_hidden_size|d_rel", 8),
    (r".*attention_heads|num_heads|n_heads|index_n_heads|heads_per_ngram", HEADS),
    (r"linear_num(_value)?_heads|mamba_(n|num)_heads", HEADS),
    (r".*num_key_value_heads|linear_num_key_heads", KV_HEADS),
    (r".*head_dim|rotary_dim|ssm_state_size|mamba_d_state|dim_model_base", HEAD_DIM),
    (r".*intermediate_size.*|.*ffn_dim|.*ffn_hidden_size|share_expert_dim", 2 * HIDDEN),
    (r"(.*_)?(hidden_size|d_model|embed_dim|hidden_dim|output_dim)", HIDDEN),
    (r"(.*_)?(embedding_size|embedding_dim|mlp_dim|input_dim)", HIDDEN),
    (r"output_proj_dims|mm_embed_dim|latent_channels|prediction_head_size", HIDDEN),
    (r"(moe_)?(num_experts|num_local_experts|n_routed_experts)", 4),
    (r"zero_expert_num|num_experts_per_tok|moe_topk|moe_k", 2),
    (r"n_shared_experts", 1),
    (r"n_group|o_groups|n_groups", 2),
    (r"topk_group|first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"(.*_)?max_position_embeddings|max_source_positions", 64),
    (r"sliding_window(_size)?|window_size|attention_chunk_size", 4),
    (r"rel_extent|keep_window_size|index_topk|(mamba_)?chunk_size|block_size", 4),
    (r"index_block_size|index_kpool|index_topk_blocks|layer_group_size", 2),
    (r"sliding_window_pattern|no_rope_layer_interval", 2),
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers", 0),
)
"""Pattern of a field's name -> its largest value; the first match counts."""
_NEEDED = {
    *("head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "shared_expert_intermediate_size"),
}
"""Fields that are set if a class leaves them None."""
_LAYERS = re.compile(r"num_hidden_layers|num_layers|n_layers?|depth|.*encoder_layers")
_TOKEN = re.compile(r".*_(token_id|token_index|id)")
_SECTIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
    }
}
"""Rotary positions of images, for half of the width of a head."""

_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 2 * HIDDEN}

SPECIAL: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        (
            *("cosmos3_edge_text", "glm4v_text", "glm_image_text", "glm_ocr_text"),
            *("paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text"),
            "qwen2_vl_text",
        ),
        _SECTIONS,
    ),
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma_text": _EXPERTS,
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [1, 1, 2],
        }
    },
    "dots3_note_text": {"head_dim": 16},
    "dots3_note_vision_encoder": {
        "adapter_in_dim": HIDDEN,
        "adapter_out_dim": HIDDEN,
        "patch_size": 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "esmc": {"num_key_value_heads": HEADS},
    "gemma4_text": {"enable_moe_block": True, **_EXPERTS},
    "gemma4_unified_text": {"enable_moe_block": True, **_EXPERTS},
    "glm4v_moe_text": {
        "rope_parameters": {
            **_SECTIONS["rope_parameters"],
            "partial_rotary_factor": 1.0,
        }
    },
    "glm5_next_text": {"num_key_value_heads": HEADS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 16, "head_dim": 8},
    "muse_glimmer_assistant": {
        "target_layer_ids": [0, 1],
        "layer_types": ["full_attention", "full_attention"],
    },
    "neomme": {"head_dim": 16},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 2 * HIDDEN},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "step3p5": {"sliding_window": 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""Model type -> settings that do not follow from names."""


def shrink(kind: Any, **settings: Any) -> dict[str, Any]:
    """Return arguments that make a tiny configuration of a class.

    Args:
        kind: a subclass of ``PreTrainedConfig``.
        **settings: settings to set in any case.
    """
    default = kind()
    known: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        with suppress(AttributeError):  # layers may have values of their own
            # ``...`` is absent: None is a value of many fields
            known[field.name] = vars(default).get(field.name, ...)
            if known[field.name] is ...:  # kept under another name
                known[field.name] = getattr(default, field.name)
    given = {**SPECIAL.get(kind.model_type, {}), **settings}
    layers = [n for n in known if _LAYERS.fullmatch(n) and isinstance(known[n], int)]
    count = next((known[n] for n in layers), 0)
    # lists with one entry a layer: each kind of layer once
    kinds = {
        name: list(dict.fromkeys(value))
        for name, value in known.items()
        if isinstance(value, list | tuple) and count > 1 and len(value) == count
        if all(isinstance(each, str) for each in value)
    }
    depth = min(MAX_LAYERS, max([2, *map(len, kinds.values())]))
    small: dict[str, Any] = dict.fromkeys(layers, depth)
    for name, found in kinds.items():
        small[name] = (found * depth)[:depth]
    token = 0
    for name, value in known.items():
        if hasattr(value, "to_diff_dict"):
            small[name] = shrink(type(value))
        elif name in small or isinstance(value, bool):
            continue
        elif _TOKEN.fullmatch(name) and isinstance(value, int | list):
            # each below FIRST_TOKEN and another one: a word must not be taken for
            # padding or for the place of an image
            small[name] = token if isinstance(value, int) else [token]
            token += 1
        elif isinstance(value, list) and len(value) == count and _limit(name):
            small[name] = [_limit(name)] * depth
        elif isinstance(value, int) or (value is None and name in _NEEDED):
            limit = _limit(name)
            # a model of one expert is no model of experts
            more = "expert" in name and value == 1
            if limit is None:
                continue
            small[name] = limit
            # a smaller default stays: 0 often switches a feature off
            if isinstance(value, int) and value < limit and not more:
                small[name] = value
    if "kv_lora_rank" in known and "num_key_value_heads" in small:
        small["num_key_value_heads"] = HEADS  # latent attention has no groups
    if "per_layer_config" in default.to_dict():
        small["per_layer_config"] = {}  # its keys are layers of the full model
    if "use_cache" in known:
        small["use_cache"] = False  # training reads no keys of earlier tokens
    small |= given
    # only what differs: a class derives fields that it is not given, and the script of
    # a finding lists these arguments
    return {n: v for n, v in small.items() if n in given or v != known.get(n)}


def _limit(name: str) -> int | None:
    return next((x for rule, x in _RULES if re.fullmatch(rule, name)), None)


def with_odd_heads(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings with an odd number of heads; None if it cannot be set.

    Args:
        settings: result of :func:`shrink`.
    """
    heads = settings.get("num_attention_heads")
    if not isinstance(heads, int) or "hidden_size" not in settings:
        return None
    changed = {"num_attention_heads": 3, "hidden_size": 24}
    if "num_key_value_heads" in settings:
        changed["num_key_value_heads"] = 3 if settings["num_key_value_heads"] > 1 else 1
    return {**settings, **changed}
