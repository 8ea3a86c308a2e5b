"""`python -m bench step`: a whole training step, features to Adam, against the loop of the published code bases.

Both have the same network and the same encoders; the baseline scores one caption at a time, takes the eager triplet
loss, and goes back through all pairs. `--profile FILE` writes a trace for chrome://tracing instead of timing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.baselines import sgr_caption_loop, triplet_eager
from bench.measure import RESULTS, extra_memory, interleaved, machine, save, summary
from pcsr_fast.config import Config
from pcsr_fast.data.loader import Batch
from pcsr_fast.model import Network
from pcsr_fast.train import encode_batch, new_optimizer, plain_loss

WIDTH, WORDS, LENGTHS = 2048, 8_000, (8, 20)


def made_up_batch(size: int, regions: int, device: str) -> Batch:
    """Features and captions of Flickr30K's sizes."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(*LENGTHS, (size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    tokens = torch.randint(4, WORDS, (int(offsets[-1]),), generator=generator)
    features = torch.rand(size, regions, WIDTH, generator=generator)
    tensors = (x.to(device) for x in (features, tokens, offsets, torch.arange(size), torch.arange(size)))
    return Batch(*tensors, position=1)


def loop_loss(network: Network, batch: Batch, config: Config) -> torch.Tensor:
    images, captions = encode_batch(network, batch)
    weights = network.similarity
    mix = weights.w_query.mT @ weights.w_key
    shift = (weights.b_query[:, None] @ weights.w_key)[:, 0]
    scores = sgr_caption_loop(
        images.regions, captions.words, captions.offsets, images.whole, captions.whole,
        weights.w_loc, weights.b_loc, weights.w_glo, weights.b_glo, mix, shift,
        weights.w_graph, weights.b_graph, weights.w_score, weights.b_score, None,
    )  # fmt: skip
    return triplet_eager(
        scores, torch.full((len(batch),), config.alpha, device=scores.device), batch.images, None, True
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench step", description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=128, help="default 128")
    parser.add_argument("--embedding", type=int, default=1024, help="default 1024")
    parser.add_argument("--similarity", type=int, default=256, help="default 256")
    parser.add_argument("--regions", type=int, default=36, help="default 36")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=120.0, help="time in all (default 120)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a trace, print what takes the time")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)

    config = Config(embedding=options.embedding, similarity=options.similarity, dropout=0.0, negatives_ramp=False)
    torch.manual_seed(0)
    network = Network(config, options.regions, WIDTH, WORDS).to(options.device).train()
    batch = made_up_batch(options.batch, options.regions, options.device)
    optimizers = {"pcsr_fast": new_optimizer(network, config), "caption loop": torch.optim.Adam(network.parameters())}
    losses = {
        "pcsr_fast": lambda: plain_loss(network, batch, "hardest", 1, config)["loss"],
        "caption loop": lambda: loop_loss(network, batch, config),
    }

    def step(name: str) -> None:
        optimizers[name].zero_grad(set_to_none=True)
        losses[name]().backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.clip)
        optimizers[name].step()

    if options.profile:
        profile(lambda: step("pcsr_fast"), options.profile)
        return 0
    with torch.no_grad():
        found = [float(loss()) for loss in losses.values()]
    if abs(found[0] - found[1]) > 1e-3 * abs(found[1]):
        print(f"WRONG, not timed: the losses are {found[0]} and {found[1]}", file=sys.stderr)
        return 1
    calls = {name: lambda name=name: step(name) for name in losses}
    times = interleaved(calls, lambda name: None, options.seconds)
    memory = {name: f"{extra_memory(call) / 1e6:.1f}" for name, call in calls.items()}
    sizes = f"batch={options.batch} regions={options.regions} dim={options.embedding} nodes={options.similarity}"
    row = {
        "op": "step", "shape": f"b{options.batch}_d{options.embedding}", "task": "features to Adam",
        "dtype": "float32", "device": options.device, "threads": str(torch.get_num_threads()),
        "contender": "pcsr_fast", "baseline": "caption loop", **summary(times["pcsr_fast"], times["caption loop"]),
        "extra_mb": memory["pcsr_fast"], "baseline_extra_mb": memory["caption loop"], "sizes": sizes,
        "torch": torch.__version__,
    }  # fmt: skip
    print(
        f"step: {float(row['median_us']) / 1e6:.3f} s, caption loop {float(row['baseline_median_us']) / 1e6:.3f} s, "
        f"{row['speedup']} x; extra memory {row['extra_mb']} MB against {row['baseline_extra_mb']} MB"
    )
    if not options.no_save:
        save([row], RESULTS / f"{machine()}.csv")
    return 0


def profile(call, path: Path, calls: int = 3) -> None:
    """Writes torch's trace of some calls, after one to warm up, and prints the operations that take most time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    call()
    with torch.profiler.profile(activities=activities, record_shapes=False) as found:
        for _ in range(calls):
            call()
    path.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(path))
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=40))
    print(f"trace of {calls} calls: {path}; open it in chrome://tracing or ui.perfetto.dev")


if __name__ == "__main__":
    sys.exit(main())
