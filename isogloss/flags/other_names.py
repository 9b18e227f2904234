"""Say what is called otherwise elsewhere: flags of other trainers, and of our earlier versions.

Tests: tests/test_flags.py.
"""

import json

# Flags of other trainers (transformers, TRL, NeMo RL, ms-swift, tokenkit, KDFlow), and what does it
# here.
FOREIGN = {
    **dict.fromkeys(("lr", "max_lr"), "--learning_rate"),
    **dict.fromkeys(("batch_size", "train_batch_size", "global_batch_size",
                     "train_global_batch_size"), "train_batch_size of the ds_config"),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size"),
                    "train_micro_batch_size_per_gpu of the ds_config"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum_steps"),
                    "gradient_accumulation_steps of the ds_config"),
    **dict.fromkeys(("bf16", "fp16", "precision", "mixed_precision"),
                    "bf16 or fp16 of the ds_config"),
    **dict.fromkeys(("warmup_steps", "warmup_ratio", "lr_scheduler_type"),
                    "scheduler of the ds_config"),
    **dict.fromkeys(("weight_decay", "optim", "adam_beta1", "adam_beta2"),
                    "optimizer of the ds_config"),
    **dict.fromkeys(("max_grad_norm", "gradient_clipping"), "gradient_clipping of the ds_config"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "max_num_epochs"), "--epochs"),
    **dict.fromkeys(("max_steps", "train_steps", "num_train_steps", "max_num_steps"), "--steps"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "max_total_sequence_length"), "--max_length"),
    **dict.fromkeys(("model", "model_name", "model_name_or_path", "student_model_name_or_path"),
                    "--student"),
    **dict.fromkeys(("teacher_model_name_or_path", "teacher_name_or_path"), "--teacher"),
    **dict.fromkeys(("dataset", "dataset_name", "train_file", "dataset_path"), "--data"),
    "dataset_text_field": "--text_key", "dataset_num_proc": "--num_workers",
    "dataloader_num_workers": "--num_workers", "packing": "--pack", "torch_compile": "--compile",
    "gradient_checkpointing": "--activation_checkpointing", "attn_implementation": "--attention",
    "use_peft": "--lora_r", **dict.fromkeys(("lora_rank", "model_lora_rank"), "--lora_r"),
    **dict.fromkeys(("modules_to_save", "train_embeddings"), "--lora_embeddings"),
    "eval_steps": "--eval_every",
    "save_steps": "--save_every", "save_total_limit": "--keep_checkpoints",
    "resume_from_checkpoint": "--resume", "deepspeed": "--ds_config",
    "report_to": "--wandb_project, or a monitor of the ds_config",
    "push_to_hub": "python -m isogloss.export RUN --push_to_hub OWNER/NAME",
    "alpha": "--ce_weight and --kd_weight", "lmbda": "--on_policy",
    **dict.fromkeys(("kd_ratio", "sft_alpha", "uld_crossentropy_weight",
                     "uld_distillation_weight", "loss_weights"), "--ce_weight and --kd_weight"),
    **dict.fromkeys(("kd_temperature", "distill_temperature", "uld_student_temperature",
                     "uld_teacher_temperature", "binarization_temp"), "--temperature"),
    **dict.fromkeys(("gkd_logits_topk", "loss_top_k", "teacher_topk", "teacher_top_k"),
                    "--teacher_output_topk"),
    **dict.fromkeys(("teacher_model_server", "teacher_server_url", "teacher_server_base_url"),
                    "--teacher http://HOST:PORT"),
    **dict.fromkeys(("teacher_model", "teacher_model_path", "teacher_path"), "--teacher"),
    **dict.fromkeys(("student_model", "student_model_path", "student_path"), "--student"),
    "teacher_tokenizer_name_or_path": "--teacher_tokenizer",
    "teacher_model_revision": "--teacher NAME@REVISION",
    "teacher_tag_key": "--route_key", "offload_teacher_model": "--teacher_offload",
    **dict.fromkeys(("teacher_load_in_4bit", "load_in_4bit", "load_teacher_in_4bit"),
                    "--quantize nf4 of a student; a teacher is one whose files are quantized"),
    **dict.fromkeys(("teacher_tp_size", "vllm_tensor_parallel_size",
                     "teacher_tensor_parallel_size"), "--teacher_tp"),
    "n_model_parallel": "--teacher_tp",
    **dict.fromkeys(("kd_loss_fn", "kd_loss", "loss_type", "distill_loss", "losses"), "--loss"),
    "use_uld_loss": "--loss uld", "uld_use_hybrid_loss": "--loss hybrid_uld",
    "uld_hybrid_matched_weight": "--loss_options '{\"matched_weight\": 0.5}'",
    **dict.fromkeys(("vllm_mode", "vllm_server_base_url"), "--writer vllm"),
    "vllm_gpu_memory_utilization": "--writer \"... -m isogloss.vllm_writer --memory 0.3\"",
    "vllm_enable_sleep_mode": "--writer \"... -m isogloss.vllm_writer --sleep\"",
    "log_completions": "--rollout_log", "num_completions_to_print": "--rollout_log",
    "seq_kd": "--data with texts of the teacher (isogloss-write)",
    "max_student_length": "--max_length", "eval_interval": "--eval_every",
    "save_interval": "--save_every", "eval_at_step_zero": "--eval_every",
    "ppl_eval_data": "--eval_data",
    "train_model_mode": "--lora_r", "model_lora_alpha": "--lora_alpha",
    "max_new_tokens": "--rollout_tokens",
    "max_completion_length": "--rollout_tokens", "num_generations": "--rollouts_per_prompt",
    "use_vllm": "--writer vllm", "tensor_parallel_size": "--teacher_tp",
    "context_parallel_size": "--sequence_parallel",
}
# Flags of earlier versions that left, and the value that is always meant now.
LEFT = {"alm_mode": "binary_kl", "head_gradient": "micro_batch", "normalize_by_vocab": False,
        "projection_columns": "all", "ratio": "clamp", "teacher_alpha": 1.0, "token_entropy": 0.5,
        "teacher_connections": 8, "max_logp_gap": 0.1, "rollout_timeout": 800.0}
FOREIGN |= {name: f"{value} now, always; leave it out" for name, value in LEFT.items()}


def _option(flag, option, default):
    """Return (default, where it is now) of a flag that has become an option."""
    return default, f"--{flag} '{json.dumps({option: default})}'"


def _of_source(name, default):
    """Return the same of one that only an entry of --data says."""
    return default, f"--data '{json.dumps([{'data': 'NAME', name: default}])}'"


# Those that are elsewhere now: {name: (its default, where)}.
MOVED = {
    "jsd_beta": _option("loss_options", "beta", 0.5),
    "skew_lambda": _option("loss_options", "skew", 0.1),
    "akl_alpha": _option("loss_options", "alpha", 0.5),
    "loss_topk_of": _option("loss_options", "topk_of", "teacher"),
    "reverse_kl": _option("loss_options", "reverse", False),
    "chunk_average": _option("loss_options", "chunk_average", "p"),
    "uncommon_topk": _option("loss_options", "uncommon_topk", 8192),
    "matched_weight": _option("loss_options", "matched_weight", -1.0),
    "projection_topk": _option("loss_options", "projection_topk", 8192),
    "learn_projection": _option("loss_options", "learn_projection", False),
    "projection_learning_rate": _option("loss_options", "projection_learning_rate", 0.0),
    "eval_task_data": _option("eval_task_options", "data", ""),
    "eval_task_shots": _option("eval_task_options", "shots", -1),
    "eval_task_limit": _option("eval_task_options", "limit", 0),
    "eval_task_batch": _option("eval_task_options", "batch_size", 16),
    "eval_task_samples": _option("eval_task_options", "samples", 1),
    "eval_task_temperature": _option("eval_task_options", "temperature", 0.0),
    "allow_unsafe_code": _option("eval_task_options", "allow_unsafe_code", False),
    "tools_key": _of_source("tools_key", "tools"),
    "weight_key": _of_source("weight_key", ""),
    "drop_images": _of_source("drop_images", False),
    "txt_samples": _of_source("txt_samples", "line"),
    "token_half_life": (256.0, "--token_weights early:256"),
    "rollout_command": ("", "--writer COMMAND"),
    "log_comms": (False, '"comms_logger": {"enabled": true} of the ds_config'),
}
FOREIGN |= {name: where for name, (_, where) in MOVED.items()}
DEFAULTS_OF_BEFORE = LEFT | {name: default for name, (default, _) in MOVED.items()}
FOREIGN |= {"beta": FOREIGN["jsd_beta"], "vocab_topk": FOREIGN["projection_topk"]}
