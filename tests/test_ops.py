"""The grid: every op, implementation, shape and dtype against the float64 reference, and torch's checks of an op."""

import pytest
import torch

from pcsr_fast.ops import OPS
from pcsr_fast.ops.verify import copies, mismatch, results, written_arguments

GRID = [
    pytest.param(op, shape, dtype, id=f"{op.name}-{shape}-{str(dtype).removeprefix('torch.')}")
    for op in OPS.values()
    for shape in op.shapes
    if shape.startswith(("tiny", "odd"))
    for dtype in op.dtypes
]


def samples(op, shape, dtype):
    return op.inputs(dtype, torch.Generator().manual_seed(0), **op.shapes[shape])


@pytest.mark.parametrize(("op", "shape", "dtype"), GRID)
def test_value(implementation, op, shape, dtype):
    assert not mismatch(op, implementation(op), samples(op, shape, dtype), dtype)


@pytest.mark.parametrize(("op", "shape", "dtype"), GRID)
def test_inputs_are_left_alone(implementation, op, shape, dtype):
    args = samples(op, shape, dtype)
    before = copies(args)
    implementation(op)(*args)
    for i, (now, then) in enumerate(zip(args, before, strict=True)):
        if i not in written_arguments(op) and isinstance(now, torch.Tensor):
            assert torch.equal(now, then)


def test_the_grid_can_fail():
    op = OPS["tally"]
    args = samples(op, "odd", torch.float32)

    def forgets_one(votes, ids, *state):
        return op.reference(votes[1:], ids[1:], *state)

    def miscounts(votes, ids, *state):
        labels = op.reference(votes, ids, *state)
        state[0][0, 0] += 1
        return labels

    assert "result 0 is" in mismatch(op, forgets_one, args, torch.float32)
    assert "result 1 differs in 1 of" in mismatch(op, miscounts, args, torch.float32)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_opcheck(implementation, op):
    function = implementation(op)
    if function is op.reference:
        return
    torch.library.opcheck(function, samples(op, "odd", torch.float32))


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_compile(implementation, op):
    function = implementation(op)
    if function is op.reference:
        return
    args = samples(op, "odd", torch.float32)
    want = results(op, function, copies(args))
    compiled = torch.compile(lambda *args: function(*args), fullgraph=True, dynamic=False)
    for a, b in zip(results(op, compiled, copies(args)), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("op", "shape", "dtype"), GRID)
def test_cost_is_positive(op, shape, dtype):
    cost = op.cost(*samples(op, shape, dtype))
    assert cost.bytes > 0
    assert cost.flops > 0
