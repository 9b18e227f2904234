"""Every command of a page, and of the head of a module, runs as it stands in an empty folder.

The folder is a checkout in which nothing has been made.  Tiny models, texts and a server lie in the
places of hub ids, files and addresses, and flags behind a command make it short.  Who documents a
command adds nothing here, unless it names another input, or cannot run: NOT_RUN says why.
"""

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import traceback
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist
import yaml

import ranks
from conftest import ROOT
from documented import COMMANDS, PAGES, PROGRAM
from hub_copies import copy_gsm8k, copy_humaneval, copy_lambada, copy_mmlu, needs_lm_eval
from isogloss import distill
from isogloss.config import Config
from isogloss.flags.parse import parse_flags
from isogloss.projection_tools import build
from isogloss.projection_tools.__main__ import BuildArgs
from jobs import losses_of
from recipes.tiny import prepare
from text_servers import StandIn

# What the other indented blocks begin with.
NO_COMMANDS = ("@software", "data:", "loss = ", "rho_t = ", "--writer ", "--teacher_engine ",
               "true ")
# What a rank of the tests has in its environment, and a program that a user starts has not.
OF_RANKS = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"
# Pages that run each program once in a process of its own; the others share those of warm ranks.
FRESH = "docs/teachers.md", "docs/evaluate.md"
# {what a command begins with: why it does not run here}
NOT_RUN = {
    "make": "installs from the network; what it runs are tests, or the demo, of test_demo.py",
    'SEEDS="0 1 2" make demo': "the same",
    "python demo.py": "takes minutes; test_demo.py",
    "python -m recipes.xtoken_column.run": "takes minutes; test_xtoken_column.py",
    "pip": "installs from the network; of a wheel test_install.py",
    "apt": "installs from the network",
    "hf download": "asks the hub; hub_copies.py makes what it makes",
    "isogloss": "needs an installation; test_install.py",
    "vllm serve": "needs vLLM; test_vllm.py",
    "transformers serve": "needs transformers[serving], as vLLM does; test_vllm.py",
    "deepspeed distill.py ... --writer": "needs vLLM; test_vllm.py",
    "deepspeed distill.py ... --teacher_engine": "needs vLLM; test_vllm.py",
    "deepspeed --hostfile": "needs several nodes; test_two_nodes.py",
    "sbatch": "needs several nodes; test_two_nodes.py",
}
# Flags that are given once more, where the last one counts, to commands that have them.
SHORTER = {"eval_rows": 4, "eval_every": 2, "save_every": 1, "rollout_tokens": 8}
NUM_TEXTS = 40
FIRST_STEPS = 4  # for 2,000 of the first command, which saves four times
# {what stands in a command: what stands there here}
REPLACED = {
    "--data ...": "--data corpus.jsonl",
    "... --writer": "... --on_policy 0.5 --rollout_tokens 8 --writer",
    "distill.py ...": "distill.py --student S --teacher T --data corpus.jsonl --learning_rate 1e-4",
    "pipeline.json ...": "pipeline.json --student S --teacher T --data corpus.jsonl "
                         "--learning_rate 1e-4",
    "runs/b ...": "runs/b",
    "--push_to_hub me/student": "",  # which asks the hub
    "--step 1500": "--step 3",  # of four, where the first command takes 2,000 steps
    "--step 400": "--step 3",
    "tokenizer T --data": "tokenizer T --top_k 16 --data",  # a server is slow
    "201,hello": "#201,#20",  # which a tiny vocabulary lacks
    "--data DIR": "--data eval",
    "--tasks gsm8k": "--tasks gsm8k --data eval",  # which asks the hub
}
# {what is made for the tests: the names under which commands know it}
INPUTS = {
    "student": """S A E M DIR smollm2 openai-community/gpt2 HuggingFaceTB/SmolLM2-135M
        HuggingFaceTB/SmolLM2-1.7B HuggingFaceTB/SmolLM2-1.7B-Instruct Qwen/Qwen3-1.7B
        google-t5/t5-small""",
    "teacher": """T B llama3 qwen2 gpt2 Qwen/Qwen2-0.5B Qwen/Qwen3-0.6B Qwen/Qwen3-4B
        Qwen/Qwen3-8B meta-llama/Llama-3.1-70B-Instruct""",
    "second_teacher": "C llama2 mistral_v7 deepseek_coder google/gemma-3-12b-it "
                      "google/gemma-3-4b-it",
    "texts.jsonl": "corpus.jsonl D/a.jsonl org/name/a.jsonl "
                   "HuggingFaceFW/fineweb-edu:sample-10BT/a.jsonl",
    "chats.jsonl": "chats.jsonl sums.jsonl HuggingFaceTB/smoltalk:all/a.jsonl "
                   "open-r1/OpenR1-Math-220k/a.jsonl",
    "prose.txt": "a.txt F.txt G.py english.txt stories.txt numbers.txt code.txt chinese.txt "
                 "japanese.txt",
    "projection.pt": "F.pt G.pt",
    "run": "RUN runs/a runs/b runs/smol",
    "eval": "eval",
}


[FIRST] = [command for command in COMMANDS if "--export runs/smol" in command.line]


# --- a command as it runs here --------------------------------------------------------------------


def reason_of(command):
    """Return why a command does not run here; None where it does."""
    for begin, reason in NOT_RUN.items():
        if command.line.startswith(begin):
            return reason
    return None


def has_tasks(command):
    return "tasks " in command.line


def ranks_of(command):
    number = re.search(r"(?:--num_gpus|--nproc_per_node|\"tp\":) (\d)", command.line)
    return int(number[1]) if number else 1


def folder_of(command):
    """Return the name of its folder: commands of a page follow one another, of a head are choices.
    """
    name = re.sub(r"\W+", "_", command.page)
    return name if command.page.endswith(".md") else f"{name}_{COMMANDS.index(command)}"


def first_of(module):
    """Return the first command of the pages in FRESH that runs a module."""
    begin = f"python -m {module} "
    return next(each for each in COMMANDS if each.page in FRESH and each.line.startswith(begin))


def words_of(command, address="http://host:8000"):
    """Return its words, with what stands here in place of what is elsewhere, and short."""
    line = re.sub(r"http://[\w-]+:8000", address, command.line)
    for there, here in REPLACED.items():
        line = line.replace(there, here)
    words = shlex.split(line)
    if command.page in FRESH and words[0] == "python" and command == first_of(words[2]):
        words[0] = sys.executable
    if has_tasks(command):
        limited = '--eval_task_options={"limit": 1, "data": "eval"}'  # as the page has it
        words.append(limited if "distill.py" in words else "--limit=1")
    if "isogloss.write" in words:
        words.append("--rollout_tokens=32")
    if "distill.py" in words:
        words += short_flags(words, FIRST_STEPS if command == FIRST else 2)
    return words


def short_flags(words, steps):
    """Return further words of a job that make it short."""
    more = [f"--steps={steps}", "--max_length=120", "--num_workers=0"]
    recipe = ""
    if "--config" in words:
        recipe = (ROOT / words[words.index("--config") + 1]).read_text()
    for name, value in SHORTER.items():
        if f"--{name}" in words or f"\n{name}:" in recipe:
            more.append(f"--{name}={value}")
    if "--config" not in words and "--output_dir" not in words:
        more.append("--output_dir=runs/one")
    return more


# --- an empty folder ------------------------------------------------------------------------------


def lay_out(folder, tiny, commands):
    """Make a checkout in which nothing has been made, with the inputs that commands name."""
    made = {}
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("runs", "site"):
            made[path.name] = path
    made["RECIPE"] = ROOT / "recipes" / "qwen3_8b_to_smollm2_1.7b.yaml"
    for file, names in INPUTS.items():
        made |= dict.fromkeys(names.split(), tiny / file)
    for command in commands:
        for name in re.findall(r"--output(?:_dir)? (\S+)", command.line):
            made.pop(name, None)
    for name, target in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    (folder / "YOUR_FOLDER").mkdir()
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder of tiny models and rows of all columns that commands name."""
    tiny = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(prepare.SHAPE, "max_position_embeddings", 2048)
        patch.setitem(prepare.SHAPE, "num_key_value_heads", 4)  # --teacher_tp 4
        prepare.main(tiny)
    rows = []
    for number, line in enumerate((tiny / "chats.jsonl").read_text().splitlines()):
        row = json.loads(line)
        source = "metamathqa-50k" if number % 2 else "everyday-conversations"
        rows.append({"messages": row["messages"], "solution": row["hint"], "source": source,
                     "answer": number})
    prepare.write_rows(tiny / "chats.jsonl", rows)
    texts = (tiny / "texts.jsonl").read_text().splitlines(keepends=True)[:NUM_TEXTS]
    (tiny / "texts.jsonl").write_text("".join(texts))
    (tiny / "prose.txt").write_text("\n".join(json.loads(text)["text"] for text in texts))
    build.main(BuildArgs(student=str(tiny / "student"), teacher=str(tiny / "teacher"),
                         output=str(tiny / "projection.pt")))
    return tiny


# --- running --------------------------------------------------------------------------------------


def run_words(words):
    """Run a command on this rank; return its exit code."""
    if words[0] in ("cp", sys.executable):
        alone = ["env", *[f"--unset={name}" for name in OF_RANKS]]
        done = subprocess.run([*alone, *words], capture_output=True, text=True)
        print(done.stdout, done.stderr)
        return done.returncode
    rank = [f"--local_rank={os.environ['LOCAL_RANK']}"] if words[0] == "deepspeed" else []
    module = {"-m", "--module"} & set(words)
    try:
        if "distill.py" in words:
            distill.cli([*words[words.index("distill.py") + 1 :], *rank])
        elif module:
            sys.argv = [*words[words.index(module.pop()) + 1 :], *rank]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words[1:]
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_jobs(jobs):
    """Run [(folder, words)] on this rank; return [(exit code, the end of what is printed)]."""
    dist.destroy_process_group = lambda: None  # the next command goes on with it
    ended = []
    for folder, words in jobs:
        os.chdir(folder)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = run_words(words)
        ended.append((code, printed.getvalue()[-3000:]))
    return ended


def check_what_is_made(folder, words):
    """See that a command made what its flags name, and that a job took its steps."""
    flags = {}
    for word, next_word in pairwise([*words, ""]):
        name, _, value = word.partition("=")
        flags[name.removeprefix("--")] = value or next_word
    if "distill.py" in words:
        if "config" in flags:
            flags = yaml.safe_load((folder / flags["config"]).read_text()) | flags
        lines = [line for line in losses_of(folder / flags["output_dir"]) if "loss" in line]
        assert [line["step"] for line in lines] == list(range(1, int(flags["steps"]) + 1)), words
        assert all(0 < line["loss"] < 99 for line in lines), words
        if "on_policy" in flags:
            assert sum(line["rollout/tokens"] for line in lines) > 0, words
    for name in ("output", "export", "png"):
        if name in flags:
            assert (folder / flags[name]).exists(), (words, name)
    if "export" in flags:
        assert list((folder / flags["export"]).glob("*.safetensors")), words


@pytest.fixture(scope="module")
def first_run(tiny, tmp_path_factory):
    """Directory of the run of the first command of the README, under the launcher."""
    folder = lay_out(tmp_path_factory.mktemp("first"), tiny, [FIRST])
    words = words_of(FIRST)
    program = Path(sys.executable).with_name("deepspeed")
    port = f"--master_port={ranks.free_port()}"
    done = subprocess.run(["env", "--unset=PYTHONPATH", program, port, *words[1:]], cwd=folder,
                          text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    check_what_is_made(folder, words)
    (tiny / "run").symlink_to(folder / "runs" / "smol")


def run_and_check(commands, tiny, folder):
    """Run commands, those of equally many ranks in one group of them."""
    for name in {folder_of(command) for command in commands}:
        (folder / name).mkdir()
        lay_out(folder / name, tiny, [other for other in COMMANDS if folder_of(other) == name])
    server = StandIn(tiny / "teacher", context=4096)
    with server.running():
        for num_ranks in sorted(set(map(ranks_of, commands))):
            jobs = []
            for command in commands:
                if ranks_of(command) == num_ranks:
                    jobs.append((folder / folder_of(command), words_of(command, server.url)))
            # DeepSpeed keeps the layout of a pipeline for all later engines of a process
            jobs.sort(key=lambda job: "--pipeline_parallel" in job[1])
            failed = []
            for ended in ranks.run(num_ranks, run_jobs, jobs):
                for (_, words), (code, printed) in zip(jobs, ended, strict=True):
                    if code != 0:
                        failed.append(f"{shlex.join(words)}: {code}, {printed}")
            assert not failed, "\n".join(failed)
            for place, words in jobs:
                check_what_is_made(place, words)


def test_every_command_is_understood():
    """Those that do not run, too: their flags and targets exist.  No reason is left over."""
    for page in PAGES:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for line in re.findall(r"\n\n    (.*)", prose):
            assert re.match(PROGRAM, line) or line.startswith(NO_COMMANDS), (page, line)
    for begin in (*NOT_RUN, *REPLACED):
        assert any(begin in line for _, line in COMMANDS), begin
    makefile = (ROOT / "Makefile").read_text()
    for command in COMMANDS:
        words = words_of(command)
        if "distill.py" in words:
            parse_flags(Config, words[words.index("distill.py") + 1 :], file_flag="config")
        elif "make" in words:
            target = words[words.index("make") + 1]
            assert f"\n{target}:" in makefile, command
        assert reason_of(command) or words[0] in ("deepspeed", "torchrun", "cp", "python",
                                              sys.executable), command


@pytest.mark.slow
def test_commands_run_as_they_stand(tiny, first_run, tmp_path):
    chosen = [command for command in COMMANDS
              if not (reason_of(command) or has_tasks(command) or command == FIRST)]
    run_and_check(chosen, tiny, tmp_path)


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap")
def test_commands_of_tasks_run_as_they_stand(tiny, tmp_path):
    copy_lambada(tiny / "eval", 12)  # of which some are examples
    copy_gsm8k(tiny / "eval", 2)
    copy_mmlu(tiny / "eval", 2)
    copy_humaneval(tiny / "eval", [])
    chosen = [command for command in COMMANDS if has_tasks(command) and not reason_of(command)]
    run_and_check(chosen, tiny, tmp_path)
