"""How a time is taken and kept: contenders in turn, medians, one CSV per machine whose rows are replaced."""

import csv
import ctypes
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

RESULTS = Path(__file__).with_name("results")
# the op of rows that describe the machine alone
MACHINE = "machine"
KEY = ("op", "shape", "task", "dtype", "device", "threads", "contender", "baseline")


def interleaved(contenders: dict[str, Callable[[], object]], prepare: Callable[[str], None], seconds: float) -> dict:
    """Times of each contender, one call after the other in turn, for about this long in all."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name, call in contenders.items():
        prepare(name)
        call()
    names = [*contenders]
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(times[names[0]]) < 3:
        # no contender always runs behind the same one
        names.append(names.pop(0))
        for name in names:
            prepare(name)
            synchronize()
            before = time.perf_counter()
            contenders[name]()
            synchronize()
            times[name].append(time.perf_counter() - before)
    return times


def extra_memory(call: Callable[[], object]) -> int:
    """Bytes beyond what is held before, at the peak of one call; 0 where the system does not tell."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    try:
        # what was freed goes back to the system, then the peak starts anew at what is resident
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return 0
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(field: str) -> int:
    return int(re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary(times: list[float], baseline: list[float]) -> dict[str, str]:
    quartiles = statistics.quantiles(times, n=4)
    return {
        "median_us": f"{statistics.median(times) * 1e6:.1f}",
        "quartiles_us": f"{quartiles[0] * 1e6:.1f}-{quartiles[2] * 1e6:.1f}",
        "baseline_median_us": f"{statistics.median(baseline) * 1e6:.1f}",
        "speedup": f"{statistics.median(baseline) / statistics.median(times):.2f}",
        "calls": str(len(times)),
    }


def processor() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def machine() -> str:
    """Names the results' file: the GPU if there is one, else the CPU, with its number of threads."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{processor()} {torch.get_num_threads()}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def save(rows: list[dict[str, str]], path: Path) -> None:
    """Writes the rows into the CSV, each in the place of an older one of the same key."""
    kept: dict[tuple, dict[str, str]] = {}
    if path.exists():
        with path.open(newline="") as file:
            kept = {tuple(row[k] for k in KEY): row for row in csv.DictReader(file)}
    kept |= {tuple(row[k] for k in KEY): row for row in rows}
    columns = [*dict.fromkeys(column for row in [*rows, *kept.values()] for column in row)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept[key] for key in sorted(kept))
