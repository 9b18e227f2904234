"""Distill across tokenizers inside the trainer that you have: transformers, TRL, Lightning, a loop.

    from trl import SFTConfig, SFTTrainer
    from isogloss.integrations import distilled

    trainer = distilled(SFTTrainer, "Qwen/Qwen3-8B")(
        "HuggingFaceTB/SmolLM2-135M-Instruct", args=SFTConfig("student"), train_dataset=dataset)
    trainer.train()

A row is a text, messages with or without tools, or a prompt and its completion, as TRL's data sets
have them; each model reads it by its own template.  `Distillation` is what such a trainer is made
of: rows to batches, logits to a loss.  See docs/trainers.md.

Tests: tests/test_integrations.py, tests/test_trainers.py.
"""

import math
import os
import warnings
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from transformers import TrainingArguments

from isogloss import tokenizer_files
from isogloss.align import TokenTable
from isogloss.checkpoints.model_card import worse_teachers
from isogloss.config import Config, template_kwargs
from isogloss.data.batch import Collator, PairOptions
from isogloss.data.chat import check_have_templates, check_told
from isogloss.data.ends import all_ends
from isogloss.data.mixture import SourceOptions
from isogloss.data.open_data import FOR_MODELS, warn_of_unread
from isogloss.data.order import ExampleReader
from isogloss.data.sample import TextEncoder
from isogloss.evaluation.evaluate import (
    EvaluationSums,
    ModelSums,
    PairSums,
    evaluation_terms,
    metrics_of,
)
from isogloss.flags.model_names import read_model_name
from isogloss.inputs import with_common_ids
from isogloss.integrations.held_out import FilledRows, collate_filled, filled
from isogloss.integrations.whole_teacher import check_whole, load_whole
from isogloss.job.columns import to_device
from isogloss.losses import next_token_cross_entropy
from isogloss.objective.objective import LossTerms
from isogloss.several_teachers import loss_flags
from isogloss.targets import SpellingIds, TeacherSetup, teacher_parts
from isogloss.teachers.engines.whole import ModelTeacher, WholeModel
from isogloss.teachers.model import ModelSpec
from isogloss.tiles import StoredLogits, head_of

# Flags of distill.py that mean something here.
FLAGS = {"loss", "loss_options", "kd_weight", "ce_weight", "max_length", "teacher_max_length",
         "train_on", "template_kwargs", "chat_date", "aligner", "drop_images", "token_weights"}
# {columns of a row: flags of distill.py that say so}, as TRL names them
COLUMNS = {("messages",): {"text_key": "messages"},
           ("prompt", "completion"): {"prompt_key": "prompt", "completion_key": "completion"},
           ("text",): {"text_key": "text"}}
# {setting or argument of a trainer that has no part here: why, or what to do instead}
REFUSED = {"packing": "each row is one text for both models",
           "eval_packing": "each row is one text for both models",
           "padding_free": "rows are padded here",
           "label_smoothing_factor": "the cross-entropy is that of the text",
           "loss_type": "the cross-entropy is that of the text",
           "truncation_mode": "both models are cut behind the same byte",
           "dataset_text_field": "the column of texts is named text here; rename it",
           "compute_loss_func": "the loss is that of `loss` and its weights",
           "formatting_func": "each model has its own template; map the data set before",
           "compute_metrics": "an evaluation has its loss alone; use `Distillation` in a loop",
           "preprocess_logits_for_metrics": "an evaluation has its loss alone"}
NAME = str, os.PathLike  # types of a hub id or a directory
ASKS_NOTHING = (None, False, 0, "nll", "keep_start", "text")  # values of these that are no wish


class Distillation:
    """Make batches of rows for a student and its teacher, and a loss of the student's logits.

    Args:
        student_tokenizer: a fast tokenizer of transformers.
        teacher: hub id, directory, or a causal language model of transformers, which is frozen.
        teacher_tokenizer: likewise, or a fast tokenizer; None: the one of a teacher that is named.
        flags: those of distill.py that describe the loss and the texts, see `FLAGS`.
    Raises:
        ValueError: a flag that does not exist or is wrong, a teacher without a tokenizer, or with
            one that writes ids beyond its head; a model whose weights are not whole on this rank.
    """

    def __init__(self, student_tokenizer, teacher, teacher_tokenizer=None, **flags):
        self.cfg = config_of(flags)
        if teacher_tokenizer is None:
            teacher_tokenizer = teacher
            if not isinstance(teacher, NAME):
                raise ValueError("teacher_tokenizer: is missing, and a model does not know its "
                                 "own; give it, or the name of the teacher")
        if isinstance(teacher_tokenizer, NAME):
            name = read_model_name("teacher_tokenizer", os.fspath(teacher_tokenizer))
            teacher_tokenizer = tokenizer_files.load(*name.of_tokenizer)
        if isinstance(teacher, NAME):
            teacher = load_whole(os.fspath(teacher))
        check_whole(teacher)
        if hasattr(teacher, "get_base_model"):  # of peft: the adapter's layers are in there
            teacher = teacher.get_base_model()
        self.teacher_name = getattr(teacher.config, "name_or_path", "") or "teacher"
        self.model = teacher.eval().requires_grad_(False)
        lengths = self.cfg.max_length, self.cfg.teacher_max_length or context_of(teacher.config)
        encoders = []
        for tokenizer, length in zip((student_tokenizer, teacher_tokenizer), lengths):
            encoders.append(TextEncoder(tokenizer, TokenTable.from_tokenizer(tokenizer), length,
                                        template_kwargs(self.cfg)))
        rows = teacher.config.get_text_config().vocab_size
        if rows < len(encoders[1].table):  # control tokens may be left out
            encoders[1] = replace(encoders[1], table=encoders[1].table.below(rows))
        check_told(encoders)
        self.student, teachers = with_common_ids(encoders[0], {"teacher": encoders[1]})
        self.encoder = teachers["teacher"]
        self.device = None
        self.to(teacher.device)
        pair = PairOptions(self.encoder, self.setup.loss.spelling,
                           half_life=self.cfg.token_half_life)
        self.collator = Collator(self.student, [pair], self.cfg.train_on, self.cfg.aligner,
                                 marks_text=True)

    def to(self, device):
        """Move the teacher and the tables of the loss to a device."""
        if torch.device(device) == self.device:
            return
        self.device = torch.device(device)
        model = self.model.to(self.device)
        vocab = len(self.encoder.table)
        options = self.cfg.options_of_loss
        if "projection_topk" in options:  # all: which matter most would be a question to all ranks
            options["projection_topk"] = vocab
        cfg = replace(self.cfg, loss_options=options)
        spec = ModelSpec(path="teacher", vocab=vocab, device=self.device)
        self.setup = TeacherSetup.of(
            "teacher", cfg, self.encoder, spec, student=self.student, device=self.device)
        self.setup.spelling_ids = SpellingIds.of(
            self.student.table, self.encoder.table, self.device)
        self.setup.source = ModelTeacher(
            WholeModel(model), head_of(model, vocab), spec, "replicated", 0)

    @property
    def collate(self):
        """Return the `collate_fn` of a DataLoader, see `_collate`; to workers it takes no model."""
        return partial(_collate, self.cfg, self.collator)

    def inputs(self, batch, device="cpu"):
        """Return the arguments of the student's forward pass for what `collate` gave."""
        return {"input_ids": batch["batch"].student.ids.to(device), "use_cache": False}

    def loss(self, logits, batch, terms=None, scale=1.0):
        """Return the loss () of a batch with its graph, and the sums of what it consists of.

        The teacher runs where the logits are, both as without autocast.

        Args:
            logits: (B, S, V or more), of the student for `inputs(batch)`.
            terms: (labels, terms of the distillation loss) of all that is averaged over, as
                `count_terms` says; None: of this batch.
            scale: factor of the loss.
        Returns:
            (loss, [cross-entropy, distillation loss]), the sums over this batch in nats.
        Raises:
            ValueError: logits of another batch, or of fewer ids than the tokenizer has.
        """
        shape = *batch["batch"].student.ids.shape, len(self.student.table)
        if logits.shape[:-1] != shape[:-1] or logits.shape[-1] < shape[-1]:
            raise ValueError(f"logits of {tuple(logits.shape)}: expected {shape} or more columns: "
                             "what a student with this tokenizer returns for inputs(batch)")
        with torch.autocast(logits.device.type, enabled=False):
            terms = count_terms(batch) if terms is None else terms
            return self._loss(logits, batch, terms, scale)

    def _loss(self, logits, batch, terms, scale):
        num_ce, num_kd = terms
        self.to(logits.device)
        moved = to_device(batch["batch"], self.device)
        [part] = teacher_parts(self.setup, moved.teachers)
        part.ce_weight = scale * self.cfg.ce_weight / max(num_ce, 1)
        part.weight = scale * self.cfg.kd_weight / max(num_kd, 1)
        student = StoredLogits(logits[..., : len(self.student.table)].flatten(0, 1))
        loss, sums = LossTerms([part]).reduce(student)
        return loss, sums[0, :2]


    @torch.no_grad()
    def measure(self, logits, batch):
        """Return what an evaluation adds up of a held-out batch, (n,) float64.

        They are the cross-entropy in nats, its labels, and the numbers of EvaluationSums.
        """
        with torch.autocast(logits.device.type, enabled=False):
            self.to(logits.device)
            moved = to_device(batch["batch"], self.device)
            logits = logits[..., : len(self.student.table)].flatten(0, 1)
            ce, _ = next_token_cross_entropy(logits[None], moved.student.labels.flatten()[None])
            sums = evaluation_terms(moved, [self.setup], None).reduce(StoredLogits(logits))
        text = torch.tensor([float(ce), moved.counts.ce_tokens], dtype=torch.float64)
        return torch.cat([text, sums])

    def measured(self, sums):
        """Return the metrics of what `measure` adds up of held-out batches."""
        ce, num_labels, *numbers = sums.tolist()
        empty = EvaluationSums(teachers=[ModelSums()], pairs=[PairSums.of(self.setup)])
        student, [teacher] = metrics_of(empty.with_numbers(numbers), [self.setup])
        metrics = {"ce": ce / num_labels if num_labels else None, "kd": teacher["kd"],
                   "bits_per_byte": student["student_bits_per_byte"],
                   "teacher_bits_per_byte": teacher["teacher_bits_per_byte"]}
        return {name: value for name, value in metrics.items() if value is not None}

    def teach_ends(self, model):
        """Let a student stop where it learns to end texts and turns, beside where it did before."""
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            encoder = replace(self.student, generation={"eos_token_id": generation.eos_token_id})
            ends = all_ends(encoder)
            generation.eos_token_id = ends[0] if len(ends) == 1 else ends or None


def _collate(cfg, collator, rows):
    """Return {"labels": (B, S), "batch": Batch} of rows, dicts as they lie in a data set.

    Raises:
        DataError: a row that holds no text, no chat, or no prompt and completion.
        ValueError: a chat, and a tokenizer without a chat template.
    """
    examples = [reader_of(row, cfg)(row) for row in rows]
    if any(isinstance(example.content, list) for example in examples):
        for encoder in (collator.student, *(pair.encoder for pair in collator.pairs)):
            name = encoder.tokenizer.name_or_path or "a model"
            check_have_templates({name: encoder}, "a row")
    batch = collator(examples)
    return {"labels": batch.student.labels, "batch": batch}


def config_of(flags):
    """Return the Config of the flags; others than `FLAGS` and those of losses are refused."""
    known = FLAGS | set(loss_flags())
    for name in flags:
        if name not in known:
            raise ValueError(f"{name}={flags[name]!r}: no such flag here; they are "
                             f"{', '.join(sorted(known))}")
    options = SourceOptions(drop_images=flags.pop("drop_images", False))
    cfg = Config(student="student", teacher="teacher", data="rows", **flags)
    cfg.source_options = options
    for option in ("learn_projection", "projection_topk"):
        if f'"{option}"' in cfg.loss_options:
            raise ValueError(f"loss_options={flags['loss_options']!r}: {option} has no part here; "
                             "leave it out")
    return cfg


def reader_of(row, cfg):
    """Return the `order.ExampleReader` of rows like this one."""
    if not isinstance(row, dict):
        raise ValueError(f"a row is a {type(row).__name__}; expected a dict that holds text, "
                         "messages, or prompt and completion")
    for name in FOR_MODELS:
        if row.get(name):
            warn_of_unread("a row", name)
    for names, keys in COLUMNS.items():
        if all(row.get(name) is not None for name in names):
            key = keys.get("completion_key") or keys["text_key"]
            return ExampleReader(
                key, prompt_key=keys.get("prompt_key", ""), is_completion="prompt_key" in keys,
                source="rows", tools_key="tools", has_chats=key == "messages",
                drop_images=cfg.source_options.drop_images, filled=frozenset(["tools", *names]))
    raise ValueError(f"a row has the columns {', '.join(row)}; expected text, messages, or prompt "
                     "and completion")


def count_terms(*batches):
    """Return (labels, terms of the distillation loss) of what `collate` gave."""
    counts = [batch["batch"].counts for batch in batches]
    return (sum(count.ce_tokens for count in counts),
            sum(count.pairs[0].kd_terms for count in counts))


def _prepare_settings(arguments, options):
    """Let the TrainingArguments among a trainer's arguments leave rows as they are."""
    settings = options.get("args") or next(
        (one for one in arguments if isinstance(one, TrainingArguments)), None)
    if settings is None:
        raise ValueError("args: expected TrainingArguments, or TRL's SFTConfig")
    for name, why in REFUSED.items():
        value = options.get(name, getattr(settings, name, None))
        if value not in ASKS_NOTHING:
            raise ValueError(f"{name}={value!r}: {why}; leave it out")
    if getattr(settings, "completion_only_loss", None) is False:
        raise ValueError("completion_only_loss=False: a prompt is read only; join it with its "
                         "completion to one text, and leave this out")
    settings.remove_unused_columns = False
    settings.accelerator_config.dispatch_batches = False  # a stream's batches are no plain tensors
    if hasattr(settings, "dataset_kwargs"):
        settings.dataset_kwargs = {"skip_prepare_dataset": True}


def weight_of_routers(config):
    """Return the weight of a mixture's load-balancing loss, where its config asks for it; else 0.

    TRL lets it ask by its own setting, transformers as the model was published.
    """
    config = config and config.get_text_config()
    asks = getattr(config, "output_router_logits", False)
    return float(asks and getattr(config, "router_aux_loss_coef", 0.0))


def context_of(config):
    """Return how many positions a model reads, as far as its config says so."""
    config = config and config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or 2**31


class Distilling:
    """Let a trainer, which stands behind it among the bases of a class, learn from a teacher.

    Attributes:
        learns_from: (teacher, teacher_tokenizer, flags) of `distilled`.
    """

    learns_from: tuple = ()

    def __init__(self, *arguments, **options):
        _prepare_settings(arguments, options)
        teacher, teacher_tokenizer, flags = self.learns_from
        its_flags = dict(flags)
        options["data_collator"] = lambda rows: rows  # that of a caller knows token ids alone
        super().__init__(*arguments, **options)
        if getattr(self.args, "shuffle_dataset", False):  # TRL does it as it prepares texts
            self.train_dataset = self.train_dataset.shuffle(seed=self.args.seed)
        context = context_of(getattr(self.model, "config", None))
        if hasattr(self.args, "max_length"):  # None of TRL: nothing is cut that the student reads
            its_flags.setdefault("max_length", self.args.max_length or context)
        length = its_flags.get("max_length", Config.max_length)
        if length > context:
            raise ValueError(f"max_length={length}: the student has a context of {context} "
                             "positions; use no more")
        if self.processing_class is None:
            raise ValueError("processing_class: is missing; give the student's tokenizer")
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        self.distillation = Distillation(tokenizer, teacher, teacher_tokenizer, **its_flags)
        self.data_collator = partial(collate_filled, self.distillation.collate)
        self.distillation.teach_ends(self.model)
        self.router_weight = weight_of_routers(getattr(self.model, "config", None))
        self.held_out = None
        self.has_compared = False
        self.loss_is_scaled_for_ga = True  # by the terms of all micro-batches
        self.terms = None
        # this rank's shares of the steps' means since the last log, summed on the device
        self.seen = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        self.seen_steps = 0

    def _prepare_dataset(self, dataset, *arguments, **options):
        return dataset  # TRL would leave token ids in the place of rows

    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        if hasattr(self, "distillation"):  # the first one is taught above
            self.distillation.teach_ends(model)
        return model

    def train(self, *arguments, **options):
        self.start_log()
        return super().train(*arguments, **options)

    def start_log(self):
        self.seen.zero_()
        self.seen_steps = 0

    # as a whole: unsloth has another one in the Trainer, which counts labels itself
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batch_samples = list(islice(epoch_iterator, num_batches))
        self.terms = count_terms(*batch_samples)
        if self.args.world_size > 1:
            terms = torch.tensor([self.terms], dtype=torch.float64, device=device)
            self.terms = self.accelerator.gather(terms).sum(0).tolist()
        self.seen_steps += bool(batch_samples)
        if batch_samples and not min(self.terms):
            warnings.warn("a step has {:.0f} tokens to learn and {:.0f} terms of the "
                          "distillation loss".format(*self.terms), stacklevel=2)
        return batch_samples, torch.tensor(self.terms[0], device=device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        trains = num_items_in_batch is not None
        outputs = self.read(model, inputs)
        loss, sums = self.distillation.loss(
            outputs.logits, inputs, self.terms if trains else None,
            self.accelerator.num_processes if trains else 1.0)
        if trains:
            for number, count in enumerate(self.terms):
                self.seen[number] += sums[number] / max(count, 1)
            if self.router_weight:  # a mean of a micro-batch, as its model has it
                steps = self.current_gradient_accumulation_steps
                loss = loss + self.router_weight * outputs.aux_loss / steps
        return (loss, outputs) if return_outputs else loss

    def _track_num_input_tokens(self, inputs):
        super()._track_num_input_tokens(self.student_inputs(inputs))

    def floating_point_ops(self, inputs):
        return super().floating_point_ops(self.student_inputs(inputs))

    def student_inputs(self, batch):
        """Return what the student reads of a batch, on the CPU, by the names of a trainer."""
        student = batch["batch"].student
        name = getattr(self.model, "main_input_name", "input_ids")
        return {name: student.ids, "attention_mask": student.is_text}

    def read(self, model, batch):
        arguments = self.distillation.inputs(batch, self.args.device)
        if self.router_weight:  # padding chooses no expert
            is_text = batch["batch"].student.is_text.to(self.args.device)
            arguments |= {"output_router_logits": True, "attention_mask": is_text.long()}
        return model(**arguments)

    # A drop_last asks for whole batches alone; each rank reads all of a stream.
    def _get_dataloader(self, dataset, *arguments, is_training=False, **options):
        if not is_training and self.args.world_size > 1 and not self.args.dataloader_drop_last:
            dataset = filled(dataset, self.args.world_size * self.args.eval_batch_size)
        return super()._get_dataloader(dataset, *arguments, is_training=is_training, **options)

    def _get_eval_sampler(self, eval_dataset):
        # in order: `Filling` has no length to sort by
        return (None if isinstance(eval_dataset, FilledRows)
                else super()._get_eval_sampler(eval_dataset))

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            sums = self.distillation.measure(self.read(model, inputs).logits, inputs)
        if "is_filling" in inputs:
            sums = torch.zeros_like(sums)
        self.held_out = sums if self.held_out is None else self.held_out + sums
        return self.loss_of(self.distillation.measured(sums)), None, None

    def loss_of(self, metrics):
        """Return the loss () of what was measured; NaN: of a part of it nothing was."""
        cfg = self.distillation.cfg
        loss = 0.0
        for name, weight in (("ce", cfg.ce_weight), ("kd", cfg.kd_weight)):
            loss += weight * metrics.get(name, math.nan) if weight else 0.0
        return torch.tensor(loss, device=self.args.device)

    def evaluation_loop(self, dataloader, *arguments, metric_key_prefix="eval", **options):
        self.held_out = None
        output = super().evaluation_loop(
            dataloader, *arguments, metric_key_prefix=metric_key_prefix, **options)
        if self.held_out is None:
            raise ValueError(f"{metric_key_prefix}: its data set has no rows; give it some, or "
                             "leave it out; a stream may have ended before")
        sums = self.accelerator.gather(self.held_out[None].to(self.args.device)).sum(0)
        metrics = self.distillation.measured(sums)
        metrics["loss"] = float(self.loss_of(metrics))
        for name, value in metrics.items():
            output.metrics[f"{metric_key_prefix}_{name}"] = value
        if not self.has_compared and self.is_world_process_zero():
            if math.isnan(metrics["loss"]):
                warnings.warn("the held-out rows have nothing to learn, or nothing that a teacher "
                              "compares, so their loss is not known", stacklevel=2)
            bits = {"eval/student_bits_per_byte": metrics.get("bits_per_byte"),
                    "eval/teacher_bits_per_byte": metrics.get("teacher_bits_per_byte")}
            for worse in worse_teachers(bits, self.distillation.teacher_name):
                warnings.warn(worse, stacklevel=2)
        self.has_compared = True
        rows = getattr(dataloader, "dataset", None)
        if isinstance(rows, FilledRows):
            output = output._replace(num_samples=len(rows.rows))
        return output

    def log(self, logs, *arguments, **options):
        if "loss" in logs:  # on all ranks
            seen = self.accelerator.gather(self.seen[None]).sum(0) / max(self.seen_steps, 1)
            for name, mean in zip(("ce", "kd"), seen.tolist()):
                if getattr(self.distillation.cfg, f"{name}_weight"):  # else it is not computed
                    logs[name] = mean
            self.start_log()
        super().log(logs, *arguments, **options)


def distilled(trainer_class, teacher, teacher_tokenizer=None, **flags):
    """Return a subclass of the Trainer of transformers, or of TRL's SFTTrainer, with a teacher.

    Its loss is ce_weight * cross-entropy + kd_weight * distillation loss, each a mean over all
    micro-batches of a step and all ranks.  Those that have a weight are logged as `ce` and `kd`,
    like `loss` as the means of the steps since the last line; of an evaluation both as `eval_ce`
    and `eval_kd`, with bits per byte of both models, over each held-out row once.  What a
    mixture asks for its routers is added.  It is made as its base class is, with `args`; what that
    does to prepare texts is left to `Distillation.collate`.

    Args:
        teacher, teacher_tokenizer, flags: see `Distillation`; max_length is SFTConfig's unless
            given.
    """
    attributes = {"learns_from": (teacher, teacher_tokenizer, flags)}
    return type(f"Distilled{trainer_class.__name__}", (Distilling, trainer_class), attributes)
