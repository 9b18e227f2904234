"""Distil a language model into a student with another tokenizer.

In a checkout the modules that people copy (losses.py, align.py, ...) lie beside this package, in an
installation inside it.  Both ways they are `isogloss.losses`, `isogloss.align`, ...: a module has
one name in a process.
"""

import logging
from pathlib import Path

__version__ = "0.2.0"

_HERE = Path(__file__).resolve().parent
if not (_HERE / "losses.py").exists():  # a checkout
    __path__.append(str(_HERE.parent))

for _name in ("DeepSpeed", "torch.utils.cpp_extension"):  # no news where there is no GPU
    logging.getLogger(_name).addFilter(lambda record: not str(record.msg).startswith(
        ("Setting accelerator to CPU", "No CUDA runtime is found")))


def __getattr__(name):
    """Import what the package offers when it is asked for: `import isogloss` needs no torch."""
    if name == "CrossTokenizerKD":
        from isogloss.cross_tokenizer import CrossTokenizerKD

        return CrossTokenizerKD
    raise AttributeError(f"module 'isogloss' has no attribute {name!r}")
