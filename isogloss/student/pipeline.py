"""Train a student whose layers are spread over the ranks of a pipeline.

Neighboring ranks form a pipeline; each holds one stage (stages.py), and DeepSpeed's PipelineEngine
moves the micro-batches of a step through them.  Every rank of a pipeline reads the same samples.
The last stage computes the loss, so it alone asks teachers and counts terms; no teacher's output
goes through the pipeline.  Tests: tests/test_pipeline.py.
"""

import contextlib
import io
import itertools
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology

from isogloss.job.counts import TermSums, global_sums
from isogloss.job.rendezvous import values_of_ranks
from isogloss.models.pretrained import load_model
from isogloss.student.engine import (
    StudentWithLoss,
    attach_projection,
    kept_activations,
    logits_source,
    start_engine,
)
from isogloss.student.finite import spoil_gradient_unless_finite
from isogloss.student.stages import (
    cut_layers,
    cut_model,
    describe_stages,
    layer_work,
    num_weights,
    plan_of,
    probe,
    stage_arguments,
)


class PipelinedStudent(PipelineModule):
    """Hold one stage of the student, and in the last one the loss.  The engine wraps this module.

    Attributes:
        model: the Hugging Face model, of which this stage's weights are left, under their names.
        stage: `stages.Stage`.
        vocab, tiled, activation_offload: see `engine.StudentWithLoss`.
        is_last: this is the last stage.
        pending: terms of the micro-batches that are under way, in their order; last stage.
        results: what became of them.
        projection_scores: see `projected.LearnedProjection`; every stage has them, so that all
            optimizers have the same groups, and the last one's gradient moves them.
    """

    def __init__(self, stage, vocab, tiled=True, activation_offload=False):
        num_stages = len(stage.spans)
        shape = [dist.get_world_size() // num_stages, num_stages]
        # DeepSpeed prints its layers, of which it sees one for each stage
        with contextlib.redirect_stdout(io.StringIO()):
            super().__init__(
                [None] * num_stages, topology=ProcessTopology(["data", "pipe"], shape),
                partition_method="uniform", dynamic_shape=True)
        self.model = stage.model
        self.stage = stage
        self.vocab = vocab
        self.tiled = tiled
        self.activation_offload = activation_offload
        self.is_last = self.stage_id == num_stages - 1
        self.pending = iter(())
        self.results = []
        self.register_parameter("projection_scores", None)
        if stage.tied:
            self._tie_head()

    def _tie_head(self):
        """Let DeepSpeed add up the gradients of an embedding and of the head that is the same."""
        last_stage = self.num_stages - 1
        for number in range(self._grid.data_parallel_size):
            ends = [self._grid.stage_to_global(stage_id, data=number)
                    for stage_id in (0, last_stage)]
            group = dist.new_group(ends)  # all ranks create all groups
            if self.global_rank not in ends:
                continue
            embedding = self.model.get_input_embeddings()
            self.tied_comms["head"] = {"ranks": ends, "group": group, "module": embedding}
            # the norm of the gradient counts it once
            embedding.weight.ds_pipe_replicated = self.is_last

    def get_tied_weights_and_groups(self):
        """List (weight, group of ranks that have it), as the engine asks before it adds them up."""
        tied = [(ends["module"].weight, ends["group"]) for ends in self.tied_comms.values()]
        for scores in self.loss_parameters():
            # the norm of the gradient counts them once
            scores.ds_pipe_replicated = not self.is_last
            if scores.grad is None:
                scores.grad = torch.zeros_like(scores)
            tied.append((scores, self._grid.get_pipe_parallel_group()))
        return tied

    def forward(self, inputs):
        """Run this stage on what the engine passes on.

        Args:
            inputs: see `stages.stage_arguments`.
        Returns:
            the next stage's inputs; in the last one a () loss, 0 in an evaluation.
        """
        arguments = stage_arguments(self.stage, inputs)
        positions = arguments.get("position_ids")
        shape = (inputs if positions is None else inputs[0]).shape[:2]
        with kept_activations(self.model, shape, self.activation_offload):
            if not self.is_last:
                hidden = self.model.base_model(**arguments)[0]
                return hidden if positions is None else (hidden, positions)
            logits = logits_source(self.model, arguments, self.vocab, self.tiled)
        device = self.stage.device()
        with torch.autocast(device.type, enabled=False):
            terms = next(self.pending)  # teachers that are asked now compute as they always do
        result = terms.reduce(logits)
        if not self.training:
            self.results.append(result)
            return torch.zeros((), device=device)
        loss, sums = result
        self.results.append(sums)
        return spoil_gradient_unless_finite(loss)

    loss_parameters = StudentWithLoss.loss_parameters

    def collect_weights(self):
        """Return {name: tensor} of all stages' weights and buffers on rank 0, {} elsewhere.

        All ranks take part; those of the first pipeline send theirs.
        """
        model = self.model
        local = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
        names = {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in local.items()}
        stages = values_of_ranks(names)[: self.num_stages]
        weights = {}
        if self.global_rank == 0:
            weights = {name: tensor.detach().cpu().clone() for name, tensor in local.items()}
        for sender, names in list(enumerate(stages))[1:]:
            for name, (shape, dtype) in names.items():
                if self.global_rank == sender:
                    dist.send(local[name].detach().contiguous(), 0)
                elif self.global_rank == 0:
                    dtype = getattr(torch, dtype.removeprefix("torch."))
                    tensor = torch.empty(shape, dtype=dtype, device=self.stage.device())
                    dist.recv(tensor, sender)
                    weights.setdefault(name, tensor.cpu())
        return weights

    # --- checkpoints: a file for each stage, with the names of StudentWithLoss

    def _weights_file(self, folder):
        return Path(folder) / f"stage_{self.stage_id:02d}_model_states.pt"

    def save_state_dict(self, save_dir, checkpoint_engine, exclude_frozen_params=False):
        """Write this stage's weights; one of the ranks that have them does."""
        if self._grid.data_parallel_id == 0:
            checkpoint_engine.save(self.state_dict(), str(self._weights_file(save_dir)))

    def load_state_dir(self, load_dir, checkpoint_engine, strict=True):
        """Read what `save_state_dict` wrote."""
        weights = checkpoint_engine.load(str(self._weights_file(load_dir)), map_location="cpu")
        self.load_state_dict(weights, strict=strict)


class AllLogits(NamedTuple):
    """Let a model give the logits of all positions of a batch; ids are (B, S)."""

    ids: torch.Tensor

    def reduce(self, logits):
        positions = torch.arange(self.ids.numel(), device=self.ids.device)
        return logits(positions).unflatten(0, self.ids.shape)


class StageClock:
    """Measure how long this stage computes in a step; waiting for its neighbors does not count.

    Attributes:
        seconds: of forward and backward passes since it was set to 0.
    """

    TIMED = schedule.ForwardPass, schedule.BackwardPass

    def __init__(self, engine):
        self.seconds = 0.0
        instructions = dict(engine._INSTRUCTION_MAP)
        for kind in self.TIMED:
            instructions[kind] = self._timed(instructions[kind])
        engine._INSTRUCTION_MAP = instructions

    def _timed(self, execute):
        def execute_and_measure(engine, **arguments):
            begin = time.perf_counter()
            execute(engine, **arguments)
            self.seconds += time.perf_counter() - begin

        return execute_and_measure


class PipelineRunner:
    """Run the student through the stages of a pipeline; a `engine.StudentRunner`."""

    def __init__(self, engine, description):
        self.engine = engine
        self.description = description
        self.computes_loss = engine.is_last_stage()
        self.averaged_ranks = engine.grid.data_parallel_size
        self.batches_at_once = engine.gradient_accumulation_steps()
        self.loss_group = engine.grid.get_data_parallel_group()
        stage = engine.module.stage
        local = num_weights(stage.model)
        if stage.tied and self.computes_loss:  # the first stage counts the embedding
            local -= engine.module.model.get_output_embeddings().weight.numel()
        in_all_pipelines = float(global_sums([local])[0])
        self.num_parameters = int(in_all_pipelines) // self.averaged_ranks
        self.num_weights = self.num_parameters
        self.clock = StageClock(engine)
        self.step_seconds = 0.0

    def train(self, micro_batches, terms):
        module = self.engine.module
        self._begin(terms)
        self.clock.seconds = 0.0
        begin = time.perf_counter()
        self.engine.train_batch(inputs_of(batch.student for batch in micro_batches))
        self.step_seconds = time.perf_counter() - begin
        if self.computes_loss:
            return torch.stack(module.results).sum(0), 0.0
        rows = max(len(micro_batches[0].teachers), 1)
        return torch.zeros(rows, len(TermSums._fields), device=self.engine.device), 0.0

    def _begin(self, terms):
        self.engine.reset_activation_shape()  # training and evaluations have buffers of their own
        self.engine.module.pending = iter(terms)
        self.engine.module.results = []

    def reduce(self, batches, terms):
        self._begin(terms)
        is_training = self.engine.module.training
        self.engine.eval_batch(inputs_of(batches), num_micro_batches=len(batches))
        self.engine.module.train(is_training)
        if self.computes_loss:
            return self.engine.module.results
        return [None] * len(batches)

    def logits(self, batch):
        return self.reduce([batch], [AllLogits(batch.ids)])[0]

    def own_logits(self, batch):
        return self.engine.module.stage.whole_logits

    def share(self, numbers):
        # a sum over all ranks, of which one rank of each pipeline adds anything
        of_pipelines = torch.zeros(self.averaged_ranks, len(numbers), dtype=torch.float64)
        pipeline = self.engine.grid.get_data_parallel_id()
        if self.computes_loss:
            of_pipelines[pipeline] = torch.tensor(numbers)
        return global_sums(of_pipelines)[pipeline].tolist()

    def metrics(self):
        """Return the bubble, and the seconds in which the busiest and the idlest stage compute."""
        seconds = torch.zeros(self.engine.num_stages, dtype=torch.float64)
        seconds[self.engine.stage_id] = self.clock.seconds / self.averaged_ranks
        of_stages = global_sums([*seconds, self.step_seconds / dist.get_world_size()]).tolist()
        *of_stages, step_seconds = of_stages
        bubble = 1 - sum(of_stages) / len(of_stages) / step_seconds
        return {"bubble": bubble, "slowest_stage": max(of_stages), "fastest_stage": min(of_stages)}


def start_pipeline(cfg, model, vocab, ds_config, teachers, are_local):
    """Cut a student into stages and start the engine of this rank's; all ranks take part.

    Args:
        cfg: Config; ds_config: dict that DeepSpeed will see.
        model: the whole student, of which this stage's weights stay.
        vocab: tokens of the student's tokenizer.
        teachers: TeacherSetup of all of them.
        are_local: they are on the student's ranks.  The last stage asks them late where it can do
            so alone, as the others compute meanwhile; this counts as its work.
    Returns:
        PipelineRunner.
    Raises:
        ValueError: see `stages.cut_model`, `ds_engine.start_deepspeed`.
    """
    plan = plan_of(cfg.student, model.config.get_text_config())
    work = layer_work(model, plan, vocab)
    for setup in teachers if are_local else ():
        # columns are kept by what a teacher says of a whole step, and what it says of the student's
        # own text is logged behind it
        waits = setup.keeps_columns or cfg.on_policy
        setup.asked_late = setup.spec.asked_late and not waits
        if setup.asked_late:
            work[-1] += teacher_work(setup.spec)
    spans = cut_layers(work, cfg.pipeline_parallel)
    number = dist.get_rank() % cfg.pipeline_parallel
    is_last = number == cfg.pipeline_parallel - 1
    whole_logits = probe(model, vocab) if is_last else None
    stage = cut_model(cfg.student, model, plan, spans, number)
    stage.whole_logits = whole_logits
    module = PipelinedStudent(stage, vocab, cfg.tiled, cfg.activation_offload)
    attach_projection(module, teachers, stage.device())
    dist.barrier()  # waits for slow loads: DeepSpeed's own groups do not wait for long
    engine = start_engine(module, ds_config, cfg.ds_config, cfg.projection_learning_rate)
    if is_last:
        weight = next(stage.model.parameters())
        stage.whole_logits = whole_logits.to(weight)
    return PipelineRunner(engine, describe_stages(work, spans))


def teacher_work(spec):
    """Return the work of a teacher, for a position, in the unit of `stages.layer_work`.

    It has a forward pass alone, which is a third of what a layer of the student takes.
    """
    work = 0
    for member in spec.single():
        if not member.has_weights:  # this rank runs no model
            continue
        model = load_model("teacher", member.path, member.trust_remote_code, device_map="meta")
        work += num_weights(model) / 3
    return work


def inputs_of(batches):
    """Yield what the engine loads of each StudentBatch: (input of the first stage, no label)."""
    nothing = torch.zeros(())
    for batch in batches:
        inputs = batch.ids if batch.positions is None else (batch.ids, batch.positions)
        yield inputs, nothing
