"""interop.py: the TorchRec side of interop_spec.lua: a small DLRM that is trained, and saved and loaded by torch_checkpoint.py.

    python interop.py train FOLDER TABLES DENSE      trains 3 steps, saves FOLDER/before, trains one more, saves FOLDER/after
    python interop.py resume FOLDER TABLES DENSE     loads FOLDER/perilune, trains one step, saves FOLDER/after

TABLES: rowwise_adagrad, adagrad or sgd; DENSE: Adam, Adagrad or SGD (with momentum). Each checkpoint has the predictions for batch 0 in its values. Ranks
are told by RANK and WORLD_SIZE, and find each other by a file in FOLDER: a port may be taken by somebody else, and then rank 0 ends while the
others wait for it. Who waits for another rank for more than a minute ends with the stacks of its threads; tables are table-wise, and all
ranks have the same batch.
"""
import datetime
import faulthandler
import logging
import os
import sys
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/interop"))
RANKS = int(os.environ.setdefault("WORLD_SIZE", "1"))
RANK = int(os.environ.setdefault("RANK", "0"))
WAIT = 60  # seconds for another rank; TorchRec on one core takes some ten to begin
os.environ.update(LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE=str(RANKS))
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host, whatever its name leads to
ROWS = {"a": 6, "b": 4}
DIM, BATCH = 4, 4


def run(command, folder, tables, dense):
    import torch
    torch.manual_seed(7)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(4 * WAIT, exit=True)
    torch.distributed.init_process_group("gloo", init_method="file://" + os.path.join(os.path.abspath(folder), "ranks-of-" + command),
                                         rank=RANK, world_size=RANKS, timeout=datetime.timedelta(seconds=WAIT))
    import torch_checkpoint
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.models.dlrm import DLRM
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    def batch(step):
        """As in interop_spec.lua."""
        lengths = [(step + i) % 3 for i in range(2 * BATCH)]
        ids = [(step * 5 + k * 3) % ROWS["a" if k < sum(lengths[:BATCH]) else "b"] for k in range(sum(lengths))]
        features = [[((step + 2 * i + 3 * j) % 7) / 4 - 0.75 for j in range(3)] for i in range(BATCH)]
        kjt = KeyedJaggedTensor.from_lengths_sync(["fa", "fb"], torch.tensor(ids), torch.tensor(lengths, dtype=torch.int32))
        return torch.tensor(features), kjt, torch.tensor([float((step + i) % 2) for i in range(BATCH)])

    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=[
        EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=DIM, feature_names=["f" + n]) for n, rows in ROWS.items()])
    model = DLRM(embedding_bag_collection=bags, dense_in_features=3, dense_arch_layer_sizes=[5, DIM], over_arch_layer_sizes=[5, 1],
                 dense_device=torch.device("cpu"))
    kind = {"rowwise_adagrad": RowWiseAdagrad, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}[tables]
    apply_optimizer_in_backward(kind, model.sparse_arch.parameters(), {"lr": 0.125, **({} if tables == "sgd" else {"eps": 1e-8})})
    sharder = EmbeddingBagCollectionSharder()
    how = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=RANKS, compute_device="cpu"), constraints={n: how for n in ROWS})
    plan = planner.collective_plan(model, [sharder], torch.distributed.GroupMember.WORLD)
    model = DistributedModelParallel(model, device=torch.device("cpu"), sharders=[sharder], plan=plan)
    fused = model.fused_optimizer
    fused.save_param_groups(True)
    named = [(name, p) for name, p in model.named_parameters() if ".embedding_bags." not in name]
    optimizer = getattr(torch.optim, dense)(named, lr=0.0625, **({"momentum": 0.5} if dense == "SGD" else {}))
    steps = 0

    def predict():
        features, kjt, _ = batch(0)
        with torch.no_grad():
            return model(features, kjt).squeeze(-1).tolist()

    def train(step):
        nonlocal steps
        steps = step
        features, kjt, labels = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(model(features, kjt).squeeze(-1), labels).backward()
        optimizer.step()

    def save(name):
        logits = predict()
        torch_checkpoint.save(os.path.join(folder, name), {"model": model.state_dict(), "model.tables": fused.state_dict(),
                                                           "optimizer": optimizer.state_dict()},
                              optimizers={"model.tables": tables, "optimizer": dense}, values={"logits": logits}, steps=steps)

    if command == "train":
        for step in (1, 2, 3):
            train(step)
        save("before")
    else:
        parts, _ = torch_checkpoint.load(os.path.join(folder, "perilune"))
        torch_checkpoint.restore(model.state_dict(), parts["model"])
        torch_checkpoint.restore(fused.state_dict(), parts["model.tables"])
        torch_checkpoint.set_rates(fused, parts["model.tables"])
        optimizer.load_state_dict(torch_checkpoint.for_optimizer(optimizer.state_dict(), parts["optimizer"]))
        steps = 3
        save("loaded")
    train(4)
    save("after")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(*sys.argv[1:])
