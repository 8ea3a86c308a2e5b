"""Tests of the CUDA-on-CPU shim: it runs correct kernels correctly, and every seeded bug is caught by its detector."""

import ctypes
import json
import shutil
import subprocess

import cuda_on_cpu
import numpy as np
import pytest
from cuda_on_cpu import REPORTED, build, run_sanitized, seeded_bugs
from cuda_on_cpu.seeded_bugs import KERNELS, Kernels, floats, ints

SEEDED_BUGS = cuda_on_cpu.SHIM / "seeded_bugs.cu"
SCHEDULES = ["forward", "reverse", "random"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return Kernels(build([SEEDED_BUGS], flags=["-Wall", "-Wextra", "-Werror"]))


@pytest.fixture(params=SCHEDULES)
def schedule(request, monkeypatch) -> str:
    monkeypatch.setenv("CUSHIM_ORDER", request.param)
    return request.param


@pytest.mark.parametrize("workers", ["1", "3"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_correct_kernels_are_right_in_every_schedule(kernels, schedule, kernel, workers, monkeypatch):
    monkeypatch.setenv("CUSHIM_WORKERS", workers)
    assert getattr(kernels, kernel)()


def test_random_schedules_differ_by_seed(kernels, monkeypatch):
    monkeypatch.setenv("CUSHIM_ORDER", "random")
    results = set()
    for seed in "123":
        monkeypatch.setenv("CUSHIM_SEED", seed)
        out = [floats(np.zeros(256)) for _ in range(2)]
        for o in out:
            kernels.call("run_reverse_tile", floats(range(256)), o, 1, 1, 1)
        assert np.array_equal(out[0], out[1], equal_nan=True)
        results.add(out[0].tobytes())
    assert len(results) == 3


# a missing barrier before reading, one before writing again, no __syncwarp
@pytest.mark.parametrize(("kernel", "bug"), [("reverse_tile", 1), ("reverse_tile", 2), ("rotate_warp", 1)])
def test_missing_barriers_give_wrong_results(kernels, monkeypatch, kernel, bug):
    right = []
    for order in SCHEDULES:
        monkeypatch.setenv("CUSHIM_ORDER", order)
        right.append(getattr(kernels, kernel)(bug))
    assert not all(right)


@pytest.mark.parametrize(
    ("kernel", "bug", "message"),
    [
        (
            "rotate_warp",
            3,
            r"returned while other threads wait in __syncthreads|other threads of the block have returned",
        ),
        ("first_positive", 1, r"__ballot_sync .* mask 0x0000ffff, which does not name its own lane"),
        ("first_positive", 2, r"with mask 0x\w+, but lane \d+ in __ballot_sync .* with mask 0x\w+"),
        ("first_positive", 3, r"is in \w+ \(line \d+\), but lane \d+ of the same mask in \w+"),
        ("first_positive", 4, r"waits for ever in __ballot_sync .* in __syncthreads .*: deadlock"),
        ("first_positive", 5, r"__syncthreads at line \d+, but thread \d+ in __syncthreads at line \d+"),
        (
            "first_positive",
            6,
            r"returned while other threads wait in __syncthreads|other threads of the block have returned",
        ),
    ],
)
def test_misused_barriers_are_reported(kernels, schedule, kernel, bug, message):
    with pytest.raises(RuntimeError, match=message):
        getattr(kernels, kernel)(bug)
    # and the next launches, of fewer and of more threads, are not harmed
    kernels.call("run_configuration", ints([0, 0]), 1, 40, 4, 0)
    assert getattr(kernels, kernel)()


def test_shuffle_from_a_lane_outside_of_the_mask_is_poison(kernels):
    out = ints(np.zeros(64))
    kernels.call("run_first_positive", ints(np.ones(64)), out, 7)
    assert (out == -1).all()


def test_shared_memory_is_poisoned_for_every_block(kernels, schedule):
    out = ints(np.zeros(20))
    kernels.call("run_uninitialised", out, 10)
    assert (out == -1).all()


@pytest.mark.parametrize(
    ("blocks", "threads", "shared", "message"),
    [
        (0, 1, 4, "no blocks"),
        (1, 0, 4, "no threads"),
        (1, 1025, 4, "too many threads"),
        (1, 1, (48 << 10) + 4, "dynamic shared memory"),
    ],
)
def test_invalid_launches_are_reported(kernels, blocks, threads, shared, message):
    with pytest.raises(RuntimeError, match=f"invalid launch: .*{message}"):
        kernels.call("run_configuration", ints([0, 0]), blocks, threads, shared, 0)


def test_largest_launches_are_accepted():
    # a library of its own: what a kernel is allowed stays allowed
    kernels = Kernels(build([SEEDED_BUGS], defines={"LARGEST": 1}))
    kernels.call("run_configuration", ints([0, 0]), 1, 1024, 48 << 10, 0)
    kernels.call("run_configuration", ints([0, 0]), 1, 1, 96 << 10, 96 << 10)
    with pytest.raises(RuntimeError, match="more shared memory than a GPU has"):
        kernels.call("run_configuration", ints([0, 0]), 1, 1, 4, 1 << 20)


def test_intrinsics(kernels):
    f, i = floats([0, 1]), ints([0, 0, 2, 3, 4, 5, 0, 3, 12])
    u, d = np.zeros(1, np.uint64), np.zeros(1)
    kernels.call("run_intrinsics", f, i, u, d)
    assert f[0] == 2 + 3 + 1 + 0.5 + 0.25
    assert i[0] == 4 + 40 + 31000 + 100000
    assert i[1:].tolist() == [2 + 3 + 4 + 5, 7, -7, 9, 6, 3 + 12, 15, 4]
    assert (u[0], d[0]) == (1 << 40, 0.5)


def check(kind: str, cases: list[tuple[str, int]], **env: str) -> subprocess.CompletedProcess:
    """Runs kernels in a process of their own, under a sanitizer."""
    library = str(build([SEEDED_BUGS], sanitize=kind))
    return run_sanitized(kind, [seeded_bugs.__file__, library, json.dumps(cases)], env={"CUSHIM_WORKERS": "2"} | env)


@pytest.mark.parametrize(("kind", "order"), [("thread", "forward"), ("thread", "random"), ("address", "forward")])
def test_sanitizers_are_silent_on_correct_kernels(kind, order):
    result = check(kind, [(kernel, 0) for kernel in KERNELS], CUSHIM_ORDER=order)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True"] * len(KERNELS)


@pytest.mark.parametrize(
    ("kernel", "bug"),
    [
        ("reverse_tile", 1),
        ("reverse_tile", 2),
        ("rotate_warp", 1),
        # right in every schedule: only the race shows
        ("rotate_warp", 2),
        ("sum", 1),
        ("sum", 2),
        ("max_by_last_block", 1),
    ],
)
def test_races_are_reported(kernel, bug):
    result = check("thread", [(kernel, bug)])
    assert result.returncode == REPORTED, result.stderr
    assert "data race" in result.stderr
    assert SEEDED_BUGS.name in result.stderr


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (1, "heap-buffer-overflow"),
        (2, "global-buffer-overflow"),
        (3, "heap-buffer-overflow"),
        (4, "stack-buffer-overflow"),
        (5, "misaligned address"),
    ],
)
def test_bad_addresses_are_reported(bug, message):
    result = check("address", [("copy", bug)])
    assert result.returncode == REPORTED, result.stderr
    assert message in result.stderr
    assert SEEDED_BUGS.name in result.stderr


def test_address_checker_survives_a_launch_that_was_given_up():
    result = check("address", [("first_positive", 4), ("copy", 0), ("first_positive", 0)])
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["deadlock", "True", "True"]


def test_build_follows_headers_and_reports_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_on_cpu, "CACHE", tmp_path / "cache")
    header, source = tmp_path / "value.h", tmp_path / "value.cu"
    header.write_text("#ifndef VALUE\n#define VALUE 1\n#endif\n")
    source.write_text('#include "value.h"\nextern "C" int value() { return VALUE; }\n')
    first = build([source])
    written = first.stat().st_mtime_ns
    assert build([source]) == first
    assert first.stat().st_mtime_ns == written
    header.write_text("#ifndef VALUE\n#define VALUE 2\n#endif\n")
    second = build([source])
    assert second != first
    assert [ctypes.CDLL(str(library)).value() for library in (first, second)] == [1, 2]
    assert ctypes.CDLL(str(build([source], defines={"VALUE": 3}))).value() == 3
    source.write_text("not C++\n")
    with pytest.raises(RuntimeError, match=r"error: .*not"):
        build([source])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_accepts_what_the_shim_accepts(tmp_path):
    # not from the shim's folder: nvcc would take its cuda_runtime.h
    command = ["nvcc", "-std=c++17", "-arch=sm_80", "-c", SEEDED_BUGS, "-o", "seeded_bugs.o"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
