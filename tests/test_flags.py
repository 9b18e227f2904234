"""The command line of a dataclass: typed values, errors in one line, a help without gaps."""

import json
import os
import re
import subprocess
import sys
from dataclasses import MISSING, dataclass, fields

import pytest

from conftest import ROOT
from isogloss import command, distill
from isogloss.config import FIRST_COMMAND, Config, configs_by_teacher
from isogloss.flags import parse as flags
from isogloss.flags.help import help_text
from isogloss.flags.other_names import LEFT
from isogloss.flags.parse import PATH_FLAGS, check_types, expanded, parse_flags
from isogloss.flags.unknown import FOREIGN, UNLIKE
from isogloss.projection_tools.__main__ import COMMANDS as TOOLS, BuildArgs, ExactArgs

KINDS = {name: kind for name, kind in TOOLS.items() if name != "pairs"} | {"distill": Config}
COMMANDS = KINDS | {f"isogloss.{name}": kind for name, (kind, _) in command.TOOLS.items()}


@dataclass(kw_only=True)
class Small:
    """Do something small,
    on two lines.

    This paragraph is not part of the summary.
    """

    text: str = flags.flag(
        MISSING, 'a text (or: a name), such as {"model": "A", "weight": 2}: not_a_flag: a colon.')
    count: int = flags.flag(1, "1 or more.")
    ratio: float = flags.flag(0.5, "0 to 1.")
    pack: bool = flags.flag(False, "put them together.")
    path: str = flags.flag("", "where to write.")

    def __post_init__(self):
        check_types(self)


def normalized(text):
    return " ".join(text.split())


def parse(*argv, **options):
    return parse_flags(Small, list(argv), **options)


# --- values ---------------------------------------------------------------------------------------


def test_values_have_the_type_of_their_field():
    args = parse("--text=2024", "--count=1e3", "--ratio=1", "--pack=true", "--path=false")
    assert args == Small(text="2024", count=1000, ratio=1.0, pack=True, path="false")
    assert type(args.count) is int and type(args.ratio) is float


def test_a_text_stays_as_it_was_written():
    for text in ("2024", "1e3", "false", "None", "[1]", "'a'", "a=b", "a b", "", "-", "-x", "--x"):
        assert parse(f"--text={text}").text == text
    # Fire takes a lone hyphen for the end of the flags, and a number for itself.
    assert parse("--text", "-").text == "-"
    assert parse("--text", "-1").text == "-1"
    teachers = '[{"model": "A", "weight": 2}]'
    assert parse("--text", teachers).text == teachers


def test_hyphens_and_underscores_are_equal():
    args = parse_flags(BuildArgs, ["--student=a", "--teacher=b", "--output=c", "--top-k=2"])
    other = parse_flags(BuildArgs, ["--student=a", "--teacher=b", "--output=c", "--top_k", "2"])
    assert args == other and args.top_k == 2


def test_a_bool_flag_may_stand_alone():
    assert parse("--text=a", "--pack").pack
    assert parse("--pack", "--text=a").pack
    assert parse("--pack", "True", "--text=a").pack
    assert not parse("--text=a", "--pack", "--nopack").pack  # the last one counts
    assert not parse("--text=a", "--pack=False").pack


def test_positional_words_fill_their_fields_first():
    expected = Small(text="a", path="b", count=2)
    assert parse("a", "b", "--count=2", positional=("text", "path")) == expected
    assert parse("a", "--path=b", positional=("text", "path")).path == "b"


def test_an_alias_is_the_flag_itself():
    aliases = {"old_text": "text"}
    for flag in ("--old_text", "--old-text", "--text"):
        assert parse(f"{flag}=a", aliases=aliases).text == "a"
        assert parse(flag, "a", aliases=aliases).text == "a"
    assert parse("--old_text=a", "--text=b", aliases=aliases).text == "b"
    # A misspelled alias leads to the flag's name, not to the alias.
    with pytest.raises(ValueError, match="unknown flag --old_txt; did you mean --text"):
        parse("--old_txt=a", aliases=aliases)
    with pytest.raises(ValueError, match="unknown flag --old_text"):
        parse("--old_text=a")


# --- errors ---------------------------------------------------------------------------------------

WRONG = {
    "--txt=a": "unknown flag --txt; did you mean --text?",
    "--text=a --qqq": "unknown flag --qqq; --help lists them all",
    "--text=a --notext": "unknown flag --notext; did you mean --text?",
    "--text=a --nopack=true": "--nopack takes no value; write --pack=true",
    "--text=a -c 3": "unknown flag -c; flags begin with two hyphens; did you mean --count?",
    "--text=a -z": "unknown flag -z; flags begin with two hyphens; --help lists them all",
    "--text=a -count=3": "unknown flag -count; flags begin with two hyphens; did you mean --count?",
    "--text=a b": "unexpected argument 'b': a value follows a flag, as in --text VALUE",
    "--text=a -- --interactive": "unexpected argument '--': no flags of another kind",
    "--count=3": "--text is missing; --help describes every flag",
    "--text": "--text needs a value, as in --text=VALUE",
    "--text=a --count": "--count needs a value",
    "--text=a --count=many": "--count=many: expected int, got str",
    "--text=a --count=1.5": "--count=1.5: expected int, got float",
    "--text=a --count=true": "--count=true: expected int, got str",
    "--text=a --count=True": "--count=True: expected int, got bool",
    "--text=a --ratio=1e999": "--ratio inf: expected a number",
    "--text=a --ratio=nan": "--ratio=nan: expected float, got str",
    "--text=a --ratio=True": "--ratio=True: expected float, got bool",
    "--text=a --pack=1": "--pack=1: expected bool, got int",
    "--text=a --pack=no": "--pack=no: expected bool, got str",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_says_what_is_wrong(line):
    with pytest.raises(ValueError, match=re.escape(WRONG[line])) as error:
        parse(*line.split())
    assert "\n" not in str(error.value)


# --- paths ----------------------------------------------------------------------------------------

# Flags whose descriptions speak of files, but whose values are none.
NO_PATHS = {"environment", "split", "teacher_dtype", "teachers", "dtype",
            "push_to_hub", "loss", "eval_split", "train_on", "lora_targets"}


def words_for(kind, **given):
    """Return a command line with these flags and every required one."""
    for entry in fields(kind):
        if entry.default is MISSING:
            given.setdefault(entry.name, "a")
    return [f"--{name}={value}" for name, value in given.items()]


def path_flags(kind):
    return sorted(PATH_FLAGS & {entry.name for entry in fields(kind)})


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_that_names_a_file_is_known_as_one(name):
    for entry in fields(COMMANDS[name]):
        text = entry.metadata["about"]
        if entry.type is str and re.search(r"\b(hub id|directory|file|folder|picture)\b", text):
            assert entry.name in PATH_FLAGS | NO_PATHS, entry.name


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "distill"])
def test_a_home_directory_is_expanded_in_every_path(name, monkeypatch, tmp_path):
    kind = COMMANDS[name]
    monkeypatch.setenv("HOME", str(tmp_path))
    no_folders = {"png"} | ({"output"} if name == "isogloss.tasks" else set())
    for flag in path_flags(kind):
        for path in ("~/x.pt", "~"):
            if flag != "teacher_tokenizer" and not (flag in no_folders and path == "~"):
                args = parse_flags(kind, words_for(kind, **{flag: path}))
                assert getattr(args, flag) == path.replace("~", str(tmp_path))


def test_a_home_directory_is_expanded_wherever_distill_reads_a_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").mkdir()
    (tmp_path / "f.yaml").write_text("eval_data: ~/x\n")
    of_teacher = dict(teacher="~/x", teacher_tokenizer="", teacher_cache="")
    groups = [of_teacher, of_teacher | dict(teacher="", teacher_cache="~/x"),
              dict(teacher="http://a:1", teacher_tokenizer="~/x")]
    for teacher in groups:
        given = {flag: "~/x" for flag in path_flags(Config) if flag not in of_teacher}
        given |= {"config": "~/f.yaml", "eval_tasks": "mmlu", **teacher}
        given["loss"] = "projection_kl"
        del given["eval_data"]  # of the file
        cfg = parse_flags(Config, words_for(Config, **given), file_flag="config")
        for flag in path_flags(Config):
            assert "~" not in getattr(cfg, flag), flag
        assert cfg.eval_data == cfg.output_dir == str(tmp_path / "x")
    entries = [{"model": "~/x"}, {"cache": "~/x", "name": "b"},
               {"model": "http://a:1", "tokenizer": "~/x", "name": "c"}]
    cfg = Config(student="s", data="d", teachers=json.dumps(entries))
    assert [of.teacher_path.split("/teacher")[0] for of in configs_by_teacher(cfg).values()] == [
        str(tmp_path / "x")] * 3


@pytest.mark.parametrize("path, message", [
    ("", "--output=: is empty; expected a path"),
    ("  ", "--output=  : is empty"),
    ("~no_such_user/x", "--output ~no_such_user/x: there is no such user"),
    ("a/" + 300 * "b", "a name in it has 300 bytes; expected 223 or fewer"),
    ("a/" + 100 * "語" + "/b", "a name in it has 300 bytes"),
    ("a\0b", "holds a zero byte"),
])
def test_what_can_be_no_path_is_refused(path, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_flags(ExactArgs, ["--student=a", "--teacher=b", f"--output={path}"])
    assert "\n" not in str(error.value)
    # names that can be files pass
    expanded("--output", "a/" + 220 * "b", is_written=True)
    expanded("--data", "a/" + 255 * "b")
    expanded("--data", "https://a/b?" + 300 * "c")
    assert expanded("--data", "./~a") == "./~a" and expanded("--data", "a/~/b") == "a/~/b"
    assert os.path.expanduser("~") == expanded("--data", "~")


@pytest.mark.parametrize("name", COMMANDS)
def test_an_empty_path_is_refused_where_it_says_nothing(name):
    kind = COMMANDS[name]
    for entry in fields(kind):
        if entry.name in PATH_FLAGS and entry.default:  # an empty default has a meaning
            with pytest.raises(ValueError, match=f"--{entry.name}=: is empty"):
                parse_flags(kind, words_for(kind, **{entry.name: ""}))


def test_every_number_has_bounds():
    for kind in COMMANDS.values():
        for entry in fields(kind):
            is_number = entry.type in (int, float) and entry.name != "local_rank"
            if is_number and kind is not command.TaskArgs:
                for value in (-1e300, 1e300) if entry.type is float else (-10**30, 10**30):
                    with pytest.raises(ValueError, match=entry.name):
                        parse_flags(kind, words_for(kind, **{entry.name: value}))


# --- the help -------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", KINDS)
def test_every_description_is_in_the_help_in_full(name, width):
    kind = KINDS[name]
    text = help_text(kind, width=width)
    for entry in fields(kind):
        assert normalized(entry.metadata["about"]) in normalized(text)
    assert max(map(len, text.splitlines())) <= width


def test_the_help_shows_type_and_default_of_every_flag():
    text = help_text(Small, width=80)
    assert "Do something small, on two lines." in text
    assert "not part of the summary" not in text
    assert "--text TEXT [--flag value ...]" in text.split("\n\n")[0]
    for line in ("--text TEXT (required)", "--count INT (default: 1)",
                 "--ratio FLOAT (default: 0.5)", "--pack BOOL (default: false)",
                 '--path TEXT (default: "")'):
        assert f"  {line}" in text.splitlines()


@pytest.mark.parametrize("argv", [["-h"], ["--help"], ["--count=many", "--help"], ["--x", "-h"]])
def test_help_anywhere_ends_with_code_0(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(*argv, aliases={"old_text": "text"})
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "flags:" in out and "--old_text for --text" in out


FRESH = """
import contextlib, runpy, sys
from isogloss import command
from isogloss.projection_tools.__main__ import COMMANDS

def run(program, *words):
    sys.argv = [program, *words]
    if program == "isogloss-distill":
        command.main()
    start = runpy.run_path if program.endswith(".py") else runpy.run_module
    start(program, run_name="__main__")

for line in ["distill.py", "distill.py --lr 1", "distill.py --steps 0", "distill.py --help",
             "isogloss-distill --help",
             "projection_tools cut --help",
             *(f"projection_tools.{name} --help" for name in COMMANDS),
             *(f"isogloss.{name} --help" for name in command.TOOLS)]:
    with contextlib.suppress(SystemExit):
        run(*line.split())
        raise AssertionError(line)
    loaded = {"torch", "transformers", "datasets", "deepspeed"} & sys.modules.keys()
    assert not loaded, (line, loaded)
"""


def test_help_and_wrong_flags_do_not_wait_for_torch():
    done = subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--lr; it is --learning_rate" in done.stderr and "--steps 0: expected 1" in done.stderr
    assert "--pipeline_parallel INT (default: 1)" in done.stdout and "--gpu_gib" in done.stdout


def test_the_answers_to_words_of_other_trainers_exist():
    ours = {entry.name for entry in fields(Config)}
    assert not ours & set(FOREIGN)
    for word, answer in FOREIGN.items():
        if word in LEFT:
            continue
        names = set(re.findall(r"--(\w+)", answer))
        if "of the launcher" in answer:
            assert names <= command.OF_LAUNCHER
        else:
            assert names <= {*ours, "push_to_hub", "memory", "sleep", "tensor_parallel"}
        assert names or "ds_config" in answer


@pytest.mark.parametrize("word, answer", [
    ("--lr=1e-4", "--learning_rate"), ("--batch-size=8", "train_batch_size of the ds_config"),
    ("--num_train_epochs=3", "--epochs"), ("--bf16", "bf16 or fp16 of the ds_config"),
    ("--ratio=mask", "clamp now, always; leave it out")])
def test_words_of_other_trainers_and_versions_are_answered_with_ours(word, answer):
    with pytest.raises(ValueError) as refused:
        parse_flags(Config, [word])
    flag = word.partition("=")[0]
    assert str(refused.value) == f"unknown flag {flag}; it is {answer}"


@pytest.mark.parametrize("words", [[], ["--local_rank=0"]])
def test_who_says_nothing_hears_a_first_command(words, capsys):
    with pytest.raises(SystemExit) as ended:
        distill.cli(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and FIRST_COMMAND in said
    flags = re.findall(r"--(\w+) (\S+)", FIRST_COMMAND)
    parse_flags(Config, [f"--{name}={value}" for name, value in flags])


# What configs of others are made of, as far as it is not ours too.
OF_OTHERS = {
    "TRL 1.16, GOLD and GKD": """
        lmbda beta max_completion_length teacher_model_name_or_path teacher_model_revision
        teacher_model_init_kwargs teacher_tokenizer_name_or_path disable_dropout seq_kd
        num_generations generation_batch_size use_uld_loss uld_token_merge_strategy
        use_extended_uld uld_use_hybrid_loss uld_hybrid_matched_weight uld_hybrid_unmatched_weight
        uld_crossentropy_weight uld_distillation_weight uld_student_temperature
        uld_teacher_temperature uld_skip_student_eos uld_skip_teacher_eos use_vllm vllm_mode
        vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
        vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_max_model_length
        vllm_model_impl vllm_structured_outputs_regex vllm_sync_frequency vllm_enable_sleep_mode
        log_completions log_completions_steps num_completions_to_print wandb_log_unique_prompts
        model_init_kwargs router_aux_loss_coef chat_template_path dataset_text_field
        dataset_kwargs dataset_num_proc eos_token truncation_mode shuffle_dataset packing
        packing_strategy padding_free pad_to_multiple_of eval_packing completion_only_loss
        assistant_only_loss loss_type activation_offloading pad_token top_p top_k min_p
        generation_kwargs chat_template_kwargs repetition_penalty cache_implementation
        ds3_gather_for_generation max_tool_calling_iterations log_unique_prompts callbacks
        max_new_tokens per_device_eval_batch_size eval_strategy save_strategy logging_steps
        logging_dir run_name save_only_model load_best_model_at_end metric_for_best_model
        overwrite_output_dir do_train do_eval eval_accumulation_steps warmup_steps warmup_ratio
        lr_scheduler_type lr_scheduler_kwargs adam_beta1 adam_beta2 adam_epsilon optim optim_args
        tf32 data_seed dataloader_drop_last dataloader_pin_memory dataloader_prefetch_factor
        group_by_length length_column_name hub_model_id hub_token hub_strategy hub_private_repo
        push_to_hub ddp_timeout ddp_find_unused_parameters fsdp fsdp_config torch_compile
        torch_compile_backend use_liger_kernel neftune_noise_alpha include_tokens_per_second
        label_smoothing_factor average_tokens_across_devices use_cpu full_determinism
        auto_find_batch_size batch_eval_metrics gradient_checkpointing_kwargs
        restore_callback_states_from_checkpoint lora_rank lora_dropout lora_target_modules
        lora_modules_to_save use_rslora use_dora load_in_8bit load_in_4bit bnb_4bit_quant_type
        attn_implementation dtype torch_dtype model_revision dataset_config dataset_train_split
        dataset_test_split dataset_streaming
        """,
    "NeMo RL, x-token distillation": """
        projection_matrix_path use_sparse_format exact_token_match_only vocab_topk reverse_kl
        projection_matrix_multiplier max_comb_len learnable project_teacher_to_student
        num_prompts_per_step num_generations_per_prompt max_num_steps max_num_epochs val_period
        val_at_start val_at_end max_val_samples val_batch_size topk_logits_k use_ipc
        loss_on_all_tokens gold_loss xtoken_loss ce_loss_scale kl_loss_weight dynamic_loss_scaling
        uncommon_topk common_indices_from_subtoks kl_chunk_shift prefix_bidir_v3_loss_fn
        prefix_bidir_v3_last_pos_loss_fn prefix_bidir_v3_jsd_beta prefix_bidir_v3_position_0_kl
        prefix_bidir_v3_noise_filter_topk prefix_bidir_v3_pure_alm teacher_topk_ipc_k kd_loss_mode
        sum_weights_metric normalize_teacher_by_vocab checkpoint_dir metric_name higher_is_better
        keep_top_k save_period checkpoint_must_save_by save_optimizer model_save_format
        save_consolidated model_name train_global_batch_size train_micro_batch_size
        logprob_batch_size max_total_sequence_length make_sequence_length_divisible_by precision
        logprob_chunk_size offload_optimizer_for_logprob cpu_offload tensor_parallel_size
        context_parallel_size custom_parallel_plan max_grad_norm dynamic_batching sequence_packing
        train_mb_tokens sequence_length_round drop_first_assistant_chunk_kl pseudo_target_path
        reverse_pseudo_target_path max_input_seq_length shuffle collator_mode
        include_thinking_in_loss native_thinking_alignment kd_alignment_regions num_packed_rows
        dataset_name processor data_files subset characters_per_sample log_dir
        num_val_samples_to_print wandb_enabled swanlab_enabled mlflow_enabled tensorboard_enabled
        monitor_gpus gpus_per_node arrow_files prompt_file stop_token_ids gpu_memory_utilization
        max_model_len
        """,
    "ms-swift 4, GKD": """
        teacher_model_server teacher_tag_key gkd_logits_topk sft_alpha teacher_model
        offload_teacher_model teacher_model_group use_mopd teacher_adapters teacher_model_type
        teacher_deepspeed rlhf_type ref_model label_smoothing loss_scale num_iterations
        truncation_strategy model_type tuner_type train_type val_dataset split_dataset_ratio
        custom_dataset_info system max_length_truncation enable_thinking lazy_tokenize freeze_llm
        target_modules target_regex init_weights columns response_length
        """,
    "KDFlow": """
        kd_ratio kd_temperature teacher_tp_size kd_loss_fn kd_algorithm use_triton_loss
        teacher_forward_n_batches teacher_enable_sleep teacher_offload_tags teacher_quantization
        teacher_ep_size teacher_pp_size teacher_dp_size teacher_mem_fraction_static
        dskd_token_align dskd_topk_vocab dskd_projector_lr adaptive_alpha hrl_topk
        num_gpus_per_node micro_train_batch_size lr_warmup_ratio min_lr lr_scheduler max_norm
        adam_betas backend gradient_checkpointing_use_reentrant enable_sleep load_checkpoint
        ckpt_path save_path use_dynamic_bsz max_token_len_per_gpu train_dataset_path
        train_dataset_probs train_split eval_dataset_path input_key image_key output_key
        teacher_input_key label_key input_template apply_chat_template max_len max_samples
        packing_samples prompt_max_len preprocess_num_workers rollout_num_engines rollout_tp_size
        """,
    "tokenkit": """
        losses log_interval sync_interval eval_interval save_interval target_tokenizer_name
        hypernet optimizer baseline max_teacher_length max_student_length eval_at_step_zero
        save_at_step_zero skip_lm_eval output_embeddings_mode use_chat_template chat_template_mode
        loss_mask_mode do_cost_analysis dry_run n_data_parallel n_model_parallel loss_weights
        loss_schedules multitask_aggregation_fn binarization_temp distill_chunk_sizes alm_diff_fn
        distill_main_path_numerator train_model_mode model_lora_rank model_lora_alpha
        train_embeddings tokens_to_add latents_to_align alm_mode space_mask_mode
        tokenizer_pair_data_path tokenizer_pair_bias_threshold expand_input_ids ppl_eval_data
        logit_mask_teacher train_mask
        """,
    "DistillKit": """
        project_name train_model train_dataset eval_dataset num_samples num_eval_samples
        eos_label_token_ids prepared_dataset_path prepacked legacy_logit_compression
        logprob_compressor base_url api_key max_retries sequence_length output_path
        resize_embeddings_to_multiple_of use_flash_attention loss_functions layer_mapping
        force_hidden_state_projection functionary_packing training_args model_kwargs
        model_auto_class frozen_modules frozen_res missing_probability_handling
        sparse_chunk_length margin disk_path repo_id
        """,
    "verl, distillation": """
        enable_resource_pool n_gpus_per_node nnodes loss_mode topk use_policy_loss
        distillation_loss_coef loss_max_clamp log_prob_min_clamp model_path
        tensor_model_parallel_size max_num_batched_tokens max_num_seqs prompt_length enforce_eager
        data_parallel_size ppo_mini_batch_size ppo_micro_batch_size_per_gpu total_epochs
        total_training_steps save_freq test_freq default_local_dir max_prompt_length
        max_response_length rollout_n train_files val_files
        """,
    "slime, on-policy distillation": """
        use_opd opd_type opd_kl_coef opd_teacher_load opd_teacher_ckpt_step opd_log_prob_top_k
        opd_only_reward hf_checkpoint rm_url custom_rm_path rollout_batch_size
        n_samples_per_prompt rollout_max_response_len rollout_max_prompt_len num_rollout
        global_batch_size prompt_data apply_chat_template_kwargs rollout_stop
        sglang_mem_fraction_static rollout_num_gpus colocate advantage_estimator lr_decay_style
        recompute_granularity max_tokens_per_gpu ref_load load save
        """,
}
NAMES_OF_OTHERS = [name for names in OF_OTHERS.values() for name in names.split()]


@pytest.mark.parametrize("program", OF_OTHERS)
def test_flags_of_others_have_the_right_hint_or_none(program):
    for name in OF_OTHERS[program].split():
        with pytest.raises(ValueError) as caught:
            parse_flags(Config, [f"--{name}=1"])
        hint = str(caught.value).partition("; ")[2]
        expected = f"it is {FOREIGN[name]}" if name in FOREIGN else "--help lists them all"
        assert hint == expected, caught.value


def test_many_of_them_are_known_and_no_answer_is_left_over():
    assert len(set(NAMES_OF_OTHERS)) == len(NAMES_OF_OTHERS) >= 400
    assert sum(name in FOREIGN for name in NAMES_OF_OTHERS) >= 190
    assert set(UNLIKE) <= set(NAMES_OF_OTHERS) - set(FOREIGN)
