"""Tell whether the layers of a teacher can be compiled.

Tests: tests/test_teacher.py.
"""

from isogloss.models import pretrained
from isogloss.models.compiler import missing_compiler


def check_compile(engine, config):
    """Raise a ValueError where --teacher_compile cannot work.

    Args:
        engine: as `resolve_engine` returns it; config: of the whole model.
    """
    method = pretrained.quantization_of(config)
    if engine == "zero3":
        raise ValueError(
            "--teacher_compile: not with --teacher_engine zero3, which gathers weights between "
            "the parts of a layer, so that nothing is left to compile; leave it out")
    if method:
        raise ValueError(f"--teacher_compile: the teacher's weights are quantized ({method}), and "
                         "their library has kernels of its own; leave it out")
    missing = missing_compiler()
    if missing:
        raise ValueError(f"--teacher_compile: {missing}, which torch.compile needs; install it, or "
                         "leave the flag out")


def can_compile(engine, config):
    """Tell whether `check_compile` lets a teacher's layers be compiled."""
    try:
        check_compile(engine, config)
    except ValueError:
        return False
    return True
