"""Measure losses beside public ones on the same logits: CPU seconds (GPU: seconds) of both passes.

    git clone https://github.com/huggingface/trl
    python benchmarks/loss_peers.py --trl trl                    # the record of docs/LOG.md
    python benchmarks/loss_peers.py --trl trl --losses uld --dtype bfloat16 --times 5

Prints one line of JSON per loss.  Nothing of TRL is imported or installed: its loss functions are
read out of the files of the checkout and compiled by themselves.  Every chunk has one token on
either side, because that needs no alignment, so both compare the same rows and their values, which
are printed, agree; but that of hybrid_uld to 3e-4, since TRL raises probabilities to 1e-8 first.

Both sides run in turn, after two rounds that warm up; medians are of the rounds.
"""

import __future__

import ast
import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from isogloss.cpu_settings import restart_with_settings

if __name__ == "__main__":
    restart_with_settings()

import fire
import torch
import torch.nn.functional as F
from torch import nn

import losses
from benchmarks.loss import COMMON_PER_TOKEN, as_list, timed

GKD = "trl/experimental/gkd/gkd_trainer.py"
GOLD = "trl/experimental/gold/gold_trainer.py"


def read_definition(path, name, class_name=None):
    """Return a function or class of a Python file, compiled without the rest of the file.

    Args:
        class_name: of the class whose function it is, if it is one's.
    Raises:
        SystemExit: there is no such file, or it does not define it.
    """
    if not Path(path).is_file():
        raise SystemExit(f"no {path}; --trl expects the folder of a checkout of TRL")
    body = ast.parse(Path(path).read_text()).body
    if class_name:
        body = named(body, class_name, path).body
    node = named(body, name, path)
    node.decorator_list = []  # staticmethod
    module = ast.Module([node], type_ignores=[])
    # names of types are not looked up
    flags = __future__.annotations.compiler_flag
    namespace = {"torch": torch, "nn": nn, "F": F}
    exec(compile(module, str(path), "exec", flags=flags), namespace)
    return namespace[name]


def named(body, name, path):
    for node in body:
        if getattr(node, "name", None) == name:
            return node
    raise SystemExit(f"{path} defines no {name}; expected a checkout of TRL as of July 2026")


def uld_of_trl(folder, common):
    """Return TRL's ULDLoss for the first positions, one by one; common: of the hybrid, or 0."""
    trainer = read_definition(folder / GOLD, "generalized_jsd_loss", "GOLDTrainer")
    loss_class = read_definition(folder / GOLD, "ULDLoss")
    loss_class._compute_jsd_loss_for_matched_tokens.__globals__["GOLDTrainer"] = SimpleNamespace(
        generalized_jsd_loss=trainer)
    config = SimpleNamespace(
        uld_crossentropy_weight=0, uld_distillation_weight=1, uld_student_temperature=1,
        uld_teacher_temperature=1, uld_skip_student_eos=False, uld_skip_teacher_eos=False,
        use_extended_uld=False, uld_token_merge_strategy="observed", beta=0.5)
    loss = loss_class(config)
    if common:
        loss.use_hybrid_loss = True
        loss._vocab_mapping = {i: i for i in range(common)}
        loss._teacher_matched_ids = set(range(common))
        loss._student_matched_ids = set(range(common))
        loss.mapping_tensor = torch.arange(common)
    return loss


def pairs_of(name, folder, V, W):
    """Return (ours, theirs): (student logits (S, V), teacher logits (S, W), ids (S,)) -> ()."""
    common = torch.arange(int(COMMON_PER_TOKEN * V))
    if name in ("uld", "hybrid_uld"):
        is_hybrid = name == "hybrid_uld"
        trl = uld_of_trl(folder, len(common) if is_hybrid else 0)
        rest = losses.other_tokens(common, V), losses.other_tokens(common, W)
        options = {"common": (common, common), "rest": rest} if is_hybrid else {}

        def ours(x, y, ids):
            chunk = torch.arange(len(x))[None]
            chunks = losses.find_chunks(chunk, chunk)
            total, count = losses.uld(
                x[None], y[None], ids[None], ids[None], chunk, chunk, chunks=chunks, **options)
            return total / count

        def theirs(x, y, ids):
            return trl(x[None], y[None], ids[None], ids[None], ids[None], ids[None])

        return ours, theirs
    beta = {"forward_kl": 0, "reverse_kl": 1, "generalized_jsd": 0.5}[name]
    trl = read_definition(folder / GKD, "generalized_jsd_loss", "GKDTrainer")

    def ours(x, y, ids):
        total, count = getattr(losses, name)(x[None], y[None], None)
        return total / count

    def theirs(x, y, ids):
        return trl(x[None], y[None], labels=ids[None], beta=beta)

    return ours, theirs


def measure(name, folder, tokens, V, W, dtype, times):
    """Return the record of one loss."""
    if name not in ("uld", "hybrid_uld"):
        W = V
    torch.manual_seed(0)
    # far from uniform, as logits of models are
    x = (2.5 * torch.randn(tokens, V)).to(dtype).requires_grad_()
    y = (2.5 * torch.randn(tokens, W)).to(dtype)
    ids = torch.randint(min(V, W), (tokens,))
    sides = dict(zip(("ours", "theirs"), pairs_of(name, folder, V, W)))
    seconds = {side: [] for side in sides}
    values = {}

    def run(side):
        x.grad = None
        value = sides[side](x, y, ids)
        value.sum().backward()
        values[side] = float(value.detach().sum())

    for round_number in range(times + 2):  # two warm up
        for side in sides:
            taken = timed(lambda side=side: run(side))
            if round_number > 1:
                seconds[side].append(taken)
    record = {"loss": name, "tokens": tokens, "V": V, "W": W, "dtype": str(dtype)[6:],
              "threads": torch.get_num_threads()}
    for side, taken in seconds.items():
        record[f"{side}_seconds"] = round(statistics.median(taken), 4)
        record[f"{side}_value"] = round(values[side], 5)
    ratios = [one / other for one, other in zip(seconds["ours"], seconds["theirs"])]
    record["median_ratio"] = round(statistics.median(ratios), 3)
    return record


def main(trl, losses="forward_kl,reverse_kl,generalized_jsd,uld,hybrid_uld", tokens=64, V=128_256,
         W=151_936, dtype="float32", times=5):
    """Print one line of JSON per loss.

    Args:
        trl: folder of a checkout.
        losses: names, separated by commas.
        tokens: of the text, on either side.
        V, W: vocabulary sizes of student and teacher; divergences take V for both.
        dtype: of the logits.
        times: number of rounds.
    """
    for name in as_list(losses):
        record = measure(name, Path(trl), tokens, V, W, getattr(torch, dtype), times)
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
