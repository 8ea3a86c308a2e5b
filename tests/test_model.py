"""The network against its definition, one sample at a time; captions do not depend on their neighbours; conversion."""

import math

import pytest
import tiny
import torch
from torch.nn.functional import leaky_relu

from pcsr_fast.model import Balance, Captions, Images, Network, convert, in_slots, l2

REGIONS, WIDTH, WORDS = 5, 7, 30


def made(**changes):
    return tiny.network(regions=REGIONS, width=WIDTH, words=WORDS, **changes)


def ragged(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (sum(lengths),), generator=generator)
    return tokens, torch.tensor([0, *lengths]).cumsum(0)


def unit(x):
    return x / (x.norm() + 1e-8)


def norm(layer, x, channel):
    scale = layer.weight[channel] / (layer.running_var[channel] + layer.eps).sqrt()
    return (x - layer.running_mean[channel]) * scale + layer.bias[channel]


def one_whole(pool, x, normed):  # [L, D]
    """The global vector of one sample."""
    h = pool.whole.weight @ x.mean(0) + pool.whole.bias
    h = torch.tanh(torch.stack([norm(pool.whole_norm, h[d], d) for d in range(len(h))]) if normed else h)
    weights = []
    for slot, part in enumerate(x):
        a = pool.local.weight @ part + pool.local.bias
        a = torch.tanh(norm(pool.local_norm, a, slot) if normed else a)
        weights.append(pool.weight.weight[0] @ (a * h) + pool.weight.bias[0])
    return unit((torch.stack(weights).softmax(0)[:, None] * x).sum(0))


def one_direction(gru, x, suffix):
    h, states = torch.zeros(gru.hidden_size), []
    w, u, b, c = (getattr(gru, f"{kind}_l0{suffix}") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    for word in x:
        (ri, zi, ni), (rh, zh, nh) = (w @ word + b).chunk(3), (u @ h + c).chunk(3)
        z, n = torch.sigmoid(zi + zh), torch.tanh(ni + torch.sigmoid(ri + rh) * nh)
        h = (1 - z) * n + z * h
        states.append(h)
    return torch.stack(states)


def one_caption(net, tokens):
    x = net.words.weight[tokens]
    both = one_direction(net.gru, x, "") + one_direction(net.gru, x.flip(0), "_reverse").flip(0)
    return torch.stack([unit(word / 2) for word in both])


def one_resampled(words, slots):
    """Words from slot 0 on; a longer caption linearly resampled, first on first and last on last."""
    if len(words) <= slots:
        return torch.cat([words, torch.zeros(slots - len(words), words.shape[1])])
    rows = []
    for s in range(slots):
        place = s * (len(words) - 1) / (slots - 1)
        low = min(int(place), len(words) - 2)
        rows.append((1 - (place - low)) * words[low] + (place - low) * words[low + 1])
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("classifier_input", ["set", "regions", "pooled"])
def test_definition(classifier_input):
    net = made(classifier_input=classifier_input)
    features = torch.randn(4, REGIONS, WIDTH)
    lengths = [3, 1, 9, 5, 2, 6]
    tokens, offsets = ragged(lengths)
    images, captions = net.encode_images(features), net.encode_captions(tokens, offsets)
    p, q = net.image_logits(images), net.caption_logits(captions)
    assert images.regions.shape == (4, REGIONS, 16)
    assert captions.words.shape == (sum(lengths), 16)

    def head(elements, side):
        """Logits of the mean of the elements' hidden vectors, standardised."""
        first, second, norm = net.classifier.hidden, net.classifier.output, getattr(net.classifier, f"{side}_norm")
        hidden = torch.stack([torch.relu(first.weight @ x + first.bias) for x in elements]).mean(0)
        hidden = (hidden - norm.running_mean) / (norm.running_var + 1e-5).sqrt()
        return second.weight @ hidden + second.bias

    for i in range(4):
        regions = torch.stack([unit(net.image.weight @ x + net.image.bias) for x in features[i]])
        whole = one_whole(net.image_pool, regions, True)
        torch.testing.assert_close(images.regions[i], regions)
        torch.testing.assert_close(images.whole[i], whole)
        seen = {"set": regions, "pooled": [whole], "regions": [regions.flatten()]}[classifier_input]
        torch.testing.assert_close(p[i], head(seen, "image"))
    for c in range(len(lengths)):
        mine = slice(offsets[c], offsets[c + 1])
        words = one_caption(net, tokens[mine])
        whole = one_whole(net.caption_pool, words, False)
        torch.testing.assert_close(captions.words[mine], words)
        torch.testing.assert_close(captions.whole[c], whole)
        seen = {"set": words, "pooled": [whole], "regions": [one_resampled(words, REGIONS).flatten()]}[classifier_input]
        torch.testing.assert_close(q[c], head(seen, "caption"))


@torch.no_grad()
@pytest.mark.parametrize("classifier_input", ["set", "regions", "pooled"])
def test_neighbours_do_not_matter(classifier_input):
    net = made(classifier_input=classifier_input)
    lengths = [4, 23, 1, 5, 6, 12]
    tokens, offsets = ragged(lengths)
    together = net.encode_captions(tokens, offsets)
    q = net.caption_logits(together)
    for c, length in enumerate(lengths):
        mine = slice(offsets[c], offsets[c + 1])
        alone = net.encode_captions(tokens[mine], torch.tensor([0, length]))
        torch.testing.assert_close(together.words[mine], alone.words, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(together.whole[c], alone.whole[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(q[c], net.caption_logits(alone)[0], rtol=1e-5, atol=1e-6)


def test_slots_of_many_lengths():
    for slots in (1, 2, 5):
        lengths = [*range(1, 14)]
        words = torch.randn(sum(lengths), 3)
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        found = in_slots(Captions(words, offsets, words[:0]), slots)
        for c in range(len(lengths)):
            mine = words[offsets[c] : offsets[c + 1]]
            # a single slot keeps the first word
            expected = one_resampled(mine, slots) if slots > 1 else mine[:1]
            torch.testing.assert_close(found[c], expected)


def test_dropout_and_statistics_in_training_alone():
    net = made(dropout=0.4)
    features, caption = torch.randn(4, REGIONS, WIDTH), ragged([3, 4])
    assert torch.equal(net.encode_images(features).whole, net.encode_images(features).whole)
    assert torch.equal(net.encode_captions(*caption).words, net.encode_captions(*caption).words)
    before = net.image_pool.whole_norm.running_mean.clone()
    net.train()
    assert not torch.equal(net.encode_images(features).whole, net.encode_images(features).whole)
    assert not torch.equal(net.encode_captions(*caption).words, net.encode_captions(*caption).words)
    # regions have no dropout
    assert torch.equal(net.encode_images(features).regions, net.encode_images(features).regions)
    assert not torch.equal(before, net.image_pool.whole_norm.running_mean)


def test_zero_vectors():
    x = torch.zeros(3, 4, requires_grad=True)
    l2(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 4))
    net = made()
    with torch.no_grad():
        net.image.bias.zero_()
    features = torch.zeros(2, REGIONS, WIDTH)
    images, captions = net.encode_images(features), net.encode_captions(*ragged([2, 3]))
    (net.similarity(images, captions).sum() + net.image_logits(images).sum()).backward()
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)
    torch.testing.assert_close(l2(torch.tensor([3.0, 4.0])), torch.tensor([0.6, 0.8]))
    assert l2(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32


def test_initial_values():
    torch.manual_seed(0)
    net = Network(tiny.config(embedding=32), REGIONS, WIDTH, 500)
    linears = [net.image, net.classifier.hidden, net.classifier.output]
    linears += [layer for pool in (net.image_pool, net.caption_pool) for layer in (pool.local, pool.whole, pool.weight)]
    for layer in linears:
        assert (layer.bias == 0).all()
        check_xavier(layer.weight)
    for name, value in net.similarity.named_parameters():
        if name.startswith("b_"):
            assert (value == 0).all()
        else:
            for matrix in value[None, None] if name == "w_score" else value.view(-1, *value.shape[-2:]):
                check_xavier(matrix)
    assert net.similarity.w_query[0].ne(net.similarity.w_query[1]).any()
    words = net.words.weight
    assert words.abs().max() <= 0.1
    assert words.std().item() == pytest.approx(0.1 / math.sqrt(3), rel=0.05)
    # no padding index: the first word is a word
    assert (words[0] != 0).all()
    assert net.words.padding_idx is None


def check_xavier(matrix):
    bound = math.sqrt(6 / sum(matrix.shape[-2:]))
    assert matrix.abs().max() <= bound
    # of a few values the largest may be small
    assert matrix.abs().max() > (0.9 if matrix.numel() > 60 else 0.5) * bound


def test_shapes():
    shapes = {name: [*p.shape] for name, p in Network(tiny.config(), REGIONS, WIDTH, WORDS).named_parameters()}
    expected = {
        "image.weight": [16, 7], "words.weight": [30, 10], "gru.weight_ih_l0": [48, 10], "gru.bias_hh_l0_reverse": [48],
        "image_pool.local_norm.weight": [5], "image_pool.whole_norm.weight": [16],
        "caption_pool.weight.weight": [1, 16],
        "similarity.w_loc": [8, 16], "similarity.w_key": [2, 8, 8], "similarity.b_score": [1],
        "classifier.hidden.weight": [12, 16], "classifier.output.weight": [8, 12],
    }  # fmt: skip
    assert {name: shapes[name] for name in expected} == expected
    assert "caption_pool.local_norm.weight" not in shapes
    for seen, width in (("pooled", 16), ("regions", 80)):
        other = Network(tiny.config(classifier_input=seen), REGIONS, WIDTH, WORDS)
        assert [*other.classifier.hidden.weight.shape] == [12, width]
    plain = Network(tiny.config(classifier_norm=False), REGIONS, WIDTH, WORDS).classifier
    assert isinstance(plain.image_norm, torch.nn.Identity)
    assert isinstance(plain.caption_norm, torch.nn.Identity)


def test_centred_labels_follow_the_running_mean():
    balance, generator = Balance("centred", 4, 1), torch.Generator().manual_seed(0)
    # class 2 is nearly always the largest
    logits = torch.randn(64, 4, generator=generator) + torch.tensor([0.0, 0.0, 4.0, 0.0])
    assert logits.argmax(1).bincount(minlength=4)[2] > 60
    mean = torch.full((4,), 0.25)
    for _ in range(500):
        found = balance(logits)
        mean = 0.99 * mean + 0.01 * logits.softmax(1).mean(0)
        torch.testing.assert_close(found, logits.log_softmax(1) - mean.log(), rtol=1e-4, atol=1e-4)
    assert found.argmax(1).bincount(minlength=4)[2] < 45
    assert torch.equal(Balance("argmax", 4, 1)(logits), logits)


def test_balanced_labels_by_sinkhorn():
    balance, generator = Balance("balanced", 4, 40), torch.Generator().manual_seed(0)
    seen = [torch.randn(16, 4, generator=generator) + torch.tensor([0.0, 0.0, 1.0, 0.0]) for _ in range(4)]
    for logits in seen:
        found = balance(logits)
    # the last forty, newest batch first; rows and columns of exp(20 x) scaled in turn, rows last but one
    recent = torch.cat(seen[::-1])[:40].double()
    table, by_class = torch.exp(20 * (recent - recent.max())), torch.ones(4, dtype=torch.float64)
    for _ in range(3):
        by_row = 1 / (table * by_class).sum(1, keepdim=True)
        by_class = 1 / (table * by_row).sum(0)
    shift = (by_class.log() / 20).float()
    torch.testing.assert_close(found - found.mean(), (seen[3] + shift) - (seen[3] + shift).mean(), rtol=1e-3, atol=1e-3)
    used = [x.argmax(1).bincount(minlength=4) for x in (recent, recent + shift)]
    assert used[1].max() < used[0].max()
    # before the queue is full, rows that were never filled say nothing
    early = Balance("balanced", 4, 1000)
    torch.testing.assert_close(early(seen[0]), Balance("balanced", 4, 16)(seen[0]))


def published(dim=16, nodes=8, steps=2):
    """Random weights of img_enc, txt_enc and sim_enc, under the names of earlier code."""
    torch.manual_seed(5)
    gru = torch.nn.GRU(10, dim, bidirectional=True).state_dict()
    image = {"fc.weight": torch.randn(dim, WIDTH), "fc.bias": torch.randn(dim)}
    text = {"embed.weight": torch.randn(WORDS, 10)} | {f"cap_rnn.{name}": value for name, value in gru.items()}
    sim = {}

    def layer(name, inputs, outputs):
        sim[f"{name}.weight"], sim[f"{name}.bias"] = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)

    for side, slots in (("v_global_w", REGIONS), ("t_global_w", None)):
        for name, outputs in (("embedding_local", dim), ("embedding_global", dim), ("embedding_common", 1)):
            layer(f"{side}.{name}.0", dim, outputs)
            if slots and name != "embedding_common":
                size = slots if name == "embedding_local" else dim
                for kind in ("weight", "bias", "running_mean", "running_var"):
                    sim[f"{side}.{name}.1.{kind}"] = torch.rand(size) + 0.5
                sim[f"{side}.{name}.1.num_batches_tracked"] = torch.tensor(3)
    layer("sim_tranloc_w", dim, nodes)
    layer("sim_tranglo_w", dim, nodes)
    layer("sim_eval_w", nodes, 1)
    for step in range(steps):
        for name in ("graph_query_w", "graph_key_w", "sim_graph_w"):
            layer(f"SGR_module.{step}.{name}", nodes, nodes)
    return [image, text, sim]


def one_score(sim, v, t, v_glo, t_glo):
    """Of one image and one caption, with the weights as published, the bias of the keys among them."""

    def layer(name, x):
        return x @ sim[f"{name}.weight"].T + sim[f"{name}.bias"]

    attention = torch.stack([unit(row) for row in leaky_relu(v @ t.T, 0.1)])
    context = torch.stack([unit((9 * attention[:, n]).softmax(0) @ v) for n in range(len(t))])
    local = [unit(layer("sim_tranloc_w", (c - word) ** 2)) for c, word in zip(context, t, strict=True)]
    nodes = torch.stack([unit(layer("sim_tranglo_w", (v_glo - t_glo) ** 2)), *local])
    for step in range(2):
        query, key = (layer(f"SGR_module.{step}.graph_{kind}_w", nodes) for kind in ("query", "key"))
        nodes = torch.relu(layer(f"SGR_module.{step}.sim_graph_w", (query @ key.T).softmax(1) @ nodes))
    return torch.sigmoid(layer("sim_eval_w", nodes[0]))[0]


@torch.no_grad()
@pytest.mark.parametrize("prefix", ["", "module."])
def test_convert(prefix):
    weights = published()
    state = convert([{prefix + name: value for name, value in part.items()} for part in weights])
    net = made()
    result = net.load_state_dict(state, strict=False)
    assert not result.unexpected_keys
    assert all(name.startswith("classifier.") for name in result.missing_keys)
    assert torch.equal(net.gru.weight_hh_l0_reverse, weights[1]["cap_rnn.weight_hh_l0_reverse"])
    features, (tokens, offsets) = torch.randn(3, REGIONS, WIDTH), ragged([4, 1, 7])
    images, captions = net.encode_images(features), net.encode_captions(tokens, offsets)
    image, _, sim = weights
    for i in range(3):
        torch.testing.assert_close(images.regions[i, 2], unit(image["fc.weight"] @ features[i, 2] + image["fc.bias"]))
        torch.testing.assert_close(images.whole[i], one_published_whole(sim, "v_global_w", images.regions[i]))
    scores = net.similarity(images, captions)
    for c in range(3):
        t = captions.words[offsets[c] : offsets[c + 1]]
        torch.testing.assert_close(t, one_caption(net, tokens[offsets[c] : offsets[c + 1]]))
        torch.testing.assert_close(captions.whole[c], one_published_whole(sim, "t_global_w", t))
        for i in range(3):
            expected = one_score(sim, images.regions[i], t, images.whole[i], captions.whole[c])
            torch.testing.assert_close(scores[i, c], expected, rtol=1e-4, atol=1e-5)


def one_published_whole(sim, side, x):
    def layer(name, value, slot=None):
        value = sim[f"{side}.{name}.0.weight"] @ value + sim[f"{side}.{name}.0.bias"]
        at = {kind: sim.get(f"{side}.{name}.1.{kind}") for kind in ("weight", "bias", "running_mean", "running_var")}
        if at["weight"] is not None:
            at = at if slot is None else {kind: numbers[slot] for kind, numbers in at.items()}
            value = (value - at["running_mean"]) / (at["running_var"] + 1e-5).sqrt() * at["weight"] + at["bias"]
        return value

    whole = torch.tanh(layer("embedding_global", x.mean(0)))
    local = (torch.tanh(layer("embedding_local", part, slot)) for slot, part in enumerate(x))
    weight = torch.stack([layer("embedding_common", a * whole)[0] for a in local]).softmax(0)
    return unit(weight @ x)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (0, "fc.bias"), (1, "embed.weight"), (1, "cap_rnn.bias_ih_l0_reverse"), (2, "sim_eval_w.bias"),
        (2, "v_global_w.embedding_local.1.running_var"), (2, "SGR_module.1.graph_key_w.bias"),
    ],
)  # fmt: skip
def test_convert_misses_a_name(part, name):
    weights = published()
    weights[part][name + ".else"] = weights[part].pop(name)
    where = ("img_enc", "txt_enc", "sim_enc")[part]
    with pytest.raises(ValueError, match=f"{where} has no '{name}'; it has .*{name}.else"):
        convert(weights)


def test_convert_of_another_model():
    weights = published()
    with pytest.raises(ValueError, match="got 2"):
        convert(weights[:2])
    with pytest.raises(ValueError, match=r"txt_enc has 'cap_rnn.weight_ih_l1', which SGR does not"):
        convert([weights[0], weights[1] | {"cap_rnn.weight_ih_l1": torch.zeros(1)}, weights[2]])
    with pytest.raises(ValueError, match=r"sim_enc has 'SAF_module.fc', which SGR does not"):
        convert([*weights[:2], weights[2] | {"SAF_module.fc": torch.zeros(1)}])
    without = {name: value for name, value in weights[2].items() if not name.startswith("SGR")}
    with pytest.raises(ValueError, match=r"sim_enc has no 'SGR_module.0.graph_query_w.weight'"):
        convert([*weights[:2], without])


def test_similarity_of_listed_pairs():
    net = made()
    images, captions = net.encode_images(torch.randn(4, REGIONS, WIDTH)), net.encode_captions(*ragged([3, 1, 9, 5]))
    grid = net.similarity(images, captions)
    pairs = torch.tensor([[3, 0], [1, 2]])
    torch.testing.assert_close(net.similarity(Images(*images), captions, pairs), grid[[3, 1], [0, 2]])
