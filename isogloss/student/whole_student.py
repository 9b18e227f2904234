"""Give every rank the whole student, for texts of its own: rollouts, evaluation tasks.

Under ZeRO 0-2 that is the student itself.  One that ZeRO-3 has partitioned is copied, or its layers
are gathered in every forward pass, in which all ranks then take part.  One whose layers are the
stages of a pipeline is copied.  Ranks that share sequences in training attend alone here.

Tests: tests/test_on_policy.py, tests/test_pipeline.py.
"""

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from transformers import AutoModelForCausalLM

from isogloss.doors import door
from isogloss.job.counts import global_sums
from isogloss.job.rendezvous import values_of_ranks
from isogloss.job.sequence_group import SequenceGroup
from isogloss.models.adapter_parts import layers_of, merged_weight, plain_name
from isogloss.models.parts import NAME, adapter_of, is_adapter
from isogloss.rollout import needs_equal_lengths
from isogloss.student.engine import gathered


@dataclass
class WholeStudent:
    """Lend the student to one rank at a time of a job, with its current weights.

    Attributes:
        engine: DeepSpeed engine around a StudentWithLoss or a PipelinedStudent.
        sequence_group: SequenceGroup that shares this rank's sequences in training, or None.
        device: of this rank.
        copies: of a student that ZeRO-3 has partitioned, make a copy.
        replica: that copy, or None.
        equal_lengths: prompts of unequal lengths would disturb each other in one batch.
        is_checked: that is known, see `lend`.
    """

    engine: deepspeed.DeepSpeedEngine
    sequence_group: SequenceGroup | None
    device: torch.device
    copies: bool = True
    replica: torch.nn.Module | None = None
    equal_lengths: bool = False
    is_checked: bool = False

    def __post_init__(self):
        if self.is_staged() or (self.is_partitioned() and self.copies):
            self.replica = new_replica(self.engine, self.device)

    def is_partitioned(self):
        return self.engine.zero_optimization_stage() == 3

    def is_staged(self):
        return isinstance(self.engine, PipelineEngine)

    @contextmanager
    def model(self):
        """Yield (causal language model, agree); all ranks take part.

        agree: (this rank has work) -> every rank has to run the model, as `rollout.write` takes it.
        """
        model = self.engine.module.model
        if self.replica is not None:
            copies = dict(self.replica.named_parameters())
            if self.is_staged():
                refresh_from_stages(copies, self.engine)
            else:
                refresh(copies, model)
            yield self.replica, bool
            return
        with plain_attention(model, self.sequence_group):
            yield model, self._any_rank if self.is_partitioned() else bool

    def _any_rank(self, has_work):
        """Tell whether any rank has work: each pass of a partitioned model needs all of them."""
        return bool(global_sums([has_work])[0])


@contextmanager
def plain_attention(model, sequence_group):
    """Let the student attend without its sequence group: each rank has whole texts."""
    if sequence_group is None:
        yield
        return
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def new_replica(engine, device):
    """Return a model of the student's shape in the compute dtype, with arbitrary weights."""
    model = engine.module.model
    dtype = next(model.parameters()).dtype
    options = {"attn_implementation": "sdpa" if model._supports_sdpa else "eager"}
    config = copy.deepcopy(model.config)  # from_config writes dtype and attention into it
    with torch.random.fork_rng():
        replica = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
        if adapter_of(model):
            door("adapters").add_adapter_of(model, replica, dtype)
    replica.requires_grad_(False)
    return replica.to(device).eval()


def refresh(copies, model):
    """Copy the weights of a model, which may be partitioned; all ranks take part.

    Args:
        copies: {name: tensor}; a rank without copies helps the others.
    """
    for name, parameter in model.named_parameters():
        with gathered(parameter), torch.no_grad():
            if name in copies:
                copies[name].copy_(parameter)


def refresh_plain(copies, model):
    """Copy the weights of a model without its adapter, whose products are added; see `refresh`.

    Args:
        copies: {name without the adapter: tensor}.
    """
    adapted = {f"{name}.base_layer.weight": layer for name, layer in layers_of(model).items()}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        layer = adapted.get(name)
        pair = [half[NAME].weight for half in (layer.lora_A, layer.lora_B)] if layer else []
        with ExitStack() as stack, torch.no_grad():
            for part in (parameter, *pair):
                stack.enter_context(gathered(part))
            copied = copies.get(plain_name(name))
            if copied is not None:
                copied.copy_(merged_weight(layer, parameter, *pair) if layer else parameter)


def refresh_from_stages(copies, engine):
    """Copy the weights of all stages of a pipeline; all ranks take part.

    Args:
        copies: {name: tensor} of the whole model, on every rank.
    """
    grid = engine.grid
    own = dict(engine.module.model.named_parameters())
    names_of_ranks = values_of_ranks(list(own))
    for stage in range(engine.num_stages):
        source = grid.stage_to_global(stage)  # in this rank's own pipeline
        for name in names_of_ranks[source]:
            if name not in copies:  # a tied head, which the first stage has as its embedding
                continue
            if source == dist.get_rank():
                copies[name].data.copy_(own[name].data)
            dist.broadcast(copies[name].data, source, group=grid.get_pipe_parallel_group())


def lend(state, writes):
    """Make the WholeStudent of a run, which several doors share; all ranks take part.

    Args:
        state: `build.TrainState`; writes: texts are written by it, not read alone.
    """
    if state.whole_student is None:
        state.whole_student = WholeStudent(
            state.engine, state.sequence_group, state.device, state.cfg.rollout_replica)
    if writes and not state.whole_student.is_checked:
        check_side_by_side(state)


def check_side_by_side(state):
    """Let the student write only such texts side by side as do not disturb each other.

    Raises:
        ValueError: what it writes is wrong whatever stands beside it.
    """
    with state.whole_student.model() as (model, agree):
        try:
            equal_lengths = needs_equal_lengths(model, state.vocab, agree)
        except ValueError as error:
            raise ValueError(f"--student {state.cfg.student}: {error}, as rollouts, samples and "
                             "tasks with written answers need it; leave these out, or let "
                             "--writer vllm write") from None
    state.whole_student.equal_lengths = equal_lengths
    state.whole_student.is_checked = True
    if state.tasks:
        state.tasks.encoder.equal_lengths = equal_lengths
