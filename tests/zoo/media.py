"""Config fields of tiny models of image-text families, each with a text part as small as those of `text.py`.

Vocabularies have room for the tokens of images. Their processors need torchvision, and are not made here.
"""

from typing import Any

from tests.zoo.text import EXPERTS, GATED_DELTA, GROUPS, LATENT, UNGROUPED, WIDE, WINDOWS

TOKENS = {name: 50 + number for number, name in enumerate(("image", "video", "start", "end", "begin", "stop"))}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
CLIP = {**SIGLIP, "model_type": "clip_vision_model"}
PLAIN = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
INTERLEAVED = {**MROPE, "mrope_interleaved": True}
QWEN_IDS = {
    "image_token_id": TOKENS["image"],
    "video_token_id": TOKENS["video"],
    "vision_start_token_id": TOKENS["start"],
    "vision_end_token_id": TOKENS["end"],
}
QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
DEEPSTACK = {**QWEN3_VISION, "deepstack_visual_indexes": [0]}
GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "image_size": 64,
    "patch_size": 8,
    "out_hidden_size": 64,
    "intermediate_size": 64,
}
GLM_IDS = {
    "image_token_id": TOKENS["image"],
    "video_token_id": TOKENS["video"],
    "image_start_token_id": TOKENS["start"],
    "image_end_token_id": TOKENS["end"],
    "video_start_token_id": TOKENS["begin"],
    "video_end_token_id": TOKENS["stop"],
}
GLM_TEXT = {**UNGROUPED, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}
GEMMA_IDS = {
    "boi_token_index": TOKENS["start"],
    "eoi_token_index": TOKENS["end"],
    "image_token_index": TOKENS["image"],
}

HEARING_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_audio": {
        "text_config": UNGROUPED,
        "audio_config": {
            "num_mel_bins": 16,
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "max_source_positions": 100,
        },
        "audio_token_index": TOKENS["image"],
    },
}
"""Families that read sounds, of two seconds here, and no pictures."""
MEDIA_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": {**UNGROUPED, "rope_parameters": MROPE},
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8},
        **QWEN_IDS,
    },
    "qwen2_5_vl": {
        "text_config": {**UNGROUPED, "rope_parameters": MROPE},
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 8,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        **QWEN_IDS,
    },
    "qwen3_vl": {"text_config": {**WIDE, "rope_parameters": INTERLEAVED}, "vision_config": DEEPSTACK, **QWEN_IDS},
    "qwen3_vl_moe": {
        "text_config": {**WIDE, **EXPERTS, "rope_parameters": INTERLEAVED, "num_experts": 4},
        "vision_config": DEEPSTACK,
        **QWEN_IDS,
    },
    "qwen3_5": {
        "text_config": {**WIDE, **GATED_DELTA, "rope_parameters": {**INTERLEAVED, "partial_rotary_factor": 1.0}},
        "vision_config": QWEN3_VISION,
        **QWEN_IDS,
    },
    "gemma3": {
        "text_config": {**WIDE, **WINDOWS, "query_pre_attn_scalar": 32},
        "vision_config": {**SIGLIP, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        **GEMMA_IDS,
    },
    "gemma4": {
        "text_config": {
            **WIDE,
            **WINDOWS,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
            "use_bidirectional_attention": "vision",
            "global_head_dim": 32,
            "num_global_key_value_heads": 2,
        },
        "vision_config": {
            **PLAIN,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        "audio_config": None,
        "boi_token_id": TOKENS["start"],
        "eoi_token_id": TOKENS["end"],
        "image_token_id": TOKENS["image"],
        "video_token_id": TOKENS["video"],
        "audio_token_id": TOKENS["begin"],
    },
    "paligemma": {
        "text_config": {"model_type": "gemma2", **WIDE, "sliding_window": 64},
        "vision_config": {**SIGLIP, "projection_dim": 64},
        "image_token_index": TOKENS["image"],
        "projection_dim": 64,
        "hidden_size": 64,
    },
    "llava": {
        "text_config": {"model_type": "llama", **WIDE},
        "vision_config": CLIP,
        "image_token_index": TOKENS["image"],
        "image_seq_length": 16,
    },
    "llava_next": {
        "text_config": {"model_type": "mistral", **WIDE},
        "vision_config": CLIP,
        "image_token_index": TOKENS["image"],
        "image_grid_pinpoints": [[32, 64], [64, 32]],
    },
    "llava_onevision": {
        "text_config": {"model_type": "qwen2", **UNGROUPED},
        "vision_config": {**SIGLIP, "vision_use_head": False},
        "vision_feature_layer": -1,
        "image_token_index": TOKENS["image"],
        "video_token_index": TOKENS["video"],
        "image_grid_pinpoints": [[32, 64], [64, 32]],
    },
    "internvl": {
        "text_config": {"model_type": "qwen2", **UNGROUPED},
        "vision_config": {**PLAIN, "image_size": [32, 32], "patch_size": [8, 8]},
        "image_token_id": TOKENS["image"],
        "image_seq_length": 4,
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **WIDE},
        "vision_config": {**PLAIN, "image_size": 32, "patch_size": 8},
        "image_token_id": TOKENS["image"],
        "pad_token_id": 0,
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **WIDE},
        "vision_config": {**PLAIN, "image_size": 32, "patch_size": 8},
        "image_token_id": TOKENS["image"],
        "pad_token_id": 0,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **WIDE},
        "vision_config": {"model_type": "pixtral", **PLAIN, "image_size": 128, "patch_size": 8},
        "image_token_index": TOKENS["image"],
        "spatial_merge_size": 2,
    },
    "llama4": {
        "text_config": {
            **WIDE,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
            "attention_chunk_size": 4,
            "no_rope_layer_interval": 2,
        },
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "vision_output_dim": 64,
            "image_size": 32,
            "patch_size": 8,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        "boi_token_index": TOKENS["start"],
        "eoi_token_index": TOKENS["end"],
        "image_token_index": TOKENS["image"],
    },
    "glm4v": {"text_config": GLM_TEXT, "vision_config": GLM_VISION, **GLM_IDS},
    "glm46v": {
        "text_config": {"model_type": "glm4v_text", **GLM_TEXT},
        "vision_config": {"model_type": "glm4v_vision", **GLM_VISION},
        **GLM_IDS,
    },
    "kimi_k25": {
        "text_config": {"model_type": "deepseek_v3", **UNGROUPED, **EXPERTS, **GROUPS, **LATENT},
        "vision_config": {**PLAIN, "patch_size": 8, "pos_emb_height": 16, "pos_emb_width": 16},
        "projection_hidden_size": 32,
        "image_token_id": TOKENS["image"],
        "video_token_id": TOKENS["video"],
        "vision_start_token_id": TOKENS["start"],
        "vision_end_token_id": TOKENS["end"],
    },
    "lfm2_vl": {
        "text_config": {
            "model_type": "lfm2",
            **UNGROUPED,
            "layer_types": ["conv", "full_attention"],
            "block_multiple_of": 8,
        },
        "vision_config": {"model_type": "siglip2_vision_model", **PLAIN, "patch_size": 8, "num_patches": 64},
        "image_token_id": TOKENS["image"],
        "projector_hidden_size": 64,
    },
}
