"""Rows from the similarity of embeddings, for vocabularies whose bytes have little in common.

    python -m projection_tools.generate --student-model A --teacher-model B --output F.pt \\
        --embedding-model E [--pooling input] [--top-k 4]

Each token's text is embedded by one model; a row holds the teacher tokens of largest cosine, weighted by
exp(sharpness * cosine).  Tokens that are no text of their own (half characters, control tokens) get no row.
"""

from dataclasses import dataclass

import numpy as np
import torch

from projection_tools.flags import check_types, tool
from projection_tools import Pair, finish, pack


class Embedder:
    """Texts -> vectors of length 1, by one model.

    Args:
        name: hub id or directory of a model with a fast tokenizer.
        pooling: "input": the mean of the input embeddings; "output": the mean of the last hidden states.
    Raises:
        ValueError: the model cannot be loaded.
    """

    def __init__(self, name, pooling="input", device=None):
        from transformers import AutoModel, AutoTokenizer

        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            self.model = AutoModel.from_pretrained(name, dtype=torch.float32).to(self.device).eval()
        except (OSError, ValueError, KeyError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"--embedding-model {name}: cannot be loaded ({reason})") from None
        self.pooling = pooling

    @torch.no_grad()
    def __call__(self, texts, batch=1024):
        """(N, H) float32 on the device; 0 where a text has no token."""
        out = []
        for i in range(0, len(texts), batch):
            ids = self.tokenizer(texts[i : i + batch], add_special_tokens=False, verbose=False)["input_ids"]
            width = max(1, max(map(len, ids)))
            mask = torch.tensor([[k < len(row) for k in range(width)] for row in ids], device=self.device)
            table = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=self.device)
            if self.pooling == "input":
                states = self.model.get_input_embeddings()(table)
            else:
                states = self.model(input_ids=table, attention_mask=mask.long()).last_hidden_state
            states = torch.where(mask[..., None], states.float(), 0.0)
            out.append(torch.nn.functional.normalize(states.sum(1), dim=-1))
        return torch.cat(out) if out else torch.zeros(0, 1, device=self.device)


def own_text(table):
    """(ids, texts) of the tokens that are text by themselves."""
    ids, texts = [], []
    for i in np.flatnonzero(table.lengths > 0).tolist():
        try:
            texts.append(table.bytes_of(i).decode())
        except UnicodeDecodeError:
            continue
        ids.append(i)
    return np.array(ids, np.int64), texts


def similar_rows(pair, embed, top_k=4, sharpness=10.0, block_mib=256):
    """Projection from the similarity of embeddings.

    Args:
        pair: Pair.
        embed: list of N texts -> (N, H) float tensor of unit vectors.
        sharpness: weights are proportional to exp(sharpness * cosine).
        block_mib: memory for one block of similarities, MiB.
    Returns:
        (indices, likelihoods) with `top_k` slots.
    """
    (v, student), (w, teacher) = [(ids, embed(texts)) for ids, texts in map(own_text, pair.tables)]
    K, step = min(top_k, len(w)), max(1, block_mib * 2**18 // max(1, len(w)))
    rows, columns, weights = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    for i in range(0, len(v), step):
        cosine, best = (student[i : i + step] @ teacher.T).topk(K, dim=1)
        rows.append(v[i : i + step].repeat(K))
        columns.append(w[best.flatten().cpu().numpy()])
        weights.append((sharpness * (cosine - cosine[:, :1])).double().exp().flatten().cpu().numpy())
    found = [np.concatenate(parts) for parts in (rows, columns, weights)]
    nothing = v[(student == 0).all(1).cpu().numpy()]  # texts without a token in the embedding model
    keep = ~np.isin(found[0], nothing)
    return pack(*[part[keep] for part in found], len(pair.tables[0]), top_k)


@dataclass(kw_only=True)
class Args:
    """Rows of a projection from the similarity of embeddings.

    Args:
        student_model: hub id or directory with the student's tokenizer.
        teacher_model: likewise, the teacher's.
        embedding_model: hub id or directory of the model that embeds the texts of both.
        output: file to write, .pt or .safetensors.
        pooling: input (mean of input embeddings) or output (mean of last hidden states).
        top_k: entries kept in a row, 1 or more.
        sharpness: weights are proportional to exp(sharpness * cosine), > 0.
    """

    student_model: str
    teacher_model: str
    embedding_model: str
    output: str
    pooling: str = "input"
    top_k: int = 4
    sharpness: float = 10.0

    def __post_init__(self):
        check_types(self)
        if self.pooling not in ("input", "output"):
            raise ValueError(f"--pooling {self.pooling}: expected input or output")
        if self.top_k < 1 or self.sharpness <= 0:
            raise ValueError(f"--top-k {self.top_k}, --sharpness {self.sharpness}: expected 1 or more, > 0")


def main(args):
    pair = Pair.load(args.student_model, args.teacher_model)
    embed = Embedder(args.embedding_model, args.pooling)
    finish(similar_rows(pair, embed, args.top_k, args.sharpness), pair, args)


if __name__ == "__main__":
    tool(Args, main)
