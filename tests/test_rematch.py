"""What refinable pairs are trained as: a bank of clean predictions, and images that fit captions."""

import numpy as np
import tiny
import torch

from pcsr_fast.rematch import Bank


def cosine(p, q):
    return (p * q).sum(-1) / (p.norm(dim=-1) * q.norm(dim=-1))


def logits_of(*classes, k=8):
    return 9 * torch.nn.functional.one_hot(torch.tensor(classes), k).float()


def test_bank_matches_the_nearest():
    config = tiny.config(rematch_scope="batch", likeness_temperature=1.0, rematch_by="images")
    bank = Bank.empty(config, "cpu")
    generator = torch.Generator().manual_seed(0)
    theirs, own = torch.randn(8, 8, generator=generator) * 3, torch.randn(5, 8, generator=generator) * 3
    bank.put(theirs, theirs, torch.arange(20, 20 + 8), config)
    pairs, likeness = bank.match(own, config)
    similar = torch.stack([cosine(x, theirs.softmax(1)) for x in own.softmax(1)])
    torch.testing.assert_close(likeness, similar.max(1).values)
    assert pairs.tolist() == (similar.argmax(1) + 20).tolist()
    # NaN is no match
    bank.predictions[3] = torch.nan
    similar[:, 3] = -1
    assert bank.match(own, config)[0].tolist() == (similar.argmax(1) + 20).tolist()


def test_bank_of_one_step_forgets():
    config = tiny.config(rematch_scope="batch")
    bank = Bank.empty(config, "cpu")
    assert bank.filled == 0
    for step, (size, first) in enumerate(((8, 100), (3, 200))):
        bank.forget(config)
        bank.put(
            *[logits_of(*range(step, step + size) if size < 8 else range(8))] * 2,
            torch.arange(first, first + size),
            config,
        )
    assert bank.filled == 3
    # class 7 was of the step before
    assert {*bank.match(logits_of(7, 0, 2), config)[0].tolist()} <= {200, 201, 202}


def test_ring_overwrites_the_oldest():
    config = tiny.config(rematch_scope="bank", bank_size=10)
    bank = Bank.empty(config, "cpu")
    for start in (0, 4, 8):
        bank.forget(config)
        bank.put(*[logits_of(*[start // 4] * 4)] * 2, torch.arange(start, start + 4), config)
    assert sorted(bank.pairs.tolist()) == [*range(2, 12)]
    assert bank.filled == 10
    assert bank.match(logits_of(1, 2), config)[0].tolist()[0] in range(4, 8)
    assert bank.match(logits_of(0), config)[0].tolist()[0] in (2, 3)


def test_a_bank_drops_pairs_that_are_not_clean_any_more():
    config = tiny.config(rematch_scope="bank", bank_size=10)
    bank = Bank.empty(config, "cpu")
    bank.put(*[logits_of(0, 1, 2)] * 2, torch.tensor([4, 5, 6]), config)
    bank.keep(np.arange(8) != 5)
    assert bank.pairs.tolist() == [4, -1, 6] + [-1] * 7
    assert bank.match(logits_of(1), config)[0].tolist()[0] in (4, 6)
    bank.keep(np.zeros(8, bool))
    assert bank.filled == 0
