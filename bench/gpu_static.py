"""`python -m bench gpu_static`: what can be known of the GPU kernels without a GPU, checked and written as a CSV.

Compiles every Triton kernel as it would be launched, reads the CUDA kernels from the compiled package, and counts the
work of a step of sgr. Nothing here is measured.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import pcsr_fast
from bench.baselines import sgr_caption_loop
from bench.measure import RESULTS
from pcsr_fast.ops import OPS
from pcsr_fast.ops.sgr import _gradients

OP = OPS["sgr"]
SHAPE = "f30k_128"
# products in tf32 or, at torch's default setting, in float32; half precision
TYPES = {"tf32": torch.float32, "ieee": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# of an SM: shared memory of a block and in all, warps, blocks; NVIDIA's tables of compute capabilities
LIMITS = {
    80: (163 << 10, 164 << 10, 64, 32),
    90: (227 << 10, 228 << 10, 64, 32),
    100: (227 << 10, 228 << 10, 64, 32),
    120: (99 << 10, 100 << 10, 48, 24),
}
REGISTERS = 65536
COLUMNS = (
    *("what", "kernel", "types", "arch", "registers", "stack", "shared", "warps", "occupancy"),
    *("tensor_ops_in_loop", "wide_loads_in_loop", "launches", "gflop", "mbytes"),
)
# every kernel but gather, which has no products
WITHOUT_PRODUCTS = ("gather",)


def meta_arguments(dtype: torch.dtype = torch.float32, shape: str = SHAPE) -> list:
    """Arguments of the op that have shapes but no memory; indices are real."""
    args = OP.inputs(torch.float32, torch.Generator().manual_seed(0), **OP.shapes[shape])
    return [x.to("meta", dtype) if torch.is_tensor(x) and x.is_floating_point() else x for x in args]


def record(types: str, run: Callable[..., object], *args) -> list[tuple]:
    """(kernel, grid, arguments, keywords) of every Triton launch of a call, none of which happens."""
    from pcsr_fast.triton import sgr as kernels

    launches = []

    class Recorder:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **keywords: launches.append((self.name, grid, args, keywords))

    with mock.patch.multiple(
        kernels, precision=lambda: "ieee" if types == "ieee" else "tf32", **{n: Recorder(n) for n in kernels.LAUNCH}
    ):
        run(*args)
    return launches


def variants(types: str, shape: str) -> dict[str, tuple]:
    """One launch of each kernel."""
    from pcsr_fast.triton import sgr as kernels

    regions, words, offsets, image_globals, caption_globals, *rest = meta_arguments(TYPES[types], shape)
    long_words = words.new_empty(2 * kernels.BLOCK, words.shape[1])
    one_long = (regions, long_words, np.array([0, len(long_words)]), image_globals, caption_globals[:1], *rest)
    usual = (regions, words, offsets.numpy(), image_globals, caption_globals, *rest)
    launches = record(types, lambda: (kernels.forward(*one_long), kernels.forward(*usual)))
    return {launch[0]: launch for launch in launches}


def compile_kernel(launch: tuple, arch: int) -> tuple[bytes, int]:
    """The machine code and the shared memory of a launch, as triton's own launcher would have it compiled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pcsr_fast.triton import sgr as kernels

    name, _, args, keywords = launch
    types = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"}
    kernel = getattr(kernels, name)
    signature, aligned = {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.arg_names, args, strict=False)):
        is_tensor = torch.is_tensor(value)
        signature[parameter] = types[value.dtype] if is_tensor else "i32"
        if is_tensor or value % 16 == 0:
            aligned[(i,)] = [["tt.divisibility", 16]]
    constants = {parameter: keywords[parameter] for parameter in kernel.arg_names[len(args) :]}
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    options = {k: v for k, v in keywords.items() if k not in constants}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return compiled.asm["cubin"], compiled.metadata.shared


def tool(name: str) -> str:
    import triton

    return shutil.which(name) or str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


def resources(binary: Path) -> list[tuple[str, str, int, int, int]]:
    """(architecture, kernel, registers, stack, shared) of the kernels in a file."""
    listing = subprocess.run([tool("cuobjdump"), "-res-usage", binary], capture_output=True, text=True, check=True)
    found, arch = [], ""
    for line in (listing.stdout + listing.stderr).splitlines():
        if here := re.search(r"arch = sm_(\w+)|for sm_(\w+)", line):
            arch = here[1] or here[2]
        elif name := re.search(r"Function (\S+):", line):
            kernel = name[1]
        if use := re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            registers, stack, shared, local = map(int, use.groups())
            found.append((arch, kernel, registers, stack + local, shared))
    return found


def loops(sass: str) -> set[str]:
    """The opcodes within loops: between a label and a later branch back to it."""
    labels, spans, codes = {}, [], []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label[1]] = len(codes)
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)(.*)", line):
            codes.append(code[1])
            target = re.search(r"`\((\.L\w+)\)", code[2])
            if code[1].startswith("BRA") and target and target[1] in labels:
                spans.append((labels[target[1]], len(codes)))
    return {code for first, last in spans for code in codes[first:last]}


def base(opcode: str) -> str:
    """Without modifiers: HFMA2.MMA, for one, is no tensor-core operation."""
    return opcode.split(".")[0]


def occupancy(arch: int, registers: int, shared: int, warps: int) -> float:
    """Share of an SM's warps that registers and shared memory allow to be resident."""
    _, all_shared, most_warps, most_blocks = LIMITS[arch]
    # registers are handed out to a warp in units of 256, and a block takes 1 KB of shared memory for itself
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256 * warps)
    blocks = min(most_blocks, most_warps // warps, by_registers, all_shared // (shared + 1024))
    return blocks * warps / most_warps


def triton_row(case: tuple[str, tuple, int]) -> dict:
    types, launch, arch = case
    code, shared = compile_kernel(launch, arch)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(code)
        ((_, _, registers, stack, _),) = resources(binary)
        sass = subprocess.run([tool("nvdisasm"), binary], capture_output=True, text=True, check=True).stdout
    looped = loops(sass)
    warps = launch[3]["num_warps"]
    return {
        "what": "triton kernel",
        "kernel": launch[0],
        "types": types,
        "arch": arch,
        "registers": registers,
        "stack": stack,
        "shared": shared,
        "warps": warps,
        "occupancy": f"{occupancy(arch, registers, shared, warps):.2f}",
        "tensor_ops_in_loop": " ".join(sorted({c for c in map(base, looped) if c.endswith("MMA")})),
        "wide_loads_in_loop": " ".join(sorted({base(c) for c in looped if c[:3] == "LDG" and ".128" in c})),
    }


def demangle(name: str) -> tuple[str, str, str]:
    """The file, the kernel and its template arguments, from a name within namespaces as the compiler writes it."""
    rest, parts = name.removeprefix("_ZN"), []
    while size := re.match(r"\d+", rest):
        end = size.end() + int(size[0])
        parts.append(rest[size.end() : end])
        rest = rest[end:]
    file = re.search(r"_\d+_(\w+?)_cu_", parts[-2])
    codes = {"f": "float32", "d": "float64", "h": "uint8", "s": "int16", "i": "int32", "Lb0E": "false", "Lb1E": "true"}
    template = re.match(r"I((?:[a-z]|Lb[01]E)+)E", rest)
    arguments = re.findall(r"Lb[01]E|[a-z]", template[1]) if template else []
    return file[1] if file else "", parts[-1], " ".join(codes[a] for a in arguments)


def cuda_rows() -> Iterator[dict]:
    """The CUDA kernels of the compiled package; there are none if it was compiled without."""
    library = Path(pcsr_fast.__file__).with_name("_ops.so")
    if not library.exists() or pcsr_fast.build_info()["cuda"] == "none":
        return
    for arch, mangled, registers, stack, shared in resources(library):
        if not arch.isdigit() or int(arch) not in LIMITS:
            continue
        op, kernel, types = demangle(mangled)
        yield {
            "what": "cuda kernel",
            "kernel": f"{op}: {kernel}",
            "types": types,
            "arch": int(arch),
            "registers": registers,
            "stack": stack,
            "shared": shared,
            "warps": 8,
            "occupancy": f"{occupancy(int(arch), registers, shared, 8):.2f}",
        }


def problems(row: dict, shape: str = SHAPE) -> list[str]:
    """What is wrong with a kernel, or nothing. Sizes that tiles do not divide are loaded in small pieces."""
    found = []
    if row["stack"]:
        found.append(f"keeps {row['stack']} bytes of registers in memory")
    if row["shared"] > LIMITS[row["arch"]][0]:
        found.append(f"needs {row['shared']} bytes of shared memory, there are {LIMITS[row['arch']][0]}")
    if row["what"] == "triton kernel":
        if row["types"] != "ieee" and row["kernel"] not in WITHOUT_PRODUCTS and not row["tensor_ops_in_loop"]:
            found.append("has no tensor-core operation in a loop")
        if shape == SHAPE and not row["wide_loads_in_loop"]:
            found.append("has no 128-bit load in a loop")
    return [f"{row['kernel']} ({row['types']}) on sm_{row['arch']} {problem}" for problem in found]


class Traffic(TorchDispatchMode):
    """Counts torch's launches and the bytes that they read and write; views are free."""

    def __init__(self):
        super().__init__()
        self.launches = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given, made = (
            [x for x in tree_leaves(y) if torch.is_tensor(x) and x.is_meta] for y in ((args, kwargs), result)
        )
        if made and not func.is_view and "empty" not in func.__name__:
            self.launches += 1
            self.bytes += sum(x.nbytes for x in (*given, *made))
        return result


def kernel_flops(launch: tuple) -> int:
    """Products and sums of a launch, with those on padding."""
    name, grid, args, c = launch
    programs, rows = int(np.prod(grid)), c["ROWS"]
    sizes = [x for x in args if not torch.is_tensor(x)]
    if name == "attend":
        products = rows * c["RP"] * sizes[0]
    elif name == "weigh":
        products = rows * c["RP"] ** 2
    elif name == "align":
        products = rows * sizes[0] * (c["RP"] + c["SB"])
    elif name == "compare":
        products = rows * sizes[1] * c["SB"]
    elif name == "reason":
        products = rows * (sizes[1] * (sizes[1] + rows + c["SB"]) + rows * c["SB"])
    elif name == "link":
        products = rows * rows * (sizes[0] + c["SB"])
    else:
        products = 2 * rows * sizes[0]
    return 2 * programs * products


def count(name: str, run: Callable[[], object]) -> dict:
    """Work of a call on tensors without memory: launches, products, and bytes if every kernel reads and writes once."""
    with FlopCounterMode(display=False) as flops, Traffic() as traffic:
        launches = record("tf32", run)
    moved = sum(x.nbytes for launch in launches for x in launch[2] if torch.is_tensor(x))
    return {
        "what": "computed, not measured",
        "kernel": name,
        "types": "tf32",
        "launches": traffic.launches + len(launches),
        "gflop": f"{(flops.get_total_flops() + sum(map(kernel_flops, launches))) / 1e9:.1f}",
        "mbytes": f"{(traffic.bytes + moved) / 1e6:.0f}",
    }


def step_rows() -> Iterator[dict]:
    """A step of sgr with hardest negatives, 3 B pairs with a gradient, ours and caption by caption."""
    from pcsr_fast.triton import sgr as kernels

    regions, words, offsets, *rest = meta_arguments()
    leaves = [x.requires_grad_() for x in (regions, words, *rest[:-1])]
    lengths = sorted(offsets.diff().tolist() * 3, reverse=True)
    cells = torch.empty(len(lengths), 2, dtype=torch.int64, device="meta")
    upstream = torch.empty(len(lengths), device="meta")

    def ours():
        with torch.no_grad():
            kernels.forward(regions, words, offsets.numpy(), *rest)

    def ours_step():
        ours()
        _gradients(leaves, offsets.to("meta"), cells, lengths, upstream)

    def loop():
        with torch.no_grad():
            sgr_caption_loop(regions, words, offsets, *rest)

    def loop_step():
        scores = sgr_caption_loop(regions, words, offsets, *rest)
        torch.autograd.grad(scores, leaves, torch.empty_like(scores))

    yield count(f"sgr {SHAPE}: forward", ours)
    yield count(f"sgr {SHAPE}: forward and backward", ours_step)
    yield count(f"caption by caption {SHAPE}: forward", loop)
    yield count(f"caption by caption {SHAPE}: forward and backward", loop_step)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench gpu_static", description=__doc__)
    parser.add_argument("--types", choices=[*TYPES], nargs="+", default=[*TYPES])
    parser.add_argument("--shape", choices=[*OP.shapes], default=SHAPE, help="other sizes are checked but not saved")
    parser.add_argument("--no-save", action="store_true", help="check only")
    options = parser.parse_args(arguments)
    if os.environ.pop("TRITON_INTERPRET", None):
        sys.exit("bench.gpu_static: unset TRITON_INTERPRET, with which triton does not compile")

    cases = [
        (t, launch, a) for t in options.types for launch, a in product(variants(t, options.shape).values(), LIMITS)
    ]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        rows = [*pool.map(triton_row, cases), *cuda_rows()]
    wrong = [problem for row in rows for problem in problems(row, options.shape)]
    for problem in wrong:
        print(problem, file=sys.stderr)
    rows += step_rows() if options.shape == SHAPE else []
    for row in rows:
        print(" ".join(f"{k}={row[k]}" for k in COLUMNS if row.get(k) not in ("", None)))
    if not options.no_save and options.shape == SHAPE:
        with (RESULTS / "gpu_static.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
