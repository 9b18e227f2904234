"""Run teachers on ranks of their own, and let the student's ranks ask them.

The last ranks of a node hold its teachers (`--teacher_ranks`), the others the student.  A rank of
the student writes token ids into its `ipc.TensorWriter`, which all teacher ranks of the node read.
The responses are in TensorWriters of the teacher ranks, and the loss reads them in place.  A
`request` may come long before `targets`, so teachers run on the next step while the student trains
on this one.

All ranks of the student ask the same teachers for the same outputs in the same order, as they do
the same steps.  Ranks that hold shards of the same sequences are one client: the first of them
asks, all of them read.  In round k the node's teacher ranks serve request k of every client: with
R replicas of a teacher, replica r serves clients r, r + R, ...
"""

import contextlib
import itertools
import signal
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

from isogloss.errors import EngineError
from isogloss.job import ipc
from isogloss.job.launch import fail_alone, fail_together
from isogloss.job.rendezvous import TRAINING_TIMEOUT
from isogloss.job.watch import STOP_SIGNALS, current_watch
from isogloss.teachers.engines.whole import TeacherOfIds, model_input
from isogloss.teachers.group import load_silent
from isogloss.teachers.model import ModelSpec
from isogloss.teachers.protocol import TeacherSpec, load_teacher
from isogloss.teachers.text_scores import ScoredLogits, TextScores
from isogloss.tiles import Head, HiddenLogits, ShardedLogits, StoredLogits, TopKLogits

# What a request may ask for: a ModelSpec's output, or the model's own logits, to check its head.
KINDS = "hidden", "logits", "topk", "model_logits"
TENSORS_PER_RESPONSE = {"hidden": 1, "logits": 1, "topk": 5}
# A student that reads a stream again is silent for long; one that died is noticed by its process.
NO_TIMEOUT = float("inf")
RESPONSE_TIMEOUT = TRAINING_TIMEOUT.total_seconds()  # as for a collective
SHUT_DOWN = -1  # in place of a teacher's number


class Request(NamedTuple):
    """State what a client asks for, as it is sent: six integers, the ids, of "topk" the labels.

    Attributes:
        teacher: its number in the job, or SHUT_DOWN.
        kind: index into KINDS.
        top_k: tokens of "topk".
        parts, rows, width: shape of the ids: 1 part, or 2 with the positions of packed rows.
    """

    teacher: int
    kind: int = 0
    top_k: int = 0
    parts: int = 1
    rows: int = 0
    width: int = 0

    @classmethod
    def of(cls, teacher, kind, top_k, ids):
        shape = ids.view(-1, *ids.shape[-2:]).shape
        return cls(teacher, KINDS.index(kind), top_k, *shape)

    def tensor(self, ids, labels=None):
        """Return header, ids and labels, if there are any, as one (6 + n,) int64 tensor."""
        tensors = [torch.tensor(self), ids.cpu().flatten()]
        if labels is not None:
            tensors.append(labels.cpu().flatten())
        return torch.cat(tensors)


class SharedTeacher(NamedTuple):
    """Describe one teacher to the student's ranks, in what JSON can express.

    Attributes:
        weight, bias: ipc.Handle, as plain values, of the head's tensors; bias may be None.
        scale, softcap, vocab: see `tiles.Head`.
        degree: ranks that share the model.
    """

    weight: dict
    bias: dict | None
    scale: float
    softcap: float
    vocab: int
    degree: int

    @classmethod
    def of(cls, teacher):
        """Return that of a ModelTeacher, whose head every rank of the student maps."""
        head = teacher.head
        weight, bias = [None if tensor is None else ipc.publish(tensor).to_plain()
                        for tensor in (head.weight_VH, head.bias_V)]
        return cls(weight, bias, head.scale, head.softcap, head.vocab, teacher.degree)


# --- the teachers' side ---------------------------------------------------------------------------


def client_roles(roles, pipeline_parallel):
    """Return Roles as if the last stages of the pipelines were all ranks of the student.

    The others ask no teacher.
    """
    return roles._replace(
        student_ranks=roles.student_ranks // pipeline_parallel,
        local_rank=roles.local_rank // pipeline_parallel if roles.role == "student"
        else roles.local_rank)


def client_size(roles, sequence_parallel_size):
    """Return the student's ranks that are one client: a sequence group, if it is on one node."""
    return 1 if roles.student_ranks % sequence_parallel_size else sequence_parallel_size


def serve_requests(roles, teachers, ranks_per_client=1, from_hidden=True):
    """Respond to the student's ranks of this node until one of them shuts down.

    Args:
        teachers: `ModelTeacher` of every teacher of the job, loaded with `same_ids`.
        from_hidden: logits are what a teacher's head makes of its hidden states; else the model's
            own.
    Raises:
        ipc.PeerDied: a rank of the student has ended without shutting down.
    """
    if roles.local_rank == 0:
        roles.publish("teachers", list(map(SharedTeacher.of, teachers)))
    readers = []
    writers = []
    for client in range(roles.student_ranks // ranks_per_client):
        plain, slots = roles.read(f"requests of {client}")
        handle = ipc.WriterHandle.from_plain(plain)
        readers.append(ipc.TensorReader(handle, roles.local_rank, timeout=NO_TIMEOUT))
        writers.append(ipc.TensorWriter(ranks_per_client, slots, timeout=NO_TIMEOUT))
        plain = writers[-1].handle.to_plain()
        roles.publish(f"responses of {roles.local_rank} to {client}", plain)
    while True:
        # one request of every client makes a round
        requests = [_read_request(reader) for reader in readers]
        first = requests[0].request  # all clients ask the same teacher for the same kind
        if first.teacher == SHUT_DOWN:
            return
        teacher = teachers[first.teacher]
        replica, member = divmod(roles.local_rank, teacher.degree)
        num_replicas = roles.teacher_ranks // teacher.degree
        for first_client in range(0, len(requests), num_replicas):
            client = first_client + replica
            if client < len(requests):
                for tensor in _respond(teacher, *requests[client], member, from_hidden):
                    writers[client].put(tensor)
            elif teacher.takes_all_ranks:  # the others wait for this one's forward pass
                _respond(teacher, *requests[-1], member, from_hidden)


class ReadRequest(NamedTuple):
    """Hold a request as it arrives.

    request: Request.
    ids: (B, T) or (2, B, T), see `model_input`.
    labels: (B, T), or None where none were sent.
    """

    request: Request
    ids: torch.Tensor
    labels: torch.Tensor | None


def _read_request(reader):
    with reader.take() as tensor:
        numbers = tensor[: len(Request._fields)].tolist()
        request = Request(*numbers)
        # a copy, because the client may write over the request after this block
        values = tensor[len(numbers) :].clone()
        num_ids = request.parts * request.rows * request.width
        ids = values[:num_ids].view(request.parts, request.rows, request.width)
        labels = None
        if KINDS[request.kind] == "topk":
            labels = values[num_ids:].view(request.rows, request.width)
        return ReadRequest(request, ids if request.parts == 2 else ids.flatten(0, 1), labels)


@torch.no_grad()
def _respond(teacher, request, ids, labels, member, from_hidden):
    """Return the tensors that this member of a replica publishes; all of them compute."""
    head = teacher.head
    kind = KINDS[request.kind]
    ids = ids.to(head.weight_VH.device)
    if kind == "logits":  # every member publishes a shard of the vocabulary
        low = head.vocab * member // teacher.degree
        high = head.vocab * (member + 1) // teacher.degree
        if not from_hidden:
            return [teacher.logits(ids)[..., low:high].flatten(0, 1)]
        bias = None if head.bias_V is None else head.bias_V[low:high]
        shard = head._replace(weight_VH=head.weight_VH[low:high], bias_V=bias, vocab=0)
        return [shard.finish(shard.linear(teacher.hidden(ids).flatten(0, 1)))]
    if kind == "topk":
        scored = teacher.read(ids, kind, request.top_k, labels.to(ids.device))
        logits = scored.logits
        tensors = [logits.ids_TK, logits.logp_TK, logits.rest_T, logits.total_T,
                   scored.scores.packed()]
    else:
        tensors = [teacher.hidden(ids) if kind == "hidden" else teacher.logits(ids)]
    return tensors if member == 0 else []  # every member has the same


# --- the student's side ---------------------------------------------------------------------------


class TeacherClient:
    """Connect one rank of the student to the teachers of its node.

    Attributes:
        teachers: SharedTeacher of every teacher of the job.
    """

    def __init__(self, roles, num_requests, device, ranks_per_client=1, tensors_per_response=1):
        """Connect; all ranks of the student and of the teachers take part.

        Args:
            num_requests: that may be under way, or answered and not released.
            device: where the student reads responses; on the teacher's device nothing is copied.
        """
        self.roles = roles
        self.device = device
        self.pending = deque()  # requests sent, in order, whose responses were not read yet
        self.client, place = divmod(roles.local_rank, ranks_per_client)
        self.writer = None
        if place == 0:
            self.writer = ipc.TensorWriter(roles.teacher_ranks, num_requests,
                                           timeout=RESPONSE_TIMEOUT)
            slots = tensors_per_response * num_requests
            plain = self.writer.handle.to_plain()
            roles.publish(f"requests of {self.client}", (plain, slots))
        self.readers = []
        for rank in range(roles.teacher_ranks):
            handle = ipc.WriterHandle.from_plain(
                roles.read(f"responses of {rank} to {self.client}"))
            self.readers.append(ipc.TensorReader(handle, place, timeout=RESPONSE_TIMEOUT))
        self.teachers = [SharedTeacher(*plain) for plain in roles.read("teachers")]

    def head_of(self, number):
        """Return the Head of a teacher, mapped from its rank's memory."""
        shared = self.teachers[number]
        tensors = [None if plain is None else ipc.attach(ipc.Handle.from_plain(plain))
                   for plain in (shared.weight, shared.bias)]
        tensors = [None if tensor is None else tensor.to(self.device) for tensor in tensors]
        return Head(*tensors, scale=shared.scale, softcap=shared.softcap, vocab=shared.vocab)

    def readers_of(self, number):
        """List the readers of the members of the replica that serves this rank."""
        degree = self.teachers[number].degree
        num_replicas = self.roles.teacher_ranks // degree
        first = self.client % num_replicas * degree
        return self.readers[first : first + degree]

    def request(self, number, kind, top_k, ids, labels=None):
        """Send a request; ranks that are not the first of their client only note it."""
        request = Request.of(number, kind, top_k, ids)
        self.pending.append(request)
        if self.writer:
            self.writer.put(request.tensor(ids, labels))

    def expect(self, number, kind, top_k, ids, labels=None):
        """Make sure that the next response is to this request; send it if nothing is under way."""
        if not self.pending:
            self.request(number, kind, top_k, ids, labels)
        expected = Request.of(number, kind, top_k, ids)
        sent = self.pending.popleft()
        assert sent == expected, f"read in another order than asked: {sent}, {expected}"

    def release(self):
        """Allow the teachers to write over all responses that were read."""
        for reader in self.readers:
            reader.release()

    def shut_down(self):
        """Unmap what the teachers publish, then tell them that there is nothing more to do."""
        for reader in self.readers:
            reader.close()
        if not self.writer:
            return
        with contextlib.suppress(ipc.PeerDied):
            self.writer.put(torch.tensor(Request(SHUT_DOWN)))
            self.writer.drain()


@dataclass
class RanksSpec(TeacherSpec):
    """Describe a model on ranks of its own, as a rank of the student reaches it.

    Attributes:
        output_topk: tokens of the output "topk".
        number: its place among all teachers of the job that have weights.
        client: TeacherClient; None: this rank asks nothing.
    """

    output_topk: int = 256
    number: int = 0
    client: TeacherClient | None = None

    asks_ahead = True
    asked_late = False

    @classmethod
    def of_model(cls, spec, number, client, device):
        """Return what a ModelSpec becomes once the teachers' ranks have loaded it."""
        return cls(spec.path, spec.vocab, device, spec.output, spec.output_topk, number, client)

    def load(self):
        return RemoteTeacher(self)


@dataclass
class RemoteTeacher(TeacherOfIds):
    """Read a teacher on ranks of its own."""

    spec: RanksSpec

    def __post_init__(self):
        self.client = self.spec.client
        self.head = self.client.head_of(self.spec.number)
        self.readers = self.client.readers_of(self.spec.number)

    def request(self, batch):
        """Start what `targets` of this batch, in the same order, will return."""
        self.client.request(self.spec.number, self.spec.output, self.spec.output_topk,
                            model_input(batch), self.kept_labels(batch))

    def read(self, ids, output="hidden", output_topk=256, labels=None):
        self.client.expect(self.spec.number, output, output_topk, ids, labels)
        if output == "hidden":
            return HiddenLogits(self._next().flatten(0, 1), self.head)
        if output == "topk":
            ids_TK = self._next()
            logp_TK = self._next()
            rest_T = self._next()
            logits = TopKLogits(ids_TK, logp_TK, self.head.vocab, rest_T, self._next())
            return ScoredLogits(logits, TextScores.unpacked(self._next()))
        shards = tuple(self._next(member) for member in range(len(self.readers)))
        return StoredLogits(shards[0]) if len(shards) == 1 else ShardedLogits(shards)

    def logits(self, ids):
        """Return (B, T, W or more), the model's own logits."""
        self.client.expect(self.spec.number, "model_logits", 0, ids)
        return self._next()

    def release(self):
        self.client.release()

    def _next(self, member=0):
        return self.readers[member].next().to(self.client.device)


# --- in the job: the student's ranks ask, the others serve ----------------------------------------


def specs_with_weights(setups):
    """List the TeacherSpecs that the teachers' ranks load: others are read by the student's."""
    return [spec for setup in setups for spec in setup.spec.single() if spec.has_weights]


def announce_teachers(inputs, roles):
    """Tell the ranks that are for teachers alone what to load."""
    if roles.local_rank == 0:
        specs = [spec.to_plain() for spec in specs_with_weights(inputs.teachers)]
        roles.publish("teacher specs", specs)


def connect(state, roles):
    """Reach the teachers of this node, where this rank computes a loss; all know where they run."""
    asks = state.student.computes_loss
    if asks:
        roles = client_roles(roles, state.cfg.pipeline_parallel)
        specs = specs_with_weights(state.teachers)
        # this step and the next one
        num_requests = 2 * state.engine.gradient_accumulation_steps() * len(specs)
        tensors = max(TENSORS_PER_RESPONSE[spec.output] for spec in specs)
        size = client_size(roles, state.cfg.sequence_parallel)
        state.client = TeacherClient(roles, num_requests, state.device, size, tensors)
    numbers = itertools.count()
    for setup in state.teachers:
        setup.spec = setup.spec.with_models(
            lambda spec: RanksSpec.of_model(spec, next(numbers), state.client, state.device))
        setup.source = load_teacher(setup.spec) if asks else load_silent(setup.spec)


def shut_down(client, error_type, *_):
    """Tell the teachers at a clean end; after an error no one waits for them to listen."""
    if client and (error_type is None or issubclass(error_type, SystemExit)):
        client.shut_down()


def serve_teachers(cfg, roles, device):
    """Run a rank that is for teachers alone, until the student's ranks shut down."""
    with fail_together(roles, "inputs"):
        pass  # the student's ranks read them
    with fail_together(roles, "models"):
        teachers = []
        for plain in roles.read("teacher specs"):
            # all members of a replica read the same request
            plain |= {"same_ids": True, "sequence_parallel_size": 1}
            teachers.append(load_teacher(ModelSpec(**plain, device=device)))
    current_watch().training = True
    for number in STOP_SIGNALS:  # the student takes a checkpoint first
        signal.signal(number, signal.SIG_IGN)
    roles = client_roles(roles, cfg.pipeline_parallel)
    size = client_size(roles, cfg.sequence_parallel)
    with fail_alone(EngineError, code=1):
        serve_requests(roles, teachers, size, from_hidden=cfg.tiled)
    for teacher in teachers:
        teacher.close()
