import sys; sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parents[2]))
import torch, numpy as np; torch.set_num_threads(1)
import benchmarks.square as sq
from isogloss import spelling as sp
from isogloss.data.batch import Collator
import torch.nn.functional as F
S,T=sys.argv[1],sys.argv[2]; ROWS=int(sys.argv[3])
kd=sq.TeacherLoss(sq.Run("new",S,T,"piece_kl",1.,1.,3e-3,0,150),1200)
es,et=sq.encoder(S),sq.encoder(T)
W=len(et.table); V=len(es.table)
tb=[et.table.bytes_of(i) if not et.table.special[i] else b"" for i in range(W)]
sb=[es.table.bytes_of(i) if not es.table.special[i] else b"" for i in range(V)]
backend=sp.mid_text_backend(es.tokenizer)
suffix={}
allsuf=sorted({t[o:] for t in tb for o in range(1,len(t))})
for s_,ids in zip(allsuf,sp.encode_bytes(allsuf,backend,es.table)): suffix[s_]=ids[0] if ids else -1
byp={}
for i,t in enumerate(tb):
    for o in range(1,len(t)+1): byp.setdefault(t[:o],[]).append(i)
stats=[];pos_kind=[]
for row in range(ROWS):
    truth=np.load(f"runs/truth/{S}-{T}-0/{row}.npz")["ids"]
    text=sq.corpus()["train"][row]; raw=text.encode()
    it,is_=et.encode([text])[0],es.encode([text])[0]
    lt,ls=et.locate(it,text),es.locate(is_,text)
    lp=(kd.rows[row].float()@kd.head.T).log_softmax(-1).double().numpy()
    bt={int(b):i for i,b in enumerate(lt.begin) if b>=0}
    bs=set(int(b) for b in ls.begin if b>=0)
    common=sorted(set(bt)&bs)
    import bisect
    for i in range(1,len(is_)):
        b=int(ls.begin[i])
        if b<0 or b in bt: continue
        starts=sorted(bt); a=starts[bisect.bisect_right(starts,b)-1]
        j=bt[a]
        part=raw[a:b]
        if a==0 and T=="unigram": part=b" "+part
        # chunk n:m ?
        lo=common[bisect.bisect_right(common,b)-1]
        hi=common[bisect.bisect_right(common,b)] if bisect.bisect_right(common,b)<len(common) else len(raw)
        nt=sum(1 for x in starts if lo<=x<hi)
        kind=1 if nt==1 else 2
        s=truth[i] if i<len(truth) else []; s=s[s>=0]
        if len(s)==0: continue
        q=np.exp(lp[j-1])
        o=len(part); tot=0; m={}; ended=0.
        for w in byp.get(part,[]):
            if len(tb[w])==o: ended+=q[w]; continue
            v=suffix[tb[w][o:]]; m[v]=m.get(v,0)+q[w]
        # anchors before: tokens from a' that cover b
        tot=sum(m.values())+ended
        # earlier anchors
        early={}; acc=0.0
        jj=j; k=starts.index(a)-1
        while k>=0 and b-starts[k]<=16:
            a2=starts[k]; j2=bt[a2]; acc+=lp[j2-1,it[j2]]
            part2=raw[a2:b]; q2=np.exp(lp[j2-1]-acc)
            for w in byp.get(part2,[]):
                if len(tb[w])>len(part2):
                    v=suffix[tb[w][len(part2):]]; early[v]=early.get(v,0)+q2[w]
            k-=1
        own=is_[i]
        te=sum(early.values())
        p1=m.get(own,0)/max(tot,1e-30)
        p2=(m.get(own,0)+early.get(own,0))/max(tot+te,1e-30)
        stats.append((kind,p1,p2,(s==own).mean(),1-ended/max(tot,1e-30),te/(tot+te+1e-30),len(s)))
st=np.array(stats)
for kind in (1,2):
    m=st[:,0]==kind
    print(S,T,"kind",kind,"n",m.sum(),"target of realized %.4f (with earlier %.4f) truth %.4f lambda %.3f early %.3f"%tuple(st[m][:,[1,2,3,4,5]].mean(0)),"survivors",st[m,6].mean())
    for c in (1,2):
        for lo,hi in ((0,.01),(.01,.05),(.05,.2),(.2,.5),(.5,.8),(.8,.95),(.95,1.01)):
            mm=m&(st[:,c]>=lo)&(st[:,c]<hi)
            if mm.sum(): print("   with early" if c==2 else "   ",lo,hi,mm.sum(),"target %.4f truth %.4f"%(st[mm,c].mean(),st[mm,3].mean()))
