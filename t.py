import subprocess,sys,time,statistics as s
T='/work/w/first37_t/'
W={'two':['run','-n','1','-t','1',T+'two.lua'],'three2':['run','-n','2','-t','1',T+'three.lua'],'repl':['repl']}
r={}
for i in range(9):
    for d in('old0','first37'):
        for k,w in W.items():
            t=time.time(); p=subprocess.run(['chrt','-f','50']+([] if k=='three2' else ['taskset','-c','1'])+['build/perilune']+w,stdout=subprocess.PIPE,stderr=subprocess.STDOUT,stdin=subprocess.DEVNULL,cwd='/work/w/'+d); r.setdefault((k,d),[]).append((time.time()-t)*1000)
            if p.returncode: print(k,d,p.stdout[-200:]) if i==0 else 0
for k,v in sorted(r.items()): print(k,round(min(v),1),round(s.median(v),1))
