"""What tests of whole jobs share: a ds_config, a corpus, command lines on ranks, what they logged."""

import json
import os
from pathlib import Path

import distill


def ds_config(path, stage, micro, micro_steps, **more):
    """A ds_config file; float32, AdamW unless `more` says otherwise."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": micro_steps,
              "gradient_clipping": 0.5, "zero_optimization": {"stage": stage}, "optimizer": optimizer}
    path.write_text(json.dumps(config | more))
    return str(path)


def write_corpus(folder, texts, count):
    path = Path(folder) / f"corpus{count}.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts[:count]))
    return str(path)


def job_for(flags):
    device = distill.start_distributed()
    distill.silence_libraries()
    cfg = distill.Config(**flags)
    inputs = distill.check_inputs(cfg, device)
    return distill.build_job(cfg, inputs, device), inputs


def run_distill(argv_list):
    """Several command lines in one process; their exit codes."""
    codes = []
    for argv in argv_list:
        try:
            distill.cli(argv + ["--local_rank=" + os.environ["LOCAL_RANK"]])
            codes.append(0)
        except SystemExit as end:
            codes.append(end.code)
    return codes


def losses_of(output, start=0):
    """{step: everything but times} of a run."""
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    times = {"seconds", "tokens_per_second"}
    return [{k: v for k, v in line.items() if k not in times} for line in lines if line["step"] > start]
