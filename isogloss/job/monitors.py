"""Keep what is secret from what monitors record by themselves, and end their runs.

wandb and Comet record the command line, git's remotes and differences, code, and what the terminal
shows, without being asked.  What a run sends them itself goes through `without_secrets`.

Tests: tests/test_monitors.py.
"""

import os
import sys
from contextlib import contextmanager
from dataclasses import asdict

from isogloss.flags.model_names import without_secrets

# Unless the user's environment says otherwise; commit and differences are in run.json.
RECORDED = {"WANDB_DISABLE_GIT": "true", "WANDB_DISABLE_CODE": "true",
            "COMET_AUTO_LOG_GIT_METADATA": "false", "COMET_AUTO_LOG_GIT_PATCH": "false",
            "COMET_AUTO_LOG_CODE": "false"}
# Where a flag holds a secret, which a library may print.
PRINTED = {"WANDB_CONSOLE": "off", "COMET_AUTO_OUTPUT_LOGGING": "false"}


@contextmanager
def guarded_monitors(cfg):
    """Hide secrets from monitors that start in this block, and end those of wandb with it."""
    arguments = sys.argv
    sys.argv = without_secrets(arguments)
    flags = asdict(cfg)
    settings = dict(RECORDED)
    if [sys.argv, flags] != [arguments, without_secrets(flags)]:
        settings |= PRINTED
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        sys.argv = arguments
        # One that ends with the process writes in colors, also to a file.
        wandb = sys.modules.get("wandb")
        if wandb and wandb.run:
            wandb.finish(exit_code)
