"""Files as NumPy writes them, for spec/data/arrays_spec.lua, and the samples in them: python3 spec/golden/arrays.py (numpy)."""
import json
import os
import zipfile

import numpy as np

folder = os.path.join(os.path.dirname(__file__), "arrays")
os.makedirs(folder, exist_ok=True)


def path(name):
    return os.path.join(folder, name)


rng = np.random.default_rng(7)
n = 23
dense = rng.integers(-8, 9, size=(n, 3)).astype("f4") / 4
sparse = rng.integers(-50, 1000, size=(n, 4)).astype("i4")  # TorchRec's are 32 bits of a hash: negative, too
labels = rng.integers(0, 2, size=(n, 1)).astype("i4")
hot = [rng.integers(0, 90, size=(n, h)).astype("i4") for h in (1, 3, 2, 5)]
np.save(path("dense.npy"), dense)
np.save(path("sparse.npy"), sparse)
np.save(path("labels.npy"), labels)
np.savez(path("multi_hot.npz"), **{str(i): a for i, a in enumerate(hot)})
kaggle = {"X_int": np.abs(sparse[:, :3]), "X_cat": np.abs(sparse), "y": labels[:, 0].astype("i4"), "counts": np.full(4, 1000)}
np.savez_compressed(path("packed.npz"), **kaggle)
with zipfile.ZipFile(path("zip64.npz"), "w", allowZip64=True) as z:
    for name, a in kaggle.items():
        with z.open(name + ".npy", "w", force_zip64=True) as f:
            np.lib.format.write_array(f, np.ascontiguousarray(a))
np.save(path("fortran.npy"), np.asfortranarray(dense))
np.save(path("big_endian.npy"), dense.astype(">f4"))


def samples(d, ids):
    return [{"label": int(labels[i, 0]), "dense": [float(x) for x in d[i]], "ids": [[int(x) for x in np.atleast_1d(a[i])] for a in ids]}
            for i in range(n)]


json.dump({
    "torchrec": samples(dense, list((sparse % 100).T)),
    "mlperf": samples(dense, hot),
    "dlrm": samples(np.log(np.abs(sparse[:, :3]).astype("f8") + 1), list(np.abs(sparse).T)),
}, open(path("samples.json"), "w"))
