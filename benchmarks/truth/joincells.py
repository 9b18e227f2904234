import sys; sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parents[2]))
import numpy as np, torch
from benchmarks import square as s
from isogloss import spelling as sp
def joined(S,T,tab,most=10**9):
    es,et=s.encoder(S),s.encoder(T)
    V,W=len(es.table),len(et.table)
    sb=[es.table.bytes_of(i) if not es.table.special[i] else b"" for i in range(V)]
    tb=[et.table.bytes_of(i) if not et.table.special[i] else b"" for i in range(W)]
    bs,bt=sp.mid_text_backend(es.tokenizer),sp.mid_text_backend(et.tokenizer)
    C=tab.num_cells; cv,cw=tab.cell_V.tolist(),tab.cell_W.tolist()
    of={}
    for t,x in enumerate(tb):
        if x and cw[t]<C: of.setdefault(x,t)
    byp={}
    for w,x in enumerate(tb):
        for n in range(1,len(x)+1): byp.setdefault(x[:n],[]).append(w)
    cand=[];texts=[]
    for v,x in enumerate(sb):
        if not x or cv[v]>=C: continue
        for n in range(1,len(x)):
            t=of.get(x[:n])
            if t is None: continue
            for w in byp.get(x[n:],[])[:most]:
                cand.append((t,w,v)); texts.append(tb[t]+tb[w])
    a=sp.encode_bytes(texts,bs,es.table); b=sp.encode_bytes(texts,bt,et.table)
    parent=list(range(C+1))
    def find(i):
        while parent[i]!=i: parent[i]=parent[parent[i]]; i=parent[i]
        return i
    num=0; ex=[]
    for (t,w,v),x,y in zip(cand,a,b):
        if x and x[0]==v and y and tb[y[0]]==tb[t] and cw[y[0]]<C:
            i,j=find(cw[y[0]]),find(cv[v])
            if i!=j: parent[max(i,j)]=min(i,j); num+=1; ex.append((tb[t],sb[v],tb[w]))
    roots=sorted({find(i) for i in range(C)}); number={r:k for k,r in enumerate(roots)}
    m=torch.tensor([number[find(i)] for i in range(C)]+[len(roots)])
    print(S,T,"candidates",len(cand),"cells",C,"->",len(roots),ex[:12],flush=True)
    return tab._replace(cell_V=m[tab.cell_V],cell_W=m[tab.cell_W],num_cells=len(roots))
