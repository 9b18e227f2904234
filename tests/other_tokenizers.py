"""Directories as people have them whose tokenizer is in another file than tokenizer.json."""

import base64
import functools
import io
import json
import shutil
from itertools import pairwise

import regex
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as pb

from conftest import asset
from isogloss.align import BYTE_OF_CHARACTER

# Latin, Cyrillic, Chinese, Japanese, Thai, Arabic, emoji with joiners, code, spaces.
SCRIPTS = (
    "Naïve café: in 2010 there were 12345 “quotes”, e\u0301tude.",
    "Съешь ещё этих мягких французских булок, да выпей чаю!",
    "道可道，非常道；名可名，非常名。",
    "吾輩は猫である。名前はまだ無い。カタカナ、１２３",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "مرحبا بالعالم، كيف الحال؟ ١٢٣",
    "a family 👩‍👩‍👧‍👦, a flag 🏳️‍🌈, a hand 👍🏽!",
    "def f(x):\n    if x > 1:\n\t\treturn x_1 ** 2  # toString\r\n\n\n",
    "two  spaces,   three,        eight, and at the end  ",
)
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
          r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# as Kimi's: Chinese characters are words of their own, letters change at capitals
KIMI = (r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
          r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# As the Python code of Kimi and Qwen 1: a slow tokenizer around an Encoding of tiktoken.
CODE = '''
import pathlib
import re

from other_tokenizers import Encoding
from transformers import PreTrainedTokenizer

pathlib.Path({marker!r}).touch()


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "tiktoken.model"}}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        self.model = Encoding.of_file(vocab_file, {pattern!r}, {names!r})
        self.names = {{i: name for name, i in self.model._special_tokens.items()}}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self.model._mergeable_ranks) + len(self.names)

    def get_vocab(self):
        return {{self._convert_id_to_token(i): i for i in range(self.vocab_size)}}

    def _tokenize(self, text, **kwargs):
        ids = []
        for part in re.split("(" + "|".join(map(re.escape, self.names.values())) + ")", text):
            special = self.model._special_tokens.get(part)
            ids += self.model.encode(part) if special is None else [special]
        return list(map(self._convert_id_to_token, ids))

    def _convert_token_to_id(self, token):
        if token in self.model._special_tokens:
            return self.model._special_tokens[token]
        return self.model._mergeable_ranks.get(token.encode("latin-1"))

    def _convert_id_to_token(self, i):
        return self.names.get(i) or self.model.tokens[i].decode("latin-1")
'''


class Encoding:
    """Encode by ranks, as tiktoken is defined: of all neighbors the first in rank are merged."""

    def __init__(self, pattern, ranks, special):
        self._pat_str, self._mergeable_ranks, self._special_tokens = pattern, ranks, special
        self.tokens = {rank: token for token, rank in ranks.items()}
        self.pattern = regex.compile(pattern, regex.V1)

    @classmethod
    def of_file(cls, path, pattern, names=()):
        ranks = {}
        for line in open(path, "rb"):
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
        return cls(pattern, ranks, {name: len(ranks) + i for i, name in enumerate(names)})

    def encode(self, text):
        ids = []
        for word in self.pattern.findall(text):
            parts = [bytes([byte]) for byte in word.encode()]
            while True:
                pairs = [self._mergeable_ranks.get(a + b, 10**9) for a, b in pairwise(parts)]
                if min(pairs, default=10**9) == 10**9:
                    break
                at = pairs.index(min(pairs))
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            ids += [self._mergeable_ranks[part] for part in parts]
        return ids


@functools.cache
def spec_of(name):
    return json.loads(asset("tokenizers", name, "tokenizer.json").read_text())


def ranks_of(name, size):
    """Return {bytes: rank} of the first tokens of an asset's vocabulary: all it takes to merge."""
    vocab = spec_of(name)["model"]["vocab"]
    ranks = {}
    for token, rank in vocab.items():
        if rank < size:
            ranks[bytes(BYTE_OF_CHARACTER[character] for character in token)] = rank
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def configure(folder, **entries):
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))


def write_ranks(path, ranks):
    """Write a file of tiktoken: base64, space, rank."""
    path.write_text("".join(f"{base64.b64encode(token).decode()} {rank}\n"
                            for token, rank in ranks.items()))


def merges(folder, name, tokenizer_class, size):
    """Write vocab.json and merges.txt of the first tokens of an asset; return what encodes."""
    spec = spec_of(name)
    vocab = {token: i for token, i in spec["model"]["vocab"].items() if i < size}
    lines = [line if isinstance(line, str) else " ".join(line) for line in spec["model"]["merges"]]
    lines = [line for line in lines if line.replace(" ", "") in vocab]
    end = "<|endoftext|>"
    (folder / "vocab.json").write_text(json.dumps(vocab | {end: size}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines]))
    configure(folder, tokenizer_class=tokenizer_class, eos_token=end, unk_token=end)
    return spec


def smollm2(folder):
    merges(folder, "gpt2", "GPT2Tokenizer", 5000)
    word = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    return Encoding(word, ranks_of("gpt2", 5000), {}).encode


def qwen(folder):
    import unicodedata

    spec = merges(folder, "qwen2", "Qwen2Tokenizer", 5000)
    word = spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    encoding = Encoding(word, ranks_of("qwen2", 5000), {})
    return lambda text: encoding.encode(unicodedata.normalize("NFC", text))


def llama3(folder):
    """Write a tokenizer.model of tiktoken, as Meta ships it, and the control tokens."""
    ranks = ranks_of("llama3", 8000)
    write_ranks(folder / "tokenizer.model", ranks)
    names = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
    configure(folder, bos_token=names[0], eos_token=names[1], added_tokens_decoder={
        str(len(ranks) + i): {"content": name, "special": True} for i, name in enumerate(names)})
    return Encoding(LLAMA3, ranks, {}).encode


def kimi(folder, model_type="kimi_k2"):
    """Write a tiktoken.model with the Python code that reads it; `ran` appears when it runs."""
    ranks = ranks_of("llama3", 8000)
    write_ranks(folder / "tiktoken.model", ranks)
    names = "[BOS]", "[EOS]", "<|im_end|>", "[UNK]", "[PAD]"
    code = CODE.format(marker=str(folder / "ran"), pattern=KIMI, names=names)
    (folder / "tokenization_kimi.py").write_text(code)
    configure(folder, tokenizer_class="TikTokenTokenizer", bos_token="[BOS]", eos_token="[EOS]",
              unk_token="[UNK]", pad_token="[PAD]",
              auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]})
    return Encoding(KIMI, ranks, {}).encode


def tekken(folder, is_early=False):
    """Write a tekken.json: 1,000 control tokens, more entries than default_vocab_size."""
    ranks = ranks_of("llama3", 8000)
    names = "<unk>", "<s>", "</s>", "[INST]", "[/INST]"
    entries = [{"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
               for token, rank in ranks.items()]
    config = {"pattern": TEKKEN, "num_vocab_tokens": 8000, "default_vocab_size": 8000,
              "default_num_special_tokens": 1000, "version": "v3"}
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    whole = {"config": config, "vocab": entries}
    if not is_early:  # files of 2024 list none
        whole["special_tokens"] = special
    (folder / "tekken.json").write_text(json.dumps(whole))
    encoding = Encoding(TEKKEN, {token: i for token, i in ranks.items() if i < 7000}, {})
    return lambda text: [token + 1000 for token in encoding.encode(text)]


def trained(folder, name, **options):
    """Train a SentencePiece model on stories; return its `encode`."""
    stories = json.loads(asset("text", "tinystories_1000.json").read_text())[:40]
    lines = [line for story in stories for line in str(story).splitlines() if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, minloglevel=2, **options)
    return written(folder, name, model.getvalue())


def written(folder, name, model):
    (folder / name).write_bytes(model)
    return sentencepiece.SentencePieceProcessor(model_proto=model).encode


AS_LLAMA = dict(model_type="bpe", vocab_size=700, byte_fallback=True, split_digits=True,
                normalization_rule_name="identity", remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True)
LLAMA2 = dict(tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>",
              unk_token="<unk>")


def llama2(folder):
    configure(folder, **LLAMA2)
    return trained(folder, "tokenizer.model", **AS_LLAMA)


def bare(folder):
    """Write a tokenizer.model alone, with nothing that names a class."""
    return trained(folder, "tokenizer.model", **AS_LLAMA)


def mistral(folder):
    """Write a model whose runs of spaces are merged last, though their ids are low."""
    trained(folder, "tokenizer.model", **AS_LLAMA)
    model = pb.ModelProto.FromString((folder / "tokenizer.model").read_bytes())
    for length in (2, 3, 4, 5, 8):
        model.pieces.insert(259, pb.ModelProto.SentencePiece(piece="\u2581" * length, score=-1e9))
    configure(folder, **LLAMA2)
    return written(folder, "tokenizer.model", model.SerializeToString())


def gemma(folder):
    """Write a model whose spaces and breaks are tokens that the user has defined."""
    roles = {f"{role}_piece": f"<{role}>" for role in ("pad", "eos", "bos")}
    symbols = ["<mask>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "\n\n\n",
               *["\u2581" * length for length in range(2, 9)]]
    configure(folder, tokenizer_class="GemmaTokenizer", bos_token="<bos>", eos_token="<eos>",
              pad_token="<pad>", unk_token="<unk>", add_bos_token=True)
    return trained(folder, "tokenizer.model", **AS_LLAMA, **roles, pad_id=0, eos_id=1, bos_id=2,
                   unk_id=3, add_dummy_prefix=False, user_defined_symbols=symbols)


def t5(folder):
    configure(folder, tokenizer_class="T5Tokenizer", eos_token="</s>", unk_token="<unk>",
              pad_token="<pad>", extra_ids=100)
    return trained(folder, "spiece.model", model_type="unigram", vocab_size=700, pad_id=0,
                   eos_id=1, unk_id=2, bos_id=-1)


def unigram(folder):
    """Write a Unigram model with bytes, and no class: spaces collapse, characters change."""
    return trained(folder, "tokenizer.model", model_type="unigram", vocab_size=900,
                   byte_fallback=True)


def true_llama2(folder):
    """Write the tokenizer.model of Llama 2: scores fall with the ids, but those of spaces."""
    configure(folder, **LLAMA2)
    vocab = spec_of("llama2")["model"]["vocab"]
    model = pb.ModelProto()
    for token, i in sorted(vocab.items(), key=lambda item: item[1]):
        kind = 6 if 3 <= i < 259 else (2, 3, 3)[i] if i < 3 else 1
        score = 259.0 - i if token.strip("\u2581") else -1e9
        model.pieces.add(piece=token, score=0 if kind > 1 else score, type=kind)
    model.trainer_spec.CopyFrom(pb.TrainerSpec(
        model_type=2, byte_fallback=True, vocab_size=len(vocab), unk_id=0, bos_id=1, eos_id=2,
        pad_id=-1))
    model.normalizer_spec.CopyFrom(pb.NormalizerSpec(
        name="identity", add_dummy_prefix=True, remove_extra_whitespaces=False))
    return written(folder, "tokenizer.model", model.SerializeToString())


def true_llama3(folder):
    """Write the tokenizer.model of Llama 3, a file of tiktoken."""
    write_ranks(folder / "tokenizer.model", ranks_of("llama3", 10**6))
    shutil.copy(asset("tokenizers", "llama3", "tokenizer_config.json"), folder)
    entries = json.loads((folder / "tokenizer_config.json").read_text())
    fields = "content", "lstrip", "normalized", "rstrip", "single_word", "special"
    tokens = {}
    for token in spec_of("llama3")["added_tokens"]:
        tokens[str(token["id"])] = {field: token[field] for field in fields}
    configure(folder, **entries, added_tokens_decoder=tokens)
