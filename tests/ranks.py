"""Several ranks in one test: processes forked from one that has imported torch, joined by gloo; and what they do."""

import json
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tiny
import torch

from pcsr_fast.data import noise
from pcsr_fast.data.loader import captions_of
from pcsr_fast.data.split import Split

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["pcsr_fast.train", "sklearn.mixture", "sklearn.metrics", "sklearn.datasets", "pytest", "torch.distributed"]
)


def run_ranks(function: Callable, ranks: int, *args, seconds: float = 240) -> list[str]:
    """Calls function(*args) in every rank as torchrun would; returns the error of each rank, "" if there is none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(ranks):
        receive, send = _context.Pipe(False)
        process = _context.Process(target=_rank, args=(function, rank, ranks, port, send, args), daemon=True)
        process.start()
        send.close()
        pipes.append(receive)
        processes.append(process)
    errors, end = [], time.monotonic() + seconds
    for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True)):
        process.join(max(0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
            errors.append(f"rank {rank} hangs")
        else:
            # a rank that was killed has said nothing
            errors.append(pipe.recv() if process.exitcode >= 0 and pipe.poll() else f"exit code {process.exitcode}")
    return errors


def _rank(function, rank, ranks, port, send, args) -> None:
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        function(*args)
        send.send("")
    except BaseException as error:
        send.send("".join(traceback.format_exception(error)))
        # at once, as a crash: the others see the connection close
        os._exit(1)


def in_float64() -> None:
    """Networks and losses in double precision, where a sum in another order differs by 1e-13."""
    torch.set_default_dtype(torch.float64)
    single = torch.Tensor.float
    torch.Tensor.float = lambda x: x.double() if x.is_floating_point() else single(x)


def split_of(images: int, ratio: float = 0.0, name: str = "train") -> Split:
    """One caption an image: two of the same image are matched alike, and rounding would choose between them."""
    whole = tiny.split(images, name=name)
    chosen = np.arange(0, len(whole), 5)
    tokens, offsets = captions_of(whole, chosen)
    index = np.arange(images)
    plain = Split(name, whole.features, tokens.numpy().astype(np.int32), offsets.numpy(), index, index)
    return plain.with_noise(noise.draw(images, images, ratio, seed=1))


def record(folder: Path, changes: dict, broken: int | None = None, act: dict | None = None):
    """Trains in float64 on 40 pairs and leaves what every step found in steps.RANK.pt.

    broken: an image with NaN; act: what a rank does before its nth step, as {"rank": 1, "step": 14, "do": "SIGTERM"}.
    """
    from pcsr_fast import train as module

    in_float64()
    rank = int(os.environ["RANK"])
    steps, divisions = [], []
    real_step, real_divide, real_optimizer = module.run_step, module.divide_both, module.new_optimizer

    def step(state, subset, config, *args):
        if act and rank == act["rank"] and len(steps) == act["step"]:
            _act(act["do"])
        real_step(state, subset, config, *args)
        grads = [p.grad.flatten() for p in state.networks[state.network].parameters() if p.grad is not None]
        sums = state.sums[f"{'AB'[state.network]}_{subset}"]
        steps.append({
            "at": (state.epoch, state.network, state.step, subset),
            "sums": {name: float(value) for name, value in sums.items()},
            "gradient": torch.cat(grads) if grads else torch.zeros(0),
        })  # fmt: skip

    def divide(state, *args):
        told = real_divide(state, *args)
        divisions.extend((d.posterior.copy(), d.subset.copy(), d.tau, d.utilisation) for d in state.divisions)
        return told

    def optimizer(*args):
        made = real_optimizer(*args)
        for group in made.param_groups:
            # Adam divides a gradient by itself: one of 1e-8 would make much of rounding
            group["eps"] = 1e-3
        return made

    module.run_step, module.divide_both, module.new_optimizer = step, divide, optimizer
    # after a few epochs all images would be as consistent
    module.pair_pcs = lambda state, split, *_: np.random.default_rng(int(state.counts.sum())).random(len(split))
    split = split_of(40, 0.4)
    if broken is not None:
        split.features[broken, 0, 0] = np.nan
    lines = []
    try:
        found = module.train(
            tiny.config(dropout=0.0, **changes), split, split_of(3, name="dev"), tiny.WORDS, folder, report=lines.append
        )
    finally:
        torch.save([steps, divisions], folder / f"steps.{rank}.pt")
        (folder / f"lines.{rank}.json").write_text(json.dumps(lines))
    (folder / f"found.{rank}.json").write_text(json.dumps(found))


def _act(what: str) -> None:
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))
    elif what == "sleep":
        time.sleep(12)
    else:
        raise OSError(what)


def record_groups(folder: Path, ranks: int, changes: dict) -> None:
    """A single process whose negatives are those that so many ranks would choose among their own rows."""
    from pcsr_fast import distributed
    from pcsr_fast import train as module
    from pcsr_fast.model import Captions, Images

    whole = module.contrast

    def contrast(network, images, captions, margin, mode, image_ids, caption_ids, epoch, config, weight=None):
        size = len(images.whole)
        if size < 2 * ranks:
            return whole(network, images, captions, margin, mode, image_ids, caption_ids, epoch, config, weight)
        total, start = 0.0, 0
        for count in [size // ranks + (r < size % ranks) for r in range(ranks)]:
            rows = slice(start, start + count)
            offsets = captions.offsets[start : start + count + 1]
            words = captions.words[offsets[0] : offsets[-1]]
            some = Captions(words, offsets - offsets[0], captions.whole[rows])
            part = margin[rows] if isinstance(margin, torch.Tensor) else margin
            ids = (image_ids[rows], caption_ids[rows])
            theirs = Images(*(x[rows] for x in images))
            heavy = None if weight is None else weight[rows]
            total = total + whole(network, theirs, some, part, mode, *ids, epoch, config, heavy)
            start += count
        return total

    assert distributed.size() == 1
    module.contrast = contrast
    record(folder, changes)
