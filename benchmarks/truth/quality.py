import sys; sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parents[2]))
import torch, torch.nn.functional as F
from benchmarks import square as s
from isogloss import losses, translation as tr
from isogloss.data.batch import Collator
torch.set_num_threads(1)
S,T=sys.argv[1:3]; part=sys.argv[3]; N=int(sys.argv[4])
pair=s.TeacherLoss(s.Run("new",S,T,"piece_kl",1.,1.,3e-3,0,150),1200)
tab=pair.loss.spelling; cc=tr.CellColumns.of(tab)
col=Collator(s.encoder(S),[pair.options])
st=s.fresh("student",S,0); st.load_state_dict(s.first_weights(S,0)); st.eval()
n=0; a=b=c=ins_a=ins_b=ch_a=0; ni=0; neg=0; hard=[]
with torch.no_grad():
  for text in s.corpus()[part][:N]:
    batch=col([text])
    own=s.teacher(S)(input_ids=batch.student.ids).logits.flatten(0,1).log_softmax(-1)
    stu=st(input_ids=batch.student.ids).logits.flatten(0,1).log_softmax(-1)
    other=s.teacher(T)(input_ids=batch.teachers[0].ids).logits.flatten(0,1)[:, :len(s.encoder(T).table)]
    for tile in batch.teachers[0].tiles:
        for sub in tile.sub_tiles:
            if sub.teacher_positions is not None: ans=other[sub.teacher_positions]
            y=ans[sub.teacher_slice]; nd=sub.terms; pos=tile.student_positions[sub.student_slice]
            goes=tr.going_on(y,nd.before,tab)
            tgt=tr.root_target(y,nd,goes,tab,cc.columns_W).cell_NC
            cell=tab.cell_V[nd.roots.next_S]; ok=cell<tab.num_cells
            r=pos[nd.roots.row_S]
            za=tgt.clamp(min=1e-9).log().gather(1,cell.clamp(max=tab.num_cells-1)[:,None])[:,0]
            def mass(lp): 
                m=losses.log_masses(lp[r],cc.columns_V); m=m-m.logsumexp(-1,keepdim=True); return m.gather(1,cell.clamp(max=tab.num_cells-1)[:,None])[:,0]
            zb=mass(own); zc=mass(stu)
            a-=za[ok].sum().item(); b-=zb[ok].sum().item(); c-=zc[ok].sum().item(); n+=int(ok.sum())
            hard+=(za-zb)[ok].tolist()
            if len(nd.insides.row_S):
                nx=sub.student_labels[nd.insides.row_S]
                q=tr.inside_question(torch.zeros(len(nd.insides.token_G)),y,torch.zeros(len(nd.insides.row_S)),nd.insides,tab).target_KG
                for k in range(len(nx)):
                    g=[j for j in range(len(nd.insides.token_G)) if int(nd.insides.cells.nodes.of_E[j])==k]
                    slot=[i for i,j in enumerate(g) if int(nd.insides.token_G[j])==int(nx[k])]
                    i=slot[0]+1 if slot else 0
                    ins_a-=float(q[k,i].clamp(min=1e-9).log())
                    lo=own[pos[nd.insides.row_S[k]]]
                    toks=nd.insides.token_G[g]
                    p=lo[int(nx[k])] if slot else torch.log((1-lo[toks].exp().sum()).clamp(min=1e-9))
                    ins_b-=float(p); ni+=1
h=torch.tensor(hard)
print(S,"<-",T,part,"roots",n,"NLL: translated %.4f, equal teacher %.4f, student before %.4f"%(a/n,b/n,c/n),"quantiles of difference",[round(float(x),2) for x in h.quantile(torch.tensor([.001,.01,.1,.5,.9,.99,.999]))], "insides",ni,"translated %.4f equal %.4f"%(ins_a/max(ni,1),ins_b/max(ni,1)))
