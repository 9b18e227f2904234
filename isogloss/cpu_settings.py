"""Give a process on a CPU the settings that torch and glibc read when it starts.

They are environment variables, and set later they change nothing.  So a program that finds some of
them unset sets them and executes itself once more, before it imports torch: the same process, the
same command line.

    python isogloss/cpu_settings.py OMP_WAIT_POLICY     # its value, for a Makefile

Imports nothing but Python's own modules.  Tests: tests/test_cpu_settings.py.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

SETTINGS = {
    # Idle threads of torch sleep.  Else they spin on the cores that the compiled losses need.
    "OMP_WAIT_POLICY": "passive",
    # glibc keeps what a step frees, in large pages, for the next one, which saves thousands of page
    # faults.  8 GiB stands for all of it.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:"
                      "glibc.malloc.trim_threshold=8589934592",
}
# Names the settings that this module has made; while it is set, no process executes itself again.
MARK = "ISOGLOSS_CPU_SETTINGS"
# Where the kernel shows accelerators: NVIDIA, AMD, Habana, Ascend.
ACCELERATORS = "/dev/nvidiactl", "/dev/kfd", "/dev/accel", "/dev/davinci_manager"


def restart_with_settings():
    """Set what is unset of the SETTINGS and execute this program once more, where it is for a CPU.

    Variables that are set, be it to nothing, stay.  Returns where there is nothing to do: all of
    them are set, the process is a second one already, it uses an accelerator, or it is not this
    program's alone, for torch has been imported or a debugger watches.
    """
    unset = [name for name in SETTINGS if name not in os.environ]
    if not unset or MARK in os.environ or not sys.platform.startswith("linux"):
        return
    if "torch" in sys.modules or sys.gettrace() or not sys.executable or not computes_on_cpu():
        return
    environment = os.environ | {name: SETTINGS[name] for name in unset} | {MARK: " ".join(unset)}
    sys.stdout.flush()
    sys.stderr.flush()
    # Signals that are ignored stay so, and a launcher sees the process id that it started.
    os.execve(sys.executable, sys.orig_argv, environment)


def computes_on_cpu():
    """Tell whether DeepSpeed will choose the CPU, as far as can be known without torch."""
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen:
        return chosen == "cpu"
    if importlib.metadata.version("torch").endswith("+cpu"):
        return True
    return not any(Path(device).exists() for device in ACCELERATORS)


def current_settings():
    """Return {name: {"value", "set_by"}} of the SETTINGS in this process, for its record.

    set_by is "program" (this module) or "user"; None where a setting has no value.
    """
    made_here = os.environ.get(MARK, "").split()
    settings = {}
    for name in SETTINGS:
        value = os.environ.get(name)
        set_by = None
        if value is not None:
            set_by = "program" if name in made_here else "user"
        settings[name] = {"value": value, "set_by": set_by}
    return settings


if __name__ == "__main__":
    print(SETTINGS[sys.argv[1]])
