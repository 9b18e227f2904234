"""Choose the engine of a teacher that several ranks share, or refuse one.

Tests: tests/test_teacher.py.
"""

from isogloss.models import pretrained
from isogloss.teachers.model import reads_more_than_text

# model types that DeepSpeed's inference engine shards as it loads them (0.19.8)
SHARDED = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "smollm3"}


def engine_of_shared(engine, degree, config, num_ranks, is_adapter=False):
    """Return the engine of a teacher that is no whole copy on every rank; see `resolve_engine`."""
    quantization = pretrained.quantization_of(config)
    if quantization:
        raise ValueError(
            f"--teacher_tp {degree} with --teacher_engine {engine}: its weights are quantized "
            f"({quantization}), and only a whole copy on every rank is; use --teacher_tp 1 and "
            "auto")
    if is_adapter and engine in ("auto", "tensor_parallel", "transformers"):
        if engine == "auto":
            return "zero3"
        raise ValueError(f"--teacher_engine {engine}: reads shards of files, and an adapter is "
                         "none; use auto, or merge the adapter into its base model first")
    text_config = config.get_text_config()
    # DeepSpeed would take the text part for a model by itself, and leave it without weights
    model_type = config.model_type if reads_more_than_text(config) else text_config.model_type
    heads = getattr(text_config, "num_key_value_heads", None)
    heads = heads or getattr(text_config, "num_attention_heads", 0)
    # transformers' plans cut whole key-value heads
    has_plan = bool(getattr(text_config, "base_model_tp_plan", None)) and heads % degree == 0
    if engine == "auto":  # the first that can
        if model_type in SHARDED:
            return "tensor_parallel"
        return "transformers" if has_plan and degree == num_ranks else "zero3"
    if engine == "transformers" and not has_plan:
        raise ValueError(
            f"--teacher_tp {degree} with --teacher_engine transformers: it has no plan to shard "
            f"{model_type} models of {heads} key-value heads so; use auto")
    if engine == "transformers" and not degree == num_ranks > 1:
        raise ValueError(
            f"--teacher_tp {degree} with --teacher_engine transformers: it takes all of the "
            f"{num_ranks} ranks that hold teachers, and more than one; use auto")
    if engine == "tensor_parallel" and model_type not in SHARDED:
        raise ValueError(f"--teacher_engine tensor_parallel: does not shard {model_type} models, "
                         f"only {', '.join(sorted(SHARDED))}; use auto or zero3")
    if engine == "replicated" and degree > 1:
        raise ValueError(f"--teacher_tp {degree} with --teacher_engine replicated: a whole copy "
                         "per rank is degree 1; use auto")
    return engine
