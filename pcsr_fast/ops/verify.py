"""Compares an implementation of an op with its reference in float64; the tests and the benchmarks' gate use it."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pcsr_fast import backend
from pcsr_fast.ops.op import Op


def written_arguments(op: Op) -> list[int]:
    """Which arguments the op updates in place, by its schema."""
    schema = getattr(getattr(torch.ops, backend.NAMESPACES["native"]), op.name).default._schema
    return [i for i, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write]


def copies(args: tuple, dtype: torch.dtype | None = None) -> tuple:
    """Independent arguments, the floating ones in another dtype if one is given."""

    def copy(x):
        if not isinstance(x, Tensor):
            return x
        return x.to(dtype, copy=True) if dtype and x.is_floating_point() else x.clone()

    return tree_map(copy, args)


def results(op: Op, function: Callable, args: tuple) -> list[Tensor]:
    """What a call returns, what it writes, and the gradients of a weighted sum of what it returns."""
    if op.backward is None:
        returned = function(*args)
        return tree_leaves((returned, [args[i] for i in written_arguments(op)]))
    args = [x.detach().requires_grad_() if i in op.backward.inputs else x for i, x in enumerate(args)]
    returned = function(*args)
    returned = (returned,) if isinstance(returned, Tensor) else returned
    outputs = returned[: op.backward.outputs]
    # weights that differ from place to place and are the same in every dtype
    weights = [torch.linspace(0.5, 1.5, x.numel(), device=x.device).reshape(x.shape).to(x.dtype) for x in outputs]
    grads = torch.autograd.grad(outputs, [args[i] for i in op.backward.inputs], weights)
    return [x.detach() for x in (*returned, *grads)]


def mismatch(op: Op, function: Callable, args: tuple, dtype: torch.dtype, skip: tuple[int, ...] = ()) -> str:
    """How the function differs from the reference, or nothing.

    Integers must be equal. Floats may be as far from the float64 result as the reference is at this dtype, and the
    op's tolerance beyond. Results in skip are not compared.
    """
    exact = results(op, op.reference, copies(args, torch.float64))
    usual = results(op, op.reference, copies(args))
    got = results(op, function, copies(args))
    if len(got) != len(usual):
        return f"{len(got)} results instead of {len(usual)}"
    for i, (want, plain, have) in enumerate(zip(exact, usual, got, strict=True)):
        if have.dtype != plain.dtype or have.shape != plain.shape:
            return f"result {i} is {have.dtype} {[*have.shape]} instead of {plain.dtype} {[*plain.shape]}"
        if i in skip or not have.numel():
            continue
        if not have.is_floating_point():
            if not torch.equal(have, want):
                return f"result {i} differs in {int((have != want).sum())} of {have.numel()} places"
            continue
        allowed = (plain.double() - want).abs().max() + op.tolerance[dtype] * (1 + want.abs().max())
        error = (have.double() - want).abs().max()
        # written so that NaN counts as a difference
        if not error <= allowed:
            return f"result {i} is off by {float(error):.2e}, allowed {float(allowed):.2e}"
    return ""
