"""Read and check all that the flags name but the weights' values, and load a run's batches."""

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from isogloss.batch import Collator, PairOptions
from isogloss.checkpoint import agree_on_start, find_checkpoint, needs_conversion
from isogloss.config import configs_by_teacher, routes_by_teacher
from isogloss.data import (
    ExampleReader,
    HeldOutBatches,
    MicroBatches,
    ShuffledExamples,
    StreamedExamples,
    check_routes,
    check_templates,
    column_names,
    first_rows,
    holds_chats,
    load_dataset,
    loader,
    split_dataset,
)
from isogloss.ds_config import batch_sizes, read_ds_config, resolve_ds_config
from isogloss.ds_engine import check_with_deepspeed
from isogloss.evaluate import SpellingIds
from isogloss.export import check_results
from isogloss.layout import node_size, teacher_groups
from isogloss.loss_table import build_loss
from isogloss.model_teachers import reads_more_than_text, resolve_engine
from isogloss.pretrained import check_random, check_weights, load_config
from isogloss.rollouts import Prompter, SkippedPrompt
from isogloss.run_identity import checkpoint_folder, expected_identity, run_layout
from isogloss.sample import TextEncoder
from isogloss.sequence import check_sequence_layout
from isogloss.specs import TeacherSpec
from isogloss.targets import TeacherSetup
from isogloss.task_suite import TaskSuite, load_suite
from isogloss.tasks import TaskOptions
from isogloss.teachers import MODEL_ENGINES
from projection_tools import fingerprint, load_tokenizer
from teacher_mixing import vocabulary_factors
from tiles import CPU_SUB_TILES, GPU_SUB_TILES

PROMPTS_TO_TRY = 64  # rows of which one has to give a prompt


@dataclass
class RunInputs:
    """All that the flags name, read and checked.

    Attributes:
        student: TextEncoder.
        teachers: TeacherSetup of every teacher, without a source; empty: cross-entropy alone.
        ds_config: what DeepSpeed will see.
        train_data, held_out_data: data sets.
        checkpoint: Path to resume from, or None.
        convert: the checkpoint was written in another layout.
        tasks: TaskSuite, or None.
    """

    student: TextEncoder
    teachers: list
    ds_config: dict
    train_data: datasets.Dataset
    held_out_data: datasets.Dataset | list
    checkpoint: Path | None
    convert: bool = False
    tasks: TaskSuite | None = None


def check_inputs(cfg, device, roles=None):
    """Read everything but the values of the weights; whatever can be wrong is found here.

    Args:
        roles: `layout.Roles` where teachers have ranks of their own.
    Returns:
        RunInputs.
    Raises:
        ValueError: what arrived, what was expected, what to do.
    """
    # what is cheap to read comes first, so that a typo costs seconds
    raw_ds_config = read_ds_config(cfg.ds_config)
    check_results(cfg)
    student, student_config = load_text_encoder(
        "student", cfg.student, cfg.max_length, cfg.trust_remote_code)
    check_student_class(cfg.student, cfg.trust_remote_code)
    encoders = load_teacher_encoders(cfg, roles)
    tasks = load_student_tasks(cfg, student, student_config)
    check_models(cfg)
    bf16 = device.type != "cpu" and get_accelerator().is_bf16_supported()
    num_ranks = dist.get_world_size()
    if cfg.sequence_parallel > 1:
        check_sequence_layout(cfg.sequence_parallel, num_ranks, student_config)
    ds_config = resolve_ds_config(raw_ds_config, cfg, num_ranks, student_config.hidden_size, bf16)
    check_with_deepspeed(ds_config, cfg.ds_config)
    train_data, held_out_data = load_data(cfg, student, encoders)
    teachers = plan_teachers(cfg, student, encoders, device)
    checkpoint = find_checkpoint(cfg.resume, checkpoint_folder(cfg), expected_identity(cfg))
    agree_on_start(checkpoint)
    convert = checkpoint is not None and needs_conversion(checkpoint, run_layout(cfg))
    # the engine has to know before it starts, but that of ZeRO stage 0 loads no such checkpoint
    if convert and run_layout(cfg)["zero_stage"]:
        ds_config["checkpoint"] = ds_config.get("checkpoint", {}) | {"load_universal": True}
    return RunInputs(student, teachers, ds_config, train_data, held_out_data, checkpoint, convert,
                     tasks)


def load_text_encoder(role, path, max_length, trust_remote_code=False):
    """Return (TextEncoder, AutoConfig) of the student or a teacher, checked against each other.

    Args:
        max_length: positions per sample; 0: the model's context.
        trust_remote_code: run the Python code that comes with the model.
    Raises:
        ValueError: missing, without eos, context too short, lm_head smaller than the tokenizer.
    """
    # a hub id is "name" or "org/name"; transformers would look for anything else on the hub
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    # os.path, because pathlib raises for paths that are too long or not to be read
    if looks_local and not os.path.isdir(os.path.expanduser(path)):
        raise ValueError(f"--{role} {path}: no such directory; expected a hub id or a local model "
                         "directory")
    config = load_config(role, path, trust_remote_code).get_text_config()
    tokenizer, table = load_tokenizer(role, path, trust_remote_code)
    if role == "student" and table.eos < 0:
        raise ValueError(f"--student {path}: its tokenizer has no eos token, so the student could "
                         "not learn to end; set eos_token in tokenizer_config.json")
    context = getattr(config, "max_position_embeddings", None) or sys.maxsize
    if max_length > context:
        flag = "max_length" if role == "student" else "teacher_max_length"
        raise ValueError(f"--{flag} {max_length}: {path} has a context of {context} positions; use "
                         "no more")
    # the other way round is usual: heads are padded to a multiple of 64 or 128
    if config.vocab_size < len(table):
        raise ValueError(f"--{role} {path}: its lm_head has {config.vocab_size} rows, but its "
                         f"tokenizer {len(table)} ids; use the tokenizer that the model was "
                         "trained with")
    return TextEncoder(tokenizer, table, max_length or context), config


def check_language_model(role, path, config):
    """Raise a ValueError for a config of which transformers makes no causal language model."""
    has_code = getattr(config, "auto_map", None)  # the model brings a class of its own
    if not has_code and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"--{role} {path}: transformers has no causal language model of type "
            f"{config.model_type}; expected one that AutoModelForCausalLM loads")


def check_student_class(path, trust_remote_code=False):
    """Raise a ValueError for a student that is no language model, or of which a part is none."""
    config = load_config("student", path, trust_remote_code)
    check_language_model("student", path, config)
    if reads_more_than_text(config):
        raise ValueError(
            f"--student {path}: {config.model_type} models read more than text, and what reads the "
            "rest could not be trained; use a model of text alone (as a --teacher it would do)")


def load_student_tasks(cfg, student, config):
    """Return the TaskSuite of --eval_tasks, or None.

    Args:
        student: TextEncoder; config: AutoConfig of the student.
    Raises:
        ValueError: see `task_suite.load_suite`.
    """
    if not cfg.eval_tasks:
        return None
    try:
        options = TaskOptions(
            data=cfg.eval_task_data, shots=cfg.eval_task_shots, limit=cfg.eval_task_limit,
            batch_size=cfg.eval_task_batch, samples=cfg.eval_task_samples,
            temperature=cfg.eval_task_temperature, seed=cfg.seed)
        return load_suite(cfg.eval_tasks.split(","), options, student.tokenizer, config,
                          dist.get_rank(), dist.get_world_size())
    except ValueError as error:
        raise ValueError(f"--eval_tasks {cfg.eval_tasks}: {error}") from None


def load_teacher_encoders(cfg, roles=None):
    """Return {name: TextEncoder} of every teacher, whose layout is checked too."""
    if not cfg.kd_weight:
        return {}
    num_ranks = dist.get_world_size()
    ranks_per_node = node_size()
    if roles:  # this world has the student's ranks only
        num_ranks = num_ranks // roles.student_ranks * roles.teacher_ranks
        ranks_per_node = roles.teacher_ranks
    encoders = {}
    for name, teacher_cfg in configs_by_teacher(cfg).items():
        encoders[name], _ = load_text_encoder(
            "teacher", teacher_cfg.teacher, teacher_cfg.teacher_max_length,
            teacher_cfg.trust_remote_code)
        teacher_groups(num_ranks, ranks_per_node, teacher_cfg.teacher_tp)
        engine = teacher_cfg.teacher_engine
        if engine in MODEL_ENGINES:
            config = load_config("teacher", teacher_cfg.teacher, teacher_cfg.trust_remote_code)
            check_language_model("teacher", teacher_cfg.teacher, config)
            resolve_engine(engine, teacher_cfg.teacher_tp, config, num_ranks)
        elif roles:
            raise ValueError(f"--teacher_engine {engine}: does not run on ranks of its own; leave "
                             "out --teacher_ranks")
    return encoders


def check_models(cfg):
    """Check that every model's files hold the weights of its config.

    Raises:
        ValueError: see `pretrained.check_weights`.
    """
    if cfg.from_scratch:
        check_random(cfg.student, cfg.trust_remote_code)
    else:
        check_weights("student", cfg.student, cfg.trust_remote_code)
    if cfg.kd_weight:
        for teacher_cfg in configs_by_teacher(cfg).values():
            if teacher_cfg.teacher_engine in MODEL_ENGINES:  # others may have no weights
                check_weights("teacher", teacher_cfg.teacher, cfg.trust_remote_code)


def load_data(cfg, student, encoders):
    """Return (train, held out) data sets, checked against flags and chat templates."""
    dataset = load_dataset(cfg.data, cfg.text_key, cfg.split, cfg.streaming)
    if cfg.route_key:
        routes = []
        for of_teacher in routes_by_teacher(cfg).values():
            routes += of_teacher or []
        check_routes(dataset, cfg.route_key, routes)
    if holds_chats(dataset, cfg.text_key):  # every model renders them by its own template
        for name, encoder in {cfg.student: student, **encoders}.items():
            if not encoder.tokenizer.chat_template:
                raise ValueError(f"{name}: its tokenizer has no chat template, and "
                                 f"{cfg.text_key!r} holds chats; set chat_template in "
                                 "tokenizer_config.json")
        check_templates(dataset, cfg.text_key, [student, *encoders.values()], cfg.data)
    if cfg.on_policy:
        check_prompts(cfg, dataset, student)
    return split_dataset(dataset, cfg.eval_rows, cfg.text_key, cfg.data)


def check_prompts(cfg, dataset, student):
    """Raise a ValueError where the first rows give no prompts.

    Args:
        student: TextEncoder.
    """
    micro_batch_size = batch_sizes(read_ds_config(cfg.ds_config), num_readers(cfg),
                                   cfg.ds_config).micro_batch_size
    if cfg.streaming and micro_batch_size % cfg.rollouts_per_prompt:
        raise ValueError(f"--rollouts_per_prompt {cfg.rollouts_per_prompt}: a stream gives each "
                         "prompt once, so it has to divide the micro-batch of "
                         f"{micro_batch_size}; choose another number, or leave out --streaming")
    columns = column_names(dataset)
    if cfg.prompt_key and cfg.prompt_key not in columns:
        raise ValueError(f"--prompt_key {cfg.prompt_key}: no such column; it has "
                         f"{', '.join(columns)}")
    reader = build_reader(cfg)
    prompter = build_prompter(cfg, student, 1)
    errors = []
    rows = first_rows(dataset, PROMPTS_TO_TRY, cfg.text_key, cfg.data)
    for number, row in enumerate(rows):
        try:
            prompter.prompt(reader(row, number), (number, 0))
            return  # prompts that are skipped later are counted
        except SkippedPrompt as error:
            errors.append(error)
    if errors:
        raise ValueError(f"--on_policy: {errors[0]}; so it is with the first {len(errors)} rows; "
                         "repair them, or name other prompts with --prompt_key")


def plan_teachers(cfg, student, encoders, device):
    """Return the TeacherSetup of every teacher, with its loss, but without a source.

    Args:
        student: TextEncoder; encoders: {name: TextEncoder} of the teachers.
    Raises:
        ValueError: see `build_loss`; or there is no mean of teachers with several tokenizers.
    """
    if not encoders:
        return []
    # A divergence over more tokens is larger by about log W.
    factors = [1.0] * len(encoders)
    if cfg.normalize_by_vocab:
        sizes = [len(encoder.table) for encoder in encoders.values()]
        factors = vocabulary_factors(sizes).tolist()
    configs = {}
    for (name, teacher_cfg), factor in zip(configs_by_teacher(cfg).items(), factors):
        configs[name] = replace(teacher_cfg, kd_weight=teacher_cfg.kd_weight / factor)
    if cfg.teacher_weights.startswith("mean_") and len(configs) > 1:
        return [plan_ensemble(cfg, student, encoders, configs, device)]
    setups = []
    for name, teacher_cfg in configs.items():
        encoder = encoders[name]
        loss = build_loss(teacher_cfg, student, encoder, device)
        spec = teacher_spec(teacher_cfg, encoder, device)
        ids = spelling_ids(cfg, student, encoder, device)
        setups.append(TeacherSetup(name, teacher_cfg, encoder, loss, spec, ids))
    return setups


def plan_ensemble(cfg, student, encoders, configs, device):
    """Return one TeacherSetup for the mean of teachers with one tokenizer."""
    first, *others = configs  # the first teacher's loss and flags are those of the ensemble
    for name in others:
        prints = [fingerprint(encoders[teacher].tokenizer) for teacher in (first, name)]
        if prints[0] != prints[1]:
            raise ValueError(f"--teacher_weights {cfg.teacher_weights}: the tokenizers of {first} "
                             f"and {name} differ, so their predictions have no mean; use "
                             "fixed")
    # every member reads every text
    shortest = min(encoder.max_length for encoder in encoders.values())
    encoder = replace(encoders[first], max_length=shortest)
    ensemble_cfg = replace(configs[first], kd_weight=cfg.kd_weight)
    members = [teacher_spec(member, encoders[name], device) for name, member in configs.items()]
    spec = TeacherSpec(
        path="mean", vocab=len(encoder.table), engine="ensemble", members=members,
        weights=[member.kd_weight for member in configs.values()],
        space=cfg.teacher_weights.removeprefix("mean_"))
    loss = build_loss(ensemble_cfg, student, encoder, device)
    ids = spelling_ids(cfg, student, encoder, device)
    return TeacherSetup("mean", ensemble_cfg, encoder, loss, spec, ids)


def teacher_spec(cfg, encoder, device):
    """Return the TeacherSpec of a run with one teacher."""
    output = cfg.teacher_output
    if output == "hidden" and not cfg.tiled:
        output = "logits"  # the model's own: a head may be more than `tiles.head_of` knows
    return TeacherSpec(
        path=cfg.teacher, vocab=len(encoder.table), engine=cfg.teacher_engine,
        dtype=cfg.teacher_dtype, device=device, degree=cfg.teacher_tp,
        offload=cfg.teacher_offload, output=output, output_topk=cfg.teacher_output_topk,
        sequence_parallel_size=cfg.sequence_parallel, trust_remote_code=cfg.trust_remote_code)


def spelling_ids(cfg, student, encoder, device):
    """Return what evaluations compare tokens by; None without held-out rows."""
    if not cfg.eval_rows:
        return None
    return SpellingIds.of(student.table, encoder.table, device)


# --- batches --------------------------------------------------------------------------------------


def load_batches(cfg, inputs, engine, device, start, asked_to_end=lambda: False):
    """Return (iterator over micro-batches from step `start` on, iterable over held-out ones).

    Args:
        inputs: RunInputs.
        engine: the DeepSpeed engine, which knows the batch sizes.
        asked_to_end: see `workers.Loader`.
    """
    # ranks of a sequence group read the same samples
    reader_rank = dist.get_rank() // cfg.sequence_parallel
    collator = build_collator(cfg, inputs, device)
    micro_batch_size = engine.train_micro_batch_size_per_gpu()
    reader = build_reader(cfg)
    prompter = None
    if cfg.on_policy:
        prompter = build_prompter(cfg, inputs.student, samples_per_step(cfg, engine))
    stream = StreamedExamples if cfg.streaming else ShuffledExamples
    batches = MicroBatches(
        stream(inputs.train_data, reader, cfg.seed, cfg.eval_rows), collator, micro_batch_size,
        engine.gradient_accumulation_steps(), reader_rank, num_readers(cfg), start,
        prompter)
    held_out = HeldOutBatches(inputs.held_out_data, reader, collator, micro_batch_size,
                              reader_rank, num_readers(cfg))
    return iter(loader(batches, cfg.num_workers, asked_to_end)), loader(held_out, 0)


def num_readers(cfg):
    """Return how many ranks, or sequence groups, read samples of their own."""
    return dist.get_world_size() // cfg.sequence_parallel


def samples_per_step(cfg, engine):
    """Return how many samples a step has over all ranks; those of a sequence group share theirs."""
    size = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    return size * num_readers(cfg)


def build_reader(cfg):
    """Return the ExampleReader of a run."""
    return ExampleReader(cfg.text_key, cfg.route_key, cfg.data, cfg.prompt_key)


def build_prompter(cfg, student, samples_per_step):
    """Return the Prompter of a run.

    Args:
        student: TextEncoder.
        samples_per_step: over all ranks.
    """
    return Prompter(student, cfg.seed, cfg.on_policy, samples_per_step, cfg.prompt_tokens,
                    cfg.rollout_tokens, cfg.rollouts_per_prompt, cfg.rollout_every)


def build_collator(cfg, inputs, device, tile_mib=None):
    """Return the Collator of a run.

    Args:
        tile_mib: see `tiles.plan_tiles`; None: what the flags say.
    """
    if tile_mib is None:
        tile_mib = cfg.loss_memory_mib if cfg.tiled else math.inf
    routes = routes_by_teacher(cfg)
    pairs = []
    print_of_student = fingerprint(inputs.student.tokenizer)
    for setup in inputs.teachers:
        same_tokenizer = fingerprint(setup.encoder.tokenizer) == print_of_student
        pairs.append(PairOptions(setup.encoder, setup.loss.spelling, routes.get(setup.name),
                                 same_tokenizer))
    return Collator(
        inputs.student, pairs, cfg.train_on, cfg.aligner, cfg.pack, tile_mib,
        sub_tiles=CPU_SUB_TILES if device.type == "cpu" else GPU_SUB_TILES,
        # neighboring ranks hold the shards of one sequence
        sequence_rank=dist.get_rank() % cfg.sequence_parallel,
        sequence_size=cfg.sequence_parallel)
