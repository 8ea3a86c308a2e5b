"""The command `pcsr-fast`: one function per subcommand; a mistake prints one line and ends with 2.

Exit codes: 0 done; 1 a bug, with a traceback; 2 a mistake in options, files or data, in one line on stderr;
3 training cannot go on, because losses are not finite or another rank is gone; 130 stopped by Ctrl-C or SIGTERM, with
the run saved.
"""

import argparse
import dataclasses
import inspect
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

from pcsr_fast.config import Config
from pcsr_fast.presets import PRESETS, settings

SHARD_MB = 2048
EXIT_CODES = __doc__.partition("Exit codes: ")[2]


def train(options: argparse.Namespace) -> None:
    """Trains on a data set; a folder with an unfinished run goes on where it was stopped.

    examples:
      pcsr-fast train runs/1 --preset sample --noise 0.4
      pcsr-fast train runs/2 --preset f30k --data data/f30k_precomp --noise noise/f30k_0.4.npy
      pcsr-fast train runs/3 --config mine.toml --data store --seed 1 --method sgr
      pcsr-fast train runs/2                  # goes on, with the settings and the data it has
    """
    from pcsr_fast.data import dataset
    from pcsr_fast.run import fit

    given = vars(options)
    changes = {field.name: given[field.name] for field in dataclasses.fields(Config) if field.name in given}
    folder = Path(options.run)
    begun = (folder / "last.pt").exists()
    file = options.config
    if begun and file is None and options.preset is None and (folder / "config.json").exists():
        file = folder / "config.json"
    config = settings(options.preset, file, **changes)
    named = dict(
        path=options.data, vocabulary_path=options.vocabulary, noise=options.noise, dev_images=options.dev_images,
        noise_protocol=options.noise_protocol, noise_seed=options.noise_seed,
        variant=options.variant, repeated=options.repeated,
    )  # fmt: skip
    named = {key: value for key, value in named.items() if value is not None}
    if options.preset == "sample":
        named.setdefault("path", "sample")
    if named.get("dev_images") == 0:
        named["dev_images"] = None
    if begun and (folder / "data.json").exists():
        data = dataset.load(folder / "data.json", **named)
    elif "path" in named:
        data = dataset.Dataset(**named)
    else:
        raise ValueError("which data? name a folder of features or a store (--data FOLDER), or try --preset sample")
    run = fit(config, data, folder, resume=options.resume, tensorboard=options.tensorboard)
    best = max(run.records, key=lambda record: record["rsum"])
    print(f"best: dev rsum {best['rsum']:.1f} in epoch {best['epoch']}; weights and log are in {folder}")
    print(f"next: pcsr-fast evaluate {folder}; pcsr-fast report {folder}; pcsr-fast audit {folder} --out pairs.csv")


def evaluate(options: argparse.Namespace) -> None:
    """Recalls of a run on a split, of both networks and of the mean of their scores.

    examples:
      pcsr-fast evaluate runs/1
      pcsr-fast evaluate runs/1 --split testall --folds 5     # MS-COCO: 5K, and 1K as the mean of five folds
      pcsr-fast evaluate runs/1 --json | jq .mean.rsum
    """
    from tqdm import tqdm

    run = _run(options)
    split = run.split(options.split)
    with tqdm(total=2 * split.images * len(split), desc="score", unit="pair", disable=None, leave=False) as bar:
        found = run.evaluate(options.split, options.folds, bar.update)
    if options.json:
        print(json.dumps(found))
        return
    names = [f"{side}_r{k}" for side in ("i2t", "t2i") for k in (1, 5, 10)]
    print(f"{options.split}, {split.images:,} images, {len(split):,} captions")
    print(f"{'':16}" + "".join(f"{name.replace('_r', ' R@'):>10}" for name in names) + f"{'rsum':>10}")
    for name, figures in found.items():
        print(f"{name:16}" + "".join(f"{figures[key]:10.1f}" for key in (*names, "rsum")))


def prepare(options: argparse.Namespace) -> None:
    """Turns folders, .npy with .tsv, or WebDataset tars into a store; goes on where it was stopped.

    examples:
      pcsr-fast prepare data/f30k_precomp store
      pcsr-fast prepare crawl/ cc --split train --skip-bad --verify
    """
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
    """Reads all files of a store and compares their checksums; names those that are damaged.

    examples:
      pcsr-fast verify store
    """
    _verify(options.store)


def _verify(path: str) -> None:
    from pcsr_fast.data import store

    if problems := store.verify(path):
        raise ValueError("; ".join(problems))
    print(f"{path}: all files are whole")


def noise(options: argparse.Namespace) -> None:
    """Draws noise into a file that does not exist yet, or says what an existing file holds.

    examples:
      pcsr-fast noise data/f30k_precomp noise/f30k_0.4.npy --ratio 0.4
      pcsr-fast noise data/f30k_precomp noise/f30k_0.4.npy                   # what is in it?
      pcsr-fast noise store noise/image_0.4.npy --ratio 0.4 --protocol image --seed 1
    """
    from pcsr_fast.data import noise as module
    from pcsr_fast.data.dataset import Dataset

    split = Dataset(options.data, options.vocabulary, variant=options.variant, repeated=options.repeated).split("train")
    path = module.npy_path(options.file)
    if options.ratio is not None:
        if path.exists():
            raise FileExistsError(f"{path} exists, and noise is never drawn anew; choose another name, or delete it")
        index = module.draw(split.images, len(split), options.ratio, protocol=options.protocol, seed=options.seed)
        module.save(path, index)
    index = module.load(path, split.images, len(split))
    wrong = int((index != split.true_image).sum())
    found = module.protocol(index, split.images)
    print(f"{path}: protocol {found}, {wrong:,} of {len(index):,} pairs mismatched ({100 * wrong / len(index):.1f} %)")


def vocab(options: argparse.Namespace) -> None:
    """Builds the vocabulary of a folder from the captions of train and dev.

    examples:
      pcsr-fast vocab data/f30k_precomp                       # to data/f30k_precomp/f30k_precomp_vocab.json
      pcsr-fast vocab data/f30k_precomp --out vocab.json --threshold 2
    """
    from pcsr_fast.data import build_vocabulary

    folder = Path(options.folder)
    out = Path(options.out) if options.out else folder / f"{folder.resolve().name}_vocab.json"
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another name by --out, or delete it")
    found = build_vocabulary(folder, options.threshold)
    found.save(out)
    print(f"{out}: {len(found):,} words that occur at least {options.threshold} times")


def retrieve(options: argparse.Namespace) -> None:
    """Images that fit a text, or captions that fit an image, best first.

    examples:
      pcsr-fast retrieve runs/1 --text "a two in the middle"
      pcsr-fast retrieve runs/1 --image 17 --split dev --top 5
      pcsr-fast retrieve runs/1 --text "a dog" "a cat" --json
    """
    from pcsr_fast.search import find_captions, find_images

    run = _run(options)
    if options.text:
        queries, found = options.text, find_images(run, options.text, options.split, options.top)
    else:
        names = run.data.image_names(options.split)
        if unknown := [name for name in options.image if not name.isdigit()] if names is None else []:
            raise ValueError(f"image {unknown[0]!r}: these images have no names; count from 0")
        known = set() if names is None else {name for name in options.image if not name.isdigit()}
        images = [names.index(name) if name in known else int(name) for name in options.image]
        queries, found = options.image, find_captions(run, images, options.split, options.top)
    for query, hits in zip(queries, found, strict=True):
        if options.json:
            print(json.dumps({"query": query, "hits": [hit._asdict() for hit in hits]}))
            continue
        print(query if options.text else f"image {query}")
        for rank, hit in enumerate(hits, 1):
            print(f"{rank:4}  {hit.score:.4f}  {hit.index:8}  {hit.name}")


def audit(options: argparse.Namespace) -> None:
    """Writes what the networks think of every training pair: a list of the pairs that do not match.

    examples:
      pcsr-fast audit runs/1 --out pairs.csv
      pcsr-fast audit runs/1 --out worst.parquet --worst 1000
    """
    from pcsr_fast.audit import audit

    path = audit(_run(options), options.out, options.worst, not options.no_suggestions)
    print(f"{path}: written")


def report(options: argparse.Namespace) -> None:
    """Writes one HTML page, and its figures as PNG: curves, division, health, time, examples, settings.

    examples:
      pcsr-fast report runs/1                                 # to runs/1/report/index.html
      pcsr-fast report runs/pcsr --against runs/sgr --out page
    """
    from pcsr_fast.report import write
    from pcsr_fast.run import open_run

    path = write(_run(options), options.out, [open_run(folder) for folder in options.against])
    print(f"{path}: open it in a browser; it needs no other file")


def backends(options: argparse.Namespace) -> None:
    """Which implementation of each op is available, and why not.

    examples:
      pcsr-fast backends
      PCSR_BACKEND=reference pcsr-fast backends
    """
    from pcsr_fast import backend

    backend.main()


def bench(options: argparse.Namespace) -> int:
    """Times the ops, steps, loader, evaluation and epochs against what one would write without them.

    examples:
      pcsr-fast bench kernels --op triplet --no-save
      pcsr-fast bench step --profile trace.json
    """
    root = Path(__file__).resolve().parents[1]
    if not (root / "bench" / "__main__.py").exists():
        raise FileNotFoundError("benchmarks come with the source code: run this in a clone, after pip install -e .")
    sys.path.insert(0, str(root))
    from bench.__main__ import main

    return main(options.arguments)


def _run(options: argparse.Namespace):
    from pcsr_fast.run import open_run

    return open_run(options.run, data=options.data, weights=options.weights, device=options.device)


def _field_texts() -> tuple[dict[str, str], dict[str, str]]:
    """What config.py's comments say of every field: its help, and the title of its group."""
    helps, groups, title = {}, {}, "method"
    for line in inspect.getsource(Config).splitlines():
        if found := re.fullmatch(r"    # (.+)", line):
            name, colon, text = found[1].partition(": ")
            if colon and name in Config.__dataclass_fields__:
                helps[name] = text
            elif name.isidentifier():
                title = name
        elif found := re.fullmatch(r"    (\w+): .+? = .+?(?:  # (.+))?", line):
            groups[found[1]] = title
            helps[found[1]] = found[2] or helps.get(found[1], "")
    return helps, groups


def add_settings(parser: argparse.ArgumentParser) -> None:
    """An option for every field of Config; those that are not given are absent."""
    helps, titles = _field_texts()
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(Config):
        title = titles.get(field.name, "settings")
        group = groups[title] = groups.get(title) or parser.add_argument_group(f"settings: {title}")
        default = " ".join(field.default) if isinstance(field.default, tuple) else field.default
        text = helps.get(field.name, "").replace("%", "%%")
        options: dict = {"default": argparse.SUPPRESS, "help": f"{text + ' ' if text else ''}(default {default})"}
        if field.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif get_origin(field.type) is Literal:
            options["choices"] = get_args(field.type)
        elif get_origin(field.type) is tuple:
            options |= {"nargs": "+", "metavar": "NAME"}
        else:
            options |= {"type": field.type, "metavar": {int: "N", float: "X"}.get(field.type, "NAME")}
        group.add_argument(f"--{field.name.replace('_', '-')}", **options)


def _ratio_or_file(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "pcsr-fast",
        description="Training of image-text retrieval on noisy pairs.",
        epilog=f"exit codes: {EXIT_CODES}\nexamples: pcsr-fast COMMAND --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    from pcsr_fast import __version__

    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(function, of_run: bool = False) -> argparse.ArgumentParser:
        text, _, examples = inspect.getdoc(function).partition("\n\n")
        found = commands.add_parser(
            function.__name__,
            help=text,
            description=text,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            usage="pcsr-fast train RUN [options]" if function is train else None,
        )
        found.set_defaults(run_command=function)
        found.add_argument("--debug", action="store_true", help="show where an error came from")
        if of_run:
            found.add_argument("run", metavar="RUN", help="folder of a run")
            found.add_argument("--data", metavar="FOLDER", help="where the data is now, if it was moved")
            found.add_argument("--weights", choices=("best", "last"), default="best", help="default best")
            found.add_argument("--device", metavar="NAME", help="cpu or cuda; default: the run's")
        return found

    def layout(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--vocabulary", metavar="JSON", help="words and ids of a folder, or where to look for them")
        parser.add_argument("--variant", help="which captions, where a folder has several: bpe, bert, jieba")
        parser.add_argument(
            "--repeated",
            action=argparse.BooleanOptionalAction,
            default=None,
            help="whether a folder's rows are repeated for each caption; default: found by their content",
        )

    made = command(train)
    made.add_argument("run", metavar="RUN", help="folder of the run")
    made.add_argument("--preset", choices=[*PRESETS], help="settings of a data set; sample brings its data along")
    made.add_argument("--config", metavar="FILE", help="settings in TOML or JSON; they change the preset's")
    made.add_argument("--data", metavar="DATA", help="folder of features, store, or sample")
    layout(made)
    made.add_argument("--dev-images", type=int, metavar="N", help="images of dev to validate on (default 1000, 0: all)")
    made.add_argument("--noise", type=_ratio_or_file, metavar="X", help="share of pairs to mix up, or a file of noise")
    made.add_argument("--noise-protocol", choices=("caption", "image"), help="default caption")
    made.add_argument("--noise-seed", type=int, metavar="N", help="default 0")
    made.add_argument(
        "--resume", choices=("auto", "must", "never"), default="auto", help="go on with the run in the folder (auto)"
    )
    made.add_argument("--tensorboard", action="store_true", help="also write RUN/tensorboard")
    add_settings(made)

    made = command(evaluate, of_run=True)
    made.add_argument("--split", default="test", help="default test")
    made.add_argument("--folds", type=int, default=0, help="also the mean over so many folds of images")
    made.add_argument("--json", action="store_true", help="print JSON")

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

    made = command(noise)
    made.add_argument("data", metavar="DATA", help="folder of features, store, or sample")
    made.add_argument("file", metavar="FILE", help="the noise: .npy, an image index for every caption")
    made.add_argument("--ratio", type=float, help="draw this share of mismatched pairs")
    made.add_argument("--protocol", choices=("caption", "image"), default="caption", help="default caption")
    made.add_argument("--seed", type=int, default=0, help="default 0")
    layout(made)

    made = command(vocab)
    made.add_argument("folder", help="folder of features and captions")
    made.add_argument("--out", metavar="JSON", help="default: NAME_vocab.json in the folder")
    made.add_argument("--threshold", type=int, default=4, help="how often a word must occur (default 4)")

    made = command(retrieve, of_run=True)
    query = made.add_mutually_exclusive_group(required=True)
    query.add_argument("--text", nargs="+", help="find images for these texts")
    query.add_argument(
        "--image", nargs="+", metavar="ID", help="find captions for images: number in the split, or name"
    )
    made.add_argument("--split", default="test", help="where to look (default test)")
    made.add_argument("--top", type=int, default=10, help="how many (default 10)")
    made.add_argument("--json", action="store_true", help="print a JSON line for each query")

    made = command(audit, of_run=True)
    made.add_argument("--out", required=True, metavar="FILE", help=".csv, or .parquet with pyarrow")
    made.add_argument("--worst", type=int, metavar="N", help="only the N most suspicious pairs, those first")
    made.add_argument("--no-suggestions", action="store_true", help="no captions for pairs that do not match")

    made = command(report, of_run=True)
    made.add_argument("--out", metavar="FOLDER", help="default RUN/report")
    made.add_argument("--against", nargs="+", default=[], metavar="RUN", help="other runs to compare with")

    command(backends)
    made = command(bench)
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="see: pcsr-fast bench -- --help")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return options.run_command(options) or 0
    except (ValueError, OSError) as error:
        if options.debug:
            raise
        return _failed(options, error, 2)
    except RuntimeError as error:
        code = _code_of(error)
        if options.debug or code is None:
            raise
        return _failed(options, error, code)
    except KeyboardInterrupt as error:
        return _failed(options, error, 130)


def _code_of(error: RuntimeError) -> int | None:
    """Of what is known to go wrong at run time; anything else is a bug."""
    from pcsr_fast.distributed import RankError
    from pcsr_fast.train import TrainingError

    if isinstance(error, TrainingError | RankError):
        return 3
    return 2 if str(error).startswith("backend ") else None


def _failed(options: argparse.Namespace, error: BaseException, code: int) -> int:
    message = " ".join([str(error) or ("stopped" if code == 130 else repr(error)), *getattr(error, "__notes__", [])])
    if os.environ.get("RANK", "0") != "0":
        # what all ranks have to say is said once: torchrun ends this one when it sees that rank 0 has ended
        time.sleep(10)
    print(f"pcsr-fast {options.command}: {' '.join(message.split())}", file=sys.stderr)
    return code
