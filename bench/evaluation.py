"""`python -m bench evaluation`: the score matrix of evaluation against the per-caption loop in shards of earlier code.

Weights and embeddings are drawn, sizes are those of Flickr30K; time grows with the number of cells on both sides.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from bench.baselines import sgr_caption_loop
from bench.measure import RESULTS, extra_memory, interleaved, machine, save, summary
from pcsr_fast.config import Config
from pcsr_fast.evaluate import score_matrix
from pcsr_fast.model import Captions, Images, Network
from pcsr_fast.ops import OPS

# images and captions that the loop takes at a time
SHARD = 128


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench evaluation", description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=128, help="images (default 128); captions are five times as many")
    parser.add_argument("--seconds", type=float, default=60.0, help="time in all (default 60)")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    sizes = OPS["sgr"].shapes["f30k_128"] | {"images": options.images, "captions": 5 * options.images}
    regions, words, offsets, image_globals, caption_globals, *_ = OPS["sgr"].inputs(
        torch.float32, torch.Generator().manual_seed(0), **sizes
    )
    network = Network(Config(), sizes["regions"], 2048, 10).eval()
    weights = network.similarity
    mix = weights.w_query.mT @ weights.w_key
    shift = (weights.b_query[:, None] @ weights.w_key)[:, 0]
    fused = (weights.w_loc, weights.b_loc, weights.w_glo, weights.b_glo, mix, shift)
    fused += (weights.w_graph, weights.b_graph, weights.w_score, weights.b_score)
    images, captions = Images(regions, image_globals), Captions(words, offsets, caption_globals)

    def tiles():
        return score_matrix(network, images, captions)

    @torch.no_grad()
    def caption_loop_in_shards():
        scores = torch.empty(len(regions), len(caption_globals))
        for top in range(0, len(regions), SHARD):
            for left in range(0, len(caption_globals), SHARD):
                ends = offsets[left : left + SHARD + 1]
                some = words[int(ends[0]) : int(ends[-1])]
                part = slice(top, top + SHARD), slice(left, left + SHARD)
                scores[part] = sgr_caption_loop(
                    regions[part[0]],
                    some,
                    ends - ends[0],
                    image_globals[part[0]],
                    caption_globals[part[1]],
                    *fused,
                    None,
                )
        return scores

    if not torch.allclose(tiles(), caption_loop_in_shards(), atol=1e-4):
        print("WRONG, not timed: the matrices differ", file=sys.stderr)
        return 1
    calls = {"tiles": tiles, "caption_loop_in_shards": caption_loop_in_shards}
    times = interleaved(calls, lambda name: None, options.seconds)
    found = summary(times["tiles"], times["caption_loop_in_shards"])
    row = {
        "op": "evaluate", "shape": f"f30k_{options.images}", "task": "score matrix", "dtype": "float32",
        "device": "cpu",
        "threads": str(torch.get_num_threads()), "contender": "tiles", "baseline": "caption_loop_in_shards", **found,
        "extra_mb": f"{extra_memory(tiles) / 1e6:.1f}",
        "baseline_extra_mb": f"{extra_memory(caption_loop_in_shards) / 1e6:.1f}",
        "sizes": f"images={options.images} captions={5 * options.images} regions=36 dim=1024 nodes=256",
        "torch": torch.__version__,
    }  # fmt: skip
    cells = options.images * 5 * options.images / float(found["median_us"]) * 1e6
    print(f"{found['speedup']} x, {cells:,.0f} pairs a second, extra memory {row['extra_mb']} MB")
    if not options.no_save:
        save([row], RESULTS / f"{machine()}.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
