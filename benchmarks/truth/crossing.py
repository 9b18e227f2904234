import sys; sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parents[2]))
import torch, numpy as np; torch.set_num_threads(1)
import benchmarks.square as sq
from isogloss import translation as tr, spelling as sp
from isogloss.data.batch import Collator
import torch.nn.functional as F
S,T=sys.argv[1],sys.argv[2]; ROWS=int(sys.argv[3])
kd=sq.TeacherLoss(sq.Run("new",S,T,"piece_kl",1.,1.,3e-3,0,150),1200)
enc,et=sq.encoder(S),sq.encoder(T)
tab=kd.loss.spelling
closed=tab.closed_V.clone()
tab.closed_V.fill_(-1)
c=Collator(enc,[kd.options]); cols=tr.CellColumns.of(tab)
W=len(et.table); tb=[et.table.bytes_of(i) if not et.table.special[i] else b"" for i in range(W)]
V=len(enc.table); sb=[enc.table.bytes_of(i) if not enc.table.special[i] else b"" for i in range(V)]
backend=sp.mid_text_backend(enc.tokenizer)
cache={}
def assign(P,scope_key,cells):
    """(W,) cell of each teacher token behind P by longest match, by spelling; -1 none."""
    key=(P,scope_key)
    if key in cache: return cache[key]
    of={sb[v]:g for v,g in cells.items()}
    longer={}
    for v,g in cells.items():
        for n in range(len(P),len(sb[v])): longer.setdefault(sb[v][:n],g)
    texts=[P+w for w in tb]
    spelled=sp.encode_bytes(texts,backend,enc.table)
    A=np.full(W,-1);B=np.full(W,-1)
    stop=of.get(P,-1)
    for w in range(W):
        t=texts[w]
        if not tb[w]: A[w]=B[w]=stop; continue
        if t in longer and t not in of or t in longer: 
            A[w]=B[w]=longer[t]; continue
        for n in range(len(t),len(P)-1,-1):
            if t[:n] in of: A[w]=of[t[:n]]; break
        f=spelled[w][0] if spelled[w] else -1
        B[w]=cells.get(f,-1)
    cache[key]=(A,B)
    return A,B
rec=[]
for row in range(ROWS):
    truth=np.load(f"runs/truth/{S}-{T}-0/{row}.npz")["ids"]
    batch=c([sq.corpus()["train"][row]])
    of_t=batch.teachers[0]; width=of_t.ids.shape[1]
    states=F.pad(kd.rows[row][:width].float(),(0,0,0,max(0,width-len(kd.rows[row]))))
    logits=states@kd.head.T
    for tile in of_t.tiles:
      for st in tile.sub_tiles:
        if st.teacher_positions is not None: answers=logits[st.teacher_positions]
        y=answers[st.teacher_slice]; nd=st.terms
        if not len(nd.choices.level): continue
        probs=y.softmax(-1).double().numpy()
        goes=tr.going_on(y,nd.before,tab)
        tgt=tr.root_target(y,nd,goes,tab,cols.columns_W)
        ch=nd.choices
        q=tr.choice_question(torch.zeros(len(ch.token_E)),y,log_total_M=y.logsumexp(-1),target=tgt,goes=goes,choices=ch).target_KG
        pos=tile.student_positions[st.student_slice][nd.roots.row_S]
        start=ch.cells.nodes.start_K; tok_cell=ch.tokens.of_E
        for k in range(len(ch.level)):
            r=int(ch.roots.of_E[k]); i=int(pos[r])+1; own_v=int(nd.roots.next_S[r]); lev=int(ch.level[k])
            is_closed=(int(closed[own_v])>>(lev-1))&1
            s=truth[i]; s=s[s>=0]
            g0,g1=int(start[k]),int(start[k+1])
            sel=(tok_cell>=g0)&(tok_cell<g1)
            mp={int(t):int(g)-g0 for t,g in zip(ch.token_E[sel],tok_cell[sel])}
            cs=[mp[int(t)] for t in s if int(t) in mp]
            if not cs: continue
            own=mp[own_v]; cs=np.array(cs)
            P=b"".join(tb[int(p)] for p in tab.pieces_V[own_v][:lev])
            G=g1-g0
            q0=q[k,:G].double().numpy()
            stop=mp.get(next((v for v in mp if sb[v]==P),-1),-1)
            qs={}
            along=ch.row_T[k]>=0
            if along and not is_closed:
                A,B=assign(P,tuple(sorted(mp.items())),mp)
                pr=probs[int(ch.row_T[k])]
                split0=np.zeros(G); 
                node_of=slice(g0,g1)
                nx=ch.next_G[node_of].numpy()
                for g in range(G):
                    if nx[g]>=0: split0[g]=pr[nx[g]]
                rest=max(1-split0.sum(),1e-9)
                for g in range(G):
                    if nx[g]<0: split0[g]=rest
                split0/=split0.sum()
                for name,M in (("longest",A),("spelled",B)):
                    d=np.bincount(M+1,pr,G+1)[1:]; d=d/d.sum() if d.sum()>0 else split0
                    # keep the part of q0 that is not split (how the token before goes on)
                    qs[name]=d
            else: qs={"longest":q0,"spelled":q0}
            fr=np.bincount(cs,minlength=G)/len(cs)
            rec.append((is_closed,P,len(cs),stop,q0,qs["longest"],qs["spelled"],fr,bool(along)))
import collections
def report(name,sel):
    R=[r for r in rec if sel(r)]
    if not R: return
    out=[]
    for col in (4,5,6):
        by=collections.defaultdict(lambda:[0,None,None])
        for r in R:
            e=by[r[1],len(r[7])]; e[0]+=1
            e[1]=r[col].copy() if e[1] is None else e[1]+r[col]; e[2]=r[7].copy() if e[2] is None else e[2]+r[7]
        tv=sum(np.abs(e[1]-e[2]).sum()/2 for e in by.values())/len(R)
        out.append(tv)
    st=[r for r in R if r[3]>=0]
    ms=[np.mean([r[c][r[3]] for r in st]) for c in (4,5,6,7)]
    noise=0
    print(S,T,name,len(R),"TV by path: now %.4f longest %.4f spelled %.4f"%tuple(out),"stop: now %.4f longest %.4f spelled %.4f truth %.4f"%tuple(ms))
    if True:
        by=collections.defaultdict(list)
        for r in R: by[r[1],len(r[7])].append(r)
        for p,l in sorted(by.items(),key=lambda x:-len(x[1]))[:16]:
            stp=l[0][3]
            if stp<0: continue
            print("    ",p,len(l),"stop now %.3f longest %.3f spelled %.3f truth %.3f along %.2f"%(*[np.mean([r[c][stp] for r in l]) for c in (4,5,6,7)],np.mean([r[8] for r in l])))
report("closed",lambda r:r[0]==1); report("open",lambda r:r[0]==0); report("open along",lambda r:r[0]==0 and r[8])
