"""Choose the engine of a teacher that several ranks share, or refuse one.

Tests: tests/test_teacher.py, tests/test_plans.py.
"""

from isogloss.models import pretrained
from isogloss.teachers.engines.plans import plan_of
from isogloss.teachers.model import ENGINES

# Model types whose plan in transformers (5.23) gives what the whole model does, by test_plans.py.
EXACT = set("""
    cohere2 deepseek_v3 deepseek_v32 ernie4_5 exaone4 gemma gemma2 gemma3_text gemma4_text glm4
    glm4_moe glm4_moe_lite gpt_neox gpt_oss granite granitemoe granitemoehybrid jamba lfm2_moe llama
    llama4_text minimax minimax_m2 ministral ministral3 mistral mixtral nemotron_h olmo2 olmo3 olmoe
    phi phi3 qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss
    smollm3 starcoder2
    """.split())
# A plan that leaves more of the weights whole on every rank shards too little.
MOST_WHOLE = 0.5


def engine_of_shared(engine, degree, config, is_adapter=False, trust_remote_code=False):
    """Return the engine of a teacher that is no whole copy on every rank; see `resolve_engine`."""
    if engine not in ("auto", "transformers", *ENGINES):
        return "vllm"  # or a command
    quantization = pretrained.quantization_of(config)
    if quantization:
        raise ValueError(
            f"--teacher_tp {degree} with --teacher_engine {engine}: its weights are quantized "
            f"({quantization}), and only a whole copy on every rank is; use --teacher_tp 1 and "
            "auto")
    if engine == "replicated":
        raise ValueError(f"--teacher_tp {degree} with --teacher_engine replicated: a whole copy "
                         "per rank is degree 1; use auto")
    if engine == "zero3" or (engine == "auto" and is_adapter):
        return "zero3"
    if is_adapter:
        raise ValueError(f"--teacher_engine {engine}: reads shards of files, and an adapter is "
                         "none; use auto, or merge the adapter into its base model first")
    if degree == 1:
        return "replicated"
    reason = reason_against(config, degree, trust_remote_code)
    if reason and engine != "auto":
        raise ValueError(f"--teacher_tp {degree} with --teacher_engine {engine}: {reason}; use "
                         "auto or zero3")
    return "zero3" if reason else "tensor_parallel"


def reason_against(config, degree, trust_remote_code=False):
    """Say why transformers cannot shard a config's model over `degree` ranks, or return ""."""
    name = f"{config.model_type} models"
    text_config = config.get_text_config()
    plans = [getattr(text_config, f"base_model_{kind}_plan", None) for kind in ("tp", "ep")]
    if not any(plans):
        return f"transformers has no plan to shard {name}"
    if text_config.model_type not in EXACT:
        return f"no test has compared {name}, cut by the plan of transformers, with whole ones"
    plan = plan_of(config, degree, trust_remote_code)
    if plan is None:
        return f"{name} that bring their own code have no plan"
    if plan.whole_fraction > MOST_WHOLE:
        return (f"the plan that transformers has for {name} leaves {plan.whole_fraction:.0%} of "
                "the weights of this one whole on every rank")
    return ""
