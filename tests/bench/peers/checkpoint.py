"""torch.distributed.checkpoint beside the disk, as tests/bench/checkpoint.lua measures ours: a table of --gb GiB (f32, 64 columns) and a
number for each of its rows, in one process; saved, and loaded into tensors that are there. In turns with one sequential file of as many
bytes, written and synced, or read with nothing of it in memory. Saving returns before anything is synced, so the files are synced behind it.
"""
import argparse
import glob
import json
import os
import shutil
import statistics
import time

import torch
import torch.distributed.checkpoint as dcp

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--gb", type=float, default=4)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--directory", default=os.environ.get("TMPDIR", "/var/tmp"))
options, _ = parser.parse_known_args()  # of what bench-checkpoint was given
folder = os.path.join(options.directory, "peri-bench-checkpoint-torch")
os.makedirs(folder, exist_ok=True)
plain, path = os.path.join(folder, "plain"), os.path.join(folder, "model")
rows = int(options.gb * 2**30 / (65 * 4))
total = rows * 65 * 4
state = {"weight": torch.rand(rows, 64), "momentum": torch.rand(rows)}
BLOCK = 4 << 20


def sync(file, forget=False):
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    if forget:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def write_plain():
    block = b"\1" * BLOCK
    with open(plain, "wb", buffering=0) as file:
        for at in range(0, total, BLOCK):
            file.write(block[: min(BLOCK, total - at)])
        os.fsync(file.fileno())


def read_plain():
    block = bytearray(BLOCK)
    with open(plain, "rb", buffering=0) as file:
        while file.readinto(block):
            pass


def save():
    shutil.rmtree(path, ignore_errors=True)
    dcp.save(state, checkpoint_id=path, no_dist=True)
    for file in glob.glob(path + "/*"):
        sync(file)


def load():
    dcp.load(state, checkpoint_id=path, no_dist=True)


def forget():
    for file in [plain, *glob.glob(path + "/*")]:
        sync(file, forget=True)


times = {}
for _ in range(options.rounds):
    for name, f in (("disk write", write_plain), ("save", save), ("disk read", read_plain), ("load", load)):
        if name == "disk read":
            forget()
        begin = time.monotonic()
        f()
        times.setdefault(name, []).append(time.monotonic() - begin)
shutil.rmtree(folder)
print(f"torch {torch.__version__}, torch.distributed.checkpoint, one process")
for case, disk in (("save", "disk write"), ("load", "disk read")):
    rate, of_disk = (total / 1e9 / statistics.median(times[name]) for name in (case, disk))
    print(f"{case:10} {rate:14.2f} {of_disk:14.2f} {rate / of_disk:6.2f}")
    if options.out:
        with open(options.out, "a") as out:
            out.write(json.dumps({"case": "torch " + case, "ranks": 1, "gb": total / 1e9, "gb_per_s": rate, "disk_gb_per_s": of_disk,
                                  "share": rate / of_disk}) + "\n")
