"""Wrong ds_configs and flags, and wrong projections: one line before the first step, on all ranks.

What the class of flags refuses by itself is in test_config.py, test_flags.py, test_ds_config.py.
"""

import json

import pytest
from deepspeed.accelerator import get_accelerator

from jobs import ds_config
from wrong_input import check_one_line, good_line, run_wrong

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def adamw(**params):
    return {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3} | params}}


def zero(**keys):
    return {"zero_optimization": {"stage": 2} | keys}


# {name of a file: (what is changed in a good ds_config, part of the line)}
DS_CONFIGS = {
    # precision
    "both_halves": ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "simultaneously"),
    "bf16_true": ({"bf16": True}, "bf16 is True, expected an object"),
    "bf16_yes": ({"bf16": {"enabled": "yes"}}, "bf16.enabled is 'yes', expected true or false"),
    "accumulate_half": ({"data_types": {"grad_accum_dtype": "bf16"}, **zero(stage=0)},
                        "unsupported mix"),
    # the gradient
    "sum": ({"gradient_allreduce_op": "sum"}, "gradients would grow with the number of ranks"),
    "quantized": (zero(zero_quantized_gradients=True), "rounds gradients to a few bits"),
    "no_norm": (zero(compute_grad_norm=False), "compute_grad_norm is False, expected True"),
    "no_check": ({"bf16": {"enabled": True, "check_grad_overflow": False}},
                 "a gradient that is not finite would be applied"),
    "prescale_text": ({"prescale_gradients": "yes"}, "is 'yes', expected true or false"),
    "predivide": ({"gradient_predivide_factor": 0}, "expected a number of 1e-06 or more"),
    "clip_negative": ({"gradient_clipping": -1}, "expected a number of 0 or more"),
    # ZeRO
    "stage_four": (zero(stage=4), "stage: Input should be 0, 1, 2"),
    "zero_typo": (zero(overlap_com=True), "overlap_com"),
    "bucket_huge": (zero(reduce_bucket_size=10**15), "is 1000000000000000, expected"),
    "mics": (zero(mics_shard_size=2), "MiCS"),
    # optimizer
    "optimizer_typo": ({"optimizer": {"type": "AdamWW", "params": {"lr": 1e-3}}},
                       "optimizer.type 'AdamWW': expected AdamW"),
    "optimizer_module": ({"optimizer": {"type": "lr_scheduler", "params": {"lr": 1e-3}}},
                         "optimizer.type 'lr_scheduler'"),
    "closure": ({"optimizer": {"type": "LBFGS", "params": {"lr": 1e-3}}}, "without a closure"),
    "optimizer_key": ({"optimizer": ADAMW | {"parms": {}}}, "unknown key optimizer.parms"),
    "params_list": ({"optimizer": {"type": "AdamW", "params": [1e-3]}},
                    "optimizer.params is [0.001], expected an object"),
    "rate_text": (adamw(lr="1e-3"), "optimizer.params.lr is the text '1e-3'"),
    "rate_negative": (adamw(lr=-1e-3), "Invalid learning rate: -0.001"),
    "rate_huge": (adamw(lr=1e30), "optimizer.params.lr is 1e+30, expected 1000.0 or less"),
    "beta_one": (adamw(betas=0.9), "optimizer.params of AdamW"),
    "max_norm": (adamw(max_grad_norm=1.0), "expected gradient_clipping, at the top level"),
    # schedule
    "scheduler_typo": ({"scheduler": {"type": "CosineLR"}}, "scheduler.type 'CosineLR'"),
    "scheduler_module": ({"scheduler": {"type": "math"}}, "scheduler.type 'math'"),
    "scheduler_missing": ({"scheduler": {"type": "WarmupCosineLR", "params": {}}},
                          "total_num_steps"),
    "plateau": ({"scheduler": {"type": "ReduceLROnPlateau", "params": {}}}, "metrics"),
    # others
    "deepcompile": ({"compile": {"deepcompile": True}}, "does not compile the engine"),
}
# {name of a file: (its text, part of the line)}
TEXTS = {
    "twins": ('{"bf16": {"enabled": true, "enabled": false}}', "has the key 'enabled' twice"),
    "infinite": ('{"train_batch_size": 4, "gradient_clipping": 1e999}', "expected a finite number"),
    "comma": ('{"train_batch_size": 4,}', "not valid JSON (line 1, column"),
}
TWO_TOKENIZERS = '--teacher= --teachers=[{"model":"{folder}/one"},{"model":"{folder}/two"}]'
# {what is changed in a good command line: part of the line}
FLAGS = {
    "--resume=false": "--resume=false: expected auto, never or the dir",
    "--resume={folder}": "is not a complete checkpoint; expected a folder step_*",
    # losses
    '--loss=skew_forward_kl --loss_options={"skew":1}':
        "--loss_options: skew=1.0: expected a number, 0 or more and below 1",
    "--dynamic_scale --ce_weight=0": "needs both losses, because",
    '--loss=gold --loss_options={"learn_projection":true}': "unknown option 'learn_projection'; "
        "--loss gold has uncommon_topk, reverse, chunk_average",
    '--loss=projection_kl --loss_options={"projection_learning_rate":1}':
        "projection_learning_rate: is for learn_projection; add it",
    '--loss=projection_kl --loss_options={"chunk_average":"logp"} --teacher_output=topk':
        "chunk_average logp: a mean of logarithms needs all of",
    '--loss=uld --loss_options={"chunk_average":"logp"}': "--loss uld has max_divergence",
    '--loss=gold --loss_options={"chunk_average":"log"}': "expected one of p, logp",
    "--dump_losses={folder}/comma.json": "comma.json: nothing can be written to",
    "--kd_weight=0 --ce_weight=0": "nothing would be learned",
    "--loss=projection_kl --projection={folder}/comma.json": "comma.json",
    # layouts, lengths, models
    "--teacher_tp=4": "does not divide the 2 ranks of a node",
    "--sequence_parallel=3": "3: does not divide the 2 ranks of the student",
    "--activation_offload": "moves what --activation_checkpointing keeps; add --activation",
    "--max_length=257": "has a context of 256 positions; use no more",
    "--teacher_max_length=257": "--teacher_max_length 257",
    "--teacher={folder}": "cannot be loaded",
    # several teachers
    "--teachers=[{}]": "cannot be combined with --teacher",
    TWO_TOKENIZERS + " --teacher_weights=mean_p":
        "differ, so their predictions have no mean",
    "--route_key=domain": "chooses among teachers; list them with",
    "--attention=flash_attention_2": "--attention flash_attention_2: needs a CUDA device",
    # paths
    "--loss=gold --projection=/no/such.pt": "--projection /no/such.pt: no such file; make it with",
    # what the student writes
    "--on_policy=1 --kd_weight=0": "--on_policy 1.0 with --kd_weight 0",
    "--on_policy=1 --rollout_top_p=0": "--rollout_top_p 0.0: expected more",
    "--on_policy=1 --rollout_tokens=20 --rollout_batch=8 --writer=true":
        "--rollout_batch 8: is for a student that writes itself, and true writes; leave it out",
    "--on_policy=1 --rollout_tokens=20 --rollout_top_p=0.9 --rollout_every=2":
        "--rollout_top_p 0.9 with --rollout_every 2: no ratio makes up for",
    "--on_policy=1 --rollout_tokens=20 --rollout_top_p=0.9 --writer=true":
        "--rollout_top_p 0.9 with --staleness 1: no ratio makes up for",
    "--on_policy=1 --rollout_tokens=120": "leaves no room for a prompt",
    "--on_policy=1 --rollout_tokens=20 --prompt_key=question":
        "--prompt_key question: no such column; it has text",
    "--prompt_key=text": "--prompt_key text: names prompts",
    "--on_policy=1 --rollout_tokens=20 --data={folder}/long.jsonl --prompt_key=prompt":
        "leaves no room behind it; so it is with",
    "--on_policy=1 --rollout_tokens=20 --data={folder}/numbers.jsonl --prompt_key=prompt":
        "'prompt' holds 3, expected text",
    "--on_policy=1 --rollout_tokens=20 --data={folder}/chats.jsonl":
        "its tokenizer has no chat template",
    "--on_policy=1 --rollout_tokens=20 --streaming --rollouts_per_prompt=3":
        "--rollouts_per_prompt 3",
    "--on_policy=1 --rollout_tokens=20 --writer=/no/such":
        "--writer /no/such: no such program",
    "--on_policy=1 --rollout_tokens=20 --writer=false":
        "--writer false: ended with exit code 1",
    "--on_policy=1 --rollout_tokens=20 --writer=vllm": "--writer vllm: there is no vllm here",
    "--on_policy=1 --dynamic_scale": "there is no cross-entropy",
    # joined rows
    "--join_rows=99 --on_policy=1 --rollout_tokens=20":
        "--join_rows 99 with --on_policy 1, which writes from",
    "--join_rows=99 --prompt_key=prompt --completion_key=text":
        "--join_rows 99 with --prompt_key prompt, whose rows are",
    '--join_rows=99 --teacher= --teachers=[{"cache":"a"}]':
        "--join_rows 99 with --teacher_cache a, which holds",
    '--join_rows=99 --teacher= --teachers=[{"model":"a","routes":["x"]}] --route_key=to':
        "--join_rows 99 with --route_key to, which chooses",
    "--join_rows=99 --data={folder}/chats.jsonl": "--join_rows 99: joins texts, and 'text' of",
    # pipelines
    "--pipeline_parallel=2 --ds_config={folder}/hasty.json":
        "1 gradient_accumulation_steps leave 50% of the stages' time idle",
    # evaluation tasks
    '--eval_tasks=mmul --eval_task_options={"data":"{folder}"}':
        "--eval_tasks mmul: unknown task 'mmul'; did you mean mmlu?",
    "--eval_task_every=5": "--eval_task_every 5: is for --eval_tasks, which",
    '--eval_tasks=gsm8k --eval_task_options={"samples":4}':
        "samples is 4 at temperature 0, where all samples are equal",
    "--eval_tasks=lm_eval:no_such": "--eval_tasks lm_eval:no_such: ",
    # chats, completions, held-out rows
    '--template_kwargs={"tokenize":true}': "--template_kwargs: tokenize is not for templates",
    "--completion_key=text": "name the column of prompts with --prompt_key",
    "--completion_key=a --prompt_key=b --text_key=c": "both name what is learned",
    "--streaming --eval_data=a": "say by --eval_rows how many",
    "--ds_config={folder}/bytes.json": "not JSON",
}
if not get_accelerator().is_fp16_supported():  # as that of most CPUs
    DS_CONFIGS["fp16_here"] = ({"fp16": {"enabled": True}}, "fp16 is not supported on this device")
CASES = {f"--ds_config={{folder}}/{name}.json": message
         for name, (_, message) in {**DS_CONFIGS, **TEXTS}.items()} | FLAGS


@pytest.fixture(scope="module")
def ended(models, texts, tmp_path_factory):
    """{case: Outcome of both ranks} of every wrong command line."""
    folder = tmp_path_factory.mktemp("wrong_flags")
    for name, (changes, _) in DS_CONFIGS.items():
        ds_config(folder / f"{name}.json", 2, 4, 1, **changes)
    for name, (text, _) in TEXTS.items():
        (folder / f"{name}.json").write_text(text)
    ds_config(folder / "hasty.json", 1, 4, 1)
    (folder / "bytes.json").write_bytes(b"\xff\xfe{\x00}\x00")
    rows = {"long": {"text": "a", "prompt": texts[0] * 20}, "numbers": {"text": "a", "prompt": 3},
            "chats": {"text": [{"role": "user", "content": "a"}]}}
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 20)
    for name, model in zip(("one", "two"), models):
        (folder / name).symlink_to(model)
    return run_wrong(2, CASES, good_line(models, texts, folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_wrong_settings_end_with_one_line(ended, case):
    check_one_line(ended[case], CASES[case])
