import sys; sys.path[:0] = [str(p) for p in (__import__("pathlib").Path(__file__).resolve().parent, __import__("pathlib").Path(__file__).resolve().parents[2])]
import torch, numpy as np; torch.set_num_threads(1)
import benchmarks.square as sq
from isogloss import translation as tr
from isogloss.data.batch import Collator
import torch.nn.functional as F
S,T=sys.argv[1],sys.argv[2]; ROWS=int(sys.argv[3])
kd=sq.TeacherLoss(sq.Run("new",S,T,"piece_kl",1.,1.,3e-3,0,150),1200)
enc=sq.encoder(S); c=Collator(enc,[kd.options]); tab=kd.loss.spelling
if len(sys.argv)>4:
    from joincells import joined
    tab=joined(S,T,tab)
cols=tr.CellColumns.of(tab)
b=[enc.table.bytes_of(i) for i in range(len(enc.table))]
C=tab.num_cells
tsum=np.zeros(C); fsum=np.zeros(C); n=0
kl=[]
for row in range(ROWS):
    truth=np.load(f"runs/truth/{S}-{T}-0/{row}.npz")["ids"]
    batch=c([sq.corpus()["train"][row]])
    of_t=batch.teachers[0]; width=of_t.ids.shape[1]
    logits=F.pad(kd.rows[row][:width].float(),(0,0,0,max(0,width-len(kd.rows[row]))))@kd.head.T
    for tile in of_t.tiles:
      for st in tile.sub_tiles:
        if st.teacher_positions is not None: answers=logits[st.teacher_positions]
        y=answers[st.teacher_slice]; nd=st.terms
        goes=tr.going_on(y,nd.before,tab)
        tgt=tr.root_target(y,nd,goes,tab,cols.columns_W).cell_NC.double().numpy()
        pos=tile.student_positions[st.student_slice][nd.roots.row_S]
        for k in range(len(pos)):
            s=truth[int(pos[k])+1] if int(pos[k])+1<len(truth) else np.array([-1]); s=s[s>=0]
            if not len(s): continue
            cell=tab.cell_V[torch.from_numpy(s)].numpy(); cell=cell[cell<C]
            w=len(s)/8
            tsum+=tgt[k]*w; np.add.at(fsum,cell,w/len(s)); n+=w
d=(tsum-fsum)/n
names={}
for v,cl in enumerate(tab.cell_V.tolist()): names.setdefault(cl,[]).append(b[v])
print(S,T,n,"sum|d|/2",np.abs(d).sum()/2)
for i in np.argsort(-np.abs(d))[:18]: print("  %+.5f target %.5f truth %.5f"%(d[i],tsum[i]/n,fsum[i]/n),names.get(i,[])[:6],len(names.get(i,[])))
