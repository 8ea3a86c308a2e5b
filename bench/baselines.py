"""What is timed for each op: the call that users write, and the same in plain torch, as they would write it without."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pcsr_fast.backend import use_backend
from pcsr_fast.ops import OPS, TallyState, gce, tally, triplet
from pcsr_fast.ops.sgr_mean import fused_loss


@dataclass(frozen=True)
class Task:
    name: str
    # with the arguments of the op, like the baselines; a loss if the gradient is timed too
    call: Callable
    baselines: tuple[Callable, ...]
    # new input in place, before every timed call
    renew: Callable = lambda *args: None
    gradient: bool = True
    # results in which a baseline may differ
    may_differ: tuple[int, ...] = ()
    # shape on which all are compared before they are timed, if that would take too long on the timed one
    gate: str | None = None


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


def sgr_caption_loop(
    regions, words, offsets, image_globals, caption_globals,
    w_loc, b_loc, w_glo, b_glo, mix, shift, w_graph, b_graph, w_score, b_score,
    pairs,
):  # fmt: skip
    """All images against one caption at a time, with the operations of the published code bases."""

    def l2norm(x, dim):
        return torch.div(x, torch.pow(x, 2).sum(dim=dim, keepdim=True).sqrt() + 1e-8)

    # their queries and keys are two projections; here the second is the identity, at the same cost
    identity = torch.eye(len(b_loc), dtype=regions.dtype, device=regions.device)
    columns = []
    for c in range(len(offsets) - 1):
        caption = words[offsets[c] : offsets[c + 1]].unsqueeze(0).repeat(len(regions), 1, 1)
        attention = l2norm(F.leaky_relu(torch.bmm(regions, caption.transpose(1, 2)), 0.1), 2)
        attention = F.softmax(attention.transpose(1, 2).contiguous() * 9, 2).transpose(1, 2).contiguous()
        context = l2norm(torch.bmm(regions.transpose(1, 2), attention).transpose(1, 2), 2)
        local = l2norm(F.linear(torch.pow(torch.sub(context, caption), 2), w_loc, b_loc), 2)
        whole = l2norm(F.linear(torch.pow(torch.sub(image_globals, caption_globals[c]), 2), w_glo, b_glo), 1)
        nodes = torch.cat([whole.unsqueeze(1), local], 1)
        for m, u, wg, bg in zip(mix, shift, w_graph, b_graph, strict=True):
            query, key = F.linear(nodes, m.T, u), F.linear(nodes, identity)
            edges = F.softmax(torch.bmm(query, key.transpose(1, 2)), 2)
            nodes = torch.relu(F.linear(torch.bmm(edges, nodes), wg, bg))
        columns.append(torch.sigmoid(F.linear(nodes[:, 0], w_score[None], b_score)))
    return torch.cat(columns, 1)


def scores_of_equal_lengths(
    regions, words, image_globals, caption_globals,
    w_loc, b_loc, w_glo, b_glo, mix, shift, w_graph, b_graph, w_score, b_score,
):  # fmt: skip
    """Scores [B, G] of captions of one length, words [G, L, D], with the savings that torch can express."""
    (b, _, d), (g, length, _) = regions.shape, words.shape

    def l2norm(x, dim=-1):
        return x / (torch.linalg.vector_norm(x, dim=dim, keepdim=True) + 1e-8)

    attention = F.leaky_relu(torch.matmul(words.view(1, g * length, d), regions.transpose(1, 2)), 0.1)
    attention = F.softmax(l2norm(attention.view(b, g, length, -1), 2) * 9, 3).view(b, g * length, -1)
    context = l2norm(torch.bmm(attention, regions))
    local = l2norm(F.linear((context - words.view(1, g * length, d)).square(), w_loc, b_loc))
    whole = l2norm(F.linear((image_globals[:, None] - caption_globals).square(), w_glo, b_glo))
    nodes = torch.cat([whole[:, :, None], local.view(b, g, length, -1)], 2).flatten(0, 1)
    for t in range(len(mix)):
        # of the last step only the global node is wanted
        asking = nodes if t + 1 < len(mix) else nodes[:, :1]
        edges = F.softmax(torch.bmm(F.linear(asking, mix[t].T, shift[t]), nodes.transpose(1, 2)), 2)
        nodes = torch.relu(F.linear(torch.bmm(edges, nodes), w_graph[t], b_graph[t]))
    return torch.sigmoid(nodes[:, 0] @ w_score + b_score).view(b, g)


def sgr_grouped_compiled(regions, words, offsets, image_globals, caption_globals, *rest):
    """Captions grouped by equal length, each group in one compiled call."""
    *weights, _ = rest
    lengths = offsets.diff()
    groups = [(lengths == length).nonzero()[:, 0] for length in lengths.unique()]
    columns = [
        compiled_group(
            regions,
            words[offsets[group][:, None] + torch.arange(int(lengths[group[0]]), device=words.device)],
            image_globals,
            caption_globals[group],
            *weights,
        )
        for group in groups
    ]
    return torch.cat(columns, 1)[:, torch.cat(groups).argsort()]


compiled_group = torch.compile(scores_of_equal_lengths, dynamic=True)


def compiled(function: Callable) -> Callable:
    fast = torch.compile(function, dynamic=False)

    def run(*args):
        return fast(*args)

    run.__name__ = function.__name__.replace("eager", "compiled")
    return run


def sgr_step(scores_of: Callable, mode: str) -> Callable:
    """The loss of a training step on top of scores."""

    def loss(*args):
        scores = scores_of(*args).view(len(args[0]), -1)
        # also if the backend under test, that of sgr, has none
        with use_backend("auto"):
            return triplet(scores, 0.2, mode)

    loss.__name__ = scores_of.__name__
    return loss


def sgr_fused(*args):
    return OPS["sgr"](*args)


def sgr_mean_step(regions, words, offsets, *rest):
    *weights, _ = rest
    return fused_loss(regions, words, *weights, offsets, 0.2, None, None)


TASKS = {
    "tally": (
        Task(
            name="update",
            call=lambda votes, ids, *state: tally(votes, ids, TallyState(*state)),
            baselines=(argmax_index_put_topk, argmax_scatter_add_topk),
            renew=renew_tally,
            gradient=False,
            # topk names any of the classes that tie for argmax
            may_differ=(3,),
        ),
    ),
    "triplet": (
        Task(
            name="loss and gradient",
            call=lambda scores, margin, image_ids, caption_ids, hardest: triplet(
                scores, margin, "hardest" if hardest else "mean", image_ids, caption_ids
            ),
            baselines=(triplet_eager, compiled(triplet_eager)),
            renew=lambda scores, *rest: scores.data.uniform_(),
        ),
    ),
    "gce": (
        Task(
            name="loss and gradient",
            call=lambda image_logits, text_logits, gamma, means: gce(image_logits, text_logits, gamma),
            baselines=(gce_eager, compiled(gce_eager)),
            renew=lambda image_logits, text_logits, *rest: (image_logits.data.normal_(), text_logits.data.normal_()),
        ),
    ),
    "sgr": (
        Task(
            name="scores",
            call=lambda *args: sgr_fused(*args).view(len(args[0]), -1),
            baselines=(sgr_caption_loop, sgr_grouped_compiled),
            gradient=False,
            gate="odd",
        ),
        Task(
            name="step, hardest negatives",
            call=sgr_step(sgr_fused, "hardest"),
            baselines=(sgr_step(sgr_caption_loop, "hardest"), sgr_step(sgr_grouped_compiled, "hardest")),
            gate="odd_square",
        ),
        Task(
            name="step, mean of negatives by sgr_mean",
            call=sgr_mean_step,
            baselines=(sgr_step(sgr_caption_loop, "mean"), sgr_step(sgr_grouped_compiled, "mean")),
            gate="odd_square",
        ),
    ),
}
