"""A bidirectional GRU on the CPU over ragged sequences, both directions at once and without padding, with gradients."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def ragged_gru(gru: nn.GRU, x: Tensor, offsets: Tensor) -> Tensor:  # [T, I], [C + 1] -> [T, H]
    """Mean of both directions of a bidirectional layer, for sequences that stand back to back."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    weights = (torch.stack([getattr(gru, f"{name}_l0{way}") for way in ("", "_reverse")]) for name in names)
    return _RaggedGru.apply(x, *_schedule(offsets), *weights)


def _schedule(offsets: Tensor) -> tuple[list[int], Tensor, Tensor]:  # [C + 1] -> _, [2, T], [T]
    """Rows go by time step, the longest sequences first: bounds of the steps, tokens of the rows, states before them.

    Of the states the first C are zeros; a step's rows go on with the first of the step before.
    """
    lengths, order = offsets.diff().sort(descending=True, stable=True)
    if lengths[-1] < 1:
        raise RuntimeError(f"sequence {int(order[-1])} is empty")
    begin, active = offsets[:-1][order], torch.arange(int(lengths[0]))[:, None] < lengths
    bounds = [0, *active.sum(1).cumsum(0).tolist()]
    step, sequence = active.nonzero().unbind(1)
    tokens = torch.stack([begin[sequence] + step, (begin + lengths - 1)[sequence] - step])
    before = torch.tensor([0, *(len(order) + bound for bound in bounds)])[step] + sequence
    return bounds, tokens, before


class _RaggedGru(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bounds, tokens, before, w_in, w_state, b_in, b_state):
        # [T, I], _, [2, T], [T], [2, 3H, I], [2, 3H, H], [2, 3H], [2, 3H] -> [T, H]
        rows, first, hidden = len(x), bounds[1], w_state.shape[2]
        inputs = x.index_select(0, tokens.flatten()).unflatten(0, (2, rows))
        # gates: reset, update, and the state's part of new, which reset multiplies
        gates, new = x.new_empty(2, rows, 3 * hidden), x.new_empty(2, rows, hidden)
        states = x.new_zeros(2, first + rows, hidden)
        shift = b_in[:, : 2 * hidden] + b_state[:, : 2 * hidden]
        for way in range(2):
            torch.addmm(shift[way], inputs[way], w_in[way, : 2 * hidden].T, out=gates[way, :, : 2 * hidden])
            torch.addmm(b_in[way, 2 * hidden :], inputs[way], w_in[way, 2 * hidden :].T, out=new[way])
        gates[:, :, 2 * hidden :] = b_state[:, None, 2 * hidden :]
        w_back, old = w_state.mT, states[:, :first]
        for begin, end in pairwise(bounds):
            gate, old = gates[:, begin:end], old[:, : end - begin]
            if begin:
                gate.baddbmm_(old, w_back)
            gate[:, :, : 2 * hidden].sigmoid_()
            reset, update, part = gate.split(hidden, 2)
            fresh = new[:, begin:end].addcmul_(reset, part).tanh_()
            old = torch.lerp(fresh, old, update, out=states[:, first + begin : first + end])
        ctx.bounds = bounds
        ctx.save_for_backward(inputs, tokens, before, w_in, w_state, gates, new, states)
        return _in_order(states[:, first:], tokens).mul_(0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # [T, H]
        inputs, tokens, before, w_in, w_state, gates, new, states = ctx.saved_tensors
        bounds, first, hidden = ctx.bounds, ctx.bounds[1], w_state.shape[2]
        old = states.index_select(1, before)
        reset, update, part = gates.split(hidden, 2)
        # what a gate's gradient is, over that of its row's state
        d_new = (1 - update) * (1 - new * new)
        d_gates = torch.cat([d_new * part * reset * (1 - reset), (old - new) * update * (1 - update), d_new * reset], 2)
        d_state = (grad * 0.5).index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
        for earlier, begin, end in reversed([*zip([0, *bounds], bounds, bounds[1:], strict=False)]):
            d, d_gate = d_state[:, begin:end], d_gates[:, begin:end]
            d_gate.unflatten(2, (3, hidden)).mul_(d[:, :, None])
            if begin:
                d_old = d_state[:, earlier : earlier + end - begin]
                d_old.addcmul_(d, update[:, begin:end]).baddbmm_(d_gate, w_state)
        d_w_state = d_gates[:, first:].mT @ old[:, first:]
        d_b_state = d_gates.sum(1)
        # from here on the input's gates: they differ in new alone
        d_gates[:, :, 2 * hidden :] = d_new.mul_(d_state)
        d_b_in = torch.cat([d_b_state[:, : 2 * hidden], d_new.sum(1)], 1)
        d_x = _in_order(d_gates @ w_in, tokens)
        return d_x, None, None, None, d_gates.mT @ inputs, d_w_state, d_b_in, d_b_state


def _in_order(rows: Tensor, tokens: Tensor) -> Tensor:  # [2, T, D], [2, T] -> [T, D]
    """Sum of both directions, of the tokens in their order."""
    ahead, back = (way.index_select(0, place.argsort()) for way, place in zip(rows, tokens, strict=True))
    return ahead.add_(back)
