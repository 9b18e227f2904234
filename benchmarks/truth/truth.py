"""Sample the student token that comes next from what a teacher says of text: the exact belief.

usage: truth.py STUDENT TEACHER FIRST LAST [K] [SEED]
writes runs/truth/S-T-SEED/{row}.npz: ids [positions, K] (-1: dropped); position i speaks of token i of the row
"""
import sys, time, os, warnings
sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parents[2]))
import numpy as np, torch
torch.set_num_threads(1)
import benchmarks.square as sq
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
S, T = sys.argv[1], sys.argv[2]
FIRST, LAST = int(sys.argv[3]), int(sys.argv[4])
K = int(sys.argv[5]) if len(sys.argv) > 5 else 8
SEED = int(sys.argv[6]) if len(sys.argv) > 6 else 0
J = {"digits": 9, "unigram": 7, "bytes": 6}[T]
OUT = f"runs/truth/{S}-{T}-{SEED}"
os.makedirs(OUT, exist_ok=True)
enc_s, enc_t = sq.encoder(S), sq.encoder(T)
model = sq.teacher(T)
V = len(enc_t.table)
pieces = [enc_t.table.bytes_of(i) if not enc_t.table.special[i] else b"" for i in range(V)]
special = np.array(enc_t.table.special[:V])
by_prefix = {}
for i, p in enumerate(pieces):
    for n in range(len(p)):
        by_prefix.setdefault(p[:n], []).append(i)
by_prefix = {k: np.array(v) for k, v in by_prefix.items()}
EOS = enc_t.table.eos
base = model.model
H = model.config.num_attention_heads
D = base.layers[0].self_attn.head_dim


def main_pass(ids):
    """Return (keys, values a layer [H, n, D], logp [n, V])."""
    keys, values = [], []
    x = base.embed_tokens(ids)
    n = len(ids)
    cos, sin = base.rotary_emb(x[None], torch.arange(n)[None])
    for layer in base.layers:
        h = layer.input_layernorm(x)
        a = layer.self_attn
        q, k, v = [f(h).view(n, H, D).transpose(0, 1) for f in (a.q_proj, a.k_proj, a.v_proj)]
        q, k = apply_rotary_pos_emb(q[None], k[None], cos, sin)
        q, k = q[0], k[0]
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a.o_proj(o.transpose(0, 1).reshape(n, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        keys.append(k), values.append(v)
    return keys, values, model.lm_head(base.norm(x)).log_softmax(-1)


def grow(keys, values, start_N, first_N, generator):
    """Sample J - 1 tokens more behind each (prefix of start tokens, first token)."""
    N = len(first_N)
    n = keys[0].shape[1]
    mask = torch.arange(n)[None] < start_N[:, None]
    mask = torch.where(mask, 0.0, -torch.inf)[None]  # [1, N, n]
    own_k = [[] for _ in base.layers]
    own_v = [[] for _ in base.layers]
    tokens = [first_N]
    token = first_N
    for j in range(J - 1):
        x = base.embed_tokens(token)
        cos, sin = base.rotary_emb(x[:, None], (start_N + j)[:, None])
        for l, layer in enumerate(base.layers):
            h = layer.input_layernorm(x)
            a = layer.self_attn
            q, k, v = [f(h).view(N, H, 1, D) for f in (a.q_proj, a.k_proj, a.v_proj)]
            q, k = apply_rotary_pos_emb(q, k, cos, sin)  # [N, H, 1, D]
            own_k[l].append(k), own_v[l].append(v)
            qh = q[:, :, 0].transpose(0, 1) * D ** -0.5  # H N D
            main = torch.baddbmm(mask.expand(H, -1, -1), qh, keys[l].transpose(1, 2))
            own = torch.cat([(qh * kk[:, :, 0].transpose(0, 1)).sum(-1, keepdim=True) for kk in own_k[l]], -1)
            w = torch.cat([main, own], -1).softmax(-1)
            o = w[..., :n] @ values[l]
            for i, vv in enumerate(own_v[l]):
                o = o + w[..., n + i, None] * vv[:, :, 0].transpose(0, 1)
            x = x + a.o_proj(o.transpose(0, 1).reshape(N, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = model.lm_head(base.norm(x))
        noise = torch.empty_like(logits).exponential_(generator=generator).log()
        token = (logits - noise).argmax(-1)
        tokens.append(token)
    return torch.stack(tokens, 1)


@torch.no_grad()
def do(row):
    path = f"{OUT}/{row}.npz"
    if os.path.exists(path):
        return
    text = sq.corpus()["train"][row]
    raw = text.encode()
    generator = torch.Generator().manual_seed(SEED * 100003 + row)
    rng = np.random.default_rng(SEED * 100003 + row)
    ids_t, ids_s = enc_t.encode([text])[0][: sq.MAX_LENGTH], enc_s.encode([text])[0][: sq.MAX_LENGTH]
    loc_t, loc_s = enc_t.locate(ids_t, text), enc_s.locate(ids_s, text)
    keys, values, logp = main_pass(torch.from_numpy(ids_t))
    logp = logp.double().numpy()
    boundaries = {}  # byte -> index of teacher token that begins there
    for i in range(1, len(ids_t)):
        b = loc_t.begin[i] if loc_t.begin[i] >= 0 else len(raw)
        boundaries.setdefault(int(b), i)
    starts, firsts, owners = [], [], []
    positions = []
    has_space = T == "unigram"
    for i in range(1, len(ids_s)):
        b = int(loc_s.begin[i]) if loc_s.begin[i] >= 0 else len(raw)
        cands, weights, at = [], [], []

        anchors = [a for a in range(max(0, b - 24), b + 1) if a in boundaries]

        acc = 0.0
        last = None
        for a in anchors:
            idx = boundaries[a]
            if last is not None:
                acc += logp[last:idx, :][np.arange(idx - last), ids_t[last + 0:idx + 0]].sum() if False else sum(
                    logp[j - 1, ids_t[j]] for j in range(last, idx))
            last = idx
            lp = logp[idx - 1]
            if a == b:
                t = np.arange(V)
            else:
                key = raw[a:b]
                if has_space and a == 0:
                    key = b" " + key
                t = by_prefix.get(key)
                if t is None:
                    continue
            cands.append(t), weights.append(acc + lp[t]), at.append(np.full(len(t), idx))
        if not cands:
            continue
        cands, weights, at = map(np.concatenate, (cands, weights, at))
        p = np.exp(weights - weights.max())
        c = np.cumsum(p) / p.sum()
        chosen = np.searchsorted(c, (rng.random() + np.arange(K)) / K).clip(max=len(c) - 1)
        starts += at[chosen].tolist()
        firsts += cands[chosen].tolist()
        positions.append(i)
        owners += [b] * K
    tokens = grow(keys, values, torch.tensor(starts), torch.tensor(firsts), generator).numpy()
    # texts
    texts, index_b = [], []
    begin_of = {v: k for k, v in boundaries.items()}
    for start, b, toks in zip(starts, owners, tokens):
        a = begin_of[start]
        out = raw[:a]
        ended = False
        for n, t in enumerate(toks):
            if special[t]:
                ended = True
                break
            piece = pieces[t]
            if has_space and a == 0 and n == 0 and piece[:1] == b" ":
                piece = piece[1:]
            out += piece
        texts.append((out.decode(errors="ignore"), ended, len(out)))
    coded = enc_s.encode([t for t, _, _ in texts])
    result = np.full((len(ids_s), K), -1, np.int64)
    dropped = 0
    for n, ((string, ended, size), ids, b) in enumerate(zip(texts, coded, owners)):
        i = positions[n // K]
        if len(ids) <= i:
            dropped += 1
            continue
        lens = enc_s.table.lengths[ids]
        same = (ids[:i] == ids_s[:i]).all()
        if not same:
            dropped += 1
            continue
        if ids[i] == enc_s.table.eos and not ended:
            dropped += 1
            continue
        result[i, n % K] = ids[i]
    np.savez(path + ".part.npz", ids=result)
    os.rename(path + ".part.npz", path)
    return dropped / max(len(texts), 1)


if __name__ == "__main__":
    begin = time.time()
    for row in range(FIRST, LAST):
        d = do(row)
        if row % 20 == 0:
            print(row, d, round(time.time() - begin, 1), flush=True)
