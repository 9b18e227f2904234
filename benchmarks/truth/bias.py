import sys; sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parents[2]))
import torch, numpy as np; torch.set_num_threads(1)
import benchmarks.square as sq
from isogloss import translation as tr
from isogloss.data.batch import Collator
import torch.nn.functional as F
S,T=sys.argv[1],sys.argv[2]; ROWS=int(sys.argv[3])
run=sq.Run("new",S,T,"piece_kl",1.,1.,3e-3,0,150)
kd=sq.TeacherLoss(run,1200)
enc=sq.encoder(S)
c=Collator(enc,[kd.options])
import inspect
spell=kd.loss.spelling
tables=None
for o in (kd.loss, spell):
    for n in dir(o):
        if n.startswith("__"): continue
        v=getattr(o,n)
        if type(v).__name__=="Tables": tables=v; print("tables at",type(o),n)
out=[]
def b(i): return enc.table.bytes_of(int(i))
stats=[]
ce_t=0;n=0
for row in range(ROWS):
    path=f"runs/truth/{S}-{T}-0/{row}.npz"
    truth=np.load(path)["ids"]
    batch=c([sq.corpus()["train"][row]])
    (tile,)=batch.teachers[0].tiles[:1] if len(batch.teachers[0].tiles)==1 else (None,)
    if tile is None: continue
    of_t=batch.teachers[0]; width=of_t.ids.shape[1]
    states=F.pad(kd.rows[row][:width].float(),(0,0,0,max(0,width-len(kd.rows[row]))))
    logits=states@kd.head.T
    for st in tile.sub_tiles:
        if st.teacher_positions is not None: answers=logits[st.teacher_positions]
        y=answers[st.teacher_slice]
        nd=st.terms
        nodes=nd if type(nd).__name__=="Nodes" else nd.nodes
        tab=tables
        goes=tr.going_on(y,nodes.before,tab)
        cols=tr.CellColumns.of(tab)
        tgt=tr.root_target(y,nodes,goes,tab,cols.columns_W).cell_NC
        pos=tile.student_positions[st.student_slice][nodes.roots.row_S]  # position t predicts token t+1
        for k in range(len(pos)):
            i=int(pos[k])+1
            s=truth[i]; s=s[s>=0]
            if len(s)==0: continue
            own=int(nodes.roots.next_S[k])
            cell=tab.cell_V[torch.from_numpy(s)].numpy(); oc=int(tab.cell_V[own])
            q=tgt[k].numpy()
            q=np.append(q,0) if len(q)<=tab.num_cells else q
            stats.append((q[oc] if oc<len(q) else 0,(cell==oc).mean(),len(s),np.log(np.maximum(q[np.minimum(cell,len(q)-1)],1e-12)).mean(),i,row,own,int(nodes.roots.ended_T[k]),nodes.before.level[k].item()))
st=np.array([x[:5] for x in stats],float)
print(S,T,"roots",len(st),"mean mass of realized cell: target %.4f truth %.4f; CE of truth under target %.4f"%(st[:,0].mean(),st[:,1].mean(),-st[:,3].mean()))
for lo,hi in ((0,.01),(.01,.05),(.05,.2),(.2,.5),(.5,.8),(.8,.95),(.95,1.01)):
    m=(st[:,0]>=lo)&(st[:,0]<hi)
    print(f"  target of realized in [{lo},{hi}): n {m.sum():5d} target {st[m,0].mean():.4f} truth {st[m,1].mean():.4f}  CE {-st[m,3].mean():.3f} survivors {st[m,2].mean():.1f}")
ended=np.array([x[7]>=0 for x in stats])
space=np.array([b(x[6])[:1] in (b" ",b"\n") for x in stats])
for name,m in (("after ended, space",ended&space),("after ended, mid",ended&~space),("no ended, space",~ended&space),("no ended, mid",~ended&~space)):
    print(f"  {name}: n {m.sum()} target {st[m,0].mean():.4f} truth {st[m,1].mean():.4f} CE {-st[m,3].mean():.3f} survivors {st[m,2].mean():.1f}")
np.save(f"runs/truth/bias-{S}-{T}.npy",st)
