"""Run files of the user's own, which add entries to our tables: a loss, a kind of teachers."""

import importlib.util
import sys
from pathlib import Path


def load_plugins(names):
    """Run each file of --plugin once in this process, before flags are checked against tables.

    Args:
        names: paths with commas between them; empty: none.
    Raises:
        ValueError: there is no such file, or it does not run.
    """
    for name in filter(None, map(str.strip, names.split(","))):
        path = Path(name).expanduser().resolve()
        if path.suffix != ".py" or not path.is_file():
            raise ValueError(f"--plugin {name}: no such file; expected one that ends in .py")
        module_name = f"isogloss_plugin_{path.stem}"
        known = sys.modules.get(module_name)
        if known is not None and known.__file__ == str(path):
            continue
        if known is not None:
            raise ValueError(f"--plugin {name}: {known.__file__} has the same name; give them two")
        spec = importlib.util.spec_from_file_location(module_name, path)
        sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # whatever the user's code raises
            del sys.modules[module_name]
            said = " ".join(str(error).split())
            raise ValueError(f"--plugin {name}: {type(error).__name__}: {said}") from None
