"""What every op has once: its record, its registration with torch, and the call that picks an implementation."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pcsr_fast import backend


class Cost(NamedTuple):
    """The least that an op must read and write (bytes) and compute (flops), for roofline bounds."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Backward:
    """The second torch op of a differentiable one, named <op>_backward."""

    schema: str
    fake: Callable[..., Any]
    # save(inputs, outputs) -> (tensors, constants) for run
    save: Callable[[tuple, tuple], tuple[tuple[Tensor | None, ...], Any]]
    # run(kernel, tensors, constants, grads of the outputs, which inputs need one) -> a gradient or None per input
    run: Callable[..., tuple[Tensor | None, ...]]
    # which arguments get a gradient, and how many results, the first ones, it comes from
    inputs: tuple[int, ...]
    outputs: int
    # plain PyTorch for the devices that have no kernel of their own
    anywhere: Callable[..., Any] | None = None


@dataclass(frozen=True, eq=False)
class Op:
    """One op: everything about it that does not depend on the implementation.

    The test grid and the benchmarks loop over these records, so an op that has one is tested and timed.
    """

    name: str
    # arguments and results as torch writes them; arguments marked (a!) are updated in place
    schema: str
    # plain PyTorch with the schema's arguments and results: the definition, the oracle and the fallback
    reference: Callable[..., Any]
    # empty results of the right shape, for torch.compile
    fake: Callable[..., Any]
    # named sizes: "tiny" and "odd" for tests, the others for benchmarks
    shapes: dict[str, dict[str, int]]
    # arguments of a size: inputs(dtype, generator, **shapes[name])
    inputs: Callable[..., tuple]
    cost: Callable[..., Cost]
    backward: Backward | None = None
    # what its GPU kernel is written in, and the kernel itself where that is Python
    gpu: Literal["cuda", "triton"] | None = "cuda"
    triton: Callable[..., Any] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)
    # how far a result may be from the float64 reference beyond the reference's own error at that dtype
    tolerance: dict[torch.dtype, float] = field(default_factory=lambda: {torch.float32: 1e-5, torch.float64: 1e-10})

    def __call__(self, *args):
        """Runs the op with the backend that is chosen for the device of its first argument, a tensor."""
        chosen = backend.choose(self.name, args[0].device.type, backend.current_choice())
        if self.backward and chosen != "reference" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # torch.library's way to a gradient, made for torch.compile, costs 40 us more a step
            return _direct(self, backend.NAMESPACES[chosen]).apply(*args)
        return self.implementation(chosen)(*args)

    def implementation(self, name: str) -> Callable[..., Any]:
        if name == "reference":
            return self.reference
        return getattr(getattr(torch.ops, backend.NAMESPACES[name]), self.name).default


OPS: dict[str, Op] = {}
# torch forgets a registration when its Library object dies
_libraries: list[torch.library.Library] = []


def define(op: Op, namespace: str) -> None:
    """Tells torch the op's schema, fake and gradient under a namespace; kernels are added to it from C++ or Triton."""
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(op.name + op.schema)
    torch.library.register_fake(f"{namespace}::{op.name}", op.fake, lib=library)
    if op.backward:
        define_backward(op, namespace, library)
    _libraries.append(library)


def define_backward(op: Op, namespace: str, library: torch.library.Library) -> None:
    name = f"{op.name}_backward"
    library.define(name + op.backward.schema)
    torch.library.register_fake(f"{namespace}::{name}", op.backward.fake, lib=library)
    if op.backward.anywhere:
        library.impl(name, op.backward.anywhere, "CompositeExplicitAutograd")
    kernel = getattr(getattr(torch.ops, namespace), name).default

    def setup_context(ctx, inputs, output):
        # a result that nothing depends on has no gradient, rather than one of zeros
        ctx.set_materialize_grads(False)
        tensors, ctx.constants = op.backward.save(inputs, output)
        ctx.save_for_backward(*tensors)

    def backward(ctx, *grads):
        return _run_backward(op, kernel, ctx, grads)

    torch.library.register_autograd(f"{namespace}::{op.name}", backward, setup_context=setup_context, lib=library)


def _run_backward(op: Op, kernel: Callable[..., Any], ctx, grads: tuple) -> tuple[Tensor | None, ...]:
    # nothing depends on any result
    if all(grad is None for grad in grads):
        return (None,) * len(ctx.needs_input_grad)
    return op.backward.run(kernel, ctx.saved_tensors, ctx.constants, grads, ctx.needs_input_grad)


@functools.cache
def _direct(op: Op, namespace: str) -> type[torch.autograd.Function]:
    """The op and its gradient without torch.library between them."""
    kernel = getattr(getattr(torch.ops, namespace), op.name).default
    backward_kernel = getattr(getattr(torch.ops, namespace), f"{op.name}_backward").default

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            ctx.set_materialize_grads(False)
            with torch._C._AutoDispatchBelowAutograd():
                outputs = kernel(*args)
            tensors, ctx.constants = op.backward.save(args, outputs)
            ctx.save_for_backward(*tensors)
            if isinstance(outputs, tuple):
                ctx.mark_non_differentiable(*outputs[op.backward.outputs :])
            return outputs

        @staticmethod
        def backward(ctx, *grads):
            if torch.is_grad_enabled():
                raise RuntimeError(f"{op.name}: there is no second derivative (create_graph=True)")
            return _run_backward(op, backward_kernel, ctx, grads)

    return Direct


def register(op: Op) -> Op:
    """Makes the op known to torch, the tests and the benchmarks."""
    define(op, backend.NAMESPACES["native"])
    if op.triton:
        define(op, backend.NAMESPACES["triton"])
        for device in ("CUDA", "CPU") if os.environ.get("TRITON_INTERPRET") == "1" else ("CUDA",):
            _libraries[-1].impl(op.name, op.triton, device)
    OPS[op.name] = op
    return op


def check(condition: bool, message: str) -> None:
    """Raises what the native kernels raise, so that an error looks the same on every backend."""
    if not condition:
        raise RuntimeError(message)


def in_float32(x: Tensor) -> Tensor:
    """Half precision is accepted everywhere and computed in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
