"""Each key that a class of MindFormers declares is understood."""

import contextlib

import pytest

from mfwrap.runner import RecipeError
from mfwrap.runner.mindformers.architectures.core import _ALIASES, _IGNORED
from mfwrap.runner.mindformers.architectures.core_experts import _ALIASES as _EXPERT_ALIASES
from mfwrap.runner.mindformers.architectures.vocabulary import NO_EFFECT, VOCABULARY
from support.model_config import converted_section

DECLARED = {
    "BertConfig": """
        assessment_method attention_probs_dropout_prob batch_size checkpoint_name_or_path
        compute_dtype dropout_prob dtype hidden_act hidden_dropout_prob hidden_size
        initializer_range intermediate_size is_training layernorm_dtype
        max_position_embeddings model_type moe_config num_attention_heads num_hidden_layers
        num_labels parallel_config post_layernorm_residual seq_length softmax_dtype
        type_vocab_size use_one_hot_embeddings use_past use_relative_positions vocab_size
    """,
    "BloomConfig": """
        attention_dropout_rate batch_size bos_token_id checkpoint_name_or_path compute_dtype
        do_sample embedding_dropout_prob embedding_init_type eos_token_id expand_ratio
        hidden_act hidden_dropout_rate hidden_size is_npu_acceleration
        is_sample_acceleration layernorm_compute_type max_decode_length moe_config num_heads
        num_layers pad_token_id parallel_config param_init_type repetition_penalty
        seq_length softmax_compute_type top_k top_p unk_token_id use_flash_attention
        use_past use_select_recompute use_seq_parallel vocab_size
    """,
    "ChatGLM2Config": """
        add_bias_linear add_qkv_bias apply_query_key_layer_scaling
        apply_residual_connection_post_layernorm attention_dropout attention_softmax_in_fp32
        batch_size bias_dropout_fusion block_size bos_token_id checkpoint_name_or_path
        compute_dtype embedding_type enable_high_performance eos_token_id ffn_hidden_size
        fine_grain_interleave fp32_residual_connection gmask_token_id hidden_dropout
        hidden_size is_dynamic is_flexible_shape kv_channels layernorm_compute_type
        layernorm_epsilon mask_generate mask_type max_length mlp_concat
        multi_query_attention multi_query_group_num no_recompute_layers num_attention_heads
        num_blocks num_layers offset pad_token_id padded_vocab_size parallel_config
        param_init_type post_layer_norm post_mlp_layernorm post_self_attn_layernorm
        pp_interleave_num pre_seq_len prefix_name prefix_projection qkv_concat
        quantization_bit repetition_penalty residual_dtype rmsnorm rope_ratio rotary_dtype
        seq_length use_flash_attention use_incre_flash_attention use_kvcache_op
        use_paged_attention use_past use_prompt_flash_attention use_rearrange_rope
        use_ring_attention
    """,
    "DeepseekV2Config": """
        batch_size block_size bos_token_id checkpoint_name_or_path compute_dtype
        compute_in_2d do_sample embedding_init_type enable_fa_var_len eos_token_id
        extend_method ffn_dim_multiplier fine_grain_interleave hidden_size ignore_token_id
        init_method_std intermediate_size is_dynamic is_flexible_shape kv_lora_rank
        layernorm_compute_type max_decode_length max_position_embeddings moe_config
        multiple_of n_kv_heads num_blocks num_heads num_layers offset pad_token_id
        parallel_config param_init_type pp_interleave_num pretrain_seqlen q_lora_rank
        qk_nope_head_dim qk_rope_head_dim qkv_concat qkv_has_bias repetition_penalty
        return_extra_loss rms_norm_eps rotary_dtype scaling_factor seq_length
        softmax_compute_type theta top_k top_p use_flash_attention use_fused_rope
        use_fused_swiglu use_incre_flash_attention use_kvcache_op use_paged_attention
        use_past use_past_shard use_prompt_flash_attention use_rope_slice v_head_dim
        vocab_size
    """,
    "DeepseekV3Config": """
        batch_size block_size bos_token_id checkpoint_name_or_path compute_dtype do_sample
        enable_fa_var_len enable_micro_batch eos_token_id extend_method ffn_concat
        ffn_dim_multiplier fine_grain_interleave hidden_size ignore_token_id init_method_std
        input_sliced_sig intermediate_size is_dynamic is_mtp_model kv_lora_rank
        layernorm_compute_type max_decode_length max_position_embeddings moe_config
        mtp_depth mtp_loss_factor multiple_of n_kv_heads num_blocks num_heads num_layers
        offset pad_token_id parallel_config param_init_type pp_interleave_num q_lora_rank
        qk_nope_head_dim qk_rope_head_dim qkv_concat qkv_has_bias repetition_penalty
        return_extra_loss return_hidden_states rms_norm_eps rotary_dtype scaling_factor
        seq_length softmax_compute_type theta top_k top_p use_flash_attention use_fused_rope
        use_fused_swiglu use_past v_head_dim vocab_size
    """,
    "GPT2Config": """
        attention_dropout_rate batch_size block_size bos_token_id checkpoint_name_or_path
        compute_dtype do_sample embedding_dropout_prob eos_token_id expand_ratio hidden_act
        hidden_dropout_rate hidden_size is_dynamic layernorm_compute_type max_decode_length
        max_position_embeddings moe_config num_blocks num_heads num_labels num_layers offset
        pad_token_id parallel_config param_init_type post_layernorm_residual
        repetition_penalty seq_length softmax_compute_type top_k top_p unk_token_id
        use_flash_attention use_past use_prompt_flash_attention vocab_size
    """,
    "InternLM2Config": """
        batch_size block_size bos_token_id checkpoint_name_or_path compute_dtype do_sample
        eos_token_id extend_method ffn_dim_multiplier fine_grain_interleave hidden_size
        ignore_token_id intermediate_size is_dynamic layernorm_compute_type
        max_decode_length max_position_embedding multiple_of n_kv_heads num_blocks num_heads
        num_layers offset pad_token_id parallel_config param_init_type qkv_concat
        repetition_penalty rms_norm_eps rotary_dtype scaling_factor seq_length
        softmax_compute_type theta top_k top_p use_flash_attention use_past use_rope_slice
        vocab_size
    """,
    "InternLMConfig": """
        batch_size block_size bos_token_id checkpoint_name_or_path compute_dtype
        compute_in_2d do_sample eos_token_id extend_method ffn_dim_multiplier has_bias
        hidden_size ignore_token_id intermediate_size is_dynamic is_flexible_shape
        layernorm_compute_type max_decode_length max_position_embedding multiple_of
        n_kv_heads num_blocks num_heads num_layers offset pad_token_id parallel_config
        param_init_type pretrain_seqlen repetition_penalty rms_norm_eps rotary_dtype
        scaling_factor seq_length softmax_compute_type theta top_k top_p use_flash_attention
        use_kvcache_op use_past use_past_shard use_rope_slice vocab_size
    """,
    "LlamaConfig": """
        attn_proj_has_bias batch_size block_size bos_token_id calculate_per_token_loss
        checkpoint_name_or_path chunk_prefill compute_dtype compute_in_2d do_sample
        embedding_init_type eos_token_id extend_method ffn_dim_multiplier
        fine_grain_interleave fused_rms_norm hidden_size ignore_token_id init_method_std
        input_sliced_sig intermediate_size is_dynamic is_flexible_shape
        layernorm_compute_type llm_backend max_decode_length max_position_embedding
        moe_config multiple_of n_kv_heads num_blocks num_heads num_layers offset
        pad_token_id parallel_config parallel_optimizer param_init_type pipeline_stage
        pp_interleave_num pretrain_seqlen qkv_concat qkv_has_bias quant quant_config
        repetition_penalty residual_dtype return_hidden_states rms_norm_eps
        rmsnorm_compute_2d rotary_dtype scaling_factor seq_length softmax_compute_type theta
        tie_word_embeddings top_k top_p use_attn_mask_compression
        use_eod_attn_mask_compression use_flash_attention use_incre_flash_attention
        use_kvcache_op use_paged_attention use_past use_past_shard
        use_prompt_flash_attention use_ring_attention use_rope_slice vocab_size
    """,
    "MoEConfig": """
        aux_loss_factor aux_loss_factors aux_loss_types balance_via_topk_bias
        callback_moe_droprate capacity_factor cold_token_percent comp_comm_parallel
        comp_comm_parallel_degree cur_layer dispatch_global_max_bs enable_cold_hot_expert
        enable_deredundency enable_gmm_safe_tokens enable_sdrop ep_extend_tp
        expert_group_size expert_model_parallel expert_num first_k_dense_replace
        group_wise_a2a hot_expert_num max_router_load moe_intermediate_size moe_module_name
        moe_shared_expert_overlap n_group norm_topk_prob npu_nums_per_device
        num_experts_chosen routed_scaling_factor router_dense_type routing_policy
        save_token_distribution shared_expert_num topk_bias_update_rate topk_group
        topk_method update_step use_allgather_dispatcher use_fused_ops_permute
        use_fused_ops_topkrouter use_gating_sigmoid use_gmm use_shared_expert_gating
        z_loss_factor
    """,
    "QwenConfig": """
        embedding_parallel_optimizer enable_emb_opt enable_slice_dp
    """,
    "SwinConfig": """
        attention_probs_dropout_prob checkpoint_name_or_path depths drop_path_rate embed_dim
        hidden_act hidden_dropout_prob image_size layer_norm_eps loss_type mlp_ratio
        moe_config num_channels num_heads num_labels parallel_config param_init_type
        patch_norm patch_size qkv_bias shift_size use_absolute_embeddings weight_init
        window_size
    """,
    "T5Config": """
        attention_dropout_rate batch_size checkpoint_name_or_path compute_dtype d_ff d_kv
        do_sample dtype embedding_dropout_prob eos_token_id has_relative_bias hidden_act
        hidden_dropout_rate hidden_size initializer_factor initializer_range
        is_encoder_decoder layer_norm_epsilon layernorm_compute_type length_penalty_weight
        max_decode_length max_length max_position_embeddings moe_config num_decoder_layers
        num_heads num_layers offset pad_token_id parallel_config param_init_type
        post_layernorm_residual relative_attention_num_buckets repetition_penalty
        scale_output seq_length softmax_compute_type start_token_id top_k top_p use_cache
        use_past vocab_size
    """,
    "ViTConfig": """
        attention_probs_dropout_prob checkpoint_name_or_path drop_path_rate encoder_stride
        hidden_act hidden_dropout_prob hidden_size image_size init_values initializer_range
        intermediate_size layer_norm_eps layernorm_compute_type loss_type moe_config
        num_attention_heads num_channels num_classes num_hidden_layers num_labels
        parallel_config param_init_type patch_size post_layernorm_residual qkv_bias
        softmax_compute_type use_mean_pooling
    """,
    "WizardCoderConfig": """
        attention_probs_dropout_prob batch_size checkpoint_name_or_path compute_dtype
        do_sample dropout_prob eos_token eos_token_id expand_ratio hidden_act
        hidden_dropout_prob hidden_size initializer_range is_encoder_decoder layernorm_dtype
        max_length moe_config n_position num_heads num_layers pad_token parallel_config
        param_init_type repetition_penalty seq_length softmax_dtype start_token_id top_k
        top_p use_flash_attention use_past use_select_recompute use_seq_parallel vocab_size
    """,
}
"""Arguments of MindFormers' classes of configurations, of releases 0.6 to 1.8 and dev and master.
"""

EXPERTS = {"expert_num": 4, "shared_expert_num": 1, "norm_topk_prob": False}


def is_known(name, key):
    """Return whether a key is sorted, or its value refused, rather than unknown."""
    experts = EXPERTS if "Deepseek" in name or name == "MoEConfig" else {}
    settings = {"type": name, "extend_method": "None"}
    if name == "MoEConfig":
        settings["type"] = "DeepseekV2Config"
        experts = experts | {key: "?"}
    else:
        settings[key] = "?"
    try:
        converted_section(settings, experts)
    except RecipeError as error:
        return f".{key}: " in str(error) and "unknown key" not in str(error)
    return True


@pytest.mark.parametrize("name", DECLARED)
def test_each_declared_key_is_known(name):
    """A key that MindFormers declares is converted, sorted, or refused for its value."""
    assert [key for key in DECLARED[name].split() if not is_known(name, key)] == []


CORE = {*DECLARED["DeepseekV3Config"].split(), *_ALIASES, *_EXPERT_ALIASES, *_IGNORED} | {
    "rope_scaling",
    "rope_parameters",
    "position_embedding_type",
    "moe_layer_freq",
    "moe_router_score_function",
    "topk_method",
    "hidden_act",
    "architectures",
}


@pytest.mark.parametrize("value", [[1], {"a": 1}, -1, 0.5, True], ids=repr)
@pytest.mark.parametrize("name", [*DECLARED, "qwen3_moe", "glm4_moe"])
def test_a_value_of_a_wrong_type_is_accepted_or_refused(name, value):
    """No value of a key raises another error than `RecipeError`."""
    of_experts = name == "MoEConfig"
    head = {"type": "DeepseekV3Config" if of_experts else name}
    if name not in DECLARED:
        head = {"model_type": name}
    for key in [*DECLARED.get(name, " ".join(CORE)).split(), "type", "model_type"]:
        settings = head if of_experts else head | {key: value}
        experts = EXPERTS | ({key: value} if of_experts else {})
        is_mixture = of_experts or "Deepseek" in name
        with contextlib.suppress(RecipeError):
            converted_section(settings, experts if is_mixture else None)


def test_a_key_belongs_to_one_list():
    """A key of every model is not also one of some class."""
    assert NO_EFFECT.isdisjoint(VOCABULARY)
