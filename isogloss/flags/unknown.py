"""Say of an unknown flag what may have been meant.

Tests: tests/test_flags.py.
"""

import difflib

from isogloss.flags.other_names import LEFT, MOVED
from isogloss.flags.parse import fields_by_name

NEAR = 0.8  # of a name like ours; below it a name is more often another thing

# Flags of other trainers (transformers, TRL, NeMo RL, ms-swift, KDFlow, tokenkit, DistillKit, verl,
# slime), by what does it here.  What does nothing here is not among them.
HINTS = {
    "--learning_rate": "lr max_lr",
    "train_batch_size of the ds_config":
        "batch_size train_batch_size global_batch_size train_global_batch_size "
        "num_prompts_per_step rollout_batch_size",
    "train_micro_batch_size_per_gpu of the ds_config":
        "per_device_train_batch_size micro_batch_size train_micro_batch_size "
        "micro_train_batch_size",
    "gradient_accumulation_steps of the ds_config": "gradient_accumulation_steps grad_accum_steps",
    "bf16 or fp16 of the ds_config": "bf16 fp16 precision mixed_precision torch_dtype",
    "scheduler of the ds_config":
        "warmup_steps warmup_ratio lr_scheduler_type lr_scheduler_kwargs lr_warmup_ratio min_lr "
        "lr_scheduler lr_decay_style",
    "optimizer of the ds_config":
        "weight_decay optim optim_args adam_beta1 adam_beta2 adam_betas adam_epsilon",
    "zero_optimization of the ds_config": "fsdp fsdp_config cpu_offload",
    "gradient_clipping of the ds_config": "max_grad_norm gradient_clipping max_norm",
    "tensorboard of the ds_config": "tensorboard_enabled",
    "--epochs": "num_train_epochs num_epochs max_num_epochs total_epochs",
    "--steps": "max_steps train_steps num_train_steps max_num_steps total_training_steps "
               "num_rollout",
    "--max_length": "max_seq_length max_seq_len max_total_sequence_length max_student_length "
                    "max_input_seq_length max_len sequence_length",
    "--student": "model model_name model_name_or_path student_model_name_or_path student_model "
                 "student_model_path student_path train_model hf_checkpoint",
    "--student NAME@REVISION": "model_revision",
    "--teacher": "teacher_model_name_or_path teacher_name_or_path teacher_model "
                 "teacher_model_path teacher_path teacher_adapters opd_teacher_load",
    "--teacher NAME@REVISION": "teacher_model_revision",
    "--teacher http://HOST:PORT": "teacher_model_server teacher_server_url teacher_server_base_url "
                                  "rm_url",
    "--teachers": "teacher_model_group",
    "--teacher_tokenizer": "teacher_tokenizer_name_or_path",
    "--teacher_offload": "offload_teacher_model teacher_enable_sleep teacher_offload_tags",
    "--teacher_tp": "teacher_tp_size teacher_tensor_parallel_size tensor_parallel_size "
                    "tensor_model_parallel_size",
    "--teacher_engine": "teacher_deepspeed",
    "--teacher_output_topk": "gkd_logits_topk loss_top_k teacher_topk teacher_top_k topk_logits_k "
                             "teacher_topk_ipc_k topk",
    "--teacher_weights": "kd_loss_mode sum_weights_metric",
    "--quantize nf4 of a student; a teacher is one whose files are quantized":
        "teacher_load_in_4bit load_in_4bit load_teacher_in_4bit bnb_4bit_quant_type",
    "--data": "dataset dataset_name train_file train_files dataset_path train_dataset_path "
              "train_dataset data_files arrow_files prompt_data disk_path repo_id",
    "--data NAME:CONFIG": "dataset_config subset",
    "--data '[{\"data\": \"NAME\", \"weight\": 1}, ...]'": "train_dataset_probs",
    "--data with texts of the teacher (isogloss-write)": "seq_kd",
    "--join_rows": "characters_per_sample",
    "--text_key": "dataset_text_field",
    "--text_key or --prompt_key": "input_key",
    "--completion_key": "output_key",
    "--teacher_prompt_key": "teacher_input_key",
    "--template_kwargs": "chat_template_kwargs apply_chat_template_kwargs",
    "--template_kwargs '{\"enable_thinking\": false}'": "enable_thinking",
    "--train_on": "completion_only_loss assistant_only_loss",
    "--route_key": "teacher_tag_key",
    "--split": "train_split dataset_train_split",
    "--streaming": "dataset_streaming",
    "--num_workers": "dataset_num_proc dataloader_num_workers preprocess_num_workers",
    "--pack": "packing padding_free packing_samples sequence_packing",
    "--eval_data": "ppl_eval_data eval_dataset eval_dataset_path val_dataset val_files",
    "--eval_rows": "max_val_samples num_eval_samples split_dataset_ratio",
    "--eval_split": "dataset_test_split",
    "--eval_samples": "num_val_samples_to_print",
    "--eval_every": "eval_steps eval_interval eval_at_step_zero eval_strategy val_period "
                    "val_at_start val_at_end test_freq",
    "--save_every": "save_steps save_interval save_strategy save_period save_freq",
    "--keep_checkpoints": "save_total_limit keep_top_k",
    "--resume": "resume_from_checkpoint load_checkpoint",
    "--resume never": "overwrite_output_dir",
    "--output_dir": "checkpoint_dir log_dir logging_dir ckpt_path default_local_dir",
    "--export": "save_path output_path",
    "python -m isogloss.export RUN --push_to_hub OWNER/NAME": "push_to_hub hub_model_id",
    "--wandb_project": "wandb_enabled project_name",
    "--wandb_project, or a monitor of the ds_config": "report_to",
    "--ds_config": "deepspeed",
    "--seed": "data_seed",
    "--compile": "torch_compile",
    "--attention": "attn_implementation",
    "--attention flash_attention_2": "use_flash_attention",
    "--activation_checkpointing": "gradient_checkpointing gradient_checkpointing_kwargs "
                                  "recompute_granularity",
    "--activation_offload": "activation_offloading",
    "--sequence_parallel": "context_parallel_size",
    "--lora_r": "use_peft lora_rank model_lora_rank train_model_mode tuner_type train_type",
    "--lora_alpha": "model_lora_alpha",
    "--lora_targets": "lora_target_modules target_modules",
    "--lora_embeddings": "modules_to_save lora_modules_to_save train_embeddings",
    "--router_weight": "router_aux_loss_coef",
    "--ce_weight and --kd_weight": "alpha kd_ratio sft_alpha uld_crossentropy_weight "
                                   "uld_distillation_weight loss_weights",
    "--ce_weight": "ce_loss_scale",
    "--kd_weight": "kl_loss_weight distillation_loss_coef opd_kl_coef",
    "--dynamic_scale": "dynamic_loss_scaling",
    "--temperature": "kd_temperature distill_temperature uld_student_temperature "
                     "uld_teacher_temperature binarization_temp",
    "--loss": "kd_loss_fn kd_loss loss_type distill_loss losses kd_algorithm loss_mode",
    "--loss, --ce_weight and --kd_weight": "loss_functions",
    "--loss uld": "use_uld_loss",
    "--loss hybrid_uld": "uld_use_hybrid_loss",
    "--loss gold": "gold_loss",
    "--loss h_kl": "xtoken_loss",
    "--loss_options '{\"matched_weight\": 0.5}'": "uld_hybrid_matched_weight",
    "--loss_options '{\"learn_projection\": true}'": "learnable",
    "--loss_topk": "opd_log_prob_top_k",
    "--loss_options '{\"topk_of\": \"student\"}'": "opd_top_k_strategy",
    "--projection": "projection_matrix_path",
    "--on_policy": "lmbda use_opd",
    "--writer vllm": "use_vllm vllm_mode vllm_server_base_url",
    "--writer \"... -m isogloss.vllm_writer --memory 0.3\"": "vllm_gpu_memory_utilization",
    "--writer \"... -m isogloss.vllm_writer --sleep\"": "vllm_enable_sleep_mode",
    "--writer \"... -m isogloss.vllm_writer --tensor_parallel 1\"":
        "vllm_tensor_parallel_size rollout_tp_size",
    "--rollout_log": "log_completions num_completions_to_print",
    "--rollout_tokens": "max_new_tokens max_completion_length max_response_length response_length "
                        "rollout_max_response_len",
    "--rollouts_per_prompt": "num_generations num_generations_per_prompt n_samples_per_prompt "
                             "rollout_n",
    "--rollout_every": "num_iterations",
    "--rollout_top_p": "top_p",
    "--num_gpus of the launcher, in front of all others":
        "num_gpus num_gpus_per_node gpus_per_node n_gpus_per_node",
    "--num_nodes of the launcher, in front of all others": "num_nodes nnodes",
    "--hostfile of the launcher, in front of all others": "hostfile",
    "--master_port of the launcher, in front of all others": "master_port main_process_port",
    "--include of the launcher, in front of all others": "include",
}
FOREIGN = {name: answer for answer, names in HINTS.items() for name in names.split()}
FOREIGN |= {name: f"{value} now, always; leave it out" for name, value in LEFT.items()}
FOREIGN |= {name: where for name, (_, where) in MOVED.items()}
FOREIGN |= {"beta": FOREIGN["jsd_beta"], "adaptive_alpha": FOREIGN["akl_alpha"],
            "vocab_topk": FOREIGN["projection_topk"]}
# Theirs that look like one of ours, and nothing does it here.
UNLIKE = "teacher_model_type", "rollout_stop"


def _nearest(name, names, aliases):
    """Return the known name most like `name`, for a letter one that begins with it, or None."""
    if len(name) == 1:
        return next((known for known in names if known.startswith(name)), None)
    near = difflib.get_close_matches(name, [*names, *aliases], 1, NEAR)
    if not near:
        return None
    return aliases.get(near[0], near[0])


def refuse_unknown(kind, flag, name, aliases):
    """Raise a ValueError for a flag that a dataclass does not have.

    Args:
        flag: as it was written; name: of the field that it would be.
        aliases: {other name of a flag: field name}.
    """
    answer = FOREIGN.get(name) if getattr(kind, "has_foreign", False) else None
    if answer:
        raise ValueError(f"unknown flag {flag}; it is {answer}")
    near = None if name in UNLIKE else _nearest(name, fields_by_name(kind), aliases)
    hint = f"did you mean --{near}?" if near else "--help lists them all"
    if flag.startswith("--"):
        raise ValueError(f"unknown flag --{name}; {hint}")
    raise ValueError(f"unknown flag {flag}; flags begin with two hyphens; {hint}")
