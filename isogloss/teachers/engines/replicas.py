"""Run a teacher that neighboring ranks of a node hold together, see layout.py.

Tests: tests/test_layouts.py, tests/test_teacher.py.
"""

import math

import torch
import torch.distributed as dist

from isogloss.job.layout import node_size, teacher_groups
from isogloss.job.rendezvous import LOADING_TIMEOUT


class Replica:
    """Join the ranks that hold one teacher together.

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
            ids_BT: (B, T) or (2, B, T) int64, see `whole.model_input`; values and shape
                differ from rank to rank.
            sequence_parallel_size: neighboring ranks with the same ids, counted from rank 0 of the
                job.
            max_positions: see `join_members`.
        """
        # Replicas and sequence groups are both aligned blocks of neighbors, so their intersections
        # are, too, and have this size.
        num_sharing = math.gcd(sequence_parallel_size, len(self.ranks))
        ids_of_members = self.gather(ids_BT)[::num_sharing]
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

    def gather(self, ids_BT):
        """Return the ids of every member, whose shapes may differ."""
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
