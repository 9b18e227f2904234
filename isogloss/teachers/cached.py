"""Read from a cache what a teacher has said of the texts of a run; no teacher is loaded.

Models with causal attention say of the beginning of a text what they say of it in the whole text.
So a cache holds texts as long as the teacher reads them, and a run reads as much of each as its cut
leaves, whatever the student, its cut, the packing and the ranks.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from isogloss.align import fingerprint
from isogloss.data.options.text_keys import key_of
from isogloss.errors import DataError
from isogloss.flags.parse import DATE
from isogloss.job.several.together import DataErrorOfRank, together
from isogloss.teachers.cache_files import (
    FLAG,
    HEAD,
    TEACHER,
    CacheReader,
    Manifest,
    check_contents,
    local_cache,
    open_cache,
    reading_cache,
    scored_logits,
)
from isogloss.teachers.kept_tokens import estimated, without_draws
from isogloss.teachers.protocol import TeacherSource, TeacherSpec, refuse
from isogloss.teachers.text_scores import (
    ScoredLogits,
    batch_texts,
    check_truncated,
    reading_of_rest,
)
from isogloss.tiles import Head, HiddenLogits

# --- before the first step ------------------------------------------------------------------------


def template_digest(encoder):
    """Return a digest of how a TextEncoder renders chats."""
    template = getattr(encoder.tokenizer, "chat_template", None) or ""
    if not isinstance(template, str):
        template = json.dumps(template, sort_keys=True)
    told = {name: value for name, value in encoder.template_kwargs.items()
            if name != DATE}  # which the Manifest holds
    told = json.dumps(told, sort_keys=True)
    return hashlib.sha256(f"{template}\n{told}".encode()).hexdigest()[:32]


def check_cache(folder, encoder, max_length):
    """Return the Manifest of a cache that fits a run; all ranks take part in reading it in full.

    Args:
        folder: of the cache.
        encoder: TextEncoder of the teacher, as the run reads it.
        max_length: what --teacher_max_length says; 0: as much as the cache holds.
    Raises:
        ValueError: what arrived, what was expected.
    """
    manifest = open_cache(folder)
    rank = dist.get_rank()
    check_contents(folder, manifest, sorted(manifest.files)[rank :: dist.get_world_size()])
    where = f"--{FLAG} {folder}"
    tokenizer = fingerprint(encoder.tokenizer)
    if tokenizer != manifest.tokenizer:
        raise ValueError(f"{where}: it was written with the tokenizer of {manifest.teacher} "
                         f"({manifest.tokenizer}), but --teacher has another one ({tokenizer}); "
                         "leave out --teacher, or write a cache with this one")
    if manifest.holds_chats and template_digest(encoder) != manifest.template:
        raise ValueError(f"{where}: its chats were rendered by another chat template, or with "
                         "other --template_kwargs; use the same, or write the cache anew")
    asks = manifest.holds_chats and DATE in str(encoder.tokenizer.chat_template)
    if asks and manifest.date not in ("", encoder.template_kwargs.get(DATE)):
        raise ValueError(f"{where}: its chats were rendered on {manifest.date}; use --chat_date "
                         f"{manifest.date}, or write the cache anew")
    if max_length > manifest.max_length:
        raise ValueError(f"--teacher_max_length {max_length}: {folder} holds {manifest.max_length} "
                         "positions of a text; use no more, or write the cache anew")
    return manifest


def check_rest(folder, manifest, temperature, reads_draws):
    """Raise a ValueError where a cache has the rest of its rows at other temperatures than asked.

    Args:
        temperature: at which the loss reads it.
    """
    if manifest.sampled and reads_draws and temperature != manifest.temperature:
        raise ValueError(f"--temperature {temperature}: {folder} holds tokens that were drawn at "
                         f"{manifest.temperature}, as --sampled says; use that, or write the cache "
                         "anew with this --temperature")
    if manifest.output == "topk" and temperature not in (1.0, manifest.temperature):
        raise ValueError(f"--temperature {temperature}: {folder} holds the mass of all tokens that "
                         f"it does not keep at {manifest.temperature} and 1; use one of them, or "
                         "write the cache anew with this --temperature")


def check_texts(folder, data):
    """Check that a cache holds all texts of a run that can be counted; ranks divide the rows.

    Args:
        folder: of the cache.
        data: [(dataset, ExampleReader, number of the first row)]; streams are left out, whose texts
            are looked up when they come.
    Raises:
        ValueError: the first text that it lacks.
    """
    reader = CacheReader(folder)
    for dataset, read, first_row in data:
        if not hasattr(dataset, "__len__"):
            continue
        for row in range(dist.get_rank(), len(dataset), dist.get_world_size()):
            example = read(dataset[row], first_row + row)
            if reader.find(key_of(example)) is None:
                raise ValueError(lacks(folder, reader.manifest, f"row {first_row + row} of "
                                       f"{read.source}"))


def lacks(folder, manifest, what):
    return (f"--{FLAG} {folder}: lacks {what}; it was written of {manifest.num_texts} texts of "
            f"{manifest.data}, so this is other data or another version of it; use that data, or "
            "write a cache of this one")


# --- the kind -------------------------------------------------------------------------------------


@dataclass
class CacheSpec(TeacherSpec):
    """Describe a cache, and how the loss reads it.

    Attributes:
        rest_temperature: by which the loss divides truncated logits.
        reads_draws: the loss takes tokens that were drawn for all others.
        folder: of the cache.
    """

    rest_temperature: float = 1.0
    reads_draws: bool = False
    folder: str = ""

    takes_tokenizer = False
    reads_keys = True

    @classmethod
    def check(cls, cfg):
        if cfg.teacher_compile == "true":
            raise ValueError("--teacher_compile: a --teacher_cache has no forward pass; leave it "
                             "out")
        refuse(cfg, f"--{FLAG} {cfg.teacher_cache}", {
            "on_policy": "and it holds nothing of what the student writes",
            "teacher_engine": "and it loads no teacher"})

    @classmethod
    def tokenizer_path(cls, cfg):
        return cfg.teacher or str(Path(local_cache(cfg.teacher_cache)) / TEACHER)

    @classmethod
    def encoder(cls, cfg, load, student, roles):
        """Return the TextEncoder of the teacher, which reads no more than the cache holds.

        Raises:
            ValueError: the cache is damaged, or does not fit.
        """
        folder = local_cache(cfg.teacher_cache)
        manifest = open_cache(folder)
        # before its tokenizer is read there
        check_contents(folder, manifest, [name for name in manifest.files
                                          if name.startswith(f"{TEACHER}/")])
        encoder, _ = load()
        manifest = check_cache(folder, encoder, cfg.teacher_max_length)
        if manifest.output == "topk":
            check_truncated(cfg, f"--{FLAG} {folder}, which keeps {manifest.top_k} tokens,")
        check_rest(folder, manifest, *reading_of_rest(cfg, student, encoder))
        return replace(encoder, max_length=cfg.teacher_max_length or manifest.max_length)

    @classmethod
    def check_data(cls, cfg, parts):
        check_texts(local_cache(cfg.teacher_cache), parts)

    @classmethod
    def of(cls, cfg, encoder, device, student=None):
        output = Manifest.read(FLAG, local_cache(cfg.teacher_cache)).output
        reading = reading_of_rest(cfg, student or encoder, encoder)
        return cls(cls.tokenizer_path(cfg), len(encoder.table), device, output, *reading,
                   local_cache(cfg.teacher_cache))

    def load(self):
        return CachedTeacher(self)

    def silent(self):
        return SilentReader()


# --- the source -----------------------------------------------------------------------------------


class CachedTeacher(TeacherSource):
    """Give what a cache holds of a batch."""

    def __init__(self, spec):
        self.spec = spec
        self.folder = Path(spec.folder)
        self.reader = CacheReader(self.folder)
        self.manifest = self.reader.manifest
        self.head = load_head(self.folder, spec) if spec.output == "hidden" else None
        self.is_plain = spec.rest_temperature != self.manifest.temperature

    def wait(self, batches):
        """Look up the texts of a step on all ranks, which raise the DataErrorOfRank of any."""
        together(partial(self._find_all, batches), DataErrorOfRank)

    def _find_all(self, batches):
        for batch in batches:
            keys = batch.keys.cpu().numpy()
            for text in batch_texts(batch):
                self._find(keys[text.sample], text.tokens)

    def targets(self, batch):
        """Return the logits of a TeacherBatch; positions that belong to no text hold zeros.

        Raises:
            DataError: see `_find`.
        """
        keys = batch.keys.cpu().numpy()
        positions = [torch.zeros(0, dtype=torch.long)]
        columns = []
        labels = []
        for text in batch_texts(batch):
            place = self._find(keys[text.sample], text.tokens)
            positions.append(text.positions)
            columns.append(self.reader.columns(place, len(text.positions)))
            labels.append(text.tokens[1:])
        positions = torch.cat(positions)
        num_positions = batch.labels.numel()
        if self.spec.output == "hidden":
            width = self.head.weight_VH.shape[1]
            dtype = columns[0]["hidden"].dtype if columns else self.head.weight_VH.dtype
            hidden = torch.zeros(num_positions, width, dtype=dtype)
            if columns:
                hidden[positions] = torch.cat([of_text["hidden"] for of_text in columns])
            return HiddenLogits(hidden.to(self.spec.device), self.head)
        # a rank may be without a text
        blocks = [ScoredLogits.empty(self.manifest.top_k + 1, self.spec.vocab)]
        for of_text, labels_N in zip(columns, labels):
            blocks.append(self._scored(of_text, labels_N))
        scored = ScoredLogits.joined(blocks).spread(positions, num_positions)
        return scored.to(self.spec.device)

    def _scored(self, columns, labels_N):
        """Return the ScoredLogits of some positions, as the loss reads them."""
        with reading_cache(self.folder):
            scored = scored_logits(columns, labels_N, self.spec.vocab, self.is_plain)
        if not self.manifest.sampled:
            return scored
        if self.spec.reads_draws:
            return estimated(scored, columns["drawn"], self.manifest.temperature)
        return without_draws(scored, columns["drawn"])

    def _find(self, key, tokens):
        """Return the place in the index of a text, of which the run reads some tokens.

        Raises:
            DataError: the cache lacks it, or holds less of it, or other tokens.
        """
        place = self.reader.find(key)
        if place is None:
            raise DataError(lacks(self.folder, self.manifest, "a text of the data"))
        stored = self.reader.tokens(place)
        if len(stored) < len(tokens):
            raise DataError(f"--{FLAG} {self.folder}: holds {len(stored) - 1} positions of a text "
                            f"of which this run reads {len(tokens) - 1}; it was cut at "
                            f"{self.manifest.max_length} positions")
        if not torch.equal(tokens.int(), stored[: len(tokens)]):
            raise DataError(f"--{FLAG} {self.folder}: a text has other tokens there than this run "
                            "reads; its tokenizer or its chat template is another one")
        return place


class SilentReader(TeacherSource):
    """Hear, on a rank that computes no loss, whether the others have found their texts."""

    def wait(self, batches):
        together(bool, DataErrorOfRank)

    def targets(self, batch):
        """Read nothing."""


def load_head(folder, spec):
    """Return the Head of a cache of hidden states, on the spec's device."""
    with reading_cache(folder / HEAD):
        tensors = load_file(folder / HEAD)
        if len(tensors["weight"]) < spec.vocab:
            raise ValueError(f"a head of {len(tensors['weight'])} tokens, expected {spec.vocab}")
    scale, softcap = tensors["numbers"].tolist()
    bias = tensors.get("bias")
    return Head(
        tensors["weight"].to(spec.device), None if bias is None else bias.to(spec.device),
        scale=scale, softcap=softcap, vocab=spec.vocab)


def head_tensors(head):
    """Return what `load_head` reads of a Head."""
    tensors = {"weight": head.weight_VH.detach()[: head.tokens].cpu().contiguous(),
               "numbers": torch.tensor([head.scale, head.softcap], dtype=torch.float64)}
    if head.bias_V is not None:
        tensors["bias"] = head.bias_V.detach()[: head.tokens].cpu().contiguous()
    return tensors
