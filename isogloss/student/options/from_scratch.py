"""Make a student with random weights, the same on every rank and at every ZeRO stage.

Tests: tests/test_pretrained.py, tests/test_distributed.py.
"""

from functools import partial

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import deepspeed_config, unset_hf_deepspeed_config

from isogloss.models.pretrained import check_attention, load_config
from isogloss.projection_tools.tokenizers import reading


def random_model(role, path, trust_remote_code=False, **options):
    """Return a causal language model of a config, with the random weights of torch's generator.

    Raises:
        ValueError: there is no such model.
    """
    config = load_config(role, path, trust_remote_code)
    with reading(role, path, "a model of its config"):
        return AutoModelForCausalLM.from_config(
            config, trust_remote_code=trust_remote_code, **options)


def check_random(path, trust_remote_code=False, attention="auto"):
    """Check that a student can be made of a config, without making its weights.

    Args:
        attention: see `check_weights`.
    Raises:
        ValueError: it cannot.
    """
    with torch.device("meta"):
        model = random_model("student", path, trust_remote_code)
    check_attention("student", path, model, attention)


def random_student(cfg, **options):
    """Return a student with random weights, the same on every rank and at every ZeRO stage.

    Under ZeRO-3 transformers draws the numbers in another order, and none for a layer that a model
    leaves to torch's defaults.  So rank 0 makes the whole model there too, and all take their shard
    of it.
    """
    new_model = partial(random_model, "student", cfg.student, cfg.trust_remote_code, **options)
    ds_config = deepspeed_config()  # of the HfDeepSpeedConfig that is alive, or None
    with torch.random.fork_rng():  # dropout goes on with each rank's own numbers
        torch.manual_seed(cfg.seed)
        if ds_config is None:
            return new_model()
        model = new_model()
        unset_hf_deepspeed_config()
        torch.manual_seed(cfg.seed)
        whole = new_model() if dist.get_rank() == 0 else None
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if whole is not None:
                parameter.data.copy_(whole.get_parameter(name))
    return model
