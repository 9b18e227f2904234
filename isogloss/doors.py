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
        changes: one whose `change(model, cfg)` is called once the student is loaded.
        prepares: one whose `prepare(state, inputs, stack)` is called once all models are.
    """

    flag: str
    opens: str
    modules: tuple
    is_open: Callable = lambda cfg: False
    checks: str = ""
    changes: str = ""
    prepares: str = ""


DOORS: dict[str, Door] = {
    "help": Door("--help", "What every flag means.", ("flags.help",)),
    "secret": Door("several ranks, or ISOGLOSS_TOKEN", "The secret that they have in common.",
                   ("job.several.secret",)),
    "peers": Door("several ranks", "That another one has failed or died.", ("job.several.peers",)),
    "skipped": Door("a step that is not finite", "Why.", ("student.options.skipped_steps",)),
    "half_on_cpu": Door("16 bits on a CPU", "Whether it has instructions for them.",
                        ("models.half_on_cpu",)),
    "peaks": Door("a GPU", "How much of its peak a step uses.", ("student.options.peaks",)),
    "wandb": Door("wandb in the ds_config", "The steps of its curves.", ("job.wandb_steps",)),
    "launcher": Door("a launcher", "Whether its variables are those of a rank.",
                     ("flags.launcher_variables",)),
    "launchers": Door("a launcher", "That it is gone.", ("job.several.launchers",)),
    "plugins": Door("--plugin", "Losses and teachers of the user's own.", ("flags.plugins",)),
    "flag_file": Door("--config", "Flags from a YAML file.", ("flags.yaml_file",)),
    "unknown": Door("a flag that is none", "Which one was meant.", ("flags.unknown",)),
    # the student
    "quantized": Door("--quantize, or a model that is", "Weights in 4 bits.",
                      ("models.quantized",), lambda cfg: cfg.quantize,
                      checks="models.quantized", changes="models.quantized"),
    "adapters": Door("--lora_r, or a model that is an adapter",
                     "Low-rank layers beside frozen weights.",
                     ("models.adapters", "flags.adapter_names"),
                     lambda cfg: cfg.lora_r, changes="models.adapters"),
    "experts": Door("--router_weight, --freeze_router, or a config that asks for it",
                    "The loss that balances a mixture's experts.", ("student.router",),
                    lambda cfg: cfg.freeze_router, changes="student.router"),
    "freezing": Door("--train_only, --freeze_until", "Weights that learn later, or not.",
                     ("student.freezing",), lambda cfg: cfg.train_only,
                     changes="student.freezing", prepares="student.freezing"),
    "activations": Door("--activation_offload, --mlp_tiles", "Less memory for activations.",
                        ("models.activations",), lambda cfg: cfg.mlp_tiles > 1,
                        changes="models.activations"),
    "compiled": Door("--compile, which auto is on a GPU", "Layers of one compiled graph.",
                     ("student.options.compiled",), lambda cfg: cfg.compile != "false",
                     *3 * ("student.options.compiled",)),  # checks, changes, prepares
    "adam": Door("an optimizer without torch_adam, or a GPU", "Which Adam takes the steps.",
                 ("student.options.own_adam",)),
    "from_scratch": Door("--from_scratch", "A student with random weights.",
                         ("student.options.from_scratch",)),
    "base_card": Door("a base model or teacher with a card", "What its license asks.",
                      ("checkpoints.base_card",)),
    "zero3": Door("ZeRO stage 3", "Shards whose padding is 0.", ("student.options.zero3",)),
    "flash": Door("--attention flash_attention_2", "Whether it can run.",
                  ("student.options.flash_attention",)),
    "collectives": Door("--log_comms, or a comms_logger", "The times of collectives.",
                        ("student.options.collectives",)),
    "wrong_files": Door("a model whose files do not fit", "Which ones, in a line.",
                        ("models.wrong_files",)),
    "sequence_parallel": Door("--sequence_parallel", "Sequences in shards, one a rank.",
                              ("student.ulysses",),
                              lambda cfg: cfg.sequence_parallel > 1,
                              checks="student.ulysses", prepares="student.ulysses"),
    "pipeline": Door("--pipeline_parallel", "The student's layers in stages, one a rank.",
                     ("student.pipeline", "student.stages"),
                     lambda cfg: cfg.pipeline_parallel > 1, checks="student.stages"),
    # the data
    "packing": Door("--pack", "Several texts in a row.", ("student.packing", "data.options.packed"),
                    lambda cfg: cfg.pack, prepares="student.packing"),
    "streaming": Door("--streaming, --join_rows", "Rows that can only be read forward.",
                      ("data.stream",)),
    "chats": Door("rows that hold chats", "Chats by each model's template.",
                  ("data.chat", "data.turns", "data.chat_rows", "data.options.calls")),
    "tables": Door("--data of .csv, .arrow or .parquet", "Rows of tables.",
                   ("data.kinds.tables",)),
    "documents": Door("--data of a .json that is one value", "The rows of its list.",
                      ("data.kinds.documents",)),
    "elsewhere": Door("--data of the hub, an address or save_to_disk", "Rows of other places.",
                      ("data.kinds.elsewhere",)),
    "several_files": Door("--data that is a directory or several files",
                          "Their splits, and columns that are alike.",
                          ("data.kinds.several_files",)),
    "other_columns": Door("--route_key, --weight_key, --prompt_key, --teacher_prompt_key",
                          "Columns beside the text.", ("data.kinds.other_columns",)),
    "mixed": Door("--data that is a list", "Several data sets with weights.",
                  ("data.kinds.mixed",)),
    "eval_data": Door("--eval_data, --eval_split", "Rows that are held out alone.",
                      ("data.kinds.eval_data",)),
    "faults": Door("data that cannot be read", "Why, in a line.", ("data.kinds.faults",)),
    # the loss
    "projection": Door("--loss projection_kl, gold, h_kl or hybrid_uld",
                       "A projection of one vocabulary onto the other.",
                       ("objective.projected", "checkpoints.export_projection",
                        "projection_tools.build", "projection_tools.cut",
                        "projection_tools.exact", "projection_tools.generate",
                        "projection_tools.multitoken", "projection_tools.arrays",
                        "projection_tools.projection_files")),
    "written": Door("--loss_backend compiled, which is auto on a GPU",
                    "Gradients of losses that are written out.",
                    ("objective.fused_chunks", "objective.fused", "objective.fused_nodes")),
    "tokenizer_files": Door("a model without tokenizer.json",
                            "A tokenizer of the file that it has.", ("tokenizer_files",)),
    "cells": Door("the first run of two tokenizers", "The tables of their translation.",
                  ("projection_tools.cells",)),
    "untiled": Door("--tiled=false", "The logits of a whole micro-batch.",
                    ("objective.untiled",)),
    "loss_dump": Door("--dump_losses", "The loss of each chunk, in files.",
                      ("objective.loss_dump",)),
    "bounded": Door("max_divergence in --loss_options", "Terms of a loss with a limit.",
                    ("objective.bounded",)),
    # the teachers
    "own": Door("--teacher self with --teacher_ema", "A teacher that follows the student.",
                ("teachers.own",)),
    "engines": Door("--teacher_tp, --teacher_engine, --teacher_compile",
                    "A teacher in shards, or with other layers.",
                    ("teachers.engines.choose_engine", "teachers.engines.sharded",
                     "teachers.engines.plans", "teachers.engines.layers",
                     "teachers.engines.replicas", "teachers.engines.vllm")),
    "offload": Door("--teacher_offload", "A teacher's weights in the memory of the host.",
                    ("teachers.engines.offload",)),
    "teacher_ranks": Door("--teacher_ranks", "Teachers on ranks of their own.",
                          ("teachers.remote", "job.several.roles")),
    "cache": Door("--teacher_cache", "What a teacher said of the texts, in files.",
                  ("teachers.cached", "teachers.cache_files", "teachers.cache_checks",
                   "teachers.kept_tokens", "teachers.packed_rows")),
    "served": Door("--teacher http://...", "A teacher behind a server.",
                   ("teachers.served", "teachers.text_server")),
    "dynamic_scale": Door("--dynamic_scale", "Losses of teachers as large as the text's.",
                          ("objective.scales",), lambda cfg: cfg.dynamic_scale,
                          prepares="objective.scales"),
    "several": Door("--teachers", "A Config for each of its entries.", ("several_teachers",)),
    "ensemble": Door("--teacher_weights mean_p", "The mean of several teachers.",
                     ("teachers.ensemble",)),
    # the student writes
    "tasks": Door("--eval_tasks", "Benchmarks in between, code in a sandbox.",
                  ("evaluation.task_suite", "evaluation.task_model",
                   "evaluation.task_passes", "evaluation.harness",
                   "evaluation.code_tasks", "evaluation.sandbox", "tasks",
                   "flags.task_options"),
                  lambda cfg: cfg.eval_tasks, prepares="evaluation.task_suite"),
    "eval_samples": Door("--eval_samples", "Held-out texts that the student continues.",
                         ("evaluation.eval_samples",), lambda cfg: cfg.eval_samples,
                         prepares="evaluation.eval_samples"),
    "on_policy": Door("--on_policy", "Texts of the student that teachers correct.",
                      ("data.rollouts", "flags.on_policy", "writing.on_policy",
                       "writing.rollout_metrics", "writing.rollout_ratio", "writing.node_writer",
                       "writing.writer_process"),
                      lambda cfg: cfg.on_policy, prepares="writing.on_policy"),
    "environment": Door("--environment", "What answers each turn of the student, and rewards it.",
                        tuple(f"environments.{name}" for name in (
                            "episodes", "episode", "process", "reward", "by_turn")),
                        lambda cfg: cfg.environment, checks="environments.episodes"),
    "speculation": Door("--eval_draft", "How good a draft of the teacher the student is.",
                        ("evaluation.speculation",)),
    # what a run leaves, and finds
    "earlier_export": Door("an --export that exists", "Whether it may be replaced.",
                           ("checkpoints.earlier_export",)),
    "resume": Door("a checkpoint to go on from", "It is loaded, in its layout or in another.",
                   ("checkpoints.resume", "checkpoints.choose", "checkpoints.convert",
                    "checkpoints.unpickle")),
}

# What several doors use and the hall does not: they know the hall, and one another.  The tables of
# two tokenizers, which spelling.py makes, are on disk from the second run on.
TOOLS = (
    "align_dp", "spelling", "rollout", "policy_losses",
    "data.options.term_weights", "data.options.text_keys",
    "flags.lists", "flags.tool", "job.commands.engine_process", "job.commands.kept_process",
    "job.ipc", "job.sequence_group", "job.trial", "job.several.others", "job.several.together",
    "job.several.values",
    "projection_tools.__main__", "projection_tools.save", "models.adapter_parts",
    "models.compiled_formula", "models.compiler", "models.compiled_layers", "student.whole_student",
    "teachers.group", "teachers.mixing", "teachers.text_scores",
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


def change(model: Any, cfg: Any) -> None:
    """Let the open doors change a student that has just been loaded, in their order."""
    for its in DOORS.values():
        if its.changes and its.is_open(cfg):
            importlib.import_module(f"isogloss.{its.changes}").change(model, cfg)


def prepare(state: Any, inputs: Any, stack: Any) -> None:
    """Let the open doors make ready what they add to a run; all ranks take part.

    Args:
        state: `build.TrainState`; inputs: `inputs.RunInputs`.
        stack: ExitStack; what has to be ended is pushed on it.
    """
    for its in DOORS.values():
        if its.prepares and its.is_open(state.cfg):
            importlib.import_module(f"isogloss.{its.prepares}").prepare(state, inputs, stack)
