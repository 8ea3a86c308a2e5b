"""Triton kernels of sgr's forward, how pairs are laid out for them, and their launches.

A chunk of pairs has two orders of rows. *Words*: image after image, pair after pair, without gaps; a program of
`attend` or `align` takes up to BLOCK words of one image. *Nodes*: the global node and the words of a pair side by side,
pairs packed into blocks of BLOCK rows so that few rows are empty; a program of `reason` takes one block. Products go
through tensor cores with float32 sums. No atomics: the same call gives the same bits.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# rows of a program
BLOCK = 64
# columns of the largest accumulator
WIDE = 256
# bytes of a chunk's intermediates: a few chunks keep a GPU busy, and most of a chunk stays in L2
WORKSPACE = 64 << 20
# regions of an image stand in one tile
MOST_REGIONS = 128


@triton.jit
def attend(
    regions,  # [images, R, D]
    words,  # [all words, D]
    row_word, block_image, block_first, block_last,
    attention,  # [rows, RP]
    D, R,
    ROWS: tl.constexpr, RP: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, MMA: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Leaky relu of the products of words and regions; one program per image and ROWS words."""
    block = tl.program_id(0)
    image = tl.load(block_image + block).to(tl.int64)
    rows = tl.load(block_first + block) + tl.arange(0, ROWS)
    live = rows < tl.load(block_last + block)
    r = tl.arange(0, RP)
    k = tl.arange(0, BD)
    word = tl.load(row_word + rows, mask=live, other=0).to(tl.int64)
    t_at = words + word[:, None] * D + k[None, :]
    v_at = regions + image * R * D + r[:, None] * D + k[None, :]
    total = tl.zeros([ROWS, RP], tl.float32)
    for d in range(0, D, BD):
        t_in, v_in = live[:, None], (r < R)[:, None]
        if not EVEN:
            t_in, v_in = t_in & (d + k < D)[None, :], v_in & (d + k < D)[None, :]
        t = tl.load(t_at + d, mask=t_in, other=0)
        v = tl.load(v_at + d, mask=v_in, other=0)
        total = tl.dot(t.to(MMA), v.to(MMA).T, total, input_precision=IP)
    total = tl.where(total < 0, 0.1 * total, total)
    tl.store(attention + rows[:, None] * RP + r[None, :], total, mask=live[:, None])


@triton.jit
def weigh(
    attention,  # [rows, RP], replaced
    gram,  # [images, RP, RP], float32
    pair_image, pair_word, pair_length,
    R,
    ROWS: tl.constexpr, RP: tl.constexpr,
):  # fmt: skip
    """Weights of the regions, already divided by the norm of the context that they give; one program per pair."""
    pair = tl.program_id(0)
    image = tl.load(pair_image + pair).to(tl.int64)
    first = tl.load(pair_word + pair)
    last = first + tl.load(pair_length + pair)
    r = tl.arange(0, RP)
    square = tl.zeros([RP], tl.float32)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        a = tl.load(attention + rows[:, None] * RP + r[None, :], mask=(rows < last)[:, None], other=0)
        square += tl.sum(a * a, 0)
    # comparisons are written so that NaN stays NaN
    scale = tl.where(square == 0, 0.0, 9.0 / (tl.sqrt(square) + 1e-8))
    g = tl.load(gram + image * RP * RP + r[:, None] * RP + r[None, :])
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        at = attention + rows[:, None] * RP + r[None, :]
        a = tl.load(at, mask=(rows < last)[:, None], other=0)
        # logits are at most 9: no maximum is needed
        p = tl.where((r < R)[None, :], tl.exp(a * scale[None, :]), 0.0)
        p = p / tl.sum(p, 1)[:, None]
        # |P V|^2 = P V V' P'; a small share of the work, in nearly all digits of float32
        square_norm = tl.sum(tl.dot(p, g, input_precision="tf32x3") * p, 1)
        square_norm = tl.where(square_norm < 0, 0.0, square_norm)
        inverse = tl.where(square_norm == 0, 0.0, 1.0 / (tl.sqrt(square_norm) + 1e-8))
        tl.store(at, p * inverse[:, None], mask=(rows < last)[:, None])


@triton.jit
def put_nodes(nodes, at, live, total, bias, s, S, NORM: tl.constexpr):
    """Writes l2(total + bias), or without l2 where a row is wider than the tile."""
    total += tl.load(bias + s, mask=s < S, other=0).to(tl.float32)[None, :]
    if NORM:
        square = tl.sum(tl.where((s < S)[None, :], total * total, 0.0), 1)
        total *= tl.where(square == 0, 0.0, 1.0 / (tl.sqrt(square) + 1e-8))[:, None]
    tl.store(nodes + at[:, None] * S + s[None, :], total, mask=live[:, None] & (s < S)[None, :])


@triton.jit
def align(
    regions,  # [images, R, D]
    words,  # [all words, D]
    attention,  # [rows, RP], from weigh
    w_loc,  # [S, D]
    b_loc,  # [S]
    row_word, row_node, block_image, block_first, block_last,
    nodes,  # [nodes, S]
    D, R, S,
    ROWS: tl.constexpr, RP: tl.constexpr, SB: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    IN: tl.constexpr, MMA: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Local nodes l2(W_loc (context - word)^2 + b_loc); one program per image, ROWS words and SB columns.

    The context exists only as a tile [ROWS, BD].
    """
    block = tl.program_id(0)
    image = tl.load(block_image + block).to(tl.int64)
    rows = tl.load(block_first + block) + tl.arange(0, ROWS)
    live = rows < tl.load(block_last + block)
    r = tl.arange(0, RP)
    k = tl.arange(0, BD)
    s = tl.program_id(1) * SB + tl.arange(0, SB)
    word = tl.load(row_word + rows, mask=live, other=0).to(tl.int64)
    p = tl.load(attention + rows[:, None] * RP + r[None, :], mask=live[:, None], other=0).to(IN).to(MMA)
    t_at = words + word[:, None] * D + k[None, :]
    v_at = regions + image * R * D + r[:, None] * D + k[None, :]
    w_at = w_loc + s[:, None] * D + k[None, :]
    total = tl.zeros([ROWS, SB], tl.float32)
    for d in range(0, D, BD):
        t_in, v_in, w_in = live[:, None], (r < R)[:, None], (s < S)[:, None]
        if not EVEN:
            d_in = (d + k < D)[None, :]
            t_in, v_in, w_in = t_in & d_in, v_in & d_in, w_in & d_in
        v = tl.load(v_at + d, mask=v_in, other=0)
        t = tl.load(t_at + d, mask=t_in, other=0)
        w = tl.load(w_at + d, mask=w_in, other=0)
        x = tl.dot(p, v.to(MMA), input_precision=IP) - t.to(tl.float32)
        total = tl.dot((x * x).to(IN).to(MMA), w.to(MMA).T, total, input_precision=IP)
    node = tl.load(row_node + rows, mask=live, other=0)
    put_nodes(nodes, node, live, total, b_loc, s, S, NORM)


@triton.jit
def compare(
    image_globals,  # [images, D]
    caption_globals,  # [captions, D]
    w_glo,  # [S, D]
    b_glo,  # [S]
    pair_image, pair_caption, pair_node,
    nodes,  # [nodes, S]
    pairs, D, S,
    ROWS: tl.constexpr, SB: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    IN: tl.constexpr, MMA: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """Global nodes l2(W_glo (image - caption)^2 + b_glo); one program per ROWS pairs and SB columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = rows < pairs
    k = tl.arange(0, BD)
    s = tl.program_id(1) * SB + tl.arange(0, SB)
    v_at = image_globals + tl.load(pair_image + rows, mask=live, other=0).to(tl.int64)[:, None] * D + k[None, :]
    t_at = caption_globals + tl.load(pair_caption + rows, mask=live, other=0).to(tl.int64)[:, None] * D + k[None, :]
    w_at = w_glo + s[:, None] * D + k[None, :]
    total = tl.zeros([ROWS, SB], tl.float32)
    for d in range(0, D, BD):
        x_in, w_in = live[:, None], (s < S)[:, None]
        if not EVEN:
            x_in, w_in = x_in & (d + k < D)[None, :], w_in & (d + k < D)[None, :]
        v = tl.load(v_at + d, mask=x_in, other=0)
        t = tl.load(t_at + d, mask=x_in, other=0)
        w = tl.load(w_at + d, mask=w_in, other=0)
        x = v.to(tl.float32) - t.to(tl.float32)
        total = tl.dot((x * x).to(IN).to(MMA), w.to(MMA).T, total, input_precision=IP)
    node = tl.load(pair_node + rows, mask=live, other=0)
    put_nodes(nodes, node, live, total, b_glo, s, S, NORM)


@triton.jit
def put_step(result, rows, pair, total, weight, bias, s, S):
    total = (
        total / tl.where(pair >= 0, weight, 1.0)[:, None]
        + tl.load(bias + s, mask=s < S, other=0).to(tl.float32)[None, :]
    )
    total = tl.where(total < 0, 0.0, total)
    tl.store(result + rows[:, None] * S + s[None, :], total, mask=(pair >= 0)[:, None] & (s < S)[None, :])


@triton.jit
def reason(
    nodes,  # [nodes, S]
    mix,  # [S, S]
    shift,  # [S]
    graph,  # [S, S]
    bias,  # [S]
    node_pair,
    result,  # [nodes, S]
    first_block, S,
    ROWS: tl.constexpr, SB: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    IN: tl.constexpr, MMA: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """relu(softmax((E M + u) E') E Wg' + bg) within each pair; one program per block of nodes and SB columns."""
    rows = (first_block + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
    s = tl.program_id(1) * SB + tl.arange(0, SB)
    k = tl.arange(0, BK)
    q = tl.arange(0, BQ)
    pair = tl.load(node_pair + rows)
    live = (pair >= 0)[:, None]
    logits = tl.zeros([ROWS, ROWS], tl.float32)
    for j in range(0, S, BQ):
        query = tl.zeros([ROWS, BQ], tl.float32)
        for i in range(0, S, BK):
            e_in, m_in = live, (j + q < S)[None, :]
            if not EVEN:
                e_in, m_in = e_in & (i + k < S)[None, :], m_in & (i + k < S)[:, None]
            e = tl.load(nodes + rows[:, None] * S + (i + k)[None, :], mask=e_in, other=0)
            m = tl.load(mix + (i + k)[:, None] * S + (j + q)[None, :], mask=m_in, other=0)
            query = tl.dot(e.to(MMA), m.to(MMA), query, input_precision=IP)
        query += tl.load(shift + j + q, mask=j + q < S, other=0).to(tl.float32)[None, :]
        key = tl.load(nodes + rows[:, None] * S + (j + q)[None, :], mask=live & (j + q < S)[None, :], other=0)
        logits = tl.dot(query.to(IN).to(MMA), key.to(MMA).T, logits, input_precision=IP)
    logits = tl.where(pair[:, None] == pair[None, :], logits, -float("inf"))
    p = tl.exp(logits - tl.max(logits, 1)[:, None])
    value = tl.zeros([ROWS, SB], tl.float32)
    for i in range(0, S, BK):
        e_in, g_in = live, (s < S)[:, None]
        if not EVEN:
            e_in, g_in = e_in & (i + k < S)[None, :], g_in & (i + k < S)[None, :]
        e = tl.load(nodes + rows[:, None] * S + (i + k)[None, :], mask=e_in, other=0)
        g = tl.load(graph + s[:, None] * S + (i + k)[None, :], mask=g_in, other=0)
        value = tl.dot(e.to(MMA), g.to(MMA).T, value, input_precision=IP)
    total = tl.dot(p.to(IN).to(MMA), value.to(IN).to(MMA), input_precision=IP)
    put_step(result, rows, pair, total, tl.sum(p, 1), bias, s, S)


@triton.jit
def link(
    nodes,  # [nodes, S]
    query,  # [nodes, S], E M + u
    value,  # [nodes, S], E Wg'
    bias,  # [S]
    node_pair, key_first, key_last,
    result,  # [nodes, S]
    S,
    ROWS: tl.constexpr, SB: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    IN: tl.constexpr, MMA: tl.constexpr, IP: tl.constexpr,
):  # fmt: skip
    """What reason does after its projections, for pairs of any length: the blocks of a pair are its keys in turn."""
    block = tl.program_id(0)
    rows = block * ROWS + tl.arange(0, ROWS)
    s = tl.program_id(1) * SB + tl.arange(0, SB)
    k = tl.arange(0, BK)
    pair = tl.load(node_pair + rows)
    total = tl.zeros([ROWS, SB], tl.float32)
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for first in range(tl.load(key_first + block), tl.load(key_last + block), ROWS):
        keys = first + tl.arange(0, ROWS)
        key_pair = tl.load(node_pair + keys)
        logits = tl.zeros([ROWS, ROWS], tl.float32)
        for i in range(0, S, BK):
            q_in, e_in = (pair >= 0)[:, None], (key_pair >= 0)[:, None]
            if not EVEN:
                q_in, e_in = q_in & (i + k < S)[None, :], e_in & (i + k < S)[None, :]
            q = tl.load(query + rows[:, None] * S + (i + k)[None, :], mask=q_in, other=0)
            e = tl.load(nodes + keys[:, None] * S + (i + k)[None, :], mask=e_in, other=0)
            logits = tl.dot(q.to(MMA), e.to(MMA).T, logits, input_precision=IP)
        logits = tl.where(pair[:, None] == key_pair[None, :], logits, -float("inf"))
        # an empty row has no key
        higher = tl.where(pair >= 0, tl.maximum(highest, tl.max(logits, 1)), 0.0)
        p = tl.exp(logits - higher[:, None])
        fade = tl.exp(highest - higher)
        highest = higher
        weight = weight * fade + tl.sum(p, 1)
        v = tl.load(value + keys[:, None] * S + s[None, :], mask=(key_pair >= 0)[:, None] & (s < S)[None, :], other=0)
        total = tl.dot(p.to(IN).to(MMA), v.to(MMA), total * fade[:, None], input_precision=IP)
    put_step(result, rows, pair, total, weight, bias, s, S)


@triton.jit
def gather(
    nodes,  # [nodes, S]
    query,  # [pairs, S]
    pair_node, pair_length,
    result,  # [pairs, S]
    S,
    ROWS: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """What the global node gathers in the last step, softmax(query E') E; one program per pair."""
    pair = tl.program_id(0)
    first = tl.load(pair_node + pair)
    last = first + tl.load(pair_length + pair) + 1
    s = tl.arange(0, SP)
    q = tl.load(query + pair * S + s, mask=s < S, other=0).to(tl.float32)
    total = tl.zeros([SP], tl.float32)
    highest = tl.max(tl.full([ROWS], -float("inf"), tl.float32), 0)
    weight = 0.0
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < last)[:, None] & (s < S)[None, :]
        e = tl.load(nodes + rows[:, None] * S + s[None, :], mask=inside, other=0).to(tl.float32)
        logits = tl.where(rows < last, tl.sum(e * q[None, :], 1), -float("inf"))
        higher = tl.maximum(highest, tl.max(logits, 0))
        p = tl.exp(logits - higher)
        fade = tl.exp(highest - higher)
        highest = higher
        weight = weight * fade + tl.sum(p, 0)
        total = total * fade + tl.sum(p[:, None] * e, 0)
    tl.store(result + pair * S + s, total / weight, mask=s < S)


class Layout(NamedTuple):
    """Where the words and nodes of a chunk's pairs stand, int32 on the device; pairs in the order of their images."""

    row_word: Tensor  # [rows], place among all words
    row_node: Tensor  # [rows]
    block_image: Tensor  # [blocks of words]
    block_first: Tensor  # [blocks of words], rows
    block_last: Tensor
    pair_image: Tensor  # [pairs]
    pair_caption: Tensor
    pair_length: Tensor  # words
    pair_word: Tensor  # first row
    pair_node: Tensor  # first node, the global one
    node_pair: Tensor  # [nodes], -1 where empty
    key_first: Tensor  # [blocks of nodes], nodes
    key_last: Tensor
    long: int  # blocks of pairs that are longer than one; they come first


def pack(sizes: np.ndarray) -> tuple[np.ndarray, int]:
    """First places of items in blocks of BLOCK, largest first and then what still fits; and the number of blocks.

    An item larger than a block has blocks of its own. Equal blocks are filled at once: the loop is as long as the
    number of different fillings, not of items.
    """
    starts = np.zeros(len(sizes), np.int64)
    blocks = 0
    order = np.argsort(-sizes, kind="stable")
    for item in order[: int((sizes > BLOCK).sum())]:
        starts[item] = blocks * BLOCK
        blocks += -(-int(sizes[item]) // BLOCK)
    left = np.bincount(sizes[sizes <= BLOCK], minlength=BLOCK + 1)
    # items of one size follow each other in order; at[size] is the next of them
    at = len(sizes) - np.cumsum(left)
    present = [size for size in range(BLOCK, 0, -1) if left[size]]
    while present:
        filling, room = [], BLOCK
        for size in present:
            if count := min(int(left[size]), room // size):
                filling.append((size, count, BLOCK - room))
                room -= count * size
        times = min(int(left[size]) // count for size, count, _ in filling)
        first = (blocks + np.arange(times)) * BLOCK
        for size, count, offset in filling:
            items = order[at[size] : at[size] + times * count]
            starts[items] = (first[:, None] + offset + np.arange(count) * size).ravel()
            at[size] += times * count
            left[size] -= times * count
        blocks += times
        present = [size for size in present if left[size]]
    return starts, blocks


def lay_out(image: np.ndarray, caption: np.ndarray, offsets: np.ndarray, device: torch.device) -> Layout:
    """The layout of pairs that are sorted by image, in one copy to the device."""
    length = np.diff(offsets)[caption]
    pair_word = np.cumsum(length) - length
    pair = np.repeat(np.arange(len(image)), length)
    place = np.arange(len(pair)) - pair_word[pair]
    pair_node, blocks = pack(length + 1)
    row_node = pair_node[pair] + 1 + place
    node_pair = np.full(blocks * BLOCK, -1)
    node_pair[pair_node] = np.arange(len(image))
    node_pair[row_node] = pair
    key_first = np.arange(blocks) * BLOCK
    key_last = key_first + BLOCK
    longer = np.argsort(pair_node)[: int((length + 1 > BLOCK).sum())]
    own = -(-(length[longer] + 1) // BLOCK)
    long = int(own.sum())
    key_first[:long] = np.repeat(pair_node[longer], own)
    key_last[:long] = np.repeat(pair_node[longer] + own * BLOCK, own)
    # words of each image, cut into blocks
    words = np.bincount(image, length).astype(np.int64)
    cut = -(-words // BLOCK)
    block_image = np.repeat(np.arange(len(words)), cut)
    step = np.arange(len(block_image)) - np.repeat(np.cumsum(cut) - cut, cut)
    block_first = (np.cumsum(words) - words)[block_image] + step * BLOCK
    block_last = np.minimum(block_first + BLOCK, np.cumsum(words)[block_image])
    tables = (
        offsets[caption][pair] + place, row_node, block_image, block_first, block_last,
        image, caption, length, pair_word, pair_node, node_pair, key_first, key_last,
    )  # fmt: skip
    # every table starts at 16 bytes, which the kernels are compiled for
    padded = [np.pad(t, (0, -len(t) % 4)) for t in tables]
    joined = torch.from_numpy(np.concatenate(padded).astype(np.int32))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    parts = joined.split([len(t) for t in padded])
    return Layout(*(part[: len(t)] for part, t in zip(parts, tables, strict=True)), long)


class Tiles(NamedTuple):
    """Compile-time sizes and types of the kernels for given tensors."""

    RP: int
    SB: int
    SB_LINK: int
    SP: int
    BD: int
    BK: int
    even_d: bool
    even_s: bool
    norm: bool
    IN: tl.dtype
    MMA: tl.dtype
    IP: str


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def tiles(regions: int, dim: int, nodes: int, dtype: torch.dtype, precision: str, interpreted: bool) -> Tiles:
    wide = triton.next_power_of_2(nodes)
    # bytes of a tile are the same for every type
    depth = 64 // dtype.itemsize * 2
    sb = min(WIDE, max(16, wide))
    return Tiles(
        RP=max(16, triton.next_power_of_2(regions)),
        SB=sb,
        SB_LINK=min(64, sb),
        SP=wide,
        BD=depth,
        BK=depth,
        even_d=dim % depth == 0,
        even_s=nodes % depth == 0,
        norm=nodes <= sb,
        IN=DTYPES[dtype],
        # numpy, in which the interpreter computes, has no bfloat16
        MMA=tl.float32 if interpreted else DTYPES[dtype],
        # means nothing for half precision, whose products are exact
        IP=precision if dtype == torch.float32 else "tf32",
    )


def score_chunk(
    layout: Layout, regions: Tensor, words: Tensor, image_globals: Tensor, caption_globals: Tensor, gram: Tensor,
    weights: tuple[Tensor, ...], t: Tiles,
) -> Tensor:  # fmt: skip
    """Scores of a chunk's pairs, in the order of the layout."""
    w_loc, b_loc, w_glo, b_glo, mix, shift, graph, bias, w_score, b_score = weights
    (_, r, d), (steps, s) = regions.shape, mix.shape[:2]
    pairs, columns = len(layout.pair_image), triton.cdiv(s, t.SB)
    word_blocks, node_blocks = len(layout.block_image), len(layout.key_first)
    attention = regions.new_empty(len(layout.row_word), t.RP, dtype=torch.float32)
    nodes, other = (regions.new_empty(len(layout.node_pair), s) for _ in range(2))
    types = dict(IN=t.IN, MMA=t.MMA, IP=t.IP)
    attend[(word_blocks,)](
        regions, words, layout.row_word, layout.block_image, layout.block_first, layout.block_last, attention, d, r,
        ROWS=BLOCK, RP=t.RP, BD=t.BD, EVEN=t.even_d, MMA=t.MMA, IP=t.IP, **LAUNCH["attend"],
    )  # fmt: skip
    weigh[(pairs,)](
        attention, gram, layout.pair_image, layout.pair_word, layout.pair_length, r,
        ROWS=16, RP=t.RP, **LAUNCH["weigh"],
    )  # fmt: skip
    align[(word_blocks, columns)](
        regions, words, attention, w_loc, b_loc,
        layout.row_word, layout.row_node, layout.block_image, layout.block_first, layout.block_last, nodes, d, r, s,
        ROWS=BLOCK, RP=t.RP, SB=t.SB, BD=t.BD, EVEN=t.even_d, NORM=t.norm, **types, **LAUNCH["align"],
    )  # fmt: skip
    compare[(triton.cdiv(pairs, BLOCK), columns)](
        image_globals, caption_globals, w_glo, b_glo, layout.pair_image, layout.pair_caption, layout.pair_node, nodes,
        pairs, d, s,
        ROWS=BLOCK, SB=t.SB, BD=t.BD // 2, EVEN=t.even_d, NORM=t.norm, **types, **LAUNCH["compare"],
    )  # fmt: skip
    if not t.norm:
        nodes /= torch.linalg.vector_norm(nodes, dim=1, keepdim=True) + 1e-8
    # pairs that are longer than a block come first; with ieee the fused kernel would need too many registers
    apart = layout.long if t.IP != "ieee" else node_blocks
    for step in range(steps - 1):
        if apart:
            rows = nodes[: apart * BLOCK]
            query, value = torch.addmm(shift[step], rows, mix[step]), rows @ graph[step].T
            link[(apart, triton.cdiv(s, t.SB_LINK))](
                nodes, query, value, bias[step], layout.node_pair, layout.key_first, layout.key_last, other, s,
                ROWS=BLOCK, SB=t.SB_LINK, BK=t.BK // 2, EVEN=t.even_s, **types, **LAUNCH["link"],
            )  # fmt: skip
        if node_blocks > apart:
            reason[(node_blocks - apart, columns)](
                nodes, mix[step], shift[step], graph[step], bias[step], layout.node_pair, other, apart, s,
                ROWS=BLOCK, SB=t.SB, BQ=min(64, t.SB), BK=t.BK, EVEN=t.even_s, **types, **LAUNCH["reason"],
            )  # fmt: skip
        nodes, other = other, nodes
    # in the last step only the global nodes are wanted
    query = torch.addmm(shift[-1], nodes[layout.pair_node], mix[-1])
    gathered = torch.empty_like(query)
    gather[(pairs,)](
        nodes, query, layout.pair_node, layout.pair_length, gathered, s, ROWS=16, SP=t.SP, **LAUNCH["gather"]
    )
    top = torch.addmm(bias[-1], gathered, graph[-1].T).relu_().float()
    return torch.addmv(b_score.float(), top, w_score.float()).sigmoid_()


# by what the compiler reports, without a GPU to time: no spilled registers, shared memory that every architecture has
LAUNCH = {
    "attend": dict(num_warps=4, num_stages=4),
    "weigh": dict(num_warps=4, num_stages=1),
    "align": dict(num_warps=8, num_stages=2),
    "compare": dict(num_warps=8, num_stages=2),
    "reason": dict(num_warps=8, num_stages=2),
    "link": dict(num_warps=16, num_stages=2),
    "gather": dict(num_warps=4, num_stages=1),
}


def precision() -> str:
    """How float32 products are computed, by torch's setting for its own on CUDA."""
    return "ieee" if torch.backends.cuda.matmul.fp32_precision in ("none", "ieee") else "tf32"


def forward(
    regions: Tensor,  # [B, R, D], float32, bfloat16 or float16 like all that follow
    words: Tensor,  # [sum n_c, D]
    offsets: np.ndarray,  # [C + 1], on the host like pairs
    image_globals: Tensor,  # [B, D]
    caption_globals: Tensor,  # [C, D]
    *rest,  # weights, in the order of the op, and pairs [P, 2] or None
) -> Tensor:
    """Scores [B C] or [P], float32, in chunks of WORKSPACE bytes. Indices were checked."""
    *weights, pairs = rest
    weights = [x.contiguous() for x in weights]
    regions, words, image_globals, caption_globals = (
        x.contiguous() for x in (regions, words, image_globals, caption_globals)
    )
    (images, r, d), s, captions = regions.shape, weights[4].shape[1], len(offsets) - 1
    t = tiles(r, d, s, regions.dtype, precision(), triton.knobs.runtime.interpret)
    gram = torch.nn.functional.pad(torch.bmm(regions.float(), regions.float().mT), (0, t.RP - r, 0, t.RP - r))
    # nodes of two steps and what link reads, attention, tables
    buffers = 4 if t.IP == "ieee" else 2
    budget = WORKSPACE // (buffers * s * regions.element_size() + 4 * t.RP + 16)
    sizes = np.diff(offsets) + 1

    def score(layout, part):
        return score_chunk(layout, regions[part], words, image_globals[part], caption_globals, gram[part], weights, t)

    if pairs is not None:
        scores = regions.new_empty(len(pairs), dtype=torch.float32)
        order = np.argsort(pairs[:, 0], kind="stable")
        for chunk in np.split(order, cuts(sizes[pairs[order, 1]], budget)):
            if len(chunk):
                layout = lay_out(pairs[chunk, 0], pairs[chunk, 1], offsets, regions.device)
                scores[torch.from_numpy(chunk).to(scores.device)] = score(layout, slice(None))
        return scores
    scores = regions.new_empty(images, captions, dtype=torch.float32)
    for group in np.split(np.arange(captions), cuts(sizes, budget)):
        # equal chunks of images, so that one layout serves all but the last
        most = max(1, budget // int(sizes[group].sum()))
        most = -(-images // -(-images // most))
        layout, count = None, 0
        for first in range(0, images, most):
            part = slice(first, min(first + most, images))
            if part.stop - part.start != count:
                count = part.stop - part.start
                layout = lay_out(np.repeat(np.arange(count), len(group)), np.tile(group, count), offsets, scores.device)
            scores[part, group[0] : group[-1] + 1] = score(layout, part).view(count, len(group))
    return scores.view(-1)


def cuts(sizes: np.ndarray, budget: int) -> np.ndarray:
    """Where to cut a sequence of sizes so that parts are about the budget, and no more than an item above it."""
    parts = np.cumsum(sizes) // max(1, budget)
    return np.flatnonzero(np.diff(parts)) + 1
