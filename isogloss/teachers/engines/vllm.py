"""Let vLLM run a teacher: a process beside the job makes the final hidden states of texts.

`--teacher_engine vllm` takes the vLLM of this environment, and a command that of another one, as
`--teacher_engine "/env/bin/python -m isogloss.vllm_teacher"`.  The first of the ranks that share a
copy (`--teacher_tp`) starts it on their GPUs and asks for the texts of all of them at once.  The
head stays with the ranks, read from the checkpoint.  What is said, after what engine_process.py
says:

    {"do": "load", "model": path, "revision": name or null, "tokenizer": directory without words,
     "dtype": "bfloat16", "max_length": 2048, "ranks": 1, "memory": 0.3,
     "trust_remote_code": false}                            -> {"width": H, "dtype": "bfloat16"}
    {"do": "read", "texts": [[id, ...], ...], "rows": [first row of each text, ...],
     "into": handle of an (N, H) tensor}                    -> {"done": number of rows written}

Before the first step the logits of a few ids are compared with those of transformers' own layers,
where the model fits the memory that is free beside the engine.

Tests: tests/test_teacher_engine.py, tests/test_vllm.py.
"""

import importlib.util
import os
import shlex
import sys
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from isogloss.errors import EngineError
from isogloss.flags.model_names import read_model_name
from isogloss.job import ipc
from isogloss.job.commands.engine_process import (
    LOADING_SECONDS,
    EngineProcess,
    is_program,
    shortened,
)
from isogloss.job.rendezvous import values_of_ranks
from isogloss.models import pretrained
from isogloss.models.tied import empty_model
from isogloss.teachers.engines.replicas import Replica
from isogloss.teachers.engines.sharded import (
    check_files,
    head_with,
    local_folder,
    once_per_node,
)
from isogloss.teachers.engines.whole import (
    ModelTeacher,
    config_of,
    dtype_of,
    frozen,
    load_weights,
)
from isogloss.tiles import Head, HiddenLogits

OWN_MEMORY = 0.9  # of a GPU that the engine has for itself; as vLLM's own default
SHARED_MEMORY = 0.3  # of one where the student is, too; not tuned
PROBES = 2, 48  # texts and ids that are compared with transformers
DTYPES = "float32", "bfloat16", "float16"  # of hidden states
SPARE = 1.2  # times the size of its files that a model needs to be loaded; not tuned


def command_of(engine):
    """Return the command of an --teacher_engine."""
    if engine == "vllm":
        return shlex.join([sys.executable, "-m", "isogloss.vllm_teacher"])
    return engine


def check_engine(spec):
    """Raise a ValueError where such a teacher cannot be: what arrived, and what to do.

    Args:
        spec: ModelSpec, or a Config with flags of the same names.
    """
    where = f"--teacher_engine {spec.engine}"
    if spec.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ValueError(f"{where}: there is no vllm here; install it, or name a Python that has "
                         'it: --teacher_engine "/env/bin/python -m isogloss.vllm_teacher"')
    if not is_program(command_of(spec.engine)):
        raise ValueError(f"{where}: no engine and no program of this name; expected auto, "
                         "replicated, tensor_parallel, transformers, zero3, vllm, or an "
                         'interpreter and what it runs, as "/env/bin/python -m '
                         'isogloss.vllm_teacher"')
    if spec.offload:
        raise ValueError(f"--teacher_offload with {where}, whose memory is its own; leave it out, "
                         "or give its command the option --sleep")
    if spec.compile == "true":
        raise ValueError(f"--teacher_compile true with {where}, which compiles its layers by "
                         "itself; leave it out")
    if read_model_name("teacher", spec.path).adapter is not None:
        raise ValueError(f"{where} with {spec.path}, an adapter; merge it into its base model "
                         "first, or leave the engine to auto")


class TeacherProcess(EngineProcess):
    """Ask an engine for hidden states; used by the first rank of a replica.

    Attributes:
        width: H, known once it has loaded; dtype: of the hidden states.
        shared: (N or more, H) the memory that it writes into, or None.
    """

    width = 0
    dtype = torch.float32
    shared = None

    def load(self, spec, num_ranks, width):
        """Let it load a teacher, whose head reads `width` numbers; return once it has."""
        name = read_model_name("teacher", spec.path)
        write_tokenizer(self.folder)
        loaded = self.ask(
            LOADING_SECONDS, do="load", model=name.base, revision=name.revision,
            tokenizer=self.folder, dtype=dtype_name(spec), max_length=spec.max_length,
            ranks=num_ranks, memory=OWN_MEMORY if spec.same_ids else SHARED_MEMORY,
            trust_remote_code=spec.trust_remote_code)
        self.width, dtype = width, loaded.get("dtype")
        if loaded.get("width") != width or dtype not in DTYPES:
            raise self.error(f"answered {shortened(loaded)}; expected the width {width} and a "
                             f"dtype of {', '.join(DTYPES)}")
        self.dtype = getattr(torch, dtype)

    def read(self, texts, rows, num_rows):
        """Let (num_rows, H) hidden states be in `shared`, until the next call; 0 where no text is.
        """
        if self.shared is None or len(self.shared) < num_rows:
            self._make_memory(num_rows)
        hidden = self.shared[:num_rows]
        hidden.zero_()
        for first, ids in zip(rows, texts):
            hidden[first : first + len(ids)] = torch.nan
        response = self.ask(self.timeout, do="read", texts=texts, rows=rows,
                            into=self.handles["hidden"].to_plain())
        expected = sum(map(len, texts))
        if response.get("done") != expected:
            raise self.error(f"answered {shortened(response)}; expected {expected} rows done")
        if bool(hidden.isnan().any()):
            raise self.error("left rows as they were, or wrote NaN; its model may be damaged, or "
                             "its precision too narrow (--teacher_dtype float32)")

    def _make_memory(self, num_rows):
        if "hidden" in self.handles:
            ipc.release(self.handles.pop("hidden"))
        # host memory: vLLM hands over there what it pools
        self.handles["hidden"] = ipc.publish(torch.empty(num_rows, self.width, dtype=self.dtype))
        self.shared = ipc.attach(self.handles["hidden"])


@dataclass
class ProcessRunner:
    """Return what an engine makes of ids; a call takes all ranks of the replica.

    Attributes:
        process: TeacherProcess, on the first rank of the replica, else None.
        device: torch.device of this rank; max_length: of a text.
        same_ids, sequence_parallel_size: see `ModelSpec`.
        is_apart: its ranks have nothing else to do, and are asked replica by replica.
        head: of the model.
        views: {name of shared memory: as this rank sees it}.
    """

    process: TeacherProcess | None
    replica: Replica
    device: object
    max_length: int
    same_ids: bool
    sequence_parallel_size: int
    is_apart: bool
    head: Head
    views: dict = field(default_factory=dict)

    def __call__(self, ids, hidden=True):
        """Return (B, T, H) hidden states, or (B, T, W) logits that the head makes of them.

        Raises:
            EngineError: on every rank that asks at the same time.
        """
        members, number = [ids], 0
        if not self.same_ids:
            # ranks of one sequence group have the same ids, which are read once
            num_sharing = gcd(self.sequence_parallel_size, len(self.replica.ranks))
            members = self.replica.gather(ids)[::num_sharing]
            number = self.replica.ranks.index(dist.get_rank()) // num_sharing
        sizes = [member.shape[-2] * member.shape[-1] for member in members]
        plain = self._ask(members, sizes)
        first = sum(sizes[:number])
        states = self._view(plain)[first : first + sizes[number]].to(self.device, copy=True)
        states = states.view(*ids.shape[-2:], -1)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.same_ids:  # nobody waits for the ids of others before the engine writes again
            dist.barrier(self.replica.group)
        if hidden:
            return states
        positions = torch.arange(states.shape[0] * states.shape[1], device=self.device)
        return HiddenLogits(states.flatten(0, 1), self.head)(positions).view(*ids.shape[-2:], -1)

    def _ask(self, members, sizes):
        """Return the handle of the hidden states of all members, as plain values."""
        problem, plain = "", None
        if self.process:
            try:
                self.process.read(*texts_of(members, self.max_length), sum(sizes))
                plain = self.process.handles["hidden"].to_plain()
            except EngineError as error:
                problem = str(error)
        problem, plain = values_of_ranks([problem, plain], self.replica.group)[0]
        if not self.is_apart:  # whose other replicas may not be asked now
            has_failed = torch.tensor(int(bool(problem)), device=self.device)
            dist.all_reduce(has_failed, dist.ReduceOp.MAX)
            if has_failed:
                problem = max(values_of_ranks(problem))
        if problem:
            raise EngineError(problem)
        return plain

    def _view(self, plain):
        if self.process:
            return self.process.shared
        name = str(plain)
        if name not in self.views:
            self.views = {name: ipc.attach(ipc.Handle.from_plain(plain))}
        return self.views[name]


class EngineTeacher(ModelTeacher):
    """Run a teacher by an engine."""

    def close(self):
        if self.runner.process:
            self.runner.process.shared = None
            self.runner.process.close()


def load_engine(spec):
    """Start an engine for each replica and return the teacher; all ranks take part.

    Raises:
        ValueError, EngineError: it cannot start or load, or gives other logits than transformers.
    """
    check_engine(spec)
    replica = Replica(spec.degree)
    expected, why_not = logits_of_transformers(spec) if dist.get_rank() == 0 else (None, "")
    devices = values_of_ranks(torch.device(spec.device).index or 0, replica.group)
    head = head_of_files(spec)
    process, problem = None, ""
    if replica.ranks[0] == dist.get_rank():
        process = TeacherProcess("--teacher_engine", command_of(spec.engine),
                                 **visible(devices, spec.device))
        try:
            process.load(spec, len(replica.ranks), head.weight_VH.shape[1])
        except EngineError as error:
            problem = str(error)
    problem = max(values_of_ranks(problem))
    if problem:
        if process:
            process.close()
        raise EngineError(problem)
    same_ids = spec.same_ids or spec.sequence_parallel_size % spec.degree == 0
    runner = ProcessRunner(process, replica, torch.device(spec.device), spec.max_length, same_ids,
                           spec.sequence_parallel_size, spec.same_ids, head)
    teacher = EngineTeacher(runner, head, spec, "vllm", 0, spec.degree)
    compare(teacher, expected, why_not)
    return teacher


def texts_of(members, max_length):
    """Return (texts, first row of each) of the ids of several members, see `whole.model_input`.

    Rows are those of all positions, member by member.  Each document of a packed row is a text.
    What stands behind max_length positions of a document is padding.
    """
    texts, rows = [], []
    first = 0
    for member in members:
        ids_BT, positions_BT = member.cpu() if member.dim() == 3 else (member.cpu(), None)
        num_rows, width = ids_BT.shape
        for row in range(num_rows):
            begins = [0]
            if positions_BT is not None:
                begins += ((positions_BT[row].diff() != 1).nonzero().flatten() + 1).tolist()
            for begin, end in zip(begins, [*begins[1:], width]):
                end = min(end, begin + max_length)
                texts.append(ids_BT[row, begin:end].tolist())
                rows.append(first + row * width + begin)
        first += num_rows * width
    return texts, rows


def visible(devices, device):
    """Return the variables of an environment in which a process sees the GPUs of a replica."""
    if torch.device(device).type != "cuda":
        return {}
    all_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [all_devices[number] if number < len(all_devices) and all_devices[number]
             else str(number) for number in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def dtype_name(spec):
    """Return the dtype that an engine is told; of quantized weights it decides by itself."""
    if pretrained.quantization_of(config_of(spec)):
        return "auto"
    return str(dtype_of(spec)).removeprefix("torch.")


def write_tokenizer(folder):
    """Write a tokenizer without words: an engine wants one, and is asked in ids alone."""
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    Path(folder, "config.json").write_text('{"model_type": "llama"}\n')


def head_of_files(spec):
    """Return the Head of a model whose layers an engine holds; every rank of the job takes part.

    Raises:
        ValueError: no file has it.
    """
    model = empty_model(pretrained.config_of_weights("teacher", spec.path, spec.trust_remote_code),
                        spec.trust_remote_code)
    names = {id(module): name for name, module in model.named_modules()}
    folder, dtype = local_folder(spec.path), dtype_of(spec)
    check_files(folder)

    def load():
        weight, bias = None, None
        for layer in (model.get_output_embeddings(), model.get_input_embeddings()):
            if weight is None:  # the first is not in the files where both are one
                weight, bias = _read_layer(folder, names[id(layer)], dtype)
        if weight is None:
            raise ValueError(f"--teacher {spec.path}: no file has its output embeddings "
                             f"({names[id(model.get_output_embeddings())]}); leave "
                             "--teacher_engine to auto")
        return weight, bias

    return head_with(*once_per_node(load, spec.device), spec)


def _read_layer(folder, name, dtype):
    """Return (weight, bias) of a layer; None for what the files lack, such as a tied head."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():
                if key in (f"{name}.weight", f"{name}.bias"):
                    tensors[key] = file.get_tensor(key).to(dtype)
    return tensors.get(f"{name}.weight"), tensors.get(f"{name}.bias")


# --- whether it says what the model says ----------------------------------------------------------


def probe(spec):
    """Return (B, T) ids of the whole vocabulary, always the same."""
    rows, width = PROBES
    draw = torch.Generator().manual_seed(0)
    width = min(width, spec.max_length)
    return torch.randint(spec.vocab, (rows, width), generator=draw)


@torch.no_grad()
def logits_of_transformers(spec):
    """Return ((B * T, W) logits of `probe`, None), or (None, why they are not known)."""
    method = pretrained.quantization_of(config_of(spec))
    if method:
        return None, f"its weights are quantized ({method})"
    size = SPARE * sum(file.stat().st_size
                       for file in local_folder(spec.path).glob("*.safetensors"))
    device = torch.device(spec.device)
    if device.type == "cuda" and size > torch.cuda.mem_get_info(device)[0]:
        device = torch.device("cpu")
    if device.type == "cpu" and size > free_memory():
        return None, f"transformers would need {size / 2**30:.0f} GiB of memory for that"
    model = frozen(load_weights(spec)).to(device)
    logits = model(input_ids=probe(spec).to(device), use_cache=False).logits
    return logits[..., : spec.vocab].flatten(0, 1).float().cpu(), None


def free_memory():
    """Return the bytes of this host that are free."""
    [line] = [line for line in Path("/proc/meminfo").read_text().splitlines()
              if line.startswith("MemAvailable")]
    return 1024 * int(line.split()[1])


def compare(teacher, expected, why_not):
    """Print how far the engine's logits are from transformers'; all ranks take part.

    Args:
        expected: (B * T, W) on rank 0, or None; why_not: they are None.
    Raises:
        ValueError: they are others.
    """
    logits = teacher.logits(probe(teacher.spec).to(teacher.spec.device))
    difference = 0.0
    limit = 1e-4 if logits.dtype == torch.float32 else 0.05  # relative, as of a head
    name = f"--teacher {teacher.spec.path}, by {teacher.spec.engine}"
    if why_not:
        print(f"{name}: not compared with transformers' own layers, {why_not}", flush=True)
    elif expected is not None:
        logits = logits.flatten(0, 1)[..., : teacher.spec.vocab].float().cpu()
        difference = float((logits - expected).norm() / expected.norm())
        print(f"{name}: its logits differ from transformers' by {difference:.2g} of their size "
              f"(at most {limit:g})", flush=True)
    difference = max(values_of_ranks(difference))
    if not difference <= limit:  # NaN too
        teacher.close()
        raise ValueError(f"{name}: its logits differ from transformers' by {difference:.2g} of "
                         f"their size, at most {limit:g} is rounding; use another version of the "
                         "engine, or --teacher_engine auto")
