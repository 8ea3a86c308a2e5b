"""`python -m bench loader`: batches against a Dataset with a collate function; waiting; opening 3.3 million pairs.

Needs about 5 GB of disk under --folder; what it writes there is deleted at the end.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bench.measure import RESULTS, interleaved, machine, save, summary
from pcsr_fast.data import store
from pcsr_fast.data.loader import batches
from pcsr_fast.data.split import Split
from pcsr_fast.data.tokens import Vocabulary, encode
from pcsr_fast.ops import OPS, triplet

IMAGES, REGIONS, WIDTH, BATCH = 8_000, 36, 2048, 128
PAIRS = 3_300_000
WORDS = [f"word{i}" for i in range(8_000)]


class PairData(Dataset):
    """One pair at a time, tokenised when asked for: what a loader of this family looks like without a library."""

    def __init__(self, features, texts, image_of, ids):
        self.features, self.texts, self.image_of, self.ids = features, texts, image_of, ids

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        words = self.texts[i].lower().split()
        caption = torch.tensor([1, *(self.ids.get(word, 3) for word in words), 2])
        return torch.tensor(self.features[self.image_of[i]]), caption, i, self.image_of[i]


def collate(samples):
    samples.sort(key=lambda sample: len(sample[1]), reverse=True)
    features, captions, pairs, images = zip(*samples, strict=True)
    lengths = [len(caption) for caption in captions]
    padded = torch.zeros(len(captions), max(lengths), dtype=torch.int64)
    for row, caption in zip(padded, captions, strict=True):
        row[: len(caption)] = caption
    return torch.stack(features), padded, lengths, list(pairs), list(images)


def make_splits(folder: Path) -> tuple[Split, Split]:
    """The same pairs as a float32 map and as a float16 store; captions like Flickr30K's."""
    source = folder / "f30k_precomp"
    source.mkdir()
    rng = np.random.default_rng(0)
    features = np.lib.format.open_memmap(source / "train_ims.npy", "w+", np.float32, (IMAGES, REGIONS, WIDTH))
    block = rng.random((500, REGIONS, WIDTH), dtype=np.float32)
    for i in range(0, IMAGES, 500):
        features[i : i + 500] = block + i
    features.flush()
    texts = [" ".join(WORDS[i] for i in picked) for picked in rng.integers(len(WORDS), size=(5 * IMAGES, 12)).tolist()]
    (source / "train_caps.txt").write_text("\n".join(texts) + "\n")
    vocabulary = Vocabulary({word: i for i, word in enumerate(("<pad>", "<start>", "<end>", "<unk>", *WORDS))})
    vocabulary.save(source / "f30k_precomp_vocab.json")
    before = time.perf_counter()
    store.prepare(source, folder / "store")
    seconds = time.perf_counter() - before
    print(f"prepare: {features.nbytes / 1e9:.1f} GB of float32 in {seconds:.1f} s")
    image_of = np.repeat(np.arange(IMAGES), 5)
    tokens, offsets = encode(texts, vocabulary)
    mapped = np.load(source / "train_ims.npy", mmap_mode="r")
    return Split("f30k", mapped, tokens, offsets, image_of, image_of, texts), store.open_store(
        folder / "store", "train"
    )


def bench_batches(mapped: Split, stored: Split, ids: dict[str, int], seconds: float) -> list[dict]:
    """Time per batch, both prepared in the calling thread, from files that are in the page cache and mapped."""
    for split in (mapped, stored):
        for i in range(split.images):
            split.features[i].max()

    def forever():
        data = PairData(mapped.features, mapped.texts, mapped.image_of, ids)
        while True:
            yield from DataLoader(data, BATCH, shuffle=True, collate_fn=collate, drop_last=True)

    options = dict(endless=True, drop_last=True, workers=0)
    streams = {
        "Dataset and collate_fn": forever(),
        "float32 map": batches(mapped, BATCH, 0, 0, **options),
        "float16 store": batches(stored, BATCH, 0, 0, **options),
    }
    times = interleaved({name: lambda s=s: next(s) for name, s in streams.items()}, lambda name: None, seconds)
    (baseline, plain), *ours = times.items()
    return [row("batch of 128", name, baseline) | summary(found, plain) for name, found in ours]


def bench_waiting(stored: Split, steps: int) -> None:
    """How long training steps wait for batches that one thread prepares: image layer, scores, triplet, backward."""
    *inputs, pairs = OPS["sgr"].inputs(torch.float32, torch.Generator().manual_seed(0), **OPS["sgr"].shapes["f30k_128"])
    weight = torch.randn(WIDTH, inputs[0].shape[2]).mul_(0.02).requires_grad_()
    stream = batches(stored, BATCH, 0, 0, endless=True, workers=1)
    next(stream)
    waited, began = [], time.perf_counter()
    for _ in range(steps):
        before = time.perf_counter()
        batch = next(stream)
        waited.append(time.perf_counter() - before)
        images = torch.nn.functional.normalize(batch.features @ weight, dim=2)
        triplet(OPS["sgr"](images, *inputs[1:], pairs).view(BATCH, BATCH)).backward()
    total = time.perf_counter() - began
    print(f"waiting: {1e3 * max(waited):.2f} ms at most in {steps} steps of {total / steps:.2f} s, "
          f"{100 * sum(waited) / total:.3f} % of the time")  # fmt: skip


OPEN = """
import resource, sys, time
import numpy as np
from pcsr_fast.data.store import open_store
rss = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20
before, start = rss(), time.perf_counter()
split = open_store(sys.argv[1], "train")
seconds, after = time.perf_counter() - start, rss()
split.features[np.arange(0, len(split), len(split) // 128)]
print(f"open: {len(split):,} pairs, {np.prod(split.features.shape) * 2 / 1e9:,.0f} GB in {len(split.features.paths)} "
      f"shards: {seconds:.3f} s, {after - before:.0f} MB more than {before:.0f} MB")
"""


def bench_open(folder: Path) -> None:
    """A store as large as CC3M with 36 x 2048 features, whose files are sparse: holes instead of features."""
    target = folder / "large/train"
    target.mkdir(parents=True)
    files = {}

    def keep(name: str, array: np.ndarray) -> None:
        np.save(target / name, array)
        files[name] = {"bytes": (target / name).stat().st_size, "sha256": ""}

    rows = store.SHARD_BYTES // (REGIONS * WIDTH * 2)
    for shard, begin in enumerate(range(0, PAIRS, rows)):
        shape = (min(rows, PAIRS - begin), REGIONS, WIDTH)
        path = target / f"features-{shard:05}.npy"
        np.lib.format.open_memmap(path, "w+", np.float16, shape)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": ""}
    lengths = np.random.default_rng(0).integers(5, 20, PAIRS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    keep("tokens.npy", np.zeros(offsets[-1], np.int32))
    keep("offsets.npy", offsets)
    keep("image_of.npy", np.arange(PAIRS))
    keep("text.npy", np.full(offsets[-1] * 5, ord("a"), np.uint8))
    keep("text_offsets.npy", offsets * 5)
    entry = {"images": PAIRS, "pairs": PAIRS, "tokens": int(offsets[-1]), "regions": REGIONS, "width": WIDTH}
    entry |= {"dtype": "float16", "rows_per_shard": rows, "files": files}
    (folder / "large/manifest.json").write_text(json.dumps({"format": store.FORMAT, "splits": {"train": entry}}))
    for _ in range(3):
        subprocess.run([sys.executable, "-c", OPEN, folder / "large"], check=True)


def bench_prepare(folder: Path, pairs: int = 50_000) -> None:
    """Small features, so that the time is that of captions and bookkeeping."""
    source = folder / "rows"
    source.mkdir()
    rng = np.random.default_rng(0)
    np.save(source / "a.npy", rng.random((pairs, 4, 16), dtype=np.float32))
    picked = rng.integers(len(WORDS), size=(pairs, 10)).tolist()
    (source / "a.tsv").write_text("".join(f"{n}\t{' '.join(WORDS[i] for i in p)}\n" for n, p in enumerate(picked)))
    before = time.perf_counter()
    store.prepare(source, folder / "small")
    print(f"prepare: {pairs:,} pairs of 4 x 16 in {time.perf_counter() - before:.1f} s")


def row(task: str, contender: str, baseline: str) -> dict[str, str]:
    sizes = f"batch={BATCH} regions={REGIONS} width={WIDTH} images={IMAGES}"
    return {
        **{"op": "data", "shape": "f30k", "task": task, "dtype": "float32", "device": "cpu"},
        **{"threads": str(torch.get_num_threads()), "contender": contender, "baseline": baseline},
        **{"sizes": sizes, "torch": torch.__version__},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench loader", description=__doc__)
    parser.add_argument("--folder", help="where to write the data (default: the system's temporary folder)")
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the batches (default 20)")
    parser.add_argument("--steps", type=int, default=8, help="training steps in which waiting is measured (default 8)")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        bench_open(folder)
        bench_prepare(folder)
        mapped, stored = make_splits(folder)
        ids = Vocabulary.load(folder / "f30k_precomp/f30k_precomp_vocab.json").ids
        rows = bench_batches(mapped, stored, ids, options.seconds)
        for found in rows:
            print(f"{found['contender']:16}{float(found['median_us']) / 1e3:8.2f} ms a batch, {found['speedup']} x "
                  f"{found['baseline']} ({float(found['baseline_median_us']) / 1e3:.2f} ms)")  # fmt: skip
        bench_waiting(stored, options.steps)
    if not options.no_save:
        save(rows, RESULTS / f"{machine()}.csv")


if __name__ == "__main__":
    main()
