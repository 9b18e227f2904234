"""Measure losses beside public ones on the same logits: CPU seconds (GPU: seconds) of both passes.

    git clone https://github.com/huggingface/trl
    git clone https://github.com/NVIDIA-NeMo/RL
    python benchmarks/loss_peers.py --trl trl --nemo_rl RL       # the record of docs/LOG.md
    python benchmarks/loss_peers.py --trl trl --losses uld --dtype bfloat16 --times 5

Prints one line of JSON per loss.  Nothing of TRL and NeMo-RL is imported or installed: their loss
functions are read out of the files of the checkout and compiled by themselves.  Every chunk has one
token on either side, because that needs no alignment, so both compare the same rows and their
values, which are printed, agree; but that of hybrid_uld to 3e-4, since TRL raises probabilities to
1e-8 first, and that of gold, which compares one more event than NeMo-RL: all tokens but the common
ones.

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

import fire
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.loss import COMMON_PER_TOKEN, PROJECTION_WEIGHTS, as_list, timed
from isogloss import losses

GKD = "trl/experimental/gkd/gkd_trainer.py"
GOLD = "trl/experimental/gold/gold_trainer.py"
NEMO_LOSS = "nemo_rl/algorithms/loss/loss_functions.py"
NEMO_PARTS = {
    "nemo_rl/algorithms/x_token/loss_utils.py": (
        "Fp32SparseMM", "chunk_log_prob_sums", "chunk_average_finalize", "chunk_average_log_probs",
        "slice_sparse_projection_cols", "project_student_to_teacher_vocab",
        "select_teacher_topk_indices", "valid_chunk_mask"),
    "nemo_rl/distributed/model_utils.py": (
        "vocab_parallel_log_softmax", "vocab_parallel_full_log_softmax")}
TOPK = 8192  # kept columns of projection_kl, and compared tokens of gold's rest: both defaults
PEERS = {"trl": ("forward_kl", "reverse_kl", "generalized_jsd", "uld", "hybrid_uld"),
         "nemo_rl": ("projection_kl", "gold")}


def read_definition(path, name, class_name=None, **names):
    """Return a function or class of a Python file, compiled without the rest of the file.

    Args:
        class_name: of the class whose function it is, if it is one's.
        names: other global names that it uses.
    Raises:
        SystemExit: there is no such file, or it does not define it.
    """
    if not Path(path).is_file():
        raise SystemExit(f"no {path}; --trl and --nemo_rl expect folders of checkouts")
    body = ast.parse(Path(path).read_text()).body
    if class_name:
        body = named(body, class_name, path).body
    node = named(body, name, path)
    node.decorator_list = []  # staticmethod
    module = ast.Module([node], type_ignores=[])
    # names of types are not looked up
    flags = __future__.annotations.compiler_flag
    namespace = {"torch": torch, "nn": nn, "F": F, "DTensor": DTensor, **names}
    exec(compile(module, str(path), "exec", flags=flags), namespace)
    return namespace[name]


def named(body, name, path):
    for node in body:
        if getattr(node, "name", None) == name:
            return node
    raise SystemExit(f"{path} defines no {name}; expected a checkout of July or August 2026")


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


def pairs_of_trl(name, folder, V, W):
    """Return (ours, TRL's): (student logits (S, V), teacher logits (S, W), ids (S,)) -> ()."""
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


def nemo_rl_method(name, folder, **tables):
    """Return a loss of NeMo-RL of (student logits (S, V), teacher logits (S, W)), and its options.

    Args:
        name: of the method.
        tables: what the functions return that read a projection from a file there.
    """
    parts = {"group_all_reduce_sum": lambda x, group: x}
    for path, names in NEMO_PARTS.items():
        for part in names:
            parts[part] = read_definition(folder / path, part)
    for part in parts.values():  # they call each other
        getattr(part, "__globals__", {}).update(parts)
    for table, value in tables.items():
        parts[table] = lambda *args, value=value, **options: value
    method = read_definition(
        folder / NEMO_LOSS, name, "CrossTokenizerDistillationLossFn", **parts)
    loss = SimpleNamespace(
        temperature=1.0, vocab_topk=TOPK, uncommon_topk=TOPK, reverse_kl=False,
        exact_token_match_only=False, student_vocab_size=None)

    def run(x, y, **options):
        chunk = torch.arange(len(x))[None]
        align = SimpleNamespace(
            student_chunk_id=chunk, teacher_chunk_id=chunk, sample_mask=torch.ones(1),
            pair_valid=torch.ones(chunk.shape, dtype=torch.bool))
        return method(loss, x[None], y[None], align, projection_matrix_path="",
                      teacher_vocab_size=y.shape[1], **options)[0]

    return run


def pair_of_projection_kl(folder, V, W):
    """Return (ours, NeMo-RL's), with a random projection; both choose the kept columns first."""
    indices = torch.randint(W, (V, len(PROJECTION_WEIGHTS)))
    weights = torch.tensor(PROJECTION_WEIGHTS).expand(V, -1).contiguous()
    rows = torch.arange(V).repeat_interleave(len(PROJECTION_WEIGHTS))
    matrix = torch.sparse_coo_tensor(
        torch.stack([rows, indices.flatten()]), weights.flatten(), (V, W)).coalesce()
    theirs = nemo_rl_method("_compute_p_kl", folder, get_sparse_projection_matrix=matrix)

    def ours(x, y, ids):
        chunk = torch.arange(len(x))[None]
        kept = y.amax(0).topk(TOPK).indices.sort().values
        total, count = losses.projection_kl(
            x[None], y[None], chunk, chunk, indices, weights, kept_K=kept,
            entries=losses.projection_entries(indices, weights, W, kept),
            chunks=losses.find_chunks(chunk, chunk))
        return total / count

    return ours, lambda x, y, ids: theirs(x, y)


def pair_of_gold(folder, V, W):
    """Return (ours, NeMo-RL's)."""
    common = torch.arange(int(COMMON_PER_TOKEN * V))
    rest = losses.other_tokens(common, V), losses.other_tokens(common, W)
    theirs = nemo_rl_method("_compute_gold", folder, build_exact_token_map={
        "common_student": common, "common_teacher": common,
        "uncommon_student": rest[0], "uncommon_teacher": rest[1]})

    def ours(x, y, ids):
        chunk = torch.arange(len(x))[None]
        total, count = losses.gold(
            x[None], y[None], chunk, chunk, common, common, uncommon_topk=TOPK, rest=rest,
            chunks=losses.find_chunks(chunk, chunk))
        return total / count

    return ours, lambda x, y, ids: theirs(x, y, xtoken_loss=False)


def pair_of(name, folders, V, W):
    """Return (ours, theirs): (student logits (S, V), teacher logits (S, W), ids (S,)) -> ()."""
    [peer] = [peer for peer, names in PEERS.items() if name in names]
    if name == "projection_kl":
        return pair_of_projection_kl(folders[peer], V, W)
    if name == "gold":
        return pair_of_gold(folders[peer], V, W)
    return pairs_of_trl(name, folders[peer], V, W)


def measure(name, folders, tokens, V, W, dtype, times):
    """Return the record of one loss."""
    if name in ("forward_kl", "reverse_kl", "generalized_jsd"):
        W = V
    torch.manual_seed(0)
    # far from uniform, as logits of models are
    x = (2.5 * torch.randn(tokens, V)).to(dtype).requires_grad_()
    y = (2.5 * torch.randn(tokens, W)).to(dtype)
    ids = torch.randint(min(V, W), (tokens,))
    sides = dict(zip(("ours", "theirs"), pair_of(name, folders, V, W)))
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


def main(trl=None, nemo_rl=None, losses=None, tokens=64, V=128_256, W=151_936, dtype="float32",
         times=5):
    """Print one line of JSON per loss.

    Args:
        trl, nemo_rl: folders of checkouts; at least one.
        losses: names, separated by commas; None: all that these checkouts have.
        tokens: of the text, on either side.
        V, W: vocabulary sizes of student and teacher; divergences take V for both.
        dtype: of the logits.
        times: number of rounds.
    """
    checkouts = {"trl": trl, "nemo_rl": nemo_rl}
    folders = {peer: Path(folder) for peer, folder in checkouts.items() if folder}
    known = [name for peer in folders for name in PEERS[peer]]
    if not folders:
        raise SystemExit("--trl and --nemo_rl are missing; name a checkout of one of them")
    names = known if losses is None else as_list(losses)
    if not set(names) <= set(known):
        raise SystemExit(f"--losses {losses}: expected some of {', '.join(known)}")
    for name in names:
        record = measure(name, folders, tokens, V, W, getattr(torch, dtype), times)
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
