"""Wrong ds_configs and flags: each ends with one line before the first step, on every rank."""

import json

import pytest

from hub_copies import HAS_LM_EVAL
from isogloss.projection_tools.build import build_projection
from isogloss.projection_tools.files import as_tables, save_atomically
from isogloss.projection_tools.tokenizers import Pair
from jobs import ds_config
from wrong_input import Wrong, check_one_line, good_line, run_wrong

ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 1}}


def adamw(**params):
    return {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3} | params}}


def cosine(**params):
    return {"scheduler": {"type": "WarmupCosineLR", "params": COSINE["params"] | params}}


def zero(**keys):
    return {"zero_optimization": {"stage": 2} | keys}


# {name of a file: (what is changed in a good ds_config, part of the line)}
DS_CONFIGS = {
    # precision
    "both_halves": ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "simultaneously"),
    "fp16_here": ({"fp16": {"enabled": True}}, "fp16 is not supported on this device"),
    "scale_text": ({"fp16": {"loss_scale": "many"}}, "loss_scale must be a number"),
    "scale_negative": ({"fp16": {"loss_scale": -1}}, "loss_scale must be >= 0"),
    "bf16_true": ({"bf16": True}, "bf16 is True, expected an object"),
    "bf16_text": ({"bf16": {"enabled": "true"}}, "bf16.enabled is the text 'true'"),
    "bf16_yes": ({"bf16": {"enabled": "yes"}}, "bf16.enabled is 'yes', expected true or false"),
    "bf16_one": ({"bf16": {"enabled": 1}}, "bf16.enabled is 1, expected true or false"),
    "bf16_typo": ({"bf16": {"enable": True}}, "enable"),
    "autocast_dtype": ({"torch_autocast": {"enabled": True, "dtype": "float8"}}, "float8"),
    "autocast_typo": ({"torch_autocast": {"dtyp": "bf16"}}, "unknown key torch_autocast.dtyp"),
    "accumulate_text": ({"data_types": {"grad_accum_dtype": "double"}}, "double"),
    "accumulate_half": ({"data_types": {"grad_accum_dtype": "bf16"}, **zero(stage=0)},
                        "unsupported mix"),
    "data_types_list": ({"data_types": ["bf16"]}, "data_types is ['bf16'], expected an object"),
    "communicate": ({"communication_data_type": "int4"}, "Invalid communication_data_type"),
    # the gradient
    "sum": ({"gradient_allreduce_op": "sum"}, "gradients would grow with the number of ranks"),
    "max": ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op is 'max'"),
    "sequence_size": ({"sequence_parallel_size": 2}, "use --sequence_parallel"),
    "tensor": ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel is not for distill.py"),
    "pipeline": ({"pipeline": {"stages": 2}}, "pipeline is not for distill.py"),
    "hybrid": ({"hybrid_engine": {"enabled": True}}, "hybrid_engine is not for distill.py"),
    "quantized": (zero(zero_quantized_gradients=True), "rounds gradients to a few bits"),
    "zenflow": (zero(zenflow={"topk_ratio": 0.1}), "zenflow is not for distill.py"),
    "no_norm": (zero(compute_grad_norm=False), "compute_grad_norm is False, expected True"),
    "no_check": ({"bf16": {"enabled": True, "check_grad_overflow": False}},
                 "a gradient that is not finite would be applied"),
    "universal": ({"checkpoint": {"load_universal": True}}, "writes its checkpoints itself"),
    "prescale": ({"prescale_gradients": True}, "pre-scale gradients is not yet supported"),
    "prescale_text": ({"prescale_gradients": "yes"}, "is 'yes', expected true or false"),
    "predivide": ({"gradient_predivide_factor": 0}, "expected a number of 1e-06 or more"),
    "clip_text": ({"gradient_clipping": "1.0"}, "gradient_clipping is the text '1.0'"),
    "clip_negative": ({"gradient_clipping": -1}, "expected a number of 0 or more"),
    "clip_word": ({"gradient_clipping": "none"}, "gradient_clipping is 'none'"),
    "sparse": ({"sparse_gradients": True}, "DeepSpeed no longer has it"),
    # ZeRO
    "zero_number": ({"zero_optimization": 2}, "zero_optimization is 2, expected an object"),
    "zero_list": ({"zero_optimization": []}, "zero_optimization is [], expected an object"),
    "stage_text": (zero(stage="2"), "zero_optimization.stage is the text '2'"),
    "stage_four": (zero(stage=4), "zero_optimization.stage is 4, expected 0"),
    "stage_true": (zero(stage=True), "zero_optimization.stage is True"),
    "stage_half": (zero(stage=1.5), "zero_optimization.stage is 1.5"),
    "zero_typo": (zero(overlap_com=True), "overlap_com"),
    "bucket_zero": (zero(reduce_bucket_size=0), "greater than 0"),
    "bucket_huge": (zero(reduce_bucket_size=10**15), "is 1000000000000000, expected"),
    "bucket_text": (zero(reduce_bucket_size="5e8"), "is the text '5e8'"),
    "bucket_words": (zero(allgather_bucket_size="large"), "large"),
    "offload_where": (zero(offload_optimizer={"device": "disk"}), "device"),
    "offload_text": (zero(offload_optimizer="cpu"), "offload_optimizer"),
    "legacy": (zero(legacy_stage1=True), "DeepSpeed no longer has it"),
    "mics": (zero(mics_shard_size=2), "MiCS"),
    # optimizer
    "optimizer_text": ({"optimizer": "AdamW"}, "optimizer is 'AdamW', expected an object"),
    "optimizer_typo": ({"optimizer": {"type": "AdamWW", "params": {"lr": 1e-3}}},
                       "optimizer.type 'AdamWW': expected AdamW"),
    "optimizer_none": ({"optimizer": {"params": {"lr": 1e-3}}}, "optimizer.type is None"),
    "optimizer_module": ({"optimizer": {"type": "lr_scheduler", "params": {"lr": 1e-3}}},
                         "optimizer.type 'lr_scheduler'"),
    "closure": ({"optimizer": {"type": "LBFGS", "params": {"lr": 1e-3}}}, "without a closure"),
    "optimizer_key": ({"optimizer": ADAMW | {"parms": {}}}, "unknown key optimizer.parms"),
    "params_list": ({"optimizer": {"type": "AdamW", "params": [1e-3]}},
                    "optimizer.params is [0.001], expected an object"),
    "rate_text": (adamw(lr="1e-3"), "optimizer.params.lr is the text '1e-3'"),
    "rate_negative": (adamw(lr=-1e-3), "Invalid learning rate: -0.001"),
    "rate_list": (adamw(lr=[1e-3]), "optimizer.params of AdamW"),
    "rate_huge": (adamw(lr=1e30), "optimizer.params.lr is 1e+30, expected 1000.0 or less"),
    "decay_huge": (adamw(weight_decay=1e30), "optimizer.params.weight_decay is 1e+30, expected"),
    "beta_large": (adamw(betas=[0.9, 1.5]), "Invalid beta parameter"),
    "beta_one": (adamw(betas=0.9), "optimizer.params of AdamW"),
    "decay_negative": (adamw(weight_decay=-0.1), "Invalid weight_decay"),
    "param_typo": (adamw(weight_decai=0.1), "weight_decai"),
    "max_norm": (adamw(max_grad_norm=1.0), "expected gradient_clipping, at the top level"),
    # schedule
    "scheduler_text": ({"scheduler": "WarmupLR"}, "scheduler is 'WarmupLR', expected an object"),
    "scheduler_typo": ({"scheduler": {"type": "CosineLR"}}, "scheduler.type 'CosineLR'"),
    "scheduler_none": ({"scheduler": {"params": {}}}, "scheduler.type None"),
    "scheduler_module": ({"scheduler": {"type": "math"}}, "scheduler.type 'math'"),
    "scheduler_param": (cosine(warmup_steps=3), "warmup_steps"),
    "scheduler_missing": ({"scheduler": {"type": "WarmupCosineLR", "params": {}}},
                          "total_num_steps"),
    "warmup_huge": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e30}}},
                    "scheduler.params.warmup_max_lr is 1e+30, expected 1000.0 or less"),
    "scheduler_words": (cosine(total_num_steps="ten"), "scheduler.params of WarmupCosineLR"),
    "plateau": ({"scheduler": {"type": "ReduceLROnPlateau", "params": {}}}, "metrics"),
    # sizes
    "samples_huge": ({"train_batch_size": 2 * 10**9, "train_micro_batch_size_per_gpu": 10**9,
                      "gradient_accumulation_steps": 1},
                     "1000000000 samples in a micro-batch, expected 65536 or fewer"),
    "steps_huge": ({"train_batch_size": 4 * 10**9, "train_micro_batch_size_per_gpu": 2,
                    "gradient_accumulation_steps": 10**9},
                   "1000000000 gradient_accumulation_steps, expected 1048576 or fewer"),
    "contradict": ({"train_batch_size": 16}, "is not 2 ranks x micro batch 4"),
    "odd": ({"train_batch_size": 15, "train_micro_batch_size_per_gpu": "auto",
             "gradient_accumulation_steps": "auto"}, "train_batch_size 15 is not 2 ranks"),
    # reports and others
    "typo": ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'?"),
    "auto": ({"gradient_clipping": "auto"}, 'gradient_clipping is "auto", which is filled only'),
    "no_rate": (adamw(lr="auto"), "--learning_rate is missing"),
    "print_text": ({"steps_per_print": "10"}, "steps_per_print is the text '10'"),
    "profiler_list": ({"flops_profiler": []}, "flops_profiler is [], expected an object"),
    "aio_typo": ({"aio": {"block": 1}}, "unknown key aio.block"),
    "monitor_typo": ({"tensorboard": {"enable": True}}, "enable"),
    "deepcompile": ({"compile": {"deepcompile": True}}, "does not compile the engine"),
    "removed": ({"graph_harvesting": True}, "DeepSpeed no longer has it"),
}
# {name of a file: (its text, part of the line)}
TEXTS = {
    "twins": ('{"bf16": {"enabled": true, "enabled": false}}', "'enabled' is there twice"),
    "infinite": ('{"train_batch_size": 4, "gradient_clipping": 1e999}', "expected a finite number"),
    "not_a_number": ('{"train_batch_size": 4, "gradient_clipping": NaN}', "a finite number"),
    "comment": ('{"train_batch_size": 4} // four', "not valid JSON (line 1, column"),
    "comma": ('{"train_batch_size": 4,}', "not valid JSON (line 1, column"),
    "nothing": ("", "not valid JSON"),
    "deep": ("[" * 100_000, "nested too deep"),
}
def teachers(entries):
    """Return flags of several teachers, as JSON without spaces."""
    return f"--teacher= --teachers={entries}"


TWO_TOKENIZERS = '[{"model":"{folder}/one"},{"model":"{folder}/two"}]'
FLAGS = {
    "an unknown flag": Wrong("--max_lenght=9",
                             "unknown flag --max_lenght; did you mean --max_length?"),
    "a flag like no other": Wrong("--qqq=1", "unknown flag --qqq; --help lists them all"),
    "a word without a flag": Wrong("student", "unexpected argument 'student'"),
    "text for a number": Wrong("--steps=many", "--steps=many: expected int, got str"),
    "half a step": Wrong("--steps=1.5", "--steps=1.5: expected int, got float"),
    "no step": Wrong("--steps=0", "--steps 0: expected 1 or more"),
    "not a number": Wrong("--kd_weight=nan", "--kd_weight=nan: expected float, got str"),
    "resume=false": Wrong("--resume=false", "--resume=false: expected auto, never or the dir"),
    "resume from nothing": Wrong("--resume={folder}",
                                 "is not a complete checkpoint; expected a folder step_*"),
    # losses
    "no such loss": Wrong("--loss=kl", "--loss kl: expected one of piece_kl, event_kl"),
    "a mixture beyond 1": Wrong("--jsd_beta=1.5", "--jsd_beta 1.5: expected 0 to 1"),
    "a skew of nothing": Wrong("--skew_lambda=1", "compares the teacher with itself"),
    "a ratio to nothing": Wrong("--dynamic_scale --ce_weight=0", "needs both losses, because"),
    "a projection of no use": Wrong("--learn_projection --loss=gold", "only --loss projection_kl"),
    "nothing to learn": Wrong("--kd_weight=0 --ce_weight=0", "nothing would be learned"),
    "other tokenizers": Wrong("--loss=projection_kl --projection={folder}/swapped.pt",
                              "made for another student"),
    "no projection": Wrong("--loss=projection_kl --projection={folder}/comma.json", "comma.json"),
    # layouts, lengths, models
    "a teacher across nodes": Wrong("--teacher_tp=4", "does not divide the 2 ranks of a node"),
    "no rank for the student": Wrong("--teacher_ranks=2",
                                     "a node of this job has 2 ranks, and at least one"),
    "shards that do not divide": Wrong("--sequence_parallel=3",
                                       "3: does not divide the 2 ranks of the student"),
    "nothing to move": Wrong("--activation_offload",
                             "moves what --activation_checkpointing keeps; add --activation"),
    "whole and in shards": Wrong("--teacher_tp=2 --teacher_engine=replicated",
                                 "a whole copy per rank is degree 1"),
    "a short student": Wrong("--max_length=257", "has a context of 256 positions; use no more"),
    "a short teacher": Wrong("--teacher_max_length=257", "--teacher_max_length 257"),
    "no such student": Wrong("--student=./nowhere", "--student ./nowhere: no such directory"),
    "a folder without a model": Wrong("--teacher={folder}", "cannot be loaded"),
    # several teachers
    "none": Wrong("--teacher=", "--teacher is missing: give a hub id or a local path"),
    "two kinds of teachers": Wrong("--teachers=[{}]", "cannot be combined with --teacher"),
    "teachers that are no JSON": Wrong(teachers("[{,"), "--teachers: not valid JSON (line 1, col"),
    "a teacher with a typo": Wrong(teachers('[{"model":"a","los":"gold"}]'),
                                   "unknown teacher key 'los'"),
    "a teacher without a weight": Wrong(teachers('[{"model":"a","weight":0}]'),
                                        "expected a number above 0"),
    "a mean of two tokenizers": Wrong(teachers(TWO_TOKENIZERS) + " --teacher_weights=mean_p",
                                      "differ, so their predictions have no mean"),
    "routes of one teacher": Wrong("--route_key=domain", "chooses among teachers; list them with"),
    "routes without a key": Wrong(teachers('[{"model":"a","routes":["x"]}]'),
                                  "column that --route_key names"),
    "teachers of one name": Wrong(teachers('[{"model":"a"},{"model":"a"}]'),
                   "two teachers are named a; give each"),
    "two learning rates": Wrong("--learning_rate=1e-3", "says lr 0.001; drop one"),
    # numbers
    "seed of 2^32": Wrong("--seed=4294967296", "--seed 4294967296: expected 4294901760 or less"),
    "seed below 0": Wrong("--seed=-1", "--seed -1: expected 0 or more"),
    "seed of text": Wrong("--seed=seven", "--seed=seven: expected int"),
    "hot": Wrong("--temperature=1e300", "--temperature 1e+300: expected 1000.0 or less"),
    "almost cold": Wrong("--temperature=1e-30", "--temperature 1e-30: expected 0.001 or more"),
    "infinitely hot": Wrong("--temperature=1e999", "--temperature"),
    "heavy": Wrong("--kd_weight=1e300", "--kd_weight 1e+300: expected 1000000.0 or less"),
    "fast": Wrong("--learning_rate=1e30", "--learning_rate 1e+30: expected 1000.0 or less"),
    "negative weight": Wrong("--ce_weight=-1", "--ce_weight -1.0: expected 0 or more"),
    "endless": Wrong("--steps=10000000000000", "--steps 10000000000000: expected"),
    "crowded": Wrong("--num_workers=100000", "--num_workers 100000: expected 512 or less"),
    "very long": Wrong("--max_length=99999999999", "--max_length 99999999999: expected"),
    "a truth value of text": Wrong("--pack=maybe", "--pack=maybe: expected"),
    "a list for a number": Wrong("--steps=[1,2]", "--steps=[1, 2]: expected int"),
    "a dict for a path": Wrong("--data={a:1}", "--data {a:1}: no such file"),
    "nothing for a number": Wrong("--steps=", "--steps"),
    "a teacher hot": Wrong('--teacher= --teachers=[{"model":"a","temperature":1e300}]',
                           "--temperature 1e+300: expected"),
    "a heavy teacher": Wrong('--teacher= --teachers=[{"model":"a","weight":1e300}]',
                             "--kd_weight 1e+300: expected"),
    "an unknown attention": Wrong("--attention=flash", "--attention flash: expected one of auto"),
    "attention without a GPU": Wrong("--attention=flash_attention_2",
                                     "--attention flash_attention_2: needs a CUDA device"),
    "columns without end": Wrong("--projection_topk=1000000000", "--projection_topk 1000000000: "
                                 "expected 1048576 or less"),
    "tokens without end": Wrong("--teacher_output=topk --teacher_output_topk=1000000000",
                                "--teacher_output_topk 1000000000: expected"),
    "memory without end": Wrong("--loss_memory_mib=1000000000000", "--loss_memory_mib"),
    "texts without end": Wrong("--rollout_batch=1000000000", "--rollout_batch 1000000000: expect"),
    # paths
    "an unused projection": Wrong("--projection=/no/such.pt",
                                  "--projection /no/such.pt: no such file; make it with"),
    "an unused projection without a teacher": Wrong(
        "--projection={folder} --kd_weight=0", "--projection {folder}: no such file"),
    "nowhere": Wrong("--output_dir=", "--output_dir=: is empty; expected a path"),
    "a user who is not there": Wrong("--output_dir=~no_such_user/x", "there is no such user"),
    "an export of a long name": Wrong(f"--export=runs/{300 * 'a'}", "a name in it has 300 bytes"),
    "a run of a long name": Wrong(f"--output_dir={300 * 'a'}", "a name in it has 300 bytes"),
    "a checkpoint of a long name": Wrong(f"--resume={300 * 'a'}", "a name in it has 300 bytes"),
    "an export over all": Wrong("--export=/", "--export /: would replace --output_dir"),
    "a teacher of a long name": Wrong(
        f'--teacher= --teachers=[{{"model":"a","name":"{300 * "b"}"}}]', "--teachers: name 'bb"),
    "a key of a teacher twice": Wrong('--teacher= --teachers=[{"model":"a","model":"b"}]',
                                      "--teachers: 'model' is there twice; drop one"),
    # what the student writes
    "more than all": Wrong("--on_policy=2", "--on_policy 2.0: expected a share of the samples"),
    "less than nothing": Wrong("--on_policy=-0.5", "--on_policy -0.5: expected 0 or more"),
    "never fresh": Wrong("--on_policy=1 --rollout_every=0", "--rollout_every 0: expected 1"),
    "no copies": Wrong("--on_policy=1 --rollouts_per_prompt=0", "--rollouts_per_prompt 0"),
    "no teacher": Wrong("--on_policy=1 --kd_weight=0", "--on_policy 1.0 with --kd_weight 0"),
    "no nucleus": Wrong("--on_policy=1 --rollout_top_p=0", "--rollout_top_p 0.0: expected more"),
    "cold": Wrong("--on_policy=1 --rollout_temperature=0", "--rollout_temperature 0.0: expected"),
    "ratio": Wrong("--on_policy=1 --ratio=cut", "--ratio cut: expected one of clamp, mask"),
    "small ratio": Wrong("--on_policy=1 --max_ratio=0.5", "--max_ratio 0.5: expected 1 or more"),
    "no room": Wrong("--on_policy=1 --rollout_tokens=120", "leaves no room for a prompt"),
    "no prompt column": Wrong("--on_policy=1 --rollout_tokens=20 --prompt_key=question",
                              "--prompt_key question: no such column; it has text"),
    "prompts for nobody": Wrong("--prompt_key=text", "--prompt_key text: names prompts"),
    "long prompts": Wrong("--on_policy=1 --rollout_tokens=20 --data={folder}/long.jsonl "
                          "--prompt_key=prompt", "leaves no room behind it; so it is with"),
    "prompts of numbers": Wrong("--on_policy=1 --rollout_tokens=20 --data={folder}/numbers.jsonl "
                                "--prompt_key=prompt", "'prompt' holds 3, expected text"),
    "empty chats": Wrong("--on_policy=1 --rollout_tokens=20 --data={folder}/chats.jsonl",
                         "its tokenizer has no chat template"),
    "a copy of a stream": Wrong("--on_policy=1 --rollout_tokens=20 --streaming "
                                "--rollouts_per_prompt=3", "--rollouts_per_prompt 3"),
    "no such engine": Wrong("--on_policy=1 --rollout_tokens=20 --rollout_command=/no/such",
                            "--rollout_command /no/such: no such program"),
    "an engine that ends": Wrong("--on_policy=1 --rollout_tokens=20 --rollout_command=false",
                                 "--rollout_command false: ended with exit code 1"),
    "scaled by nothing": Wrong("--on_policy=1 --dynamic_scale", "there is no cross-entropy"),
    # joined rows
    "joined to nothing": Wrong("--join_rows=-1", "--join_rows -1: expected 0 or more"),
    "joined rollouts": Wrong("--join_rows=99 --on_policy=1 --rollout_tokens=20",
                             "--join_rows 99 with --on_policy 1, which writes from"),
    "joined completions": Wrong("--join_rows=99 --prompt_key=prompt --completion_key=text",
                                "--join_rows 99 with --prompt_key prompt, whose rows are"),
    "joined caches": Wrong('--join_rows=99 --teacher= --teachers=[{"cache":"a"}]',
                           "--join_rows 99 with --teacher_cache a, which holds"),
    "joined routes": Wrong('--join_rows=99 --teacher= --teachers=[{"model":"a","routes":["x"]}] '
                           "--route_key=to", "--join_rows 99 with --route_key to, which chooses"),
    "joined chats": Wrong("--join_rows=99 --data={folder}/chats.jsonl",
                          "--join_rows 99: joins texts, and 'text' of"),
    # pipelines
    "a pipeline of three": Wrong("--pipeline_parallel=3", "--pipeline_parallel 3: does not divide"),
    "a pipeline of none": Wrong("--pipeline_parallel=0", "--pipeline_parallel 0: expected 1 or"),
    "stages in shards": Wrong("--pipeline_parallel=2", "has ZeRO stage 2, and a pipeline needs"),
    "stages that wait": Wrong("--pipeline_parallel=2 --ds_config={folder}/hasty.json",
                              "1 gradient_accumulation_steps leave 50% of the stages' time idle"),
    # evaluation tasks
    "an unknown task": Wrong("--eval_tasks=mmul --eval_task_data={folder}",
                             "--eval_tasks mmul: unknown task 'mmul'; did you mean mmlu?"),
    "no task": Wrong("--eval_task_every=5", "--eval_task_every 5: is for --eval_tasks, which"),
    "a task twice": Wrong("--eval_tasks=mmlu,mmlu --eval_task_data={folder}", "mmlu is named"),
    "a task without data": Wrong("--eval_tasks=lambada --eval_task_data={folder}",
                                 "does not exist" if HAS_LM_EVAL else "lambada: needs"),
    "no folder of tasks": Wrong("--eval_tasks=gsm8k --eval_task_data=/no/such", "/no/such"),
    "equal samples": Wrong("--eval_tasks=gsm8k --eval_task_samples=4",
                           "--eval_task_samples 4: all samples would be the same answer"),
    "no batch of a task": Wrong("--eval_tasks=gsm8k --eval_task_batch=0", "--eval_task_batch 0"),
    "a code task without data": Wrong(
        "--eval_tasks=humaneval_plus --allow_unsafe_code --eval_task_data={folder}",
        "HumanEvalPlus.jsonl.gz does not exist; expected it"),
    "no harness": Wrong("--eval_tasks=lm_eval:no_such", "--eval_tasks lm_eval:no_such: "),
    "no data": Wrong("--data={folder}/nowhere.jsonl", "no such file, directory or glob match"),
    "no ds_config": Wrong("--ds_config={folder}/nowhere.json",
                          "no such file; ready-made ones are ds_configs/pipeline.json, "),
    "a ds_config that is a folder": Wrong("--ds_config={folder}", "no such file; ready-made"),
    "a ds_config of bytes": Wrong("--ds_config={folder}/bytes.json", "not JSON"),
}
CASES = {
    **{name: Wrong(f"--ds_config={{folder}}/{name}.json", message)
       for name, (_, message) in {**DS_CONFIGS, **TEXTS}.items()},
    **FLAGS,
}


@pytest.fixture(scope="module")
def ended(models, tokenizers, texts, tmp_path_factory):
    """{case: Outcome on both ranks} of every wrong command line."""
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
    swapped = Pair.of(*reversed(tokenizers))
    tables = as_tables(build_projection(swapped), swapped, "test")
    save_atomically(tables, folder / "swapped.pt")
    return run_wrong(2, CASES, good_line(models, texts, folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_wrong_settings_end_with_one_line(ended, case):
    check_one_line(ended[case], CASES[case].message)
