"""Say how much of what a student has to learn its teacher's rows tell it, by a pair of tokenizers.

    python benchmarks/told.py --student DIR --teachers DIR,DIR --texts english=F.txt,code=G.py
    python benchmarks/told.py --student bytes --teachers digits,unigram

The measure is the surprise of a model that has the student's tokenizer, in nats, on texts.  Printed
is, in percent of it, what `piece_kl` compares with a translated teacher, and what it does not:

roots, insides, choices   -log p(the text's cell of the node), see docs/piece_kl.md
in cells                  what is left of the roots: -log p(token | its cell), as choices leave it
rests                     positions of n:m chunks behind the first one, of which one number is
                          compared
told                      the first three together

Of a teacher its tokenizer is read alone.  The names of benchmarks/square.py stand for its
tokenizers, with its teacher as the model and its reported rows as the text.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

from benchmarks import square
from isogloss.config import Config
from isogloss.data.batch import Collator, PairOptions
from isogloss.flags.parse import MISSING, flag, tool
from isogloss.losses import FLOOR
from isogloss.objective.loss_table import build_loss
from isogloss.projection_tools.pairs import read_texts


@dataclass(kw_only=True)
class Args:
    """Say how much of a student's surprise a translated teacher speaks of."""

    student: str = flag(MISSING, "directory of a model, or a tokenizer of the square.")
    teachers: str = flag(MISSING, "directories of tokenizers, or names of the square, with commas.")
    texts: str = flag("", "as english=FILE, files of text in UTF-8; empty: those of the square.")
    pages: int = flag(6, "pieces of 2,000 characters that are read of each text.", low=1)


def main(args):
    texts = {"sources": square.corpus()["report"][: 8 * args.pages]}
    if args.texts:
        texts = read_texts(args.texts, args.pages)
    model = square.teacher(args.student)
    student = square.encoder(args.student)
    print("| student | teacher | text | told | roots | insides | choices | in cells | rests |")
    print("| --- | --- | --- " + "| ---: " * 6 + "|", flush=True)
    for teacher in args.teachers.split(","):
        cfg = Config(student=args.student, teacher=teacher, data="-")
        loss = build_loss(cfg, student, square.encoder(teacher), "cpu")
        collator = Collator(student, [PairOptions(square.encoder(teacher), loss.spelling)])
        for name, pieces in texts.items():
            nats = sum(told(model, collator([piece]), loss.spelling) for piece in pieces)
            total, roots, insides, choices, rests = nats.tolist()
            in_cells = total - roots - insides - choices - rests
            parts = roots + insides + choices, roots, insides, choices, in_cells, rests
            names = [Path(path).name for path in (args.student, teacher)]
            print(f"| {' | '.join([*names, name])} | "
                  + " | ".join(f"{100 * part / total:.1f}" for part in parts) + " |", flush=True)


@torch.no_grad()
def told(model, batch, tables):
    """Return (5,) nats of a batch: all, and those of roots, insides, choices and rests."""
    logp_NV = model(input_ids=batch.student.ids).logits.flatten(0, 1).log_softmax(-1)
    labels = batch.student.labels.flatten()
    nats_N = -logp_NV.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    sums = torch.zeros(5)
    sums[0] = nats_N[labels >= 0].sum()
    for tile in batch.teachers[0].tiles:
        for sub_tile in tile.sub_tiles:
            nodes = sub_tile.terms
            positions = tile.student_positions[sub_tile.student_slice]
            root_N = positions[nodes.roots.row_S]
            own_cell_N = tables.cell_V[nodes.roots.next_S]
            is_other_NV = tables.cell_V != own_cell_N[:, None]
            sums[1] -= logp_NV[root_N].masked_fill(is_other_NV, FLOOR).logsumexp(-1).sum()
            sums[2] += nats_N[positions[nodes.insides.row_S]].sum()
            sums[3] += _of_choices(logp_NV[root_N], nodes).sum()
            nats_S = nats_N[positions[nodes.rests.row_S]]  # but of the first of each chunk
            sums[4] += nats_S.sum() - nats_S[nodes.rests.chunks_S.start_K[:-1]].sum()
    return sums


def _of_choices(logp_NV, nodes):
    """Return (K,) -log p(the text's cell of each choice | its scope)."""
    choices = nodes.choices
    if not len(choices.level):
        return logp_NV.new_zeros(1)
    node_G = choices.cells.nodes.of_E
    root_E = choices.roots.of_E[node_G[choices.tokens.of_E]]
    logp_G = choices.tokens.logsumexp(logp_NV[root_E, choices.token_E])
    is_own_E = choices.token_E == nodes.roots.next_S[root_E]
    scope_K = choices.cells.nodes.logsumexp(logp_G)
    return scope_K - logp_G[choices.tokens.of_E[is_own_E]]


if __name__ == "__main__":
    tool(Args, main)
