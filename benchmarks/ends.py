"""Measure whether a student goes on ending its turns, when its teacher ends them by another token.

    python benchmarks/ends.py ASSETS [--losses reverse_kl,generalized_jsd] [--steps 200]

stories260K first learns to chat, and to end a turn with its </s>, by cross-entropy on the dialogues
of text/tinytalk_chat_val.txt.  Then it writes all of its samples, and tinytalk_neo_3M, which ends a
turn with <|endoftext|>, corrects them.  The table has the share of rollouts that were cut at
--rollout_tokens, in ten training steps before each fifty and of the same held-out prompts with
the same noise; where ends did not pair, nothing would hold it down.

Runs are kept in runs/ends.  Figures of record are in docs/LOG.md.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from projection_tools.flags import tool

RUNS = ROOT / "runs" / "ends"
STUDENT = "stories260K"
TEACHER = "tinytalk_neo_3M"
# as in the dialogues; each model ends a turn with its own token
TEMPLATE = (
    "{% for message in messages %}{{ 'User: ' if message.role == 'user' else 'Bot: ' }}"
    "{{ message.content }}{{ eos_token if message.role == 'assistant' else '' }}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Bot: ' }}{% endif %}")
END = "<|endoftext|>"
HELD_OUT = 100
EVERY = 50  # steps between evaluations


@dataclass(kw_only=True)
class Args:
    """Count the turns that a student does not end.

    Args:
        assets: folder with models/ and text/tinytalk_chat_val.txt.
        losses: with commas.
        first_steps: steps of cross-entropy on the dialogues.
        steps: steps on what the student writes.
        learning_rate: of these, falling to 0.
        rollout_tokens: at which a turn is cut.
    """

    assets: str
    losses: str = "reverse_kl,generalized_jsd"
    first_steps: int = 150
    steps: int = 200
    learning_rate: float = 1e-3
    rollout_tokens: int = 60


def read_chats(path):
    """Return the dialogues of a file, as lists of {"role", "content"} that end with the bot."""
    chats = []
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        messages = []
        for name, content in re.findall(r"^(User|Bot): (.*)$", block.replace(END, ""), re.M):
            role = "user" if name == "User" else "assistant"
            messages.append({"role": role, "content": content.strip()})
        while messages and messages[-1]["role"] == "user":
            messages.pop()
        if messages and messages[0]["role"] == "user":
            chats.append(messages)
    return chats


def with_template(source, target):
    """Copy a model, and give it the template of the dialogues."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    path = target / "tokenizer_config.json"
    path.chmod(0o644)
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return target


def distill(output, learning_rate, *flags):
    """Run distill.py on one rank; return the lines of its log."""
    config = RUNS / "ds.json"
    config.write_text(json.dumps({
        "train_batch_size": 16, "train_micro_batch_size_per_gpu": 16, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupCosineLR",
                      "params": {"total_num_steps": "auto", "warmup_num_steps": 10}},
        "zero_optimization": {"stage": 0}}))
    command = [
        sys.executable, "distill.py", f"--ds_config={config}", f"--output_dir={output}",
        f"--data={RUNS / 'chats.jsonl'}", "--text_key=messages", f"--eval_rows={HELD_OUT}",
        "--max_length=256", f"--learning_rate={learning_rate}", *flags]
    environment = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stderr=subprocess.DEVNULL)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def cut_share(lines, step):
    """Return the mean share of cut rollouts in ten steps of training, and of held-out ones.

    Args:
        lines: of a metrics.jsonl.
        step: the last of the ten, at 0 the one before them.
    """
    last = max(step, 10)
    trained = [line["rollout/truncated"] for line in lines
               if last - 10 < line["step"] <= last and "rollout/truncated" in line]
    held_out, = [line["eval/rollout/truncated"] for line in lines
                 if line["step"] == step and "eval/rollout/truncated" in line]
    return statistics.mean(trained), held_out


def main(args):
    assets = Path(args.assets)
    RUNS.mkdir(parents=True, exist_ok=True)
    chats = read_chats(assets / "text" / "tinytalk_chat_val.txt")
    rows = [json.dumps({"messages": chat}) for chat in chats]
    (RUNS / "chats.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    student = with_template(assets / "models" / STUDENT, RUNS / "student")
    teacher = with_template(assets / "models" / TEACHER, RUNS / "teacher")
    taught = RUNS / "taught"
    if not taught.exists():
        distill(RUNS / "first", 1e-3, f"--student={student}", "--kd_weight=0",
                f"--steps={args.first_steps}", f"--export={taught}")
    print(f"{len(chats)} dialogues")
    print("| loss | step | cut in training | cut of held-out prompts |\n| --- | --- | --- | --- |")
    for loss in args.losses.split(","):
        lines = distill(
            RUNS / f"{loss}_{args.steps}_{args.learning_rate}", args.learning_rate,
            f"--student={taught}", f"--teacher={teacher}", f"--loss={loss}", "--on_policy=1",
            "--ce_weight=0", f"--steps={args.steps}", f"--rollout_tokens={args.rollout_tokens}",
            f"--rollout_eval={HELD_OUT}", f"--eval_every={EVERY}")
        for step in range(0, args.steps + 1, EVERY):
            trained, held_out = cut_share(lines, step)
            print(f"| {loss} | {step} | {trained:.3f} | {held_out:.3f} |", flush=True)


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
