"""Describe teachers that are models on this job's ranks, and choose one of three ways to load them.

What runs them is in engines/: whole copies in whole.py, shards in sharded.py.
"""

from dataclasses import asdict, dataclass
from typing import ClassVar

import torch.distributed as dist
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from isogloss.flags.model_names import read_model_name
from isogloss.job.layout import node_size, teacher_groups
from isogloss.models import pretrained
from isogloss.teachers.engines.whole import config_of, load_replicated
from isogloss.teachers.protocol import TeacherSpec

ENGINES = "replicated", "tensor_parallel", "zero3"


def reads_more_than_text(config):
    """Tell whether the language model of a config reads images or sounds, too, as Gemma 3 does.

    Of other models with such a config, as Llama 4, transformers loads the text part alone.
    """
    text_config = config.get_text_config()
    if text_config is config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return False
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].config_class is not type(text_config)


def resolve_engine(engine, degree, config, is_adapter=False, trust_remote_code=False):
    """Return the engine that "auto" means; check the others.

    Args:
        engine: of ENGINES, "transformers" (tensor_parallel), "auto", "vllm" or a command.
        degree, config: ranks that share the model; its config, of images as well.
        is_adapter: it is an adapter on another model.
    Raises:
        ValueError: an engine that cannot shard this model over `degree` ranks.
    """
    if degree == 1 and engine in ("auto", "replicated"):
        return "replicated"  # it needs no communication
    from isogloss.teachers.engines.choose_engine import engine_of_shared

    return engine_of_shared(engine, degree, config, is_adapter, trust_remote_code)


# --- the kind -------------------------------------------------------------------------------------


@dataclass
class ModelSpec(TeacherSpec):
    """Describe a model to load, and how it will be asked.

    Attributes:
        engine: of ENGINES, "auto", "vllm" or the command of an engine.
        dtype: "auto" (as in the checkpoint), "float32", "bfloat16" or "float16".
        attention: an --attention.
        degree: ranks that share the model.
        offload: keep the weights in the host's memory but for the teacher's forward passes.
        compile: "true": let torch.compile make its forward pass; "auto": on a GPU, where it can.
        output_topk: tokens of the output "topk"; all others together are one event.
        rest_temperature: by which the loss divides such logits.
        same_ids: the ranks that share the model ask with the same ids; else each with its own.
        sequence_parallel_size: neighboring ranks that ask with the same ids.
        max_length: positions of a text, at most.
        trust_remote_code: run the Python code that comes with the model.
    """

    output: str = "hidden"
    engine: str = "replicated"
    dtype: str = "auto"
    attention: str = "auto"
    degree: int = 1
    offload: bool = False
    compile: str = "false"
    output_topk: int = 256
    rest_temperature: float = 1.0
    same_ids: bool = False
    sequence_parallel_size: int = 1
    max_length: int = 0
    trust_remote_code: bool = False

    has_weights: ClassVar[bool] = True
    takes_tokenizer: ClassVar[bool] = False

    @classmethod
    def check(cls, cfg):
        if cfg.teacher_output == "topk":
            from isogloss.teachers.text_scores import check_truncated

            check_truncated(cfg, "--teacher_output topk")
            if not cfg.teacher_output_topk:
                raise ValueError("--teacher_output_topk 0: is for the address of a server as "
                                 "--teacher; expected 1 or more")

    @classmethod
    def encoder(cls, cfg, load, student, roles):
        num_ranks = dist.get_world_size()
        ranks_per_node = node_size()
        if roles:  # this world has the student's ranks only
            num_ranks = num_ranks // roles.student_ranks * roles.teacher_ranks
            ranks_per_node = roles.teacher_ranks
        encoder, _ = load()
        config = pretrained.load_config("teacher", cfg.teacher, cfg.trust_remote_code)
        pretrained.check_language_model("teacher", cfg.teacher, config)
        if checked_engine(cfg, config, num_ranks, ranks_per_node) == "vllm":
            from isogloss.teachers.engines.vllm import check_engine

            check_engine(cls.of(cfg, encoder, "cpu"))
            if pretrained.quantization_of(config):  # which is the engine's matter
                return encoder
        pretrained.check_weights(
            "teacher", cfg.teacher, cfg.trust_remote_code, attention=cfg.attention)
        return encoder

    @classmethod
    def of(cls, cfg, encoder, device, student=None):
        output = cfg.teacher_output
        if output == "hidden" and not cfg.tiled:
            output = "logits"  # the model's own: a head may be more than `tiles.head_of` knows
        rest_temperature = 1.0
        if cfg.softens_truncated:
            from isogloss.teachers.text_scores import reading_of_rest

            rest_temperature, _ = reading_of_rest(cfg, student or encoder, encoder)
        return cls(
            path=cfg.teacher, vocab=len(encoder.table), device=device, output=output,
            engine=cfg.teacher_engine, dtype=cfg.teacher_dtype, attention=cfg.attention,
            degree=cfg.teacher_tp, offload=cfg.teacher_offload, compile=cfg.teacher_compile,
            output_topk=cfg.teacher_output_topk, rest_temperature=rest_temperature,
            sequence_parallel_size=cfg.ranks_per_reader, max_length=encoder.max_length,
            trust_remote_code=cfg.trust_remote_code)

    def load(self):
        """Return its ModelTeacher; all ranks take part where they share it.

        Raises:
            ValueError: see `resolve_engine`, `check_compile`.
        """
        engine = self._resolved()
        check_layers(engine, config_of(self), self.compile)
        if self.compile == "auto" and str(self.device).startswith("cuda"):
            from isogloss.teachers.engines.layers import can_compile

            self.compile = str(can_compile(engine, config_of(self))).lower()
        if engine == "replicated":
            return load_replicated(self)
        from isogloss.teachers.engines.sharded import LOADERS

        return LOADERS[engine](self)

    def _resolved(self):
        return resolve_engine(self.engine, self.degree, config_of(self), is_adapter(self.path),
                              self.trust_remote_code)

    @property
    def is_shared(self):
        return self._resolved() != "replicated"

    @property
    def asked_late(self):
        return not (self.is_shared or self.offload)

    def to_plain(self):
        """Return {attribute: value} for JSON, from which another rank makes one for its device."""
        return {name: value for name, value in asdict(self).items() if name != "device"}


def checked_engine(cfg, config, num_ranks, ranks_per_node):
    """Return the engine of the teacher of a run with it alone, whose layout is possible.

    Args:
        config: of the whole model.
        num_ranks, ranks_per_node: that hold teachers.
    Raises:
        ValueError: see `teacher_groups`, `resolve_engine`, `check_compile`.
    """
    teacher_groups(num_ranks, ranks_per_node, cfg.teacher_tp)
    engine = resolve_engine(cfg.teacher_engine, cfg.teacher_tp, config, is_adapter(cfg.teacher),
                            cfg.trust_remote_code)
    check_layers(engine, config, cfg.teacher_compile)
    return engine


def check_layers(engine, config, compile):
    """Raise a ValueError where layers cannot be compiled, if they have to be."""
    if compile == "true":
        from isogloss.teachers.engines.layers import check_compile

        check_compile(engine, config)


def is_adapter(path):
    return read_model_name("teacher", path).adapter is not None
