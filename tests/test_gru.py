"""The CPU's bidirectional GRU over ragged sequences against torch.nn.GRU: values and every gradient."""

import pytest
import tiny
import torch
from torch import nn

from pcsr_fast.gru import ragged_gru

LENGTHS = {
    "ragged": [3, 1, 7, 7, 2, 1, 5],
    "rising": [1, 2, 3, 4],
    "equal": [4, 4, 4],
    "ones": [1, 1, 1],
    "one": [6],
    "one word": [1],
}


def made(lengths, inputs=5, hidden=4, dtype=torch.float64):
    torch.manual_seed(0)
    gru = nn.GRU(inputs, hidden, batch_first=True, bidirectional=True, dtype=dtype)
    x = torch.randn(sum(lengths), inputs, dtype=dtype, requires_grad=True)
    return gru, x, torch.tensor([0, *lengths]).cumsum(0)


def one_by_one(gru, x, offsets):
    """Each sequence alone through torch's layer, both directions averaged."""
    alone = [gru(part[None])[0][0] for part in x.split(offsets.diff().tolist())]
    return torch.cat(alone).unflatten(1, (2, -1)).mean(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=[*LENGTHS])
def test_as_torch(lengths, dtype):
    gru, x, offsets = made(lengths, dtype=dtype)
    found, expected = ragged_gru(gru, x, offsets), one_by_one(gru, x, offsets)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    weights = dict(gru.named_parameters())
    assert len(weights) == 8
    outer = torch.randn_like(found)
    for name, mine, theirs in zip(
        ("x", *weights),
        torch.autograd.grad(found, [x, *weights.values()], outer),
        torch.autograd.grad(expected, [x, *weights.values()], outer),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        assert torch.equal(ragged_gru(gru, x, offsets), found)


def test_refuses_an_empty_sequence():
    with pytest.raises(RuntimeError, match="sequence 1 is empty"):
        ragged_gru(*made([2, 0, 3]))


def test_numeric_gradient():
    gru, x, offsets = made([2, 1, 3], inputs=2, hidden=2)
    weights = [*gru.parameters()]
    assert torch.autograd.gradcheck(lambda x, *_: ragged_gru(gru, x, offsets), (x, *weights))


def test_weights_alone():
    """Neither inputs nor frozen weights need a gradient for the others to have theirs."""
    gru, x, offsets = made(LENGTHS["ragged"])
    gru.weight_hh_l0.requires_grad_(False)
    expected = torch.autograd.grad(one_by_one(gru, x, offsets).sum(), gru.bias_hh_l0)
    found = torch.autograd.grad(ragged_gru(gru, x.detach(), offsets).sum(), gru.bias_hh_l0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=[*LENGTHS])
def test_encoder_is_that_of_the_other_devices(lengths, monkeypatch):
    """As captions go through torch's layer, packed, on a GPU and where torch compiles."""
    net = tiny.network(regions=5, width=7, words=30)
    tokens, offsets = torch.randint(30, (sum(lengths),)), torch.tensor([0, *lengths]).cumsum(0)
    results = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        captions = net.encode_captions(tokens, offsets)
        loss = (captions.words * torch.arange(16).sin()).sum() + (captions.whole * torch.arange(16).cos()).sum()
        weights = [net.words.weight, *net.gru.parameters(), *net.caption_pool.parameters()]
        results.append([captions.words, captions.whole, *torch.autograd.grad(loss, weights)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
