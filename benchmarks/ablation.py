import torch
from functools import partial
from isogloss import losses, translation as tr
from isogloss.objective import loss_table as lt
from isogloss.projection_tools.spell import cached_spelling

def nothing(goes):
    return goes._replace(mass_K=torch.zeros_like(goes.mass_K), ends_K=torch.ones_like(goes.ends_K))

def variant(x, y, nodes, tables, weight_BS=None, labels=None, chunk_S=None, *, lam=True, join=True, choices=2, inside="rest", rests=True,
            events=None, soft=None, roots=True, longer=True):
    x_NV = losses.at_least_float32(x.flatten(0, 1)); y_MW = losses.at_least_float32(y.detach().flatten(0, 1))
    compare = partial(tr.compare_cells, losses.forward_kl, 1.0, {})
    goes = tr.going_on(y_MW, nodes.before, tables)
    if not lam: goes = nothing(goes)
    if not join:
        old = tr._mask_joined; tr._mask_joined = lambda *a: None
    target = tr.root_target(y_MW, nodes, goes, tables)
    if not join: tr._mask_joined = old
    x_root, answers = tr._read(x_NV, y_MW, nodes)
    if soft is not None:
        q_NW = y_MW[nodes.roots.row_T].softmax(-1)
        w_E, c_E, r_E = soft
        cell = q_NW.new_zeros(len(q_NW), tables.num_cells + 1).index_add(1, c_E, q_NW[:, w_E] * r_E)
        cell = cell * goes.ends_K[:, None]
        root_E = goes.nodes.of_E
        place = root_E * cell.shape[1] + tables.cell_V[goes.next_E.clamp(min=0)]
        cell.view(-1).index_put_((place,), goes.mass_K[root_E] * goes.mass_E, accumulate=True)
        cell = cell[:, :-1]
        target = target._replace(cell_NC=cell / cell.sum(1, keepdim=True).clamp(min=1e-30))
    if events is None:
        value_N = tr.root_values(x_root, target.cell_NC, tables.cell_V, compare)
    else:
        sp = events
        both = []
        for rows, ev in ((x_root, sp.event_V), (y_MW[nodes.roots.row_T], sp.event_W)):
            e = torch.where(ev < 0, sp.num_events, ev).long()
            both.append(losses.log_masses(rows, e, sp.num_events).log_softmax(-1))
        value_N = losses.divergence_of("forward_kl", *both)
    if not roots: value_N = 0 * value_N
    ch, ins, rs = nodes.choices, nodes.insides, nodes.rests
    sizes = [len(ch.token_E), len(ins.token_G), len(rs.row_S)]
    x_scope, x_inside, x_many = torch.split(answers.x_E, sizes)
    rest_inside, rest_many = torch.split(answers.rest_L, [len(ins.row_S), len(rs.row_S)])
    choice_K = inside_K = rest_M = answers.x_E.new_zeros(0)
    if len(ch.level):
        q = tr.choice_question(x_scope, y_MW, log_total_M=answers.log_total_M, target=target, goes=goes, choices=ch)
        if isinstance(choices, str):
            v = labels[nodes.roots.row_S]
            L_K = (tables.pieces_V[v] >= 0).sum(1)[ch.roots.of_E]
            goes_on = (ch.level < L_K) & (ch.row_T >= 0); ends = (ch.level == L_K) & (ch.row_T >= 0)
            stop = ch.cells.rows((ch.next_G < 0).float(), 0.0)
            used = ch.cells.rows(torch.ones(len(ch.next_G)), 0.0)
            t = q.target_KG
            tg = t * (1 - stop); tg = tg / tg.sum(1, keepdim=True).clamp(min=1e-30)
            t = torch.where(goes_on[:, None], tg, t)
            has_stop = stop.sum(1) > 0
            t = torch.where((ends & has_stop)[:, None], stop, t)
            x_l = q.logits_KG
            if "cond" in choices:  # event_kl: the student among those that go on
                x_l = torch.where(goes_on[:, None] & (stop > 0), torch.full_like(x_l, losses.FLOOR), x_l)
            q = q._replace(target_KG=t, logits_KG=x_l)
            choice_K = compare(q.logits_KG, q.logq_KG())
            keep = torch.ones_like(L_K, dtype=torch.bool)
            if "nostop" in choices: keep &= ~ends
            if "nolonger" in choices: keep &= ch.row_T >= 0
            choice_K = choice_K * keep
        else:
            choice_K = compare(q.logits_KG, q.logq_KG())
            if not choices: choice_K = 0 * choice_K
            if choices == 1:
                size = torch.bincount(chunk_S[chunk_S >= 0])
                choice_K = choice_K * (size[chunk_S[nodes.roots.row_S]] == 1)[ch.roots.of_E]
    if len(ins.row_S):
        q = tr.inside_question(x_inside, y_MW, rest_inside, ins, tables)
        t = q.target_KG
        if inside == "cond":
            t = t.clone(); t[:, 0] = 0; t = t / t.sum(1, keepdim=True).clamp(min=1e-30)
            x_l = q.logits_KG.clone(); x_l[:, 0] = losses.FLOOR
            q = q._replace(logits_KG=x_l)
        if inside == "goes":  # full student softmax, target: it goes on
            t = t.clone(); t[:, 0] = 0; t = t / t.sum(1, keepdim=True).clamp(min=1e-30)
        q = q._replace(target_KG=t)
        inside_K = compare(q.logits_KG, q.logq_KG())
        if inside == "none": inside_K = 0 * inside_K
    if len(rs.row_S):
        logq = losses.at_least_float32(y_MW[rs.row_T, rs.next_T]) - answers.log_total_M[rs.row_T]
        rest_M = tr._rests(x_many - rest_many, logq, rs, 1.0)
        if not rests: rest_M = 0 * rest_M
    value_N = value_N + ch.roots.sum(choice_K)
    value_A = torch.cat([value_N, inside_K, rest_M])[nodes.order_A]
    return losses.reduce_terms(value_A, nodes.row_A, x.shape[:2], weight_BS, "sum")

def build(cfg, pair, device, has_rest=False, **options):
    tables = lt.Tables(**{n: lt.as_index(v) for n, v in lt.translation_fields(pair).items()})
    if options.pop("merged", False):
        t = cached_spelling(pair); E = int(t["num_events"])
        tables = tables._replace(cell_V=torch.where(t["event_V"] < 0, E, t["event_V"]).long(), cell_W=torch.where(t["event_W"] < 0, E, t["event_W"]).long(), num_cells=E)
    if options.get("events"):
        t = cached_spelling(pair)
        options["events"] = lt.Spelling(**{n: lt.as_index(t[n]) for n in lt.Spelling._fields})
    if options.get("soft"):
        from benchmarks import square
        a, b = [n.rsplit("tokenizer-", 1)[1] for n in (cfg.student, cfg.teacher)]
        w, v, num = torch.load(square.RUNS / f"soft-{a}-{b}.pt")
        C = tables.num_cells; W = len(tables.cell_W)
        keys = torch.cat([w * (C + 1) + tables.cell_V[v], torch.arange(W) * (C + 1) + tables.cell_W])
        nums = torch.cat([num.float(), torch.full((W,), 1.0)])
        key, inv = keys.unique(return_inverse=True)
        n = torch.zeros(len(key)).index_add(0, inv, nums)
        w_E, c_E = key // (C + 1), key % (C + 1)
        r_E = n / torch.zeros(W).index_add(0, w_E, n)[w_E]
        options["soft"] = (w_E, c_E, r_E)
    def loss_fn(s, t, sub):
        return variant(s[None], t[None], sub.terms, tables, None if sub.weight is None else sub.weight[None], sub.student_labels, sub.student_chunk, **options)[0]
    return lt.DistillationLoss(loss_fn, tables)

VARIANTS = {
 "v0": {}, "hind": dict(lam=False, inside="goes"), "hindnj": dict(lam=False, inside="goes", join=False),
 "hindnjev": dict(lam=False, inside="goes", join=False, events=True), "ev": dict(events=True),
 "nolam": dict(lam=False), "insgoes": dict(inside="goes"), "nojoin": dict(join=False), "nochoice": dict(choices=False), "norest": dict(rests=False),
 "hindnjevnc": dict(lam=False, inside="goes", join=False, events=True, choices=False),
 "evnc": dict(events=True, choices=False), "hindnc": dict(lam=False, inside="goes", choices=False), "hindnjnc": dict(lam=False, inside="goes", join=False, choices=False),
 "nojoinnc": dict(join=False, choices=False), "nolamnc": dict(lam=False, choices=False), "insgoesnc": dict(inside="goes", choices=False),
 "Bsoft": dict(inside="goes", choices=False, soft=True), "Bnj": dict(inside="goes", choices=False, join=False), "Bcond": dict(inside="goes", choices="nostop nolonger cond"),
 "Bsoftnl": dict(inside="goes", choices=False, soft=True, lam=False),
 "Bi": dict(inside="cond", choices=False), "Bicond": dict(inside="cond", choices="nostop nolonger cond"),
 "M": dict(inside="goes", choices=False, merged=True), "Mcond": dict(inside="goes", choices="nostop nolonger cond", merged=True), "Mi": dict(inside="cond", choices=False, merged=True),
 "Mnl": dict(inside="goes", choices=False, merged=True, lam=False), "Mnj": dict(inside="goes", choices=False, merged=True, join=False), "Mch": dict(inside="goes", merged=True), "Mns": dict(inside="goes", merged=True, choices="nostop nolonger"),
 "Mhc": dict(inside="goes", merged=True, choices="goes"), "Mhcnl": dict(inside="goes", merged=True, choices="goes nolonger"),
 "Mp": dict(choices=False, merged=True), "Mpcond": dict(choices="nostop nolonger cond", merged=True), "Mpall": dict(merged=True),
 "Mp1": dict(merged=True, choices=1), 
 "hc": dict(inside="goes", choices="goes"), "hcns": dict(inside="goes", choices="nostop"), "hcnl": dict(inside="goes", choices="nolonger"),
 "hcnsnl": dict(inside="goes", choices="nostop nolonger"), "hccond": dict(inside="goes", choices="nostop nolonger cond"),
 "noinside": dict(inside="none"), "noroots": dict(roots=False),
}
def add():
    for name, options in VARIANTS.items():
        lt.LOSSES[name] = lt.LossSpec(partial(build, **options), "spellings")
