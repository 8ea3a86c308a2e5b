"""The network: encoders of regions and words, their global vectors, SGR's similarity and the pseudo-classifier.

Parameters are named after what they compute: `image.weight`, `image.bias` (regions to the joint space);
`words.weight` (word embeddings), `gru.*` (one bidirectional layer, names of torch.nn.GRU); `image_pool.*` and
`caption_pool.*` (global vectors: `local`, `whole`, `weight`, and the image's batch norms `local_norm`, `whole_norm`);
`similarity.*` (the fields of pcsr_fast.SgrWeights); `classifier.{hidden,output}.*` and
`classifier.{image,caption}_{norm,balance}.*`.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pcsr_fast.config import Config
from pcsr_fast.distributed import BatchNorm
from pcsr_fast.gru import ragged_gru
from pcsr_fast.ops import SgrWeights, sgr, sgr_mean


class Images(NamedTuple):
    regions: Tensor  # [B, R, D]
    whole: Tensor  # [B, D]


class Captions(NamedTuple):
    words: Tensor  # [sum n_c, D]
    offsets: Tensor  # [C + 1]
    whole: Tensor  # [C, D]


def l2(x: Tensor) -> Tensor:
    """x / (|x| + 1e-8) over the last dimension, in float32; 0 with gradient 0, not 1e8, where x is 0."""
    x = x.float()
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.where(norm > 0, 1 / (norm + 1e-8), 0)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Xavier-uniform weight, zero bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Pool(nn.Module):
    """Global vector of regions or words: their mean, weighted by how much each agrees with the plain mean."""

    def __init__(self, dim: int, dropout: float, slots: int | None = None):
        super().__init__()
        self.local, self.whole, self.weight = linear(dim, dim), linear(dim, dim), linear(dim, 1)
        # regions stand in fixed slots; words do not
        self.local_norm = BatchNorm(slots) if slots else nn.Identity()
        self.whole_norm = BatchNorm(dim) if slots else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:  # [B, L, D], [B, L] -> [B, D]
        if valid is None:
            mean = x.mean(1)
        else:
            x = x * valid[..., None]
            mean = x.sum(1) / valid.sum(1, keepdim=True)
        local = self.dropout(torch.tanh(self.local_norm(self.local(x))))
        whole = self.dropout(torch.tanh(self.whole_norm(self.whole(mean))))
        weight = self.weight(local * whole[:, None])[..., 0].float()
        if valid is not None:
            weight = weight.masked_fill(~valid, -torch.inf)
        return l2((weight.softmax(1)[..., None] * x).sum(1))


class Similarity(nn.Module):
    """Weights of the sgr op."""

    def __init__(self, dim: int, nodes: int, steps: int):
        super().__init__()
        shapes = SgrWeights(
            w_loc=(nodes, dim), b_loc=(nodes,), w_glo=(nodes, dim), b_glo=(nodes,),
            w_query=(steps, nodes, nodes), b_query=(steps, nodes), w_key=(steps, nodes, nodes),
            w_graph=(steps, nodes, nodes), b_graph=(steps, nodes), w_score=(nodes,), b_score=(1,),
        )  # fmt: skip
        for name, shape in shapes._asdict().items():
            value = torch.zeros(shape)
            if name.startswith("w_"):
                for matrix in value.view(-1, 1, nodes) if name == "w_score" else value.view(-1, *shape[-2:]):
                    nn.init.xavier_uniform_(matrix)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, images: Images, captions: Captions, pairs: Tensor | None = None) -> Tensor:
        """Scores [B, C], or of pairs [P, 2] alone."""
        return sgr(*self.arguments(images, captions), pairs)

    def mean_loss(self, images: Images, captions: Captions, *margin_and_ids) -> Tensor:
        """Triplet loss with the mean of all negatives, as sgr_mean computes it."""
        return sgr_mean(*self.arguments(images, captions), *margin_and_ids)

    def arguments(self, images: Images, captions: Captions) -> tuple:
        weights = SgrWeights(*(getattr(self, name) for name in SgrWeights._fields))
        return images.regions, captions.words, captions.offsets, images.whole, captions.whole, weights


class Classifier(nn.Module):
    """Pseudo-classifier: one head for both modalities, and what keeps its labels from falling into one class.

    Of all images, or of all captions, the hidden vectors have a large part in common, beside which their differences
    are small: without the norms, one for each modality, nearly everything gets the same label.
    """

    def __init__(self, config: Config, inputs: int):
        super().__init__()
        self.hidden = linear(inputs, config.classifier_hidden)
        self.output = linear(config.classifier_hidden, config.classes)
        for side in ("image", "caption"):
            norm = BatchNorm(config.classifier_hidden, affine=False) if config.classifier_norm else nn.Identity()
            self.add_module(f"{side}_norm", norm)
            self.add_module(f"{side}_balance", Balance(config.assignment, config.classes, config.assignment_queue))


class Balance(nn.Module):
    """Shifts logits before their argmax is taken as a label, so that classes are used alike; learns as it is called.

    centred: by the running mean of predictions, in log space. balanced: by Sinkhorn and Knopp's scaling of classes
    over the batch and a queue of recent logits. argmax: not at all.
    """

    RATE, SHARPNESS, ROUNDS = 0.01, 20.0, 3

    def __init__(self, assignment: str, classes: int, queue: int):
        super().__init__()
        self.assignment = assignment
        if assignment == "centred":
            self.register_buffer("mean", torch.full((classes,), 1 / classes))
        elif assignment == "balanced":
            self.register_buffer("queue", torch.zeros(queue, classes))
            self.register_buffer("filled", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def forward(self, logits: Tensor) -> Tensor:  # [B, K] -> [B, K]
        if self.assignment == "centred":
            self.mean.lerp_(logits.softmax(1).mean(0), self.RATE)
            return logits.log_softmax(1) - self.mean.log()
        if self.assignment == "balanced":
            size = len(self.queue)
            self.queue.copy_(torch.cat([logits, self.queue])[:size])
            self.filled.add_(len(logits)).clamp_(max=size)
            known = (torch.arange(size, device=logits.device) < self.filled)[:, None]
            # rows that are not filled yet take no part
            scaled = torch.where(known, self.SHARPNESS * self.queue, -torch.inf)
            by_class = torch.zeros_like(scaled[0])
            for _ in range(self.ROUNDS):
                by_row = torch.where(known, (scaled + by_class).logsumexp(1, keepdim=True), 0)
                by_class = -(scaled - by_row).logsumexp(0)
            return logits + by_class / self.SHARPNESS
        return logits


class Network(nn.Module):
    """One of the two networks. Encoders take batches as the loader gives them, captions ragged."""

    def __init__(self, config: Config, regions: int, width: int, words: int):
        super().__init__()
        dim = config.embedding
        self.slots, self.classifier_input = regions, config.classifier_input
        self.classifier_gradient = config.classifier_gradient
        self.image = linear(width, dim)
        self.words = nn.Embedding(words, config.word_embedding)
        nn.init.uniform_(self.words.weight, -0.1, 0.1)
        self.dropout = nn.Dropout(config.dropout)
        self.gru = nn.GRU(config.word_embedding, dim, batch_first=True, bidirectional=True)
        self.image_pool = Pool(dim, config.dropout, regions)
        self.caption_pool = Pool(dim, config.dropout)
        self.similarity = Similarity(dim, config.similarity, config.reasoning_steps)
        # drawn last, so that the rest begins alike with any classifier
        self.classifier = Classifier(config, regions * dim if config.classifier_input == "regions" else dim)

    def encode_images(self, features: Tensor) -> Images:  # [B, R, d_img]
        regions = l2(self.image(features.to(self.image.weight.dtype)))
        return Images(regions, self.image_pool(regions))

    def encode_captions(self, tokens: Tensor, offsets: Tensor) -> Captions:  # [sum n_c], [C + 1]
        lengths = offsets.diff()
        # lengths are needed on the host, once a batch
        longest = int(lengths.max())
        valid = torch.arange(longest, device=tokens.device) < lengths[:, None]
        # torch's layer is as quick forward; backward on the CPU it takes small products and copies at every step
        if tokens.is_cpu and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            flat = l2(ragged_gru(self.gru, self.dropout(self.words(tokens)), offsets))
            places = valid.flatten().nonzero()[:, 0]
            words = flat.new_zeros(valid.numel(), flat.shape[1]).index_copy(0, places, flat)
            return Captions(flat, offsets, self.caption_pool(words.unflatten(0, valid.shape), valid))
        padded = tokens.new_zeros(valid.shape).masked_scatter_(valid, tokens)
        packed = pack_padded_sequence(
            self.dropout(self.words(padded)), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        both = states.unflatten(2, (2, -1))
        words = l2((both[:, :, 0] + both[:, :, 1]) / 2)
        return Captions(words[valid], offsets, self.caption_pool(words, valid))

    def image_logits(self, images: Images) -> Tensor:  # [B, K]
        head, kind = self.classifier, self.classifier_input
        images = images if self.classifier_gradient else Images(*(x.detach() for x in images))
        x = {"set": images.regions, "pooled": images.whole, "regions": images.regions.flatten(1)}[kind]
        hidden = head.hidden(x).relu()
        return head.output(head.image_norm((hidden.mean(1) if kind == "set" else hidden).float())).float()

    def caption_logits(self, captions: Captions) -> Tensor:  # [C, K]
        head, kind = self.classifier, self.classifier_input
        captions = captions if self.classifier_gradient else Captions(*(x.detach() for x in captions))
        if kind == "set":
            hidden = head.hidden(captions.words).relu().float()
            hidden = torch.segment_reduce(hidden, "mean", offsets=captions.offsets)
        else:
            x = captions.whole if kind == "pooled" else in_slots(captions, self.slots).flatten(1)
            hidden = head.hidden(x).relu().float()
        return head.output(head.caption_norm(hidden)).float()


def in_slots(captions: Captions, slots: int) -> Tensor:  # [C, slots, D]
    """Words from slot 0 on, zeros behind the last; captions longer than the slots are resampled linearly."""
    begin, lengths = captions.offsets[:-1, None], captions.offsets.diff()[:, None]
    slot = torch.arange(slots, device=begin.device)
    stretch = (lengths - 1).double() / max(slots - 1, 1)
    place = torch.where(lengths > slots, slot * stretch, slot.double())
    low = place.floor().long().clamp(max=lengths - 1)
    high = torch.minimum(low + 1, lengths - 1)
    part = (place - low).clamp(0, 1)[..., None].to(captions.words.dtype)
    mixed = (1 - part) * captions.words[begin + low] + part * captions.words[begin + high]
    return mixed * (slot < lengths)[..., None]


def convert(state_dicts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Weights of earlier code of this family, the state dicts of [img_enc, txt_enc, sim_enc], under our names.

    The bias of the keys is dropped: it cancels in the softmax. A pseudo-classifier is not among them; load the result
    with strict=False, or give the network's own `classifier.*` in addition.
    """
    if len(state_dicts) != 3:
        raise ValueError(f"expected the state dicts of img_enc, txt_enc and sim_enc, got {len(state_dicts)}")
    # saved from DataParallel they carry a prefix
    parts = {
        part: {k.removeprefix("module."): v for k, v in state_dict.items()}
        for part, state_dict in zip(("img_enc", "txt_enc", "sim_enc"), state_dicts, strict=True)
    }
    sim, used = parts["sim_enc"], set()

    def take(name: str, part: str = "sim_enc") -> Tensor:
        used.add((part, name))
        if name not in parts[part]:
            raise ValueError(f"{part} has no {name!r}; it has {', '.join(sorted(parts[part]))}")
        return parts[part][name]

    found = {f"image.{kind}": take(f"fc.{kind}", "img_enc") for kind in ("weight", "bias")}
    found["words.weight"] = take("embed.weight", "txt_enc")
    for direction in ("", "_reverse"):
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            found[f"gru.{kind}_l0{direction}"] = take(f"cap_rnn.{kind}_l0{direction}", "txt_enc")
    for ours, theirs, norms in (("image_pool", "v_global_w", True), ("caption_pool", "t_global_w", False)):
        for layer, name in (
            ("local", "embedding_local"),
            ("whole", "embedding_global"),
            ("weight", "embedding_common"),
        ):
            for kind in ("weight", "bias"):
                found[f"{ours}.{layer}.{kind}"] = take(f"{theirs}.{name}.0.{kind}")
            for kind in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                if norms and layer != "weight":
                    found[f"{ours}.{layer}_norm.{kind}"] = take(f"{theirs}.{name}.1.{kind}")
    steps = max(1, len([name for name in sim if name.endswith("graph_query_w.weight")]))
    for ours, theirs in (("loc", "sim_tranloc_w"), ("glo", "sim_tranglo_w")):
        found[f"similarity.w_{ours}"] = take(f"{theirs}.weight")
        found[f"similarity.b_{ours}"] = take(f"{theirs}.bias")
    for ours, theirs in (("query", "graph_query_w"), ("key", "graph_key_w"), ("graph", "sim_graph_w")):
        for short, kind in (("w", "weight"), ("b", "bias")):
            stacked = torch.stack([take(f"SGR_module.{t}.{theirs}.{kind}") for t in range(steps)])
            if (ours, short) != ("key", "b"):
                found[f"similarity.{short}_{ours}"] = stacked
    found["similarity.w_score"] = take("sim_eval_w.weight")[0]
    found["similarity.b_score"] = take("sim_eval_w.bias")
    if unknown := sorted({(part, name) for part, names in parts.items() for name in names} - used):
        raise ValueError(f"{unknown[0][0]} has {unknown[0][1]!r}, which SGR does not; is this another model?")
    return found
