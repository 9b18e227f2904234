"""Measure on a GPU what nobody has measured yet: studies in order of worth, within some minutes.

    python -m benchmarks.gpu_day --list                    # what there is, and what is done
    python -m benchmarks.gpu_day --minutes 9 --out gpu_day # make gpu-day
    python -m benchmarks.gpu_day --studies check --minutes 30 --out gpu_day  # make test-gpu
    python -m benchmarks.gpu_day --merge gpu_day           # put it into docs/log/gpu_day.json
    python -m benchmarks.gpu_day --rehearse --out FOLDER   # all of it on a CPU, with tiny models

A study has parts, each in a process of its own with a time limit, so that one that fails or hangs
stops no other.  A part that docs/log/gpu_day.json or the folder of --out has is not repeated, but
with --again STUDY; those that failed come after all that were never tried.  A part begins if it is
expected to end within the minutes.  The folder gets two files: gpu_day.jsonl with a line for each
part (result, figures, card, driver, torch, date), and gpu_day.log with all that was printed.

The machine may be bare: Python and torch for a GPU, and no network.  What it lacks travels in
.gpu_pack (gpu_pack.py), from which this installs wheels where deepspeed is absent.  This file needs
no package; gpu_studies.py has what the parts do.
"""

import argparse
import datetime
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs/log/gpu_day.json"
PACK = ROOT / ".gpu_pack"
MODEL = ROOT / ".gpu_model"  # the file of SmolLM2-135M-Instruct, in parts: 1of2, 2of2
FOLDER = Path(tempfile.gettempdir()) / f"isogloss_gpu_day_{os.getuid()}"  # models, texts, runs
LINES, LOG = "gpu_day.jsonl", "gpu_day.log"
PATIENCE = 2  # a part is ended after so many times the seconds that are expected
LAST_SECONDS = 10  # of the minutes, in which nothing runs
REHEARSED_AT_A_TIME = 2
WIDEST = 60  # characters of a figure in a table

LLAMA, QWEN = "meta-llama/Llama-3.2-1B", "Qwen/Qwen3"
PAIR = LLAMA, 0, f"{QWEN}-4B", 12
SMALL_PAIR = "HuggingFaceTB/SmolLM2-135M", 0, f"{QWEN}-0.6B", 0
LARGE_PAIR = LLAMA, 0, f"{QWEN}-8B", 0
STEP = {"pair": PAIR, "length": 2048, "samples": 6, "micro_batch": 2}
SMALL_STEP = STEP | {"pair": (f"{QWEN}-0.6B", 0, "HuggingFaceTB/SmolLM2-135M", 0)}
TP = {"world": 2, "stage": 1, "teacher_tp": 2}
TEXT = {"kd_weight": 0}
LONG_STEP = STEP | {"length": 8192, "samples": 2, "micro_batch": 1}
# what makes a step faster, each switched off or set otherwise
PIECES = {"loss_backend plain": {"loss_backend": "plain"}, "compile false": {"compile": "false"},
          "loss_memory_mib 4096": {"loss_memory_mib": 4096}}
NOT_COMPILED = "loss_backend plain", "compile false"
GRAPHS = {"environment": {"TORCHINDUCTOR_CUDAGRAPHS": "1"}}


@dataclass
class Study:
    """List what is measured for a question.

    Attributes:
        about: the question, with the models named in full.
        function: of gpu_studies.py.
        parts: {name: (seconds that it takes on a card, about; arguments of the function)}.
        needs_model: whether it is for the real model of MODEL.
    """

    about: str
    function: str
    parts: dict = field(default_factory=dict)
    needs_model: bool = False


def checks(**seconds):
    return {name: (expected, {"name": name}) for name, expected in seconds.items()}


def alone(loss):
    return {"loss": loss, "ce_weight": 0}


def pieces(name, seconds, flags, which=PIECES):
    """Return parts: a step as it is by default, and with each of some PIECES."""
    parts = {name: (seconds, flags)}
    for piece in which:
        parts[f"{name}, {piece}"] = seconds, flags | PIECES[piece]
    return parts


STUDIES = {
    "transfer": Study(
        "SmolLM2-135M-Instruct with the 32,000 tokens of Llama 2 learns from what it was: 200 "
        "steps of 64 samples of 256 tokens of documentation; what it wins back after 20, 60, 200",
        "another_tokenizer", {
            "text alone": (120, TEXT), "text + piece_kl": (80, {"loss": "piece_kl"}),
            "piece_kl alone": (80, alone("piece_kl")), "text + alm": (80, {"loss": "alm"}),
            "alm alone": (80, alone("alm"))}, needs_model=True),
    "draft": Study(
        "its first six layers, with these tokens, as a draft of the whole: the share of tokens "
        "that it accepts, before and after 400 steps", "draft", {
            "text alone": (120, TEXT), "piece_kl alone": (80, alone("piece_kl")),
            "total_variation alone": (80, alone("total_variation"))}, needs_model=True),
    "turns": Study(
        "SmolLM2-135M-Instruct answers questions in turns with a calculator, and learns from "
        "itself, which has read the solution: share of right answers before and after 60 steps of "
        "32 episodes", "turns", {
            "solution": (200, {}), "solution + reward": (200, {"reward_weight": 1.0})},
        needs_model=True),
    "step": Study(
        "Llama-3.2-1B learns from twelve of Qwen3-4B's 36 layers by piece_kl, 12,288 tokens a step "
        "in three micro-batches", "step", {
            **pieces("default", 150, STEP),
            "teacher_compile false": (100, STEP | {"teacher_compile": "false"}),
            "loss_memory_mib 16384": (100, STEP | {"loss_memory_mib": 16384})}),
    "pairs": Study(
        "the same for SmolLM2-135M from Qwen3-0.6B, where CUDA graphs launch what is compiled, for "
        "two samples of 8,192 tokens, and for Llama-3.2-1B from Qwen3-8B", "step", {
            **pieces("135M from 0.6B", 90, STEP | {"pair": SMALL_PAIR}, NOT_COMPILED),
            "135M from 0.6B, graphs": (120, STEP | {"pair": SMALL_PAIR} | GRAPHS),
            **pieces("8192 tokens", 150, LONG_STEP),
            **pieces("1B from 8B", 170, STEP | {"pair": LARGE_PAIR}, NOT_COMPILED)}),
    "engine": Study(
        "Qwen3-0.6B learns from SmolLM2-135M, on the rank and by the vLLM of the Python that "
        "ISOGLOSS_VLLM names", "by_engine", {
            "on the rank": (90, SMALL_STEP), "by vLLM": (180, SMALL_STEP | {"vllm": True})}),
    "same": Study(
        "how far four steps of small models on the card, where loss, student and teacher are "
        "compiled, are from those on CPUs, where they are not; two ranks share a card and talk "
        "over gloo where it is alone", "on_card_and_cpu", {
            "fused Adam": (60, {"world": 1, "stage": 0}),
            "checkpoints, bfloat16": (90, {"world": 1, "stage": 2, "precision": "bfloat16",
                                           "activation_checkpointing": True}),
            "ZeRO-3": (60, {"world": 1, "stage": 3}),
            "teacher ranks, CUDA IPC": (70, {"world": 2, "stage": 1, "teacher_ranks": 1}),
            "packed sequence shards": (70, {"world": 2, "stage": 2, "sequence_parallel": 2,
                                            "pack": True}),
            "sharded teacher": (100, TP)}),
    "loss": Study(
        "seconds of a loss with the cross-entropy over those of its matmuls; 8,192 positions, "
        "hidden sizes 2,048 and 2,560, vocabularies 128,256 and 151,646", "loss",
        {name: (60, {"name": name}) for name in (
            "piece_kl", "forward_kl", "generalized_jsd", "projection_kl", "gold", "uld", "alm")}),
    "liger": Study("the Jensen-Shannon divergence of Liger and of TRL beside it, vocabulary "
                   "128,256", "others_loss", {"jsd": (40, {"name": "liger"}),
                                              "trl jsd": (40, {"name": "trl"})}),
    "memory": Study(
        "the pair of step, one sample of many tokens with checkpointed activations", "step", {
            str(length): (100, STEP | {"length": length, "samples": 1, "micro_batch": 1,
                                       "activation_checkpointing": True})
            for length in (4096, 32_768, 131_072)}),
    "writing": Study(
        "SmolLM2-135M writes 32 samples of 480 tokens, by the loop of the job", "writing", {
            "loop": (90, {"pair": SMALL_PAIR, "length": 512, "samples": 32, "micro_batch": 16})}),
    "captured": Study(
        "the same by transformers' generate: as it is, and with a cache of one size, for which it "
        "captures a graph of a token", "generating", {
            "dynamic": (60, {"cache": "dynamic"}), "static": (90, {"cache": "static"})}),
    "square": Study(
        "students of 8 million weights learn 500, 2,000 and 8,000 passages by piece_kl, SimCT and "
        "the text alone; each part goes on where the last one ended", "large_square", {
            f"part {number}": (450, {"minutes": 7}) for number in (1, 2, 3)}),
    "resume": Study("relative difference of two runs, and of one that was killed and went on",
                    "resume", {"bf16": (90, {})}),
    "check": Study("checks of benchmarks/gpu.py and gpu_job.py", "check", checks(
        overlap=40, step_over_parts=60, compiled=120, no_synchronization=60, ipc_same_device=20,
        writer_ends_first=20, ipc_full_cache=20, killed_process_frees_memory=20,
        ipc_two_devices=20, nccl_gradients=60, tensor_parallel_teacher=60)),
}


# --- what is done ---------------------------------------------------------------------------------


def read_lines(path):
    """Return the lines of a file of JSON lines, without one that was cut; [] if there is none."""
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def read_record():
    return json.loads(RECORD.read_text()) if RECORD.exists() else []


def todo(names, lines, again=()):
    """Return [(study, part)] that are not done, those that were tried at the end."""
    done, tried = set(), set()
    for line in lines:
        key = line["study"], line["part"]
        tried.add(key)
        if line["result"] == "done" and line["study"] not in again:
            done.add(key)
    parts = [(name, part) for name in names for part in STUDIES[name].parts]
    waiting = [key for key in parts if key not in done]
    return sorted(waiting, key=lambda key: key in tried)  # which keeps the order of equal ones


def missing_of_model():
    """Return which parts of the real model's file are not there; "" if all are."""
    names = {path.name for path in MODEL.glob("*of*")}
    if not names:
        return f"no {MODEL.name}: make gpu-pack MODEL=1 makes it"
    number = int(min(names).partition("of")[2])
    missing = {f"{part}of{number}" for part in range(1, number + 1)} - names
    return f"{MODEL.name} has no {', '.join(sorted(missing))}" if missing else ""


# --- a part, in its process -----------------------------------------------------------------------


def environment():
    """Return what figures depend on."""
    import torch

    driver = ""
    card = "none"
    if torch.cuda.is_available():
        card = torch.cuda.get_device_name(0)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        run = subprocess.run(query, capture_output=True, text=True)
        driver = run.stdout.split("\n")[0]
    return {"card": card, "devices": torch.cuda.device_count(), "driver": driver,
            "torch": torch.__version__, "commit": commit(), "date": str(datetime.date.today())}


def commit():
    """Return the commit of the checkout; "" where it is no checkout."""
    run = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT,
                         capture_output=True, text=True)
    return run.stdout.strip()


def run_here(parts, out, tiny=False):
    """Run parts in this process, and append their lines."""
    from benchmarks import gpu, gpu_studies

    folder = Path(out, "work") if tiny else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    place = gpu_studies.Place(folder, PACK, MODEL, tiny)
    facts = environment()
    for name, part in parts:
        print(f"=== {name}: {part}", flush=True)
        begin = time.perf_counter()
        try:
            function = getattr(gpu_studies, STUDIES[name].function)
            line = {"result": "done"} | function(place, **STUDIES[name].parts[part][1])
        except gpu.Skipped as reason:
            line = {"result": "skipped", "reason": str(reason)}
        except Exception as error:
            traceback.print_exc()
            line = {"result": "failed", "reason": f"{type(error).__name__}: {error}"[:500],
                    "traceback": traceback.format_exc()[-2000:]}
        line["took"] = round(time.perf_counter() - begin, 1)
        append(out, {"study": name, "part": part} | facts | line)


def append(out, line):
    with open(Path(out, LINES), "a") as file:
        file.write(json.dumps(line) + "\n")


# --- all parts ------------------------------------------------------------------------------------


def child_environment():
    """Return the environment of a part's process; install the wheels of a pack first, if needed."""
    variables = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    wheels = [str(path) for path in (PACK / "wheels").glob("*.whl")]
    if wheels and importlib.util.find_spec("deepspeed") is None:
        site = FOLDER / "site"
        if not site.exists():
            subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index",
                            "--no-deps", "--no-compile", "--target", site, *wheels], check=True)
        path = [str(site), variables.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return variables


def run_part(name, part, out, seconds, variables):
    """Run a part in a process of its own; return its line, also if it crashed or took too long."""
    if STUDIES[name].needs_model and (reason := missing_of_model()):  # not kept: it was not tried
        return {"study": name, "part": part, "result": "skipped", "reason": reason}
    command = [sys.executable, "-m", "benchmarks.gpu_day", "--here", json.dumps([name, part]),
               "--out", str(out)]
    before = len(read_lines(out / LINES))
    with open(out / LOG, "a") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log,
                                   start_new_session=True)
        try:
            reason = f"ended with status {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            reason = f"no result within {seconds:.0f} s"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        process.wait()
    if len(read_lines(out / LINES)) == before:
        append(out, {"study": name, "part": part, "result": "failed", "reason": reason})
    return read_lines(out / LINES)[-1]


def run_all(names, out, minutes, again):
    """Run what is not done within the minutes; print what is left."""
    end = time.monotonic() + 60 * minutes - LAST_SECONDS
    variables = child_environment()
    check = "from benchmarks.gpu_day import environment, json; print(json.dumps(environment()))"
    facts = subprocess.run([sys.executable, "-c", check], cwd=ROOT, env=variables,
                           capture_output=True, text=True)
    if facts.returncode or json.loads(facts.stdout)["card"] == "none":
        reason = facts.stderr.strip().splitlines()[-1:] or ["torch sees no CUDA device"]
        raise SystemExit(f"no GPU: {reason[0]}, so nothing was measured; --rehearse runs on a CPU")
    print(facts.stdout.strip(), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    for name, part in todo(names, read_record() + read_lines(out / LINES), again):
        seconds, _ = STUDIES[name].parts[part]
        left = end - time.monotonic()
        if seconds <= left:
            line = run_part(name, part, out, min(PATIENCE * seconds, left), variables)
            print(text_of(line), flush=True)
    left = todo(names, read_record() + read_lines(out / LINES))
    print(f"{len(left)} parts are left:", ", ".join(" ".join(key) for key in left) or "none")


# --- without a card -------------------------------------------------------------------------------


def rehearse_study(name, out):
    """Run all parts of a study in this process, whose output goes to the log."""
    from benchmarks import gpu

    with open(out / LOG, "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    gpu.START_METHOD = "fork"  # this process is warm, and no device is there that would mind
    gpu.DEVICE = "cpu"
    run_here([(name, part) for part in STUDIES[name].parts], out, tiny=True)


def rehearse(names, out):
    """Run all parts on a CPU, some studies at a time, in processes of one warm server.

    Nothing is compiled, which takes minutes of a CPU: test_compiler.py and test_teacher.py do so.

    Returns:
        number of parts that failed or are missing.
    """
    os.environ |= child_environment() | {
        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        "TORCHDYNAMO_DISABLE": "1", "ISOGLOSS_CACHE": str(out / "cache")}
    # the path of this process is that of its children
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([
        "benchmarks.gpu_studies", "peft", "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3.modeling_qwen3"])

    def run(name):
        folder = out / name  # one for each, as lines of several processes would mix
        folder.mkdir(parents=True, exist_ok=True)
        process = context.Process(target=rehearse_study, args=(name, folder))
        process.start()
        process.join()
        lines = read_lines(folder / LINES)
        for line in lines:
            print(text_of(line), flush=True)
        if process.exitcode:
            print((folder / LOG).read_text()[-2000:], flush=True)
        done = sum(line["result"] != "failed" for line in lines)
        return len(STUDIES[name].parts) - done

    with ThreadPoolExecutor(REHEARSED_AT_A_TIME) as pool:
        return sum(pool.map(run, names))


def text_of(line):
    """Return a line of text of a part's line."""
    figures = " ".join(f"{key}={value}" for key, value in figures_of(line).items())
    return (f"{line['study']} {line['part']}: {line['result']} in {line.get('took', '?')} s "
            f"{line.get('reason', '')}{figures}")


FACTS = ("study", "part", "result", "reason", "traceback", "took", "card", "devices", "driver",
         "torch", "commit", "date")


def figures_of(line):
    """Return {name: text} of what a part measured."""
    figures = {}
    for key, value in line.items():
        if key in FACTS:
            continue
        if isinstance(value, dict) and len(json.dumps(value)) > WIDEST:
            figures |= {f"{key} {inner}": str(v) for inner, v in value.items()}
        else:
            figures[key] = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return {key: text for key, text in figures.items() if len(text) <= WIDEST}


# --- the record -----------------------------------------------------------------------------------


def merge(folder):
    """Put the lines of a folder into the record: the newest of a part on a card, and print it."""
    kept = {}
    for line in [*read_record(), *read_lines(Path(folder) / LINES)]:
        line["commit"] = line.get("commit") or commit()
        line.pop("records", None)  # of the square, which square_table.py adds to its own files
        key = line["study"], line["part"], line.get("card")
        if line["result"] == "done" or kept.get(key, line)["result"] != "done":
            kept[key] = line
    rows = ",\n".join(json.dumps(line) for line in kept.values())
    RECORD.write_text(f"[\n{rows}\n]\n")
    print(table(kept.values()))


def table(lines):
    """Return a table of all that was measured, in Markdown; what only passed shares its row."""
    rows = {}  # parts, by the rest of a row
    for line in lines:
        if line["result"] != "done":
            continue
        figures = ", ".join(f"{key} {text}" for key, text in figures_of(line).items())
        rest = (line["study"], figures, line["card"], line["torch"],
                f"{line['date']}, {line['commit']}")
        rows.setdefault((*rest, figures and line["part"]), []).append(line["part"])
    table = ["| study | part | figures | card | torch | date, commit |", "| " + "--- | " * 6]
    table += [f"| {study} | {', '.join(parts)} | {' | '.join(more)} |"
              for (study, *more, _), parts in rows.items()]
    return "\n".join(row.rstrip() for row in table)


def show_list(names):
    """Print every part: expected seconds, and what is known of it."""
    results = {(line["study"], line["part"]): line["result"] for line in read_record()}
    for name in names:
        print(f"{name}: {STUDIES[name].about}")
        for part, (seconds, _) in STUDIES[name].parts.items():
            print(f"  {seconds:4} s  {part}: {results.get((name, part), 'never tried')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, prog="gpu_day.py",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="after which all has ended")
    parser.add_argument("--out", type=Path, default=Path("gpu_day"), help="folder of what is found")
    parser.add_argument("--studies", default=",".join(STUDIES), help="names, with commas")
    parser.add_argument("--again", default="", help="studies to repeat, with commas")
    parser.add_argument("--list", action="store_true", help="print what there is")
    parser.add_argument("--merge", metavar="FOLDER", help="add what came back to the record")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny models")
    parser.add_argument("--here", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names, again = (text.split(",") if text else [] for text in (args.studies, args.again))
    if unknown := [name for name in [*names, *again] if name not in STUDIES]:
        raise SystemExit(f"--studies {','.join(unknown)}: expected some of {', '.join(STUDIES)}")
    if args.here:
        run_here([json.loads(args.here)], args.out)
    elif args.list:
        show_list(names)
    elif args.merge:
        merge(args.merge)
    elif args.rehearse:
        raise SystemExit(bool(rehearse(names, args.out.resolve())))
    else:
        run_all(names, args.out.resolve(), args.minutes, again)


if __name__ == "__main__":
    main()
