"""Read and check all that the flags name but the weights' values, and load a run's batches."""

import contextlib
import math
import os
import sys
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import datasets
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from isogloss import doors
from isogloss.align import fingerprint
from isogloss.checkpoints.checkpoint import agree_on_start, find_checkpoint, position_of
from isogloss.checkpoints.export_files import check_results
from isogloss.checkpoints.run_identity import checkpoint_folder, expected_identity
from isogloss.config import (
    LEAST_AUTO_MIB,
    MOST_AUTO_MIB,
    configs_by_teacher,
    routes_by_teacher,
    template_kwargs,
)
from isogloss.data import open_data, order
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.checks import check_column, lengths_of
from isogloss.data.ends import load_generation, taught_ends
from isogloss.data.mixture import Source, seed_of, sources_of
from isogloss.data.sample import TextEncoder
from isogloss.data.texts import MOST_CHARACTERS, fits, leave_out_tails
from isogloss.data.workers import Loader
from isogloss.errors import DataError
from isogloss.flags.model_names import split_revision
from isogloss.flags.parse import is_table
from isogloss.job.layout import is_last_stage
from isogloss.job.rendezvous import values_of_ranks
from isogloss.log import check_logs
from isogloss.models import pretrained
from isogloss.projection_tools.tokenizers import load_tokenizer
from isogloss.student.ds_config import batch_sizes, read_ds_config, resolve_ds_config
from isogloss.student.ds_engine import check_with_deepspeed
from isogloss.targets import TeacherSetup
from isogloss.teachers.model import reads_more_than_text
from isogloss.tile_plan import CPU_SUB_TILES, GPU_SUB_TILES, MIB

if TYPE_CHECKING:
    from isogloss.evaluation.task_suite import TaskSuite

AUTO_FRACTION = 1 / 8  # of a GPU's free memory, --loss_memory_mib auto.  Not tuned.
GPU_WIDTH_STEP = 64  # tokens; an H200 takes 50 ms to prepare its attention for another width


@dataclass
class SourceData:
    """Hold the data of a source.

    Attributes:
        source: Source.
        train_data, held_out_data: data sets.
        first_row: number of the first row of the training data in the whole data.
    """

    source: Source
    train_data: datasets.Dataset
    held_out_data: datasets.Dataset | list
    reader: order.ExampleReader
    held_out_reader: order.ExampleReader
    first_row: int = 0

    @cached_property
    def num_samples(self):
        return len(order.sample_bounds(self.train_data, self.reader)) - 1


@dataclass
class RunData:
    """Hold the data of a run, SourceData each."""

    sources: list

    def parts(self):
        """List (data set, its reader, number of its first row in the whole data)."""
        parts = []
        for data in self.sources:
            parts += [(data.train_data, data.reader, data.first_row),
                      (data.held_out_data, data.held_out_reader, 0)]
        return parts

    def held_out(self, count):
        """Return the Examples of the first held-out rows, of the sources in turn."""
        examples = []
        for row in range(max(len(data.held_out_data) for data in self.sources)):
            for data in self.sources:
                if row < len(data.held_out_data) and len(examples) < count:
                    examples.append(data.held_out_reader(data.held_out_data[row], row))
        return examples

    def stream(self, cfg, place):
        """Return the stream of samples, from a place on where it can only be read forward."""
        places = (place or {}).get("sources") or [place] * len(self.sources)
        streams = []
        for data, its_place in zip(self.sources, places):
            its = data.train_data, data.reader, seed_of(data.source, cfg.seed), data.first_row
            if cfg.streaming:
                from isogloss.data.stream import StreamedExamples

                streams.append(StreamedExamples(*its, its_place))
            else:
                streams.append(order.ShuffledExamples(*its))
        if not is_table(cfg.data):
            return streams[0]
        from isogloss.data.kinds.mixed import Mixture

        return Mixture(streams, self.weights(), cfg.seed)

    def record(self):
        """List what a record says of each source; of a stream nobody knows how long it is."""
        entries = []
        for data in self.sources:
            samples = None if data.source.cfg.streaming else data.num_samples
            entries.append(dict(
                name=data.source.name, samples=samples, weight=data.source.weight or samples,
                held_out=len(data.held_out_data), chats=data.reader.has_chats))
        return entries

    def weights(self):
        return [data.source.weight or data.num_samples for data in self.sources]


@dataclass
class RunInputs:
    """All that the flags name, read and checked.

    Attributes:
        teachers: TeacherSetup of every teacher, without a source; empty: cross-entropy alone.
        ds_config: what DeepSpeed will see.
        data: RunData.
        checkpoint: Path to resume from, or None.
        universal: of `prepare_conversion`: None where the checkpoint is of this layout.
        tasks: TaskSuite, or None.
        router_weight: of the loss of the student's routers, 0: they have none.
    """

    student: TextEncoder
    teachers: list
    ds_config: dict
    data: RunData
    checkpoint: Path | None
    universal: Path | None = None
    tasks: "TaskSuite | None" = None
    router_weight: float = 0.0

    def collator(self, cfg, device):
        """Return the Collator of the run, whose Config and device these are."""
        return build_collator(cfg, self, device)


class Layout(NamedTuple):
    """Hold what the layout of a run depends on beside the flags.

    config: of the student, for text; ds_config: as in the file.
    num_ranks: of the student; roles: `roles.Roles` where teachers have ranks of their own.
    """

    config: object
    ds_config: dict
    num_ranks: int
    roles: object


def check_inputs(cfg, device, roles=None):
    """Read everything but the values of the weights; whatever can be wrong is found here."""
    # what is cheap to read comes first, so that a typo costs seconds
    raw_ds_config = read_ds_config(cfg.ds_config)
    if cfg.epochs and ("steps" in cfg.given or cfg.steps != type(cfg).steps):
        raise ValueError(f"--epochs {cfg.epochs:g} with --steps {cfg.steps}: both say when the run "
                         "ends; leave out one of them")
    check_results(cfg)
    check_projections(cfg)
    cfg.settle("chat_date", cfg.chat_date or first_date(cfg))
    student, student_config = load_text_encoder(
        "student", cfg.student, cfg.max_length, cfg.trust_remote_code, template_kwargs(cfg))
    check_student_class(cfg.student, cfg.trust_remote_code)
    router_weight = weight_of_routers(cfg, student_config)
    encoders = load_teacher_encoders(cfg, student, roles)
    student, encoders = with_common_ids(student, encoders)
    tasks = None
    if cfg.eval_tasks:
        from isogloss.evaluation.task_suite import load_student_tasks

        tasks = load_student_tasks(cfg, student, student_config)
    check_student_weights(cfg)
    bf16 = device.type != "cpu" and get_accelerator().is_bf16_supported()
    num_ranks = dist.get_world_size()
    if cfg.compile == "auto" and device.type == "cpu":
        cfg.settle("compile", "false")
    doors.check(cfg, Layout(student_config, raw_ds_config, num_ranks, roles))
    resolved = partial(resolve_ds_config, raw_ds_config, cfg, num_ranks,
                       student_config.hidden_size, bf16, on_gpu=device.type == "cuda")
    ds_config = resolved()
    if cfg.attention == "flash_attention_2":
        from isogloss.student.options.flash_attention import check_flash_attention

        check_flash_attention(cfg, ds_config)
    check_with_deepspeed(ds_config, cfg.ds_config, num_ranks // cfg.pipeline_parallel)
    data = load_data(cfg, student, encoders)
    if cfg.epochs:
        cfg.settle("steps", steps_of_epochs(cfg, data, raw_ds_config))
        ds_config = resolved()
    # a teacher of some rows needs to know no others
    for teacher_cfg in configs_by_teacher(cfg).values() if encoders and not cfg.has_routes else ():
        teacher_cfg.teacher_kind.check_data(teacher_cfg, data.parts())
    teachers = plan_teachers(cfg, student, encoders, device)
    if cfg.eval_draft:
        from isogloss.evaluation.speculation import plan_speculation

        plan_speculation(teachers, student, device)
    checkpoint = find_checkpoint(cfg.resume, checkpoint_folder(cfg), expected_identity(cfg))
    agree_on_start(checkpoint)
    check_start(cfg, checkpoint)
    universal = None
    if checkpoint:
        from isogloss.checkpoints.choose import check_samples, prepare_conversion

        check_samples(checkpoint, data.record())
        universal = prepare_conversion(checkpoint, cfg, ds_config)
    inputs = RunInputs(student, teachers, ds_config, data, checkpoint, universal, tasks,
                       router_weight)
    if teachers:
        check_teaching(cfg, inputs, device)
    return inputs


def check_teaching(cfg, inputs, device):
    """Raise a ValueError where a teacher would teach nothing, as far as the data tell."""
    collator = build_collator(cfg, inputs, device, math.inf)
    names = [setup.name for setup in inputs.teachers]
    parts = [(data.train_data, data.reader) for data in inputs.data.sources]
    weighs = all(setup.cfg.token_weights == "column" for setup in inputs.teachers)
    if weighs or cfg.has_routes or any(reader.teacher_prompt_key for _, reader in parts):
        from isogloss.data.kinds.other_columns import check_other_columns

        check_other_columns(parts, collator, names, weighs)
    prompter = prompter_of(cfg, inputs.student, 1) if cfg.on_policy == 1 else None
    order.check_taught(parts, collator, names, prompter)


def steps_of_epochs(cfg, data, raw_ds_config):
    """Return after how many steps the samples have been read --epochs times, the last one whole."""
    samples = sum(source.num_samples for source in data.sources)
    batch = batch_sizes(raw_ds_config, num_readers(cfg), cfg.ds_config).train_batch_size
    return max(1, math.ceil(cfg.epochs * samples / batch - 1e-9))


def check_start(cfg, checkpoint):
    """Raise a ValueError where a run has nothing to do, or cannot go on with what is there."""
    start = position_of(checkpoint)["step"] if checkpoint else 0
    if start > cfg.steps:
        end = f"--epochs {cfg.epochs:g}" if cfg.epochs else f"--steps {cfg.steps}"
        raise ValueError(f"{end}: {checkpoint} has taken {start} already; give more, "
                         "or name an earlier checkpoint with --resume")
    check_logs(cfg.output_dir, start)


def check_projections(cfg):
    """Raise a ValueError where a projection is no file; one that no loss reads is recorded."""
    configs = configs_by_teacher(cfg).values() if cfg.kd_weight else [cfg]
    for path in {cfg.projection, *(teacher_cfg.projection for teacher_cfg in configs)}:
        if path and not os.path.isfile(path):
            raise ValueError(f"--projection {path}: no such file; make it with python -m "
                             "projection_tools.build, or leave it out")


def first_date(cfg):
    """Return the date that chat templates are told, the same on all ranks.

    It is that of the run that goes on, that of a cache, or today.
    """
    day = ""
    # what is wrong with these files is said where they are read
    with contextlib.suppress(OSError, ValueError):
        day = _date_before(cfg)
    return values_of_ranks(day or date.today().isoformat())[0]


def _date_before(cfg):
    folder = Path(cfg.output_dir)
    if cfg.resume not in ("auto", "never"):
        folder = Path(cfg.resume).parent.parent  # of runs/a/checkpoints/step_0000100
    if cfg.resume != "never" and any(folder.glob("run*.json")):
        from isogloss.checkpoints.model_card import read_record

        _, before = read_record(folder)
        if before.chat_date:
            return before.chat_date
    for teacher_cfg in configs_by_teacher(cfg).values() if cfg.kd_weight else ():
        if teacher_cfg.teacher_cache:
            from isogloss.teachers.cache_files import Manifest, local_cache

            day = Manifest.read("teacher_cache", local_cache(teacher_cfg.teacher_cache)).date
            if day:
                return day
    return ""


def load_text_encoder(role, path, max_length, trust_remote_code=False, template_kwargs=None):
    """Return (TextEncoder, AutoConfig) of the student or a teacher, checked against each other.

    Args:
        max_length: positions per sample; 0: the model's context.
        trust_remote_code: run the Python code that comes with the model.
        template_kwargs: what its chat template is told beside a chat.
    Raises:
        ValueError: missing, without eos, context too short, lm_head smaller than the tokenizer.
    """
    # a hub id is "name" or "org/name"; transformers would look for anything else on the hub
    name, _ = split_revision(path)  # a revision may be refs/pr/1
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    # os.path, because pathlib raises for paths that are too long or not to be read
    if looks_local and not os.path.isdir(os.path.expanduser(name)):
        raise ValueError(f"--{role} {path}: no such directory; expected a hub id or a local model "
                         "directory")
    config = pretrained.load_config(role, path, trust_remote_code).get_text_config()
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
    generation = load_generation(role, path, config, tokenizer)
    encoder = TextEncoder(
        tokenizer, table, max_length or context, template_kwargs or {}, generation)
    if role == "student":
        taught_ends(encoder)  # which its chat template says
    return encoder, config


def with_common_ids(student, encoders):
    """Return the student's TextEncoder and those of the teachers, equal tokenizers with equal ids.

    Of the control tokens beyond its lm_head one model may have rows for some that another has not.
    """
    whole = [student, *encoders.values()]
    prints = [fingerprint(encoder.tokenizer) for encoder in whole]
    cut = []
    for encoder, own_print in zip(whole, prints):
        size = min(len(other.table) for other, its in zip(whole, prints) if its == own_print)
        if size < len(encoder.table):
            encoder = replace(encoder, table=encoder.table.below(size))
        cut.append(encoder)
    return cut[0], dict(zip(encoders, cut[1:]))


def check_student_class(path, trust_remote_code=False):
    """Raise a ValueError for a student that is no language model, or of which a part is none."""
    config = pretrained.load_config("student", path, trust_remote_code)
    pretrained.check_language_model("student", path, config)
    if reads_more_than_text(config):
        raise ValueError(
            f"--student {path}: {config.model_type} models read more than text, and what reads the "
            "rest could not be trained; use a model of text alone (as a --teacher it would do)")


def weight_of_routers(cfg, config):
    """Return the weight of the loss of the student's routers; 0: it has none, or no router."""
    asks = getattr(config, "output_router_logits", False)
    if not (asks or cfg.router_weight > 0 or cfg.freeze_router):
        return 0.0
    from isogloss.student.router import router_weight

    return router_weight(cfg, config)


def load_teacher_encoders(cfg, student, roles=None):
    """Return {name: TextEncoder} of every teacher, whose layout is checked too."""
    if not cfg.kd_weight:
        return {}
    encoders = {}
    configs = configs_by_teacher(cfg)
    if roles and not any(entry.teacher_kind.has_weights for entry in configs.values()):
        raise ValueError(f"--teacher_ranks {cfg.teacher_ranks}: a cache needs no ranks, and there "
                         "is no other teacher; leave it out")
    for name, teacher_cfg in configs.items():
        load = partial(
            load_text_encoder, "teacher", teacher_cfg.teacher_path, teacher_cfg.teacher_max_length,
            teacher_cfg.trust_remote_code, template_kwargs(cfg))
        encoders[name] = teacher_cfg.teacher_kind.encoder(teacher_cfg, load, student, roles)
    return encoders


def check_student_weights(cfg):
    """Check that the student's files hold the weights of its config."""
    if cfg.from_scratch:
        from isogloss.student.options.from_scratch import check_random

        check_random(cfg.student, cfg.trust_remote_code, cfg.attention)
    else:
        pretrained.check_weights("student", cfg.student, cfg.trust_remote_code,
                                 pretrained.student_adapter(cfg), attention=cfg.attention)


def load_data(cfg, student, encoders):
    """Return the RunData of a run, checked against flags and chat templates."""
    encoders = {cfg.student: student, **encoders}
    sources = sources_of(cfg)
    for source in sources:
        if source.chooses and not source.cfg.route_key:
            from isogloss.data.kinds.other_columns import check_route

            check_route(source.route, source.name, routes_by_teacher(cfg))
    return RunData([load_source(source, student, encoders) for source in sources])


def load_source(source, student, encoders):
    """Return the SourceData of a Source."""
    cfg = source.cfg
    train, reader = open_rows(cfg, cfg.data, cfg.split, encoders)
    reader = replace(reader, route=source.route)
    if cfg.on_policy:
        from isogloss.data.rollouts import check_prompts

        sizes = batch_sizes(read_ds_config(cfg.ds_config), num_readers(cfg), cfg.ds_config)
        check_prompts(cfg, train, reader, student, sizes.micro_batch_size)
    if not (cfg.eval_data or cfg.eval_split):
        train, held_out = order.split_dataset(train, cfg.eval_rows, reader.text_key, cfg.data)
        return SourceData(source, train, joined(held_out, reader), reader, reader,
                          cfg.eval_rows)
    from isogloss.data.kinds.eval_data import blaming_eval_data, first_of_eval_data

    with blaming_eval_data():
        rows, held_out_reader = open_rows(
            cfg, cfg.eval_data or cfg.data, cfg.eval_split or "train", encoders)
    held_out_reader = replace(held_out_reader, route=source.route)
    held_out = first_of_eval_data(cfg, rows, held_out_reader)
    train, _ = order.split_dataset(train, 0, reader.text_key, cfg.data)
    return SourceData(source, train, joined(held_out, held_out_reader), reader,
                      held_out_reader)


def joined(held_out, reader):
    """Return a row for every sample that held-out rows give."""
    if not reader.join:
        return held_out
    from isogloss.data.stream import joined_rows

    return joined_rows(held_out, reader)


def open_rows(cfg, source, split, encoders, other_keys=()):
    """Return (data set, ExampleReader); chats have to be what every model's template renders."""
    text_key = cfg.completion_key or cfg.text_key
    options = cfg.source_options
    plain_keys = {cfg.route_key: "--route_key", options.weight_key: "--data: weight_key"}
    plain_keys.pop("", None)
    dataset = open_data.load_dataset(source, text_key, split, cfg.streaming, plain_keys=plain_keys,
                                     json_keys=(cfg.prompt_key,) if cfg.prompt_key else (),
                                     optional_keys=(*filter(None, [
                                         options.tools_key, cfg.teacher_prompt_key,
                                         cfg.environment and "*"]), *other_keys),
                                     txt_samples=options.txt_samples)
    columns = open_data.column_names(dataset)
    labels = ()
    if cfg.route_key:
        routes = []
        for of_teacher in routes_by_teacher(cfg).values():
            routes += of_teacher or []
        from isogloss.data.kinds.other_columns import check_routes

        labels = check_routes(dataset, cfg.route_key, routes)
    for flag in ("teacher_prompt_key", "prompt_key"):
        name = getattr(cfg, flag)
        if name and name not in columns:
            raise DataError(f"--{flag} {name}: no such column; it has {', '.join(columns)}")
    tools_key = options.tools_key if options.tools_key in columns else ""
    reader = order.ExampleReader(
        text_key, cfg.route_key, source, cfg.prompt_key, bool(cfg.completion_key), tools_key,
        open_data.filled_columns(dataset), cfg.join_rows, open_data.holds_chats(dataset, text_key),
        cfg.teacher_prompt_key, options.drop_images, options.weight_key, labels=labels,
        keeps_row=bool(cfg.environment))
    if cfg.join_rows and reader.has_chats:
        raise ValueError(f"--join_rows {cfg.join_rows}: joins texts, and {text_key!r} of {source} "
                         "holds chats; leave it out")
    if cfg.prompt_key and not cfg.streaming:  # as `load_dataset` has checked the other column
        check_column(source, dataset, cfg.prompt_key)
    rows = open_data.first_rows(dataset, open_data.ROWS_TO_TRY, text_key, source)
    for number, row in enumerate(rows):
        content = reader(row, number).content
        for encoder in encoders.values() if isinstance(content, str) else ():
            if len(encoder.tokenizer) > len(encoder.table):
                encoder.encode([content])  # which refuses control tokens beyond the lm_head
    if not cfg.streaming:
        check_long_texts(cfg, dataset, reader, list(encoders.values()))
    if reader.has_chats:
        from isogloss.data.chat import check_have_templates, check_templates

        check_have_templates(encoders, repr(text_key))
        check_templates(dataset, reader, encoders.values())
    if cfg.on_policy < 1:  # else rows are prompts
        order.check_learned(dataset, reader, encoders[cfg.student], cfg.train_on)
    return dataset, reader


def check_long_texts(cfg, dataset, reader, encoders):
    """Raise a DataError for a text that is too long to be read whole and cannot be cut."""
    lengths = lengths_of(dataset.data.column(reader.text_key))
    if lengths is None:
        return
    longest = np.flatnonzero(lengths.to_numpy() > MOST_CHARACTERS)
    for number in longest.tolist():
        text = reader(dataset[number], number).content
        if isinstance(text, str) and cfg.aligner != "dp":
            [(text, _)] = leave_out_tails([text], encoders[0], encoders[1:])
        if isinstance(text, str) and not fits(text):
            raise DataError(
                f"--data {reader.source}: row {number} of {reader.text_key!r} has {len(text)} "
                f"characters, and a tokenizer takes up to {MOST_CHARACTERS}; split it")


def plan_teachers(cfg, student, encoders, device):
    """Return the TeacherSetup of every teacher, with its loss, but without a source."""
    if not encoders:
        return []
    configs = configs_by_teacher(cfg)
    if cfg.averages_teachers and len(configs) > 1:
        from isogloss.teachers.ensemble import plan_ensemble

        teacher_cfg, encoder, spec = plan_ensemble(cfg, student, encoders, configs, device)
        return [TeacherSetup.of(
            "mean", teacher_cfg, encoder, spec, student=student, device=device)]
    setups = []
    for name, teacher_cfg in configs.items():
        spec = teacher_cfg.teacher_kind.of(teacher_cfg, encoders[name], device, student)
        setups.append(TeacherSetup.of(
            name, teacher_cfg, encoders[name], spec, student=student, device=device))
    return setups


# --- batches --------------------------------------------------------------------------------------


def load_batches(cfg, inputs, engine, device, start, *, place=None, asked_to_end=lambda: False):
    """Return (iterator over micro-batches from step `start` on, {source: its held-out batches}).

    Args:
        inputs: RunInputs.
        engine: the DeepSpeed engine, which knows the batch sizes.
        place: of a stream, from which it goes on, see `Mixture.place`; None: from its first row on.
    """
    # ranks of a sequence group or of a pipeline read the same samples
    reader_rank = dist.get_rank() // cfg.ranks_per_reader
    collator = build_collator(cfg, inputs, device)
    micro_batch_size = engine.train_micro_batch_size_per_gpu()
    prompter = None
    if cfg.on_policy:
        prompter = prompter_of(cfg, inputs.student, samples_per_step(cfg, engine))
    batches = order.MicroBatches(
        inputs.data.stream(cfg, place), collator, micro_batch_size,
        engine.gradient_accumulation_steps(), reader_rank, num_readers(cfg), start, prompter)
    pinned = device.type == "cuda"
    held_out = {}
    for data in inputs.data.sources:
        of_source = order.HeldOutBatches(data.held_out_data, data.held_out_reader, collator,
                                         micro_batch_size, reader_rank, num_readers(cfg))
        held_out[data.source.name] = Loader(of_source, 0, pinned=pinned)
    training = Loader(batches, cfg.num_workers, asked_to_end, pinned)
    if dist.get_world_size() > 1:
        from isogloss.job.several.together import Together

        training = Together(training)
        held_out = {name: Together(of_source) for name, of_source in held_out.items()}
    return iter(training), held_out


def prompter_of(cfg, student, num_samples):
    """Return the Prompter of a run whose student writes."""
    from isogloss.data.rollouts import build_prompter

    return build_prompter(cfg, student, num_samples)


def num_readers(cfg):
    """Return how many ranks, sequence groups or pipelines read samples of their own."""
    return dist.get_world_size() // cfg.ranks_per_reader


def samples_per_step(cfg, engine):
    """Return how many samples a step has over all ranks; some share theirs, see `num_readers`."""
    size = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
    return size * num_readers(cfg)


def tile_memory(cfg, device):
    """Return the MiB that `tile_plan.plan_tiles` gets."""
    if not cfg.tiled:
        return math.inf
    if cfg.loss_memory_mib:
        return cfg.loss_memory_mib
    if device.type != "cuda":
        return LEAST_AUTO_MIB
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return automatic_mib(free_bytes)


def automatic_mib(free_bytes):
    """Return what --loss_memory_mib auto means on a GPU.

    It is a power of 2: a run that resumes finds about as much memory free, and cuts the same tiles.
    """
    largest = int(AUTO_FRACTION * free_bytes / MIB)
    power = 1 << max(0, largest.bit_length() - 1)
    return min(max(power, LEAST_AUTO_MIB), MOST_AUTO_MIB)


def build_collator(cfg, inputs, device, tile_mib=None):
    """Return the Collator of a run.

    Args:
        tile_mib: see `tile_plan.plan_tiles`; None: what the flags say.
    """
    if tile_mib is None:
        tile_mib = tile_memory(cfg, device)
    routes = routes_by_teacher(cfg)
    is_cpu = device.type == "cpu"
    pairs = []
    print_of_student = fingerprint(inputs.student.tokenizer)
    for setup in inputs.teachers:
        same_tokenizer = fingerprint(setup.encoder.tokenizer) == print_of_student
        pairs.append(PairOptions(setup.encoder, setup.loss.spelling, routes.get(setup.name),
                                 same_tokenizer, setup.spec.reads_keys,
                                 None if is_cpu else setup.loss.live_copies,
                                 setup.cfg.token_half_life, setup.cfg.token_weights == "column"))
    return Collator(
        inputs.student, pairs, cfg.train_on, cfg.aligner, cfg.pack, tile_mib,
        sub_tiles=CPU_SUB_TILES if is_cpu else GPU_SUB_TILES,
        # neighboring ranks hold the shards of one sequence
        sequence_rank=dist.get_rank() % cfg.sequence_parallel,
        sequence_size=cfg.sequence_parallel,
        computes_loss=is_last_stage(cfg.pipeline_parallel),
        width_step=1 if is_cpu else GPU_WIDTH_STEP,
        marks_text=bool(inputs.router_weight))
