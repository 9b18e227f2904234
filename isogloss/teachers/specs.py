"""Describe teacher sources by plain values that ranks can send to one another."""

import contextlib
from dataclasses import dataclass, field, fields

from safetensors import SafetensorError

from isogloss.projection_tools.tokenizers import reason_of

TEACHER_OUTPUTS = "hidden", "logits", "topk"
# Positions whose logits exist at a time where no tile bounds them: 150 MB of 152k float32.  Not
# tuned: more positions save calls, fewer save memory.
BLOCK = 256


@dataclass
class TeacherSpec:
    """Describe a teacher to load, and how it will be asked.

    Attributes:
        path: hub id or directory; of an ensemble its name.
        vocab: tokens of its tokenizer; an lm_head is often padded beyond them.
        engine: key of `teachers.TEACHER_SOURCES`, or "auto".
        dtype: "auto" (as in the checkpoint), "float32", "bfloat16" or "float16".
        attention: one of ATTENTIONS.
        device: torch.device; None: to be filled in by the rank that loads it.
        degree: ranks that share the model.
        offload: keep the weights in the host's memory but for the teacher's forward passes.
        compile: let torch.compile make its forward pass.
        output: what is kept until a loss reads it: final "hidden" states, "logits", or "topk".
        output_topk: tokens of the output "topk"; all others together are one event.
        rest_temperature: by which the loss divides such logits.
        reads_draws: of a cached teacher, the loss takes tokens that were drawn for all others.
        same_ids: the ranks that share the model ask with the same ids; else each with its own.
        sequence_parallel_size: neighboring ranks that ask with the same ids.
        trust_remote_code: run the Python code that comes with the model.
        members, weights, space: of an ensemble, see `teachers.EnsembleTeacher`.
        cache: of a cached teacher, the folder.
        tokenizer: of a served teacher, whose path is an address: what holds tokenizer and config.
        timeout, connections: likewise, see `text_server.TextServer` and `Requests`.
        number: of a remote teacher, its place among all of the job.
        client: of a remote teacher, `remote_teachers.TeacherClient`.
    """

    path: str
    vocab: int
    engine: str = "replicated"
    dtype: str = "auto"
    attention: str = "auto"
    device: object = "cpu"
    degree: int = 1
    offload: bool = False
    compile: bool = False
    output: str = "hidden"
    output_topk: int = 256
    rest_temperature: float = 1.0
    reads_draws: bool = False
    same_ids: bool = False
    sequence_parallel_size: int = 1
    trust_remote_code: bool = False
    members: list = field(default_factory=list)
    weights: list = field(default_factory=list)
    space: str = "p"
    cache: str = ""
    tokenizer: str = ""
    timeout: float = 600.0
    connections: int = 8
    number: int = 0
    client: object = None

    def to_plain(self):
        """Return what `from_plain` takes, for JSON: all but the device, the client and members."""
        plain = {}
        for attribute in fields(self):
            if attribute.name not in ("device", "client", "members"):
                plain[attribute.name] = getattr(self, attribute.name)
        return plain

    @classmethod
    def from_plain(cls, plain):
        """Return the TeacherSpec that `to_plain` described."""
        return cls(**plain)

    def single(self):
        """List the specs of the teachers in this one: its members, or itself."""
        return self.members or [self]

    @property
    def is_truncated(self):
        """Tell whether its rows, or those of a member, keep some tokens alone."""
        return any(spec.output == "topk" for spec in self.single())

    @property
    def averages_top_k(self):
        """Tell whether it is the mean of teachers of which some keep their top-k tokens alone."""
        return any(member.output == "topk" for member in self.members)


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
