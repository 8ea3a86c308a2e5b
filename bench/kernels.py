"""`python -m bench kernels`: every op against its baselines. What is wrong is not timed.

Own a GPU? Run `make bench` there and send the new file in bench/results as a pull request; nothing else is needed.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch.utils._pytree import tree_leaves

from bench.baselines import TASKS, Task
from bench.measure import MACHINE, RESULTS, extra_memory, interleaved, machine, save, summary
from pcsr_fast import backend
from pcsr_fast.ops import OPS
from pcsr_fast.ops.verify import copies, mismatch

# a call with this many flops is compared with the speed of torch.mm on square matrices
HEAVY, SQUARE, MM = 10**9, 2048, "torch.mm"


def is_test_shape(shape: str) -> bool:
    return shape.startswith(("tiny", "odd"))


def arguments(op, shape: str, device: str) -> tuple:
    args = op.inputs(torch.float32, torch.Generator().manual_seed(0), **op.shapes[shape])
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in args)


def leaves(op, task: Task, args: tuple) -> list[torch.Tensor]:
    """The arguments that get a gradient, set to want one."""
    return [args[i].requires_grad_() for i in op.backward.inputs] if task.gradient else []


def step(function, args: tuple, wanted: list[torch.Tensor]):
    """Forward, and backward where it is timed."""
    if not wanted:
        with torch.no_grad():
            return function(*args)
    result = function(*args)
    return result, *torch.autograd.grad(result, wanted)


def wrong_baseline(op, task: Task, function, args: tuple) -> str:
    """How a baseline differs from the reference, or nothing."""
    if op.backward is None:
        return mismatch(op, function, args, torch.float32, task.may_differ)
    exact, own = copies(args, torch.float64), copies(args)
    with backend.use_backend("reference"):
        want = tree_leaves(step(task.call, exact, leaves(op, task, exact)))
    got = tree_leaves(step(function, own, leaves(op, task, own)))
    same = all(torch.allclose(a.double(), b, rtol=1e-4, atol=1e-5) for a, b in zip(got, want, strict=True))
    return "" if same else "result or gradient differs"


def bench_task(op, task: Task, shape: str, device: str, seconds: float) -> tuple[list[dict], list[str]]:
    """Rows for the CSV, and what was found wrong."""
    kernels = [name for name in backend.NAMESPACES if not backend.why_not(op.name, name, device)]
    args = arguments(op, task.gate or shape, device)
    wrong = {name: mismatch(op, op.implementation(name), args, torch.float32) for name in kernels}
    wrong |= {function.__name__: wrong_baseline(op, task, function, args) for function in task.baselines}
    problems = [f"{op.name} {shape} {name}: {problem}" for name, problem in wrong.items() if problem]
    if problems:
        return [], problems

    args = arguments(op, shape, device)
    functions = dict.fromkeys(kernels, task.call) | {f.__name__: f for f in task.baselines}
    own = {name: copies(args) for name in functions}
    wanted = {name: leaves(op, task, own[name]) for name in functions}
    calls = {name: partial(step, function, own[name], wanted[name]) for name, function in functions.items()}

    def prepare(name: str) -> None:
        task.renew(*own[name])
        # baselines may end in an op of ours, which is then as fast as it can be
        backend.set_backend(name if name in kernels else "auto")

    least = op.cost(*args)
    if least.flops > HEAVY and not task.gradient:
        square = torch.randn(SQUARE, SQUARE, device=device)
        calls[MM] = partial(torch.mm, square, square)
        own[MM] = args
    times = interleaved(calls, prepare, seconds)
    memory = {}
    for name, call in calls.items():
        prepare(name)
        memory[name] = extra_memory(call)
    backend.set_backend("auto")

    def share_of_mm(kernel: str) -> str:
        if MM not in times:
            return ""
        rate = least.flops / statistics.median(times[kernel])
        return f"{rate / (2 * SQUARE**3 / statistics.median(times[MM])):.2f}"

    rows = [
        {
            "op": op.name,
            "shape": shape,
            "task": task.name,
            "dtype": "float32",
            "device": device,
            "threads": str(torch.get_num_threads()),
            "contender": kernel,
            "baseline": baseline.__name__,
            **summary(times[kernel], times[baseline.__name__]),
            "extra_mb": f"{memory[kernel] / 1e6:.1f}",
            "baseline_extra_mb": f"{memory[baseline.__name__] / 1e6:.1f}",
            "share_of_mm": share_of_mm(kernel),
            "sizes": " ".join(f"{k}={v}" for k, v in op.shapes[shape].items()),
            "least_bytes": str(least.bytes),
            "least_flops": str(least.flops),
            "torch": torch.__version__,
        }
        for kernel in kernels
        for baseline in task.baselines
    ]
    return rows, []


def line(row: dict[str, str]) -> str:
    return (
        f"{row['op']:8}{row['shape']:12}{row['task']:26}{row['contender']:8}{row['median_us']:>12} us"
        f"{row['speedup']:>8} x  {row['baseline']} ({row['baseline_median_us']} us), "
        f"extra memory {row['extra_mb']} MB ({row['baseline_extra_mb']} MB)"
        + (f", {row['share_of_mm']} of torch.mm" if row["share_of_mm"] else "")
    )


def copy_row(device: str, seconds: float) -> dict[str, str]:
    """How fast this machine moves memory: the slanted roof of a roofline."""
    source = torch.ones(1 << 24, device=device)
    target = torch.empty_like(source)
    times = interleaved({"copy_": lambda: target.copy_(source)}, lambda name: None, seconds)["copy_"]
    return {
        **{"op": MACHINE, "shape": "64MB", "task": "copy", "dtype": "float32", "device": device},
        **{"threads": str(torch.get_num_threads()), "contender": "copy_", "baseline": "copy_"},
        **summary(times, times),
        **{"sizes": "", "least_bytes": str(2 * source.nbytes), "least_flops": "0", "torch": torch.__version__},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench kernels", description=__doc__)
    parser.add_argument("--op", choices=[*OPS], action="append", help="only this op; may be repeated")
    parser.add_argument("--shape", action="append", help="only this named shape; may be repeated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each row (default 5)")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)

    rows, wrong = [], []
    for name in options.op or OPS:
        for shape in OPS[name].shapes:
            if is_test_shape(shape) or (options.shape and shape not in options.shape):
                continue
            for task in TASKS[name]:
                found, problems = bench_task(OPS[name], task, shape, options.device, options.seconds)
                for row in found:
                    print(line(row), flush=True)
                for problem in problems:
                    print(f"WRONG, not timed: {problem}", file=sys.stderr)
                rows += found
                wrong += problems
    if rows and not options.no_save:
        rows.append(copy_row(options.device, options.seconds))
        path = RESULTS / f"{machine()}.csv"
        save(rows, path)
        print(f"saved to {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
