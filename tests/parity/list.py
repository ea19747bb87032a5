"""list.py: the public classes and functions of an unpacked TorchRec, module by module: what tests/parity/torchrec.txt has.

    pip download --no-deps torchrec==1.9.2 && unzip torchrec-1.9.2-*.whl
    python list.py . >tests/parity/torchrec.txt

Sources are read, not run, so neither torch nor fbgemm_gpu is needed. Names are those that a module defines at its top (also as
another name of a class or function of its own) and that do not begin with an underscore. Tests, their helpers and benchmarks are left
out.
"""
import ast
import pathlib
import sys
import textwrap

PACKAGES = ["distributed", "modules", "sparse", "metrics"]
LEFT_OUT = {"tests", "test_utils", "benchmark", "benchmarks"}
# Public once (0.6 and 0.7); the module that the name follows does not define it any more. docs/parity.md answers them too.
OLDER = """\
torchrec.distributed.comm_ops: alltoallv
torchrec.distributed.embedding: create_embedding_sharding create_sharding_infos_by_sharding
torchrec.distributed.embeddingbag: create_embedding_bag_sharding create_sharding_infos_by_sharding
torchrec.distributed.types: BoundsCheckMode CacheAlgorithm DataType GenericMeta scope
torchrec.distributed.utils: PermutePooledEmbeddings
torchrec.distributed.train_pipeline: FusedKJTListSplitsAwaitable KJTAllToAllForward KJTSplitsAllToAllMeta SplitsAllToAllAwaitable
"""


def names_of(path):
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for n in ast.parse(path.read_text()).body:
        if isinstance(n, kinds):
            found.append(n.name)
        elif isinstance(n, ast.Assign) and isinstance(n.value, ast.Name) and n.value.id in found:
            found += [target.id for target in n.targets if isinstance(target, ast.Name)]
    return list(dict.fromkeys(name for name in found if not name.startswith("_")))


def main(root):
    version = {}
    exec((root / "torchrec" / "version.py").read_text(), version)
    print(f"TorchRec {version['__version__']}, commit {version['git_version']}; made by tests/parity/list.py")
    for package in PACKAGES:
        for path in sorted((root / "torchrec" / package).rglob("*.py")):
            names = [] if LEFT_OUT & set(path.parts) else names_of(path)
            if names:
                module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
                print(f"\n{module}")
                print(textwrap.fill(" ".join(names), 130, initial_indent="  ", subsequent_indent="  ", break_long_words=False))
    print("\nolder\n" + textwrap.indent(OLDER, "  "), end="")


main(pathlib.Path(sys.argv[1]))
