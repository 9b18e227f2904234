"""Convert a teacher's belief into the student's vocabulary by brute force: what translation nears.

    python benchmarks/exact_conversion.py STUDENT TEACHER TEXTS [--rows 8] [--threshold 1e-4]

The teacher is asked about every branch that matters: all tokens in which the bytes so far may end,
and all that may follow until the student's next token is certain.  A branch is a token that the
text does not have, so it costs further forward passes, a few to a few hundred for each position.
That is why a training run translates instead.  After arXiv:2410.09303 (exact probabilities of
bytes) and arXiv:2512.14954.

What it neglects: of branches with less mass than the threshold only a random part is followed, with
the threshold as mass (unbiased; a belief then has noise in its tail); where the bytes so far may
have been cut otherwise, only the last two teacher tokens are reconsidered.

The script prints, per student position, KL(translated target || exact belief) in nats: the mean and
the worst, apart for roots (with their choices) and positions inside of a teacher token; and what
both models of the text cost in bits per byte, which tells whether the conversion is right.

Shapes: T teacher rows, V student vocabulary, W teacher vocabulary, N new branches, K keys,
E tokens.
"""

import json
import math
import sys
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from align import TokenTable
from isogloss.batch import Collator, PairOptions, as_example
from isogloss.sample import TextEncoder, encode_text
from projection_tools import Pair
from projection_tools.cells import cached_translation
from projection_tools.flags import tool
from spelling import all_bytes, encode_bytes, mid_text_backend
from translation import Tables, list_nodes, translated

MAX_DEPTH = 8  # teacher tokens that are followed until the student's token is certain


class Branches:
    """Hold a causal model's rows on a text and behind branches of it.

    Branch number t < T is the text itself up to token t; others are added by `add`.
    """

    def __init__(self, model, ids, vocab):
        """Read the text.

        Args:
            model: Hugging Face model with a cache and masks of four dimensions.
            ids: (T,) int64.
            vocab: W, tokens of the tokenizer.
        """
        self.model = model
        self.vocab = vocab
        self.num_rows = len(ids)
        out = model(input_ids=torch.as_tensor(ids)[None], use_cache=True)
        self.cache = out.past_key_values
        self._text_rows = _probabilities(out.logits[0], vocab)
        self.forget()

    def forget(self):
        """Drop all branches."""
        extra = self.cache.get_seq_length() - self.num_rows
        if extra:
            self.cache.crop(-extra)
        self.rows = list(self._text_rows)
        self.seen = [None] * self.num_rows  # branches that a branch follows, itself included
        self.root = list(range(self.num_rows))
        self.number_of = {}

    def find(self, parent, token):
        """Return the number of a branch, whose row exists after the next `add`."""
        key = parent, token
        if key not in self.number_of:
            number = self.num_rows + len(self.number_of)
            self.number_of[key] = number
            before = self.seen[parent] or []
            self.seen.append([*before, number])
            self.root.append(self.root[parent])
        return self.number_of[key]

    @torch.no_grad()
    def add(self):
        """Compute the rows of all branches that `find` has numbered since the last call."""
        first = len(self.rows)
        numbers = range(first, self.num_rows + len(self.number_of))
        if not numbers:
            return
        tokens = [token for _, token in list(self.number_of)[first - self.num_rows :]]
        lowest = torch.finfo(self.model.dtype).min
        mask_NK = torch.full((len(numbers), numbers.stop), lowest)
        positions = []
        for row, number in enumerate(numbers):
            mask_NK[row, : self.root[number] + 1] = 0
            mask_NK[row, self.seen[number]] = 0
            positions.append(self.root[number] + len(self.seen[number]))
        longest = self.model.config.max_position_embeddings - 1
        out = self.model(
            input_ids=torch.tensor([tokens]), attention_mask=mask_NK[None, None],
            position_ids=torch.tensor([positions]).clamp(max=longest),
            past_key_values=self.cache, use_cache=True)
        self.rows.extend(_probabilities(out.logits[0], self.vocab))


def _probabilities(logits_NW, vocab):
    return logits_NW[:, :vocab].float().softmax(-1).numpy()


def allow_any_mask(model):
    """Let the mask alone decide what a position sees, also where GPT-Neo has one of its own."""
    for module in model.modules():
        bias = getattr(module, "bias", None)
        if isinstance(bias, torch.Tensor) and bias.dtype == torch.bool:
            module.bias = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, 1 << 14, 1 << 14)
    return model


class FirstTokens(NamedTuple):
    """Tell with which student token texts begin: `so far` and then each of some teacher tokens.

    token_E: (E,) int64 teacher tokens.
    first_E: (E,) int64 student token, -1 for none.
    open_E: (E,) bool, what follows may make it a longer token.
    texts: the E byte strings.
    """

    token_E: np.ndarray
    first_E: np.ndarray
    open_E: np.ndarray
    texts: list


class ExactConverter:
    """Convert a teacher's belief about a text into one about the student's next token.

    Attributes:
        threshold: relative mass of branches that are followed.
    """

    def __init__(self, model, student, teacher, threshold=1e-4):
        """Read the vocabularies.

        Args:
            model: the teacher.
            student, teacher: `sample.TextEncoder`.
        """
        self.model = allow_any_mask(model)
        self.student = student
        self.teacher = teacher
        self.threshold = threshold
        self.backend = mid_text_backend(student.tokenizer)
        self.student_bytes = _bytes_of_text_tokens(student.table)
        self.teacher_bytes = _bytes_of_text_tokens(teacher.table)
        self.written = np.flatnonzero([bool(raw) for raw in self.teacher_bytes])
        self.sorted_tokens = sorted(self.written.tolist(), key=self.teacher_bytes.__getitem__)
        self.sorted_bytes = [self.teacher_bytes[w] for w in self.sorted_tokens]
        self.token_of_bytes = {}
        for w in self.written.tolist():
            self.token_of_bytes.setdefault(self.teacher_bytes[w], w)
        self.beginnings = self._beginnings()
        self.tables = {}
        self.known = {}
        self.joined = {}
        self.random = np.random.default_rng(0)

    def _beginnings(self):
        """Return the set of proper beginnings of tokens that the student's tokenizer writes."""
        beginnings = set()
        first = self._first_tokens(self.student_bytes)
        for v, raw in enumerate(self.student_bytes):
            if raw and first[v] == v:
                beginnings.update(raw[:cut] for cut in range(1, len(raw)))
        return beginnings

    def _first_tokens(self, texts):
        """Return the first token that the student's tokenizer writes for each byte string."""
        ids = encode_bytes(texts, self.backend, self.student.table)
        return np.array([spelled[0] if spelled else -1 for spelled in ids], np.int64)

    def continuations(self, remainder):
        """Return FirstTokens behind `remainder` for the teacher tokens that go on from it.

        b"": all tokens.  Control tokens are left out but for the end of the text.
        """
        if remainder not in self.tables:
            low = bisect_left(self.sorted_bytes, remainder)
            tokens = []
            for w in self.sorted_tokens[low:]:
                if not self.teacher_bytes[w].startswith(remainder):
                    break
                if len(self.teacher_bytes[w]) > len(remainder):
                    tokens.append(w)
            texts = [self.teacher_bytes[w][len(remainder) :] for w in tokens]
            self.tables[remainder] = self._table(tokens, texts, may_end=not remainder)
        return self.tables[remainder]

    def _table(self, tokens, texts, may_end):
        """Return FirstTokens; `may_end`: the text may end instead."""
        first, is_open = self.look_up(texts)
        tokens = list(tokens)
        if may_end and self.teacher.table.eos >= 0:
            tokens.append(self.teacher.table.eos)
            first.append(self.student.table.eos)
            is_open.append(False)
        return FirstTokens(np.array(tokens, np.int64), np.array(first, np.int64),
                           np.array(is_open, bool), texts)

    def look_up(self, texts):
        """Return lists: the first token of each byte string, and whether more may lengthen it."""
        new = [text for text in dict.fromkeys(texts) if text not in self.known]
        for text, first in zip(new, self._first_tokens(new).tolist()):
            self.known[text] = first, text in self.beginnings
        known = [self.known[text] for text in texts]
        return [first for first, _ in known], [is_open for _, is_open in known]

    def convert(self, text, chosen, num_rows, window=32):
        """Return the exact beliefs at some student positions.

        Args:
            text: str.
            chosen: student positions; position i has read i + 1 tokens and predicts the next.
            num_rows: T, as many of its tokens the teacher reads.
            window: teacher rows whose branches exist at a time.
        Returns:
            (len(chosen), V) float64, rows that sum to 1; to 0 where no branch was left.
        """
        raw = text.encode()
        student_ids, student_end = self._read(text, self.student)
        teacher_ids, teacher_end = self._read(text, self.teacher)
        teacher_ids = teacher_ids[:num_rows]
        teacher_end = teacher_end[:num_rows]
        with torch.no_grad():
            branches = Branches(self.model, teacher_ids, len(self.teacher.table))
        belief = np.zeros((len(chosen), len(self.student.table)))
        row_of = np.searchsorted(teacher_end, student_end[chosen], side="right") - 1
        for group in range(int(row_of.max(initial=0)) // window + 1):
            members = np.flatnonzero(row_of // window == group).tolist()
            branches.forget()
            contexts = {}
            for number in members:
                end = student_end[chosen[number]]
                contexts[number] = self._contexts(
                    raw, teacher_ids, teacher_end, int(row_of[number]), end, branches)
            branches.add()
            self._follow(contexts, branches, teacher_ids, belief)
        before = student_ids[chosen].tolist()
        self._leave_out_joined(belief, before, student_ids[np.array(chosen) + 1].tolist())
        total = belief.sum(1, keepdims=True)
        return np.divide(belief, total, out=belief, where=total > 0)

    @staticmethod
    def _read(text, encoder):
        """Return the ids of a text, and how many of its bytes have been read behind each."""
        ids, = encoder.encode([text])
        located = encode_text(text, ids, encoder).located
        return ids, np.maximum.accumulate(np.maximum(located.end, 0))

    def _contexts(self, raw, ids, ends, row, end, branches):
        """List (branch, bytes since it, mass): the ways in which the teacher may have come here."""
        since = raw[ends[row] : end]
        if row == 0:
            return self._cuts(0, since, 1.0, None, branches)
        mass = float(branches.rows[row - 1][ids[row]])
        contexts = self._cuts(row - 1, raw[ends[row - 1] : end], 1.0, ids[row], branches, mass)
        return contexts + self._cuts(row, since, mass, None, branches, mass)

    def _cuts(self, row, since, mass, realized, branches, unit=1.0):
        """List the contexts behind one row: inside its next token, or behind one other token."""
        contexts = [(row, since, mass)]
        for size in range(1, len(since) + 1):
            w = self.token_of_bytes.get(since[:size])
            if w is None or w == realized:
                continue
            of_cut = mass * float(branches.rows[row][w])
            if of_cut > self.threshold * unit:
                contexts.append((branches.find(row, w), since[size:], of_cut))
        return contexts

    def _follow(self, contexts, branches, teacher_ids, belief):
        """Add to the beliefs what every context says, as deep as it takes."""
        todo = []  # (position, branch, text since the position, mass)
        total = {}
        for number, ways in contexts.items():
            total[number] = 0.0
            for branch, since, mass in ways:
                table = self.continuations(since)
                mass_E = mass * branches.rows[branch][table.token_E]
                total[number] += mass_E.sum()
                np.add.at(belief[number], table.first_E[~table.open_E], mass_E[~table.open_E])
                todo.append((number, branch, table, mass_E))
        opened = []
        for number, branch, table, mass_E in todo:
            for e in self._choose(mass_E, table.open_E, self.threshold * total[number]):
                after = self._after(branch, int(table.token_E[e]), branches, teacher_ids)
                opened.append((number, after, table.texts[e], mass_E[e]))
        for _ in range(MAX_DEPTH):
            branches.add()
            found = []  # (position, branch, token, text, mass)
            for number, branch, text, mass in opened:
                mass_E = mass * branches.rows[branch][self.sorted_tokens]
                # few texts to look up
                for e in self._choose(mass_E, mass_E > 0, 0.1 * self.threshold * total[number]):
                    found.append((number, branch, e, text + self.sorted_bytes[e], mass_E[e]))
            first, is_open = self.look_up([text for *_, text, _ in found])
            opened = []
            for place, (number, branch, e, text, mass) in enumerate(found):
                if not is_open[place]:
                    if first[place] >= 0:
                        belief[number, first[place]] += mass
                    continue
                small = np.array([mass])
                if len(self._choose(small, np.array([True]), self.threshold * total[number])):
                    after = self._after(branch, self.sorted_tokens[e], branches, teacher_ids)
                    opened.append((number, after, text, small[0]))
            if not opened:
                break

    @staticmethod
    def _after(branch, token, branches, teacher_ids):
        """Return the branch behind a token, which may be the text itself."""
        on_text = branch + 1 < branches.num_rows and teacher_ids[branch + 1] == token
        return branch + 1 if on_text else branches.find(branch, token)

    def _choose(self, mass_E, allowed_E, threshold):
        """Return which entries to follow, and change their masses in place: unbiased, and few.

        Of those with less mass than the threshold a random part is followed instead of all, with
        the threshold as their mass.
        """
        is_small = allowed_E & (mass_E < threshold)
        chosen = is_small & (self.random.random(len(mass_E)) * threshold < mass_E)
        mass_E[chosen] = threshold
        return np.flatnonzero((allowed_E & ~is_small) | chosen).tolist()

    def _leave_out_joined(self, belief, before, realized):
        """Set to 0 what the student's tokenizer would have joined to the token before.

        The token that came never: how white space is cut depends on what follows.
        """
        rows, tokens = np.nonzero(belief > 1e-4 * belief.sum(1, keepdims=True))
        pairs = [(int(before[row]), int(v)) for row, v in zip(rows, tokens)]
        new = [pair for pair in dict.fromkeys(pairs) if pair not in self.joined]
        first = self._first_tokens([self.student_bytes[a] + self.student_bytes[b] for a, b in new])
        for pair, token in zip(new, first.tolist()):
            has_text = self.student_bytes[pair[0]] and self.student_bytes[pair[1]]
            self.joined[pair] = bool(has_text) and token != pair[0]
        is_joined = np.array([self.joined[pair] for pair in pairs], bool)
        is_joined &= tokens != np.array(realized)[rows]
        belief[rows[is_joined], tokens[is_joined]] = 0.0


def _bytes_of_text_tokens(table):
    """Return the bytes of every token, b"" for control tokens."""
    spelled = all_bytes(table)
    for token in np.flatnonzero(table.special).tolist():
        spelled[token] = b""
    return spelled


# --- beside a translation -------------------------------------------------------------------------


@dataclass(kw_only=True)
class Args:
    """Compare the translated target with the exact conversion.

    Args:
        student: folder of a tokenizer.
        teacher: folder of a model and its tokenizer.
        texts: .json with a list of texts (or of {"text"}), else a file that is cut every 500
            characters.
        rows: texts to read, the first ones.
        threshold: relative mass of branches that are followed.
    """

    student: str
    teacher: str
    texts: str
    rows: int = 8
    threshold: float = 1e-4


class Comparison(NamedTuple):
    """Hold what one text says.

    divergence: {"root", "inside": KL in nats at every such position}.
    exact_nats, teacher_nats: of the text by the exact beliefs and by the teacher itself.
    num_bytes: of the positions compared.
    """

    divergence: dict
    exact_nats: float
    teacher_nats: float
    num_bytes: int


def compare(text, converter, tables):
    """Return the Comparison of a text; None if nothing of it is aligned.

    Args:
        tables: translation.Tables of the pair.
    """
    student, teacher = converter.student, converter.teacher
    sample, = Collator(student, [PairOptions(teacher, tables)]).samples([as_example(text)])
    pair = sample.pairs[0]
    positions = np.flatnonzero(pair.student_chunk >= 0)
    if not len(positions):
        return None
    belief = converter.convert(text, positions, len(pair.teacher.ids))
    ids = torch.tensor(pair.teacher.ids)[None]
    with torch.no_grad():
        teacher_logits = converter.model(input_ids=ids).logits[..., : len(teacher.table)].float()
    logits = torch.full((1, len(pair.student_chunk), len(student.table)), -30.0)
    logits[0, positions] = torch.from_numpy(np.log(np.maximum(belief, 1e-10))).float()

    sides = [torch.from_numpy(side)[None] for side in (
        sample.student.ids, sample.student.labels, pair.teacher.labels, pair.student_chunk,
        pair.teacher_chunk)]
    # without the rest of n:m chunks, which is no belief about a token
    nodes = list_nodes(*sides, tables)._replace(count_many=0)
    value_N, _ = translated(
        logits, teacher_logits, sides[1], sides[2], nodes, tables, reduction="none")
    row_N = torch.cat([nodes.roots.row_S, nodes.insides.row_S])
    is_root_N = torch.arange(len(row_N)) < len(nodes.roots.row_S)
    is_root_N = is_root_N[row_N.argsort()]
    value_N = value_N.flatten()

    labels = sample.student.labels[positions]
    exact = -np.log(np.maximum(belief[np.arange(len(positions)), labels], 1e-12)).sum()
    rows = np.flatnonzero(pair.teacher_chunk >= 0)
    logp = teacher_logits[0, rows].log_softmax(-1)
    teacher_nats = -logp[torch.arange(len(rows)), pair.teacher.labels[rows]].sum().item()
    divergence = {"root": value_N[is_root_N].tolist(), "inside": value_N[~is_root_N].tolist()}
    num_bytes = int(sample.student.num_bytes[positions].clip(0).sum())
    return Comparison(divergence, exact, teacher_nats, num_bytes)


def read_texts(path):
    """Return a list of texts."""
    path = Path(path)
    if path.suffix == ".json":
        rows = json.loads(path.read_text())
        return [row if isinstance(row, str) else row["text"] for row in rows]
    text = path.read_text()
    return [text[first : first + 500] for first in range(0, len(text), 500)]


def main(args):
    pair = Pair.load(args.student, args.teacher)
    fields = cached_translation(pair)
    tables = {}
    for name in Tables._fields:
        value = fields[name]
        tables[name] = value.long() if isinstance(value, torch.Tensor) else value
    model = AutoModelForCausalLM.from_pretrained(args.teacher, trust_remote_code=False).eval()
    encoders = []
    for tokenizer in pair.tokenizers:
        table = TokenTable.from_tokenizer(tokenizer)
        encoders.append(TextEncoder(tokenizer, table, model.config.max_position_embeddings))
    converter = ExactConverter(model, *encoders, args.threshold)

    divergence = {"root": [], "inside": []}
    nats = []
    for text in read_texts(args.texts)[: args.rows]:
        done = compare(text, converter, Tables(**tables))
        if done:
            for kind, values in done.divergence.items():
                divergence[kind] += values
            nats.append((done.exact_nats, done.teacher_nats, done.num_bytes))
    for kind, values in divergence.items():
        if values:
            worst = np.sort(values)[-3:].round(3).tolist()
            print(f"{kind}: {len(values)} positions, mean {np.mean(values):.4f}, worst {worst}")
    exact, of_teacher, num_bytes = np.sum(nats, axis=0) / math.log(2)
    num_bytes *= math.log(2)
    print(f"bits per byte: exact {exact / num_bytes:.4f}, teacher {of_teacher / num_bytes:.4f}")


if __name__ == "__main__":
    tool(Args, main, positional=("student", "teacher", "texts"))
