"""The embedded default: a student learns from a teacher that speaks another vocabulary, on a laptop.

    python demo.py                    # what `make demo` runs; SEEDS="0 1 2" for three seeds

Everything is made here, nothing is downloaded: the corpus is the documentation inside the running Python, two
tokenizers of different kinds are trained on it, then a small teacher.  Each student is trained by the
ordinary `deepspeed distill.py`, once on text alone and once per distillation loss, from the same weights
on the same data.
"""

import ast
import hashlib
import io
import json
import math
import os
import socket
import subprocess
import sys
import sysconfig
import time
import warnings
from pathlib import Path

CACHE = Path(os.environ.get("ISOGLOSS_CACHE", ".cache"))
RECIPE = {
    "passage_bytes": 480,  # a student sequence of about 200 tokens
    "held_out_rows": 160,
    "teacher_vocab": 4096,
    "student_vocab": 1536,
    "teacher": dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
                    num_key_value_heads=6, max_position_embeddings=512),
    "student": dict(hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=4, max_position_embeddings=512),
    "teacher_steps": 700,
    "teacher_batch": 16,
    "teacher_lr": 3e-3,
}
DISTILL = {"steps": 240, "learning_rate": 3e-3, "max_length": 448}
ARMS = {  # what is trained, and how
    "text only": {"kd_weight": 0},
    "piece_kl": {"loss": "piece_kl", "kd_weight": 1},
    "projection_kl": {"loss": "projection_kl", "kd_weight": 1},
}


# --- corpus ---------------------------------------------------------------------------------------


def documents():
    """(name, text) of the language reference that pydoc carries, and of every docstring of the standard
    library.
    """
    from pydoc_data import topics

    yield from ((f"topic {name}", text) for name, text in sorted(topics.topics.items()))
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "turtledemo", "idle_test"}
    seen = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skip & set(name.parts):
            continue
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):  # samples of bad source that some distributions ship
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        fresh = [text for text in dict.fromkeys(found) if text and text not in seen]
        seen.update(fresh)
        if fresh:
            yield str(name), "\n\n".join(fresh)


def passages(text, limit):
    """The text in pieces of at most about `limit` bytes, cut between lines."""
    piece = []
    for line in text.splitlines(keepends=True):
        if piece and len("".join([*piece, line]).encode()) > limit:
            yield "".join(piece).strip("\n")
            piece = []
        piece.append(line)
    yield "".join(piece).strip("\n")


def make_corpus(folder):
    """corpus.jsonl: the held-out passages first, then those to train on; no document is in both."""
    held_out, train = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old docstrings
        for name, text in documents():
            aside = hashlib.sha256(name.encode()).digest()[0] < 20  # about 8 % of the documents
            (held_out if aside else train).extend(passages(text, RECIPE["passage_bytes"]))
    by_hash = lambda text: hashlib.sha256(text.encode()).digest()  # noqa: E731
    held_out = sorted((p for p in held_out if len(p) > 60), key=by_hash)[: RECIPE["held_out_rows"]]
    train = sorted((p for p in train if len(p) > 60), key=by_hash)
    lines = [json.dumps({"text": text}) for text in held_out + train]
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")


def read_corpus(folder):
    """(held out, train) lists of passages."""
    rows = [json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text().splitlines()]
    return rows[: RECIPE["held_out_rows"]], rows[RECIPE["held_out_rows"] :]


# --- tokenizers -----------------------------------------------------------------------------------


def byte_level_bpe(texts, size):
    """The teacher's: GPT-2 style, numbers stay whole where they are frequent."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, pad_token=end)


def unigram(texts, size):
    """The student's: SentencePiece Unigram with byte fallback and a prefix space, every digit on its own."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, model_type="unigram", vocab_size=size,
        byte_fallback=True, split_digits=True, normalization_rule_name="identity", num_threads=1,
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, minloglevel=2,
        max_sentence_length=1 << 16,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    # a byte token must not match text that merely looks like one, so its score is out of reach
    vocab = [(pieces.id_to_piece(i), -1e4 if pieces.is_byte(i) else pieces.get_score(i)) for i in range(size)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=pieces.unk_id(), byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


# --- models ---------------------------------------------------------------------------------------


def llama(tokenizer, shape, seed):
    """A freshly initialised Llama of the given shape, with tied embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id,
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **shape)
    return LlamaForCausalLM(config)


def train_teacher(tokenizer, texts, report=print):
    """A small model of the corpus: AdamW, warm-up and cosine, sequences of similar length together."""
    import torch
    from tqdm import tqdm

    steps, batch, peak = RECIPE["teacher_steps"], RECIPE["teacher_batch"], RECIPE["teacher_lr"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = llama(tokenizer, RECIPE["teacher"], seed=0).to(device).train()
    end = tokenizer.eos_token_id
    rows = sorted(([end, *ids, end] for ids in tokenizer(texts)["input_ids"]), key=len)
    groups = [rows[i : i + batch] for i in range(0, len(rows) - batch + 1, batch)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, steps, pct_start=0.1, final_div_factor=100)
    generator, order = torch.Generator().manual_seed(0), []
    bar = tqdm(range(steps), desc="teacher", unit="step", mininterval=0.5 if sys.stderr.isatty() else 10)
    for _ in bar:
        order = order or torch.randperm(len(groups), generator=generator).tolist()
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in groups[order.pop()]], batch_first=True,
                                              padding_value=-100).to(device)
        logits = model(input_ids=ids[:, :-1].clamp(min=0)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.cpu()
