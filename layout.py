"""Which ranks hold which part of a teacher, and whose samples they read.

A teacher of degree N is sharded over N neighbouring ranks of one node.  Every group of N ranks holds a whole
teacher (a replica) and runs the samples of its own ranks, one rank's after the other, so the student's layout
is free and no teacher tensor leaves a node.
"""

import os

import torch
import torch.distributed as dist


def node_size():
    """Ranks on this node, as the launcher says (DeepSpeed's or torchrun's); without a launcher, all."""
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())


def teacher_groups(world, node, degree):
    """Ranks of every replica of a teacher.

    Args:
        world: ranks in all.
        node: ranks per node.
        degree: ranks that hold one teacher together, 1 or more.
    Returns:
        list of lists of `degree` neighbouring ranks; every rank is in one.
    Raises:
        ValueError: `degree` does not divide the ranks of a node, or nodes differ.

    >>> teacher_groups(4, 4, 2)
    [[0, 1], [2, 3]]
    """
    if world % node:
        raise ValueError(f"{world} ranks on nodes of {node}: expected as many ranks on every node")
    if node % degree:
        possible = ", ".join(str(n) for n in range(1, node + 1) if node % n == 0)
        raise ValueError(f"--teacher_tp {degree}: does not divide the {node} ranks of a node, and a teacher "
                         f"stays inside a node; use one of {possible}")
    return [list(range(first, first + degree)) for first in range(0, world, degree)]


class Replica:
    """The ranks that hold one teacher together, this one among them; to DeepSpeed an `mpu`."""

    def __init__(self, degree):
        """All ranks take part.

        Raises:
            ValueError: of `teacher_groups`.
        """
        for ranks in teacher_groups(dist.get_world_size(), node_size(), degree):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                self.ranks, self.group = ranks, group

    def of_each(self, run, ids_BT):
        """run(ids_BT) for this rank's ids, where a run takes all ranks of the replica.

        Args:
            ids_BT: (B, T) int64; every rank has its own, of its own shape.
        """
        shape = torch.tensor(ids_BT.shape, device=ids_BT.device)
        shapes = [torch.empty_like(shape) for _ in self.ranks]
        dist.all_gather(shapes, shape, group=self.group)
        mine = None
        for owner, shape in zip(self.ranks, shapes):
            own = owner == dist.get_rank()
            ids = ids_BT.contiguous() if own else ids_BT.new_empty(shape.tolist())
            dist.broadcast(ids, owner, group=self.group)
            found = run(ids)
            mine = found if own else mine
        return mine

    def get_model_parallel_group(self):
        return self.group

    def get_model_parallel_world_size(self):
        return len(self.ranks)

    def get_model_parallel_rank(self):
        return self.ranks.index(dist.get_rank())

    def get_data_parallel_group(self):
        return None
