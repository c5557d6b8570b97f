"""Keys of MindFormers' model configurations that do not describe the network.

Source: the classes of configurations and networks of MindFormers 0.6 to 1.8 and of its branches
dev and master.
"""

_GENERATION = """
    assistant_token_id block_size boost_model_name chunk_prefill dispatch_global_max_bs do_sample
    enable_micro_batch gmask_token_id is_dynamic is_encoder_decoder is_flexible_shape is_mtp_model
    is_npu_acceleration is_sample_acceleration is_training length_penalty_weight llm_backend
    mask_token_id max_decode_length max_length max_new_tokens min_length min_new_tokens num_block
    num_blocks parallel_decoding_params phase repetition_penalty return_hidden_states run_mode
    start_token_id temperature top_k top_p unk_token_id use_cache use_incre_flash_attention
    use_kbk_infer use_kvcache_op use_paged_attention use_past use_past_shard
    use_prompt_flash_attention user_token_id
"""
_LAYOUT = """
    embedding_parallel_optimizer enable_emb_opt enable_slice_dp ffn_concat fine_grain_interleave
    lm_head_dp mla_qkv_concat mlp_concat offset parallel_optimizer pipeline_stage pp_interleave_num
    qkv_concat seq_parallel seq_split_num sequence_parallel stage_num start_stage tp_x tp_y tp_z
    use_3d_tensor_parallel use_contiguous_weight_layout use_contiguous_weight_layout_attention
    use_interleaved_weight_layout_mlp use_select_recompute use_seq_parallel
"""
_KERNELS = """
    apply_query_key_layer_scaling apply_rope_fusion bias_dropout_fusion bias_swiglu_fusion
    compute_in_2d disable_lazy_inline enable_high_performance fused_norm fused_rms_norm
    input_layout pretrain_seqlen rmsnorm_compute_2d use_attn_mask_compression use_flash_attention
    use_fused_mla use_fused_rope use_fused_swiglu use_one_hot_embeddings use_rearrange_rope
    use_ring_attention use_rope_slice
"""
_NAMES = """
    _name_or_path architectures auto_map auto_register base_model_pp_plan base_model_tp_plan
    mindformers_version model_name model_type name net_name prefix_name tokenizer_class
    transformers_version type
"""
_DATA = "input_sliced_sig prompt prompt_length"

_ELSEWHERE = """
    attention_softmax_in_fp32 batch_size calculate_per_token_loss check_for_nan_in_loss_and_grad
    checkpoint_name_or_path compute_dtype compute_type data_parallel dataset_config dtype
    embedding_init_type embedding_type fp16_lm_cross_entropy fp32_residual_connection
    ignore_token_id layernorm_compute_dtype layernorm_compute_type layernorm_dtype mask_type
    micro_batch_interleave_num micro_batch_num moe_router_dtype monitor_config mp_comm_recompute
    no_recompute_layers parallel_config parallel_optimizer_comm_recompute param_init_type
    params_dtype print_separate_loss recompute_slice_activation res_dtype residual_dtype rl_config
    rotary_dtype router_dense_type select_comm_recompute select_comm_recompute_exclude
    select_recompute select_recompute_exclude softmax_compute_dtype softmax_compute_type
    softmax_dtype torch_dtype
"""

NO_EFFECT = frozenset(f"{_GENERATION} {_LAYOUT} {_KERNELS} {_NAMES} {_DATA} {_ELSEWHERE}".split())
"""Keys of any model that do not describe the network: text generation, the layout of weights on
devices, the choice among kernels for the same function, names, and what other sections of a recipe
express, such as the precision, which the importer has taken by then."""

_VOCABULARY_KEYS = """
    add_bias_linear add_qkv_bias apply_residual_connection_post_layernorm assessment_method
    attention_dropout attention_dropout_prob attention_dropout_rate attention_probs_dropout_prob
    attn_proj_has_bias drop_path_rate dropout_prob dropout_rate emb_dropout_prob
    embed_dropout_prob embedding_dropout_prob encoder_stride eos_token extend_method
    ffn_dim_multiplier has_bias has_relative_bias hidden_act hidden_dropout hidden_dropout_prob
    hidden_dropout_rate init_method_std initializer_factor initializer_range interleaved_qkv
    kv_channels layer_norm_eps layer_norm_epsilon layernorm_epsilon logit_scale_init_value
    loss_type max_position_embedding max_position_embeddings moe_config multi_query_attention
    multiple_of num_labels out_proj_has_bias pad_token post_layer_norm post_layernorm_residual
    post_mlp_layernorm post_self_attn_layernorm pre_seq_len prefix_projection qkv_bias
    qkv_has_bias relative_attention_num_buckets return_extra_loss rms_norm_eps rmsnorm rope_ratio
    rotary_emb_base rotary_pct rotary_percent scale_output scaling_factor shift_size theta
    tie_word_embeddings use_absolute_embeddings use_mean_pooling use_relative_positions
    weight_init
"""
VOCABULARY = frozenset(_VOCABULARY_KEYS.split())
"""Keys that some class of MindFormers reads. The others store such a key and do not use it."""

_EXPERTS = """
    callback_moe_droprate comp_comm_parallel comp_comm_parallel_degree enable_gmm_safe_tokens
    enable_sdrop group_wise_a2a moe_shared_expert_overlap npu_nums_per_device use_fused_ops_permute
    use_fused_ops_topkrouter
"""
_EARLY_EXPERTS = """
    aux_loss_factor cold_token_percent cur_layer enable_cold_hot_expert enable_deredundency
    ep_extend_tp expert_group_size expert_model_parallel hot_expert_num max_router_load
    moe_module_name routing_policy save_token_distribution update_step use_allgather_dispatcher
"""
EXPERTS_NO_EFFECT = frozenset(f"{_EXPERTS} {_EARLY_EXPERTS}".split())
"""Keys of ``moe_config`` before MindFormers' core of 2025 that do not change the numbers: its
routers for language models do not add the loss of ``aux_loss_factor``, and ``enable_sdrop`` only
chooses the tokens to drop."""

_CORE = """
    attn_allgather attn_allreduce attn_reduce_scatter context_parallel context_parallel_algo
    context_parallel_size cp_comm_type cpu_offloading cpu_offloading_num_layers data_parallel_size
    default_prefetch expert_model_parallel_size expert_parallel expert_tensor_parallel_size
    ffn_allgather ffn_allreduce ffn_reduce_scatter gradient_aggregation_group
    hierarchical_context_parallel_sizes layer_swap mask_func_type model_architecture model_parallel
    moe_router_pre_softmax mtp_loss_factor mtp_loss_scaling_factor multi_latent_attention
    num_decoder_layers num_encoder_layers op_swap pipeline_model_parallel_size post_process
    pre_process rotary_cos_format rotary_interleaved sandwich_norm sparse_mode swap
    tensor_model_parallel_size track_max_attention_logit ulysses_degree_in_cp use_alltoall
    use_attention_mask use_rope_scaling virtual_pipeline_model_parallel_size vocab_emb_dp
    window_attn_skip_freq
"""
_CORE_EXPERTS = """
    enable_expert_relocation expert_relocation_freq expert_relocation_initial_iteration
    moe_grouped_gemm moe_permute_fusion moe_router_fusion moe_router_load_balancing_type
    moe_token_dispatcher_type moe_token_drop_policy print_expert_load use_gmm use_pad_tokens
"""
CORE_NO_EFFECT = frozenset(f"{_EXPERTS} {_CORE} {_CORE_EXPERTS}".split())
"""Further keys of MindFormers' core that do not change the numbers."""
