"""The embedded default: a student learns from a teacher with another vocabulary, on a laptop.

    python demo.py                    # what `make demo` runs; SEEDS="0 1 2" for three seeds

The demo makes everything here and downloads nothing.  The corpus is the documentation inside the
running Python.  Two tokenizers of different kinds are trained on it, then a small teacher.  The
ordinary `deepspeed distill.py` trains each student: once without a teacher and once per
distillation loss, from the same weights on the same data.  At last one of them goes on, writes by
itself, and learns from what the teacher thinks of that.
"""

import ast
import hashlib
import io
import json
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CACHE = Path(os.environ.get("ISOGLOSS_CACHE", ".cache"))
RUNS = Path("runs/demo")

# Sizes and rates let the demo end within minutes on two cores; not tuned.  The cache's name is a
# hash of this dict: raise `version` when the code that makes the cached files changes.
RECIPE = {
    "version": 2,
    "passage_bytes": 480,  # a student sequence of about 200 tokens
    "held_out_rows": 160,
    "teacher_vocab": 4096,
    "student_vocab": 1536,
    "teacher": dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4,
                    num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=512),
    "student": dict(hidden_size=128, intermediate_size=344, num_hidden_layers=3,
                    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512),
    "teacher_steps": 320,
    "teacher_batch": 16,
    "teacher_lr": 3e-3,
}
# Flags of distill.py that all arms have in common.
DISTILL = {
    "steps": 120,
    "eval_every": 40,
    "learning_rate": 3e-3,
    "max_length": 448,
    "eval_rows": RECIPE["held_out_rows"],
}
NO_TEACHER = "no teacher"  # cross-entropy alone: the baseline of every loss
# What the table compares: the name of an arm and its flags of distill.py.
ARMS = {
    NO_TEACHER: {"kd_weight": 0},
    "piece_kl": {"loss": "piece_kl"},
    "projection_kl": {"loss": "projection_kl"},
}

WRITER = "piece_kl"  # the arm whose student goes on
# What changes for it; the other flags of DISTILL stay.
ON_POLICY = {
    "on_policy": 1,
    "loss": "generalized_jsd",
    "learning_rate": 5e-4,
    "steps": 30,
    "eval_every": 0,
    "rollout_tokens": 96,
    "prompt_tokens": 24,
    "rollout_eval": 64,
    "rollout_log": 2,
}

# --- corpus ---------------------------------------------------------------------------------------

# Folders that are no part of the library's documentation, or that some distributions leave out.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data",
                   "turtledemo", "idle_test"}
WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SHORTEST_PASSAGE = 60  # characters; headings and one-word docstrings teach nothing
HELD_OUT_OF_256 = 20  # documents that are held out, about 8 %


class Document(NamedTuple):
    """One text of the corpus and the name that decides whether it is held out."""

    name: str
    text: str


def documents():
    """Yield pydoc's language reference and the docstrings of every standard module as Documents."""
    from pydoc_data import topics

    for name, text in sorted(topics.topics.items()):
        yield Document(f"topic {name}", text)

    root = Path(sysconfig.get_paths()["stdlib"])
    seen = set()  # modules repeat docstrings of each other
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS & set(name.parts):
            continue
        docstrings = new_docstrings(path, seen)
        if docstrings:
            yield Document(str(name), "\n\n".join(docstrings))


def new_docstrings(path, seen):
    """Return the docstrings of a source file that are not in the set `seen`, and add them to it."""
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, UnicodeDecodeError):  # samples of bad source that some distributions ship
        return []
    docstrings = []
    for node in ast.walk(tree):
        if not isinstance(node, WITH_DOCSTRING):
            continue
        text = ast.get_docstring(node)
        if text and text not in seen:
            seen.add(text)
            docstrings.append(text)
    return docstrings


def passages(text, limit):
    """Yield the text in pieces of at most about `limit` bytes, cut between lines.

    A line that is longer than `limit` stays whole.
    """
    piece = []
    for line in text.splitlines(keepends=True):
        too_long = len("".join([*piece, line]).encode()) > limit
        if piece and too_long:
            yield "".join(piece).strip("\n")
            piece = []
        piece.append(line)
    yield "".join(piece).strip("\n")


def sha256(text):
    """Return the SHA-256 digest of a text, which is the same in every run and on every machine."""
    return hashlib.sha256(text.encode()).digest()


def make_corpus(path):
    """Write a JSON line per passage: held-out ones, then those to train on; none is in both."""
    held_out = []
    train = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old docstrings have invalid escape sequences
        for document in documents():
            # whole documents are held out, because passages of one document resemble each other
            first_byte = sha256(document.name)[0]
            split = held_out if first_byte < HELD_OUT_OF_256 else train
            split.extend(passages(document.text, RECIPE["passage_bytes"]))
    held_out = set(held_out) - set(train)  # modules have a few sentences in common
    held_out = shuffled(held_out)[: RECIPE["held_out_rows"]]
    train = shuffled(train)
    lines = [json.dumps({"text": text}) for text in held_out + train]
    path.write_text("\n".join(lines) + "\n")


def shuffled(texts):
    """Return the passages that are long enough, in the fixed order of their digests."""
    long_enough = filter(lambda text: len(text) > SHORTEST_PASSAGE, texts)
    return sorted(long_enough, key=sha256)


def read_json_lines(path):
    """Return the lines of a .jsonl file as dicts."""
    return list(map(json.loads, path.read_text().splitlines()))


def read_corpus(path):
    """Return (held out, train), two lists of passages."""
    texts = [example["text"] for example in read_json_lines(path)]
    count = RECIPE["held_out_rows"]
    return texts[:count], texts[count:]


# --- tokenizers -----------------------------------------------------------------------------------

SENTENCEPIECE = {
    "model_type": "unigram",
    "byte_fallback": True,
    "split_digits": True,  # the teacher keeps numbers whole, so chunks of several tokens appear
    "max_sentence_length": 1 << 16,  # bytes; by default longer passages would be dropped
    # the tokenizer must not alter the text: only then do the two sides have equal bytes
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "num_threads": 1,  # the sums of its training then have one order on every machine
    "minloglevel": 2,  # errors only
}
END_OF_TEXT = "<|endoftext|>"
# Log-probability of a byte token, far below that of any piece: a byte token such as <0x41> must
# not match text that merely looks like it.
BYTE_TOKEN_SCORE = -1e4


def byte_level_bpe(texts, size):
    """Train the teacher's tokenizer: GPT-2 style, frequent numbers stay whole."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # so every text can be encoded
    )
    tokenizer.train_from_iterator(texts, trainer)
    roles = dict(bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)


def unigram(texts, size):
    """Train the student's tokenizer: SentencePiece Unigram with byte fallback and single digits.

    SentencePiece trains the model; the `tokenizers` library runs it, as Hugging Face models do.
    """
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=size, **SENTENCEPIECE)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocab = []
    for token in range(size):
        score = BYTE_TOKEN_SCORE if pieces.is_byte(token) else pieces.get_score(token)
        vocab.append((pieces.id_to_piece(token), score))

    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=pieces.unk_id(), byte_fallback=True))
    # "▁" stands for a space; the one put before the text makes its first word look like any other
    underscores = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(underscores)
    without_prepended_space = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        without_prepended_space,
    ])
    roles = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)


# --- models ---------------------------------------------------------------------------------------


def llama(tokenizer, shape, seed):
    """Return a new Llama with random weights and tied embeddings.

    Args:
        tokenizer: gives the vocabulary size and the ids of the control tokens.
        shape: keywords of LlamaConfig.
        seed: of the weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    return LlamaForCausalLM(config)


def teacher_dtype():
    """Return "bfloat16" where the hardware multiplies in it (GPU, CPU with AMX), else "float32"."""
    import torch

    if torch.cuda.is_available():
        # emulated bfloat16 is slower than float32
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu.get_capabilities().get("amx_bf16")
    return "bfloat16" if fast else "float32"


def batches_by_length(tokenizer, texts, batch_size):
    """Return batches of token ids, sequences of similar length together, so that few are padding.

    Sequences that do not fill a last batch, the longest ones, are left out.
    """
    end = tokenizer.eos_token_id
    sequences = [[end, *ids, end] for ids in tokenizer(texts)["input_ids"]]
    sequences.sort(key=len)
    starts = range(0, len(sequences) - batch_size + 1, batch_size)
    return [sequences[start : start + batch_size] for start in starts]


def train_teacher(tokenizer, texts):
    """Train the teacher on the texts and return it on the CPU; AdamW, warm-up, cosine decay."""
    import torch
    from tqdm import tqdm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    mixed_precision = teacher_dtype() == "bfloat16"
    steps = RECIPE["teacher_steps"]
    peak_lr = RECIPE["teacher_lr"]
    model = llama(tokenizer, RECIPE["teacher"], seed=0).to(device).train()
    batches = batches_by_length(tokenizer, texts, RECIPE["teacher_batch"])
    # usual values for small language models; not tuned
    adamw = dict(lr=peak_lr, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(0)
    order = []  # indices of the batches that this epoch has not used yet
    seconds_between_updates = 0.5 if sys.stderr.isatty() else 10
    bar = tqdm(range(steps), desc="teacher", unit="step", mininterval=seconds_between_updates)
    for _ in bar:
        if not order:
            order = torch.randperm(len(batches), generator=generator).tolist()
        loss = teacher_loss(model, batches[order.pop()], device, mixed_precision)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.cpu()


def teacher_loss(model, batch, device, mixed_precision):
    """Return the mean next-token cross-entropy, in nats, of a batch of token id lists."""
    import torch

    sequences = [torch.tensor(ids) for ids in batch]
    # -100 is the label that cross_entropy ignores; as an input any token does
    labels = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-100)
    labels = labels.to(device)
    with torch.autocast(device, torch.bfloat16, enabled=mixed_precision):
        logits = model(input_ids=labels[:, :-1].clamp(min=0)).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


# --- the cache ------------------------------------------------------------------------------------


def recipe_folder():
    """Return the cache's folder, named by a hash of all that decides what the cached files hold."""
    # the texts come from this version of Python; the teacher's weights depend on its dtype
    recipe = json.dumps([RECIPE, platform.python_version(), teacher_dtype()])
    return CACHE / "demo" / hashlib.sha256(recipe.encode()).hexdigest()[:12]


def make_once(path, make):
    """Return the path; if it is missing, let `make(scratch)` write it first.

    The path appears by rename, so it is complete or absent even if the demo is killed.
    """
    if not path.exists():
        scratch = path.with_name(f".{path.name}.incomplete")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        make(scratch)
        os.replace(scratch, path)
    return path


def prepare(folder, seeds):
    """Make the corpus, the tokenizers, the teacher and a fresh student per seed, unless cached."""
    corpus = make_once(folder / "corpus.jsonl", make_corpus)

    def make_teacher(scratch):
        _, texts = read_corpus(corpus)
        tokenizer = byte_level_bpe(texts, RECIPE["teacher_vocab"])
        train_teacher(tokenizer, texts).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)

    make_once(folder / "teacher", make_teacher)
    for seed in seeds:

        def make_student(scratch, seed=seed):
            _, texts = read_corpus(corpus)
            tokenizer = unigram(texts, RECIPE["student_vocab"])
            llama(tokenizer, RECIPE["student"], seed).save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)

        make_once(folder / f"student_{seed}", make_student)


# --- runs -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """One trained student.

    Attributes:
        arm: key of ARMS.
        seed: of the student's weights, the data order and dropout.
        seconds: wall time of the whole command, start of the ranks included.
        evaluations: held-out lines of metrics.jsonl by rising step; keys as in docs/metrics.md.
    """

    arm: str
    seed: int
    seconds: float
    evaluations: list[dict]


def read_metrics(path):
    """Return the lines of a metrics.jsonl; null, which stands for what is not finite, is NaN."""
    lines = []
    for line in read_json_lines(path):
        lines.append({key: math.nan if value is None else value for key, value in line.items()})
    return lines


def launch(ranks, flags):
    """Run `deepspeed distill.py` with these flags and return its exit code."""
    # a free port: several demos may run on one machine
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = Path(sys.executable).with_name("deepspeed")
    options = ["--quiet", f"--num_gpus={ranks}", f"--master_port={port}"]
    return subprocess.run([launcher, *options, "distill.py", *flags]).returncode


def command_line(values):
    """Return the flags of distill.py as a list of words, from a dict of their values."""
    return [f"--{name}={value}" for name, value in values.items()]


def distill(folder, arm, seed, ranks):
    """Train one student by the command line and return its Run.

    Raises:
        SystemExit: the job failed.
    """
    output = output_of(folder, arm, seed)
    values = DISTILL | ARMS[arm]
    if arm == WRITER:
        values = values | {"export": exported(folder, seed)}
    return train(folder, arm, seed, ranks, output, folder / f"student_{seed}", values)


def write_on(folder, seed, ranks):
    """Let a trained student learn from what it writes itself; return its Run."""
    output = output_of(folder, "on_policy", seed)
    return train(folder, "on policy", seed, ranks, output, exported(folder, seed),
                 DISTILL | ON_POLICY)


def output_of(folder, arm, seed):
    """Return the directory of a run."""
    return RUNS / folder.name / f"{arm.replace(' ', '_')}_{seed}"


def exported(folder, seed):
    """Return the directory of the trained student that goes on."""
    return RUNS / folder.name / f"trained_student_{seed}"


def train(folder, arm, seed, ranks, output, student, values):
    """Run distill.py.

    Args:
        folder: of the cache.
        output: directory of the run, which is made anew.
        student: directory of a model.
        values: of further flags.
    Raises:
        SystemExit: the job failed.
    """
    shutil.rmtree(output, ignore_errors=True)
    common = {
        "ds_config": "ds_configs/zero2.json",
        "student": student,
        "seed": seed,
        "teacher": folder / "teacher",
        "data": folder / "corpus.jsonl",
        "output_dir": output,
        "teacher_dtype": teacher_dtype(),
    }
    flags = command_line(common | values)
    begin = time.perf_counter()
    if launch(ranks, flags):
        raise SystemExit(f"demo.py: the run {output} failed; see the error above. "
                         f"Its flags were\n{' '.join(flags)}")
    seconds = time.perf_counter() - begin
    lines = read_metrics(output / "metrics.jsonl")
    evaluations = [line for line in lines if "eval/student_bits_per_byte" in line]
    return Run(arm, seed, seconds, evaluations)


def final_bits(run):
    """Return the student's held-out bits per byte after the last step."""
    return run.evaluations[-1]["eval/student_bits_per_byte"]


def teacher_bits(runs):
    """Return the teacher's held-out bits per byte, which every run with a teacher measures."""
    bits = [0]  # for the runs without a teacher
    for run in runs:
        for line in run.evaluations:
            bits.append(line.get("eval/teacher_bits_per_byte", 0))
    return max(bits)


def markdown_table(rows):
    """Return rows of strings as an aligned Markdown table; the first row is the head."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(runs):
    """Return the results as a Markdown table: a line for the teacher, then one per run."""
    head = ["seed", "model", "bits per byte", "KL before", "KL after", "aligned", "seconds"]
    rows = [head, ["", "teacher", f"{teacher_bits(runs):.3f}", "", "", "", ""]]
    for run in runs:
        first = run.evaluations[0]
        last = run.evaluations[-1]
        divergence = ["", "", ""]
        if "eval/kd" in last:
            divergence = [f"{first['eval/kd']:.3f}", f"{last['eval/kd']:.3f}",
                          f"{last['eval/aligned_bytes']:.1%}"]
        bits = f"{final_bits(run):.3f}"
        rows.append([str(run.seed), run.arm, bits, *divergence, f"{run.seconds:.0f}"])
    return markdown_table(rows)


def verdicts(runs):
    """Yield a line per distillation loss: on how many seeds it beats training without a teacher."""
    bits = {(run.arm, run.seed): final_bits(run) for run in runs}
    seeds = sorted({run.seed for run in runs})
    for arm in ARMS:
        if arm == NO_TEACHER:
            continue
        gains = []
        num_better = 0
        for seed in seeds:
            gain = bits[NO_TEACHER, seed] - bits[arm, seed]
            gains.append(gain)
            num_better += gain > 0
        mean_gain = sum(gains) / len(gains)
        yield (f"{arm}: better than {NO_TEACHER} for {num_better} of {len(seeds)} seeds, "
               f"by {mean_gain:+.3f} bits per byte on average")


def writing_table(run):
    """Return what a student learned from its own writing as a Markdown table."""
    rows = [["on policy", "reverse KL per byte", "bits per byte", "repeated", "seconds"]]
    for name, line in (("before", run.evaluations[0]), ("after", run.evaluations[-1])):
        seconds = f"{run.seconds:.0f}" if name == "after" else ""
        rows.append([name, f"{line['eval/rollout/reverse_kl_per_byte']:.3f}",
                     f"{line['eval/student_bits_per_byte']:.3f}",
                     f"{line['eval/rollout/repeated_4grams']:.1%}", seconds])
    return markdown_table(rows)


def completions(path, last_step):
    """Yield lines that show what a student wrote from held-out prompts, before and after.

    Args:
        path: of a rollouts.jsonl.
    """
    texts = {}
    for line in read_json_lines(path):
        if line["held_out"] and line["step"] in (0, last_step):
            texts.setdefault((line["sample"], line["prompt"]), []).append(line["text"])
    for (_, prompt), (before, after) in sorted(texts.items()):
        yield f"prompt  {' '.join(prompt.split())}"
        yield f"before  {' '.join(before.split())}"
        yield f"after   {' '.join(after.split())}"


def plot(runs, path):
    """Draw held-out curves, a line per run: bits per byte on the left, divergence on the right."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, (bits_axis, kd_axis) = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    draw_curves(bits_axis, runs, "eval/student_bits_per_byte", "held-out bits per byte")
    draw_curves(kd_axis, runs, "eval/kd", "held-out KL, nats per term")
    bits_axis.axhline(teacher_bits(runs), color="grey", linestyle="--", label="teacher")
    bits_axis.legend()
    kd_axis.legend()
    figure.savefig(path, dpi=120)


def draw_curves(axis, runs, key, label):
    """Draw one metric over the steps, a color per arm; runs that lack it are left out."""
    for run in runs:
        steps = []
        values = []
        # the first evaluation, before any training, is so high that it would flatten the curves
        for line in run.evaluations[1:]:
            if key in line:
                steps.append(line["step"])
                values.append(line[key])
        if values:
            color = f"C{list(ARMS).index(run.arm)}"
            name = run.arm if run.seed == runs[0].seed else None  # one legend entry for all seeds
            axis.plot(steps, values, color=color, label=name, marker=".")
    axis.set(xlabel="step", ylabel=label)


def count_gpus():
    """Return the number of GPUs, counted in another process: this one needs no CUDA context."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main():
    begin = time.perf_counter()
    seeds = list(map(int, os.environ.get("SEEDS", "0").split()))
    folder = recipe_folder()
    prepare(folder, seeds)
    preparation_seconds = time.perf_counter() - begin

    ranks = min(count_gpus() or 2, 2)  # two ranks also on a CPU: the demo shows ZeRO
    runs = []
    for seed in seeds:
        for arm in ARMS:
            runs.append(distill(folder, arm, seed, ranks))

    written = write_on(folder, seeds[0], ranks)

    picture = RUNS / folder.name / "curves.png"
    plot(runs, picture)
    print(f"\n{table(runs)}\n")
    print(*verdicts(runs), sep="\n")
    print(f"\n{writing_table(written)}\n")
    path = output_of(folder, "on_policy", seeds[0]) / "rollouts.jsonl"
    print(*completions(path, ON_POLICY["steps"]), sep="\n")
    total_seconds = time.perf_counter() - begin
    print(f"{picture}; {preparation_seconds:.0f} s to make corpus, tokenizers and teacher, "
          f"{total_seconds:.0f} s in all, {ranks} ranks")


if __name__ == "__main__":
    main()
