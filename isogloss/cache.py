"""Let a teacher read all texts of a data set once, and keep what it says for many students.

    python -m isogloss.cache --teacher T --data corpus.jsonl --output caches/t
    deepspeed --module isogloss.cache --teacher T --data corpus.jsonl --output caches/t --hidden
    python -m isogloss.cache --teacher http://host:8000 --teacher_tokenizer T --data corpus.jsonl \
        --output caches/t

`distill.py --teacher_cache caches/t` then learns from it without the teacher.  Texts are divided
into shards, whose content does not depend on the ranks; each appears whole, and a command that was
ended goes on with those that are missing.  The format is in cache_files.py.
"""

import copy
import hashlib
import itertools
import shutil
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

from isogloss.command import tool

if __name__ == "__main__":  # flags come before torch is imported
    raise SystemExit(tool("cache"))

import numpy as np
import torch
import torch.distributed as dist
from huggingface_hub import HfApi

from isogloss.align import fingerprint
from isogloss.config import template_kwargs
from isogloss.data.batch import pad_id
from isogloss.data.chat import teacher_ids
from isogloss.data.checks import explained
from isogloss.data.kinds.eval_data import blaming_eval_data
from isogloss.data.mixture import sources_of
from isogloss.data.open_data import holds_chats
from isogloss.data.options.text_keys import key_of, keys_of
from isogloss.errors import DataError, EngineError
from isogloss.flags.model_names import is_address, read_model_name, without_secrets
from isogloss.inputs import load_text_encoder, open_rows
from isogloss.job import launch
from isogloss.job.files import check_shared, locked, size_and_checksum, write_atomically
from isogloss.job.rendezvous import TRAINING_TIMEOUT, set_timeout, values_of_ranks
from isogloss.job.watch import end_together, end_with_launchers, signal_handlers_restored
from isogloss.models.pretrained import load_config
from isogloss.projection_tools.tokenizers import reason_of
from isogloss.teachers import cache_files, packed_rows
from isogloss.teachers.cached import head_tensors, template_digest
from isogloss.teachers.engines.sharded import local_folder
from isogloss.teachers.engines.whole import head_gives_own_logits
from isogloss.teachers.kept_tokens import byte_order, keep_tokens, uniform_numbers
from isogloss.teachers.protocol import BLOCK, load_teacher
from isogloss.teachers.served import START_TIMEOUT
from isogloss.teachers.text_scores import ScoredLogits
from isogloss.teachers.text_server import TextServer, api_key
from isogloss.tiles import HiddenLogits

SHARD_BYTES = 256 * 2**20  # of a shard, about
MOST_TEXTS = 4096  # in a shard
TRIED_TEXTS = 1000  # from which the size is estimated, or up to twice as many
ROWS_AT_A_TIME = BLOCK // 4  # of logits, as choosing tokens takes four times their memory
GIB = 2**30


# --- texts ----------------------------------------------------------------------------------------


class StreamedRows:
    """Give the rows of a stream by their numbers; a lower one than the last begins it anew.

    Attributes:
        num: of all rows; None until they have been read once, see `survey`.
    """

    def __init__(self, dataset):
        self.dataset = dataset
        self.num = None
        self.rows = iter(dataset)
        self.next = 0

    def __len__(self):
        return self.num

    def __iter__(self):
        num = 0
        for row in self.dataset:
            num += 1
            yield row
        self.num = num

    def __getitem__(self, number):
        if number < self.next:
            self.rows = iter(self.dataset)
            self.next = 0
        skipped = number - self.next
        self.next = number + 1
        for row in itertools.islice(self.rows, skipped, None):
            return row
        raise ValueError(f"the stream had {self.num} rows, and ends before row {number} now")


@dataclass
class Texts:
    """Read the rows of one data set after the other.

    Attributes:
        parts: [(dataset, ExampleReader)].
        encoder: TextEncoder of the teacher.
        holds_chats: they are chats.
    """

    parts: list
    encoder: object
    holds_chats: bool

    def all(self):
        """Yield the Example of every row."""
        first_row = 0
        for dataset, reader in self.parts:
            number = -1
            with explained(reader.source):
                for number, row in enumerate(dataset):
                    yield reader(row, first_row + number)
            first_row += number + 1

    def example(self, number):
        for dataset, reader in self.parts:
            if number < len(dataset):
                with explained(reader.source):
                    return reader(dataset[number], number)
            number -= len(dataset)
        raise IndexError(number)

    def tokens(self, examples):
        """Return int64 arrays of the tokens of Examples, cut to the teacher's length.

        Of a chat that its template refuses there are none.
        """
        limit = self.encoder.max_length + 1  # n positions predict the tokens 1 .. n
        if not self.holds_chats:
            # an empty row has no text
            coded = self.encoder.encode([example.content or "" for example in examples])
            return [ids[:limit] for ids in coded]
        return [teacher_ids(example, self.encoder)[:limit] for example in examples]


@dataclass
class Survey:
    """Hold what one pass over all texts tells.

    Attributes:
        num_texts: of all.
        digest: of their keys, in order.
        tried: some Examples, spread evenly.
    """

    num_texts: int
    digest: str
    tried: list


def survey(texts):
    digest = hashlib.sha256()
    tried = []
    num_texts = 0
    step = 1  # between those that are tried
    for example in texts.all():
        digest.update(key_of(example).tobytes())
        if num_texts % step == 0:
            tried.append(example)
        if len(tried) == 2 * TRIED_TEXTS:
            del tried[1::2]
            step *= 2
        num_texts += 1
    return Survey(num_texts, digest.hexdigest()[:32], tried)


def open_texts(args, encoder):
    """Return the Texts of a command: of each data set, then of what a run on it holds out.

    Raises:
        ValueError: they cannot be read, or a cache cannot hold what a run makes of them.
    """
    encoders = {args.teacher_path: encoder}
    parts = []
    seen = []
    for cfg in [source.cfg for source in sources_of(args.run_config())]:
        if cfg.join_rows:
            raise ValueError(f"--data: join_rows {cfg.join_rows} of {without_secrets(cfg.data)}: a "
                             "cache holds what is said of one row; leave it out")
        parts.append(open_rows(cfg, cfg.data, cfg.split, encoders))
        held_out = config_of_held_out(args, cfg)
        if held_out and vars(held_out) not in seen:  # else of another data set, too
            seen.append(vars(held_out))
            with blaming_eval_data():
                parts.append(open_rows(held_out, held_out.data, held_out.split, encoders))
    kinds = {holds_chats(dataset, reader.text_key) for dataset, reader in parts}
    if args.streaming:
        parts = [(StreamedRows(dataset), reader) for dataset, reader in parts]
    if len(kinds) > 1:
        raise ValueError(f"--data {args.data}: texts and chats do not go together; write a cache "
                         "of each")
    return Texts(parts, encoder, kinds.pop())


def config_of_held_out(args, cfg):
    """Return the Config of the rows that a run holds out by themselves; None: there are none.

    Args:
        cfg: Config of a run on one data set.
    """
    data = cfg.eval_data or args.eval_data
    split = cfg.eval_split or args.eval_split
    if not (data or split):
        return None
    held_out = copy.copy(cfg)
    held_out.data = data or cfg.data
    held_out.split = split or "train"
    held_out.eval_data = held_out.eval_split = ""
    held_out.eval_rows = 0  # the cache has all of them
    return held_out


# --- what is written ------------------------------------------------------------------------------


def digest_of_weights(args):
    """Return a digest of the teacher's config and of all its weights, those of an adapter too."""
    if is_address(args.teacher):  # a server does not say more
        model = TextServer(args.teacher, START_TIMEOUT, api_key()).describe()
        return hashlib.sha256(f"served {model.name}".encode()).hexdigest()[:32]
    folders = [local_folder(args.teacher)]
    adapter = read_model_name("teacher", args.teacher).adapter
    if adapter:
        folders.append(Path(adapter))
    digest = hashlib.sha256()
    for folder in folders:
        weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
        for path in sorted([*weights, folder / "config.json", folder / "adapter_config.json"]):
            if path.is_file():
                digest.update(f"{path.name} {size_and_checksum(path)}".encode())
    return digest.hexdigest()[:32]


def plan(args, texts, encoder, config, dtype):
    """Return (Manifest of what is to be written, estimated positions in all)."""
    cfg = args.run_config()
    surveyed = survey(texts)
    num_texts = surveyed.num_texts
    if not num_texts:
        raise ValueError(f"--data {args.data}: no row in it")
    lengths = [max(len(ids) - 1, 0) for ids in texts.tokens(surveyed.tried)]
    positions = round(sum(lengths) / len(lengths) * num_texts)
    output = "hidden" if args.hidden else "topk"
    softened = args.temperature != 1
    size = cache_files.bytes_per_position(
        output, len(encoder.table), args.top_k, logp_bits=args.logp_bits,
        hidden_bytes=config.hidden_size * dtype.itemsize, softened=softened, sampled=args.sampled)
    bytes_per_text = max(1, size * positions // num_texts)
    texts_per_shard = min(max(1, SHARD_BYTES // bytes_per_text), MOST_TEXTS)
    data = " and ".join(filter(None, [args.data, args.eval_data]))
    manifest = cache_files.Manifest(
        teacher=without_secrets(args.teacher), weights=digest_of_weights(args),
        tokenizer=fingerprint(encoder.tokenizer), template=template_digest(encoder),
        vocab=len(encoder.table), max_length=encoder.max_length,
        dtype=cache_files.SERVED if is_address(args.teacher) else str(dtype).removeprefix("torch."),
        output=output,
        top_k=0 if args.hidden else min(args.top_k, len(encoder.table)),
        logp_bits=0 if args.hidden else args.logp_bits,
        temperature=1.0 if args.hidden else cfg.temperature, data=without_secrets(data),
        data_digest=surveyed.digest, holds_chats=texts.holds_chats, num_texts=num_texts,
        texts_per_shard=texts_per_shard, bytes_per_position=size, sampled=args.sampled,
        seed=args.seed, date=args.chat_date,
        format=cache_files.PACKED if args.logp_bits == cache_files.PACKED_BITS
        else cache_files.FORMAT)
    return manifest, positions


def check_folder(folder, manifest):
    """Return the Manifest of a cache that this command goes on with; None: there is none yet.

    Raises:
        ValueError: another cache is there, or other files.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    if not (folder / cache_files.MANIFEST).exists():
        strangers = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
        if strangers:
            raise ValueError(f"--output {folder}: holds other files, as {strangers[0]}; name a new "
                             "directory")
        return None
    other = cache_files.Manifest.read("output", folder)
    difference = other.difference(manifest)
    if difference:
        raise ValueError(f"--output {folder}: a cache of another kind is there ({difference}); "
                         "name another directory, or delete that one")
    return other


def check_space(folder, manifest, positions):
    """Print what the cache will take; refuse what does not fit."""
    total = manifest.bytes_per_position * positions
    there = sum(path.stat().st_size for path in folder.glob("shard-*"))
    free = shutil.disk_usage(folder).free
    line = (f"{manifest.bytes_per_position} bytes per token, about {positions} tokens of "
            f"{manifest.num_texts} texts: {total / GIB:.3g} GiB in {manifest.num_shards} shards, "
            f"{there / GIB:.3g} GiB of them written; {free / GIB:.3g} GiB are free")
    if total - there > free:
        raise ValueError(f"--output {folder}: {line}; choose another disk, a smaller --top_k, or "
                         "fewer texts")
    if dist.get_rank() == 0:
        print(line, flush=True)


# --- the teacher reads ----------------------------------------------------------------------------


def batches_of(lengths, batch_tokens):
    """Return lists of texts, longest first, of which each has about so many positions, padded.

    Args:
        lengths: positions of every text; those without any are in no batch.
    """
    order = sorted((n for n in range(len(lengths)) if lengths[n]), key=lambda n: -lengths[n])
    batches = []
    while order:
        size = max(1, batch_tokens // lengths[order[0]])
        batches.append(order[:size])
        del order[:size]
    return batches


class ShardWriter:
    """Write the shards of a cache.

    Attributes:
        folder, manifest: of the cache.
        texts: Texts.
        source: `ModelTeacher`, which all ranks of its replica ask with the same ids.
        is_first: this rank writes what its replica computes.
        order, head: ByteOrder of the teacher's tokens, and its head with the rows in this order,
            where some tokens are chosen.
    """

    def __init__(self, folder, manifest, texts, source, batch_tokens, is_first):
        self.folder = folder
        self.manifest = manifest
        self.texts = texts
        self.source = source
        self.batch_tokens = batch_tokens
        self.is_first = is_first
        self.positions = 0
        self.order = None
        self.head = None
        self.order_of_use = None  # of the tokens that are packed into a shard
        if manifest.output == "topk" and manifest.dtype != cache_files.SERVED:
            self.order = byte_order(texts.encoder.table).to(source.spec.device)
            self.head = source.head.columns(self.order.ids_W)

    def write(self, number):
        """Write a shard; None: take part in the other ranks' forward passes alone."""
        numbers = []
        if number is not None:
            first = number * self.manifest.texts_per_shard
            numbers = range(first, min(first + self.manifest.texts_per_shard,
                                       self.manifest.num_texts))
        examples = list(map(self.texts.example, numbers))
        keys = keys_of(examples).numpy()
        tokens = self.texts.tokens(examples) if examples else []
        lengths = [max(len(ids) - 1, 0) for ids in tokens]
        batches = batches_of(lengths, self.batch_tokens)
        self.order_of_use = None
        num_passes = len(batches)
        if self.source.takes_all_ranks:
            num_passes = max(values_of_ranks(num_passes))
        columns = [None] * len(tokens)
        for batch in range(num_passes):
            members = batches[batch] if batch < len(batches) else []
            of_members = self._read([tokens[n] for n in members], keys[members])
            for member, of_text in zip(members, of_members):
                columns[member] = of_text
        if number is not None and self.is_first:
            self._save(number, keys, tokens, lengths, columns)
        self.positions += sum(lengths)

    @torch.no_grad()
    def _read(self, arrays, keys):
        lengths = [len(array) - 1 for array in arrays]
        if self.manifest.dtype == cache_files.SERVED:
            scored = self.source.score(list(map(torch.from_numpy, arrays)))
            columns = cache_files.top_k_columns(
                scored, self.manifest.vocab, self.manifest.logp_bits)
        else:
            columns = self._run(arrays, keys, lengths)
        of_texts = [{} for _ in arrays]
        for name, tensor in columns.items():
            for of_text, piece in zip(of_texts, tensor.split(lengths)):
                of_text[name] = piece
        if "steps" in columns:
            self._pack(of_texts, columns)
        return of_texts

    def _pack(self, of_texts, columns):
        if self.order_of_use is None:  # as in the first batch of the shard
            self.order_of_use = packed_rows.order_of_use(
                columns["ids"], columns["steps"], self.manifest.vocab)
        for of_text in of_texts:
            of_text["packed"] = packed_rows.pack(
                of_text.pop("ids"), of_text.pop("steps"), self.order_of_use)

    def _run(self, arrays, keys, lengths):
        """Return the tensors of all positions of some texts, which a model reads side by side."""
        width = max([len(ids) - 1 for ids in arrays], default=1)
        ids = np.full((max(len(arrays), 1), width), pad_id(self.texts.encoder.table))
        for row, array in enumerate(arrays):
            ids[row, : len(array) - 1] = array[:-1]
        device = self.source.spec.device
        hidden = self.source.hidden(torch.from_numpy(ids).to(device))
        if not lengths:
            return {}
        rows = torch.cat([row[:length] for row, length in zip(hidden, lengths)])
        if self.manifest.output == "hidden":
            return {"hidden": rows.cpu().contiguous()}
        labels = torch.from_numpy(np.concatenate([array[1:] for array in arrays])).to(device)
        uniform = None
        if self.manifest.sampled:
            numbers = [uniform_numbers(self.manifest.seed, key, length)
                       for key, length in zip(keys, lengths)]
            uniform = torch.cat(numbers).to(device)
        logits = HiddenLogits(rows, self.head).with_buffer(min(ROWS_AT_A_TIME, len(rows)))
        return self._top_k(logits, labels, uniform)

    def _top_k(self, logits, labels, uniform):
        """Return the tensors of some positions; uniform: see `keep_tokens`."""
        blocks = []
        for block in torch.arange(len(labels), device=labels.device).split(ROWS_AT_A_TIME):
            blocks.append(keep_tokens(
                logits(block).float(), self.manifest.top_k, labels[block], self.order,
                self.manifest.temperature, None if uniform is None else uniform[block]))
        plain = drawn = None
        if self.manifest.temperature != 1:
            plain = torch.cat([block.plain_rest_N for block in blocks])
        if self.manifest.sampled:
            drawn = torch.cat([block.num_drawn_N for block in blocks])
        scored = ScoredLogits.joined([block.scored for block in blocks])
        return cache_files.top_k_columns(
            scored, self.manifest.vocab, self.manifest.logp_bits, plain, drawn,
            torch.cat([block.factor_NK for block in blocks]))

    def _save(self, number, keys, tokens, lengths, columns):
        starts = torch.tensor([0, *lengths]).cumsum(0)
        # a text without a position has one token or none, which stands for nothing
        padded = [ids if len(ids) else np.zeros(1, np.int64) for ids in tokens]
        tensors = {"keys": torch.from_numpy(keys), "starts": starts,
                   "tokens": torch.from_numpy(np.concatenate(padded).astype(np.int32))}
        present = [of_text for of_text in columns if of_text is not None]
        for name in present[0] if present else ():
            tensors[name] = torch.cat([of_text[name] for of_text in present])
        if self.order_of_use is not None:
            tensors["order"] = self.order_of_use
            sizes = [0 if of_text is None else len(of_text["packed"]) for of_text in columns]
            tensors["packed_starts"] = torch.tensor([0, *sizes]).cumsum(0)
        cache_files.write_tensors(self.folder / cache_files.shard_name(number), tensors)


def write_shards(args, folder, manifest, texts, source):
    """Write all shards that are missing; replicas take turns."""
    # the first rank decides for all, because others may see its files later
    missing = [number for number in range(manifest.num_shards)
               if not (folder / cache_files.shard_name(number)).exists()]
    missing = values_of_ranks(missing)[0]
    rank = dist.get_rank()
    degree = 1 if source.takes_all_ranks else source.degree
    replica, member = divmod(rank, degree)
    num_replicas = dist.get_world_size() // degree
    writer = ShardWriter(folder, manifest, texts, source, args.batch_tokens, member == 0)
    start = time.perf_counter()
    for first in range(0, len(missing), num_replicas):
        place = first + replica
        writer.write(missing[place] if place < len(missing) else None)
        if rank == 0:
            seconds = time.perf_counter() - start
            print(f"{min(first + num_replicas, len(missing))} of {len(missing)} shards, "
                  f"{writer.positions / seconds:.0f} tokens a second on each replica", flush=True)
    values_of_ranks(None)  # waits for all shards


# --- main -----------------------------------------------------------------------------------------


def _first_date(folder):
    """Return the date of a cache that was begun, or else today."""
    day = date.today().isoformat()
    # a folder that is no cache is refused later
    with suppress(OSError, ValueError):
        if (Path(folder) / cache_files.MANIFEST).exists():
            day = cache_files.Manifest.read("output", folder).date
    return values_of_ranks(day)[0]


def prepare(args, device):
    """Return (Texts, Manifest, TeacherSpec, positions) of a command, checked."""
    args.chat_date = args.chat_date or _first_date(args.output)
    cfg = args.run_config()
    load = partial(load_text_encoder, "teacher", args.teacher_path, args.teacher_max_length,
                   args.trust_remote_code, template_kwargs(cfg))
    encoder = cfg.teacher_kind.encoder(cfg, load, student=None, roles=None)
    config = load_config("teacher", args.teacher_path, args.trust_remote_code)
    check_shared("--output", args.output)
    texts = open_texts(args, encoder)
    spec = cfg.teacher_kind.of(cfg, encoder, device)
    spec.same_ids = True
    dtype = getattr(torch, args.teacher_dtype, None) or config.dtype or torch.float32
    manifest, positions = plan(args, texts, encoder, config.get_text_config(), dtype)
    return texts, manifest, spec, positions


def check_head(source, texts):
    """Raise a ValueError where a teacher's logits are not those of its hidden states and head."""
    ids = torch.arange(8, device=source.spec.device)[None] % len(texts.encoder.table)
    model_logits = source.logits(ids)[..., : source.head.tokens]
    if not model_logits.max() < float("inf"):
        raise ValueError(f"--teacher {source.spec.path}: its logits are not finite; check its "
                         "files, or use --teacher_dtype float32")
    hidden = HiddenLogits(source.hidden(ids).flatten(0, 1), source.head)
    if not head_gives_own_logits(hidden, model_logits):
        raise ValueError(f"--teacher {source.spec.path}: its logits are not those of its output "
                         "embeddings, which a cache is made from")


def run(args, device, source=None):
    """Write a cache; all ranks take part.

    Args:
        source: ModelTeacher that is loaded, and that others end; None: it is loaded here.
    """
    folder = Path(args.output)
    is_first = dist.get_rank() == 0
    with launch.fail_together(what=f"inputs of {folder}"):
        texts, manifest, spec, positions = prepare(args, device)
        existing = check_folder(folder, manifest)
        if existing and is_whole(folder, existing):
            if is_first:
                print(f"{folder} is complete: {manifest.num_texts} texts")
                push(args)
            return
        folder.mkdir(parents=True, exist_ok=True)
        check_space(folder, manifest, positions)
    with ExitStack() as stack:
        with launch.fail_together(what=f"folder of {folder}"):
            if is_first:
                stack.enter_context(locked("--output", folder))
                prepare_folder(folder, manifest, texts, args)
        with launch.fail_together(what=f"shards of {folder}"):
            check_left(folder, manifest)
        with launch.fail_together(what=f"teacher of {folder}"):
            if source is None:
                source = load_teacher(spec)
                stack.callback(source.close)
            if manifest.dtype != cache_files.SERVED:
                check_head(source, texts)
            if manifest.output == "hidden" and is_first:
                cache_files.write_tensors(folder / cache_files.HEAD, head_tensors(source.head))
        set_timeout(TRAINING_TIMEOUT)
        # of a stream the rows come now
        with launch.fail_alone(DataError), launch.fail_alone(EngineError, code=1):
            write_shards(args, folder, manifest, texts, source)
        with launch.fail_together(what=f"index of {folder}"):
            if is_first:
                cache_files.complete(folder, manifest)
                push(args)


def push(args):
    """Upload a cache that is complete, where the flags say so.

    Raises:
        ValueError: the hub does not take it.
    """
    if not args.push_to_hub:
        return
    api = HfApi()
    try:
        api.create_repo(args.push_to_hub, repo_type="dataset", private=args.private, exist_ok=True)
        api.upload_folder(repo_id=args.push_to_hub, repo_type="dataset", folder_path=args.output,
                          ignore_patterns=[".*"], commit_message="Cache by Isogloss")
    except Exception as error:  # the hub has a dozen types of them
        raise ValueError(f"--push_to_hub {args.push_to_hub}: {reason_of(error)}; {args.output} "
                         "holds the cache, and the same command tries again") from None
    print(f"pushed to {cache_files.HUB}{args.push_to_hub}")


def is_whole(folder, manifest):
    """Tell whether a cache is complete and all its files are there, in their sizes."""
    if cache_files.INDEX not in manifest.files:
        return False
    return all(has_size(folder / name, size) for name, (size, _) in manifest.files.items())


def has_size(path, size):
    return path.is_file() and path.stat().st_size == size


def prepare_folder(folder, manifest, texts, args):
    """Write what a reader needs beside shards; remove what an ended command left half-written.

    The manifest keeps the checksums of shards that are there, until the cache is complete.
    """
    for path in folder.glob(".*.incomplete"):
        path.unlink()
    existing = check_folder(folder, manifest)  # the one who held the lock may have changed it
    for name in manifest.shard_names if existing else ():
        size, checksum = existing.files.get(name, (None, None))
        if size is not None and has_size(folder / name, size):
            manifest.files[name] = [size, checksum]
        elif size is not None:
            (folder / name).unlink(missing_ok=True)
    manifest.write(folder)
    card = folder / cache_files.README
    if not card.exists():
        write_atomically(card, cache_files.card_of(manifest).encode(errors="replace").decode())
    teacher = folder / cache_files.TEACHER
    texts.encoder.tokenizer.save_pretrained(teacher)
    load_config("teacher", args.teacher_path, args.trust_remote_code).save_pretrained(teacher)


def check_left(folder, manifest):
    """Check the shards that are there, before a teacher is loaded; ranks divide them.

    The first rank has prepared the folder, and its manifest counts on all of them.
    """
    left = [name for name in manifest.shard_names if (folder / name).exists()]
    left, manifest.files = values_of_ranks([left, manifest.files])[0]
    cache_files.check_shards(folder, manifest, left[dist.get_rank() :: dist.get_world_size()])


def main(args):
    """Write a cache; wrong input ends every rank with one line."""
    launch.silence_libraries()
    with signal_handlers_restored(), end_with_launchers():
        launch.join_job(0)
        with end_together():
            run(args, launch.start_distributed())
    dist.destroy_process_group()
