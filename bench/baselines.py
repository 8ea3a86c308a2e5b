"""What is timed for each op: the call that users write, and the same in plain torch, as they would write it without."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pcsr_fast.ops import TallyState, gce, tally, triplet


@dataclass(frozen=True)
class Task:
    # with the arguments of the op, like the baselines; a loss if the op has a gradient, and then backward is timed too
    call: Callable
    baselines: tuple[Callable, ...]
    # new input in place, before every timed call
    renew: Callable
    # results in which a baseline may differ
    may_differ: tuple[int, ...] = ()


def argmax_index_put_topk(votes, ids, counts, n_max, argmax, n_second):
    labels = votes.argmax(1)
    one = torch.ones((), dtype=counts.dtype, device=counts.device)
    counts.view(-1).index_put_((ids * counts.shape[1] + labels,), one, accumulate=True)
    return keep_top(labels, ids, counts, n_max, argmax, n_second)


def argmax_scatter_add_topk(votes, ids, counts, n_max, argmax, n_second):
    labels = votes.argmax(1)
    counts.view(-1).scatter_add_(0, ids * counts.shape[1] + labels, torch.ones_like(labels, dtype=counts.dtype))
    return keep_top(labels, ids, counts, n_max, argmax, n_second)


def keep_top(labels, ids, counts, n_max, argmax, n_second):
    top = counts[ids].topk(2, dim=1)
    n_max[ids], n_second[ids] = top.values.unbind(1)
    argmax[ids] = top.indices[:, 0].int()
    return labels


def renew_tally(votes, ids, counts, *rest):
    # the same images again would be found in the cache
    votes.normal_()
    ids.random_(len(counts))


def triplet_eager(scores, margin, image_ids, caption_ids, hardest):
    positive = scores.diagonal()
    masked = image_ids[:, None] == image_ids
    row = (margin[:, None] + scores - positive[:, None]).clamp(min=0).masked_fill(masked, 0)
    col = (margin + scores - positive).clamp(min=0).masked_fill(masked, 0)
    if hardest:
        return row.max(1).values.sum() + col.max(0).values.sum()
    return row.mean(1).sum() + col.mean(0).sum()


def gce_eager(image_logits, text_logits, gamma, means):
    p, q = F.softmax(image_logits, 1), F.softmax(text_logits, 1)
    p_target = p.gather(1, text_logits.argmax(1, keepdim=True))
    q_target = q.gather(1, image_logits.argmax(1, keepdim=True))
    return ((1 - p_target**gamma) / gamma + (1 - q_target**gamma) / gamma).mean()


def compiled(function: Callable) -> Callable:
    fast = torch.compile(function, dynamic=False)

    def run(*args):
        return fast(*args)

    run.__name__ = function.__name__.replace("eager", "compiled")
    return run


TASKS = {
    "tally": Task(
        call=lambda votes, ids, *state: tally(votes, ids, TallyState(*state)),
        baselines=(argmax_index_put_topk, argmax_scatter_add_topk),
        renew=renew_tally,
        # topk names any of the classes that tie for argmax
        may_differ=(3,),
    ),
    "triplet": Task(
        call=lambda scores, margin, image_ids, caption_ids, hardest: triplet(
            scores, margin, "hardest" if hardest else "mean", image_ids, caption_ids
        ),
        baselines=(triplet_eager, compiled(triplet_eager)),
        renew=lambda scores, *rest: scores.data.uniform_(),
    ),
    "gce": Task(
        call=lambda image_logits, text_logits, gamma, means: gce(image_logits, text_logits, gamma),
        baselines=(gce_eager, compiled(gce_eager)),
        renew=lambda image_logits, text_logits, *rest: (image_logits.data.normal_(), text_logits.data.normal_()),
    ),
}
