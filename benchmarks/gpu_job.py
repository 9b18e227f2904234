"""Checks of gpu.py that need a whole job: distill.py's own step, on one or two ranks.

The ranks are processes of this machine, one for each GPU; without one they compute on the CPU, so
that tests can run the same functions.  See gpu.py for what a check returns.
"""

import json
import os
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from pydoc_data import topics

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import gpu
from benchmarks.step import Watch, busy_figures, profiled
from isogloss import build, demo, distill
from isogloss.inputs import build_collator, check_inputs, load_batches
from isogloss.job.columns import pack
from isogloss.job.launch import silence_libraries, start_distributed
from isogloss.job.transfers import Readback, Uploads
from isogloss.once_in_a_while import run_evaluation
from isogloss.teachers.model import ModelSpec
from isogloss.teachers.protocol import load_teacher
from recipes.tiny.prepare import passages

SAMPLES = 4  # of a step, over all ranks
MAX_LENGTH = 96
EXACT = 1e-5  # relative error of float32 gradients; sums have another order on two ranks
STEPS = 6  # timed, after as many that warm up
VOCAB = 32_000  # rows of the heads of the models that are timed


def prepare(folder, layers=2, hidden=64, rows=None):
    """Write student, teacher and corpus; random weights, texts of the interpreter.

    Args:
        rows: of the heads; None: a few more than tokens.
    """
    texts = []
    for _, text in sorted(topics.topics.items()):
        texts += [passage for passage in passages(text, 200) if len(passage) > 40]
    texts = texts[:300]
    shape = dict(hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
                 num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512,
                 initializer_range=0.1)
    kinds = ("student", demo.unigram(texts, 350)), ("teacher", demo.byte_level_bpe(texts, 500))
    for seed, (name, tokenizer) in enumerate(kinds):
        model = demo.llama(tokenizer, shape, seed)
        model.resize_token_embeddings(rows or len(tokenizer) + 10)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    with open(folder / "corpus.jsonl", "w") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")


def on_ranks(world, function, *arguments):
    """Run a function of a module on `world` ranks; return what each returned.

    Raises:
        RuntimeError: one of them failed.
        EOFError: one of them ended without an answer.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = [gpu.spawn(_rank, rank, world, port, function, arguments, daemon=False)
             for rank in range(world)]
    try:
        answers = [gpu.received(pipe, timeout=600) for _, pipe in group]
        for answer in answers:
            if "error" in answer:
                raise RuntimeError(answer["error"])
        return [answer["result"] for answer in answers]
    finally:
        for process, _ in group:
            process.join(30)
            process.kill()


def _rank(pipe, rank, world, port, function, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if 0 < torch.cuda.device_count() < world:
        share_one_device()
    try:
        gpu.send(pipe, {"result": function(*arguments)})
    except Exception:
        gpu.send(pipe, {"error": f"rank {rank}: {traceback.format_exc()[-1500:]}"})


def share_one_device():
    """Have this rank compute on the first GPU and talk over gloo: NCCL wants one for each rank."""
    os.environ["LOCAL_RANK"] = "0"
    get_accelerator().communication_backend_name = lambda: "gloo"


def run_job(argv):
    """Run distill.py on this rank."""
    distill.cli(argv)


def profile_job(pipe, argv, step):
    """Run distill.py in a process of its own up to a step that is profiled; send its figures."""
    def finish(figures):
        gpu.send(pipe, figures)
        os._exit(0)  # a checkpoint of a large student takes longer than all of its steps

    distill.train_step = Watch(distill.train_step, step, finish)
    distill.cli(argv)


def start_run(flags):
    """Return (Config, device, RunInputs, state) of a run on this rank."""
    device = start_distributed()
    silence_libraries()
    cfg = distill.Config(**flags)
    inputs = check_inputs(cfg, device)
    return cfg, device, inputs, build.build_state(cfg, inputs, device)


def evaluate(flags):
    """Return the held-out metrics of a student by the job's evaluation, on this rank."""
    cfg, device, inputs, state = start_run(flags)
    _, batches = load_batches(cfg, inputs, state.engine, device, 0)
    return run_evaluation(state, batches)


def start_small_run(folder, micro_batch_size, precision):
    """Return (state of a run of what `prepare` wrote, its Collator, texts) on this rank."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}
    ds_config = folder / f"ds{os.environ['RANK']}.json"
    ds_config.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": micro_batch_size, "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0, "optimizer": optimizer, "zero_optimization": {"stage": 1},
        "bf16": {"enabled": precision == "bfloat16"}}))
    cfg, device, inputs, state = start_run(dict(
        student=str(folder / "student"), teacher=str(folder / "teacher"),
        data=str(folder / "corpus.jsonl"), ds_config=str(ds_config), max_length=MAX_LENGTH,
        teacher_max_length=MAX_LENGTH, output_dir=str(folder / "run")))
    return state, build_collator(cfg, inputs, device), inputs.data.sources[0].train_data["text"]


# --- gradients --------------------------------------------------------------------------------


def step_gradients(folder):
    """Take one step on this rank's samples; rank 0 writes the gradient, all return the loss."""
    folder = Path(folder)
    world = int(os.environ["WORLD_SIZE"])
    count = SAMPLES // world
    state, collator, texts = start_small_run(folder, count, "float32")
    first = count * dist.get_rank()
    batch = collator(texts[first : first + count])
    model = state.engine.module.model
    gradients = {}
    take = state.engine.optimizer.step

    def step(*arguments, **options):
        for name, parameter in model.named_parameters():
            gradients[name] = safe_get_full_grad(parameter).cpu()
        return take(*arguments, **options)

    state.engine.optimizer.step = step
    metrics = distill.train_step(state, [batch]).metrics()
    if dist.get_rank() == 0:
        torch.save(gradients, folder / f"gradients{world}.pt")
    return metrics["loss"]


def nccl_gradients():
    """Compare the gradient of one step on one rank and on two, in float32."""
    gpu.need_devices(2)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        prepare(folder)
        losses = {}
        gradients = {}
        for ranks in (1, 2):
            losses[ranks] = on_ranks(ranks, step_gradients, path)[0]
            gradients[ranks] = torch.load(folder / f"gradients{ranks}.pt", weights_only=True)
    worst = 0.0
    for name, gradient in gradients[1].items():
        worst = max(worst, gpu.relative_error(gradients[2][name], gradient))
    figures = {"losses": losses, "worst_relative_error": worst}
    return worst <= EXACT and abs(losses[1] - losses[2]) <= EXACT * abs(losses[1]), figures


# --- a teacher in shards ----------------------------------------------------------------------


def teacher_states(folder, degree, dtype):
    """Return the teacher's hidden states of a text, as this rank computes them; rank 0 saves."""
    device = start_distributed()
    silence_libraries()
    tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "teacher")
    spec = ModelSpec(str(Path(folder) / "teacher"), len(tokenizer), "auto", dtype=dtype,
                       device=device, degree=degree, same_ids=True)
    teacher = load_teacher(spec)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(tokenizer), (2, 128), generator=generator).to(device)
    logits = teacher.read(ids)(torch.arange(256, device=device))
    if dist.get_rank() == 0:
        torch.save(logits.float().cpu(), Path(folder) / f"logits_{degree}_{dtype}.pt")
    return teacher.engine


def tensor_parallel_teacher():
    """Compare a teacher in two shards with the whole one, by their errors against float32."""
    gpu.need_devices(2)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        prepare(folder, hidden=256, layers=4)
        engines = {}
        for degree, precision in ((1, "float32"), (1, "bfloat16"), (2, "bfloat16")):
            key = f"{degree} {precision}"
            engines[key] = on_ranks(degree, teacher_states, path, degree, precision)[0]
        exact = torch.load(folder / "logits_1_float32.pt", weights_only=True)
        errors = {}
        for degree in (1, 2):
            logits = torch.load(folder / f"logits_{degree}_bfloat16.pt", weights_only=True)
            errors[degree] = gpu.relative_error(logits, exact)
    figures = {"engines": engines, "relative_error": errors}
    return errors[2] <= 2 * errors[1] + EXACT, figures


# --- the host and the device at the same time ---------------------------------------------------

SLEEP_CYCLES = 10**9  # for which the device is kept busy: about half a second


def keep_busy():
    """Give the device work that takes a while; return the event of its end."""
    torch.cuda._sleep(SLEEP_CYCLES)
    end = torch.cuda.Event()
    end.record()
    return end


def transfers_overlap():
    """Return {what: whether it happens while the device works on something else}."""
    uploads = Uploads(torch.device("cuda"))
    packed, buffer = pack([torch.arange(1 << 20), torch.rand(3, 5)], pinned=True)
    batch = packed.value(buffer)
    uploads.to_device([batch])  # memory is there now
    end = keep_busy()
    [moved] = uploads.to_device([batch])
    uploads.stream.synchronize()
    results = {"upload": not end.query()}
    results["uploaded"] = all(torch.equal(a.cpu(), b) for a, b in zip(moved, batch))
    numbers = torch.ones(3, device="cuda")
    late = Readback(numbers)
    end = keep_busy()
    numbers.zero_()
    results["read back"] = late.read() == [1.0, 1.0, 1.0] and not end.query()
    return results


def waits_between_steps(folder):
    """Return {place: waits for the device} from an optimizer's step to the next batch's copy."""
    state, collator, texts = start_small_run(Path(folder), SAMPLES, "bfloat16")
    batch = collator(texts[:SAMPLES])
    reports = [distill.train_step(state, [batch])]
    step = state.engine.step
    to_device = state.uploads.to_device

    def step_and_watch(*arguments, **options):
        result = step(*arguments, **options)
        gpu.watch_waits("warn")
        return result

    def upload_unwatched(batches):
        gpu.watch_waits("default")
        return to_device(batches)

    state.engine.step = step_and_watch
    state.uploads.to_device = upload_unwatched
    waits = {}
    with gpu.waits_counted(waits):
        gpu.watch_waits("default")  # until a step has been taken
        for _ in range(STEPS):
            reports.append(distill.train_step(state, [batch]))
    losses = [report.metrics()["loss"] for report in reports]
    return {"waits": waits, "loss": losses[-1]}


def overlap():
    """Check that the host and copies go on while the device works."""
    figures = transfers_overlap()
    with tempfile.TemporaryDirectory() as path:
        prepare(Path(path))
        [between] = on_ranks(1, waits_between_steps, path)
    return all(figures.values()) and not between["waits"], figures | between


# --- time -------------------------------------------------------------------------------------


def timed_steps(folder):
    """Time whole steps, then let the profiler say when the GPU was idle in them."""
    state, collator, texts = start_small_run(Path(folder), SAMPLES, "bfloat16")
    batch = collator(texts[:SAMPLES])

    def steps():
        for _ in range(STEPS):
            distill.train_step(state, [batch])
        gpu.synchronize()

    steps()
    begin = time.perf_counter()
    steps()
    seconds = (time.perf_counter() - begin) / STEPS
    profiler, _ = profiled(steps)
    figures = busy_figures(profiler, STEPS)  # where a step begins, if the host is late there
    busy_seconds = gpu.rounded(figures["busy_seconds"] / STEPS)
    return figures | {"step_seconds": gpu.rounded(seconds), "busy_seconds": busy_seconds,
                      "step_over_busy": round(seconds / max(busy_seconds, 1e-9), 2)}


def step_over_parts():
    """Compare a step's seconds with those in which the GPU computes."""
    with tempfile.TemporaryDirectory() as path:
        prepare(Path(path), layers=8, hidden=512, rows=VOCAB)
        [figures] = on_ranks(1, timed_steps, path)
    return figures["step_over_busy"] <= 1.15, figures
