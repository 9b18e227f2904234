"""Helpers for tests of whole jobs: a ds_config, a corpus, command lines on ranks, their logs."""

import contextlib
import io
import json
import math
import os
from pathlib import Path

import ranks
from isogloss import build, distill
from isogloss.checkpoints import model_card
from isogloss.inputs import check_inputs
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.teachers import text_server


def ds_config(path, stage, micro_batch_size, grad_accum_steps, **more):
    """Write a ds_config file; float32, AdamW unless `more` says otherwise."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": grad_accum_steps,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage},
        "optimizer": optimizer,
    }
    path.write_text(json.dumps(config | more))
    return str(path)


def write_corpus(folder, texts, count):
    path = Path(folder) / f"corpus{count}.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts[:count]))
    return str(path)


def short_run(models, texts, folder, *flags, stage=2, micro_batch_size=2):
    """Return the command line of a run on short texts."""
    config = ds_config(folder / "ds.json", stage, micro_batch_size, 1)
    return [f"--student={models[0]}", f"--teacher={models[1]}", "--max_length=60",
            f"--data={write_corpus(folder, texts, 20)}", f"--ds_config={config}", *flags]


def job_for(flags):
    """Return (TrainState, RunInputs) of a run with these flags; all ranks take part."""
    device = start_distributed()
    silence_libraries()
    cfg = distill.Config(**flags)
    inputs = check_inputs(cfg, device)
    return build.build_state(cfg, inputs, device), inputs


def run_distill(argv_list, draws=False):
    """Run several command lines in one process; return their exit codes.

    Without data workers, which take longer than many of these jobs, unless a line asks for some.

    Args:
        draws: the curves of a model's card, which takes longer than many of these jobs.
    """
    if not draws:
        model_card.picture = lambda panels, path: path.write_bytes(b"")
    codes = []
    for argv in argv_list:
        try:
            distill.cli(["--num_workers=0", *argv, "--local_rank=" + os.environ["LOCAL_RANK"]])
            codes.append(0)
        except SystemExit as end:
            codes.append(end.code)
    return codes


def write_to_file(path):
    """Let what this rank writes from now on go to a file, whose name ends with its rank."""
    for stream in (1, 2):
        file = os.open(f"{path}{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, stream)


def run_with_output(argv, path):
    """Run a command line on this rank, which writes to a file; return the exit codes."""
    write_to_file(path)
    return run_distill([argv])


def run_all(num_ranks, *argv_list):
    """Run command lines one after the other; all of them must succeed on all ranks."""
    codes = ranks.run(num_ranks, run_distill, list(argv_list))
    assert codes == [[0] * len(argv_list)] * num_ranks, argv_list


def launch_forked(num_ranks, flags, log, threads):
    """Stand in for `demo.launch`, by ranks that have all imported."""
    log.write_text("")
    return max(codes[0] for codes in ranks.run(num_ranks, run_distill, [flags]))


def run_and_listen(*argv_list):
    """Run command lines on this rank; return (exit codes, what they say)."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        codes = run_distill(argv_list)
    return codes, said.getvalue()


def check_refusals(flags, cases):
    """Check the line with which a run ends before its first step, for [(changed flags, words)].

    The words are "nothing is wrong" of one that would begin.
    """
    [lines] = ranks.run(1, refusals, [flags | changes for changes, _ in cases])
    for (changes, expected), line in zip(cases, lines, strict=True):
        assert expected in line and "\n" not in line and "secret" not in line, (changes, line)


def refusals(flags_list):
    device = start_distributed()
    text_server.FIRST_PAUSE = 0.001
    lines = []
    for flags in flags_list:
        try:
            check_inputs(distill.Config(**flags), device)
            lines.append("nothing is wrong")
        except ValueError as error:
            lines.append(str(error))
    return lines


def losses_of(output, start=0):
    """Return what a run logged after step `start`, everything but times."""
    lines = []
    for text in (Path(output) / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["step"] > start:
            lines.append({key: value for key, value in line.items()
                          if not key.endswith(("seconds", "tokens_per_second"))})
    return lines


def check_same_curve(expected, lines, rel_tol, abs_tol=0.0, name=""):
    """Compare all metrics of two runs, line by line."""
    for a, b in zip(expected, lines, strict=True):
        assert a.keys() == b.keys(), name
        for key, value in a.items():
            # in bf16 that of a few hundred tokens leaps
            least = 0.01 if key == "accuracy" and rel_tol > 1e-3 else abs_tol
            # null: a mean over nothing
            close = value == b[key] or math.isclose(
                value, b[key], rel_tol=rel_tol, abs_tol=least)
            assert close, (name, key, a, b)
