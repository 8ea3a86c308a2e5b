"""The grid: every op, implementation, shape and dtype against the float64 reference, and torch's checks of an op."""

import pytest
import torch

import pcsr_fast as pf
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
    # it gives up on code that was compiled often, and this is the same code for every op
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: function(*args), fullgraph=True, dynamic=False)
    for a, b in zip(results(op, compiled, copies(args)), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("op", "shape", "dtype"), GRID)
def test_cost_is_positive(op, shape, dtype):
    cost = op.cost(*samples(op, shape, dtype))
    assert cost.bytes > 0
    assert cost.flops > 0


PUBLIC = {
    "triplet": lambda x: pf.triplet(x, 0.2),
    "gce": lambda x: pf.gce(x, x.flip(0)),
    "agreement": lambda x: pf.entropy(pf.agreement(x, x.flip(0), 0.0).image_mean),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_compile_with_their_gradient(name):
    x = torch.rand(24, 24, generator=torch.Generator().manual_seed(0), requires_grad=True)
    want = PUBLIC[name](x)
    (grad,) = torch.autograd.grad(want, x)
    got = torch.compile(PUBLIC[name], fullgraph=True, dynamic=False)(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, x)[0], grad)


@pytest.mark.parametrize("name", PUBLIC)
def test_there_is_no_second_derivative(name):
    x = torch.rand(5, 5, requires_grad=True)
    with pytest.raises(RuntimeError, match="there is no second derivative"):
        torch.autograd.grad(PUBLIC[name](x), x, create_graph=True)


@pytest.mark.parametrize("name", PUBLIC)
def test_backward_can_run_twice(name):
    x = torch.rand(9, 9, requires_grad=True)
    loss = PUBLIC[name](x)
    first = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(loss, x)[0])
