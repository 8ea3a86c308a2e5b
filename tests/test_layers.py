"""Imports only go down: applications use models and data, those use ops, ops use the backend, and no others."""

import ast
import re

from conftest import ROOT

# a module may import those of lower rank, and its own package; the first match counts
RANKS = [
    (r"pcsr_fast\.cli$", 11),
    (r"pcsr_fast\.report$", 10),
    (r"pcsr_fast\.(train|audit)$", 9),
    (r"pcsr_fast\.(search|rehome)$", 8),
    (r"pcsr_fast\.(division|evaluate|run)$", 7),
    (r"pcsr_fast\.(rematch|siblings)$", 6),
    (r"pcsr_fast\.(model|checkpoint|presets)$", 5),
    (r"pcsr_fast\.(data|config)", 4),
    (r"pcsr_fast\.ops\.op$", 2),
    (r"pcsr_fast\.ops", 3),
    (r"pcsr_fast\.(backend|triton|_native|distributed|gru)", 1),
    (r"pcsr_fast(\.__main__)?$", 12),
]


def rank(module: str) -> int:
    return next(rank for pattern, rank in RANKS if re.match(pattern, module))


def imports(path):
    """Modules imported at the top of a file: a function may look up, for example to print a table of all ops."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "pcsr_fast":
                yield from (f"pcsr_fast.{alias.name}" for alias in node.names)
            else:
                yield node.module


def module_of(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_imports_go_down():
    files = sorted((ROOT / "pcsr_fast").rglob("*.py"))
    assert len(files) > 4
    for path in files:
        module = module_of(path)
        for imported in imports(path):
            if imported.startswith("pcsr_fast"):
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                same = package != "pcsr_fast" and imported.startswith(package)
                assert same or rank(imported) < rank(module), f"{module} imports {imported}"


def test_op_record_knows_no_op():
    assert not [m for m in imports(ROOT / "pcsr_fast/ops/op.py") if m.startswith("pcsr_fast.ops")]


def test_native_sources_keep_apart():
    """Kernels see neither torch nor the other device; only bind/ knows torch, only text/ and module.cpp Python."""
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        included = re.findall(r'#include ["<](.+)[">]', path.read_text())
        folder = path.relative_to(ROOT / "csrc").parts[0]
        torch = [name for name in included if name.startswith(("torch/", "ATen/", "c10/"))]
        assert not torch or folder == "bind", f"{path.name} includes {torch}"
        python = [name for name in included if name.startswith(("pybind11/", "Python.h"))]
        assert not python or folder in ("text", "module.cpp"), f"{path.name} includes {python}"
        if folder == "text":
            assert not [name for name in included if re.match(r"(\.\./|bind/|cpu/|cuda/)", name)], path.name
        other = {"cpu": "cuda", "cuda": "cpu"}.get(folder)
        assert not [name for name in included if other and f"{other}/" in name], path.name


def test_every_op_is_written_by_its_stem():
    from pcsr_fast.ops import OPS

    for name, op in OPS.items():
        # sgr_mean is a second entry to the kernels of sgr
        stem = name.partition("_")[0]
        places = [f"pcsr_fast/ops/{name}.py", f"csrc/bind/{stem}.cpp", f"csrc/cpu/{stem}.cpp"]
        places += {"cuda": [f"csrc/cuda/{stem}.cu"], "triton": [f"pcsr_fast/triton/{stem}.py"], None: []}[op.gpu]
        for place in places:
            assert (ROOT / place).exists(), place
