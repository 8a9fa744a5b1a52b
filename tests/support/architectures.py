"""Tiny models of every architecture that transformers' auto classes of text know.

The authority is transformers itself: its auto classes name the architectures, and the defaults of an
architecture's configuration class are the start. A rule for each name of a field shrinks them (`_SIZES`),
and a table says what has to agree among fields, or what by default is off or too large to matter in
twelve tokens (`_SETTINGS`). What gives no logits for token ids alone is named in `NOT_BUILT`;
tests/train/test_architectures.py tries each of those again.

Numbers are set so that a mistake shows: multipliers are not 1, caps of logits are low, biases and
corrections of routers are not 0, windows are narrower than the input. Dropout is 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "AutoModelForCausalLM": tuple(sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)),
    "AutoModelForSequenceClassification": tuple(
        sorted(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    ),
    "AutoModelForTokenClassification": tuple(
        sorted(modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES)
    ),
}


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why an architecture is not built, and a part of the error that trying it gives."""

    reason: str
    error: str


NOT_BUILT: Mapping[str, Refusal] = {
    "bros": Refusal("its forward pass needs the box of each word", "You have to specify bbox"),
    "gemma3n": Refusal(
        "its image encoder comes from timm, which is not a dependency (gemma3n_text is built)",
        "requires the timm library",
    ),
    "gemma4_assistant": Refusal(
        "it drafts for another model, whose keys and values it reads; transformers refuses the"
        " defaults of its configuration",
        "hidden_size_per_layer_input must be 0",
    ),
    "gemma4_unified_assistant": Refusal(
        "it drafts for another model, whose keys and values it reads; transformers cannot build"
        " the defaults of its configuration",
        "The set of layer types producing a cache is different",
    ),
    "layoutlmv2": Refusal(
        "its image encoder comes from detectron2, which is not a dependency",
        "requires the detectron2 library",
    ),
    "musicgen": Refusal(
        "the auto class hands it the configuration of the whole model, not the decoder's",
        "'MusicgenConfig' object has no attribute 'dropout'",
    ),
    "musicgen_melody": Refusal(
        "the auto class hands it the configuration of the whole model, not the decoder's",
        "'MusicgenMelodyConfig' object has no attribute 'dropout'",
    ),
}

MOST_PARAMETERS = 600_000
VOCABULARY = 96
# Between the special tokens, which are the first, and those of images and sounds, which are the last.
_FIRST_WORD = 4
_LAST_WORD = 79
_END_OF_SEQUENCE = 1

# What a field that is a positive number is set to, by its name.
_SIZES: Mapping[int, str] = {
    64: """
        adapter_in_dim adapter_out_dim attention_hidden_size backbone_hidden_size classifier_proj_size
        cross_attention_hidden_size d_latents d_model dim downsample_hidden_size emb_dim embed_dim
        embedding_dim embedding_size entity_emb_size hidden_size hidden_size_global input_embedding_size
        input_size intra_bottleneck_size lru_width n_embd out_hidden_size output_dim
        output_embedding_size ple_embed_dim  prediction_head_size
        projector_input_dim projector_output_dim prompt_mid_dim pronunciation_embed_dim
        router_hidden_size shape_embed_dim  vision_output_dim word_embed_proj_dim
    """,
    128: """
        d_ff d_inner decoder_ffn_dim dense_intermediate_size dff dim_ff encoder_ffn_dim
        feed_forward_size ffn_dim ffn_hidden_size hidden_dim intermediate_size intermediate_size_mlp
        mamba_d_ssm mlp_dim n_inner
    """,
    32: """
        crop_size expert_ffn_hidden_size image_size index_head_dim kv_lora_rank moe_intermediate_size
        moe_shared_expert_intermediate_size shared_expert_intermediate_size
        shared_experts_intermediate_size shared_intermediate_size
    """,
    48: "q_lora_rank",
    16: """
        attention_head_dim attention_head_size audio_vocab_size base_channels bias_max_distance
        codebook_dim codebook_size  d_head d_kv depthwise_separable_out_channel
        dim_head ext_pw_out_channel head_dim hidden_size_per_layer_input kv_channels
        linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_d_state
        mamba_head_dim nemo_conv_channels num_centroids num_filters
        num_position_embeddings qk_nope_head_dim ssm_state_size state_size swa_head_dim v_head_dim
        vector_quantization_hidden_dimension xpath_unit_hidden_size
    """,
    8: """
        adapter_rank attention_chunk_size attention_window attention_window_size block_size chunk_size
        d_rel feature_size gated_norm_rank hc_lowrank keep_window_size laurel_rank local_attention
        local_attention_window_len
        make_ngram_vocab_size_divisible_by mamba_chunk_size mamba_dt_rank mamba_n_heads
        mamba_num_heads mem_len moe_num_experts n_mamba_heads n_routed_experts num_experts
        num_landmarks num_latents num_local_experts num_mel_bins o_lora_rank output_channels
        patch_size qk_rope_head_dim rotary_dim segment_means_seq_len sliding_window
        sliding_window_size time_step_rank upsample_groups window_size
    """,
    4: """
        attention_heads conf_num_attention_heads decoder_attention_heads encoder_attention_heads
        index_n_heads index_topk linear_num_heads linear_num_value_heads local_attn_chunk_length
        lsh_attn_chunk_length n_head n_heads
        num_attention_heads num_cross_attention_heads num_decoder_attention_heads
        num_encoder_attention_heads num_heads  num_self_attention_heads
        swa_num_attention_heads zero_expert_num
    """,
    2: """
        conf_num_hidden_layers decoder_layers depth encoder_layers linear_num_key_heads moe_k moe_top_k
        moe_topk n_group n_groups n_layer n_layers num_blocks num_codebooks num_decoder_layers
        num_encoder_layers num_experts_per_tok
        num_global_layers num_hidden_layers num_key_value_heads num_kv_heads num_layers
        num_quantizers num_self_attends_per_block o_groups swa_num_key_value_heads
    """,
    1: """
        first_k_dense_replace moe_num_shared_experts n_shared_experts num_dense_layers
        num_shared_experts topk_group
    """,
    256: """
        context_length max_2d_position_embeddings max_position_embeddings max_seq_len
        max_source_positions max_target_positions  n_ctx n_positions
        original_max_position_embeddings
    """,
    VOCABULARY: """
        decoder_vocab_size encoder_hash_byte_group_vocab entity_vocab_size ngram_vocab_size_base
        num_hash_buckets pronunciation_vocab_size shape_vocab_size unpadded_vocab_size vocab_size
        vocab_size_per_layer_input
    """,
}
_SIZE_OF: Mapping[str, int] = {
    name: size for size, names in _SIZES.items() for name in names.split()
}
_TOKENS: Mapping[str, int] = {
    "bos_token_id": 0,
    "cls_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": _END_OF_SEQUENCE,
    "forced_eos_token_id": _END_OF_SEQUENCE,
    "sep_token_id": _END_OF_SEQUENCE,
    "pad_token_id": 2,
    "mask_token_id": 3,
}
# The first that a configuration has is its number of layers.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")

# By the model type of a configuration, also of one inside another.
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    # with a cache it asks its outer configuration for a number of layers, which only the inner ones have
    "blt": {"use_cache": False},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
    },
    "dots1": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64},
    "dots3_note_text": {
        "head_dim": 24,
        "swa_head_dim": 24,
        "swa_kv_lora_rank": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 48,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "pad_token_id": 2},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": 128,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
    },
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoe_swa": {"shared_intermediate_size": 32},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "granitemoeshared": {"shared_intermediate_size": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    # a multiple of six coordinates
    "lilt": {"hidden_size": 96},
    "llama4_text": {"moe_layers": [1]},
    "mamba2": {"head_dim": 16, "num_heads": 8},
    "markuplm": {
        "max_depth": 4,
        "max_xpath_subs_unit_embeddings": 16,
        "max_xpath_tag_unit_embeddings": 16,
        "subs_pad_id": 14,
        "tag_pad_id": 14,
    },
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 16,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 4,
        "ple_layer_ids": [1],
        "split_ngram_parts": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [16, 16],
        "hash_seed": 0,
    },
    "t5": {"decoder_start_token_id": 0},
    # its keys are as wide as the next multiple of 64 after half of its width
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    # blocks are shared from the second hybrid layer on
    "zamba": {
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
    },
    "zaya": {"num_experts_per_tok": 1},
}


class NotBuilt(Exception):
    """There is no tiny model of this architecture that gives logits for token ids alone."""


def tiny_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    """Return a configuration of that type with about 64 hidden units and one layer of each kind, two at least.

    overrides are fields of the configuration. A field that is a configuration takes a mapping.
    """
    config_class = CONFIG_MAPPING[model_type]
    with _quiet():
        return _shrunk(config_class(), overrides)


def tiny_model(auto: str, model_type: str, **overrides: Any) -> PreTrainedModel:
    """Return a model in float32 and evaluation mode that `auto`, a name in ARCHITECTURES, builds.

    The same arguments give the same weights, and torch's random state stays as it was. A causal
    language model whose configuration has `is_decoder` gets True, without which it would look ahead.
    Raises NotBuilt with the reason.
    """
    refusal = NOT_BUILT.get(model_type)
    if refusal is not None:
        raise NotBuilt(refusal.reason)
    return build(auto, model_type, **overrides)


def build(auto: str, model_type: str, **overrides: Any) -> PreTrainedModel:
    """Return what `tiny_model` returns, but try what is known not to be built too."""
    config_class = CONFIG_MAPPING[model_type]
    if auto == "AutoModelForCausalLM" and "is_decoder" in _field_names(config_class):
        overrides = {"is_decoder": True, **overrides}
    if auto == "AutoModelForTokenClassification":
        # 0.1 where a configuration has no such field
        overrides = {"classifier_dropout": 0.0, **overrides}
    config = tiny_config(model_type, **overrides)
    auto_class = getattr(transformers, auto)
    with _quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.device("meta"):
            shapes = auto_class.from_config(config, dtype=torch.float32)
        parameters = sum(parameter.numel() for parameter in shapes.parameters())
        if parameters > MOST_PARAMETERS:
            raise NotBuilt(f"it has {parameters:,} parameters after shrinking: a rule is missing")
        model = auto_class.from_config(config, dtype=torch.float32)
        _make_weights_as_trained(model)
    return model.eval()


def example_ids() -> torch.Tensor:
    """Return token ids that every architecture takes, shape [2, 12].

    Each row ends with the only end of sequence in it: classifiers that read an encoder and a decoder
    take the state of that token.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(_FIRST_WORD, _LAST_WORD + 1, (2, 12), generator=generator)
    ids[:, -1] = _END_OF_SEQUENCE
    return ids


def _field_names(config_class: type[PretrainedConfig]) -> list[str]:
    return [field.name for field in dataclasses.fields(config_class)]


def _shrunk(start: PretrainedConfig, overrides: Mapping[str, Any]) -> PretrainedConfig:
    """Return a configuration of start's class in which each field has the value that its name asks for."""
    config_class = type(start)
    settings = {**_SETTINGS.get(config_class.model_type, {}), **overrides}
    class_defaults = vars(config_class())
    names = _field_names(config_class)
    layers = _Layers(start)
    media_tokens = iter(range(VOCABULARY - 1, _LAST_WORD, -1))
    changes: dict[str, Any] = {}
    for name in names:
        # attributes would also give what differs between layers, which is an error to ask for
        stored_as = config_class.attribute_map.get(name, name)
        value = vars(start).get(stored_as)
        if isinstance(value, PretrainedConfig):
            changes[name] = _shrunk(value, settings.pop(name, {}))
        elif layers.has_one_each(value):
            changes[name] = [_SIZE_OF.get(name, kept) for kept in layers.cut(value)]
        elif name in _LAYERS and value == layers.count:
            changes[name] = len(layers.kept)
        elif _is_media_token(name, value):
            changes[name] = next(media_tokens)
        else:
            # what another configuration gives its inner one stays, such as `is_decoder`
            kept = value if value != class_defaults.get(stored_as) else None
            changes[name] = _tiny_value(name, value, names, otherwise=kept)
    given = {name: value for name, value in changes.items() if value is not None}
    return config_class(**{**given, **settings})


def _tiny_value(name: str, value: Any, names: Sequence[str], otherwise: Any) -> Any:
    """Return what a field of that name is set to, or `otherwise` if no rule concerns it."""
    if name in _TOKENS:
        return _TOKENS[name]
    if name == "head_dim" and "qk_rope_head_dim" in names:
        return _SIZE_OF["qk_rope_head_dim"]
    if name == "head_dim" and value is None:
        return _SIZE_OF[name]
    if name == "num_key_value_heads" and "kv_lora_rank" in names:
        return _SIZE_OF["num_attention_heads"]
    if name in _SIZE_OF and type(value) is int and value > 0:
        return _SIZE_OF[name]
    if isinstance(value, float) and any(word in name for word in ("dropout", "pdrop", "jitter")):
        return 0.0
    if "softcap" in name or "soft_cap" in name:
        return 4.0
    if type(value) is float and value == 1.0 and name.endswith(_MULTIPLIERS):
        return 1.5
    if name.endswith("multipliers"):
        return [1.5] * len(value)
    return otherwise


_MULTIPLIERS = ("multiplier", "scaling", "scaling_factor", "logit_scale")


def _is_media_token(name: str, value: Any) -> bool:
    is_token = name.endswith(("_token_id", "_token_index"))
    return is_token and name not in _TOKENS and isinstance(value, int) and value >= VOCABULARY


class _Layers:
    """Which layers of a configuration stay: the first of each kind, and two at least."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.count = 0
        for name in _LAYERS:
            count = vars(config).get(name)
            if type(count) is int:
                self.count = count
                break
        kept = set[int]()
        for value in vars(config).values():
            if self.has_one_each(value):
                kept |= self._first_of_each_kind(value)
        for index in range(self.count):
            if len(kept) < 2:
                kept.add(index)
        self.kept = sorted(kept)

    def has_one_each(self, value: Any) -> bool:
        """Whether a field has an entry for each layer."""
        return isinstance(value, list | tuple) and self.count > 2 and len(value) == self.count

    def cut(self, value: Sequence[Any]) -> list[Any]:
        return [value[index] for index in self.kept]

    @staticmethod
    def _first_of_each_kind(value: Sequence[Any]) -> set[int]:
        first: dict[str, int] = {}
        for index, kind in enumerate(value):
            first.setdefault(str(kind), index)
        # more are not kinds but the layers' own numbers
        return set(first.values()) if len(first) <= 4 else set()


@torch.no_grad()
def _make_weights_as_trained(model: PreTrainedModel) -> None:
    """Give weights the size of trained ones, and fill what is initialized with one number."""
    for parameter in model.parameters():
        if not parameter.is_floating_point():
            continue
        is_constant = bool((parameter == parameter.flatten()[0]).all())
        if parameter.ndim > 1:
            parameter.mul_(3)
        if parameter.ndim < 2 or is_constant:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    saved_names = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name not in saved_names or not buffer.is_floating_point():
            continue
        if buffer.ndim < 2 or not buffer.any():
            # elements, because the last correction of one router is -1 and the others 0
            noise = torch.empty_like(buffer).uniform_(0.05, 0.5)
            buffer.copy_(torch.where(buffer == 0, noise, buffer))
        if bool((buffer == 1).all()):
            buffer.uniform_(0.5, 1.5)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence what transformers logs about the defaults of its own classes."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
