import sys; sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parents[2]))
import torch, numpy as np; torch.set_num_threads(1)
import benchmarks.square as sq
from isogloss import translation as tr
from isogloss.data.batch import Collator
import torch.nn.functional as F
S,T=sys.argv[1],sys.argv[2]; ROWS=int(sys.argv[3]); ALL=len(sys.argv)>4
kd=sq.TeacherLoss(sq.Run("new",S,T,"piece_kl",1.,1.,3e-3,0,150),1200)
enc=sq.encoder(S)
tab=kd.loss.spelling
closed=tab.closed_V.clone()
if ALL:
    tab.closed_V.fill_(-1)
    print("same object", kd.options is not None)
c=Collator(enc,[kd.options])
cols=tr.CellColumns.of(tab)
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
        goes=tr.going_on(y,nd.before,tab)
        tgt=tr.root_target(y,nd,goes,tab,cols.columns_W)
        ch=nd.choices
        x_E=torch.zeros(len(ch.token_E))
        q=tr.choice_question(x_E,y,log_total_M=y.logsumexp(-1),target=tgt,goes=goes,choices=ch).target_KG
        pos=tile.student_positions[st.student_slice][nd.roots.row_S]
        node_of_cell=ch.cells.nodes.of_E; start=ch.cells.nodes.start_K
        tok_cell=ch.tokens.of_E
        for k in range(len(ch.level)):
            r=int(ch.roots.of_E[k]); i=int(pos[r])+1
            s=truth[i]; s=s[s>=0]
            g0,g1=int(start[k]),int(start[k+1])
            sel=(tok_cell>=g0)&(tok_cell<g1)
            mp={int(t):int(g)-g0 for t,g in zip(ch.token_E[sel],tok_cell[sel])}
            cs=[mp[int(t)] for t in s if int(t) in mp]
            own=mp[int(nd.roots.next_S[r])]
            is_closed=(int(closed[nd.roots.next_S[r]])>>(int(ch.level[k])-1))&1
            # stop cell: next_G == -1
            stop=[g for g in range(g1-g0) if int(ch.next_G[g0+g])==-1]
            stop=stop[0] if stop else -1
            rec.append((is_closed,float(q[k,own]),np.mean(np.array(cs)==own) if cs else np.nan,len(cs),float(q[k,stop]) if stop>=0 else np.nan,np.mean(np.array(cs)==stop) if cs and stop>=0 else np.nan,int(ch.level[k]),float(ch.row_T[k]>=0), own==stop))
a=np.array(rec,float)
for cl in (1,0):
    m=(a[:,0]==cl)&(a[:,3]>0); 
    if not m.sum(): continue
    w=a[m,3]
    av=lambda col,mm=m: np.nansum(a[mm,col]*a[mm,3])/np.nansum(a[mm,3]*~np.isnan(a[mm,col]))
    print(S,T,"closed" if cl else "open","n",m.sum(),"of",(a[:,0]==cl).sum(),"samples",w.sum(),"realized: target %.4f truth %.4f; stop: target %.4f truth %.4f"%(av(1),av(2),av(4),av(5)))
    for own in (1,0):
        mm=m&(a[:,8]==own)
        if mm.sum(): print("     realized is stop" if own else "     realized goes on",mm.sum(),"target %.4f truth %.4f"%(av(1,mm),av(2,mm)))
    for lo,hi in ((0,.05),(.05,.2),(.2,.5),(.5,.8),(.8,.95),(.95,1.01)):
        mm=m&(a[:,1]>=lo)&(a[:,1]<hi)
        if mm.sum(): print("     realized",lo,hi,mm.sum(),"target %.4f truth %.4f"%(av(1,mm),av(2,mm)))
    for lo,hi in ((0,.05),(.05,.2),(.2,.5),(.5,.8),(.8,.95),(.95,1.01)):
        mm=m&(a[:,4]>=lo)&(a[:,4]<hi)
        if mm.sum(): print("     stop",lo,hi,mm.sum(),"target %.4f truth %.4f"%(av(4,mm),av(5,mm)))
