"""Decide which ranks hold which shard of a teacher, and whose samples they read.

A teacher of degree N is sharded over N neighboring ranks of one node.  Every group of N ranks holds
a whole teacher (a replica) and runs the samples of its own ranks, those of several ranks at once.
So the student's layout is free, and no teacher tensor leaves a node.

`--teacher_ranks` dedicates the last ranks of every node to the teachers.  Then student and teachers
are two worlds (`split_ranks`), each with a process group of its own, and code that counts ranks
sees only its own world.

Tests: tests/test_layouts.py, tests/test_distributed.py.
"""

import math
import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from isogloss.job.rendezvous import LOADING_TIMEOUT, job_store, read_value, write_value


def node_size():
    """Return the number of ranks on this node; without a launcher, of the whole job."""
    # DeepSpeed's launcher sets the first, torchrun the second.
    stated = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
    return int(stated or dist.get_world_size())


def is_last_stage(pipeline_parallel):
    """Tell whether this rank is the last one of its pipeline, which computes the loss."""
    return dist.get_rank() % pipeline_parallel == pipeline_parallel - 1


# --- ranks for teachers alone ---------------------------------------------------------------------


class Roles(NamedTuple):
    """This rank's role in a job whose nodes have ranks for teachers alone.

    role: "student" or "teacher".
    node: index of this rank's node, from 0.
    local_rank: index among the node's ranks of the same role, from 0.
    student_ranks, teacher_ranks: ranks of either role on every node.
    store: key-value store of the whole job, both worlds.
    """

    role: str
    node: int
    local_rank: int
    student_ranks: int
    teacher_ranks: int
    store: dist.Store

    def publish(self, key, value):
        write_value(self.store, f"node {self.node}: {key}", value)

    def read(self, key):
        """Wait until a rank of this node has published a value, and return it."""
        return read_value(self.store, f"node {self.node}: {key}")


def check_teacher_ranks(teacher_ranks, ranks_per_node):
    """Raise a ValueError where a node has no rank left for the student."""
    if teacher_ranks >= ranks_per_node:
        raise ValueError(f"--teacher_ranks {teacher_ranks}: a node of this job has "
                         f"{ranks_per_node} ranks, and at least one is for the student; start more "
                         "ranks or leave the flag out")


def split_ranks(teacher_ranks):
    """Split the job into two worlds: the last `teacher_ranks` ranks of every node, and the others.

    Call it before anything joins a process group.  It sets RANK, WORLD_SIZE and LOCAL_SIZE of the
    environment to those of this rank's world, whose process group `start_distributed` joins then.

    Returns:
        Roles.
    Raises:
        ValueError: a node has no rank left for the student; or see `job_store`.
    """
    environ = os.environ
    job_rank = int(environ.get("RANK", 0))
    job_size = int(environ.get("WORLD_SIZE", 1))
    # node_size() cannot be used here: there is no process group to ask yet.
    ranks_per_node = int(environ.get("LOCAL_SIZE") or environ.get("LOCAL_WORLD_SIZE") or job_size)
    check_teacher_ranks(teacher_ranks, ranks_per_node)
    store = job_store()
    node, local_rank = divmod(job_rank, ranks_per_node)
    student_ranks = ranks_per_node - teacher_ranks
    role = "student"
    ranks_of_role = student_ranks
    if local_rank >= student_ranks:
        role = "teacher"
        ranks_of_role = teacher_ranks
        local_rank -= student_ranks

    rank = node * ranks_of_role + local_rank
    world_size = job_size // ranks_per_node * ranks_of_role
    environ["RANK"] = str(rank)
    environ["WORLD_SIZE"] = str(world_size)
    environ["LOCAL_SIZE"] = str(ranks_of_role)
    both_worlds = dist.PrefixStore("job", store)
    return Roles(role, node, local_rank, student_ranks, teacher_ranks, both_worlds)


def place_in_job(roles=None):
    """Return (number of this rank in the job, ranks of the job): the student's ranks come first.

    Args:
        roles: Roles; None: there is one world, or only this one counts.
    """
    # There may be no process group yet.
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    if roles is None:
        return rank, world_size
    ranks_of_role = roles.student_ranks if roles.role == "student" else roles.teacher_ranks
    nodes = world_size // ranks_of_role
    if roles.role == "teacher":
        rank += nodes * roles.student_ranks
    return rank, nodes * (roles.student_ranks + roles.teacher_ranks)


# --- replicas of a teacher ------------------------------------------------------------------------


def teacher_groups(world, node, degree):
    """Return the ranks of every replica of a teacher.

    Args:
        world: ranks in all.
        node: ranks per node.
        degree: ranks that hold one teacher together, 1 or more.
    Returns:
        list of lists of `degree` neighboring ranks; every rank is in one.
    Raises:
        ValueError: `degree` does not divide the ranks of a node, or nodes differ.

    >>> teacher_groups(4, 4, 2)
    [[0, 1], [2, 3]]
    """
    if world % node:
        raise ValueError(f"{world} ranks on nodes of {node}: expected the same number of ranks on "
                         "every node; start as many on each")
    if node % degree:
        possible = ", ".join(str(n) for n in range(1, node + 1) if node % n == 0)
        raise ValueError(f"--teacher_tp {degree}: does not divide the {node} ranks of a node that "
                         f"hold teachers, and a teacher cannot span nodes; use one of {possible}")
    return [list(range(first, first + degree)) for first in range(0, world, degree)]


class Replica:
    """Join the ranks that hold one teacher together; DeepSpeed takes a replica as `mpu`.

    Attributes:
        ranks: list of neighboring ranks.
        group: their process group.
    """

    def __init__(self, degree):
        """Create the groups of all replicas; all ranks take part.

        Raises:
            ValueError: see `teacher_groups`.
        """
        # new_group is collective: every rank has to create every group, in the same order.
        for ranks in teacher_groups(dist.get_world_size(), node_size(), degree):
            group = dist.new_group(ranks, timeout=LOADING_TIMEOUT)
            if dist.get_rank() in ranks:
                self.ranks = ranks
                self.group = group

    def run_for_each_member(self, run, ids_BT, sequence_parallel_size=1, max_positions=0):
        """Return run(ids_BT) for this rank's ids, where a run takes all ranks of the replica.

        The ids of several members make up one run as long as `join_members` allows it.  Members of
        one sequence group have the same ids, which are run once.

        Args:
            run: ids -> (B, T, X) output, in which no position depends on a later one; collective
                over the replica.
            ids_BT: (B, T) or (2, B, T) int64, see `model.model_input`; values and shape
                differ from rank to rank.
            sequence_parallel_size: neighboring ranks with the same ids, counted from rank 0 of the
                job.
            max_positions: see `join_members`.
        """
        # Replicas and sequence groups are both aligned blocks of neighbors, so their intersections
        # are, too, and have this size.
        num_sharing = math.gcd(sequence_parallel_size, len(self.ranks))
        ids_of_members = self._gather(ids_BT)[::num_sharing]
        local_member = self.ranks.index(dist.get_rank()) // num_sharing
        num_rows, width = ids_BT.shape[-2:]
        local_output = None
        for members in join_members([ids.shape[-2:] for ids in ids_of_members], max_positions):
            output = run(join_ids([ids_of_members[member] for member in members]))
            if local_member in members:
                before = members[: members.index(local_member)]
                first = sum(ids_of_members[member].shape[-2] for member in before)
                local_output = output[first : first + num_rows, :width]
                if len(members) > 1:  # a view would keep the output of all
                    local_output = local_output.clone()
        return local_output

    def _gather(self, ids_BT):
        # all_gather takes tensors of one shape, so shapes go ahead
        shape = torch.tensor(ids_BT.shape, device=ids_BT.device)
        shapes = [torch.empty_like(shape) for _ in self.ranks]
        dist.all_gather(shapes, shape, group=self.group)
        shapes = torch.stack(shapes).tolist()
        sizes = [math.prod(shape) for shape in shapes]
        padded = ids_BT.new_zeros(max(sizes))
        padded[: ids_BT.numel()] = ids_BT.flatten()
        of_ranks = [torch.empty_like(padded) for _ in self.ranks]
        dist.all_gather(of_ranks, padded, group=self.group)
        return [ids[:size].view(shape) for ids, size, shape in zip(of_ranks, sizes, shapes)]

    # DeepSpeed's inference engine calls these.

    def get_model_parallel_group(self):
        return self.group

    def get_model_parallel_world_size(self):
        return len(self.ranks)

    def get_model_parallel_rank(self):
        return self.ranks.index(dist.get_rank())

    def get_data_parallel_group(self):
        return None


# Positions of a run in which members are joined, padding included, for each position of theirs.
# Not tuned: a quarter more work costs less than a run of its own where runs are small.
MOST_PADDING = 1.25


def join_members(shapes, max_positions):
    """Group the members of a replica whose ids make up one run.

    Members of similar width come together, so that little of a run is padding.

    Args:
        shapes: (rows, width) of the ids of every member, equal on every rank.
        max_positions: of a run of several members, padding included.
    Returns:
        lists of members, each in one of them.

    >>> join_members([(1, 100), (2, 30), (1, 90), (1, 100)], 200)
    [[1], [2, 0], [3]]
    """
    groups = []
    total_rows = 0
    num_positions = 0
    for member in sorted(range(len(shapes)), key=lambda member: shapes[member][1]):
        rows, width = shapes[member]
        total_rows += rows
        num_positions += rows * width
        # sorted: this width is the largest so far
        most = min(max_positions, MOST_PADDING * num_positions)
        if not groups or total_rows * width > most:
            groups.append([])
            total_rows = rows
            num_positions = rows * width
        groups[-1].append(member)
    return groups


def join_ids(ids_of_members):
    """Return one tensor of the ids of several members, padded on the right.

    Args:
        ids_of_members: (B, T) or (2, B, T) int64 each, the second part positions.
    """
    if len(ids_of_members) == 1:
        return ids_of_members[0]
    width = max(ids.shape[-1] for ids in ids_of_members)
    padded = []
    for ids in ids_of_members:
        size = width - ids.shape[-1]
        ids = torch.nn.functional.pad(ids, (0, size))  # id 0 is a token of any model
        if size and ids.dim() == 3:
            # Positions go on, as in a batch: each break would begin a document.
            first = ids[1, :, -size - 1, None] + 1
            ids[1, :, -size:] = first + torch.arange(size, device=ids.device)
        padded.append(ids)
    return torch.cat(padded, -2)
