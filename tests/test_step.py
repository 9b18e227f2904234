"""A reader follows a step in a few files: the path from `train_step` to the KL."""

import inspect
import sys
from pathlib import Path

import jobs
import ranks
import steps
from conftest import ROOT

MOST_FRAMES, MOST_FILES, MOST_LINES = 12, 6, 40


def path_to_the_kl(flags):
    """Take a step; return the (file, function) of ours between `train_step` and the first KL."""
    from isogloss import distill, losses
    from isogloss.inputs import build_collator

    state, inputs = jobs.job_for(flags)
    collate = build_collator(state.cfg, inputs, state.device)
    batch = collate([inputs.data.sources[0].train_data[i]["text"] for i in range(2)])
    path = []

    def note(frame, event, _):
        if event == "call" and frame.f_code is losses.forward_kl.__code__ and not path:
            while frame.f_code is not distill.train_step.__code__:
                path.append((frame.f_code.co_filename, frame.f_code.co_name))
                frame = frame.f_back

    sys.setprofile(note)
    try:
        distill.train_step(state, [batch])
    finally:
        sys.setprofile(None)
    source = inspect.getsource(distill.train_step)
    path.append((distill.__file__, "train_step"))
    ours = [(file, name) for file, name in path if Path(file).is_relative_to(ROOT)
            and ".venv" not in file]
    return ours, len(source.splitlines())


def test_a_step_is_short_and_the_kl_is_near(models, texts, tmp_path):
    flags = steps.flags_for(models, texts, tmp_path, learning_rate=1e-3)
    [(path, num_lines)] = ranks.run(1, path_to_the_kl, flags)
    assert path[0][1] == "forward_kl" and path[-1][1] == "train_step"
    assert len(path) <= MOST_FRAMES, path
    assert len({file for file, _ in path}) <= MOST_FILES, path
    assert num_lines <= MOST_LINES
