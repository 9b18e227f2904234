"""Compare ways to learn a task with a tool from a teacher that has another tokenizer.

    python benchmarks/turns.py [--steps 150] [--seeds 0,1,2] [--folder runs/turns]
    python benchmarks/turns.py --table true

A question is a sum in digits, and the environment is `calculator`: the assistant calls it and says
what it answered.  The teacher is trained on solutions, the student on few of them; it has single
digits as tokens, the teacher pairs of them, and each its own chat template with calls of its own.
From there on every arm takes equally many steps of equally many samples:

text        solutions that the teacher wrote, cross-entropy alone
data        the same, and beside it generalized_jsd against the teacher
turns       the same, but half of the samples are what the student writes in turns with the
            calculator, which have no cross-entropy
rewarded    the same with the calculator's judgment as a reward

Each is judged on held-out questions by draws at temperature 1: the share of right answers, and of
calls that are valid.  Records are lines of docs/log/turns.jsonl; runs that are there are not
repeated.
"""

import json
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.square_table import half_interval
from isogloss import demo
from isogloss.environments.calculator import TOOLS, computed
from isogloss.flags.parse import flag
from isogloss.flags.tool import tool

RECORDS = ROOT / "docs" / "log" / "turns.jsonl"
HELD_OUT, SOLUTIONS, FEW, WRITTEN = 200, 20_000, 3_000, 3_200
BEFORE = "teacher", "student"  # models before the arms
BATCH, PER_PROMPT = 16, 4
TOKENS = "--rollout_tokens=48"
TEACHER_STEPS, FIRST_STEPS = 5000, 560
SHAPE = dict(hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=4, max_position_embeddings=256)
CALLS = ("{%% for c in m.tool_calls or [] %%}%s{{ c.function.name }}%s"
         "{{ c.function.arguments | tojson }}%s{%% endfor %%}")
STUDENT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + CALLS % ("<tool_call>\n{\"name\": \"", "\", \"arguments\": ", "}\n</tool_call>")
    + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TEACHER_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    + CALLS % ("{\"name\": \"", "\", \"parameters\": ", "}")
    + "<|eot|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
MARKS = (["<|im_start|>", "<|im_end|>"],
         ["<|user|>", "<|assistant|>", "<|tool|>", "<|eot|>"])
ARMS = {
    "text": ["--kd_weight=0"],
    "data": ["--loss=generalized_jsd"],
    "turns": ["--loss=generalized_jsd", "--on_policy=0.5", f"--rollouts_per_prompt={PER_PROMPT}"],
    "rewarded": ["--loss=generalized_jsd", "--on_policy=0.5",
                 f"--rollouts_per_prompt={PER_PROMPT}"],
}


@dataclass(kw_only=True)
class Options:
    steps: int = flag(150, "of each arm.", low=1)
    seeds: str = flag("0,1,2", "of arms, with commas.")
    folder: str = flag("runs/turns", "for models and runs.")
    reward_weight: float = flag(1.0, "of the arm that has a reward.", low=0)
    learning_rate: float = flag(3e-4, "of the arms.", low=0)
    table: bool = flag(False, "print the table of the records alone.")


def solution(rng):
    """Return a row: a question, a call, its result and the answer."""
    expression = f"{rng.randint(2, 99)} {rng.choice('+-*')} {rng.randint(2, 99)}"
    value = computed(expression)
    call = {"type": "function", "function": {
        "name": "calculator", "arguments": {"expression": expression}}}
    return {"messages": [
        {"role": "user", "content": f"What is {expression}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": value},
        {"role": "assistant", "content": f"It is {value}."}], "tools": TOOLS, "answer": value,
        "prompt": [{"role": "user", "content": f"What is {expression}?"}]}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(folder):
    """Write rows, tokenizers, the trained teacher, and the student that has seen few rows."""
    rng = random.Random(0)
    rows = [solution(rng) for _ in range(HELD_OUT + SOLUTIONS)]
    held_out, rows = rows[:HELD_OUT], rows[HELD_OUT:]
    write_rows(folder / "held_out.jsonl", held_out)
    write_rows(folder / "solutions.jsonl", rows)
    write_rows(folder / "few.jsonl", rows[:FEW])
    texts = [json.dumps(row["messages"]) for row in rows[:2000]]
    for name, template, marks, size in (
            ("student", STUDENT_TEMPLATE, MARKS[0], 400),
            ("teacher", TEACHER_TEMPLATE, MARKS[1], 700)):
        tokenizer = demo.byte_level_bpe(texts, size, single_digits=name == "student")
        tokenizer.add_special_tokens({"additional_special_tokens": marks})
        tokenizer.chat_template = template
        model = demo.llama(tokenizer, SHAPE, 1)
        model.save_pretrained(folder / f"{name}0")
        tokenizer.save_pretrained(folder / f"{name}0")
    run(folder, "teacher", f"--student={folder / 'teacher0'}", "--kd_weight=0",
        f"--data={folder / 'solutions.jsonl'}", f"--steps={TEACHER_STEPS}", "--learning_rate=2e-3")
    run(folder, "student", f"--student={folder / 'student0'}", "--kd_weight=0",
        f"--data={folder / 'few.jsonl'}", f"--steps={FIRST_STEPS}", "--learning_rate=2e-3")


def run(folder, name, *flags):
    """Run a job to its end; return its output directory.  What is exported has its name."""
    output = folder / f"run_{name}"
    done = output / "done"
    if not done.exists():
        config = folder / "ds.json"
        config.write_text(json.dumps({
            "train_batch_size": BATCH, "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0, "zero_optimization": {"stage": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
            "scheduler": {"type": "WarmupCosineLR", "params": {
                "total_num_steps": "auto", "warmup_num_steps": 10}}}))
        subprocess.run([
            sys.executable, str(ROOT / "distill.py"), f"--ds_config={config}",
            "--text_key=messages", "--max_length=200", f"--output_dir={output}", "--num_workers=0",
            "--save_every=0", f"--export={folder / name}", *flags],
            check=True)
        done.touch()
    return output


def judged(folder, name, model):
    """Return what an evaluation says of a model's own turns."""
    output = run(folder, f"judge_{name}", f"--student={model}", f"--teacher={folder / 'teacher'}",
                 f"--data={folder / 'held_out.jsonl'}", f"--eval_data={folder / 'held_out.jsonl'}",
                 f"--eval_rows={HELD_OUT}", f"--rollout_eval={HELD_OUT}", "--prompt_key=prompt",
                 "--steps=1", "--learning_rate=1e-9", "--on_policy=1", "--loss=reverse_kl",
                 "--environment=calculator", "--seed=99", TOKENS)
    first = json.loads((output / "metrics.jsonl").read_text().splitlines()[0])
    found = {key: first[f"eval/rollout/{key}"] for key in (
        "reward", "invalid_calls", "calls", "turns", "finished", "truncated")}
    # those that were cut have no reward, and no right answer
    return found | {"right": (found["reward"] or 0.0) * found["finished"]}


def take_arm(folder, options, arm, seed):
    """Return the record of an arm."""
    name = f"{arm}_{seed}"
    flags = [*ARMS[arm], f"--student={folder / 'student'}", f"--seed={seed}",
             f"--steps={options.steps}", f"--learning_rate={options.learning_rate}",
             f"--data={folder / 'written.jsonl'}"]
    if arm != "text":
        flags.append(f"--teacher={folder / 'teacher'}")
    if arm in ("turns", "rewarded"):
        weight = options.reward_weight if arm == "rewarded" else 0.0
        asked = {"function": "calculator", "max_turns": 3, "reward_weight": weight}
        flags += [TOKENS, "--prompt_key=prompt", f"--environment={json.dumps(asked)}"]
    run(folder, name, *flags)
    return {"arm": arm, "seed": seed, "steps": options.steps} | judged(folder, name, folder / name)


def write_solutions(folder):
    """Keep what the teacher writes to other questions where its answer is right."""
    output = run(folder, "written", f"--student={folder / 'teacher'}",
                 f"--teacher={folder / 'teacher'}", f"--data={folder / 'solutions.jsonl'}",
                 "--prompt_key=prompt", f"--steps={-(-WRITTEN // BATCH)}", "--learning_rate=1e-9",
                 "--on_policy=1", "--loss=reverse_kl", "--environment=calculator", "--seed=98",
                 f"--rollout_log={BATCH}", TOKENS)
    rows = []
    for line in (output / "rollouts.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["episode"]["reward"]:
            question = record["prompt"].partition("<|user|>")[2].partition("<|eot|>")[0]
            asked = [{"role": "user", "content": question}]
            answer = computed(question.removeprefix("What is ").removesuffix("?"))
            rows.append({"messages": [*asked, *record["messages"]], "tools": TOOLS,
                         "answer": answer, "prompt": asked})
    write_rows(folder / "written.jsonl", rows)


def mean_and_half(values):
    """Return the mean of seeds and half of its 95 % interval, by Student's t."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, float("nan")
    return mean, half_interval(values)


def table(records):
    """Return the lines of a table: shares of right answers and of valid calls, in percent."""
    lines = ["| arm | right answers | valid calls | ahead of `data`, by seed |",
             "| --- | --- | --- | --- |"]
    by_arm = {}
    for record in records:
        by_arm.setdefault(record["arm"], {})[record["seed"]] = record
    for arm, by_seed in by_arm.items():
        right = [100 * its["right"] for its in by_seed.values()]
        valid = [100 * (1 - (its["invalid_calls"] or 0)) for its in by_seed.values()]
        ahead = ""
        if arm not in ("data", *BEFORE) and "data" in by_arm:
            pairs = [100 * (its["right"] - by_arm["data"][seed]["right"])
                     for seed, its in by_seed.items() if seed in by_arm["data"]]
            ahead = "{:+.1f} ± {:.1f}".format(*mean_and_half(pairs))
        shown = ["{:.1f} ± {:.1f}".format(*mean_and_half(values)) if len(values) > 1
                 else f"{values[0]:.1f}" for values in (right, valid)]
        lines.append(f"| {arm} | {shown[0]} | {shown[1]} | {ahead} |")
    return lines


def main(options):
    records = []
    if RECORDS.exists():
        records = list(map(json.loads, RECORDS.read_text().splitlines()))
    if options.table:
        print("\n".join(table(records)))
        return
    folder = Path(options.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    write_solutions(folder)
    known = {(record["arm"], record["seed"]) for record in records}
    wanted = [(name, 0) for name in BEFORE]
    wanted += [(arm, int(seed)) for seed in options.seeds.split(",") for arm in ARMS]
    for arm, seed in wanted:
        if (arm, seed) in known:
            continue
        if arm in BEFORE:
            record = {"arm": arm, "seed": seed, "steps": 0} | judged(folder, arm, folder / arm)
        else:
            record = take_arm(folder, options, arm, seed)
        records.append(record)
        with RECORDS.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(json.dumps(record), flush=True)
    print("\n".join(table(records)))


if __name__ == "__main__":
    tool(Options, main)
