"""diag.py SPEC...: SPEC = student:other:mode:seed; equal teacher restricted to what the other tokenizer would tell. modes: full, roots (tokens at roots), cells (cells at roots), told (cells at roots + insides tokens + choices exact within cell if closed)"""
import sys,time,json; sys.path[:0] = [str(p) for p in (__import__("pathlib").Path(__file__).resolve().parent, __import__("pathlib").Path(__file__).resolve().parents[2])]
import torch, torch.nn.functional as F
from benchmarks import square as s
from isogloss import losses, translation as tr
torch.set_num_threads(1)
CACHE={}
ROWS=1200
from joincells import joined
class Diag:
    def __init__(self, kind, other, mode):
        self.pair=s.TeacherLoss(s.Run("new",kind,other,"piece_kl",1.,1.,3e-3,0,150),1200)
        self.kinds=(kind,other); self.options=self.pair.options; self.mode=mode; self.seconds=0
        self.tab=self.pair.loss.spelling
        self.flags=mode[5:] if mode.startswith("trans") else ""
        if mode.startswith("trans"): self.mode="trans"
        if "M" in self.flags:
            from isogloss import spelling as sp
            self.sp=sp; self.back=sp.mid_text_backend(s.encoder(kind).tokenizer); self.cache={}
            self.table=s.encoder(kind).table; ot=s.encoder(other).table
            self.tb=[ot.bytes_of(i) if not ot.special[i] else b"" for i in range(len(ot))]
            self.sb=[self.table.bytes_of(i) if not self.table.special[i] else b"" for i in range(len(self.table))]
        if mode.endswith("J"):
            self.tab=joined(kind,other,self.tab)
            if not mode.startswith('trans'): self.mode=mode=mode[:-1]
        self.cols=tr.CellColumns.of(self.tab).columns_V
        self.rows,_=s.hidden(kind,1200)
        self.head=s.teacher(kind).get_output_embeddings().weight.detach()[:len(s.encoder(kind).table)]
    def masked(self, yt, nd, batch, root):
        yt=yt.clone(); ids=batch.student.ids.flatten().tolist(); W=batch.student.ids.shape[1]
        for k,p in enumerate(root.tolist()):
            first=p//W*W; ctx=[]
            j=p
            while j>=first and len(ctx)<4:
                x=self.sb[ids[j]]
                if not x: break
                ctx.insert(0,ids[j])
                if x[:1] in (b" ",b"\n"): break
                j-=1
            if not ctx: continue
            key=tuple(ctx)
            if key not in self.cache:
                pre=b"".join(self.sb[i] for i in ctx)
                sp=self.sp.encode_bytes([pre+w for w in self.tb],self.back,self.table)
                n=len(ctx)
                bad=[bool(w) and not w.isspace() and list(x[:n])!=ctx for w,x in zip(self.tb,sp)]
                self.cache[key]=torch.tensor(bad)
            bad=self.cache[key].clone(); bad[int(nd.roots.next_T[k])]=False
            yt[int(nd.roots.row_T[k]),bad]=-1e9
        return yt
    def __call__(self, logits, batch, numbers):
        width=batch.student.ids.shape[1]
        rows=[self.rows[n][:width].float() for n in numbers]
        states=torch.stack([F.pad(r,(0,0,0,width-len(r))) for r in rows])
        y=states.flatten(0,1)@self.head.T
        total=logits.new_zeros(())
        for tile in batch.teachers[0].tiles:
            for st in tile.sub_tiles:
                nd=st.terms; pos=tile.student_positions[st.student_slice]
                root=pos[nd.roots.row_S]
                if self.mode=="full":
                    pos=pos
                    v,_=losses.forward_kl(logits[pos][None],y[pos][None],None); total=total+v; continue
                if self.mode in("roots","rootsin"):
                    v,_=losses.forward_kl(logits[root][None],y[root][None],None); total=total+v
                elif self.mode.startswith("truth"):
                    import numpy as np
                    W=batch.student.ids.shape[1]
                    k=root
                    tr_=[]
                    for p in k.tolist():
                        row=numbers[p//W]; i=p%W+1
                        if row not in CACHE: CACHE[row]=np.load(f"runs/truth/{self.kinds[0]}-{self.kinds[1]}-0/{row}.npz")["ids"]
                        t=CACHE[row]; tr_.append(t[i] if i<len(t) else np.full(8,-1))
                    t=torch.from_numpy(np.stack(tr_)); ok=t>=0; num=ok.sum(1)
                    good=num>0
                    cell=self.tab.cell_V[t.clamp(min=0)]; ok&=cell<self.tab.num_cells
                    x=losses.log_masses(logits[root],self.cols); lp=x-x.logsumexp(-1,keepdim=True)
                    val=-(lp.gather(1,cell.clamp(max=self.tab.num_cells-1))*ok).sum(1)/num.clamp(min=1)
                    total=total+val[good].sum()
                elif self.mode.startswith("trans"):
                    of=batch.teachers[0]; w=of.ids.shape[1]
                    if not hasattr(of,"_y"):
                        rr=[self.pair.rows[n][:w].float() for n in numbers]
                        of.__dict__["_y"]=torch.stack([F.pad(r,(0,0,0,w-len(r))) for r in rr]).flatten(0,1)@self.pair.head.T
                    if st.teacher_positions is not None: self.ans=of.__dict__["_y"][st.teacher_positions]
                    yt=self.ans[st.teacher_slice]
                    goes=tr.going_on(yt,nd.before,self.tab)
                    if "M" in self.flags: yt=self.masked(yt,nd,batch,root)
                    tgt=tr.root_target(yt,nd,goes,self.tab,tr.CellColumns.of(self.tab).columns_W).cell_NC
                    x=losses.log_masses(logits[root],self.cols)
                    sel=slice(None)
                    if self.mode=="transend": sel=(nd.roots.ended_T>=0).nonzero()[:,0]
                    if self.mode=="transnoend": sel=(nd.roots.ended_T<0).nonzero()[:,0]
                    v,_=losses.forward_kl(x[sel][None],tgt.clamp(min=1e-30).log()[sel][None],None); total=total+v
                elif self.mode in ("cellsend","cellsnoend"):
                    x=losses.log_masses(logits[root],self.cols); z=losses.log_masses(y[root],self.cols)
                    sel=((nd.roots.ended_T>=0)==(self.mode=="cellsend")).nonzero()[:,0]
                    v,_=losses.forward_kl(x[sel][None],z[sel][None],None); total=total+v
                else:
                    x=losses.log_masses(logits[root],self.cols); z=losses.log_masses(y[root],self.cols)
                    v,_=losses.forward_kl(x[None],z[None],None); total=total+v
                if self.mode in("rootsin","cellsin"):
                    i=pos[nd.insides.row_S]
                    v,_=losses.forward_kl(logits[i][None],y[i][None],None); total=total+v
        return total/batch.counts.pairs[0].kd_terms
for spec in sys.argv[1:]:
    kind,other,mode,seed=spec.split(":"); seed=int(seed)
    reg=s.REGIMES["new"]; t=time.time()
    st=s.fresh("student",kind,seed); st.load_state_dict(s.first_weights(kind,seed))
    import os
    rows=int(os.environ.get("ROWS",reg.rows))
    kd=None if mode=="text" else Diag(kind,other,mode)
    st=s.learn(st,kind,s.corpus()["train"][:rows],150,kd=kd,seed=seed,weights=(1.,1.))
    b=s.bits_per_byte(st,kind,"report")
    if rows!=reg.rows: print(kind,other,mode,seed,"rows",rows,"bits",round(b,4),round(time.time()-t),flush=True); continue
    base=json.load(open(f"runs/square/results/new_{kind}__text_0.0_1.0_0.003_{seed}_150.json"))["report"]
    print(kind,other,mode,seed,round(base-b,4),round(time.time()-t),flush=True)
