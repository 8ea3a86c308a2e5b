"""gce: the laws of generalised cross entropy, stability at extreme logits, means and bad input."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pcsr_fast import agreement, entropy, gce, label_similarity
from pcsr_fast.ops import OPS

OP = OPS["gce"]


def draw_logits(*shape, generator, scale=3.0, dtype=torch.float64):
    return (scale * torch.randn(2, *shape, dtype=dtype, generator=generator)).unbind()


def test_worked_example(implementation):
    # p = (3/4, 1/4), q = (1/5, 4/5): the image says 0, the text 1
    image = torch.tensor([[3.0, 1.0]], dtype=torch.float64).log()
    text = torch.tensor([[1.0, 4.0]], dtype=torch.float64).log()
    total, loss, mean, labels, _ = implementation(OP)(image, text, 0.5, True)
    torch.testing.assert_close(loss, torch.tensor([[(1 - 0.25**0.5) / 0.5], [(1 - 0.2**0.5) / 0.5]], dtype=image.dtype))
    torch.testing.assert_close(mean, torch.tensor([[0.75, 0.25], [0.2, 0.8]], dtype=image.dtype))
    torch.testing.assert_close(total, loss.sum())
    assert labels.tolist() == [[0], [1]]


def test_gamma_one_is_mean_absolute_error(implementation, generator):
    image, text = draw_logits(40, 11, generator=generator)
    loss = implementation(OP)(image, text, 1.0, True)[1]
    p, q = image.softmax(1), text.softmax(1)
    for got, own, other in ((loss[0], p, q), (loss[1], q, p)):
        target = F.one_hot(other.argmax(1), 11)
        torch.testing.assert_close(got, (own - target).abs().sum(1) / 2)


def test_gamma_to_zero_is_cross_entropy(implementation, generator):
    image, text = draw_logits(40, 11, generator=generator)
    want = torch.stack(
        [
            F.cross_entropy(image, text.argmax(1), reduction="none"),
            F.cross_entropy(text, image.argmax(1), reduction="none"),
        ]
    )
    torch.testing.assert_close(implementation(OP)(image, text, 0.0, True)[1], want)
    torch.testing.assert_close(implementation(OP)(image, text, 1e-9, True)[1], want, rtol=1e-6, atol=0)
    distance = [(implementation(OP)(image, text, g, True)[1] - want).abs().max() for g in (0.5, 0.1, 0.01)]
    assert distance[0] > distance[1] > distance[2]


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.7, 1.0])
def test_gradcheck(implementation, gamma, generator):
    image, text = (x.requires_grad_() for x in draw_logits(5, 7, generator=generator))
    assert torch.autograd.gradcheck(lambda a, b: implementation(OP)(a, b, gamma, True)[:3], (image, text))
    # one side only
    assert torch.autograd.gradcheck(lambda a: implementation(OP)(a, text.detach(), gamma, True)[:3], image)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_extreme_logits(implementation, dtype, gamma):
    image = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 0.0], [1e4, 1e4, 1e4], [0.0, -1e4, -1e4]], dtype=dtype)
    text = torch.tensor([[1e4, -1e4, 0.0], [1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [-1e4, 1e4, 0.0]], dtype=dtype)

    def run(function, image, text):
        image, text = image.clone().requires_grad_(), text.clone().requires_grad_()
        _, loss, mean, labels, _ = function(image, text, gamma, True)
        grads = torch.autograd.grad(loss.sum() + (mean**2).sum(), (image, text))
        return [x.detach().double() for x in (loss, mean, labels, *grads)]

    for got, want in zip(
        run(implementation(OP), image, text), run(OP.reference, image.double(), text.double()), strict=True
    ):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@given(
    st.integers(1, 9),
    st.integers(1, 70),
    st.sampled_from([0.0, 0.2, 0.7, 1.0]),
    st.sampled_from([0.0, 1.0, 30.0]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_shape(batch, classes, gamma, scale, means, data):
    from conftest import EMULATED, load_emulated

    from pcsr_fast.ops.verify import mismatch

    load_emulated()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    for dtype in (torch.float32, torch.float64):
        image, text = draw_logits(batch, classes, generator=generator, scale=scale, dtype=dtype)
        for name in ("native", EMULATED):
            assert not mismatch(OP, OP.implementation(name), (image, text, gamma, means), dtype)


def test_ties_go_to_the_lowest_class(implementation):
    labels = implementation(OP)(torch.zeros(3, 40), torch.ones(3, 40), 0.7, True)[3]
    assert labels.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_permuting_the_batch_permutes_the_gradient(implementation, generator):
    image, text = draw_logits(60, 33, generator=generator, dtype=torch.float32)
    order = torch.randperm(60, generator=generator)

    def run(image, text):
        image, text = image.detach().requires_grad_(), text.detach().requires_grad_()
        _, loss, mean, *_ = implementation(OP)(image, text, 0.7, True)
        weights = torch.linspace(0, 1, 33)
        return loss.detach(), mean.detach(), *torch.autograd.grad(loss.sum() + (weights * mean).sum(), (image, text))

    loss, mean, *grads = run(image, text)
    loss2, mean2, *grads2 = run(image[order], text[order])
    torch.testing.assert_close(loss2, loss[:, order])
    torch.testing.assert_close(mean2, mean)
    for a, b in zip(grads, grads2, strict=True):
        torch.testing.assert_close(b, a[order])


def test_non_contiguous_logits(implementation, generator):
    image, text = draw_logits(30, 12, generator=generator)
    want = OP.reference(image.T.contiguous(), text.T.contiguous(), 0.7, True)
    for a, b in zip(implementation(OP)(image.T, text.T, 0.7, True), want, strict=True):
        torch.testing.assert_close(a, b)


def test_threads_do_not_matter(generator):
    image, text = draw_logits(400, 200, generator=generator, dtype=torch.float32)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found.append(OP.implementation("native")(image, text, 0.7, True))
        finally:
            torch.set_num_threads(2)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_objectives_of_the_method(generator):
    """Clean: cross entropy against the text's label minus entropy; ambiguous: gce; as torch writes them."""
    image, text = (x.requires_grad_() for x in draw_logits(50, 20, generator=generator))
    both = agreement(image, text, gamma=0.0)
    clean = both.image_loss.mean() - 10 * entropy(both.image_mean)
    p = image.softmax(1)
    mean = p.mean(0)
    want = F.cross_entropy(image, text.argmax(1)) + 10 * (mean * mean.log()).sum()
    torch.testing.assert_close(clean, want)
    torch.testing.assert_close(torch.autograd.grad(clean, image), torch.autograd.grad(want, image))
    assert torch.equal(both.text_labels, text.argmax(1))
    assert torch.equal(both.image_labels, image.argmax(1))

    p, q = image.softmax(1), text.softmax(1)
    p_target, q_target = p.gather(1, q.argmax(1)[:, None]), q.gather(1, p.argmax(1)[:, None])
    want = ((1 - p_target**0.7) / 0.7 + (1 - q_target**0.7) / 0.7).mean()
    torch.testing.assert_close(gce(image, text, 0.7), want)
    grads = torch.autograd.grad(gce(image, text, 0.7), (image, text))
    torch.testing.assert_close(grads, torch.autograd.grad(want, (image, text)))


def test_entropy():
    assert entropy(torch.tensor([1.0, 0.0])) == pytest.approx(0, abs=1e-6)
    assert entropy(torch.full((8,), 1 / 8)) == pytest.approx(torch.tensor(8.0).log())


def test_label_similarity(generator):
    a, b = (x.requires_grad_() for x in draw_logits(6, 5, generator=generator))
    got = label_similarity(a, b)
    p, q = a.softmax(1), b.softmax(1)
    torch.testing.assert_close(got, (p * q).sum(1) / (p.norm(dim=1) * q.norm(dim=1)))
    assert not got.requires_grad
    torch.testing.assert_close(label_similarity(a, a), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, generator):
    image, text = (x.to(dtype).requires_grad_() for x in draw_logits(30, 40, generator=generator))
    loss = gce(image, text)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, gce(image.float(), text.float()))
    loss.backward()
    assert image.grad.dtype == text.grad.dtype == dtype


def test_nan(implementation):
    image, text = torch.randn(2, 70, 5)
    text[40, 3] = float("nan")
    function = implementation(OP)
    if "emulated" in str(function):
        # CUDA does not look, but the result tells
        _, loss, mean, *_ = function(image, text, 0.7, True)
        assert loss[1, 40].isnan()
        assert mean[1].isnan().all()
        return
    with pytest.raises(RuntimeError, match="logits contain NaN"):
        function(image, text, 0.7, True)


@pytest.mark.parametrize(
    ("match", "image", "text", "gamma"),
    [
        (r"text logits must have shape \[3, 4\], got \[3, 5\]", torch.zeros(3, 4), torch.zeros(3, 5), 0.7),
        ("text logits must be", torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.float64), 0.7),
        (r"not empty, got \[0, 4\]", torch.zeros(0, 4), torch.zeros(0, 4), 0.7),
        (r"must be \[batch, classes\].*, got \[4\]", torch.zeros(4), torch.zeros(4), 0.7),
        ("logits must be float32 or float64", torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4), 0.7),
        (r"gamma must be in \[0, 1\], got 1.5", torch.zeros(3, 4), torch.zeros(3, 4), 1.5),
        (r"gamma must be in \[0, 1\], got -0.5", torch.zeros(3, 4), torch.zeros(3, 4), -0.5),
        (r"gamma must be in \[0, 1\], got nan", torch.zeros(3, 4), torch.zeros(3, 4), float("nan")),
    ],
)
def test_bad_input(implementation, match, image, text, gamma):
    with pytest.raises(RuntimeError, match=match):
        implementation(OP)(image, text, gamma, True)


def test_gce_wants_a_positive_gamma():
    with pytest.raises(RuntimeError, match=r"gamma must be in \(0, 1\], got 0"):
        gce(torch.zeros(2, 2), torch.zeros(2, 2), 0)


def test_memory_is_the_gradient():
    """Forward and backward take the two gradients and O(B) more."""
    script = """
import resource, torch
from pcsr_fast import gce
gce(torch.rand(64, 64, requires_grad=True), torch.rand(64, 64, requires_grad=True)).backward()
image, text = (torch.rand(100_000, 256, requires_grad=True) for _ in range(2))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
gce(image, text).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (2 * image.nbytes))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert float(done.stdout) < 1.1, done.stderr
