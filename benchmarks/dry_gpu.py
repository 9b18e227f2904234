"""Take steps on a GPU that is not there: what would wait, mix devices, use another dtype, spill.

    python -m benchmarks.dry_gpu                     # every loss, every case, then the compiler
    python -m benchmarks.dry_gpu --losses piece_kl --cases plain,packed

It needs a CUDA build of torch (with its pinned requirements, in an environment of its own) and a C
compiler, and no GPU: a small library answers for the runtime of CUDA, and the tensors of a step are
fake, so that all of it runs, backward passes too, but no kernel does.  A line of a case says how
many kernels the loss of a micro-batch launches, in all its sub-tiles, and what is wrong:

    wait    the host reads a value of the device, or copies one to it, within a step
    dtype   a matmul of float32 in a step of bfloat16
    error   whatever was raised, as by tensors on two devices

Values are unknown, so nothing that depends on them is seen: tests compare values, on a CPU.

`traffic` counts the launches of a loss and the bytes that it moves, of what is compiled too, and
computes from both what it takes over its matmuls (step_model.py); more than BOUNDS is wrong.
`copies` counts how often a loss, with the cross-entropy, holds the logits of a sub-tile at its
peak, in float32; `LossSpec.live_copies` follows it.  `compiled` compiles the formulas that
`--loss_backend auto` compiles on a GPU, forward and backward, for sm_90, and prints how many
new kernels these are, and the most registers of a thread; a spill is wrong.

Everything is one line of JSON each; the command ends with status 1 where something is wrong.
"""

import copy
import functools
import itertools
import json
import operator
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import traceback
import types
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import fire
import torch
import torch._inductor.config
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks import gpu_job, loss as benchmark
from benchmarks.loss import as_list
from benchmarks.step_model import loss_over_matmuls
from isogloss import distill, losses as formulas, rollout, targets, translation
from isogloss.config import configs_by_teacher
from isogloss.data.batch import Collator, PairOptions
from isogloss.inputs import automatic_mib, load_text_encoder, plan_teachers
from isogloss.job.columns import put_together, take_apart
from isogloss.objective import loss_table, projected
from isogloss.objective.loss_table import LOSSES
from isogloss.objective.objective import LossTerms, Part
from isogloss.student.engine import StudentWithLoss
from isogloss.teachers.engines.whole import ModelTeacher, WholeModel
from isogloss.teachers.text_scores import weigh_by_confidence
from isogloss.tile_plan import GPU_SUB_TILES
from isogloss.tiles import Head, head_of, tiled_loss, tiled_losses

PACKAGES = Path(sysconfig.get_paths()["purelib"])
INCLUDES = PACKAGES / "nvidia/cu13/include", PACKAGES / "triton/backends/nvidia/include"
ARCHITECTURE = "sm_90a"
VOCAB = 151_646  # no multiple of 8, as Qwen's
CELLS = 120_000  # that two vocabularies of this size have in common, about
ROWS = 256  # of the logits that are compiled

# flags of a step, beside --loss
CASES = {
    "plain": {},
    "packed": {"pack": True},
    "logits": {"teacher_output": "logits"},
    "topk": {"teacher_output": "topk", "teacher_output_topk": 32},
    "whole": {"tiled": False},
    "warm": {"temperature": 2.0},
    "learned": {"loss_options": {"learn_projection": True}},
    "reverse": {"loss_options": {"reverse": True}},
    "confident": {"teacher_weights": "ce"},
    "rollouts": {},
}

# {loss: (most launches in 4,096 positions, most MB a position, and computed on an H100 the most
# time over that of the matmuls, at hidden states of 2,048 and of 4,096)}
BOUNDS = {"piece_kl": (600, 8.0, 2.0, 1.6), "forward_kl": (80, 3.0, 1.5, 1.3),
          "generalized_jsd": (80, 4.0, 1.5, 1.3), "projection_kl": (400, 8.0, 2.0, 1.6),
          "gold": (400, 8.0, 2.0, 1.6), "uld": (400, 15.0, 3.0, 2.0), "alm": (400, 4.0, 1.5, 1.3)}

# --- a GPU that is not there ----------------------------------------------------------------------

RUNTIME = """
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return 0; }
cudaError_t cudaGetDevice(int *n) { *n = 0; return 0; }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = 1; return 0; }
cudaError_t cudaMalloc(void **p, size_t n)
{ *p = aligned_alloc(512, (n + 511) / 512 * 512); return 0; }
cudaError_t cudaFree(void *p) { free(p); return 0; }
cudaError_t cudaMemGetInfo(size_t *a, size_t *b) { *a = *b = 80ull << 30; return 0; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p)
{ *s = malloc(8); return 0; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c)
{ *c = 0; return 0; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = malloc(8); return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *a, int *b) { *a = 0; *b = -5; return 0; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k,
                            cudaStream_t s) { memcpy(to, from, n); return 0; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "no GPU");
  p->major = 9;
  p->totalGlobalMem = 80ull << 30;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  return 0;
}
static int nothing() { return 0; }
static int state(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(
    const char *name, void **f, unsigned v, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *found) {
  *f = strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)nothing : (void *)state;
  if (found) *found = 0;
  return 0;
}
"""

# attributes: 75 and 76 the compute capability, 16 multiprocessors, 10 threads of a warp, 12 and 97
# registers and shared memory of a block
DRIVER = """
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = 0; *a = 1; return 0; }
int cuCtxGetDevice(int *d) { *d = 0; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) {
  *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 132 : a == 10 ? 32 : a == 12 ? 65536
       : a == 97 ? 232448 : 2048;
  return 0;
}
int cuFuncGetAttribute(int *v, int a, void *f) { *v = a ? 0 : 1024; return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)8; return 0; }
int cuGetErrorString(int e, const char **s) { *s = "no GPU"; return 0; }
int cuModuleLoadData(void **m, const void *image) { *m = (void *)8; return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) { *f = (void *)8; return 0; }
"""


def build_stand_ins(folder):
    """Compile the libraries that stand in for CUDA's; what they do not define succeeds."""
    headers = [include / name for include in INCLUDES for name in ("cuda_runtime_api.h", "cuda.h")]
    declared = "".join(path.read_text() for path in headers if path.exists())
    libraries = ("libruntime.so", "cuda", RUNTIME), ("libcuda.so.1", "cu", DRIVER)
    for library, prefix, source in libraries:
        names = set(re.findall(rf"\b{prefix}[A-Z]\w*(?=\()", declared))
        names |= {f"{name}_v2" for name in names if prefix == "cu"}
        rest = "\n".join(f"int {name}() {{ return 0; }}" for name in sorted(names)
                         if f" {name}(" not in source)
        for part, text in (("defined", source), ("rest", rest)):
            (folder / f"{part}.c").write_text(text)
        subprocess.run(
            ["cc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", library, "defined.c",
             "rest.c", *(f"-I{include}" for include in INCLUDES)], cwd=folder, check=True)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")


def run_with_stand_ins():
    """Run the same command line with the libraries loaded before CUDA's; return its status."""
    with tempfile.TemporaryDirectory() as folder:
        build_stand_ins(Path(folder))
        environment = os.environ | {
            "LD_PRELOAD": f"{folder}/libruntime.so", "LD_LIBRARY_PATH": folder,
            "TRITON_LIBCUDA_PATH": folder, "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "DRY_GPU": folder}
        return subprocess.run([sys.executable, *sys.orig_argv[1:]], env=environment).returncode


# --- one step -------------------------------------------------------------------------------------


MOVED = ("DistillationLoss", "LearnedProjection", "PositionGradient", "TranslationGradient",
         "AlmGradient", "UldGradient", "GoldGradient", "ProjectionGradient")


def on_gpu(value, mode, known=None):
    """Return a value with its tensors as fake ones of a GPU: in tuples, objects and closures too.

    Losses hold tables that are made on the host, by reading values, which fake tensors lack.
    """
    known = {} if known is None else known
    if id(value) in known:
        return known[id(value)][0]
    move = functools.partial(on_gpu, mode=mode, known=known)
    moved = value
    if isinstance(value, torch.Tensor):
        with mode:
            moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype,
                                        device="cuda:0")
    elif hasattr(value, "_fields"):
        moved = type(value)(*map(move, value))
    elif type(value) in (tuple, list):
        moved = type(value)(map(move, value))
    elif type(value) is dict:
        moved = {key: move(entry) for key, entry in value.items()}
    elif isinstance(value, functools.partial):
        moved = functools.partial(move(value.func), *map(move, value.args), **move(value.keywords))
    elif isinstance(value, types.FunctionType) and value.__closure__:
        cells = tuple(types.CellType(move(cell.cell_contents)) for cell in value.__closure__)
        moved = types.FunctionType(value.__code__, value.__globals__, value.__name__,
                                   value.__defaults__, cells)
        moved.__kwdefaults__ = value.__kwdefaults__
    elif type(value).__name__ in MOVED:
        moved = copy.copy(value)
        known[id(value)] = moved, value
        vars(moved).update(move(vars(value)))
    known[id(value)] = moved, value  # the value too, so that its id stays its own
    return moved


def place_of(frames):
    """Return where a stack of frames is, innermost, this file and torch left out; "": nowhere."""
    places = [f"{frame.filename}:{frame.lineno}" for frame in frames
              if frame.filename != __file__ and "/torch/" not in frame.filename]
    return places[-1].removeprefix(f"{ROOT}/") if places else ""


# operators for whose result the host waits; lift_fresh: a tensor of numbers of the host's
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "lift_fresh"}


class Watch(TorchDispatchMode):
    """Count launches and bytes, and list what is wrong.

    Attributes:
        launches: kernels so far.
        peak: bytes of what was made since it was cleared, and was there at a time.
        wrong: {line: how often}.
        live: {storage: (weak reference, bytes)} of what was made.
    """

    def __init__(self):
        super().__init__()
        self.launches = 0
        self.peak = 0
        self.wrong = {}
        self.live = {}

    def weigh(self, tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: value for key, value in self.live.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.live.values()))

    def note(self, kind, what):
        place = place_of(traceback.extract_stack())
        if "site-packages" not in place:  # what transformers does is not ours to mend
            line = f"{kind}: {what} at {place}"
            self.wrong[line] = self.wrong.get(line, 0) + 1

    def __torch_dispatch__(self, operator, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.look_for_waits(operator.overloadpacket.__name__, args, kwargs)
        is_view = any(x.alias_info and not x.alias_info.is_write for x in operator._schema.returns)
        # fake tensors lack the matmul of half precision that adds to float32
        is_mixed = operator is torch.ops.aten.addmm.dtype_out
        out = kwargs["out"] if is_mixed else operator(*args, **kwargs)
        made = [x for x in tensors_of(out) if x.is_cuda]
        if made and not is_view:
            self.launches += "empty" not in operator.overloadpacket.__name__
            self.weigh(made)
        return out

    def look_for_waits(self, name, args, kwargs):
        """Note what an operator waits for, or which dtype it should not have."""
        devices = [x.device.type for x in tensors_of((args, kwargs))]
        target = torch.device(kwargs.get("device") or devices[0] if devices else "cpu").type
        if name == "_to_copy" and target != devices[0]:
            self.note("wait", f"copied from {devices[0]} to {target}")
        if "cuda" not in devices:
            return
        if name in WAITS:
            self.note("wait", name)
        if name.startswith("index_put") and "cpu" in devices:
            self.note("wait", "a number of the host written")
        if name == "copy_" and len(set(devices)) > 1:
            self.note("wait", f"copied from {devices[1]} to {devices[0]}")
        factors = [x for x in args if isinstance(x, torch.Tensor)][-2:]
        if name in ("mm", "addmm", "bmm") and any(x.dtype == torch.float32 for x in factors):
            self.note("dtype", f"{name} of {[str(x.dtype)[6:] for x in factors]}")


def tensors_of(value):
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def plan_case(folder, loss, case):
    """Return (Config, TextEncoder of the student, TeacherSetups) of a step, on the host."""
    flags = CASES[case] | {"loss": loss, "max_length": 96, "teacher_max_length": 96}
    names = {name: str(folder / name) for name in ("student", "teacher")}
    if case == "confident":
        pair = [{"name": name, "model": names["teacher"]} for name in ("first", "second")]
        flags["teachers"] = json.dumps(pair)
        del names["teacher"]
    cfg = distill.Config(**names, data=str(folder / "corpus.jsonl"), **flags)
    encoder, _ = load_text_encoder("student", cfg.student, 96)
    encoders = {name: load_text_encoder("teacher", teacher.teacher, 96)[0]
                for name, teacher in configs_by_teacher(cfg).items()}
    return cfg, encoder, plan_teachers(cfg, encoder, encoders, torch.device("cpu"))


def micro_batch(folder, cfg, encoder, setups, mode):
    """Return a Batch of four texts."""
    lines = (folder / "corpus.jsonl").read_text().splitlines()[:4]
    texts = [json.loads(line)["text"] for line in lines]
    pairs = [PairOptions(setup.encoder, setup.loss.spelling) for setup in setups]
    limits = {"tile_mib": 1.0, "sub_tiles": GPU_SUB_TILES} if cfg.tiled else {}
    collator = Collator(encoder, pairs, pack=cfg.pack, **limits)
    rest, tensors = take_apart(collator(texts))
    return put_together(rest, on_gpu(tensors, mode))


def model_of(path):
    config = AutoConfig.from_pretrained(path)
    with torch.device("cuda:0"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def start_models(folder, cfg, encoder, setups, mode):
    """Give every teacher its source; return a StudentWithLoss."""
    student = StudentWithLoss(model_of(folder / "student"), len(encoder.table), cfg.tiled)
    for setup in setups:
        setup.loss = on_gpu(setup.loss, mode)
        teacher = model_of(folder / "teacher").requires_grad_(False)
        setup.source = ModelTeacher(WholeModel(teacher), head_of(teacher, setup.spec.vocab),
                                    setup.spec, "replicated", 0)
        if setup.loss.learned_projection:
            setup.loss.learned_projection.attach(student, "cuda:0")
    return student


def dry_step(folder, loss, case):
    """Run teachers, student, loss and backward on a micro-batch; return a line."""
    try:
        cfg, encoder, setups = plan_case(folder, loss, case)
    except ValueError as error:
        return {"loss": loss, "case": case, "refused": str(error), "wrong": {}}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    batch = micro_batch(folder, cfg, encoder, setups, mode)
    watch = Watch()
    line = {"loss": loss, "case": case}
    with mode:
        student = start_models(folder, cfg, encoder, setups, mode)
        if case == "rollouts":
            write(student.model, watch)
        else:
            with watch:
                line |= launches_of(cfg, student, setups, batch, watch)
            line["sub_tiles"] = sum(len(tile.sub_tiles) for tile in batch.teachers[0].tiles)
    return line | {"wrong": watch.wrong}


def launches_of(cfg, student, setups, batch, watch):
    """Take the forward and backward passes of a step; return how many kernels are launched."""
    nobody = types.SimpleNamespace(loss_group=None)
    [parts] = list(targets.step_parts(setups, [batch], nobody))
    for part in parts:
        part.weight = 0.7
    parts[0].ce_weight = 0.3
    if cfg.teacher_weights != "fixed":
        weigh_by_confidence(parts, select=cfg.teacher_weights == "select")
    terms = LossTerms(parts, parameters=student.loss_parameters())
    launches = {"teachers": watch.launches}
    reduce = terms.reduce

    def counting(logits):
        begin = watch.launches
        out = reduce(logits)
        launches["launches"] = watch.launches - begin
        return out

    with mock.patch.object(terms, "reduce", counting):
        total, _ = student(batch.student, terms)
    total.backward()
    return launches


def write(model, watch):
    """Watch a model write eight places of two rows, one of which has ended after four."""
    prompts = [rollout.Prompt([3, 4, 5][number:], (0, number), 8) for number in range(2)]
    going_on = iter([2] * 4 + [1] * 3 + [0])  # what the host reads at each place
    advance = rollout._Batch.advance

    def watched_advance(batch):
        with watch:
            advance(batch)

    with mock.patch.multiple(rollout._Batch, count_active=lambda batch: next(going_on),
                             completions=lambda batch: [None] * 2, advance=watched_advance), \
            mock.patch.multiple(rollout, PLACES_BETWEEN_LOOKS={}, _have_mass=lambda *_: True):
        rollout.write(model, prompts, [2], temperature=0.7, top_p=0.9)


def step_lines(losses, cases):
    """Yield a line for each step; flags that a loss refuses make none."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        gpu_job.prepare(Path(folder))
        for loss in losses:
            for case in cases:
                try:
                    yield dry_step(Path(folder), loss, case)
                except Exception as error:
                    place = place_of(traceback.extract_tb(error.__traceback__))
                    text = f"error: {type(error).__name__}: {str(error)[:200]} at {place}"
                    yield {"loss": loss, "case": case, "wrong": {text: 1}}


# --- memory ---------------------------------------------------------------------------------------


def copies_line(name):
    """Return how often a loss, with the cross-entropy, holds the logits of a sub-tile."""
    sizes = benchmark.Sizes(ROWS, V=128_256, W=VOCAB, H=64, teacher_H=64, K=8192, memory_mib=512)
    with mock.patch.object(torch.cuda, "is_available", lambda: False):  # tables are real
        run = benchmark.prepare(name, sizes, torch.bfloat16)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    hidden, weight, teacher, tiles, loss = on_gpu(
        (run.hidden, run.weight, run.teacher_logits(run.whole), run.whole, run.loss), mode)
    watch = Watch()
    begin = []

    def tile_loss(x, y, sub_tile):
        watch.live.clear()  # the logits of the tile
        watch.peak = 0
        begin.append(4 * (x.numel() + (0 if y is None else y.numel())))
        return part.tile_loss(x, y, sub_tile)

    part = Part(loss, ce_weight=0.3, weight=1.0)
    with mode, watch:
        leaves = hidden.requires_grad_(), Head(weight.requires_grad_())
        tiled_loss(*leaves, teacher, tile_loss, tiles, part.weights)
    return {"copies": name, "peak": round(watch.peak / begin[0], 2), "launches": watch.launches,
            "wrong": watch.wrong}


# --- bytes ----------------------------------------------------------------------------------------

# operators that read of their first argument what they return; that write what they are given
GATHERS = {"index_select", "gather", "index"}
SCATTERS = {"index_put_", "_index_put_impl_", "index_fill_", "scatter_", "index_copy_",
            "index_add_"}


class Traffic(TorchDispatchMode):
    """Count launches and bytes of what is not compiled, without the products of hidden states.

    Every operator reads its arguments once and writes what it returns; views are free.

    Attributes:
        launches, nbytes: so far.
        calls: (compiled function, arguments, options), each time.
        is_counting: False where a compiled function stands in.
    """

    def __init__(self):
        super().__init__()
        self.launches = self.nbytes = 0
        self.calls = []
        self.is_counting = True

    def __torch_dispatch__(self, called, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = called.overloadpacket.__name__
        is_view = any(x.alias_info and not x.alias_info.is_write for x in called._schema.returns)
        is_mixed = called is torch.ops.aten.addmm.dtype_out
        out = kwargs["out"] if is_mixed else called(*args, **kwargs)
        made = [x for x in tensors_of(out) if x.is_cuda]
        if is_view or not (made and self.is_counting) or "empty" in name:
            return out
        self.launches += 1
        if name not in ("mm", "addmm"):
            given = {id(x): x for x in tensors_of((args, kwargs)) if x.is_cuda}.values()
            sizes = [dense_bytes(x) for x in given]
            written = sum(map(dense_bytes, made))
            if name in GATHERS:
                sizes[0] = written
            elif name in SCATTERS:
                written = sizes[0] = sum(sizes[1:])
            self.nbytes += written + sum(sizes)
        return out


def dense_bytes(x):
    """Return the bytes of a tensor, those that it repeats counted once."""
    sizes = [size for size, stride in zip(x.shape, x.stride()) if stride]
    return x.element_size() * functools.reduce(operator.mul, sizes, 1)


class Recorded:
    """Stand for a compiled function: what it does is not counted, and what it is given is kept."""

    def __init__(self, traffic, function):
        self.traffic, self.function = traffic, function

    def __call__(self, *args, **options):
        self.traffic.calls.append((self.function, args, options))
        self.traffic.is_counting = False
        try:
            return self.function(*args, **options)
        finally:
            self.traffic.is_counting = True


def bytes_line(name, positions=4096):
    """Return launches in some positions and MB a position of a loss with the cross-entropy.

    The memory is that of a card of 80 GB by default.
    """
    traffic = Traffic()
    record = functools.partial(Recorded, traffic)
    sizes = benchmark.Sizes(positions, V=128_256, W=VOCAB, H=64, teacher_H=64, K=8192,
                            memory_mib=automatic_mib(80 << 30))
    with mock.patch.object(torch.cuda, "is_available", lambda: False), \
            mock.patch.object(loss_table, "compiler_of", lambda *_: record), \
            mock.patch.object(projected, "compiler_of", lambda *_: record):
        run = benchmark.prepare(name, sizes, torch.bfloat16, is_for_gpu=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    hidden, weight, teacher, tiles, loss = on_gpu(
        (run.hidden, run.weight, run.teacher_logits(run.tiles), run.tiles, run.built), mode)
    batch = types.SimpleNamespace(tiles=tiles)
    with mode, traffic:
        part = Part(loss.loss_fn, loss.write_gradient, teacher_logits=teacher, batch=batch,
                    ce_weight=0.3, weight=0.7, student_hidden=hidden.requires_grad_())
        value, _ = tiled_losses(Head(weight.requires_grad_()), [part])
        value.backward()
    line = {"bytes": name, "sub_tiles": sum(len(tile.sub_tiles) for tile in tiles),
            "plain_launches": traffic.launches, "plain_MB": megabytes(traffic.nbytes, positions)}
    nbytes, launches = traffic.nbytes, traffic.launches
    compiled = {}
    before = compiled_files()
    for function, args, options in traffic.calls:
        key = function.__name__, len(args[0])
        if key not in compiled:
            compiled[key] = compiled_traffic(function, args, options)
        nbytes += compiled[key][0]
        launches += compiled[key][1]
    line |= {"launches": launches, "MB": megabytes(nbytes, positions),
             "compiled": {f"{name} of {rows}": (megabytes(size, rows), count)
                          for (name, rows), (size, count) in compiled.items()}}
    vocabs = sizes.V, sizes.V if name in benchmark.DIVERGENCES else sizes.W
    ratios = [round(loss_over_matmuls(line["MB"], launches, hidden, *vocabs), 2)
              for hidden in (2048, 4096)]
    counted = launches, line["MB"], *ratios
    wrong = {} if all(map(operator.le, counted, BOUNDS[name])) else {"bounds": BOUNDS[name]}
    counts = resources_since(before)
    return line | counts | {"over_matmuls": ratios, "wrong": wrong | counts["wrong"]}


def megabytes(nbytes, positions):
    return round(nbytes / positions / 1e6, 2)


@contextmanager
def each_graph(count):
    """Yield a list that gets `count(graph, its code)` of each graph that the block compiles."""
    from torch._inductor.graph import GraphLowering  # seconds of imports

    torch._inductor.config.joint_graph_constant_folding = False
    torch._inductor.config.fx_graph_cache = False
    counted = []
    codegen = GraphLowering.codegen

    def watched(graph):
        out = codegen(graph)
        counted.append(count(graph, getattr(out[0], "value", None) or str(out[0])))
        return out

    with mock.patch.object(GraphLowering, "codegen", watched):
        yield counted


def compiled_traffic(function, args, options):
    """Return (bytes, launches) of what the compiler makes of a call, by its own count."""
    from torch._inductor import compile_fx  # seconds of imports

    def count(graph, code):
        calls = len(re.findall(r"\.run\(|segment_reduce\.default\(|extern_kernels\.", code))
        return graph.count_bytes()[0], calls

    def ends(*args, **more):
        compile_fx.compile_fx_inner(*args, **more)
        raise KeyboardInterrupt

    def real(value):
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    backend = functools.partial(compile_fx.compile_fx, inner_compile=ends)
    torch._dynamo.reset()
    with each_graph(count) as counted, torch.no_grad():
        try:
            torch.compile(function, backend=backend, dynamic=True)(
                *tree_map(real, args), **tree_map(real, options))
        except KeyboardInterrupt:
            pass
    [result] = counted
    return result


# --- what the compiler makes ----------------------------------------------------------------------


def compiled_lines(names):
    """Yield what becomes of the compiled formula of each loss, forward and backward."""
    # constants would be folded by computing them, on a device that computes nothing
    torch._inductor.config.joint_graph_constant_folding = False
    for name in names:
        before = compiled_files()
        compile_both_passes(*formula_of(name))
        yield {"compiled": name} | resources_since(before)


def compiled_files():
    return set(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.ptx"))


def resources_since(before):
    """Return how many kernels were compiled since, their most registers, and what is wrong.

    A kernel spills if all its shapes do: the fastest one is taken.

    Args:
        before: what `compiled_files` said then.
    """
    kernels = {}
    for path in compiled_files() - before:  # several shapes of a kernel, to be timed
        registers, spilled = resources(path)
        most, least = kernels.get(path.stem, (0, spilled))
        kernels[path.stem] = max(most, registers), min(least, spilled)
    spilled = {name: spill for name, (_, spill) in kernels.items() if spill}
    return {"kernels": len(kernels),
            "registers": max((registers for registers, _ in kernels.values()), default=0),
            "wrong": {"spilled bytes": spilled} if spilled else {}}


def compile_both_passes(formula, arguments):
    """Compile a formula and its gradient, and end before either runs: nothing could."""
    # seconds of imports
    import torch._functorch.config
    from torch._inductor import compile_fx

    compiled = []

    def compile_pass(*args, **options):
        compiled.append(compile_fx.compile_fx_inner(*args, **options))
        if len(compiled) == 2:
            raise KeyboardInterrupt
        return compiled[0]

    backend = functools.partial(compile_fx.compile_fx, inner_compile=compile_pass)
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        try:
            torch.compile(formula, backend=backend, dynamic=True)(*arguments)
        except KeyboardInterrupt:
            return
    raise RuntimeError("the gradient was not compiled")


def formula_of(name):
    """Return (what is compiled of a loss, its arguments); of piece_kl it is the roots."""
    def logits(width, dtype):
        return torch.empty(ROWS, width, device="cuda", dtype=dtype)

    if name == "piece_kl":
        compare = functools.partial(formulas.forward_kl, reduction="none")
        sizes = VOCAB, VOCAB, CELLS, CELLS, CELLS // 100, VOCAB - CELLS, CELLS // 100 + 1
        dtypes = 2 * (torch.long, torch.bool) + 3 * (torch.long,)
        columns_V = formulas.Columns(*[torch.zeros(size, dtype=dtype, device="cuda")
                                       for size, dtype in zip(sizes, dtypes)])
        x_NV = logits(VOCAB, torch.float32).requires_grad_()
        return translation.root_values, (x_NV, logits(CELLS, torch.float32), columns_V, compare)
    pair = [logits(VOCAB, torch.bfloat16)[None] for _ in range(2)]
    pair[0].requires_grad_()
    return lambda x, y: getattr(formulas, name)(x, y, None)[0], pair


def resources(path):
    """Return (registers, spilled bytes) of a thread of a kernel."""
    from triton import knobs  # what compiled it, which may be of CUDA's toolkit

    done = subprocess.run(
        [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={ARCHITECTURE}", "-o", os.devnull, path],
        capture_output=True, text=True, check=True)
    [registers] = re.findall(r"Used (\d+) registers", done.stderr)
    return int(registers), sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))


def print_all(lines):
    """Print lines that are made one by one, and end with status 1 where something is wrong."""
    if "DRY_GPU" not in os.environ:
        sys.exit(run_with_stand_ins())
    wrong = 0
    for line in lines:
        print(json.dumps(line), flush=True)
        wrong += len(line["wrong"])
    os._exit(bool(wrong))  # threads of a device that is not there do not end


def main(losses="", cases="", traffic="all",
         copies="piece_kl,projection_kl,gold,uld,alm,forward_kl",
         compiled="piece_kl,forward_kl,reverse_kl,generalized_jsd"):
    """Run everything, or what is named, with commas."""
    print_all(itertools.chain(
        step_lines(as_list(losses or list(LOSSES)), as_list(cases or list(CASES))),
        map(bytes_line, list(BOUNDS) if traffic == "all" else as_list(traffic)),
        map(copies_line, as_list(copies)), compiled_lines(as_list(compiled))))


if __name__ == "__main__":
    fire.Fire(main)
