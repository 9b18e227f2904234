"""The embedded default: a student learns from a teacher with another vocabulary, on a laptop.

    python demo.py                    # what `make demo` runs; SEEDS="0 1 2" for three seeds

The demo makes everything here and downloads nothing.  The corpus is stories that a few sentences
with slots tell.  Two tokenizers of different kinds are trained on it.  The ordinary `deepspeed
distill.py` trains a small teacher for each, and four students, from the same weights on the same
data: by distillation, from the teacher with their own tokenizer, and without a teacher, for as many
steps and for as long.  What two of them write stands below one another.

On a CPU two jobs run side by side, a rank with half of the cores each.  Seconds are those of its
processors, which a neighbor changes little.  examples/demo_report.py shows what came out.
"""

import contextlib
import hashlib
import io
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from examples import demo_report
from examples.demo_report import AS_LONG, EQUAL_TOKENIZERS, NO_TEACHER
from isogloss import align_view
from isogloss.command import with_free_port
from isogloss.flags.terminal import guard_terminal, unguarded

CACHE = Path(os.environ.get("ISOGLOSS_CACHE", ".cache"))
RUNS = Path("runs/demo")

# Sizes and rates let the demo end within minutes on two cores; not tuned.  The cache's name is a
# hash of this dict: raise `version` when the code that makes the cached files changes.
RECIPE = {
    "version": 6,
    "stories": 6000,
    "held_out_rows": 96,
    "student_rows": 96,  # stories that the students read; the teachers have read all
    "teacher_vocab": 1024,
    "student_vocab": 512,
    "teacher": dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4,
                    num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=512),
    "student": dict(hidden_size=128, intermediate_size=344, num_hidden_layers=3,
                    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512),
    "teacher_steps": 220,
    "teacher_batch": 16,
    "teacher_lr": 3e-3,
}
# Flags of distill.py that all arms have in common.
DISTILL = {"steps": 200, "learning_rate": 3e-3}
BATCH_SIZE = 8  # samples of a student's step
NUM_EVALUATIONS = 4  # of a student, after the one before its first step
# What the table compares: the name of an arm and its flags of distill.py.  The weights are twice
# those that did best in docs/LOG.md, where students had more text; none is tuned here.
ARMS = {
    NO_TEACHER: {"kd_weight": 0},
    "piece_kl": {"loss": "piece_kl", "kd_weight": 4},
    EQUAL_TOKENIZERS: {"loss": "forward_kl", "kd_weight": 4},
    AS_LONG: {"kd_weight": 0},
}

WRITERS = NO_TEACHER, "piece_kl"  # the arms whose students write at last
SHOWN = "Rosa has 25 apples and gives 12 of them to Hugo."  # to look at its alignment
PROMPTS = "One rainy morning Anna", "Tom has a small rabbit.", '"Where is my key?" asks'

# --- corpus ---------------------------------------------------------------------------------------

NAMES = {  # by the word that may stand for one
    "She": "Anna Clara Emma Grace Iris Julia Lily Maria Nina Olga Rosa Sofia Vera Wendy".split(),
    "He": "Ben David Felix Hugo Jack Leo Max Noah Oscar Peter Sam Tom Victor Will".split(),
}
WORDS = {
    "thing": "ball bell book boat bottle box candle chair clock coat cup drum feather flower hat "
             "key kite lamp letter map mirror pear pen plum ring rope shell shoe spoon watch wheel",
    "color": "black blue brown golden gray green pink purple red silver white yellow",
    "size": "big long new pretty round short small strange tiny",
    "place": "attic bakery barn beach bridge field forest garden harbor hill kitchen lake library "
             "market meadow mill park river school shop station tower village",
    "animal": "bear bird cat cow dog donkey duck fox frog goat hen horse mouse pony rabbit turtle",
    "mood": "cold curious glad happy hungry proud sad sleepy surprised thirsty tired",
    "weather": "cloudy cold foggy hot rainy snowy sunny warm windy",
    "food": "bread cake cheese honey rice soup",
    "time": "morning afternoon evening night",
    "move": "drives hurries runs sails walks",
    "look": "behind the door,in the tall grass,next to the wall,on the roof,under the tree",
}
# A, B and C are people of a story, A sometimes as a pronoun; thing, place, animal and food stay.
BEGINNINGS = """It is a {weather} {time}, and {A} is {mood}.
One {weather} {time} {A} {move} to the {place} with {B}.
{A} lives in a {size} house near the {place}.
{A} has a {size} {animal}. The {animal} is {color}, and its name is {D}.
There is a {color} {thing} in the {place}. It belongs to {A}.
Every {time} {A} eats some {food} and goes to the {place}.
{B} is the best friend of {A}. They often play in the {place}."""
MIDDLES = """{a} looks for a {color} {thing}, but it is not there.
{a} finds a {size} {color} {thing} {look}.
"Whose {thing} is this?" asks {A}. "It is mine," says {B}.
"Where is my {thing}?" asks {B}. "It is {look}," says {A}.
A {color} {animal} comes and takes the {thing} away.
{B} has {n} {thing}s and gives {m} of them to {A}. Now {B} has {k}.
{B} gives the {animal} some {food}, because it is hungry.
They go to the {place} together and meet {C} there.
{C} is {mood} today. "Do not be {mood}," says {A}.
{a} {move} home, puts the {thing} on the table and writes a letter to {B}.
It is {n} miles from the {place} to the house of {C}, so they take the {animal}.
{B} is {n} years old, and {C} is {m}. So {B} is {k} years older.
Then it gets {weather}, and they all go into the house and eat {food}.
The {thing} costs {n} coins. {a} has only {m}, so {B} pays the other {k}."""
ENDS = """At the end of the day {A} is {mood}, and {B} goes home.
At night they eat {food} and tell {C} about the {thing}.
"Thank you," says {A} to {B}, and they both go to bed.
After that {A} never forgets the {thing} again.
The {animal} sleeps {look}, and {A} goes home.
So everybody is {mood}, and the {thing} is back in the {place}."""


def story(rng):
    """Return six sentences or so about the same people and things, by a random.Random."""
    pronouns = {name: pronoun for pronoun, names in NAMES.items() for name in names}
    words = {slot: text.split("," if "," in text else None) for slot, text in WORDS.items()}
    same = dict(zip("ABCD", rng.sample(list(pronouns), 4)))
    same |= {slot: rng.choice(words[slot]) for slot in ("thing", "place", "animal", "food")}
    middles = rng.sample(MIDDLES.splitlines(), 4)
    told = []
    for line in [rng.choice(BEGINNINGS.splitlines()), *middles, rng.choice(ENDS.splitlines())]:
        n = rng.randint(4, 40)
        m = rng.randint(1, n - 2)
        person = rng.choice([same["A"], pronouns[same["A"]]])
        slots = {slot: rng.choice(of_slot) for slot, of_slot in words.items()}
        told.append(line.format(**slots | same, a=person, n=n, m=m, k=n - m))
    return " ".join(told)


def make_corpus(path):
    """Write a JSON line per story: held-out ones, then those to train on; no two are equal."""
    rng = random.Random(0)
    stories = dict.fromkeys(story(rng) for _ in range(RECIPE["stories"]))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in stories))


def make_student_corpus(corpus, path):
    """Write what a student reads: the held-out stories of a corpus, and few of the others.

    Whoever has little text of a kind and a teacher that has read more of it distills.
    """
    lines = corpus.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: RECIPE["held_out_rows"] + RECIPE["student_rows"]]))


def read_corpus(path):
    """Return (held out, train), two lists of stories."""
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    count = RECIPE["held_out_rows"]
    return texts[:count], texts[count:]


# --- tokenizers -----------------------------------------------------------------------------------

SENTENCEPIECE = {
    "model_type": "unigram",
    "byte_fallback": True,
    "split_digits": True,  # the teacher keeps numbers whole, so chunks of several tokens appear
    "max_sentence_length": 1 << 16,  # bytes; by default longer texts would be dropped
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


def byte_level_bpe(texts, size, single_digits=False):
    """Train the teacher's tokenizer: GPT-2 style, frequent numbers stay whole, or none does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if single_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
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
    """Return a new Llama with random weights and tied embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape)
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


# --- the cache ------------------------------------------------------------------------------------


def recipe_folder():
    """Return the cache's folder, named by a hash of all that decides what the cached files hold."""
    # what is random may come otherwise in another Python; weights depend on the teacher's dtype
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


# The folder of a teacher: how its tokenizer is trained, and the vocabulary's size in RECIPE.
TEACHERS = {
    "teacher": (byte_level_bpe, "teacher_vocab"),
    "equal_teacher": (unigram, "student_vocab"),
}


def prepare(folder, seeds, layout):
    """Make the corpus, two teachers and a fresh student per seed, unless they are cached."""
    corpus = make_once(folder / "corpus.jsonl", make_corpus)
    make_once(folder / "student_corpus.jsonl", partial(make_student_corpus, corpus))
    # before there are threads, of which one would find what another is about to import
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

    side_by_side(partial(make_teacher, folder, layout), TEACHERS, layout)
    tokenizer = load_tokenizer(folder / "equal_teacher")
    for seed in seeds:
        student = llama(tokenizer, RECIPE["student"], seed)
        make_once(folder / f"student_{seed}", partial(save, student, tokenizer))


def make_teacher(folder, layout, name):
    """Train a tokenizer and, by distill.py, a teacher that has it, on text alone."""
    train_tokenizer, vocab = TEACHERS[name]

    def make(scratch):
        _, texts = read_corpus(folder / "corpus.jsonl")
        tokenizer = train_tokenizer(texts, RECIPE[vocab])
        fresh = folder / f"fresh_{name}"
        save(llama(tokenizer, RECIPE["teacher"], seed=0), tokenizer, fresh)
        print(f"{name} with {len(tokenizer):,} tokens learns from {len(texts):,} stories",
              flush=True)
        train(folder, name, layout, RECIPE["teacher_batch"], {
            "student": fresh, "data": folder / "corpus.jsonl", "kd_weight": 0, "export": scratch,
            "steps": RECIPE["teacher_steps"], "learning_rate": RECIPE["teacher_lr"], "seed": 0})

    make_once(folder / name, make)


def side_by_side(function, names, layout):
    """Return what a function makes of each name, as many at a time as the layout has jobs."""
    with ThreadPoolExecutor(layout.jobs) as pool:
        jobs = [pool.submit(function, name) for name in names]
        try:
            return [job.result() for job in jobs]
        except SystemExit:
            pool.shutdown(cancel_futures=True)
            raise


def num_threads(num_processes):
    return max(1, os.cpu_count() // num_processes)


def save(model, tokenizer, path):
    from transformers import logging

    logging.disable_progress_bar()  # of writing a file
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def load_tokenizer(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


# --- runs -----------------------------------------------------------------------------------------


class DemoLayout(NamedTuple):
    """How the students share the machine.

    ranks: of a student; jobs: how many students train side by side.
    """

    ranks: int
    jobs: int


def choose_layout():
    """Return the DemoLayout: one student at a time on GPUs, two on a CPU."""
    # counted in another process: this one needs no CUDA context
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    counted = subprocess.run(command, capture_output=True, text=True, check=True)
    gpus = min(int(counted.stdout), 2)
    return DemoLayout(gpus, 1) if gpus else DemoLayout(ranks=1, jobs=2)


def launch(ranks, flags, log, threads):
    """Run `deepspeed distill.py` with these flags and return its exit code."""
    launcher = Path(sys.executable).with_name("deepspeed")
    options = with_free_port(["--quiet", f"--num_gpus={ranks}"])
    environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
    with log.open("w") as output:
        return subprocess.run([launcher, *options, "distill.py", *flags], env=environment,
                              stdout=output, stderr=subprocess.STDOUT).returncode


def train_arms(folder, seeds, layout):
    """Train the students of all arms; return their Runs in the order of ARMS."""
    def train_all(steps_of_arms):
        jobs = [(arm, seed, steps) for arm, steps in steps_of_arms.items() for seed in seeds]
        return side_by_side(lambda job: distill(folder, layout, *job), jobs, layout)

    steps = DISTILL["steps"]
    runs = train_all({NO_TEACHER: steps, "piece_kl": steps})
    as_long = demo_report.steps_of_equal_time(runs)
    return runs + train_all({EQUAL_TOKENIZERS: steps, AS_LONG: as_long})


def distill(folder, layout, arm, seed, steps):
    """Train one student by the command line and return its Run."""
    values = DISTILL | ARMS[arm] | {
        "student": folder / f"student_{seed}",
        "teacher": folder / ("equal_teacher" if arm == EQUAL_TOKENIZERS else "teacher"),
        "data": folder / "student_corpus.jsonl",
        "steps": steps,
        "eval_every": -(-steps // NUM_EVALUATIONS),  # rounded up
        "seed": seed,
    }
    if arm in WRITERS:
        values["export"] = exported(folder, arm, seed)
    output, seconds = train(folder, name_of(arm, seed), layout, BATCH_SIZE, values)
    run = demo_report.read_run(arm, seed, output)
    print(f"{arm}, seed {seed}: {run.bits:.3f} bits per byte after {steps} steps, {seconds:.0f} s "
          "with start and evaluations", flush=True)
    return run


def name_of(arm, seed):
    return re.sub(r"\W+", "_", f"{arm}_{seed}")


def exported(folder, arm, seed):
    return RUNS / folder.name / name_of(arm, seed) / "student"


def train(folder, name, layout, batch_size, values):
    """Run distill.py, its output into a file beside the directory of the run, which is made anew.

    Args:
        batch_size: samples of a step; values: of flags.
    Returns:
        (directory of the run, seconds of the whole command).
    """
    output = RUNS / folder.name / name
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    config = json.loads(Path("ds_configs/zero2.json").read_text())
    config["train_batch_size"] = batch_size
    ds_config = output.with_suffix(".ds_config.json")
    ds_config.write_text(json.dumps(config, indent=2))
    values = values | {"ds_config": ds_config, "output_dir": output, "max_length": 256,
                       "eval_rows": RECIPE["held_out_rows"], "teacher_dtype": teacher_dtype()}
    flags = [f"--{name}={value}" for name, value in values.items()]
    log = output.with_suffix(".log")
    begin = time.perf_counter()
    if launch(layout.ranks, flags, log, num_threads(layout.ranks * layout.jobs)):
        end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise SystemExit(f"demo.py: the run {output} failed; {log} ends in\n{end}\n"
                         f"Its flags were\n{' '.join(flags)}")
    return output, time.perf_counter() - begin


# --- main -----------------------------------------------------------------------------------------


def main():
    guard_terminal()
    begin = time.perf_counter()
    seeds = list(map(int, os.environ.get("SEEDS", "0").split()))
    folder = recipe_folder()
    layout = choose_layout()
    prepare(folder, seeds, layout)
    preparation_seconds = time.perf_counter() - begin
    print("The tokens of the student above those of the teacher; a bar is inside of a chunk:")
    with contextlib.redirect_stdout(unguarded(sys.stdout)):  # which has colors
        align_view.main(["--student", str(folder / "equal_teacher"),
                    "--teacher", str(folder / "teacher"), "--show", SHOWN])

    runs = train_arms(folder, seeds, layout)
    picture = RUNS / folder.name / "curves.png"
    demo_report.plot(runs, picture)
    print(f"\n{demo_report.table(runs)}\n")
    students = {arm: exported(folder, arm, seeds[0]) for arm in WRITERS}
    print(*demo_report.continuations(students, PROMPTS), sep="\n")
    code = demo_report.how_to_use(students[WRITERS[-1]], PROMPTS[0])
    print(f"\nThe last one in your own code:\n\n{code}\n")
    total_seconds = time.perf_counter() - begin
    print(f"{picture}; {preparation_seconds:.0f} s to make corpus, tokenizers and teachers, "
          f"{total_seconds:.0f} s in all")


if __name__ == "__main__":
    print(__doc__) if sys.argv[1:] else main()  # it has no flags
