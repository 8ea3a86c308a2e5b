"""The command `pcsr-fast`: one function per subcommand; a mistake prints one line and ends with 2."""

import argparse
import sys
from collections.abc import Sequence

SHARD_MB = 2048


def prepare(options: argparse.Namespace) -> None:
    """Turns folders, .npy with .tsv, or WebDataset tars into a store; goes on where it was stopped."""
    from pcsr_fast.data import store

    splits = store.prepare(
        options.source,
        options.out,
        options.split,
        dtype=options.dtype,
        vocabulary=options.vocabulary,
        threshold=options.threshold,
        shard_bytes=options.shard_mb << 20,
        skip_bad=options.skip_bad,
    )
    for name, split in splits.items():
        size = f"{split['regions']} x {split['width']} {split['dtype']}"
        skipped = f", {split['skipped']} skipped (see manifest.json)" if split["skipped"] else ""
        print(f"{name}: {split['images']:,} images of {size}, {split['pairs']:,} captions{skipped}")
    if options.verify:
        _verify(options.out)


def verify(options: argparse.Namespace) -> None:
    """Reads all files of a store and compares their checksums; names those that are damaged."""
    _verify(options.store)


def _verify(path: str) -> None:
    from pcsr_fast.data import store

    if problems := store.verify(path):
        raise ValueError("; ".join(problems))
    print(f"{path}: all files are whole")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pcsr-fast", description="Training of image-text retrieval on noisy pairs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(function) -> argparse.ArgumentParser:
        text = function.__doc__
        found = commands.add_parser(function.__name__, help=text, description=text)
        found.set_defaults(run=function)
        found.add_argument("--debug", action="store_true", help="show where an error came from")
        return found

    made = command(prepare)
    made.add_argument("source", help="folder with *_ims.npy, folder with *.npy and *.tsv, tar or folder of tars")
    made.add_argument("out", help="folder of the store")
    made.add_argument("--split", help="of a folder only this split; else the split's name (default train)")
    made.add_argument("--dtype", choices=("float16", "float32"), default="float16", help="default float16")
    made.add_argument(
        "--vocabulary", metavar="JSON", help="words and ids; else the store's, the folder's, or a new one"
    )
    made.add_argument(
        "--threshold", type=int, default=4, help="how often a word of a new vocabulary occurs (default 4)"
    )
    made.add_argument("--shard-mb", type=int, default=SHARD_MB, help=f"size of a shard (default {SHARD_MB})")
    made.add_argument("--skip-bad", action="store_true", help="leave out and count samples that cannot be used")
    made.add_argument("--verify", action="store_true", help="compare all checksums at the end")

    command(verify).add_argument("store", help="folder of the store")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        if options.debug:
            raise
        print(f"pcsr-fast {options.command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"pcsr-fast {options.command}: stopped", file=sys.stderr)
        return 130
    return 0
