"""`python -m bench`: every op against its baselines. What is wrong is not timed; results go to bench/results."""

import argparse
import sys

import torch

from bench.baselines import BASELINES, MAY_DIFFER, RENEW
from bench.measure import RESULTS, interleaved, machine, save, summary
from pcsr_fast import backend
from pcsr_fast.ops import OPS
from pcsr_fast.ops.verify import copies, mismatch

TEST_SHAPES = ("tiny", "odd")


def on_device(args: tuple, device: str) -> tuple:
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in args)


def bench_op(op, shape: str, device: str, seconds: float) -> tuple[list[dict], list[str]]:
    """Rows for the CSV, and what was found wrong."""
    dtype = torch.float32
    args = on_device(op.inputs(dtype, torch.Generator().manual_seed(0), **op.shapes[shape]), device)
    functions = {b.__name__: b for b in BASELINES[op.name]}
    baselines = [*functions]
    functions |= {
        name: op.implementation(name) for name in backend.NAMESPACES if not backend.why_not(op.name, name, device)
    }
    wrong = [
        f"{op.name} {shape} {name}: {problem}"
        for name, function in functions.items()
        if (problem := mismatch(op, function, args, dtype, MAY_DIFFER[op.name] if name in baselines else ()))
    ]
    if wrong:
        return [], wrong

    own = {name: copies(args) for name in functions}
    calls = {name: lambda name=name: functions[name](*own[name]) for name in functions}
    times = interleaved(calls, lambda name: RENEW[op.name](*own[name]), seconds)
    least = op.cost(*args)
    rows = []
    for name in functions:
        if name in baselines:
            continue
        for baseline in baselines:
            rows.append(
                {
                    "op": op.name,
                    "shape": shape,
                    "dtype": str(dtype).removeprefix("torch."),
                    "device": device,
                    "threads": str(torch.get_num_threads()),
                    "contender": name,
                    "baseline": baseline,
                    **summary(times[name], times[baseline]),
                    "sizes": " ".join(f"{k}={v}" for k, v in op.shapes[shape].items()),
                    "least_bytes": str(least.bytes),
                    "least_flops": str(least.flops),
                    "torch": torch.__version__,
                }
            )
    return rows, []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--op", choices=[*OPS], action="append", help="only this op; may be repeated")
    parser.add_argument("--shape", action="append", help="only this named shape; may be repeated")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each row (default 5)")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()

    rows, wrong = [], []
    for name in options.op or OPS:
        for shape in OPS[name].shapes:
            if shape in TEST_SHAPES or (options.shape and shape not in options.shape):
                continue
            found, problems = bench_op(OPS[name], shape, options.device, options.seconds)
            for row in found:
                print(
                    f"{row['op']:8}{row['sizes']:44}{row['contender']:10}{row['median_us']:>10} us"
                    f"{row['speedup']:>8} x  {row['baseline']} ({row['baseline_median_us']} us)"
                )
            for problem in problems:
                print(f"WRONG, not timed: {problem}", file=sys.stderr)
            rows += found
            wrong += problems
    if rows and not options.no_save:
        path = RESULTS / f"{machine()}.csv"
        save(rows, path)
        print(f"saved to {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
