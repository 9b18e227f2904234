"""Passes over all weights or gradients that a step on a CPU can do without.

A student with a large vocabulary and few tokens a step spends most of its time on memory: each pass
over weights, gradients or moments reads them all.  DeepSpeed makes about twenty, of which the
following go, none of which changes more of a result than its last bits:

- PyTorch's Adam, for which a loop of ten operations is the default on a CPU, in one pass (`fused`).
- With one rank, the division of gradients by the number of ranks.
- The multiplication of gradients by a clipping factor: Adam's one pass divides by it.
- The copy of a gradient out of a communication bucket in which it never was (ZeRO 1 and 2).
- The copy of all gradients into one tensor: Adam takes them as they are (`GradientsApart`).
- The look for NaN and infinities, which the norm of the gradient shows as well.
- The copy of all gradients in float64, of which that norm is taken, block by block instead.
- The copy of new weights from the optimizer's into the model's, in float32, where both are the same
  memory.

Tests: tests/test_cpu_engine.py.  Measured by benchmarks/step.py.
"""

import copy

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

FUSED = "adam", "adamw"


def fuse_optimizer(config):
    """Return a ds_config in which PyTorch's Adam takes one pass, unless it says otherwise.

    Args:
        config: dict that DeepSpeed would get; left as it is.
    """
    params = config["optimizer"].get("params", {})
    name = config["optimizer"]["type"].lower()
    says_otherwise = "fused" in params or "foreach" in params
    if not on_cpu() or name not in FUSED or not params.get("torch_adam") or says_otherwise:
        return config
    config = copy.deepcopy(config)
    config["optimizer"]["params"]["fused"] = True
    return config


def leave_out_passes(engine):
    """Let an engine of ZeRO 1 or 2 on a CPU leave out the passes of this file's docstring."""
    optimizer = engine.optimizer
    # at stage 1 in bfloat16 DeepSpeed may choose an optimizer that makes other passes
    if not on_cpu() or not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return
    if dist.get_world_size(group=optimizer.dp_process_group) == 1:
        optimizer.gradient_average = False
    leave_out_factor_of_one(optimizer)
    if optimizer.cpu_offload:
        return
    leave_out_bucket(optimizer)
    if optimizer.compute_grad_norm and (optimizer.dtype != torch.bfloat16
                                        or optimizer.check_grad_overflow):
        optimizer.check_overflow = lambda partition_gradients=True: None  # the norm is looked at
    take_norm_in_blocks(optimizer)
    if takes_gradients_apart(optimizer):
        GradientsApart(optimizer)
    share_weights(optimizer)


def leave_out_factor_of_one(optimizer):
    """Multiply no gradient by 1."""
    scale_gradients = optimizer.unscale_and_clip_grads

    def scale_unless_by_one(gradients, norm):
        # as DeepSpeed computes the factor; a norm that is NaN goes on to it
        is_short = optimizer.clip_grad > 0 and norm + 1e-6 <= optimizer.clip_grad
        if not (is_short and optimizer.loss_scale == 1):
            scale_gradients(gradients, norm)

    optimizer.unscale_and_clip_grads = scale_unless_by_one


def leave_out_bucket(optimizer):
    """Copy no gradient out of a bucket in which it never was."""
    copy_gradient = optimizer.copy_grads_in_partition

    def copy_unless_alone(param, *args, **options):
        # larger than a bucket, it was reduced where backward has left it
        is_alone = optimizer.contiguous_gradients and param.numel() > optimizer.reduce_bucket_size
        if not is_alone:
            copy_gradient(param, *args, **options)

    optimizer.copy_grads_in_partition = copy_unless_alone


# --- the norm -------------------------------------------------------------------------------------

BLOCK = 1 << 17  # elements, which are 1 MiB in float64: a processor's cache holds them


def take_norm_in_blocks(optimizer):
    """Let the norm of the gradient be that of the norms of its parts, in float64 as DeepSpeed's."""
    combine = optimizer.get_grad_norm_direct

    def norm_of_norms(gradients, params, norm_type=2):
        if norm_type == 2:
            gradients = [norm_of(gradient) for gradient in gradients]
        return combine(gradients, params, norm_type)

    optimizer.get_grad_norm_direct = norm_of_norms


def norm_of(gradient):
    """Return the () float64 norm of a gradient; what pads a partition as it is."""
    if getattr(gradient, "_zero_padding", False):
        return gradient
    norms = [torch.zeros((), dtype=torch.float64)]
    for block in gradient.detach().reshape(-1).split(BLOCK):
        norms.append(torch.linalg.vector_norm(block.double()))
    return torch.linalg.vector_norm(torch.stack(norms))


# --- the optimizer --------------------------------------------------------------------------------


def takes_gradients_apart(optimizer):
    """Tell whether `GradientsApart` can do what DeepSpeed's optimizer does."""
    inner = optimizer.optimizer
    if not isinstance(inner, torch.optim.Adam) or optimizer.torch_autocast_gradscaler:
        return False
    is_plain = all(group["fused"] and not group["amsgrad"] for group in inner.param_groups)
    in_float32 = optimizer.master_weights_and_grads_dtype == torch.float32 == optimizer.dtype
    return is_plain and in_float32


class GradientsApart:
    """Let Adam step from gradients where backward has left them, and divide by the clipping factor.

    DeepSpeed's optimizer holds the weights of a group as one flat tensor, and copies all gradients
    into another one, the gradient of the first.  Here that gradient is a stand-in without memory.
    In its place Adam gets a view of the weights and moments for each gradient.

    Args:
        optimizer: DeepSpeedZeroOptimizer around a fused Adam, whose methods are replaced.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.inner = optimizer.optimizer
        self.gradients = {}  # {number of a group: its gradients}
        self.factor = None  # () by which Adam divides; None: 1
        self.scale_gradients = optimizer.unscale_and_clip_grads
        self.flat_gradient = optimizer._get_preflattened_grad_partition
        self.step_group = optimizer._optimizer_step
        optimizer._get_preflattened_grad_partition = self.stand_in
        optimizer.unscale_and_clip_grads = self.note_factor
        optimizer._optimizer_step = self.step

    def stand_in(self, number):
        """Return what DeepSpeed takes for the flat gradient of a group."""
        flat = self.flat_gradient(number)
        gradients = self.optimizer.averaged_gradients[number]
        if flat is not None or any(gradient.dtype != torch.float32 for gradient in gradients):
            return flat
        self.gradients = {number: gradients}
        return torch.zeros(()).expand(int(self.optimizer.partition_size[number]))

    def note_factor(self, gradients, norm):
        """Remember the factor of clipping, or apply it where gradients are real."""
        self.factor = None
        if not self.gradients:
            self.scale_gradients(gradients, norm)
        elif self.optimizer.clip_grad or self.optimizer.loss_scale != 1:
            scale = torch.as_tensor(float(self.optimizer.loss_scale))
            if self.optimizer.clip_grad:
                excess = (norm / scale + 1e-6) / self.optimizer.clip_grad
                scale = scale * excess.clamp(min=1)
            if scale != 1:
                self.factor = scale.float()

    def step(self, number):
        """Step the weights of a group."""
        gradients = self.gradients.pop(number, None)
        if gradients is None:
            self.step_group(number)
            return
        inner = self.inner
        group = inner.param_groups[number]
        [weights] = group["params"]
        moments = self.moments(group, weights)
        views = views_of(weights, moments, gradients)
        groups = inner.param_groups
        inner.param_groups = [group | {"params": list(views)}]
        inner.state.update(views)
        inner.grad_scale = self.factor
        try:
            inner.step()
            first = next(iter(views))
            moments["step"].copy_(inner.state[first]["step"])
        finally:
            for view in views:
                del inner.state[view]
            inner.grad_scale = None
            inner.param_groups = groups
        self.optimizer._lazy_init_hp_params_optimizer_state()

    def moments(self, group, weights):
        """Return Adam's state of a group's flat weights, which it makes at the first step."""
        if not self.inner.state[weights]:
            self.inner._init_group(group, [], [], [], [], [], [])
        return self.inner.state[weights]


def views_of(weights, moments, gradients):
    """Return {view of flat weights that has a gradient: its state}, for gradients in their order.

    Args:
        weights: (n,); moments: Adam's state of them.
        gradients: tensors of n elements together.
    """
    sizes = [gradient.numel() for gradient in gradients]
    of_weights = weights.detach().split(sizes)
    of_means = moments["exp_avg"].split(sizes)
    of_squares = moments["exp_avg_sq"].split(sizes)
    views = {}
    for view, mean, square, gradient in zip(of_weights, of_means, of_squares, gradients):
        view.grad = gradient.detach().reshape(-1)
        views[view] = {"step": moments["step"].clone(), "exp_avg": mean, "exp_avg_sq": square}
    return views


def share_weights(optimizer):
    """Let the optimizer's weights be the model's own, where both are in float32."""
    for number, weights in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = dist.get_rank(group=optimizer.real_dp_process_group[number])
        of_model = optimizer.parallel_partitioned_bit16_groups[number][rank]
        if of_model.dtype == weights.dtype:
            weights.data = of_model.data
    optimizer._link_all_hp_params()  # which refers to where the weights are


def on_cpu():
    return get_accelerator().device_name() == "cpu"
