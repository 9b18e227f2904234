"""The embedded default: a student learns from a teacher that speaks another vocabulary, on a laptop.

    python demo.py                    # what `make demo` runs; SEEDS="0 1 2" for three seeds

Everything is made here, nothing is downloaded: the corpus is the documentation inside the running Python; two
tokenizers of different kinds are trained on it, then a small teacher.  Each student is trained by the
ordinary `deepspeed distill.py`, once on text alone and once per distillation loss, from the same weights on
the same data.
"""

import ast
import hashlib
import io
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import warnings
from pathlib import Path

CACHE = Path(os.environ.get("ISOGLOSS_CACHE", ".cache"))
RUNS = Path("runs/demo")
RECIPE = {  # of what is made here and cached; raise `version` when the code that makes it changes
    "version": 2,
    "passage_bytes": 480,  # a student sequence of about 200 tokens
    "held_out_rows": 160,
    "teacher_vocab": 4096,
    "student_vocab": 1536,
    "teacher": dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
                    num_key_value_heads=6, max_position_embeddings=512),
    "student": dict(hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=4, max_position_embeddings=512),
    "teacher_steps": 320,
    "teacher_batch": 16,
    "teacher_lr": 3e-3,
}
DISTILL = {"steps": 120, "eval_every": 40, "learning_rate": 3e-3, "max_length": 448,
           "eval_rows": RECIPE["held_out_rows"]}
ARMS = {  # what is trained, and how
    "text only": {"kd_weight": 0},
    "piece_kl": {"loss": "piece_kl"},
    "projection_kl": {"loss": "projection_kl"},
}


# --- corpus ---------------------------------------------------------------------------------------


def documents():
    """(name, text) of the language reference in pydoc and of the docstrings of every standard module."""
    from pydoc_data import topics

    yield from ((f"topic {name}", text) for name, text in sorted(topics.topics.items()))
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "turtledemo", "idle_test"}
    seen = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skip & set(name.parts):
            continue
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):  # samples of bad source that some distributions ship
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        fresh = [text for text in dict.fromkeys(found) if text and text not in seen]
        seen.update(fresh)
        if fresh:
            yield str(name), "\n\n".join(fresh)


def passages(text, limit):
    """The text in pieces of at most about `limit` bytes, cut between lines."""
    piece = []
    for line in text.splitlines(keepends=True):
        if piece and len("".join([*piece, line]).encode()) > limit:
            yield "".join(piece).strip("\n")
            piece = []
        piece.append(line)
    yield "".join(piece).strip("\n")


def make_corpus(path):
    """A JSON line per passage: those held out first, then those to train on; no passage is in both."""
    held_out, train = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old docstrings
        for name, text in documents():
            aside = hashlib.sha256(name.encode()).digest()[0] < 20  # about 8 % of the documents
            (held_out if aside else train).extend(passages(text, RECIPE["passage_bytes"]))
    by_hash = lambda text: hashlib.sha256(text.encode()).digest()  # noqa: E731
    held_out = set(held_out) - set(train)  # modules share a few sentences
    held_out = sorted((p for p in held_out if len(p) > 60), key=by_hash)[: RECIPE["held_out_rows"]]
    train = sorted((p for p in train if len(p) > 60), key=by_hash)
    lines = [json.dumps({"text": text}) for text in held_out + train]
    path.write_text("\n".join(lines) + "\n")


def read_corpus(path):
    """(held out, train) lists of passages."""
    rows = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    return rows[: RECIPE["held_out_rows"]], rows[RECIPE["held_out_rows"] :]


# --- tokenizers -----------------------------------------------------------------------------------

SENTENCEPIECE = dict(model_type="unigram", byte_fallback=True, split_digits=True, max_sentence_length=1 << 16,
                     normalization_rule_name="identity", remove_extra_whitespaces=False,
                     allow_whitespace_only_pieces=True, num_threads=1, minloglevel=2)


def byte_level_bpe(texts, size):
    """The teacher's: GPT-2 style, numbers stay whole where they are frequent."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end)


def unigram(texts, size):
    """The student's: SentencePiece Unigram with byte fallback and a prefix space, every digit on its own."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model,
                                             vocab_size=size, **SENTENCEPIECE)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    # a byte token must not match text that merely looks like one, so its score is out of reach
    vocab = [(pieces.id_to_piece(i), -1e4 if pieces.is_byte(i) else pieces.get_score(i)) for i in range(size)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=pieces.unk_id(), byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(steps))
    roles = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)


# --- models ---------------------------------------------------------------------------------------


def llama(tokenizer, shape, seed):
    """A freshly initialized Llama of the given shape, with tied embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    roles = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **roles, **shape)
    return LlamaForCausalLM(config)


def teacher_dtype():
    """bfloat16 where the machine multiplies in it, as GPUs and CPUs with AMX do; elsewhere it is slower."""
    import torch

    if torch.cuda.is_available():
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if torch.cpu.get_capabilities().get("amx_bf16") else "float32"


def train_teacher(tokenizer, texts):
    """A small model of the corpus: AdamW, warm-up and cosine, sequences of similar length together."""
    import torch
    from tqdm import tqdm

    steps, batch, peak = RECIPE["teacher_steps"], RECIPE["teacher_batch"], RECIPE["teacher_lr"]
    device, low = "cuda" if torch.cuda.is_available() else "cpu", teacher_dtype() == "bfloat16"
    model = llama(tokenizer, RECIPE["teacher"], seed=0).to(device).train()
    end = tokenizer.eos_token_id
    rows = sorted(([end, *ids, end] for ids in tokenizer(texts)["input_ids"]), key=len)
    groups = [rows[i : i + batch] for i in range(0, len(rows) - batch + 1, batch)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, steps, pct_start=0.1)
    generator, order = torch.Generator().manual_seed(0), []
    bar = tqdm(range(steps), desc="teacher", unit="step", mininterval=0.5 if sys.stderr.isatty() else 10)
    for _ in bar:
        order = order or torch.randperm(len(groups), generator=generator).tolist()
        rows = [torch.tensor(row) for row in groups[order.pop()]]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=low):
            logits = model(input_ids=ids[:, :-1].clamp(min=0)).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.cpu()


# --- the cache ------------------------------------------------------------------------------------


def recipe_folder():
    """All that is made here lies under a name made of the recipe and of the Python whose texts it reads."""
    recipe = json.dumps([RECIPE, platform.python_version(), teacher_dtype()])
    return CACHE / "demo" / hashlib.sha256(recipe.encode()).hexdigest()[:12]


def made(path, make):
    """The path, written by `make(scratch)` if it was missing; it appears by rename, whole or not at all."""
    if not path.exists():
        scratch = path.with_name(f".{path.name}.incomplete")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.parent.mkdir(parents=True, exist_ok=True)
        make(scratch)
        os.replace(scratch, path)
    return path


def prepare(folder, seeds):
    """Corpus, tokenizers, teacher and one fresh student per seed, made unless they are cached."""
    corpus = made(folder / "corpus.jsonl", make_corpus)

    def make_teacher(scratch):
        texts = read_corpus(corpus)[1]
        tokenizer = byte_level_bpe(texts, RECIPE["teacher_vocab"])
        train_teacher(tokenizer, texts).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)

    def make_student(scratch, seed):
        tokenizer = unigram(read_corpus(corpus)[1], RECIPE["student_vocab"])
        llama(tokenizer, RECIPE["student"], seed).save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)

    made(folder / "teacher", make_teacher)
    for seed in seeds:
        made(folder / f"student_{seed}", lambda scratch: make_student(scratch, seed))


# --- runs -----------------------------------------------------------------------------------------


def launch(ranks, flags):
    """`deepspeed distill.py` with these flags; its exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [launcher, "--quiet", f"--num_gpus={ranks}", f"--master_port={port}", "distill.py", *flags]
    return subprocess.run(command).returncode


def distill(folder, arm, seed, ranks):
    """Train one student by the command line; its held-out evaluations, as metrics.jsonl has them."""
    output = RUNS / folder.name / f"{arm.replace(' ', '_')}_{seed}"
    shutil.rmtree(output, ignore_errors=True)
    values = {"ds_config": "ds_configs/zero2.json", "student": folder / f"student_{seed}", "seed": seed,
              "teacher": folder / "teacher", "data": folder / "corpus.jsonl", "output_dir": output,
              "teacher_dtype": teacher_dtype()}
    flags = [f"--{key}={value}" for key, value in (values | DISTILL | ARMS[arm]).items()]
    begin = time.perf_counter()
    if launch(ranks, flags):
        raise SystemExit(f"demo.py: the run {output} failed; its flags were\n{' '.join(flags)}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if "eval/student_bits_per_byte" in line]
    return {"arm": arm, "seed": seed, "seconds": time.perf_counter() - begin, "evaluations": found}


def table(runs):
    """Markdown: held-out bits per byte and divergence of the teacher and of every student."""
    teacher = max(line.get("eval/teacher_bits_per_byte", 0) for run in runs for line in run["evaluations"])
    rows = [("seed", "model", "bits per byte", "KL before", "KL after", "aligned", "seconds"), ("---",) * 7,
            ("", "teacher", f"{teacher:.3f}", "", "", "", "")]
    for run in runs:
        first, last = run["evaluations"][0], run["evaluations"][-1]
        row = [str(run["seed"]), run["arm"], f"{last['eval/student_bits_per_byte']:.3f}"]
        if "eval/kd" in last:
            row += [f"{first['eval/kd']:.3f}", f"{last['eval/kd']:.3f}", f"{last['eval/aligned_bytes']:.1%}"]
        else:
            row += ["", "", ""]
        rows.append((*row, f"{run['seconds']:.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows)


def verdicts(runs):
    """One line per distillation loss: on how many seeds its student beats the one that saw text alone."""
    bits = {(run["arm"], run["seed"]): run["evaluations"][-1]["eval/student_bits_per_byte"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    for arm in list(ARMS)[1:]:
        gains = [bits["text only", seed] - bits[arm, seed] for seed in seeds]
        yield (f"{arm}: better than text only for {sum(g > 0 for g in gains)} of {len(seeds)} seeds, by "
               f"{sum(gains) / len(gains):+.3f} bits per byte on average")


def plot(runs, path):
    """Held-out curves, a line per run: bits per byte on the left, divergence on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    keys = ("eval/student_bits_per_byte", "held-out bits per byte"), ("eval/kd", "held-out KL, nats per term")
    for axis, (key, label) in zip(axes, keys):
        for run in runs:
            points = [(line["step"], line[key]) for line in run["evaluations"][1:] if key in line]
            if points:
                name = run["arm"] if run["seed"] == runs[0]["seed"] else None
                axis.plot(*zip(*points), color=f"C{list(ARMS).index(run['arm'])}", label=name, marker=".")
        axis.set(xlabel="step", ylabel=label)
    teacher = runs[-1]["evaluations"][-1]["eval/teacher_bits_per_byte"]
    axes[0].axhline(teacher, color="grey", linestyle="--", label="teacher")
    for axis in axes:
        axis.legend()
    figure.savefig(path, dpi=120)


def main():
    begin = time.perf_counter()
    seeds = [int(seed) for seed in os.environ.get("SEEDS", "0").split()]
    folder = recipe_folder()
    prepare(folder, seeds)
    made_in = time.perf_counter() - begin
    gpus = subprocess.run([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
                          capture_output=True, text=True, check=True)  # apart: this process needs no context
    ranks = min(int(gpus.stdout) or 2, 2)
    runs = [distill(folder, arm, seed, ranks) for seed in seeds for arm in ARMS]
    picture = RUNS / folder.name / "curves.png"
    plot(runs, picture)
    print(f"\n{table(runs)}\n")
    print(*verdicts(runs), sep="\n")
    print(f"{picture}; {made_in:.0f} s to make corpus, tokenizers and teacher, "
          f"{time.perf_counter() - begin:.0f} s in all, {ranks} ranks")


if __name__ == "__main__":
    main()
