"""Define the flags of distill.py: their meaning, their checks, their values for each teacher."""

import importlib.util
import shlex
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import ClassVar

from isogloss.data.mixture import SourceOptions, sources_of
from isogloss.flags.json_text import parse_json
from isogloss.flags.parse import (
    DATE,
    Options,
    check_flags,
    flag,
    flags_that,
    keywords_of,
    parse_flags,
    read_options,
    refusing,
)
from isogloss.flags.together import check_idle, check_together, is_set, shown
from isogloss.loss_bounds import NUMBERS

HALF_LIFE = 256  # of --token_weights early, learned tokens.  Not tuned.
LEAST_AUTO_MIB, MOST_AUTO_MIB = 512, 16_384  # of --loss_memory_mib auto.  Not tuned.

FIRST_COMMAND = ("isogloss-distill --ds_config ds_configs/zero2.json --learning_rate 1e-4 "
                 "--student HuggingFaceTB/SmolLM2-135M --teacher Qwen/Qwen3-0.6B "
                 "--data corpus.jsonl")


def bounds_of(name):
    """Return the bounds of a flag that is a parameter of losses."""
    return dict(low=NUMBERS[name].low, high=NUMBERS[name].high)


def loss_table():
    """Return the table of losses.  It is imported late: --help waits for no torch."""
    from isogloss.objective.loss_table import LOSSES

    return LOSSES


def options_of_loss(cfg):
    """Return the Options of --loss_options."""
    spec = loss_table()[cfg.loss]
    return Options(f"--loss {cfg.loss}", spec.options, spec.check_options)


def options_of_tasks(_):
    """Return the Options of --eval_task_options; the others of tasks are flags of the run."""
    from isogloss.flags.task_options import TaskOptions

    of_tasks = keywords_of(TaskOptions, leave_out=("seed", "trust_remote_code"))
    return Options("an evaluation", of_tasks, TaskOptions)


def options_of_environment(_):
    """Return the Options of --environment."""
    from isogloss.flags.on_policy import EnvironmentOptions

    return Options("an environment", keywords_of(EnvironmentOptions), EnvironmentOptions,
                   "function")


@dataclass(kw_only=True)
class ModelFlags:
    """model"""

    student: str = flag(
        "", "hub id or directory of the model to train. Its tokenizer needs an eos token.")
    from_scratch: bool = flag(
        False, "start from random weights, which the seed decides. Of the student's files only "
        "config and tokenizer are read.")
    lora_r: int = flag(
        0, "train an adapter of low rank beside frozen weights (LoRA, by peft): its rank. 0 "
        "trains all weights. A student that is an adapter goes on with it, or with 0 is merged.",
        low=0, high=2**20)
    lora_alpha: float = flag(
        0.0, "the adapter's product counts lora_alpha / lora_r. 0: twice lora_r.", low=0, high=1e6)
    lora_targets: str = flag(
        "", "names of the linear layers that get one, with commas, as q_proj,v_proj. Empty: all "
        "but the head.")
    quantize: str = flag(
        "", "hold the frozen weights of lora_r in 4 bits (QLoRA): nf4, by bitsandbytes. Empty: as "
        "they are.", choices=("", "nf4"))
    lora_embeddings: bool = flag(
        False, "train the input embedding and the head whole beside the adapter of lora_r, and "
        "export them with it.")
    train_only: str = flag(
        "", "embeddings: train the input embedding and the head alone, as of a student with new "
        "tokens, see docs/transfer.md. Empty: all weights.", choices=("", "embeddings"))
    freeze_until: int = flag(
        0, "steps for which train_only holds, by the end of which the other weights begin to "
        "learn. 0: the whole run.", low=0, high=10**12)
    router_weight: float = flag(
        -1.0, "of the loss that balances the experts of a mixture, as transformers defines it, "
        "over all tokens of a step. -1: what the student's config says, router_aux_loss_coef "
        "where output_router_logits is true. 0: none.", low=-1, high=1e3)
    freeze_router: bool = flag(
        False, "do not train what chooses the experts of a mixture, and balance nothing.")
    trust_remote_code: bool = flag(
        False, "run the Python code that comes with a model, or that a YAML file of a task "
        "names, which can do anything. false refuses what needs it.")
    attention: str = flag(
        "auto", "how student and teachers attend: sdpa, flash_attention_2 (needs a GPU, half "
        "precision and the package flash-attn), eager, or auto: sdpa where a model has it. With "
        "sequence_parallel the student has an attention of its own.", free=True,
        choices=("auto", "sdpa", "flash_attention_2", "eager"))
    sequence_parallel: int = flag(
        1, "neighboring ranks that hold one shard of every sequence each (Ulysses). It divides "
        "the student's attention heads.", low=1, high=2**16, free=True)
    pipeline_parallel: int = flag(
        1, "neighboring ranks that hold some of the student's layers each, as stages of a "
        "pipeline. Needs ZeRO stage 1 and as many gradient_accumulation_steps. See "
        "docs/scale.md.", low=1, high=2**16, free=True)
    activation_checkpointing: bool = flag(
        False, "recompute the student's activations in backward.", free=True)
    activation_offload: bool = flag(
        False, "keep what activation_checkpointing stores in the host's memory.", free=True)
    compile: str = flag(
        "auto", "compile the student's layers: true, false, or auto: on a GPU. See docs/scale.md.",
        free=True, choices=("auto", "true", "false"))
    mlp_tiles: int = flag(
        1, "pieces in which a student's MLP takes the positions of long sequences, recomputed in "
        "backward.", low=1, high=2**20, free=True)


@dataclass(kw_only=True)
class DataFlags:
    """data"""

    data: str = flag(
        "", "hub id (org/name or org/name:config), file, directory (of files, or of "
        "save_to_disk), glob, or the address of a file (https://, hf://). Files end in .txt, "
        ".jsonl, .json, .parquet, .arrow or .csv. All but .parquet and .arrow may be compressed, "
        "as in .jsonl.gz (.gz, .bz2, .xz, .zst). Or a JSON list of entries, see docs/data.md: "
        "several data sets with weights, or what only an entry says (tools_key, weight_key, "
        "drop_images, txt_samples).")
    text_key: str = flag(
        "text", 'column that holds the text, or chats, which are lists of {"role", '
        '"content"} (or of ShareGPT\'s {"from", "value"}).')
    completion_key: str = flag(
        "", "column of what follows the prompts of prompt_key, in place of text_key; both hold "
        "texts, or both chats. The prompt is read, only the completion is learned.")
    teacher_prompt_key: str = flag(
        "", "column of what teachers alone read in front of a chat: a text, which is a system "
        "message (a solution, a document, a better prompt), or messages (examples).")
    template_kwargs: str = flag(
        "", "what every chat template is told besides, as a JSON object: "
        '{"enable_thinking": false}.')
    chat_date: str = flag(
        "", "date that chat templates are told, as 2026-05-01. Empty: the day on which the run "
        "began, or on which the chats of its --teacher_cache were rendered.", free=True)
    join_rows: int = flag(
        0, "characters that a sample of text has at least: neighboring rows are joined, whole and "
        "with a newline between them, until they have as many. Attention and loss reach across. "
        "0: every row is a sample. See docs/data.md.", low=0, high=2**30)
    split: str = flag(
        "train", "split of a hub data set, of a directory whose files or folders are named train, "
        "test and so on, or of a save_to_disk of several; or a part of it, as in train[:10%] (not "
        "of a stream).")
    streaming: bool = flag(
        False, "read the data as a stream instead of preparing it on disk first.")
    train_on: str = flag(
        "assistant", "what to learn of a chat. assistant: what the assistant says, and to end its "
        "turn. all: the whole rendering.", choices=("assistant", "all"))
    max_length: int = flag(
        512, "student positions per sample, 2 or more. Longer texts are cut, for student and "
        "teacher at the same byte.", **bounds_of("max_length"))
    teacher_max_length: int = flag(
        0, "teacher positions per sample. 0 means the teacher's context.",
        low=0, high=2**31, key="max_length")
    pack: bool = flag(
        False, "put several texts of a micro-batch into one row where they fit into max_length "
        "and teacher_max_length. Attention stays inside each text, and the loss is the same.",
        free=True)
    aligner: str = flag(
        "bytes", "how the tokens of student and teacher are matched. bytes: by byte positions in "
        "the same text. dp: by dynamic programming over token strings, for texts that student and "
        "teacher render differently.", choices=("bytes", "dp"))
    eval_rows: int = flag(
        0, "rows held out of training, the first ones of the data. 0 holds out none. With "
        "eval_data or eval_split, how many of those rows are used, 0 being all.", low=0, high=10**9)
    eval_data: str = flag("", "held-out rows of their own, named as data is. Empty: those of data.")
    eval_split: str = flag(
        "", "split of eval_data, or of data where that is empty. Empty: train, of eval_data.")
    num_workers: int = flag(
        1, "processes per rank that tokenize and align. 0: the training process does it.",
        low=0, high=512, free=True)


@dataclass(kw_only=True)
class LossFlags:
    """loss"""

    loss: str = flag(
        "piece_kl", "distillation loss, for any two tokenizers. piece_kl is forward_kl; it and "
        "the other divergences (reverse_kl, generalized_jsd, skew_forward_kl, skew_reverse_kl, "
        "adaptive_kl, total_variation) compare what docs/piece_kl.md translates. Beside them: "
        "projection_kl, gold, h_kl, uld, hybrid_uld, alm. See docs/losses.md.",
        choices=loss_table, key="loss")
    kd_weight: float = flag(
        1.0, "weight of the distillation loss, >= 0. 0 loads no teacher.", low=0, high=1e6)
    ce_weight: float = flag(
        1.0, "weight of the student's next-token cross-entropy, >= 0. 0 computes none in "
        "training.", **bounds_of("text_weight"))
    dynamic_scale: bool = flag(
        False, "multiply each teacher's distillation loss by cross-entropy / distillation loss of "
        "the step before, so that kd_weight says how much it counts beside the text. Needs "
        "ce_weight.")
    temperature: float = flag(
        1.0, "softens what the distillation loss compares of both models, 0.001 to 1000.",
        **bounds_of("temperature"), key="temperature")
    loss_topk: int = flag(
        0, "tokens (or cells, see docs/piece_kl.md) that divergences compare, the teacher's most "
        "likely, with one bucket for the rest. 0: all.", **bounds_of("top_k"), key="loss_topk")
    projection: str = flag(
        "", "file of projection_tools.build for projection_kl, gold and h_kl. Empty: it is built "
        "in flight and cached.", key="projection")
    loss_options: str = flag(
        "", 'options of this loss alone, as a JSON object: {"beta": 0.3} of generalized_jsd. '
        "docs/losses.md lists them, and an unknown one is answered with those that there are. In "
        "an entry of --teachers that names a loss they are of that loss.",
        options=options_of_loss, key="loss_options")
    token_weights: str = flag(
        "", "how much a term weighs by the place where it begins. early:N: 2^(-t / N) behind t "
        "learned tokens; early means early:256. column: what the weight_key of an entry of data "
        "says of the row. Empty: 1 each.", key="token_weights")
    tiled: bool = flag(
        True, "compute logits and loss tile by tile from hidden states. false computes the logits "
        "of a whole micro-batch.", free=True)
    loss_memory_mib: int = flag(
        0, "MiB for the logits of a tile and what the loss makes of them. 0 or auto: at most an "
        "eighth of the GPU's memory that is free before the first step, 512 to 16384; 512 on a "
        "CPU.", low=0, high=2**20, free=True)
    loss_backend: str = flag(
        "auto", "how the formulas of the loss run: plain (torch), or compiled (torch.compile; the "
        "first step waits some seconds for it). auto compiles on a GPU.",
        choices=("auto", "plain", "compiled"), free=True)


@dataclass(kw_only=True)
class OnPolicyFlags:
    """on-policy"""

    on_policy: float = flag(
        0.0, "share of the samples that the student writes itself, 0 to 1, each in place of the "
        "text or of the assistant's last message. The teachers correct what it wrote by the same "
        "loss; there is no cross-entropy on it. See docs/on_policy.md.", low=0, high=1)
    prompt_key: str = flag(
        "", "column of the prompts of what the student writes, text or chats, and of those of "
        "completion_key. Empty: the first prompt_tokens of a text, or a chat before the "
        "assistant's last message.")
    prompt_tokens: int = flag(
        32, "student tokens of a text that are the prompt (of a short one its half).",
        low=1, high=2**20)
    rollout_tokens: int = flag(
        128, "tokens that the student writes at most, 1 or more.", low=1, high=2**20)
    rollouts_per_prompt: int = flag(
        1, "how often the student writes from the same prompt; so many neighboring samples share "
        "one.", low=1, high=2**20)
    rollout_every: int = flag(
        1, "steps that use the same rollouts, 1 or more. After the first of them, each term "
        "counts as much more as the student would come there more often by now.", low=1, high=2**20)
    max_ratio: float = flag(
        5.0, "how much more such terms count at most, 1 or more.", low=1, high=1e6)
    rollout_temperature: float = flag(
        1.0, "of what the student writes, 0.001 to 1000.", **bounds_of("temperature"))
    rollout_top_p: float = flag(
        1.0, "it writes the most likely tokens with this probability together, above 0 to 1.")
    rollout_batch: int = flag(
        64, "texts that a rank writes side by side.", low=1, high=2**16, free=True)
    rollout_replica: bool = flag(
        True, "with ZeRO-3, write with a whole copy of the student on every rank. false gathers "
        "layer by layer for every token, which is slow and takes no memory.", free=True)
    writer: str = flag(
        "student", "what writes with the student's weights. student: it does, in this job. vllm: "
        "vLLM of this environment, a process on every node. Or the command of such a process, as "
        '"/env/bin/python -m isogloss.vllm_writer" for a vLLM of another environment.', free=True)
    staleness: int = flag(
        1, "steps that the weights with which such a process writes may be old, 0 or 1. 1: it "
        "writes for the next step while this one trains.", low=0, high=1)
    environment: str = flag(
        "", "what answers each turn of the student in a chat, and may reward it: calculator, "
        "python, package.module:function or file.py:function, or a JSON object of function, "
        "max_turns, reward_weight, seconds, mib.", options=options_of_environment)
    rollout_log: int = flag(
        1, "rollouts of a step that rollouts.jsonl keeps.", low=0, high=2**20, free=True)
    rollout_eval: int = flag(
        32, "held-out rows from which the student writes at every evaluation.",
        low=0, high=2**20, free=True)


@dataclass(kw_only=True)
class TeacherFlags:
    """teachers"""

    teacher: str = flag(
        "", "hub id or directory of the frozen teacher, or the address of a server that scores "
        "texts by it, as http://host:8000 (vLLM, SGLang). self: the student as it was at the "
        "start, see teacher_ema. Not needed with kd_weight 0.", key="model")
    teacher_ema: float = flag(
        1.0, "of teacher self: how much of its weights it keeps with each step. 1: all, it stays "
        "what the student was; 0: none, it is the student; between: an exponential mean, as 0.999.",
        low=0, high=1, key="ema")
    teacher_tokenizer: str = flag(
        "", "hub id or directory of a served teacher's tokenizer and config; no weights are read. "
        "See docs/teachers.md.", key="tokenizer")
    teacher_timeout: float = flag(
        600.0, "seconds for a request to a served teacher, all tries together; then the job ends. "
        "1 to 1500.", low=1, high=1500, free=True)
    teacher_cache: str = flag(
        "", "directory that python -m isogloss.cache has written: what a teacher says of the "
        "texts, in place of a teacher. Its tokenizer is there too, so teacher is not needed; one "
        "that is named has to have the same. The cache decides what is kept of the teacher.",
        key="cache")
    teachers: str = flag(
        "", 'several teachers instead of one, as a JSON list: [{"model": "A", "weight": 2, '
        '"loss": "gold"}, {"model": "B", "tp": 2}]. An entry may also have name (for its '
        "metrics), weight (times kd_weight), routes, tp, engine, dtype, max_length, "
        "offload, compile, and in place of the run's own value loss, teacher_output, "
        'teacher_output_topk and every flag of a loss. With "cache" in place of "model" it '
        'is a teacher_cache; a "model" that is an address takes a "tokenizer".')
    teacher_weights: str = flag(
        "fixed", "how several teachers share the loss. fixed: by the weights of --teachers. ce: "
        "for each sample by softmax of minus the nats per byte that a teacher finds in it. select: "
        "the teacher with the fewest alone. A teacher that does not read a sample has no weight "
        "there. mean_p: one loss, the first teacher's, against the mean of teachers with one "
        "tokenizer.", choices=("fixed", "ce", "select", "mean_p"))
    route_key: str = flag(
        "", "column whose value chooses the teachers of a row: those that list it in their "
        '"routes", as in {"model": "A", "routes": ["math"]}. Teachers without routes take '
        "the other rows.")
    teacher_output: str = flag(
        "hidden", "what is kept of the teacher until a loss reads it. hidden: final hidden "
        "states. logits. topk: the most likely tokens and the text's own; all others are one "
        "event. Not for gold, h_kl and uld. A served teacher gives no more than topk.",
        choices=("hidden", "logits", "topk"), key="teacher_output")
    teacher_output_topk: int = flag(
        256, "tokens of teacher_output topk. 0: of a server the text's own alone, for alm.",
        low=0, high=2**20, key="teacher_output_topk")


@dataclass(kw_only=True)
class TeacherParallelismFlags:
    """teacher parallelism"""

    teacher_engine: str = flag(
        "auto", "replicated (a whole copy per rank), tensor_parallel (cut by transformers' plan "
        "for the model; transformers means the same), zero3 (over all ranks with teachers, for any "
        "architecture), vllm or a command (an engine beside the job), or auto: the first but these "
        "that can shard it.", free=True, key="engine")
    teacher_tp: int = flag(
        1, "neighboring ranks of a node that share one teacher. It divides the ranks of a node.",
        low=1, high=2**16, free=True, key="tp")
    teacher_ranks: int = flag(
        0, "the last so many ranks of every node hold the teachers and do nothing else. They run "
        "on the next step while the others train. 0: the student's ranks hold them.",
        low=0, high=2**16, free=True)
    teacher_dtype: str = flag(
        "auto", "auto (as in the checkpoint), float32, bfloat16 or float16.",
        choices=("auto", "float32", "bfloat16", "float16"), key="dtype")
    teacher_offload: bool = flag(
        False, "keep the teacher's weights in the host's memory but for its forward passes.",
        free=True, key="offload")
    teacher_compile: str = flag(
        "auto", "compile the teacher's layers: true, false, or auto: on a GPU.", free=True,
        choices=("auto", "true", "false"), key="compile")


@dataclass(kw_only=True)
class TaskFlags:
    """evaluation tasks"""

    eval_tasks: str = flag(
        "", "tasks that the student is judged by, with commas: mmlu, mmlu_continuation, lambada, "
        "gsm8k, hellaswag, winogrande, arc_challenge, arc_easy, humaneval_plus, mbpp_plus, or "
        "lm_eval:NAME for one of lm-evaluation-harness. See docs/evaluate.md.", free=True)
    eval_task_every: int = flag(
        0, "steps between two of these evaluations. 0 evaluates before the first and after the "
        "last step only.", low=0, high=10**12, free=True)
    eval_task_options: str = flag(
        "", 'how they are run, as a JSON object: {"shots": 3, "limit": 100}. Its options are flags '
        "of isogloss-tasks, where --help explains them: data, shots, limit, batch_size, "
        "max_new_tokens, samples, temperature, allow_unsafe_code.", free=True,
        options=options_of_tasks)


@dataclass(kw_only=True)
class RunFlags:
    """run"""

    config: str = flag(
        "", "YAML file of flags, as in recipes/; those of the command line win.", free=True)
    plugin: str = flag(
        "", "Python files of your own, with commas, that are run before anything else and add a "
        "loss or a kind of teachers to our tables. See docs/architecture.md.", free=True)
    ds_config: str = flag(
        "ds_configs/zero2.json", "DeepSpeed JSON; see ds_configs/README.md.", free=True)
    learning_rate: float = flag(
        0.0, 'fills "lr": "auto" of the ds_config. 0: the ds_config states it.', low=0, high=1e3)
    steps: int = flag(1000, "optimizer steps in all, 1 or more.", low=1, high=10**12, free=True)
    epochs: float = flag(
        0.0, "passes over the samples to train on, in place of steps, which follow: as many as "
        "have read them so often, the last one whole. 0: steps says it. Not of a stream, whose end "
        "is not known.", low=0, high=1e6, free=True)
    seed: int = flag(
        0, "of the data order, of dropout, and of the weights with from_scratch.",
        low=0, high=2**32 - 2**16)
    output_dir: str = flag(
        "runs/default", "directory for metrics.jsonl, run.json and checkpoints; all nodes share "
        "it.", free=True)
    eval_every: int = flag(
        0, "steps between held-out evaluations. 0 evaluates before the first and after the last "
        "step only.", low=0, high=10**12, free=True)
    eval_samples: int = flag(
        0, "held-out rows, the first ones, that the student continues at every held-out "
        "evaluation by its most likely tokens, behind prompt_tokens of them, for rollout_tokens "
        "at most. samples.jsonl keeps them, and the first is printed. 0: none.",
        low=0, high=2**20, free=True)
    eval_draft: bool = flag(
        False, "measure at every held-out evaluation how good a draft of the teacher the student "
        "is in speculative decoding; the teacher's whole rows are needed. See docs/evaluate.md.",
        free=True)
    save_every: int = flag(
        0, "steps between checkpoints. 0 saves after the last step and on SIGTERM, SIGINT and "
        "SIGHUP only.", low=0, high=10**12, free=True)
    keep_checkpoints: int = flag(
        2, "how many to keep beside the one of --resume, 1 or more.", low=1, high=2**20, free=True)
    max_bad_steps: int = flag(
        3, "how many steps in a row may have a loss or a gradient that is not finite, 1 or more; "
        "then the job ends. Such steps change no weight.", low=1, high=10**12, free=True)
    resume: str = flag(
        "auto", "auto (newest whole checkpoint of output_dir, if any), never, or the path of a "
        "checkpoint, to which every start goes back.", free=True)
    extend_schedule: bool = flag(
        False, "resume also where the schedule has another length than before, as by an "
        '"auto" total_num_steps with other --steps. The learning rate then jumps. false '
        "refuses.", free=True)
    export: str = flag(
        "", "directory for the trained student in Hugging Face format; an earlier export there is "
        "replaced, anything else is not. Empty: none.", free=True)
    merge: bool = flag(
        False, "export the whole model with lora_r's adapter in its weights, not the adapter "
        "alone.", free=True)
    dump_losses: str = flag(
        "", "directory for one .safetensors a micro-batch and rank: ids, chunks, and the loss of "
        "each chunk, to compare another system with. It waits for the device. See "
        "docs/evaluate.md. Empty: none.", free=True)
    wandb_project: str = flag(
        "", "log to this Weights & Biases project, as wandb of the ds_config does.", free=True)
    local_rank: int = flag(-1, "set by the launcher.", free=True)


@dataclass(kw_only=True)
class Config(ModelFlags, DataFlags, LossFlags, OnPolicyFlags,
             TeacherFlags, TeacherParallelismFlags, TaskFlags, RunFlags):
    """Cross-tokenizer knowledge distillation: train a student from one or more frozen teachers.

    Batch sizes, precision, optimizer, schedule and ZeRO live in the DeepSpeed configuration; see
    ds_configs/README.md.
    """

    has_foreign: ClassVar[bool] = True  # see `parse_flags`
    given: ClassVar[frozenset] = frozenset()  # flags of the command line; `parse_flags` sets it
    source_options: ClassVar[SourceOptions] = SourceOptions()  # see kinds/mixed.py
    max_logp_gap: ClassVar[float] = 0.1  # nats, see docs/on_policy.md.  Not tuned.
    of_teachers: ClassVar[dict | None] = None  # see `configs_by_teacher`
    losses: ClassVar = staticmethod(loss_table)  # for rooms that know no Config

    @classmethod
    def read(cls, words):
        """Return the Config of a command line; --help and wrong flags end this process."""
        with refusing():
            if all(word.startswith("--local_rank") for word in words):  # the launcher's own
                raise ValueError(f"nothing to do; begin with: {FIRST_COMMAND} (--help has more)")
            return parse_flags(cls, words, file_flag="config")

    def __post_init__(self):
        if self.loss_memory_mib == "auto":
            self.loss_memory_mib = 0
        for name in ("compile", "teacher_compile"):  # a YAML file has bools
            setattr(self, name, str(getattr(self, name)).lower())
        if self.teacher == "self":
            if self.from_scratch:
                raise ValueError("--teacher self with --from_scratch: random weights have nothing "
                                 "to teach; name a teacher")
            self.teacher = self.student
        if self.plugin:  # which adds to what the others are checked against
            from isogloss.flags.plugins import load_plugins

            load_plugins(self.plugin)
        check_flags(self)
        check_together(self)
        check_date(self.chat_date)
        template_kwargs(self)
        self._check_values()
        self._check_trained()
        self._check_loss()
        if self.on_policy or (self.writer, self.rollout_top_p) != ("student", 1):
            from isogloss.flags.on_policy import check_on_policy

            check_on_policy(self)
        sources_of(self)
        self.check_held_out()
        self._check_presence()
        self._check_teachers()

    def check_run(self):
        """Raise a ValueError for flags of a command line that would do nothing in this run.

        With --kd_weight 0, as of a run to compare with, all that is for teachers may stay.
        """
        check_idle(self)
        if not self.teachers and any(source.cfg.route_key for source in sources_of(self)):
            raise ValueError(f"{shown(self, 'route_key')}: chooses among teachers; list them with "
                             "--teachers")
        if self.kd_weight:
            check_teacher_flags(self)

    def settle(self, name, value):
        """Set what only the start of the run says of a flag, for each of its teachers, too."""
        setattr(self, name, value)
        for teacher_cfg in (self.of_teachers or {}).values():
            setattr(teacher_cfg, name, value)

    @property
    def ranks_per_reader(self):
        return self.sequence_parallel * self.pipeline_parallel

    def _check_values(self):
        if self.quantize and importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError(f"--quantize {self.quantize}: needs bitsandbytes, which is not "
                             "installed; pip install bitsandbytes==0.50.2")
        if self.resume not in ("auto", "never") and not Path(self.resume).is_dir():
            raise ValueError(f"--resume={self.resume}: expected auto, never or the directory of a "
                             "checkpoint")

    @property
    def has_weights(self):
        """Whether the data say what a row weighs."""
        return any(source.cfg.source_options.weight_key for source in sources_of(self))

    @property
    def token_half_life(self):
        """Half-life of --token_weights early, in learned tokens; 0: they are others."""
        kind, _, number = self.token_weights.partition(":")
        return float(number or HALF_LIFE) if kind == "early" else 0.0

    @property
    def holds_out(self):
        return any(source.cfg.eval_rows or source.cfg.eval_data or source.cfg.eval_split
                   for source in sources_of(self))

    @property
    def has_routes(self):
        """Whether the data choose among teachers."""
        return any(source.chooses for source in sources_of(self))

    def _check_trained(self):
        adapts = self.freeze_until and self.lora_embeddings
        if self.train_only and self.lora_r and not adapts:
            raise ValueError(f"--train_only {self.train_only} with --lora_r {self.lora_r}: nothing "
                             "would train the adapter; add --freeze_until and --lora_embeddings, "
                             "or leave out one of them")

    def _check_loss(self):
        if self.kd_weight == self.ce_weight == 0:
            raise ValueError("--kd_weight 0 and --ce_weight 0: nothing would be learned; raise one "
                             "of them")
        if self.dynamic_scale and not (self.kd_weight and self.ce_weight):
            raise ValueError("--dynamic_scale: needs both losses, because it scales distillation "
                             "by cross-entropy; raise --kd_weight and --ce_weight above 0, or "
                             "leave it out")
        if self.projection_learning_rate and not self.learn_projection:
            raise ValueError("--loss_options: projection_learning_rate: is for learn_projection; "
                             "add it")
        if self.learn_projection and not self.kd_weight:
            raise ValueError("--loss_options: learn_projection with --kd_weight 0: nothing would "
                             "train it; leave it out")
        if self.token_weights not in ("", "early"):
            from isogloss.flags.other_names import settled_token_weights

            self.token_weights = settled_token_weights(self, HALF_LIFE)

    def check_held_out(self):
        """Raise a ValueError for held-out rows without a number, of data without an end."""
        if self.streaming and (self.eval_data or self.eval_split) and not self.eval_rows:
            raise ValueError("--eval_data or --eval_split with --streaming: a stream may have no "
                             "end; say by --eval_rows how many rows of it are used")

    @property
    def writer_command(self):
        """Command of the process that writes; empty: the student itself does."""
        if self.writer == "vllm":
            return shlex.join([sys.executable, "-m", "isogloss.vllm_writer"])
        return "" if self.writer == "student" else self.writer

    @property
    def options_of_loss(self):
        """{option: value} of --loss_options, with those that it does not name."""
        return read_options(self, "loss_options")

    @property
    def learn_projection(self):
        """Whether the projection of the loss is trained too."""
        return self.options_of_loss.get("learn_projection", False)

    @property
    def projection_learning_rate(self):
        """Learning rate of a learned projection; 0: the student's."""
        return self.options_of_loss.get("projection_learning_rate", 0.0)

    @property
    def averages_teachers(self):
        return self.teacher_weights == "mean_p"

    @property
    def teacher_kind(self):
        from isogloss.teachers.kinds import kind_of  # late, like the table of losses

        return kind_of(self)

    @property
    def teacher_path(self):
        """Hub id or directory of the teacher's tokenizer and config, those of a cache included."""
        return self.teacher_kind.tokenizer_path(self)

    @property
    def softens_truncated(self):
        """Whether the loss softens rows that keep some tokens alone."""
        return self.temperature != 1 and loss_table()[self.loss].truncated == "softened"

    @property
    def follows_student(self):
        """Whether the loss compares what the student finds most likely."""
        return self.loss_topk > 0 and self.options_of_loss.get("topk_of") == "student"

    def _check_teachers(self):
        kind = self.teacher_kind
        if self.teacher_tokenizer and not (kind.takes_tokenizer or self.teachers):
            raise ValueError(f"--teacher_tokenizer {self.teacher_tokenizer}: is for the address of "
                             "a server as --teacher; leave it out")
        kind.check(self)
        if self.teachers:
            configs_by_teacher(self)

    def _check_presence(self):
        needed = ["student", "data"]
        if self.kd_weight and not (self.teachers or self.teacher_cache):
            needed.append("teacher")
        for name in needed:
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing: give a hub id or a local path")


# What `apply_chat_template` is told by the code itself.
TEMPLATE_ARGUMENTS = {"conversation", "tools", "tokenize", "add_generation_prompt",
                      "continue_final_message", "return_dict", "return_tensors"}


def template_kwargs(cfg):
    """Return --template_kwargs as a dict.

    Raises:
        ValueError: it is no JSON object, or names what is not the user's to say.
    """
    day = {DATE: cfg.chat_date} if cfg.chat_date else {}
    if not cfg.template_kwargs:
        return day
    example = 'expected a JSON object like {"enable_thinking": false}'
    told = parse_json("--template_kwargs", cfg.template_kwargs, f"; {example}")
    if not isinstance(told, dict):
        raise ValueError(f"--template_kwargs {cfg.template_kwargs}: {example}")
    for name in sorted(TEMPLATE_ARGUMENTS & set(told)):
        raise ValueError(f"--template_kwargs: {name} is not for templates to be told; leave it out")
    return told | day


def check_date(text):
    """Raise a ValueError for a --chat_date that is no date."""
    try:
        is_date = not text or date.fromisoformat(text).isoformat() == text
    except ValueError:
        is_date = False
    if not is_date:
        raise ValueError(f"--chat_date {text}: expected a date like 2026-05-01")


# --- several teachers -----------------------------------------------------------------------------


def configs_by_teacher(cfg):
    """Return {name: Config of a run with this teacher alone}, which are made once.

    Raises:
        ValueError: --teachers is no list of teachers, or an entry is wrong.
    """
    if not cfg.teachers:
        return {cfg.teacher or Path(cfg.teacher_cache).name: cfg}
    if cfg.of_teachers is None:
        from isogloss.several_teachers import configs_of_entries

        cfg.of_teachers = configs_of_entries(cfg)
    return cfg.of_teachers


def routes_by_teacher(cfg):
    """Return {name: its routes, or None for all that no other teacher names}."""
    if not (cfg.teachers and cfg.has_routes):
        return {}
    from isogloss.several_teachers import routes_of_entries

    return routes_of_entries(cfg)


def check_teacher_flags(cfg):
    """Raise a ValueError for a flag or a key of --teachers that no teacher and no loss reads."""
    from isogloss.objective.loss_table import flags_of_teacher  # late, like the table

    others = "model", "loss", "tokenizer", "cache", "max_length", "ema", "compile", "token_weights"
    checked = {flag for flag, key in flags_that(Config, "key").items() if key not in others}
    keys = {}
    configs = configs_by_teacher(cfg)
    entries = [{}]
    if cfg.teachers:
        from isogloss.several_teachers import teacher_entries, teacher_keys

        keys = teacher_keys(Config)
        entries = teacher_entries(cfg)
    first = next(iter(configs.values()))
    read = set()
    for (name, teacher_cfg), entry in zip(configs.items(), entries):
        flags = flags_of_teacher(teacher_cfg)
        has_others = "loss_options" in entry or teacher_cfg.loss != cfg.loss
        read |= flags - {"loss_options"} if has_others else flags
        for key in filter(keys.get, entry):
            value = getattr(teacher_cfg, keys[key])
            if keys[key] in checked - flags:
                raise ValueError(f"--teachers: {key} {value} of {name}: nothing reads it there, "
                                 f"where the loss is {teacher_cfg.loss}; leave it out")
            of_loss = {"loss", "loss_options", "token_weights", *loss_table()[first.loss].flags}
            if cfg.averages_teachers and key in of_loss and value != getattr(first, key):
                raise ValueError(f"--teachers: {key} {value} of {name}: --teacher_weights "
                                 f"{cfg.teacher_weights} has one loss, the first teacher's; leave "
                                 "it out")
    following = [of for of in configs.values() if of.options_of_loss.get("topk_of") == "student"]
    if following and not any(of.loss_topk for of in following):
        raise ValueError("--loss_options: topk_of student: is for --loss_topk; add it")
    losses = ", ".join(dict.fromkeys(teacher_cfg.loss for teacher_cfg in configs.values()))
    is_weighed = any(of.token_weights == "column" for of in configs.values())
    if cfg.has_weights and not is_weighed:
        raise ValueError("--data: weight_key: no teacher of this run weighs rows; add "
                         "--token_weights column, or leave it out")
    for name in sorted(checked - read):
        if is_set(cfg, name):
            raise ValueError(f"{shown(cfg, name)}: no teacher of this run reads it, nor does its "
                             f"loss, {losses}; leave it out")
    reads_more = cfg.from_scratch or any(
        source.cfg.teacher_prompt_key for source in sources_of(cfg))
    if cfg.dynamic_scale and not reads_more and cfg.student in [
            teacher_cfg.teacher for teacher_cfg in configs.values()]:
        raise ValueError("--dynamic_scale: a teacher that begins as the student has a loss of 0, "
                         "by which nothing can be divided; leave it out")
