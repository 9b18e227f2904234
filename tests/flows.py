"""Type what a newcomer types, each flow in fresh processes, and say which go at the first try.

    python tests/flows.py              # all: `make flows`, half an hour on two cores
    python tests/flows.py chats report # those whose names begin so, with what they need before

The package is built and installed as `pip install .` does, beside the packages of this
environment.  Tiny models and texts lie under the names of hub ids.  A flow is right if its exit
code and words are; an error is one line.  tests/test_install.py types the cheapest.
"""

import contextlib
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 900  # seconds of a flow
ENVIRONMENT = dict(os.environ)  # before the tests' helpers change it
ENVIRONMENT.pop("PYTHONPATH", None)
# {what is made: the names under which flows know it}
INPUTS = {
    "student": "S HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-135M-Instruct "
               "openai-community/gpt2",
    "teacher": "T Qwen/Qwen3-0.6B Qwen/Qwen3-8B Qwen/Qwen2-0.5B",
    "second_teacher": "U google/gemma-3-4b-it",
    "texts.jsonl": "corpus.jsonl HuggingFaceFW/fineweb-edu:sample-10BT/a.jsonl",
    "chats.jsonl": "chats.jsonl",
    "pairs.jsonl": "pairs.jsonl",
}
RUN = "isogloss-distill --learning_rate 1e-4 --steps 4 --max_length 128"
TEXTS = f"{RUN} --student S --teacher T --data corpus.jsonl"
# Ctrl-C in a terminal goes to all processes of a job in the foreground
CTRL_C = """
set -m
type_ctrl_c() {  # times, directory of the run, words of the command
    local times=$1 run=$2 code=0
    shift 2
    touch before
    "$@" & local job=$!
    until [ $run/metrics.jsonl -nt before ]; do
        kill -0 $job || return 1
        sleep 0.2
    done
    for _ in $(seq $times); do kill -INT -- -$job; sleep 0.5; done
    wait $job || code=$?
    echo "code $code, $(pgrep -g $job | wc -l) processes left"
}
"""


class Flow(NamedTuple):
    """Lines for a shell.

    says: what they print, among other words; code: exit code, 2 being one line without more;
    makes: files that are there afterwards; after: flows whose files they read; is_cheap: it starts
    no rank and reads no model.
    """

    name: str
    lines: str
    says: tuple = ()
    code: int = 0
    makes: tuple = ()
    after: tuple = ()
    is_cheap: bool = False


def refused(name, lines, *says, **more):
    return Flow(name, lines, says, 2, **more)


def python_blocks(page):
    """Return {heading: first Python block below it} of a page."""
    blocks = {}
    heading = ""
    for line in re.findall(r"^## [^\n]*|^```python\n.*?^```", (ROOT / page).read_text(),
                           re.M | re.S):
        if line.startswith("## "):
            heading = line[3:]
        else:
            blocks.setdefault(heading, line.removeprefix("```python\n").removesuffix("```"))
    return blocks


def script(code):
    """Return a line that runs Python."""
    return f"python - <<'END'\n{code}\nEND"


[SNIPPET] = python_blocks("README.md").values()
BEFORE_SNIPPET = """
import json
from transformers import AutoModelForCausalLM, AutoTokenizer
texts = [json.loads(line)["text"] for line in open("corpus.jsonl")][:8]
student, teacher = map(AutoModelForCausalLM.from_pretrained, "ST")
student_tokenizer, teacher_tokenizer = map(AutoTokenizer.from_pretrained, "ST")
"""
TRAINERS = python_blocks("docs/trainers.md")
OF_CARD = """
import pathlib, re
code = re.search("```python\\n(.*?)```", pathlib.Path("README.md").read_text(), re.S)[1]
exec(code)
print("the card's code ran")
"""
TRAIN_LOOP = """
from cross_tokenizer import CrossTokenizerKD
kd = CrossTokenizerKD(student_tokenizer, teacher_tokenizer)
batch = kd.collate(texts)
kd(student(**batch.student).logits, teacher(**batch.teacher).logits, batch).backward()
print("loss and gradient")
"""
COPIED = "align.py loss_bounds.py losses.py nodes.py translation.py spelling.py cross_tokenizer.py"
FIRST = """isogloss-distill --ds_config ds_configs/zero2.json --learning_rate 1e-4 \
    --student HuggingFaceTB/SmolLM2-135M --teacher Qwen/Qwen3-0.6B \
    --data HuggingFaceFW/fineweb-edu:sample-10BT --streaming --max_length 1024 --eval_rows 20 \
    --eval_every 2 --save_every 2 --output_dir runs/smol --export runs/smol/student --steps """

FLOWS = [
    # what is here, and what there is
    Flow("doctor", "isogloss doctor", ("torch 2.", "GiB free")),
    Flow("help of the command", "isogloss --help", ("doctor|distill",), is_cheap=True),
    Flow("help of each command", "for name in distill cache export plan report tasks align transfer"
         " projection; do isogloss $name --help; done", ("--student", "--png"),
         is_cheap=True),
    refused("no words", "isogloss-distill", "begin with: ", "--student", is_cheap=True),
    Flow("planner", "isogloss plan recipes/qwen3_8b_to_smollm2_1.7b.yaml --gpu_gib 24",
         ("GiB",)),
    Flow("alignment", "python align.py --student openai-community/gpt2 --teacher Qwen/Qwen2-0.5B "
         "--show 'In 2010 the crème brûlée cost 12.50 €.'", ("bytes 100.0%",)),
    Flow("alignment by its command", "isogloss align --student S --teacher T --show 'in 2010' "
         "--html page.html", makes=("page.html",)),
    # the job
    Flow("first run", FIRST + "4", ("4/4", "runs/smol/student"),
         makes=("runs/smol/student/README.md", "runs/smol/run.json")),
    Flow("resume", FIRST + "6 --extend_schedule", ("6/6",), after=("first run",)),
    refused("longer than its schedule", FIRST + "8", "--extend_schedule", after=("resume",)),
    Flow("the student's card", f"cd runs/smol/student; {script(OF_CARD)}",
         ("the card's code ran",), after=("first run",)),
    Flow("texts", f"{TEXTS} --output_dir runs/a", ("4/4",), makes=("runs/a/metrics.jsonl",)),
    Flow("texts by deepspeed in a checkout", "deepspeed distill.py --student S --teacher T "
         "--data corpus.jsonl --learning_rate 1e-4 --steps 2 --output_dir runs/checkout", ("2/2",)),
    Flow("another loss", f"{TEXTS} --loss alm --output_dir runs/alm", ("alm",)),
    Flow("no teacher", f"{RUN} --student S --data corpus.jsonl --kd_weight 0 "
         "--output_dir runs/alone", ("4/4",)),
    Flow("chats", f"{RUN} --student S --teacher T --data chats.jsonl --text_key messages "
         "--eval_rows 8 --output_dir runs/chats --export runs/chats/student", ("4/4",)),
    Flow("the card of chats", f"cd runs/chats/student; {script(OF_CARD)}",
         ("the card's code ran",), after=("chats",)),
    Flow("prompts and completions", f"{RUN} --student S --teacher T --data pairs.jsonl "
         "--prompt_key question --completion_key answer --output_dir runs/pairs", ("4/4",)),
    Flow("parquet", f"{TEXTS.replace('corpus.jsonl', 'corpus.parquet')} --output_dir runs/parquet",
         ("4/4",)),
    Flow("csv", f"{TEXTS.replace('corpus.jsonl', 'corpus.csv')} --output_dir runs/csv", ("4/4",)),
    Flow("stream", f"{TEXTS} --streaming --output_dir runs/stream", ("4/4",)),
    Flow("held-out file", f"{TEXTS} --eval_data held_out.jsonl --output_dir runs/held", ("4/4",),
         makes=("runs/held/metrics.jsonl",)),
    Flow("a file of flags", "isogloss-distill --config run.yaml --steps 3", ("3/3",)),
    Flow("two teachers", f"{RUN} --student S --data corpus.jsonl --output_dir runs/two --teachers "
         """'[{"model": "Qwen/Qwen3-8B", "weight": 2},
              {"model": "google/gemma-3-4b-it", "loss": "alm"}]'""", ("4/4",)),
    Flow("cache, then train", "isogloss cache --teacher Qwen/Qwen3-8B --data corpus.jsonl "
         "--output caches/qwen --top_k 64\n"
         f"{RUN} --student S --teacher_cache caches/qwen --data corpus.jsonl "
         "--output_dir runs/cached", ("4/4",)),
    Flow("served teacher", f"{RUN} --student S --teacher $SERVER --teacher_tokenizer T "
         "--teacher_output_topk 64 --data corpus.jsonl --output_dir runs/served", ("4/4",)),
    Flow("on-policy", f"{RUN} --student S --teacher T --data chats.jsonl --text_key messages "
         "--on_policy 0.5 --rollout_tokens 16 --loss reverse_kl --output_dir runs/on_policy",
         ("the student writes", "4/4")),
    Flow("its own teacher", f"{RUN} --student S --teacher self --teacher_prompt_key hint --data "
         "chats.jsonl --text_key messages --output_dir runs/self", ("4/4",)),
    Flow("LoRA", f"{TEXTS} --lora_r 8 --merge --output_dir runs/lora --export runs/lora/student",
         ("4/4",), makes=("runs/lora/student/model.safetensors",)),
    Flow("ZeRO-3 on two ranks", f"{TEXTS} --ds_config ds_configs/zero3.json --output_dir runs/z3"
         .replace("distill", "distill --num_gpus 2", 1), ("4/4",)),
    Flow("a tiny recipe", "python -m recipes.tiny.prepare\n"
         "isogloss-distill --num_gpus 2 --config recipes/tiny/sharded.yaml", ("4/4",)),
    # what goes another way
    refused("a misspelled flag", f"{TEXTS} --lr 1e-4", "unknown flag --lr; it is --learning_rate",
            is_cheap=True),
    refused("a flag nearly right", f"{TEXTS} --studnt S", "did you mean --student?", is_cheap=True),
    refused("the launcher's flag behind ours", f"{TEXTS} --num_gpus 2", "in front of all others",
            is_cheap=True),
    refused("a wrong path of data", TEXTS.replace("corpus.jsonl", "corpse.jsonl"), "corpse.jsonl"),
    refused("a wrong path of a model", TEXTS.replace("--student S", "--student ./nowhere"),
            "nowhere"),
    refused("no learning rate", "isogloss-distill --student S --teacher T --data corpus.jsonl",
            "learning_rate"),
    refused("a column that is not there", f"{TEXTS} --text_key body", "body", "text"),
    refused("no vLLM for a teacher", f"{TEXTS} --teacher_engine vllm", "vllm"),
    refused("no vLLM for a writer", f"{TEXTS} --on_policy 0.5 --rollout_tokens 8 --writer vllm",
            "vllm"),
    Flow("Ctrl-C, then the same command, and again",
         f"words='{TEXTS} --output_dir runs/c --steps 100000'\n"
         "type_ctrl_c 1 runs/c $words\ntype_ctrl_c 1 runs/c $words\n"
         """grep -o '"step": [0-9]*' runs/c/metrics.jsonl | sort | uniq -d | wc -l >twice\n"""
         "echo $(cat twice) steps twice",
         ("ending after step", "saved runs/c/checkpoints", "the same command goes on",
          "code 130, 0 processes left", "\n0 steps twice")),
    Flow("Ctrl-C twice", f"type_ctrl_c 2 runs/d {TEXTS} --output_dir runs/d --steps 100000",
         ("code 130, 0 processes left",)),
    # afterwards
    Flow("export", "isogloss export runs/smol --step 4 --output exported",
         makes=("exported/model.safetensors",), after=("first run",)),
    refused("push without an owner", "isogloss export runs/smol --push_to_hub student",
            "OWNER/NAME"),
    refused("push where the hub cannot be reached", "isogloss export runs/smol --output pushed "
            "--push_to_hub me/student >pushed.txt", "me/student", after=("first run",)),
    Flow("report", "isogloss report runs/a runs/alone --png curves.png",
         makes=("report.html", "curves.png"), after=("texts", "no teacher")),
    refused("report of nothing", "isogloss report runs/nowhere", "runs/nowhere", is_cheap=True),
    Flow("tasks", "isogloss tasks --model S --tasks lambada --limit 2 --data eval", ("lambada",)),
    Flow("projection", """isogloss-projection build --student S --teacher T --output p.pt
isogloss-projection show --student S --teacher T --projection p.pt --tokens '#20,#21'
isogloss-projection exact --student S --teacher T --projection p.pt --output q.pt
isogloss-projection compare p.pt q.pt --student S --teacher T
""" + f"{TEXTS} --loss projection_kl --projection p.pt --output_dir runs/projection", ("4/4",)),
    Flow("another tokenizer", "isogloss transfer --model S --tokenizer T --output student\n"
         "isogloss-distill --learning_rate 2e-4 --steps 2 --max_length 128 --student student "
         "--teacher S --data corpus.jsonl --output_dir runs/t --export runs/t/student", ("2/2",)),
    Flow("texts that a teacher writes",
         "isogloss-write --teacher T --data corpus.jsonl --output written.jsonl --rollout_tokens 8",
         makes=("written.jsonl",)),
    # in one's own code
    Flow("eight lines", script(BEFORE_SNIPPET + SNIPPET + "loss.backward(); print('loss', loss)"),
         ("loss",)),
    Flow("files copied flat", f"mkdir flat; cp {COPIED} flat; cd flat\nln -s ../S ../T "
         f"../corpus.jsonl .\n{script(BEFORE_SNIPPET + TRAIN_LOOP)}", ("loss and gradient",)),
    Flow("files copied into a package", f"mkdir -p pack/kd; cp {COPIED} pack/kd; cd pack\n"
         "touch kd/__init__.py; ln -s ../S ../T ../corpus.jsonl .\n"
         + script(BEFORE_SNIPPET + TRAIN_LOOP.replace("from cross", "from kd.cross")),
         ("loss and gradient",)),
    Flow("TRL's trainer", script(TRAINERS["TRL"].replace(
        "max_steps=100", "max_steps=2, logging_steps=1")), ("'kd'",)),
    Flow("transformers' Trainer", script(TRAINERS["The Trainer of transformers"].replace(
        "max_steps=100", "max_steps=2"))),
    Flow("Lightning", script(TRAINERS["Lightning"])),
    Flow("a loop of one's own", script(TRAINERS["A loop of your own"])),
    Flow("demo", "python demo.py", ("piece_kl", "curves.png;")),
]


# --- where they are typed -------------------------------------------------------------------------


def install(folder):
    """Build and install the package, beside the packages of this environment.

    Returns:
        the folder of its programs.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", ROOT, "--no-deps", "--no-build-isolation", "--wheel-dir",
                    folder], check=True)
    [wheel] = folder.glob("*.whl")
    venv.create(folder / "env", symlinks=True)
    [packages] = (folder / "env" / "lib").glob("python*/site-packages")
    (packages / "tested.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    programs = folder / "env" / "bin"
    subprocess.run([*pip, "--python", programs / "python", "install", "--no-deps", "--no-index",
                    "--no-compile", wheel], check=True)
    lines = Path(sys.executable).with_name("deepspeed").read_text().splitlines(keepends=True)
    (programs / "deepspeed").write_text("".join([f"#!{programs / 'python'}\n", *lines[1:]]))
    (programs / "deepspeed").chmod(0o755)
    return programs


def lay_out(folder):
    """Make a copy of the checkout, with the inputs of the flows; return it."""
    import pandas

    from hub_copies import copy_lambada
    from recipes.tiny import prepare

    place = folder / "checkout"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True,
                            check=True).stdout.splitlines()
    for name in listed:
        if (ROOT / name).exists():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    tiny = folder / "tiny"
    prepare.SHAPE["max_position_embeddings"] = 2048
    prepare.main(tiny)
    for file, names in INPUTS.items():
        for name in names.split():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).symlink_to(tiny / file)
    lines = (tiny / "texts.jsonl").read_text().splitlines(keepends=True)
    (place / "held_out.jsonl").write_text("".join(lines[-20:]))
    table = pandas.read_json(tiny / "texts.jsonl", lines=True)
    table.to_parquet(place / "corpus.parquet")
    table.to_csv(place / "corpus.csv", index=False)
    (place / "run.yaml").write_text("student: S\nteacher: T\ndata: corpus.jsonl\n"
                                    "learning_rate: 1e-4\nmax_length: 128\noutput_dir: runs/y\n")
    with contextlib.suppress(Exception):  # where there are no files of it
        copy_lambada(place / "eval", 4)
    return place


# --- typing them ----------------------------------------------------------------------------------


def wrong(flow, done, place):
    """Return what is wrong with a flow that has ended; empty: nothing."""
    printed = done.stdout
    if done.returncode != flow.code:
        return f"exit code {done.returncode}, not {flow.code}"
    if "Traceback (most recent call last)" in printed:
        return "a traceback"
    in_own_code = "<<'END'" in flow.lines  # where other libraries say what they like
    if not in_own_code and re.search(r"\.py:\d+: \w*Warning", printed):
        return "a warning with a path and a line of code"
    if "[WARNING]" in printed and "deepspeed distill.py" not in flow.lines:
        return "a library's warning"
    if flow.code == 2 and printed.count("\n") != 1:
        return f"{printed.count(chr(10))} lines, not one"
    missing = [text for text in flow.says if text not in printed]
    missing += [name for name in flow.makes if not (place / name).exists()]
    return f"not there: {', '.join(missing)}" if missing else ""


def type_flow(flow, place, environment, log):
    """Run a flow; return (what is wrong, seconds)."""
    begin = time.perf_counter()
    try:
        done = subprocess.run(["bash", "-e", "-c", CTRL_C + flow.lines], cwd=place, text=True,
                              env=environment, stdin=subprocess.DEVNULL, timeout=LIMIT,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        return f"takes longer than {LIMIT} s", LIMIT
    log.write_text(f"{flow.lines}\n---\n{done.stdout}")
    return wrong(flow, done, place), time.perf_counter() - begin


def chosen(words):
    """Return the flows whose names begin with one of the words, and those that they need."""
    if not words:
        return FLOWS
    names = {flow.name for flow in FLOWS if flow.name.lower().startswith(tuple(words))}
    for flow in reversed(FLOWS):
        if flow.name in names:
            names |= set(flow.after)
    return [flow for flow in FLOWS if flow.name in names]


def run_flows(flows, folder):
    """Type flows one after the other; return [(name, what is wrong, seconds)]."""
    from text_servers import StandIn

    programs = install(folder)
    place = lay_out(folder)
    (folder / "logs").mkdir()
    results = []
    server = StandIn(folder / "tiny" / "teacher", context=4096)
    with server.running():
        path = f"{programs}:{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"
        environment = ENVIRONMENT | {"PATH": path, "SERVER": server.url, "HF_HUB_OFFLINE": "1"}
        for flow in flows:
            log = folder / "logs" / f"{flow.name.replace(' ', '_')}.txt"
            trouble, seconds = type_flow(flow, place, environment, log)
            results.append((flow.name, trouble, seconds))
            print(f"{'FAILED' if trouble else 'passed'} {seconds:4.0f} s  {flow.name}"
                  f"{': ' if trouble else ''}{trouble}", flush=True)
    return results


def main(words):
    folder = Path(tempfile.mkdtemp(prefix="flows"))
    results = run_flows(chosen([word.lower() for word in words]), folder)
    failed = [name for name, trouble, _ in results if trouble]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed; {folder / 'logs'}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
