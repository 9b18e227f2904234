"""Let a teacher answer prompts, and keep its answers as rows that distill.py reads.

    python -m isogloss.write --teacher T --data chats.jsonl --text_key messages \
        --output written.jsonl --keep length
    deepspeed --module isogloss.write --teacher T --data corpus.jsonl --output written.jsonl \
        --samples 4 --teacher_cache caches/written

A server, --teacher http://host:8000 with --teacher_tokenizer T, or another process (--writer) may
write in the teacher's place.

The answers to some rows are a part, a file that appears whole.  Parts do not depend on the ranks,
and a command that was ended goes on with those that are missing.  In the end they are joined to one
file, whose first line says who wrote it, and how (`file_rows.HEADER`).

Tests: tests/test_write.py.
"""

import copy
import hashlib
import json
import math
import os
import shutil
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from isogloss.command import tool

if __name__ == "__main__":  # flags come before torch is imported
    raise SystemExit(tool("write"))

import torch.distributed as dist

import isogloss
from isogloss import cache
from isogloss.align import fingerprint
from isogloss.config import template_kwargs
from isogloss.data.ends import stop_ids
from isogloss.data.file_rows import HEADER
from isogloss.data.mixture import sources_of
from isogloss.data.rollouts import (
    ANSWERS,
    Prompter,
    SkippedPrompt,
    build_prompter,
    check_prompts,
    completed,
)
from isogloss.doors import door
from isogloss.errors import DataError, EngineError
from isogloss.flags.model_names import is_address, without_secrets
from isogloss.inputs import load_text_encoder, open_rows
from isogloss.job import launch
from isogloss.job.files import check_shared, locked, scratch_of, sync, write_atomically
from isogloss.job.rendezvous import TRAINING_TIMEOUT, set_timeout, values_of_ranks
from isogloss.job.watch import end_together, end_with_launchers, signal_handlers_restored
from isogloss.projection_tools.tokenizers import reason_of
from isogloss.rollout import Prompt, needs_equal_lengths, write
from isogloss.teachers.cached import template_digest
from isogloss.teachers.protocol import load_teacher
from isogloss.teachers.text_server import LARGEST, TextServer, api_key
from isogloss.writing.node_writer import NodeWriter
from isogloss.writing.served_writer import Answer, ServedWriter

PART_ANSWERS = 64  # in a part, or in one of MOST_PARTS more
MOST_PARTS = 4096
UNCOMPARED = "version", "teacher", "data"  # where a command goes on: digests tell of the last two
COUNTS = "rows", "cut", "dropped", "tokens", "no_prompt"


# --- prompts --------------------------------------------------------------------------------------


class PromptRow(NamedTuple):
    """Hold a row, its ExampleReader, its Example, and a RolloutPrompt for each answer or none."""

    row: dict
    reader: object
    example: object
    prompts: list

    def answered(self, prompt, answer):
        """Return the row of an Answer: what distill.py reads, `written`, and all other columns."""
        read = {self.reader.text_key, self.reader.prompt_key, self.reader.tools_key}
        columns = {name: value for name, value in self.row.items()
                   if name not in read and value is not None}
        behind = [answer.message]
        about = {}
        if answer.rollout:  # in front of which an environment may have said something
            prompt, behind = answer.rollout.prompt, answer.rollout.messages
            about = {name: answer.rollout.episode[name] for name in ("reward", "turns")}
        if prompt.messages is None:
            columns |= {"prompt": prompt.text, "completion": answer.message["content"]}
        else:
            columns["messages"] = [*map(unlearned, prompt.messages), *behind]
            if prompt.tools:
                columns["tools"] = prompt.tools
        number, sample = prompt.key
        return columns | {"written": {"row": number, "sample": sample, "ended": answer.ended,
                                      "tokens": answer.num_tokens, **about}}


def unlearned(message):
    """Return a message from which no student learns."""
    return message | ({"weight": 0} if message["role"] == "assistant" else {})


@dataclass
class Prompts:
    """Make the prompts of the rows of one data set after the other.

    Attributes:
        parts: [(dataset, ExampleReader)].
        prompter: Prompter of the teacher.
        samples: answers to each prompt.
    """

    parts: list
    prompter: Prompter
    samples: int

    def __len__(self):
        return sum(len(dataset) for dataset, _ in self.parts)

    @property
    def rows_per_part(self):
        return max(-(-PART_ANSWERS // self.samples), -(-len(self) // MOST_PARTS))

    @property
    def num_parts(self):
        return -(-len(self) // self.rows_per_part)

    @property
    def is_chat(self):
        return any(reader.has_chats for _, reader in self.parts)

    def digest(self):
        """Return a digest of all rows, in order."""
        digest = hashlib.sha256()
        for dataset, _ in self.parts:
            for row in dataset:
                digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:32]

    def of_part(self, part):
        """Return the PromptRows of a part."""
        first = part * self.rows_per_part
        return list(map(self._row, range(first, min(first + self.rows_per_part, len(self)))))

    def _row(self, number):
        place = number
        for dataset, reader in self.parts:
            if place < len(dataset):
                row = dataset[place]
                example = reader(row, place)
                return PromptRow(row, reader, example, self._of_example(example, number))
            place -= len(dataset)
        raise IndexError(number)

    def _of_example(self, example, number):
        try:
            prompt = self.prompter.prompt(example, (number, 0))
            if example.teacher_prompt:  # which the teacher reads, and its answer stands without
                hinted = example._replace(prompt=prompt.taught, teacher_prompt=())
                prompt = replace(self.prompter.prompt(hinted, (number, 0)),
                                 messages=prompt.messages, reads_taught=True)
        except SkippedPrompt:
            return []
        return [replace(prompt, key=(number, sample)) for sample in range(self.samples)]


def open_prompts(args, encoder):
    cfg = args.run_config()
    parts = []
    for its in [source.cfg for source in sources_of(cfg)]:
        dataset, reader = open_rows(its, its.data, its.split, {cfg.student: encoder}, ("*",))
        try:
            check_prompts(its, dataset, reader, encoder, 1)
        except ValueError as error:
            line = str(error).replace("--on_policy", f"--data {its.data}")
            raise ValueError(line) from None
        parts.append((dataset, reader))
    if len({reader.has_chats for _, reader in parts}) > 1:
        raise ValueError(f"--data {args.data}: texts and chats do not go together; write a file of "
                         "each")
    return Prompts(parts, build_prompter(cfg, encoder, 1), args.samples)


# --- who writes -----------------------------------------------------------------------------------


class ModelWriter:
    """Let a model on this rank write, or the process of this node by its weights.

    Attributes:
        source: ModelTeacher, whole on this rank.
        node: NodeWriter, or None; all ranks take part in what it writes.
        episodes: Episodes of --environment, or None; likewise.
    """

    def __init__(self, args, encoder, source, device):
        self.args = args
        self.encoder = encoder
        self.source = source
        self.model = source.runner.model
        self.node = self.episodes = None
        cfg = args.run_config()
        if cfg.environment:
            self.episodes = door("environment").load_episodes(cfg, encoder)
        if cfg.writer_command:
            engine = SimpleNamespace(module=SimpleNamespace(model=self.model))
            self.node = NodeWriter(cfg, engine, encoder, device)
            return
        try:
            self.equal_lengths = needs_equal_lengths(self.model, len(encoder.table))
        except ValueError as error:
            raise ValueError(f"--teacher {args.teacher}: {error}; let --writer vllm, or a server, "
                             "write") from None

    def write(self, prompts):
        """Return the Answer to each RolloutPrompt; None: its environment has failed."""
        starts = []
        for prompt in prompts:
            key = self.args.seed, ANSWERS, *prompt.key
            starts.append(Prompt(prompt.ids, key, prompt.max_new_tokens))
        if self.episodes:
            first = self._completions(self.episodes.begin(prompts, starts))
            more = self.node.more if self.node else self._completions
            return [rollout and Answer(None, rollout.ended, int(rollout.is_written.sum()), rollout)
                    for rollout in self.episodes.run(first, more)]
        answers = []
        for prompt, completion in zip(prompts, self._completions(starts)):
            rollout = completed(prompt, completion, self.encoder)
            answers.append(Answer(message_of(rollout, self.encoder), rollout.ended,
                                  len(rollout.ids)))
        return answers

    def _completions(self, starts):
        if self.node:
            self.node.begin(starts)
            return self.node.finish()
        args = self.args
        return write(self.model, starts, stop_ids(self.encoder), len(self.encoder.table),
                     temperature=args.rollout_temperature, top_p=args.rollout_top_p,
                     batch_size=args.rollout_batch, pad_id=max(self.encoder.table.pad, 0),
                     equal_lengths=self.equal_lengths)

    def close(self):
        for process in filter(None, (self.node, self.episodes)):
            process.close()
        self.source.close()


def message_of(rollout, encoder):
    """Return what the assistant has written as its message, with the calls that it makes."""
    prompt = rollout.prompt
    if prompt.messages is None:
        return {"role": "assistant", "content": rollout.text}
    message, *_ = door("chats").message_of(rollout.ids, rollout.text, encoder, prompt.tools,
                                           prompt.text)
    return message


# --- which answers stay ---------------------------------------------------------------------------


def load_function(name):
    """Return the function that module:function names; modules of this folder come first.

    Raises:
        ValueError: there is none.
    """
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(import_module(module), attribute)
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"--keep {name}: {reason_of(error)}") from None
    if not callable(function):
        raise ValueError(f"--keep {name}: is no function")
    return function


class Keeper:
    """Choose the answers that stay, as --keep says.

    Attributes:
        names: of its filters, in their order.
    """

    def __init__(self, keep):
        self.names = list(filter(None, map(str.strip, keep.split(","))))
        self.functions = {name: load_function(name) for name in self.names if ":" in name}

    def kept(self, row, answers):
        """Return those of the rows of one prompt that stay; row: what the prompt is of."""
        for name in self.names:
            if name == "length":
                answers = [each for each in answers if each["written"]["ended"]]
            elif name == "reward":
                answers = [each for each in answers if (each["written"]["reward"] or 0) > 0]
            else:
                answers = self._chosen(name, row, answers)
        return answers

    def _chosen(self, name, row, answers):
        chosen = []
        best = None
        for each in answers:
            score = self._score(name, row, each)
            if score is True:
                chosen.append(each)
            elif score is not False:
                each["written"]["score"] = score
                if best is None or score > best["written"]["score"]:
                    best = each
        return chosen + ([best] if best else [])

    def _score(self, name, row, answer):
        """Return true, false or a finite number, what a function says of an answer."""
        messages = answer.get("messages")
        if messages is None:
            messages = [{"role": "user", "content": answer["prompt"]},
                        {"role": "assistant", "content": answer["completion"]}]
        where = f"--keep {name}: of row {answer['written']['row']}"
        try:
            score = self.functions[name](copy.deepcopy(messages), copy.deepcopy(row))
            score = getattr(score, "item", lambda: score)()  # of numpy and torch
            is_score = isinstance(score, bool | int | float) and math.isfinite(score)
        except Exception as error:  # whatever the user's code raises
            raise DataError(f"{where} it raises {type(error).__name__}: {error}; repair it, and "
                            "the same command goes on") from None
        if not is_score:
            raise DataError(f"{where} it says {score!r:.40}; expected true, false or a number")
        return score


# --- what is written ------------------------------------------------------------------------------


def part_text(rows, answers, keeper):
    """Return the lines of a part: its COUNTS, then its rows.

    Args:
        rows: PromptRows; answers: to all their prompts, in order.
    """
    answers = iter(answers)
    counts = dict.fromkeys(COUNTS, 0)
    lines = []
    for row in rows:
        counts["no_prompt"] += not row.prompts
        pairs = [(prompt, next(answers)) for prompt in row.prompts]
        kept = keeper.kept(row.row, [row.answered(*pair) for pair in pairs if pair[1]])
        counts["dropped"] += len(pairs) - len(kept)
        for each in kept:
            counts["rows"] += 1
            counts["cut"] += not each["written"]["ended"]
            counts["tokens"] += each["written"]["tokens"]
            lines.append(json.dumps(each, ensure_ascii=False, default=str))
    return "\n".join([json.dumps(counts), *lines, ""])


def header_of(args, prompts, encoder):
    """Return what the first line says of a command, apart from COUNTS."""
    weights = cache.digest_of_weights(args) if dist.get_rank() == 0 else None
    settings = {name: getattr(args, name) for name in (
        "samples", "keep", "prompt_tokens", "rollout_tokens", "rollout_temperature",
        "rollout_top_p", "seed", "template_kwargs", "teacher_dtype", "teacher_max_length",
        "writer", "environment", "text_key", "prompt_key", "teacher_prompt_key", "split")}
    return {"version": isogloss.__version__, "teacher": without_secrets(args.teacher),
            "weights": values_of_ranks(weights)[0], "tokenizer": fingerprint(encoder.tokenizer),
            "template": template_digest(encoder), "data": without_secrets(args.data),
            "prompts": len(prompts), "data_digest": prompts.digest(),
            "rows_per_part": prompts.rows_per_part, **settings, "date": args.chat_date}


def header_in(path):
    """Return the header of a file of rows, or of one that is begun; None: there is no file.

    Raises:
        ValueError: another file has this name.
    """
    for each in (path, folder_of(path) / "header.json"):
        try:
            if not each.exists():
                continue
            with open(each, encoding="utf-8") as file:
                return json.loads(file.readline())[HEADER]
        except (OSError, ValueError, KeyError, TypeError):
            raise ValueError(f"--output {each}: is another file than this command writes; name a "
                             "new one") from None
    return None


def folder_of(path):
    """Return the folder of the parts of a file."""
    return path.with_name(f"{path.name}.parts")


def check_header(path, header):
    """Raise a ValueError where another command has written a file, or begun it."""
    there = header_in(path)
    for name, value in header.items() if there else ():
        if name not in UNCOMPARED and there.get(name) != value:
            raise ValueError(f"--output {path}: what is there was written otherwise ({name} "
                             f"{there.get(name)} there, {value} here); name another file, or "
                             f"delete it and {folder_of(path).name}")


@contextmanager
def naming(path):
    """Turn an error of writing a file, as on a full disk, into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"--output {path}: cannot be written ({reason_of(error)}); once this is "
                        "repaired the same command goes on") from None


def write_parts(folder, prompts, writer, keeper):
    """Write all parts that are missing; ranks take turns."""
    # the first rank decides for all, because others may see its files later
    missing = [part for part in range(prompts.num_parts) if not part_file(folder, part).exists()]
    missing = values_of_ranks(missing)[0]
    world = dist.get_world_size()
    start = time.perf_counter()
    num_tokens = 0
    for first in range(0, len(missing), world):
        place = first + dist.get_rank()
        of_rank = missing[place : place + 1]
        rows = prompts.of_part(of_rank[0]) if of_rank else []
        answers = writer.write(list(chain.from_iterable(row.prompts for row in rows)))
        for part in of_rank:
            file = part_file(folder, part)
            with naming(file):
                write_atomically(file, part_text(rows, answers, keeper))
        num_tokens += sum(answer.num_tokens for answer in filter(None, answers))
        if dist.get_rank() == 0:
            rate = num_tokens / (time.perf_counter() - start)
            print(f"{min(first + world, len(missing))} of {len(missing)} parts, {rate:.0f} tokens "
                  "a second on each rank", flush=True)
    values_of_ranks(None)  # waits for all parts


def part_file(folder, part):
    return folder / f"part-{part:05d}.jsonl"


def join_parts(path, header, num_parts):
    """Join all parts to one file, and remove them.

    Raises:
        DataError: it cannot be written; or nothing would be in it.
    """
    folder = folder_of(path)
    counts = dict.fromkeys(COUNTS, 0)
    parts = [part_file(folder, part) for part in range(num_parts)]
    for part in parts:
        with open(part, encoding="utf-8") as file:
            of_part = json.loads(file.readline())
        counts = {name: counts[name] + of_part[name] for name in COUNTS}
    said = ", ".join(f"{value} {name}" for name, value in counts.items())
    if counts["cut"]:
        said += " (a student learns to end where answers are cut; --keep length drops these)"
    if not counts["rows"]:
        raise DataError(f"--keep {header['keep']}: no answer stays ({said}); see {folder}, and "
                        "choose another filter and --output")
    scratch = scratch_of(path)
    with naming(path), ExitStack() as stack:
        stack.callback(scratch.unlink, missing_ok=True)
        with open(scratch, "wb") as joined:
            joined.write(json.dumps({HEADER: header | counts}).encode() + b"\n")
            for part in parts:
                with open(part, "rb") as file:
                    file.readline()
                    shutil.copyfileobj(file, joined)
        sync(scratch)
        os.replace(scratch, path)
        sync(path.parent)
    return said


# --- main -----------------------------------------------------------------------------------------


def load_encoder(args, cfg):
    """Return the TextEncoder of the teacher, checked as `TeacherSpec.encoder` does."""
    load = partial(load_text_encoder, "teacher", args.teacher_path, args.teacher_max_length,
                   args.trust_remote_code, template_kwargs(cfg))
    if args.teacher_cache or not is_address(args.teacher):
        return cfg.teacher_kind.encoder(cfg, load, student=None, roles=None)
    encoder, _ = load()  # the server need not know log-probabilities of prompts
    context = TextServer(args.teacher, args.teacher_timeout, api_key()).describe().context
    return replace(encoder, max_length=min(encoder.max_length, (context or LARGEST) - 1))


def prepare(args, device):
    """Return (Prompts, TextEncoder, TeacherSpec, header) of a command, checked."""
    path = Path(args.output)
    if path.suffix != ".jsonl":  # by which --data knows what it holds
        raise ValueError(f"--output {path}: expected a name that ends in .jsonl")
    there = header_in(path) or {}
    day = args.chat_date or there.get("date") or date.today().isoformat()
    args.chat_date = values_of_ranks(day)[0]
    cfg = args.run_config()
    encoder = load_encoder(args, cfg)
    check_shared("--output", path.parent)
    prompts = open_prompts(args, encoder)
    header = header_of(args, prompts, encoder)
    check_header(path, header)
    return prompts, encoder, cfg.teacher_kind.of(cfg, encoder, device), header


def load_writer(args, encoder, spec, device):
    """Return the ModelWriter or ServedWriter of a command."""
    if is_address(args.teacher):
        return ServedWriter(args, encoder, ANSWERS)
    spec.engine = "replicated"
    return ModelWriter(args, encoder, load_teacher(spec), device)


def run(args, device):
    """Write a file of rows, and a cache; all ranks take part."""
    path = Path(args.output)
    folder = folder_of(path)
    is_first = dist.get_rank() == 0
    source = None
    with launch.fail_together(what=f"inputs of {path}"):
        keeper = Keeper(args.keep)
        prompts, encoder, spec, header = prepare(args, device)
        is_whole = values_of_ranks(path.exists())[0]
    with ExitStack() as stack:
        if is_whole and is_first:
            print(f"{path} is complete", flush=True)
        if not is_whole:
            with launch.fail_together(what=f"folder of {path}"):
                if is_first:
                    with naming(path):
                        folder.mkdir(parents=True, exist_ok=True)
                        stack.enter_context(locked("--output", folder))
                        write_atomically(folder / "header.json", json.dumps({HEADER: header}))
            with launch.fail_together(what=f"teacher of {path}"):
                writer = load_writer(args, encoder, spec, device)
                stack.callback(writer.close)
            set_timeout(TRAINING_TIMEOUT)
            with launch.fail_alone(DataError), launch.fail_alone(EngineError, code=1):
                write_parts(folder, prompts, writer, keeper)
            with launch.fail_together(what=f"rows of {path}"):
                if is_first:
                    print(f"{path}: {join_parts(path, header, prompts.num_parts)}", flush=True)
            source = getattr(writer, "source", None)
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
        if args.teacher_cache:
            cache.run(args.cache_args(prompts.is_chat), device, source)


def main(args):
    """Write a file of rows; wrong input ends every rank with one line."""
    launch.silence_libraries()
    with signal_handlers_restored(), end_with_launchers():
        launch.join_job(0)
        with end_together():
            run(args, launch.start_distributed())
    dist.destroy_process_group()
