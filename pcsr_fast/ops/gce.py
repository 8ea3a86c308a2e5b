"""gce: how image and text agree on pseudo-labels, as generalised cross entropy or cross entropy, from logits."""

from typing import NamedTuple

import torch
from torch import Tensor

from pcsr_fast.ops.op import Backward, Cost, Op, check, in_float32, register


class Agreement(NamedTuple):
    """What one pass over the logits of both sides gives; losses and means carry gradient."""

    image_loss: Tensor  # [B], of the image's prediction p against the text's label
    text_loss: Tensor  # [B], of the text's prediction q against the image's label
    image_mean: Tensor  # [K], mean of p over the batch
    text_mean: Tensor  # [K], mean of q over the batch
    image_labels: Tensor  # [B], argmax of p, ties: the lowest class
    text_labels: Tensor  # [B]


def agreement(image_logits: Tensor, text_logits: Tensor, gamma: float) -> Agreement:
    """Losses of each side's prediction [B, K] against the other side's label, and the mean predictions, in one pass.

    The loss of probability p is (1 - p^gamma) / gamma with gamma in (0, 1], and cross entropy, its limit, with gamma 0.
    Targets are constants. NaN among the logits raises on the CPU; on CUDA, where looking would stall the device, it
    makes the result NaN.
    """
    _, loss, mean, labels, _ = OP(in_float32(image_logits), in_float32(text_logits), gamma, True)
    return Agreement(*loss.unbind(), *mean.unbind(), *labels.unbind())


def gce(image_logits: Tensor, text_logits: Tensor, gamma: float = 0.7) -> Tensor:
    """Generalised cross entropy in both directions, the mean over the batch; gamma in (0, 1].

    >>> certain = torch.tensor([[50.0, 0.0], [0.0, 50.0]])
    >>> gce(certain, certain), gce(certain, certain.flip(0), gamma=1.0)
    (tensor(0.), tensor(2.))
    """
    if not 0 < gamma <= 1:
        raise RuntimeError(f"gce: gamma must be in (0, 1], got {gamma}")
    return OP(in_float32(image_logits), in_float32(text_logits), gamma, False)[0]


def entropy(mean: Tensor) -> Tensor:
    """Entropy of a mean prediction [K]; the mean is clamped at 1e-8.

    >>> entropy(torch.full((4,), 0.25))
    tensor(1.3863)
    """
    mean = mean.clamp(min=1e-8)
    return -(mean * mean.log()).sum()


@torch.no_grad()
def label_similarity(logits: Tensor, others: Tensor) -> Tensor:
    """S_p: cosine of the softmax of two batches of logits [B, K], row by row: [B]. No gradient.

    >>> label_similarity(torch.zeros(1, 4), torch.tensor([[100.0, 0.0, 0.0, 0.0]]))
    tensor([0.5000])
    """
    return torch.cosine_similarity(in_float32(logits).softmax(1), in_float32(others).softmax(1))


def reference(image_logits: Tensor, text_logits: Tensor, gamma: float, means: bool) -> tuple[Tensor, ...]:
    _check_inputs(image_logits, text_logits, gamma)
    check(not (image_logits.isnan().any() or text_logits.isnan().any()), "gce: logits contain NaN")
    logits = torch.stack([image_logits, text_logits])
    log_p = logits.log_softmax(2)
    labels = logits.argmax(2)
    log_target = log_p.gather(2, labels.flip(0)[..., None])[..., 0]
    loss = -log_target if gamma == 0 else -torch.expm1(gamma * log_target) / gamma
    mean = log_p.exp().mean(1) if means else logits[:, :0, 0]
    log_sum = (logits - logits.amax(2, keepdim=True)).detach().logsumexp(2)
    return loss.sum(0).mean(), loss, mean, labels, log_sum


def _check_inputs(image_logits, text_logits, gamma) -> None:
    dtype, shape = image_logits.dtype, [*image_logits.shape]
    check(dtype in (torch.float32, torch.float64), f"gce: logits must be float32 or float64, got {dtype}")
    check(
        len(shape) == 2 and shape[0] >= 1 and shape[1] >= 1,
        f"gce: image logits must be [batch, classes] and not empty, got {shape}",
    )
    check(text_logits.dtype == dtype, f"gce: text logits must be {dtype}, got {text_logits.dtype}")
    check([*text_logits.shape] == shape, f"gce: text logits must have shape {shape}, got {[*text_logits.shape]}")
    check(0 <= gamma <= 1, f"gce: gamma must be in [0, 1], got {gamma}")


def fake(image_logits: Tensor, text_logits: Tensor, gamma: float, means: bool) -> tuple[Tensor, ...]:
    _check_inputs(image_logits, text_logits, gamma)
    batch, classes = image_logits.shape
    loss = image_logits.new_empty(2, batch)
    labels = torch.empty_like(loss, dtype=torch.int64)
    return (
        image_logits.new_empty(()),
        loss,
        image_logits.new_empty(2, classes if means else 0),
        labels,
        torch.empty_like(loss),
    )


def fake_backward(
    grad_total, grad_loss, grad_mean, image_logits, text_logits, labels, log_sum, gamma, want_image, want_text
):
    batch, classes = image_logits.shape
    wanted = (want_image, want_text)
    return tuple(image_logits.new_empty(batch if want else 0, classes) for want in wanted)


def save(inputs, outputs):
    image_logits, text_logits, gamma, _ = inputs
    *_, labels, log_sum = outputs
    return (image_logits, text_logits, labels, log_sum), gamma


def run_backward(kernel, tensors, gamma, grads, needed):
    image, text = kernel(*grads[:3], *tensors, gamma, *needed[:2])
    return image if needed[0] else None, text if needed[1] else None, None, None


def inputs(
    dtype: torch.dtype, generator: torch.Generator, batch: int, classes: int, gamma: float, means: bool
) -> tuple:
    image_logits, text_logits = 3 * torch.randn(2, batch, classes, dtype=dtype, generator=generator)
    return image_logits, text_logits, gamma, means


def cost(image_logits, text_logits, gamma, means) -> Cost:
    # logits in, gradients out; an exponential counts as one
    return Cost(2 * (image_logits.nbytes + text_logits.nbytes), 10 * 2 * image_logits.numel())


OP = register(
    Op(
        name="gce",
        schema="(Tensor image_logits, Tensor text_logits, float gamma, bool means) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        reference=reference,
        fake=fake,
        backward=Backward(
            schema="(Tensor? grad_total, Tensor? grad_loss, Tensor? grad_mean, Tensor image_logits, "
            "Tensor text_logits, Tensor labels, Tensor log_sum, float gamma, bool want_image, bool want_text) "
            "-> (Tensor, Tensor)",
            fake=fake_backward,
            save=save,
            run=run_backward,
            inputs=(0, 1),
            outputs=3,
        ),
        shapes={
            "tiny": {"batch": 2, "classes": 3, "gamma": 0.7, "means": True},
            "odd": {"batch": 53, "classes": 45, "gamma": 0.7, "means": True},
            "odd_ce": {"batch": 53, "classes": 45, "gamma": 0.0, "means": True},
            "odd_alone": {"batch": 53, "classes": 45, "gamma": 0.7, "means": False},
            "b128": {"batch": 128, "classes": 256, "gamma": 0.7, "means": False},
            "b512": {"batch": 512, "classes": 256, "gamma": 0.7, "means": False},
            "b2048": {"batch": 2048, "classes": 256, "gamma": 0.7, "means": False},
        },
        inputs=inputs,
        cost=cost,
    )
)
