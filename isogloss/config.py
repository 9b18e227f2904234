"""Define the flags of distill.py: their meaning, their checks, their values for each teacher."""

from dataclasses import dataclass, replace
from pathlib import Path

from isogloss.data.open_data import TXT_SAMPLES
from isogloss.data.sample import ALIGNERS
from isogloss.flags.model_names import without_secrets
from isogloss.flags.parse import LONGEST_NAME, check_range, check_types
from isogloss.flags.yaml_file import parse_json
from isogloss.models.attention import ATTENTIONS
from isogloss.objective.loss_table import (
    ALM_MODES,
    AUTO_WEIGHT,
    LOSS_TOPK_OF,
    LOSSES,
    loss_flags,
    losses_of_truncated,
)
from isogloss.teachers.cache_files import TEACHER
from isogloss.teachers.sources import engine_names
from isogloss.teachers.specs import TEACHER_OUTPUTS
from isogloss.teachers.text_server import Address, is_address


@dataclass(kw_only=True)
class Config:
    """Cross-tokenizer knowledge distillation: train a student from one or more frozen teachers.

    Batch sizes, precision, optimizer, schedule and ZeRO live in the DeepSpeed configuration; see
    ds_configs/README.md.

    Args:
        config: YAML file of flags, as in recipes/; those of the command line win.
        student: hub id or directory of the model to train. Its tokenizer needs an eos token.
        from_scratch: start from random weights, which the seed decides. Of the student's files only
            config and tokenizer are read.
        lora_r: train an adapter of low rank beside frozen weights (LoRA, by peft): its rank. 0
            trains all weights. A student that is an adapter goes on with it, or with 0 is merged.
        lora_alpha: the adapter's product counts lora_alpha / lora_r. 0: twice lora_r.
        lora_targets: names of the linear layers that get one, with commas, as q_proj,v_proj. Empty:
            all but the head.
        trust_remote_code: run the Python code that comes with a student or a teacher, which can do
            anything. false refuses models that need it.
        teacher: hub id or directory of the frozen teacher, or the address of a server that scores
            texts by it, as http://host:8000 (vLLM, SGLang). Not needed with kd_weight 0.
        teacher_tokenizer: hub id or directory of a served teacher's tokenizer and config; no
            weights are read. See docs/served.md.
        teacher_timeout: seconds for a request to a served teacher, all tries together; then the job
            ends. 1 to 1500.
        teacher_connections: requests to a served teacher that each rank has under way at a time.
        teacher_cache: directory that python -m isogloss.cache has written: what a teacher says of
            the texts, in place of a teacher. Its tokenizer is there too, so teacher is not needed;
            one that is named has to have the same. The cache decides what is kept of the teacher.
        teachers: several teachers instead of one, as a JSON list: [{"model": "A", "weight": 2,
            "loss": "gold"}, {"model": "B", "tp": 2}]. An entry may also have name (for its
            metrics), weight (times kd_weight), routes, tp, engine, dtype, max_length, offload,
            compile, and in place of the run's own value loss, teacher_output, teacher_output_topk
            and every flag of a loss. With "cache" in place of "model" it is a teacher_cache; a
            "model" that is an address takes a "tokenizer".
        teacher_weights: how several teachers share the loss. fixed: by the weights of --teachers.
            ce, entropy, max_prob: for each sample by how sure a teacher is of it (ce: nats per byte
            of its text). select: the teacher with the lowest ce alone. A teacher that does not read
            a sample has no weight there. mean_p, mean_logits: one loss, the first teacher's,
            against the mean of teachers with one tokenizer.
        teacher_alpha: with ce, entropy or max_prob the weights are softmax(teacher_alpha * score),
            so 0 gives equal ones.
        route_key: column whose value chooses the teachers of a row: those that list it in their
            "routes", as in {"model": "A", "routes": ["math"]}. Teachers without routes take the
            other rows.
        normalize_by_vocab: divide the weight of each of several teachers by log W / log of the
            smallest W, W being its vocabulary.
        data: hub id (org/name or org/name:config), file, directory (of files, or of save_to_disk),
            glob, or the address of a file (https://, hf://). Files end in .txt, .jsonl, .json,
            .parquet, .arrow or .csv. All but .parquet and .arrow may be compressed, as in .jsonl.gz
            (.gz, .bz2, .xz, .zst).
        text_key: column that holds the text, or chats, which are lists of {"role", "content"} (or
            of ShareGPT's {"from", "value"}).
        completion_key: column of what follows the prompts of prompt_key, in place of text_key; both
            hold texts, or both chats. The prompt is read, only the completion is learned.
        tools_key: column of the tools that the assistant of a chat may call, if there is one, which
            every chat template is shown.
        template_kwargs: what every chat template is told besides, as a JSON object:
            {"enable_thinking": false}.
        txt_samples: what a sample of a .txt file is: line, paragraph (between empty lines) or file.
        join_rows: characters that a sample of text has at least: neighboring rows are joined, whole
            and with a newline between them, until they have as many. Attention and loss reach
            across. 0: every row is a sample. See docs/data.md.
        train_on: what to learn of a chat. assistant: what the assistant says, and to end its turn.
            all: the whole rendering.
        split: split of a hub data set, of a directory whose files or folders are named train, test
            and so on, or of a save_to_disk of several; or a part of it, as in train[:10%] (not of a
            stream).
        streaming: read the data as a stream instead of preparing it on disk first.
        eval_rows: rows held out of training, the first ones of the data. 0 holds out none. With
            eval_data or eval_split, how many of those rows are used, 0 being all.
        eval_data: held-out rows of their own, named as data is. Empty: those of data.
        eval_split: split of eval_data, or of data where that is empty. Empty: train, of eval_data.
        steps: optimizer steps in all, 1 or more.
        pack: put several texts of a micro-batch into one row where they fit into max_length and
            teacher_max_length. Attention stays inside each text, and the loss is the same.
        max_length: student positions per sample, 2 or more. Longer texts are cut, for student and
            teacher at the same byte.
        teacher_max_length: teacher positions per sample. 0 means the teacher's context.
        aligner: how the tokens of student and teacher are matched. bytes: by byte positions in the
            same text. dp: by dynamic programming over token strings, for texts that student and
            teacher render differently.
        loss: distillation loss, for any two tokenizers. piece_kl is forward_kl; it and the other
            divergences (reverse_kl, generalized_jsd, skew_forward_kl, skew_reverse_kl, adaptive_kl,
            total_variation) compare what docs/piece_kl.md translates. Beside them: event_kl,
            projection_kl, gold, h_kl, uld, alm. See docs/losses.md.
        kd_weight: weight of the distillation loss, >= 0. 0 loads no teacher.
        ce_weight: weight of the student's next-token cross-entropy, >= 0. 0 computes none in
            training.
        dynamic_scale: multiply each teacher's distillation loss by cross-entropy / distillation
            loss of the step before, so that kd_weight says how much it counts beside the text.
            Needs ce_weight.
        on_policy: share of the samples that the student writes itself, 0 to 1, each in place of the
            text or of the assistant's last message. The teachers correct what it wrote by the same
            loss; there is no cross-entropy on it. See docs/on_policy.md.
        prompt_key: column of the prompts of what the student writes, text or chats, and of those of
            completion_key. Empty: the first prompt_tokens of a text, or a chat before the
            assistant's last message.
        prompt_tokens: student tokens of a text that are the prompt (of a short one its half).
        rollout_tokens: tokens that the student writes at most, 1 or more.
        rollouts_per_prompt: how often the student writes from the same prompt; so many neighboring
            samples share one.
        rollout_every: steps that use the same rollouts, 1 or more. After the first of them, each
            term counts as much more as the student would come there more often by now.
        ratio: of probabilities, by which such terms count. clamp: at most max_ratio. mask: 0
            outside of 1 / max_ratio to max_ratio.
        max_ratio: see ratio, 1 or more.
        rollout_temperature: of what the student writes, 0.001 to 1000.
        rollout_top_p: it writes the most likely tokens with this probability together, above 0 to
            1.
        rollout_batch: texts that a rank writes side by side.
        rollout_replica: with ZeRO-3, write with a whole copy of the student on every rank. false
            gathers layer by layer for every token, which is slow and takes no memory.
        rollout_command: command of a process that writes instead of this job, one on every node, as
            "/env/bin/python -m isogloss.vllm_writer". Empty: the student itself writes.
        rollout_timeout: seconds for an answer of that process; then the job ends. 1 to 800. For
            loading it has an hour.
        max_logp_gap: mean difference, in nats, between a token's log-probability when it is written
            and when it is learned with the same weights; a larger one ends the job.
        rollout_log: rollouts of a step that rollouts.jsonl keeps.
        rollout_eval: held-out rows from which the student writes at every evaluation.
        tiled: compute logits and loss tile by tile from hidden states. false computes the logits of
            a whole micro-batch.
        loss_memory_mib: MiB for the logits of a tile and what the loss makes of them. auto (or 0):
            at most a sixteenth of the GPU's memory that is free before the first step, 512 to 8192;
            512 on a CPU.
        head_gradient: how often autograd gets the gradient of the output layer: window (once per
            step, a float32 sum of its micro-batches until then), or micro_batch. auto takes window,
            but on a GPU not where that sum, 4 bytes a weight, takes more than a twentieth of its
            memory.
        temperature: softens what the distillation loss compares of both models, 0.001 to 1000.
        projection: file of projection_tools.build for projection_kl, gold and h_kl. Empty: it is
            built in flight and cached.
        learn_projection: train the weights of projection_kl's projection too. They are written to
            output_dir/projection.pt after the last step.
        projection_learning_rate: of a learned projection. 0 means the student's.
        projection_topk: teacher columns that projection_kl keeps, the most likely ones of the
            step's batch.
        projection_columns: teacher columns that projection_kl may keep: all, or reachable (those to
            which some student token maps, over which the teacher is normalized then).
            eval/unreachable_mass is what the teacher says of the others.
        uncommon_topk: tokens outside the common ones that gold and h_kl compare by rank.
        matched_weight: of the JSD on common tokens in hybrid_uld, 0 to 1; the sorted rest has what
            is missing to 1. -1 takes the fraction of the teacher's vocabulary that is common.
        reverse_kl: compute KL(student || teacher) in projection_kl, gold and h_kl.
        alm_mode: binary_kl, binary_kl_reverse, binary_ce, temperature_limit, squared or absolute.
        jsd_beta: of generalized_jsd, from 0 (forward KL) to 1 (reverse KL).
        skew_lambda: of skew_forward_kl and skew_reverse_kl, 0 or more and below 1.
        akl_alpha: of adaptive_kl, 0 to 1.
        loss_topk: tokens (or cells, see docs/piece_kl.md) that divergences compare, the most likely
            ones of loss_topk_of, with one bucket for the rest. 0 compares all.
        loss_topk_of: whose most likely tokens (or cells) loss_topk keeps: teacher or student.
            student is usual for reverse_kl on texts that the student wrote.
        teacher_dtype: auto (as in the checkpoint), float32, bfloat16 or float16.
        teacher_tp: neighboring ranks of a node that share one teacher. It divides the ranks of a
            node.
        teacher_ranks: the last so many ranks of every node hold the teachers and do nothing else.
            They run on the next step while the others train. 0: the student's ranks hold them.
        teacher_engine: replicated (a whole copy per rank), tensor_parallel (DeepSpeed's inference
            engine), transformers (its own tensor parallelism, over all ranks with teachers), zero3
            (partitioned over these, for any architecture), or auto: the first of them that can
            shard the model over teacher_tp ranks.
        teacher_offload: keep the teacher's weights in the host's memory but for its forward passes.
        teacher_compile: compile the teacher's forward pass by torch.compile; for whole copies of a
            teacher. Its rows are padded to a few lengths, because each takes up to minutes to
            compile.
        teacher_output: what is kept of the teacher until a loss reads it. hidden: final hidden
            states. logits. topk: the most likely tokens and the text's own; all others are one
            event. Not for event_kl, gold, h_kl and uld. A served teacher gives no more than topk.
        teacher_output_topk: tokens of teacher_output topk.
        attention: how student and teachers attend: sdpa, flash_attention_2 (needs a GPU, half
            precision and the package flash-attn), eager, or auto: sdpa where a model has it. With
            sequence_parallel the student has an attention of its own.
        sequence_parallel: neighboring ranks that hold one shard of every sequence each (Ulysses).
            It divides the student's attention heads.
        pipeline_parallel: neighboring ranks that hold some of the student's layers each, as stages
            of a pipeline. Needs ZeRO stage 1 and as many gradient_accumulation_steps. See
            docs/parallelism.md.
        activation_checkpointing: recompute the student's activations in backward instead of
            keeping them.
        activation_offload: keep what activation_checkpointing stores in the host's memory until
            backward.
        mlp_tiles: pieces in which a student's MLP takes its positions one after the other,
            recomputed in backward; for long sequences. 1 takes all at once.
        ds_config: DeepSpeed JSON; see ds_configs/README.md.
        learning_rate: fills "lr": "auto" of the ds_config. 0: the ds_config states it.
        seed: of the data order, of dropout, and of the weights with from_scratch.
        output_dir: directory for metrics.jsonl, run.json and checkpoints; all nodes share it.
        eval_every: steps between held-out evaluations. 0 evaluates before the first and after the
            last step only.
        eval_samples: held-out rows, the first ones, that the student continues at every held-out
            evaluation by its most likely tokens, behind prompt_tokens of them, for rollout_tokens
            at most. samples.jsonl keeps them, and the first is printed. 0: none.
        eval_tasks: tasks that the student is judged by, with commas: mmlu, mmlu_continuation,
            lambada, gsm8k, humaneval_plus, mbpp_plus, or lm_eval:NAME for one of
            lm-evaluation-harness. See docs/tasks.md.
        eval_task_every: steps between two of these evaluations. 0 evaluates before the first and
            after the last step only.
        eval_task_data: directory of the tasks' files. Empty: they come from the hub.
        eval_task_shots: worked examples in front of each question of mmlu and gsm8k.
        eval_task_limit: items of each task (of mmlu: of each subject), the first ones. 0: all.
        eval_task_batch: items that a rank reads or writes side by side.
        eval_task_samples: answers to each item that is written, whose mean counts, of code pass@k.
        eval_task_temperature: of these answers, 0 (the most likely token) to 1000.
        allow_unsafe_code: run the programs that the student writes for humaneval_plus and mbpp_plus
            without a sandbox, where there is none; they can do all that you can.
        save_every: steps between checkpoints. 0 saves after the last step and on SIGTERM, SIGINT
            and SIGHUP only.
        keep_checkpoints: how many of them to keep, 1 or more.
        max_bad_steps: how many steps in a row may have a loss or a gradient that is not finite, 1
            or more; then the job ends. Such steps change no weight.
        resume: auto (newest whole checkpoint of output_dir, if any), never, or the path of a
            checkpoint.
        extend_schedule: resume also where the schedule has another length than before, as by an
            "auto" total_num_steps with other --steps. The learning rate then jumps. false refuses.
        export: directory for the trained student in Hugging Face format; an earlier export there is
            replaced, anything else is not. Empty: none.
        merge: export the whole model with lora_r's adapter in its weights, not the adapter alone.
        log_comms: time every collective of the engine and of sequence-parallel attention for 100
            steps, which slows them down, and print a summary.
        wandb_project: log to this Weights & Biases project. Empty: do not.
        num_workers: processes per rank that tokenize and align. 0: the training process does it.
        local_rank: set by the launcher.
    """

    config: str = ""
    student: str = ""
    from_scratch: bool = False
    lora_r: int = 0
    lora_alpha: float = 0.0
    lora_targets: str = ""
    trust_remote_code: bool = False
    teacher: str = ""
    teacher_tokenizer: str = ""
    teacher_timeout: float = 600.0
    teacher_connections: int = 8
    teacher_cache: str = ""
    teachers: str = ""
    teacher_weights: str = "fixed"
    teacher_alpha: float = 1.0
    route_key: str = ""
    normalize_by_vocab: bool = False
    data: str = ""
    text_key: str = "text"
    completion_key: str = ""
    tools_key: str = "tools"
    template_kwargs: str = ""
    txt_samples: str = "line"
    join_rows: int = 0
    train_on: str = "assistant"
    split: str = "train"
    streaming: bool = False
    eval_rows: int = 0
    eval_data: str = ""
    eval_split: str = ""
    steps: int = 1000
    pack: bool = False
    max_length: int = 512
    teacher_max_length: int = 0
    aligner: str = "bytes"
    loss: str = "piece_kl"
    kd_weight: float = 1.0
    ce_weight: float = 1.0
    dynamic_scale: bool = False
    on_policy: float = 0.0
    prompt_key: str = ""
    prompt_tokens: int = 32
    rollout_tokens: int = 128
    rollouts_per_prompt: int = 1
    rollout_every: int = 1
    ratio: str = "clamp"
    max_ratio: float = 5.0
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    rollout_batch: int = 64
    rollout_replica: bool = True
    rollout_command: str = ""
    rollout_timeout: float = 600.0
    max_logp_gap: float = 0.1
    rollout_log: int = 1
    rollout_eval: int = 32
    tiled: bool = True
    loss_memory_mib: int = 512
    head_gradient: str = "auto"
    temperature: float = 1.0
    projection: str = ""
    learn_projection: bool = False
    projection_learning_rate: float = 0.0
    projection_topk: int = 8192
    projection_columns: str = "all"
    uncommon_topk: int = 8192
    matched_weight: float = AUTO_WEIGHT
    reverse_kl: bool = False
    alm_mode: str = "binary_kl"
    jsd_beta: float = 0.5
    skew_lambda: float = 0.1
    akl_alpha: float = 0.5
    loss_topk: int = 0
    loss_topk_of: str = "teacher"
    teacher_dtype: str = "auto"
    teacher_tp: int = 1
    teacher_ranks: int = 0
    teacher_engine: str = "auto"
    teacher_offload: bool = False
    teacher_compile: bool = False
    teacher_output: str = "hidden"
    teacher_output_topk: int = 256
    attention: str = "auto"
    sequence_parallel: int = 1
    pipeline_parallel: int = 1
    activation_checkpointing: bool = False
    activation_offload: bool = False
    mlp_tiles: int = 1
    ds_config: str = "ds_configs/zero2.json"
    learning_rate: float = 0.0
    seed: int = 0
    output_dir: str = "runs/default"
    eval_every: int = 0
    eval_samples: int = 0
    eval_tasks: str = ""
    eval_task_every: int = 0
    eval_task_data: str = ""
    eval_task_shots: int = 0
    eval_task_limit: int = 0
    eval_task_batch: int = 16
    eval_task_samples: int = 1
    eval_task_temperature: float = 0.0
    allow_unsafe_code: bool = False
    save_every: int = 0
    keep_checkpoints: int = 2
    max_bad_steps: int = 3
    resume: str = "auto"
    extend_schedule: bool = False
    export: str = ""
    merge: bool = False
    log_comms: bool = False
    wandb_project: str = ""
    num_workers: int = 1
    local_rank: int = -1

    def __post_init__(self):
        if self.loss_memory_mib == "auto":
            self.loss_memory_mib = 0
        check_types(self)
        self._check_values()
        self._check_data()
        self._check_loss()
        self._check_lora()
        self._check_pipeline()
        self._check_teachers()
        self._check_presence()

    @property
    def ranks_per_reader(self):
        """Number of neighboring ranks that read the same samples."""
        return self.sequence_parallel * self.pipeline_parallel

    def _check_values(self):
        """Check each flag by itself."""
        check_range(self, LOWEST, HIGHEST)
        for name, choices in choices_of_flags().items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"--{name} {getattr(self, name)}: expected one of {', '.join(choices)}")
        for name in ("jsd_beta", "skew_lambda", "akl_alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name)}: expected 0 to 1")
        if self.matched_weight != AUTO_WEIGHT and not 0 <= self.matched_weight <= 1:
            raise ValueError(f"--matched_weight {self.matched_weight}: expected 0 to 1, or "
                             f"{AUTO_WEIGHT:g} for the common fraction of the teacher's vocabulary")
        if self.skew_lambda == 1:  # the mixture would be the teacher itself
            raise ValueError("--skew_lambda 1.0: compares the teacher with itself; expected less "
                             "than 1")
        if self.resume not in ("auto", "never") and not Path(self.resume).is_dir():
            raise ValueError(f"--resume={self.resume}: expected auto, never or the directory of a "
                             "checkpoint")

    @property
    def holds_out(self):
        """Whether rows are held out for evaluations."""
        return bool(self.eval_rows or self.eval_data or self.eval_split)

    def _check_data(self):
        template_kwargs(self)
        if self.eval_samples and not self.holds_out:
            raise ValueError(f"--eval_samples {self.eval_samples}: they continue held-out rows, "
                             "and there are none; add --eval_rows")
        if self.completion_key and not self.prompt_key:
            raise ValueError(f"--completion_key {self.completion_key}: what follows a prompt; name "
                             "the column of prompts with --prompt_key")
        if self.completion_key and self.text_key != "text":
            raise ValueError(f"--completion_key {self.completion_key} with --text_key "
                             f"{self.text_key}: both name what is learned; drop one")
        if self.join_rows:
            unfit = {"on_policy": "which writes from the beginning of one row",
                     "prompt_key": "whose rows are one prompt each",
                     "route_key": "which chooses teachers for one row",
                     "teacher_cache": "which holds what is said of one row"}
            for name, reason in unfit.items():
                if getattr(self, name):
                    raise ValueError(f"--join_rows {self.join_rows} with --{name} "
                                     f"{getattr(self, name)}, {reason}; leave out one of them")
        if self.streaming and (self.eval_data or self.eval_split) and not self.eval_rows:
            raise ValueError("--eval_data or --eval_split with --streaming: a stream may have no "
                             "end; say by --eval_rows how many rows of it are used")

    def _check_loss(self):
        """Check flags of the loss that contradict one another."""
        if self.kd_weight == self.ce_weight == 0:
            raise ValueError("--kd_weight 0 and --ce_weight 0: nothing would be learned; raise one "
                             "of them")
        if self.dynamic_scale and not (self.kd_weight and self.ce_weight):
            raise ValueError("--dynamic_scale: needs both losses, because it scales distillation "
                             "by cross-entropy; raise --kd_weight and --ce_weight above 0, or "
                             "leave it out")
        if self.learn_projection and (self.loss != "projection_kl" or not self.kd_weight):
            raise ValueError(f"--learn_projection: only --loss projection_kl trains one, this is "
                             f"{self.loss} with --kd_weight {self.kd_weight}; leave it out or "
                             "change the loss")
        check_truncated(self, "--teacher_output topk",
                        self.teacher_output == "topk" and not self.teacher_cache)
        self._check_on_policy()
        self._check_tasks()
        if self.teacher_compile and self.teacher_cache:
            raise ValueError("--teacher_compile: a --teacher_cache has no forward pass; leave it "
                             "out")
        if self.teacher_compile and self.teacher_offload:
            raise ValueError("--teacher_compile: what is compiled reads its weights where they "
                             "were, and --teacher_offload moves them; leave out one of them")
        if self.activation_offload and not self.activation_checkpointing:
            raise ValueError("--activation_offload: moves what --activation_checkpointing keeps; "
                             "add --activation_checkpointing")

    def _check_on_policy(self):
        if self.on_policy > 1:
            raise ValueError(f"--on_policy {self.on_policy}: expected a share of the samples, 0 to "
                             "1")
        if not 0 < self.rollout_top_p <= 1:
            raise ValueError(f"--rollout_top_p {self.rollout_top_p}: expected more than 0, at most "
                             "1")
        if not self.on_policy:
            if self.prompt_key and not self.completion_key:
                raise ValueError("--prompt_key: names prompts of what the student writes, or of "
                                 "completions; add --on_policy or --completion_key")
            return
        if not self.kd_weight:
            raise ValueError(f"--on_policy {self.on_policy} with --kd_weight 0: what the student "
                             "writes is learned from teachers alone; raise --kd_weight")
        if self.on_policy == 1 and self.dynamic_scale:
            raise ValueError("--dynamic_scale with --on_policy 1: there is no cross-entropy to "
                             "scale by; leave it out")
        if self.rollout_tokens >= self.max_length:
            raise ValueError(f"--rollout_tokens {self.rollout_tokens}: leaves no room for a prompt "
                             f"within --max_length {self.max_length}")

    def _check_tasks(self):
        """Check what needs no file; `tasks.load_tasks` checks the rest."""
        if not self.eval_tasks:
            for name in ("eval_task_every", "eval_task_data"):
                if getattr(self, name):
                    raise ValueError(f"--{name} {getattr(self, name)}: is for --eval_tasks, which "
                                     "names none; add it")
        if self.eval_task_samples > 1 and not self.eval_task_temperature:
            raise ValueError(f"--eval_task_samples {self.eval_task_samples}: all samples would be "
                             "the same answer; raise --eval_task_temperature above 0, as to 0.8")

    def _check_lora(self):
        """Check what does not go together with an adapter, and what is for one alone."""
        if not self.lora_r:
            for name in ("lora_alpha", "lora_targets", "merge"):
                if getattr(self, name):
                    raise ValueError(f"--{name} {getattr(self, name)}: is for the adapter of "
                                     "--lora_r, which is 0; add it, or leave this out")
            return
        if self.merge and not self.export:
            raise ValueError("--merge: says what --export writes; add --export")
        others = {
            "from_scratch": "whose frozen weights would be random",
            "pipeline_parallel": "which cuts a model without adapters; use ZeRO-3",
            "rollout_command": "which takes plain weights; let the student write itself",
        }
        for name, reason in others.items():
            if getattr(self, name) != getattr(Config, name):
                raise ValueError(f"--lora_r {self.lora_r} with --{name} {getattr(self, name)}, "
                                 f"{reason}; leave out one of them")

    def _check_pipeline(self):
        """Check what does not go together with a pipeline."""
        if self.pipeline_parallel == 1:
            return
        others = {
            "sequence_parallel": self.sequence_parallel > 1,
            "on_policy": self.on_policy,
        }
        for name, is_set in others.items():
            if is_set:
                raise ValueError(f"--pipeline_parallel {self.pipeline_parallel} with --{name} "
                                 f"{getattr(self, name)}: these do not go together; leave out "
                                 "one of them")

    @property
    def teacher_path(self):
        """Hub id or directory of the teacher's tokenizer and config, those of a cache included."""
        if self.teacher_cache:
            return self.teacher or str(Path(self.teacher_cache) / TEACHER)
        return self.teacher_tokenizer or self.teacher

    @property
    def is_served(self):
        """Whether the teacher is the address of a server."""
        return is_address(self.teacher)

    @property
    def loads_teacher(self):
        """Whether the teacher's weights are read by this job."""
        return not (self.teacher_cache or self.is_served)

    def _check_served(self):
        """Check what does not go together with a server, which gives its likely tokens alone."""
        if not self.is_served:
            if self.teacher_tokenizer and not self.teachers:
                raise ValueError(f"--teacher_tokenizer {self.teacher_tokenizer}: is for the "
                                 "address of a server as --teacher; leave it out")
            return
        Address.of(self.teacher)
        where = f"--teacher {self.teacher}"
        if not self.teacher_tokenizer:
            raise ValueError(f"{where}: a server is asked with token ids; name the directory or "
                             "hub id of its tokenizer and config with --teacher_tokenizer")
        unfit = {"teacher_cache": "which takes its place", "teacher_ranks": "which hold a model"}
        for name in ("teacher_engine", "teacher_tp", "teacher_dtype", "teacher_offload"):
            unfit[name] = "which is for a model that this job loads"
        for name, reason in unfit.items():
            if getattr(self, name) != getattr(Config, name):
                raise ValueError(f"{where} with --{name} {getattr(self, name)}, {reason}; leave "
                                 "out one of them")
        gives = f"{where} gives the {self.teacher_output_topk} most likely tokens alone"
        if self.teacher_output == "logits":
            raise ValueError(f"{gives}; leave out --teacher_output logits")
        check_truncated(self, gives, True)
        if self.teacher_weights == "entropy":
            raise ValueError(f"{gives}, so its entropy is not known; use another --teacher_weights "
                             "than entropy, such as ce")
        if self.temperature != 1 and LOSSES[self.loss].truncated == "softened":
            raise ValueError(f"{gives}, and of all others their mass at temperature 1; leave out "
                             f"--temperature {self.temperature}")

    def _check_cache(self):
        """Check what does not go together with a cache."""
        if not self.teacher_cache:
            return
        if self.on_policy:
            raise ValueError(f"--teacher_cache with --on_policy {self.on_policy}: a cache holds "
                             "nothing of what the student writes; use --teacher")
        if self.teacher_engine != "auto":
            raise ValueError(f"--teacher_cache with --teacher_engine {self.teacher_engine}: a "
                             "cache loads no teacher; leave out one of them")

    def _check_teachers(self):
        self._check_cache()
        self._check_served()
        if self.teachers:
            configs_by_teacher(self)
        elif self.route_key:
            raise ValueError("--route_key: chooses among teachers; list them with --teachers")

    def _check_presence(self):
        """Check that what every run needs is given."""
        needed = ["student", "data"]
        if self.kd_weight and not (self.teachers or self.teacher_cache):
            needed.append("teacher")
        for name in needed:
            if not getattr(self, name):
                raise ValueError(f"--{name} is missing: give a hub id or a local path")


def check_truncated(cfg, what, is_truncated):
    """Raise a ValueError where a loss needs all tokens of a teacher of which some are kept.

    Args:
        cfg: Config of one teacher.
        what: truncates, for the message.
    """
    # with --teachers each entry is checked
    if cfg.kd_weight and not cfg.teachers and is_truncated and not LOSSES[cfg.loss].truncated:
        raise ValueError(f"{what} with --loss {cfg.loss}: this loss reads all tokens of the "
                         "teacher; keep hidden states, or use one of "
                         f"{', '.join(losses_of_truncated())}")


# Below it logits / temperature leave float32.
LOWEST_TEMPERATURE = 1e-3
# The smallest value of a flag.
LOWEST = dict(
    lora_r=0, lora_alpha=0, eval_samples=0,
    join_rows=0, eval_rows=0, steps=1, max_length=2, teacher_max_length=0, kd_weight=0, ce_weight=0,
    projection_topk=1, uncommon_topk=1, loss_topk=0, learning_rate=0, seed=0, eval_every=0,
    save_every=0, keep_checkpoints=1, num_workers=0, loss_memory_mib=0, projection_learning_rate=0,
    teacher_timeout=1, teacher_connections=1,
    teacher_tp=1, teacher_ranks=0, sequence_parallel=1, pipeline_parallel=1, mlp_tiles=1,
    teacher_output_topk=1, teacher_alpha=0, max_bad_steps=1, temperature=LOWEST_TEMPERATURE,
    on_policy=0,
    prompt_tokens=1, rollout_tokens=1, rollouts_per_prompt=1, rollout_every=1, max_ratio=1,
    rollout_temperature=LOWEST_TEMPERATURE, rollout_batch=1, rollout_log=0, rollout_eval=0,
    max_logp_gap=0, rollout_timeout=1, eval_task_every=0, eval_task_shots=0, eval_task_limit=0,
    eval_task_batch=1, eval_task_samples=1, eval_task_temperature=0)

# The largest value of a flag: beyond it random generators or float32 fail, or no machine suffices.
HIGHEST = dict(
    seed=2**32 - 2**16, steps=10**12, temperature=1e3, kd_weight=1e6, ce_weight=1e6,
    # in 30 minutes the other ranks give up; a writer is asked twice
    teacher_timeout=1500, rollout_timeout=800, teacher_connections=1024,
    teacher_alpha=1e6, learning_rate=1e3, projection_learning_rate=1e3, num_workers=512,
    lora_r=2**20, lora_alpha=1e6,
    join_rows=2**30, max_length=2**31, teacher_max_length=2**31, mlp_tiles=2**20,
    rollout_temperature=1e3,
    rollout_every=2**20, rollouts_per_prompt=2**20, max_ratio=1e6, eval_task_temperature=1e3,
    projection_topk=2**20, uncommon_topk=2**20, loss_topk=2**20, teacher_output_topk=2**20,
    loss_memory_mib=2**20, eval_rows=10**9, eval_every=10**12, save_every=10**12,
    eval_task_every=10**12, max_bad_steps=10**12, keep_checkpoints=2**20, eval_samples=2**20,
    prompt_tokens=2**20, rollout_tokens=2**20, rollout_batch=2**16, rollout_log=2**20,
    rollout_eval=2**20, max_logp_gap=1e6, eval_task_shots=1024, eval_task_limit=10**9,
    eval_task_batch=2**16, eval_task_samples=2**16, teacher_tp=2**16, teacher_ranks=2**16,
    sequence_parallel=2**16, pipeline_parallel=2**16)

# "fixed" adds losses up, the middle four weigh teachers by sample, the last two average them
TEACHER_WEIGHTS = "fixed", "ce", "entropy", "max_prob", "select", "mean_p", "mean_logits"

RATIOS = "clamp", "mask"

# Flags that may change when a run resumes; all others decide what is learned.  Of `steps` this is
# true where the schedule does not follow from it, see `run_identity.expected_identity`.
FREE_ON_RESUME = {
    "config", "steps", "output_dir", "eval_every", "save_every", "keep_checkpoints",
    "max_bad_steps", "merge", "resume", "export", "log_comms", "wandb_project", "num_workers",
    "local_rank", "ds_config", "eval_samples",
    "sequence_parallel", "pipeline_parallel", "teacher_tp", "teacher_ranks", "teacher_engine",
    "teacher_offload", "teacher_compile", "teacher_timeout", "teacher_connections",
    "activation_checkpointing", "activation_offload", "mlp_tiles", "pack",
    "tiled", "attention", "head_gradient",
    "loss_memory_mib", "extend_schedule", "rollout_batch", "rollout_replica", "rollout_log",
    "rollout_eval", "max_logp_gap", "rollout_command", "rollout_timeout",
    "eval_tasks", "eval_task_every", "eval_task_data", "eval_task_shots",
    "eval_task_limit", "eval_task_batch", "eval_task_samples", "eval_task_temperature",
    "allow_unsafe_code"}

# The order of --help.
GROUPS = {
    "model": ["student", "from_scratch", "lora_r", "lora_alpha", "lora_targets",
              "trust_remote_code", "attention", "sequence_parallel",
              "pipeline_parallel", "activation_checkpointing", "activation_offload", "mlp_tiles"],
    "data": ["data", "text_key", "completion_key", "tools_key", "template_kwargs", "txt_samples",
             "join_rows",
             "split", "streaming", "train_on", "max_length", "teacher_max_length", "pack",
             "aligner", "eval_rows", "eval_data", "eval_split", "num_workers"],
    "loss": ["loss", "kd_weight", "ce_weight", "dynamic_scale", *loss_flags(), "learn_projection",
             "projection_learning_rate", "tiled", "loss_memory_mib", "head_gradient"],
    "on-policy": ["on_policy", "prompt_key", "prompt_tokens", "rollout_tokens",
                  "rollouts_per_prompt", "rollout_every", "ratio", "max_ratio",
                  "rollout_temperature", "rollout_top_p", "rollout_batch", "rollout_replica",
                  "rollout_command", "rollout_timeout", "max_logp_gap", "rollout_log",
                  "rollout_eval"],
    "teachers": ["teacher", "teacher_tokenizer", "teacher_timeout", "teacher_connections",
                 "teacher_cache", "teachers", "teacher_weights", "teacher_alpha",
                 "route_key", "normalize_by_vocab", "teacher_output", "teacher_output_topk"],
    "teacher parallelism": ["teacher_engine", "teacher_tp", "teacher_ranks", "teacher_dtype",
                            "teacher_offload", "teacher_compile"],
    "evaluation tasks": ["eval_tasks", "eval_task_every", "eval_task_data", "eval_task_shots",
                         "eval_task_limit", "eval_task_batch", "eval_task_samples",
                         "eval_task_temperature", "allow_unsafe_code"],
    "run": ["config", "ds_config", "learning_rate", "steps", "seed", "output_dir", "eval_every",
            "eval_samples", "save_every", "keep_checkpoints", "max_bad_steps", "resume",
            "extend_schedule", "export", "merge", "log_comms", "wandb_project", "local_rank"],
}


def choices_of_flags():
    """Return {flag: its possible values}; a new loss or teacher source is among them at once."""
    return {
        "loss": tuple(LOSSES),
        "aligner": ALIGNERS,
        "attention": ATTENTIONS,
        "projection_columns": ("all", "reachable"),
        "head_gradient": ("auto", "window", "micro_batch"),
        "train_on": ("assistant", "all"),
        "txt_samples": tuple(TXT_SAMPLES),
        "alm_mode": ALM_MODES,
        "ratio": RATIOS,
        "loss_topk_of": LOSS_TOPK_OF,
        "teacher_dtype": ("auto", "float32", "bfloat16", "float16"),
        "teacher_engine": tuple(engine_names()),
        "teacher_output": TEACHER_OUTPUTS,
        "teacher_weights": TEACHER_WEIGHTS,
    }


# What `apply_chat_template` is told by the code itself.
TEMPLATE_ARGUMENTS = {"conversation", "tools", "tokenize", "add_generation_prompt",
                      "continue_final_message", "return_dict", "return_tensors"}


def template_kwargs(cfg):
    """Return --template_kwargs as a dict.

    Raises:
        ValueError: it is no JSON object, or names what is not the user's to say.
    """
    if not cfg.template_kwargs:
        return {}
    example = 'expected a JSON object like {"enable_thinking": false}'
    told = parse_json("--template_kwargs", cfg.template_kwargs, f"; {example}")
    if not isinstance(told, dict):
        raise ValueError(f"--template_kwargs {cfg.template_kwargs}: {example}")
    for name in sorted(TEMPLATE_ARGUMENTS & set(told)):
        raise ValueError(f"--template_kwargs: {name} is not for templates to be told; leave it out")
    return told


# --- several teachers -----------------------------------------------------------------------------


def teacher_keys():
    """Return {key of an entry of --teachers: the flag that it stands for}."""
    keys = {"model": "teacher"}
    # short names for flags that start with teacher_
    for key in ("cache", "tokenizer", "tp", "engine", "dtype", "max_length", "offload",
                "compile"):
        keys[key] = f"teacher_{key}"
    for flag in ("loss", *loss_flags(), "teacher_output", "teacher_output_topk"):
        keys[flag] = flag
    return keys


def teacher_entries(cfg):
    """Return the entries of --teachers.

    Raises:
        ValueError: it is no list of JSON objects.
    """
    example = '; expected a list such as [{"model": "A"}, {"model": "B"}]'
    # a string, because fire would read a list its own way
    entries = parse_json("--teachers", cfg.teachers, example)
    is_list = isinstance(entries, list) and entries
    if not is_list or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("--teachers: expected a list of objects, one for each teacher, such as "
                         '[{"model": "A"}, {"model": "B"}]')
    return entries


def teacher_name(entry):
    """Return what metrics call the teacher of an entry of --teachers."""
    path = without_secrets(str(entry.get("model") or entry.get("cache", "")))
    return entry.get("name", Path(path).name)


def routes_by_teacher(cfg):
    """Return {name: values of route_key, or None for all that no other teacher names}."""
    if not (cfg.teachers and cfg.route_key):
        return {}
    return {teacher_name(entry): entry.get("routes") for entry in teacher_entries(cfg)}


def configs_by_teacher(cfg):
    """Return {name: Config of a run with this teacher alone}.

    Raises:
        ValueError: --teachers is no such list, or an entry is wrong.
    """
    if not cfg.teachers:
        return {cfg.teacher or Path(cfg.teacher_cache).name: cfg}
    entries = teacher_entries(cfg)
    if cfg.teacher or cfg.teacher_cache or cfg.teacher_tokenizer or cfg.learn_projection:
        raise ValueError("--teachers: cannot be combined with --teacher, --teacher_cache, "
                         "--teacher_tokenizer or --learn_projection; drop one")
    if cfg.route_key and cfg.teacher_weights != "fixed":
        raise ValueError(f"--route_key with --teacher_weights {cfg.teacher_weights}: both choose "
                         "among teachers; drop one")
    keys = teacher_keys()
    configs = {}
    for entry in entries:
        name = teacher_name(entry)
        _check_entry(cfg, entry, name, keys)
        if name in configs:
            raise ValueError(f"--teachers: two teachers are named {name}; give each a name of its "
                             "own")
        flags = {keys[key]: value for key, value in entry.items() if key in keys}
        # replace() runs the checks of Config again, with this teacher's values
        weight = cfg.kd_weight * entry.get("weight", 1.0)
        configs[name] = replace(cfg, teachers="", route_key="", kd_weight=weight, **flags)
    return configs


def _check_entry(cfg, entry, name, keys):
    """Check one entry of --teachers, but for the values of flags, which Config checks."""
    for key in entry:
        if key not in ("name", "weight", "routes", *keys):
            raise ValueError(f"--teachers: unknown teacher key {key!r}; its keys are name, weight, "
                             f"routes, {', '.join(keys)}")
    if not ("model" in entry or "cache" in entry):
        raise ValueError("--teachers: an entry names no model; expected "
                         '{"model": "hub id or directory"}, or {"cache": "directory"}')
    if not isinstance(name, str) or not name.strip() or len(name) > LONGEST_NAME:
        raise ValueError(f"--teachers: name {name!r:.40}: expected a text of at most "
                         f"{LONGEST_NAME} characters")
    routes = entry.get("routes")
    if routes is not None and not (isinstance(routes, list) and cfg.route_key):
        raise ValueError(f"--teachers: routes {routes!r} of {name}: expected a list of values of a "
                         "column that --route_key names")
    weight = entry.get("weight", 1.0)
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or weight <= 0:
        raise ValueError(f"--teachers: weight {weight!r} of {name}: expected a number above 0")
