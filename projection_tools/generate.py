"""Make rows from the similarity of embeddings, for vocabularies whose bytes have little in common.

    python -m projection_tools.generate --student A --teacher B --output F.pt \\
        --embedding_model E [--top_k 4]

Each token's text is embedded by one model; a row holds the teacher tokens of largest cosine,
weighted by exp(sharpness * cosine).  Tokens that are no text by themselves (half characters,
control tokens) get no row.
"""

from isogloss.projection_tools.__main__ import run

if __name__ == "__main__":  # --help waits for no torch
    raise SystemExit(run("generate"))

import numpy as np
import torch

from isogloss.flags.model_names import read_model_name
from isogloss.projection_tools.arrays import pack
from isogloss.projection_tools.projection_files import finish
from isogloss.projection_tools.tokenizers import load_tokenizer, reading

FLOATS_PER_MIB = 2**18  # of float32


class Embedder:
    """Map texts to vectors of length 1: the mean of one model's input embeddings.

    Args:
        name: hub id or directory of a model with a fast tokenizer.
        device: None: the GPU, if there is one.
        trust_remote_code: run the Python code that comes with the model.
    Raises:
        ValueError: the model cannot be loaded.
    """

    def __init__(self, name, device=None, trust_remote_code=False):
        from transformers import AutoModel  # seconds to import

        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer, _ = load_tokenizer("embedding_model", name, trust_remote_code)
        place = read_model_name("embedding_model", name)
        with reading("embedding_model", name, "its weights"):
            model, info = AutoModel.from_pretrained(
                place.base, revision=place.revision, dtype=torch.float32,
                trust_remote_code=trust_remote_code, output_loading_info=True)
        # A pooler, which many checkpoints lack, has no part in the embeddings.
        missing = sorted(key for key in info["missing_keys"] if "pooler" not in key)
        if missing:
            raise ValueError(
                f"--embedding_model {name}: its weights are not those of its config.json (missing: "
                f"{', '.join(missing[:3])}); use the files of one model")
        self.model = model.to(self.device).eval()

    @torch.no_grad()
    def __call__(self, texts, batch=1024):
        """Return (N, H) float32 on the device; 0 where a text has no token."""
        vectors = []
        for start in range(0, len(texts), batch):
            vectors.append(self._embed(texts[start : start + batch]))
        if not vectors:
            return torch.zeros(0, 1, device=self.device)
        return torch.cat(vectors)

    def _embed(self, texts):
        tokenized = self.tokenizer(texts, add_special_tokens=False, verbose=False)
        sequences = [torch.tensor(ids, dtype=torch.int64) for ids in tokenized["input_ids"]]
        ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-1)
        ids = ids.to(self.device)
        states = self.model.get_input_embeddings()(ids.clamp(min=0)).float()
        # The length is normalized below, so the sum over positions serves as the mean.
        states = torch.where(ids[..., None] >= 0, states, 0.0)
        return torch.nn.functional.normalize(states.sum(1), dim=-1)


def text_tokens(table):
    """Return (ids, texts) of the tokens that are text by themselves."""
    ids = []
    texts = []
    for i in np.flatnonzero(table.lengths > 0).tolist():
        try:
            text = table.bytes_of(i).decode()
        except UnicodeDecodeError:  # a part of a character
            continue
        ids.append(i)
        texts.append(text)
    return np.array(ids, np.int64), texts


def similar_rows(pair, embed, top_k=4, sharpness=10.0, block_mib=256):
    """Return a projection from the similarity of embeddings.

    Args:
        embed: list of N texts -> (N, H) float tensor of unit vectors.
        top_k: entries kept in a row.
        sharpness: weights are proportional to exp(sharpness * cosine).
        block_mib: memory for one block of similarities, MiB.
    Returns:
        (indices, likelihoods) with `top_k` slots.
    """
    v, student_texts = text_tokens(pair.tables[0])
    w, teacher_texts = text_tokens(pair.tables[1])
    student = embed(student_texts)
    teacher = embed(teacher_texts)
    K = min(top_k, len(w))
    block = max(1, block_mib * FLOATS_PER_MIB // max(1, len(w)))  # student tokens at once

    # Each list begins with an empty array, for a student without text.
    rows = [np.zeros(0, np.int64)]
    columns = [np.zeros(0, np.int64)]
    weights = [np.zeros(0)]
    for start in range(0, len(v), block):
        end = start + block
        similarity = student[start:end] @ teacher.T
        cosine, best = similarity.topk(K, dim=1)
        # Relative to the best one, so exp cannot overflow; rows are normalized in the end.
        exponent = sharpness * (cosine - cosine[:, :1])
        rows.append(v[start:end].repeat(K))
        columns.append(w[best.flatten().cpu().numpy()])
        weights.append(exponent.double().exp().flatten().cpu().numpy())
    rows = np.concatenate(rows)
    columns = np.concatenate(columns)
    weights = np.concatenate(weights)

    # A text without a token in the embedding model is similar to nothing.
    no_vector = (student == 0).all(1).cpu().numpy()
    keep = ~np.isin(rows, v[no_vector])
    return pack(rows[keep], columns[keep], weights[keep], len(pair.tables[0]), top_k)


def main(args):
    pair = args.load_pair()
    embed = Embedder(args.embedding_model, trust_remote_code=args.trust_remote_code)
    projection = similar_rows(pair, embed, args.top_k, args.sharpness)
    finish(projection, pair, args)
