"""Teachers on ranks of their own: what such a rank does, and how the student's ranks ask it.

The last ranks of a node hold its teachers (`--teacher_ranks`), the others the student.  A rank of the student
puts token ids into its `ipc.TensorWriter`, which all teacher ranks of the node read; the answers lie in Outboxes of
the teacher ranks, and the loss reads them where they lie.  `ask` may come long before `rows`, so that
teachers work on the next window while the student trains on this one.

All ranks of the student ask the same teachers for the same signals in the same order, as they do the same
steps.  Ranks that hold parts of the same sequences are one client: the first of them asks, all of them read.
In round k the node's teacher ranks serve request k of every client: with R replicas of a teacher, replica r
those of clients r, r + R, ...
"""

from collections import deque
from contextlib import nullcontext
from typing import NamedTuple

import torch

import ipc
from tiles import Head, HiddenLogits, StoredLogits, ShardedLogits, TopKLogits

SIGNALS = "hidden", "logits", "topk", "own_logits"
ANSWER = {"hidden": 1, "logits": 1, "topk": 3}  # tensors of an answer
FOR_EVER = float("inf")  # a student that reads a stream again says nothing for long; a dead one is noticed
GOODBYE = -1  # in place of a teacher's number


# --- the teachers' side ---------------------------------------------------------------------------


def alike_on_node(roles, sequence_parallel):
    """Ranks of the student that are one client: a sequence group, if no group is on two nodes."""
    return 1 if roles.students % sequence_parallel else sequence_parallel


def serve(roles, teachers, alike=1, from_hidden=True):
    """Answer the student's ranks of this node until one of them leaves.

    Args:
        teachers: `teacher.Teacher` of every teacher of the job, loaded with `shared=True`.
        alike: see `alike_on_node`.
        from_hidden: logits are what a teacher's head makes of its hidden states; else the model's own.
    Raises:
        ipc.PeerDied: a rank of the student has ended without a word.
    """
    if roles.local == 0:
        tensors = [[x if x is None else ipc.share(x) for x in teacher.head[:2]] for teacher in teachers]
        roles.publish("teachers", [(*shared, teacher.head[4:], teacher.degree)
                                   for shared, teacher in zip(tensors, teachers)])
    inboxes, outboxes = [], []
    for client in range(roles.students // alike):
        handle, slots = roles.read(f"requests of {client}")
        inboxes.append(ipc.TensorReader(handle, roles.local, timeout=FOR_EVER))
        outboxes.append(ipc.TensorWriter(alike, slots, timeout=FOR_EVER))
        roles.publish(f"answers of {roles.local} to {client}", outboxes[-1].handle)
    while True:
        requests = [_read(inbox) for inbox in inboxes]
        number, signal, top_k = requests[0][0]
        if number == GOODBYE:
            return
        teacher = teachers[number]
        replica, member = divmod(roles.local, teacher.degree)
        replicas = roles.teachers // teacher.degree
        for first in range(0, len(requests), replicas):
            client = first + replica
            if client < len(requests):
                for tensor in _answer(teacher, requests[client][1], signal, top_k, member, from_hidden):
                    outboxes[client].put(tensor)
            elif teacher.engine == "zero3":  # whose other ranks wait for this one
                _answer(teacher, requests[-1][1], signal, top_k, member, from_hidden)


def _read(inbox):
    """((number of the teacher, signal, top_k), ids (B, T) or (2, B, T)) of the next request."""
    with inbox.take() as request:
        number, signal, top_k, *shape = request[:6].tolist()
        ids = request[6:].clone().view(shape)
        return (number, SIGNALS[signal], top_k), ids if len(ids) == 2 else ids.flatten(0, 1)


@torch.no_grad()
def _answer(teacher, ids, signal, top_k, member, from_hidden):
    """What this member of a replica publishes; all of them compute."""
    head = teacher.head
    ids = ids.to(head.weight_VH.device)
    if signal == "logits":  # every member a part of the vocabulary
        columns = slice(*[head.vocab * m // teacher.degree for m in (member, member + 1)])
        if not from_hidden:
            return [teacher.logits(ids)[..., columns].flatten(0, 1)]
        bias = None if head.bias_V is None else head.bias_V[columns]
        shard = head._replace(weight_VH=head.weight_VH[columns], bias_V=bias, vocab=0)
        return [shard.finish(shard.linear(teacher.hidden(ids).flatten(0, 1)))]
    if signal == "topk":
        ids_TK, logp_TK, _, total_T = teacher.rows(ids, "topk", top_k)
        found = [ids_TK, logp_TK, total_T]
    else:
        found = [teacher.hidden(ids) if signal == "hidden" else teacher.logits(ids)]
    return found if member == 0 else []


# --- the student's side ---------------------------------------------------------------------------


class Link:
    """The teachers of this node, asked by this rank of the student.

    Args:
        requests: that may be under way, or answered and not given back.
        device: where the student reads answers; on the device of the teacher they are not copied.
        alike: see `alike_on_node`.
        of_answer: tensors that an answer has at most, see `ANSWER`.
    Attributes:
        teachers: `Remote` of every teacher.
    """

    def __init__(self, roles, requests, device, alike=1, of_answer=1):
        self.roles, self.device, self.asked = roles, device, deque()
        client, place = divmod(roles.local, alike)
        self.outbox = None if place else ipc.TensorWriter(roles.teachers, requests, timeout=FOR_EVER)
        if self.outbox:
            roles.publish(f"requests of {client}", (self.outbox.handle, of_answer * requests))
        self.inboxes = [ipc.TensorReader(roles.read(f"answers of {rank} to {client}"), place, timeout=FOR_EVER)
                        for rank in range(roles.teachers)]
        self.teachers = []
        for number, (weight, bias, rest, degree) in enumerate(roles.read("teachers")):
            weight, bias = [x and ipc.attach(x).to(device) for x in (weight, bias)]
            head = Head(weight, bias, None, None, *rest)
            first = client % (roles.teachers // degree) * degree
            self.teachers.append(Remote(self, number, self.inboxes[first : first + degree], head))

    def ask(self, number, signal, top_k, ids):
        how = [number, SIGNALS.index(signal), top_k, *ids.view(-1, *ids.shape[-2:]).shape]
        self.asked.append(how)
        if self.outbox:
            self.outbox.put(torch.cat([torch.tensor(how), ids.cpu().flatten()]))

    def expect(self, number, signal, top_k, ids):
        """The next answer is that to this request, which is asked now if it was not before."""
        if not self.asked:
            self.ask(number, signal, top_k, ids)
        how = [number, SIGNALS.index(signal), top_k, *ids.view(-1, *ids.shape[-2:]).shape]
        assert self.asked.popleft() == how, "teachers are asked in one order and read in another"

    def give_back(self):
        """The teachers may write over all answers that were read."""
        for inbox in self.inboxes:
            inbox.give_back()

    def leave(self):
        """Tell the teachers that there is nothing more to do."""
        if not self.outbox:
            return
        try:
            self.outbox.put(torch.tensor([GOODBYE, 0, 0, 1, 0, 0]))
            self.outbox.drain()
        except ipc.PeerDied:
            pass


class Remote(NamedTuple):
    """A teacher on ranks of its own, with the interface of `teacher.Teacher`.

    inboxes: of the members of the replica that serves this rank.
    """

    link: Link
    number: int
    inboxes: list
    head: Head
    awake = nullcontext

    def ask(self, ids_BT, signal="hidden", top_k=256):
        """Start what `rows` with these arguments, in the same order, will return."""
        self.link.ask(self.number, signal, top_k, ids_BT)

    def rows(self, ids_BT, signal="hidden", top_k=256):
        """As of `teacher.Teacher`; valid until `Link.give_back`."""
        self.link.expect(self.number, signal, top_k, ids_BT)
        if signal == "hidden":
            return HiddenLogits(self._next().flatten(0, 1), self.head)
        if signal == "topk":
            ids, logp, total = [self._next() for _ in range(3)]
            return TopKLogits(ids, logp, self.head.vocab, total)
        shards = tuple(self._next(member) for member in range(len(self.inboxes)))
        return StoredLogits(shards[0]) if len(shards) == 1 else ShardedLogits(shards)

    def logits(self, ids_BT):
        """(B, T, W or more), the model's own."""
        self.link.expect(self.number, "own_logits", 0, ids_BT)
        return self._next()

    def _next(self, member=0):
        return self.inboxes[member].next().to(self.link.device)
