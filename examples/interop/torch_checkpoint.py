"""torch_checkpoint.py: makes a Perilune checkpoint of a torch or TorchRec program's state, and reads one back.

It is written by the specification alone (docs/checkpoint_format.md), so it is also an example of a writer and a reader of the format. It needs
torch, safetensors and xxhash from PyPI. In a training program (with TorchRec under several ranks, all of them call it, and each one
writes the shards that it has):

    import torch_checkpoint
    model.fused_optimizer.save_param_groups(True)      # TorchRec leaves learning rates out of its state dicts unless it is told to
    torch_checkpoint.save("model-1000", {"model": model.state_dict(), "model.tables": model.fused_optimizer.state_dict(),
                                         "optimizer": optimizer.state_dict()},
                          optimizers={"model.tables": "rowwise_adagrad", "optimizer": "Adam"}, values={"step": 1000})

    parts, values = torch_checkpoint.load("model-1000")
    torch_checkpoint.restore(model.state_dict(), parts["model"])                             # writes into the live tensors
    torch_checkpoint.restore(model.fused_optimizer.state_dict(), parts["model.tables"])
    torch_checkpoint.set_rates(model.fused_optimizer, parts["model.tables"])
    optimizer.load_state_dict(torch_checkpoint.for_optimizer(optimizer.state_dict(), parts["optimizer"]))

On files that torch.save or safetensors wrote (of whole tensors):

    python torch_checkpoint.py to-perilune model-1000 model=model.safetensors model.tables=tables.pt optimizer=optimizer.pt \\
        --optimizer model.tables=rowwise_adagrad --optimizer optimizer=Adam
    python torch_checkpoint.py to-torch model-1000 state.pt             # {part: state dict}

In Perilune: peri.checkpoint.load("model-1000", { model = model, optimizer = optimizer }), with an optimizer that was made of named
parameters. Parameters are found by name, never by position: a torch optimizer is made of model.named_parameters(), or is one of
TorchRec's keyed optimizers.
"""
import argparse
import json
import math
import os
import re
import secrets
import shutil

import safetensors.torch
import torch
import xxhash

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
          torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64"}
SPEED_ONLY = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "param_names"}  # of torch's param_groups


def is_sharded(x):
    return hasattr(x, "local_shards") and hasattr(x, "metadata")


# -- names ------------------------------------------------------------------------------------------------------------------------------

def component(key):
    """A key of a state dict as a part of a tensor's name."""
    if isinstance(key, (int, float)):
        return "#%.17g" % key
    return re.sub("^#", "%23", key.replace("%", "%25").replace("/", "%2F"))


def key_of(text):
    if text.startswith("#"):
        return float(text[1:]) if re.search("[.en]", text) else int(text[1:])
    return re.sub("%([0-9A-Fa-f]{2})", lambda m: chr(int(m[1], 16)), text)


def flatten(name, tree, tensors):
    """Put the tensors of a tree of dicts into `tensors`, by name; returns the tree without them."""
    rest = {}
    for key, value in tree.items():
        inner = name + "/" + component(key)
        if isinstance(value, torch.Tensor) or is_sharded(value):
            tensors[inner] = value
        elif isinstance(value, dict):
            rest[key] = flatten(inner, value, tensors)
        else:
            rest[key] = value
    return rest


# -- optimizers --------------------------------------------------------------------------------------------------------------------------

def names_of(group, part):
    """The names of the parameters of a group of a torch optimizer's state dict."""
    if all(isinstance(p, str) for p in group["params"]):
        return list(group["params"])
    if "param_names" in group:
        return list(group["param_names"])
    raise ValueError(f"part '{part}': its parameters have no names; make the optimizer of list(model.named_parameters()), or take "
                     "TorchRec's KeyedOptimizerWrapper")


def numbers_of(group, part):
    """What Perilune keeps of a group: betas are two numbers there."""
    numbers = {}
    for name, value in group.items():
        if name == "betas":
            numbers["beta1"], numbers["beta2"] = map(float, value)
        elif isinstance(value, (bool, int, float)) and name not in SPEED_ONLY:
            numbers[name] = value
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            numbers[name] = value.item()
        elif name not in SPEED_ONLY and name != "params":
            raise ValueError(f"part '{part}': '{name}' of param_groups is {value!r}, and only numbers have a counterpart")
    return numbers


def first_state(kind, group, shape):
    """What Perilune keeps of a parameter that has had no step; torch keeps nothing of it."""
    names = {"SGD": {"momentum_buffer": group.get("momentum")}, "RMSprop": {"square_avg": True, "momentum_buffer": group.get("momentum"),
             "grad_avg": group.get("centered")}}.get(kind, {"exp_avg": True, "exp_avg_sq": True, "max_exp_avg_sq": group.get("amsgrad")})
    return {name: torch.zeros(shape) for name, is_there in names.items() if is_there}


def from_optimizer(part, tree, kind, steps, shapes):
    """The state dict of a torch optimizer as Perilune's optimizer `kind` has it. shapes: of parameters, by name."""
    if not tree.get("param_groups"):
        raise ValueError(f"part '{part}': it has no param_groups, with the learning rates; call optimizer.save_param_groups(True) before "
                         "optimizer.state_dict()")
    tables, groups, state = part.endswith(".tables"), [], {}
    for group in tree["param_groups"]:
        names = names_of(group, part)
        groups.append({**numbers_of(group, part), "optimizer": kind, "params": names})
        for key, name in zip(group["params"], names):
            own = state[name] = {key: value for key, value in tree["state"].get(key, {}).items() if value is not None}
            if tables:  # Perilune counts the updates of each table, TorchRec of none
                own.setdefault(next(iter(own)).split(".")[0] + ".step" if own else name.split(".")[-2] + ".step", torch.tensor([steps]))
                continue
            if not own and (kind != "SGD" or group.get("momentum")):
                own.update(first_state(kind, group, shapes[name]), step=0)
            elif kind == "SGD":  # torch's does not count: all that matters is whether there was a step
                own["step"] = max(steps, 1)
            own["step"] = torch.as_tensor(own["step"], dtype=torch.float64)
    return {"state": state, "param_groups": groups}


def to_optimizer(part, tree):
    """The way back."""
    groups, state, kinds = [], {}, {}
    for group in tree.get("param_groups", []):
        kinds.update(dict.fromkeys(group["params"], group.get("optimizer")))
        group = {name: value for name, value in group.items() if name != "optimizer"}
        if "beta1" in group:
            group["betas"] = (group.pop("beta1"), group.pop("beta2"))
        groups.append(group)
    for name, own in tree["state"].items():
        if part.endswith(".tables"):
            state[name] = {key: value for key, value in own.items() if not key.endswith(".step")}
        elif kinds.get(name) == "SGD":  # torch's does not count, and has nothing before the first step
            state[name] = {key: value for key, value in own.items() if key != "step" and own["step"] > 0}
        else:
            state[name] = {key: value.reshape(()).float() if key == "step" else value for key, value in own.items()}
    return {"state": state, "param_groups": groups}


# -- writing -----------------------------------------------------------------------------------------------------------------------------

def gather(value):
    """The value of each rank, on all ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def together(work):
    """What work() returned on each rank, on all ranks. What one rank meets is an error on all: nobody waits for a rank that gave up."""
    result, error = None, None
    try:
        result = work()
    except Exception as met:
        error = met
    told = gather((result, error and f"{type(error).__name__}: {error}"))
    if error:
        raise error
    for rank, (_, text) in enumerate(told):
        if text:
            raise RuntimeError(f"rank {rank}: {text}")
    return [result for result, _ in told]


def merge(trees):
    """What ranks have beside tensors as one tree: TorchRec's fused optimizer has only the tables of its rank."""
    merged = dict(trees[0])
    for tree in trees[1:]:
        for key, value in tree.items():
            if key == "param_groups":
                known = {name for group in merged[key] for name in group["params"]}
                fresh = [{**group, "params": [name for name in group["params"] if name not in known]} for group in value]
                merged[key] = merged[key] + [group for group in fresh if group["params"]]
            elif isinstance(value, dict) and isinstance(merged.get(key), dict):
                merged[key] = merge([merged[key], value])
            else:
                merged.setdefault(key, value)
    return merged


def pieces_of(tensor, mine):
    """What this rank writes of a tensor: a list of (offset, size, elements); the shape and dtype of the whole. mine: whether it writes it
    if it is no ShardedTensor."""
    if not is_sharded(tensor):
        tensor = tensor.detach().cpu()
        return ([([0] * tensor.dim(), list(tensor.shape), tensor)] if mine else []), list(tensor.shape), tensor.dtype
    own = [(list(s.metadata.shard_offsets), list(s.metadata.shard_sizes), s.tensor.detach().cpu()) for s in tensor.local_shards()]
    return own, list(tensor.metadata().size), tensor.metadata().tensor_properties.dtype


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_part(folder, rank, tensors, before):
    """Write one rank's file; returns its part of the manifest: the file, and {name: {dtype, shape, pieces}}. before: the names of what
    ranks before this one have."""
    keys, arrays, entries = [], {}, {}
    for name, tensor in tensors.items():
        own, shape, dtype = pieces_of(tensor, name not in before)
        if dtype not in DTYPES:
            raise ValueError(f"tensor '{name}' is {dtype}, which safetensors files of Perilune do not have")
        entries[name] = {"name": name, "dtype": DTYPES[dtype], "shape": shape, "pieces": []}
        for offset, size, elements in own:
            whole = size == shape
            key = name if whole else name + "[" + ",".join(f"{o}:{o + n}" for o, n in zip(offset, size)) + "]"
            keys.append((key, name, offset, size))
            arrays[key] = elements.reshape(size).contiguous().clone()
    path = os.path.join(folder, f"rank-{rank}.safetensors")
    data = safetensors.torch.save(arrays)
    with open(path, "wb") as file:
        file.write(data)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    for key, name, offset, size in keys:
        begin, end = (8 + length + at for at in header[key]["data_offsets"])
        entries[name]["pieces"].append({"file": rank, "begin": begin, "bytes": end - begin, "offset": offset, "size": size,
                                        "xxh3": xxhash.xxh3_64_hexdigest(data[begin:end])})
    sync(path)
    return {"name": os.path.basename(path), "bytes": len(data), "header": 8 + length,
            "xxh3": xxhash.xxh3_64_hexdigest(data[:8 + length])}, entries


def write_manifest(folder, values, parts):
    """The manifest of all ranks' parts, written last."""
    tensors = {}
    for _, entries in parts:
        for name, entry in entries.items():
            tensors.setdefault(name, {**entry, "pieces": []})["pieces"] += entry["pieces"]
    for name, entry in tensors.items():
        if sum(math.prod(p["size"]) for p in entry["pieces"]) != math.prod(entry["shape"]):
            raise ValueError(f"tensor '{name}': its shards are not all of it (a row-wise state of a table that was cut by columns?)")
    manifest = {"format": "perilune-checkpoint", "version": 1, "parent": None, "values": values, "files": [file for file, _ in parts],
                "tensors": [tensors[name] for name in sorted(tensors, key=str.encode)]}
    text = json.dumps(manifest, ensure_ascii=False, allow_nan=False)[:-1].encode()  # without the last }
    text += b',\n"checksum":"%s"}\n' % xxhash.xxh3_128_hexdigest(text).encode()
    path = os.path.join(folder, "manifest.json")
    with open(path + ".new", "wb") as file:
        file.write(text)
    sync(path + ".new")
    os.rename(path + ".new", path)
    sync(folder)


def save(path, parts, optimizers=None, values=None, steps=0):
    """Save {name of part: state dict} as the checkpoint `path`, which must not be there. optimizers: {name of part: how Perilune calls
    the optimizer} for each part that is one's. The part of TorchRec's fused optimizer is called "<part of the model>.tables". steps: how
    many updates its tables had (for optimizers of Adam's kind). Under torch.distributed all ranks call it."""
    optimizers = optimizers or {}
    rank = torch.distributed.get_rank() if len(gather(None)) > 1 else 0
    tensors, extra = {}, {}

    def take_apart():
        trees = {}
        shapes = {name: x.shape for part, tree in parts.items() if part not in optimizers for name, x in tree.items()
                  if isinstance(x, torch.Tensor)}
        for part, tree in parts.items():
            if not re.fullmatch(r"\w+(\.tables)?", part):
                raise ValueError(f"part '{part}': names of parts are letters, digits and _; a model's fused optimizer ends with .tables")
            if part in optimizers:
                tree = from_optimizer(part, tree, optimizers[part], steps, shapes)
            elif "param_groups" in tree or part.endswith(".tables"):
                raise ValueError(f"part '{part}' is an optimizer's: say which in optimizers={{'{part}': 'Adam'}}")
            else:  # torch's batch norm counts batches, for momentum=None alone; Perilune's has no such count
                extra[part] = {}
                tree = {name: value for name, value in tree.items() if name.rsplit(".")[-1] != "num_batches_tracked"}
            trees[part] = flatten(part, tree, tensors)
        return trees

    all_trees = together(take_apart)
    folder, name = os.path.split(os.path.abspath(path))
    if any(gather(os.path.lexists(path))):
        raise FileExistsError(f"'{path}' is there already; remove it, or take another name")
    saving = gather(os.path.join(folder, f".{name}.saving-{secrets.token_hex(8)}"))[0]
    together(lambda: os.makedirs(saving, exist_ok=True))
    try:
        before = set().union(*gather(list(tensors))[:rank])
        parts, trees = together(lambda: write_part(saving, rank, tensors, before)), merge(all_trees)

        def publish():
            write_manifest(saving, {"parts": trees, "extra": extra, "values": values, "ranks": len(parts)}, parts)
            os.rename(saving, path)
            sync(folder)

        together(publish if rank == 0 else lambda: None)  # no rank goes on before it is there
    except BaseException:
        shutil.rmtree(saving, ignore_errors=True)
        raise


# -- reading -----------------------------------------------------------------------------------------------------------------------------

def read_manifest(path):
    with open(os.path.join(path, "manifest.json"), "rb") as file:
        text = file.read()
    head, tail = text[:-49], re.fullmatch(rb',\n"checksum":"([0-9a-f]{32})"}\n', text[-49:])
    if not tail or xxhash.xxh3_128_hexdigest(head).encode() != tail[1]:
        raise ValueError(f"'{path}': the manifest is damaged: its checksum does not hold")
    manifest = json.loads(text)
    if manifest["format"] != "perilune-checkpoint" or manifest["version"] != 1:
        raise ValueError(f"'{path}': version {manifest['version']} of the format, this program reads 1")
    if manifest["parent"]:
        raise ValueError(f"'{path}' is an increment of checkpoint {manifest['parent']}; make a full one of it first: "
                         f"perilune checkpoint compact '{path}' -o FULL")
    return manifest


def read_tensor(path, manifest, entry):
    """A whole tensor. Pieces of different columns are averaged, weighted by their columns."""
    dtype = {text: dtype for dtype, text in DTYPES.items()}[entry["dtype"]]
    weighted = any("columns" in piece for piece in entry["pieces"])
    whole = torch.zeros(entry["shape"], dtype=torch.float64 if weighted else dtype)
    columns = sum({tuple(p["columns"]): p["columns"][1] for p in entry["pieces"]}.values()) if weighted else 1
    for piece in entry["pieces"]:
        name = manifest["files"][piece["file"]]["name"]
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ValueError(f"'{path}': '{name}' is no plain name of a file")
        with open(os.path.join(path, name), "rb") as file:
            file.seek(piece["begin"])
            data = bytearray(file.read(piece["bytes"]))
        if xxhash.xxh3_64_hexdigest(data) != piece["xxh3"]:
            raise ValueError(f"'{path}/{name}': bytes {piece['begin']} to {piece['begin'] + piece['bytes']} are damaged")
        if not data:
            continue
        elements = torch.frombuffer(data, dtype=dtype).reshape(piece["size"])
        place = tuple(slice(o, o + n) for o, n in zip(piece["offset"], piece["size"]))
        if weighted:
            whole[place] += elements.double() * (piece["columns"][1] / columns)
        else:
            whole[place] = elements
    return whole.to(dtype)


def sort_maps(tree):
    """Maps of raw ids (MCH) of a model's state dict: a checkpoint has them in the order of rows, TorchRec in that of ids in each bucket."""
    names = ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping", "_mch_counts", "_mch_last_access_iter")
    for prefix in [key[:-len(names[0])] for key in tree if isinstance(key, str) and key.endswith(names[0])]:
        segments = [row for row in tree[prefix + "_output_segments_tensor"].reshape(-1).tolist() if row >= 0]
        for first, past in zip(segments, segments[1:]):
            order = first + torch.sort(tree[prefix + names[0]][first:past], stable=True).indices
            for name in names:
                if prefix + name in tree:
                    tree[prefix + name][first:past] = tree[prefix + name][order]


def load(path):
    """({part: state dict}, values) of a checkpoint: whole tensors, optimizers with torch's names of numbers."""
    manifest = read_manifest(path)
    saved = manifest["values"]
    parts = {part: tree or {} for part, tree in (saved.get("parts") or {}).items()}
    for entry in manifest["tensors"]:
        part, *keys = entry["name"].split("/")
        tree = parts.setdefault(part, {})
        for key in map(key_of, keys[:-1]):
            if not isinstance(tree.get(key), dict):
                tree[key] = {}
            tree = tree[key]
        tree[key_of(keys[-1])] = read_tensor(path, manifest, entry)
    for part, tree in parts.items():
        sort_maps(tree)
        if "param_groups" in tree:
            parts[part] = to_optimizer(part, tree)
    return parts, saved.get("values")


def restore(live, loaded):
    """Copy loaded whole tensors into the tensors and local shards of a state dict that is live, as a model's and TorchRec's fused
    optimizer's are. Learning rates stay: see set_rates. Under torch.distributed all ranks call it."""
    targets, sources = {}, {}
    flatten("", live, targets)
    flatten("", loaded, sources)
    differ = set().union(*gather(set(targets))) ^ set(sources)
    if differ:
        raise ValueError(f"only the checkpoint or only the program has: {', '.join(sorted(differ))}")
    for name, target in targets.items():
        shape, source = list(target.metadata().size if is_sharded(target) else target.shape), sources[name]
        if shape != list(source.shape):
            raise ValueError(f"'{name}' has shape {shape}, given {list(source.shape)}")
    with torch.no_grad():
        for name, target in targets.items():
            for shard in target.local_shards() if is_sharded(target) else []:
                place = tuple(slice(o, o + n) for o, n in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes))
                shard.tensor.copy_(sources[name][place].reshape(shard.tensor.shape))
            if not is_sharded(target):
                target.copy_(sources[name])


def set_rates(fused, loaded):
    """Give TorchRec's fused optimizer the learning rates of a checkpoint. They hold at once. It has save_param_groups(True)."""
    rates = {name: group["lr"] for group in loaded["param_groups"] for name in group["params"]}
    for group, named in zip(fused.param_groups, fused.state_dict().get("param_groups", [])):
        group["lr"] = rates[named["params"][0]]
    fused.step()  # hands the rates to the tables, and does nothing else


def for_optimizer(own, loaded):
    """What a torch optimizer's load_state_dict takes: loaded state and numbers, found by the names of its parameters. own: its
    state_dict()."""
    numbers = {name: group for group in loaded["param_groups"] for name in group["params"]}
    state, groups = {}, []
    for group in own["param_groups"]:
        names = names_of(group, "optimizer")
        missing = [name for name in names if name not in numbers]
        if missing:
            raise ValueError(f"the checkpoint has no optimizer state of {missing}")
        for key, name in zip(group["params"], names):
            state[key] = loaded["state"][name]
        groups.append({name: numbers[names[0]].get(name, value) if name != "params" else value for name, value in group.items()})
    return {"state": state, "param_groups": groups}


# -- the command line --------------------------------------------------------------------------------------------------------------------

def read_state(path):
    """A file of whole tensors that torch.save or safetensors wrote. Nothing in it is executed."""
    if path.endswith(".safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    return torch.load(path, map_location="cpu", weights_only=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to = commands.add_parser("to-perilune", help="make a checkpoint of files of state dicts")
    to.add_argument("checkpoint")
    to.add_argument("parts", nargs="+", metavar="PART=FILE")
    to.add_argument("--optimizer", action="append", default=[], metavar="PART=NAME", help="the part is the state of such an optimizer")
    to.add_argument("--steps", type=int, default=0, help="how many updates the tables had")
    back = commands.add_parser("to-torch", help="write {part: state dict} by torch.save")
    back.add_argument("checkpoint")
    back.add_argument("file")
    args = parser.parse_args()
    if args.command == "to-torch":
        torch.save(load(args.checkpoint)[0], args.file)
        return
    files = dict(item.split("=", 1) for item in args.parts)
    save(args.checkpoint, {part: read_state(file) for part, file in files.items()},
         optimizers=dict(item.split("=", 1) for item in args.optimizer), steps=args.steps)


if __name__ == "__main__":
    main()
