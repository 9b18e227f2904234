"""List the doors: the modules that a run imports only if its flags ask for them.

Behind everything else lies the hall, which every run walks through: what the simplest run imports
(one teacher of this process, texts, an evaluation, an export).  The hall opens a door by an import
inside the function that the flag reaches.  A door knows the hall, and never imports another one;
where it needs what another one does, it asks `door`.  See docs/architecture.md.

Tests: tests/test_doors.py.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple


class Door(NamedTuple):
    """Describe a door.

    Attributes:
        flag: what opens it.
        opens: what is behind it, a sentence.
        modules: of isogloss, the first one is what `door` returns.
        is_open: (Config) -> the flag is set; of doors with one of the following.
        checks: one of the modules, whose `check(cfg, layout)` is called before models are loaded.
        prepares: one whose `prepare(state, inputs, stack)` is called once they are.
    """

    flag: str
    opens: str
    modules: tuple
    is_open: Callable = lambda cfg: False
    checks: str = ""
    prepares: str = ""


DOORS: dict[str, Door] = {
    "help": Door("--help", "What every flag means.", ("flags.help",)),
    # the student
    "adapters": Door("--lora_r, or a model that is an adapter",
                     "Low-rank layers beside frozen weights.", ("models.adapters",)),
    "quantized": Door("--quantize", "Frozen weights in 4 bits.", ("models.quantized",)),
    "freezing": Door("--train_only, --freeze_until", "Weights that learn later, or not.",
                     ("student.freezing",)),
    "experts": Door("--router_weight, --freeze_router, or a config that asks for it",
                    "The loss that balances a mixture's experts.", ("student.router",)),
    "activations": Door("--activation_offload, --mlp_tiles", "Less memory for activations.",
                        ("models.activations",)),
    "sequence_parallel": Door("--sequence_parallel", "Sequences in shards, one a rank.",
                              ("job.sequence_group", "student.ulysses"),
                              lambda cfg: cfg.sequence_parallel > 1, "student.ulysses",
                              "student.ulysses"),
    "pipeline": Door("--pipeline_parallel", "The student's layers in stages, one a rank.",
                     ("student.pipeline", "student.stages"),
                     lambda cfg: cfg.pipeline_parallel > 1, checks="student.stages"),
    # the data
    "packing": Door("--pack", "Several texts in a row.", ("student.packing",),
                    lambda cfg: cfg.pack, prepares="student.packing"),
    "streaming": Door("--streaming, --join_rows", "Rows that can only be read forward.",
                      ("data.stream",)),
    "chats": Door("rows that hold chats", "Chats by each model's template.",
                  ("data.chat", "data.turns", "data.chat_rows")),
    # the loss
    "projection": Door("--loss projection_kl, gold, h_kl or hybrid_uld",
                       "A projection of one vocabulary onto the other.",
                       ("objective.projected", "projection_tools.build", "projection_tools.cut",
                        "projection_tools.exact", "projection_tools.generate",
                        "projection_tools.multitoken", "projection_tools.arrays",
                        "projection_tools.projection_files")),
    "written": Door("--loss_backend compiled, which is auto on a GPU",
                    "Gradients of divergences that are written out.", ("objective.fused",)),
    "loss_dump": Door("--dump_losses", "The loss of each chunk, in files.",
                      ("objective.loss_dump",)),
    # the teachers
    "own": Door("--teacher self with --teacher_ema", "A teacher that follows the student.",
                ("teachers.own",)),
    "engines": Door("--teacher_tp, --teacher_engine, --teacher_compile",
                    "A teacher in shards, or with other layers.",
                    ("teachers.engines.sharded", "teachers.engines.layers", "job.replicas")),
    "teacher_ranks": Door("--teacher_ranks", "Teachers on ranks of their own.",
                          ("teachers.remote", "job.roles")),
    "cache": Door("--teacher_cache", "What a teacher said of the texts, in files.",
                  ("teachers.cached", "teachers.cache_files", "teachers.cache_checks",
                   "teachers.kept_tokens", "teachers.packed_rows")),
    "served": Door("--teacher http://...", "A teacher behind a server.",
                   ("teachers.served", "teachers.text_server")),
    "dynamic_scale": Door("--dynamic_scale", "Losses of teachers as large as the text's.",
                          ("teachers.scales",), lambda cfg: cfg.dynamic_scale,
                          prepares="teachers.scales"),
    "ensemble": Door("--teacher_weights mean_p", "The mean of several teachers.",
                     ("teachers.ensemble",)),
    # the student writes
    "tasks": Door("--eval_tasks", "Benchmarks in between, code in a sandbox.",
                  ("evaluation.task_suite", "evaluation.task_model",
                   "evaluation.task_passes", "evaluation.harness",
                   "evaluation.code_tasks", "evaluation.sandbox", "tasks"),
                  lambda cfg: cfg.eval_tasks, prepares="evaluation.task_suite"),
    "eval_samples": Door("--eval_samples", "Held-out texts that the student continues.",
                         ("evaluation.eval_samples",), lambda cfg: cfg.eval_samples,
                         prepares="evaluation.eval_samples"),
    "on_policy": Door("--on_policy", "Texts of the student that teachers correct.",
                      ("data.rollouts", "writing.on_policy", "writing.rollout_ratio",
                       "writing.node_writer", "writing.writer_process", "writing.kept_process"),
                      lambda cfg: cfg.on_policy, prepares="writing.on_policy"),
    "speculation": Door("--eval_draft", "How good a draft of the teacher the student is.",
                        ("evaluation.speculation",)),
    # what a run leaves, and finds
    "resume": Door("a checkpoint to go on from", "It is loaded, in its layout or in another.",
                   ("checkpoints.resume", "checkpoints.convert", "checkpoints.unpickle")),
}

# What several doors use and the hall does not: they know the hall, and one another.  The tables of
# two tokenizers, which spelling.py makes, are on disk from the second run on.
TOOLS = (
    "align_dp", "spelling", "rollout", "policy_losses", "job.ipc",
    "student.whole_student", "teachers.group", "teachers.mixing", "teachers.text_scores",
)


def door(name: str) -> Any:
    """Return the first module of a door."""
    return importlib.import_module(f"isogloss.{DOORS[name].modules[0]}")


def check(cfg: Any, layout: Any) -> None:
    """Let the open doors check the layout of a run.

    Args:
        layout: `inputs.Layout`.
    Raises:
        ValueError: what does not fit, and what would.
    """
    for its in DOORS.values():
        if its.checks and its.is_open(cfg):
            importlib.import_module(f"isogloss.{its.checks}").check(cfg, layout)


def prepare(state: Any, inputs: Any, stack: Any) -> None:
    """Let the open doors make ready what they add to a run; all ranks take part.

    Args:
        state: `build.TrainState`; inputs: `inputs.RunInputs`.
        stack: ExitStack; what has to be ended is pushed on it.
    """
    for its in DOORS.values():
        if its.prepares and its.is_open(state.cfg):
            importlib.import_module(f"isogloss.{its.prepares}").prepare(state, inputs, stack)
