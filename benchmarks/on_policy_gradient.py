"""Compare estimates of the reverse-KL gradient on texts that the student itself wrote.

    python benchmarks/on_policy_gradient.py ASSETS [--batches 8] [--top_k 1,4,16]

The student (stories260K) continues the beginnings of stories, and a teacher with its tokenizer
(bitstories_1M) corrects it.  For each batch the script takes the gradient of several losses with
respect to all of the student's weights, and prints its cosine with the exact one: of the sum over
the sampled positions of KL(student || teacher), all tokens compared.

sampled token   policy gradient: log p of the token that was sampled, times log p / q of it as a
                negative reward.  Its expectation is the exact gradient; one batch is far from it.
top k + tail    reverse KL on the student's k most likely tokens and one bucket for the rest, as
                `distill.py --loss reverse_kl --loss_topk k --loss_topk_of student`
all tokens      `distill.py --loss reverse_kl`

Shapes: B prompts, S positions that predict a sampled token, V vocabulary.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import losses
from projection_tools.flags import tool

STUDENT = "stories260K"
TEACHER = "bitstories_1M"
STORIES = "tinystories_1000.json"


@dataclass(kw_only=True)
class Args:
    """Compare estimates of the reverse-KL gradient on the student's own texts.

    Args:
        assets: folder with models/ and text/tinystories_1000.json.
        prompts: texts in a batch.
        prompt_tokens: tokens of a story that each text begins with.
        tokens: tokens that the student writes behind them.
        batches: batches of new prompts, each sampled with a seed of its own.
        top_k: numbers of kept tokens, with commas.
    """

    assets: str
    prompts: int = 16
    prompt_tokens: int = 16
    tokens: int = 64
    batches: int = 8
    top_k: str = "1,4,16"


@torch.no_grad()
def write(model, ids, num_tokens, seed):
    """Continue texts by tokens sampled from the model's whole distribution, at temperature 1.

    A text that ends is continued too, as another text.

    Args:
        ids: (B, P) int64.
    Returns:
        (B, P + num_tokens) int64.
    """
    generator = torch.Generator().manual_seed(seed)
    cache = None
    read = ids
    for _ in range(num_tokens):
        out = model(input_ids=read, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        p_BV = out.logits[:, -1].float().softmax(-1)
        read = torch.multinomial(p_BV, 1, generator=generator)
        ids = torch.cat([ids, read], 1)
    return ids


def predictions(model, ids, num_tokens, vocab):
    """Return (B, S, V) float32 logits that predict the last `num_tokens` tokens."""
    return model(input_ids=ids).logits[:, -num_tokens - 1 : -1, :vocab].float()


def sampled_token(student_logits, teacher_logits, next_BS):
    """Return a loss whose gradient is the policy gradient of the sampled tokens."""
    surprise_N = {}
    for name, logits in (("student", student_logits.detach()), ("teacher", teacher_logits)):
        surprise_N[name], _ = losses.next_token_cross_entropy(logits, next_BS, reduction="none")
    # log p / q is what the token costs; the gradient of its log p is minus that of the surprise
    cost_BS = (surprise_N["teacher"] - surprise_N["student"]).view(next_BS.shape)
    return losses.next_token_cross_entropy(student_logits, next_BS, weight_BS=-cost_BS)[0]


def divergence(student_logits, teacher_logits, next_BS, **options):
    """Return the reverse KL, which reads no sampled token but through the positions."""
    return losses.reverse_kl(student_logits, teacher_logits, None, **options)[0]


def estimates(top_k):
    """Return {name: loss}; the last one is exact."""
    table = {"sampled token": sampled_token}
    for k in top_k:
        table[f"top {k} + tail"] = partial(divergence, top_k=k, support="student")
    table["all tokens"] = divergence
    return table


def gradient(model, loss):
    """Return the gradient of a loss with respect to all weights, as one float64 vector."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(loss, weights, retain_graph=True)
    return torch.cat([grad.flatten().double() for grad in grads])


def cosines(student, teacher, prompts, num_tokens, vocab, top_k, seed):
    """Write a batch and return {name of an estimate: cosine of its gradient with the exact one}."""
    ids = write(student, prompts, num_tokens, seed)
    next_BS = ids[:, -num_tokens:]
    with torch.no_grad():
        teacher_logits = predictions(teacher, ids, num_tokens, vocab)
    student_logits = predictions(student, ids, num_tokens, vocab)
    gradients = {}
    for name, loss in estimates(top_k).items():
        gradients[name] = gradient(student, loss(student_logits, teacher_logits, next_BS))
    exact = gradients["all tokens"]
    return {name: torch.cosine_similarity(estimate, exact, dim=0).item()
            for name, estimate in gradients.items()}


def read_prompts(tokenizer, stories, num_tokens):
    """Return (N, P) int64 beginnings of the stories that are long enough."""
    beginnings = []
    for story in stories:
        text = story if isinstance(story, str) else story["text"]
        ids = tokenizer(text, truncation=True, max_length=num_tokens).input_ids
        if len(ids) == num_tokens:
            beginnings.append(ids)
    return torch.tensor(beginnings)


def measure(args):
    """Return {name of an estimate: [cosine of each batch]}."""
    models = Path(args.assets) / "models"
    tokenizer = AutoTokenizer.from_pretrained(models / STUDENT)
    student = AutoModelForCausalLM.from_pretrained(models / STUDENT, dtype=torch.float32).eval()
    teacher = AutoModelForCausalLM.from_pretrained(models / TEACHER, dtype=torch.float32).eval()
    stories = json.loads((Path(args.assets) / "text" / STORIES).read_text())
    num_stories = args.prompts * args.batches
    prompts = read_prompts(tokenizer, stories, args.prompt_tokens)[:num_stories]
    top_k = [int(k) for k in args.top_k.split(",")]
    table = {}
    for seed, batch in enumerate(prompts.split(args.prompts)):
        of_batch = cosines(student, teacher, batch, args.tokens, len(tokenizer), top_k, seed)
        for name, cosine in of_batch.items():
            table.setdefault(name, []).append(cosine)
    return table


def main(args):
    table = measure(args)
    print(f"{'estimate':<16}{'mean':>8}{'least':>8}{'most':>8}   cosine with the exact gradient")
    for name, values in table.items():
        mean = statistics.mean(values)
        print(f"{name:<16}{mean:>8.3f}{min(values):>8.3f}{max(values):>8.3f}")


if __name__ == "__main__":
    tool(Args, main, positional=("assets",))
