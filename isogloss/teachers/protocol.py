"""Say what a kind of teachers has to bring: a TeacherSpec, and the TeacherSource that it loads.

A kind is one file with these two classes and one entry in `kinds.TEACHER_KINDS`.  Whoever needs to
know something of a teacher asks its spec; nobody else compares kinds.  The third interface, what a
source returns, is `tiles.LogitsSource`.  See docs/architecture.md.

Shapes: B rows, T teacher positions, W teacher vocabulary, n positions asked for.
"""

import contextlib
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from safetensors import SafetensorError

from isogloss.projection_tools.tokenizers import reason_of
from isogloss.tiles import LogitsSource

# Positions whose logits exist at a time where no tile bounds them: 150 MB of 152k float32.  Not
# tuned: more positions save calls, fewer save memory.
BLOCK = 256
# Flags of what only a model that this job loads can be told.
FLAGS_OF_MODELS = "teacher_engine", "teacher_tp", "teacher_dtype", "teacher_offload"


@dataclass
class TeacherSpec:
    """Describe a teacher of one kind by plain values, and tell what others need to know of it.

    Attributes:
        path: what the flags call it; of an ensemble "mean".
        vocab: tokens of its tokenizer; an lm_head is often padded beyond them.
        device: torch.device on which a loss reads it.
        output: what is kept until then: final "hidden" states, "logits", or "topk", which is
            `text_scores.ScoredLogits`.

    What a kind says of all its teachers:
        prefix: --teacher begins with it; empty: see `takes`.
        has_weights: ranks of this job run a model, on ranks of its own if the flags say so.
        takes_tokenizer: --teacher_tokenizer names its tokenizer and config.
        lasting_name: stands for --teacher where a run resumes; empty: it has to be the same.
        only_output: what they give whatever --teacher_output says; empty: more than one.

    And what a spec says of itself:
        is_shared: it takes several ranks to answer, which are all asked together.
        asked_late: a rank may ask when the loss needs it, without waiting for weights or others.
        asks_ahead: it works elsewhere, beside the student, so it is asked a step before.
        reads_keys: it looks texts up by TeacherBatch.keys.
        reads_draws: it holds tokens that were drawn, which the loss takes for all others.
        averages_top_k: it is the mean of teachers of which some keep their top-k tokens alone.
        unknown_metrics: of an evaluation, which do not follow from what it gives.
    """

    path: str
    vocab: int
    device: object = "cpu"
    output: str = "logits"

    prefix: ClassVar[str] = ""
    has_weights: ClassVar[bool] = False
    takes_tokenizer: ClassVar[bool] = True
    lasting_name: ClassVar[str] = ""
    only_output: ClassVar[str] = ""
    is_shared = False
    asked_late = True
    asks_ahead = False
    reads_keys = False
    reads_draws = False
    averages_top_k = False
    unknown_metrics = ()

    # --- of the kind: what the flags of a run with this teacher alone say (cfg: its Config) ---

    @classmethod
    def takes(cls, cfg):
        """Tell whether the flags name a teacher of this kind."""
        return bool(cls.prefix) and cfg.teacher.startswith(cls.prefix)

    @classmethod
    def check(cls, cfg):
        """Raise a ValueError where flags do not go together; no file is read."""
        reasons = dict.fromkeys(FLAGS_OF_MODELS, "which is for a model that this job loads")
        refuse(cfg, f"--teacher {cfg.teacher}", reasons | {"teacher_ranks": "which hold a model"})
        if not cfg.teacher_tokenizer:
            raise ValueError(f"--teacher {cfg.teacher}: brings no tokenizer, and is asked with "
                             "token ids; name the directory or hub id of its tokenizer and config "
                             "with --teacher_tokenizer")

    @classmethod
    def tokenizer_path(cls, cfg):
        """Return the hub id or directory of the teacher's tokenizer and config."""
        return cfg.teacher_tokenizer or cfg.teacher

    @classmethod
    def encoder(cls, cfg, load, student, roles):
        """Return the TextEncoder of the teacher, once all that the flags name is checked.

        All ranks take part; weights are not read.

        Args:
            load: function that returns (TextEncoder, AutoConfig) of `tokenizer_path`.
            student: TextEncoder; None: there is no student.
            roles: `roles.Roles` where teachers have ranks of their own, or None.
        Raises:
            ValueError: what arrived, what was expected, what to do.
        """
        return load()[0]

    @classmethod
    def check_data(cls, cfg, parts):
        """Raise a ValueError where the teacher does not know the texts, see `RunData.parts`."""

    @classmethod
    def of(cls, cfg, encoder, device, student=None):
        """Return the spec of a teacher; encoder, student: as above."""
        return cls(cfg.teacher.removeprefix(cls.prefix), len(encoder.table), device)

    # --- of a teacher ---

    def load(self):
        """Return its TeacherSource; see `load_teacher`."""
        raise NotImplementedError(f"{type(self).__name__} loads no source")

    def silent(self):
        """Return the TeacherSource of a rank that computes no loss; None: it has no part in it."""
        return load_teacher(self) if self.is_shared else None

    def single(self):
        return [self]

    def with_models(self, replaced):
        """Return the same with `replaced(spec)` in place of each spec that has weights."""
        return replaced(self) if self.has_weights else self

    @property
    def is_truncated(self):
        return self.output == "topk"


class TeacherSource(Protocol):
    """Give a teacher's logits.

    All ranks that train make the same calls in the same order.  A subclass needs `targets`; the
    other methods do nothing unless it says otherwise.
    """

    def request(self, batch) -> None:
        """Start what `targets` of this TeacherBatch will return; may come a whole step before."""

    def wait(self, batches) -> None:
        """Wait for the answers of a step; all ranks take part, and raise the EngineError of any."""

    def end_when(self, asked_to_end) -> None:
        """Wait for what may take long only until asked_to_end() is true."""

    def targets(self, batch) -> LogitsSource:
        """Return logits of any positions of a TeacherBatch, valid until `release`."""

    def whole_targets(self, batch) -> LogitsSource:
        """Return what `targets` does with whole distributions, where it truncates them."""
        return self.targets(batch)

    def on_device(self) -> contextlib.AbstractContextManager:
        """Return a context in which many `targets` cost one transfer of offloaded weights."""
        return contextlib.nullcontext()

    def release(self) -> None:
        """Allow the memory of all targets returned so far to be written over."""

    def close(self) -> None:
        """End the source, after the last step."""

    def follow(self, student) -> None:
        """Take over what an optimizer step made of the student (`StudentWithLoss`), if it is one.

        All ranks take part.
        """

    def save(self, path) -> None:
        """Write what the steps made of it, if anything, to a file (Path) of a checkpoint."""

    def restore(self, path, student) -> None:
        """Read what `save` has written, beside the student of the same checkpoint.

        Args:
            path: None: the run begins.
        """

    def models(self) -> list:
        """List the sources in this one whose own logits can be asked for, to check them."""
        return []


def load_teacher(spec):
    """Return the TeacherSource of a TeacherSpec; all ranks take part in those that are shared.

    Raises:
        ValueError: its weights cannot be loaded.
    """
    # whatever a library draws while it loads changes no random numbers of the run
    with weights_of("teacher", spec.path), torch.random.fork_rng():
        return spec.load()


def refuse(cfg, where, reasons):
    """Raise a ValueError for the first flag of {name: reason} that has another value than most."""
    for name, reason in reasons.items():
        if getattr(cfg, name) != getattr(type(cfg), name):
            raise ValueError(f"{where} with --{name} {getattr(cfg, name)}, {reason}; leave out one "
                             "of them")


@contextlib.contextmanager
def weights_of(role, path):
    """Turn an error of reading files into a ValueError that names the flag.

    Raises:
        ValueError: a directory has a config, and no weights that can be read.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"--{role} {path}: its weights cannot be loaded ({reason_of(error)})") from None
