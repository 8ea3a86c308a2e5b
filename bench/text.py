"""`python -m bench text`: captions to token ids, on one core, against NLTK. What is wrong is not timed.

Two baselines: NLTK as it is installed, and the same rules compiled with Python's own `re`, as older NLTK had them.
"""

import argparse
import os
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from nltk.tokenize import NLTKWordTokenizer

from bench.measure import RESULTS, interleaved, machine, save, summary
from pcsr_fast.data.lines import Lines
from pcsr_fast.data.tokens import END, START, UNK, Vocabulary, encode

PARTS = (
    ("A man", "Two dogs", "The little girl's brother", "A group of people", '"Bikers"', "An old, grey-haired woman"),
    ("is", "can't stop", "are slowly", "isn't", "was seen"),
    ("running", "sitting", "playing chess", "throwing a frisbee", "cooking (with gas)", "waiting"),
    ("on the beach", "in front of a café", "near the water; it's cold", "by the road - alone", "at 5:30"),
    (".", " .", "", "!", " in the snow.", ", looking at the camera."),
)


def made_up_captions(count: int) -> list[str]:
    choose = random.Random(0).choice
    return [" ".join(map(choose, PARTS[:-1])) + choose(PARTS[-1]) for _ in range(count)]


class ReTokenizer(NLTKWordTokenizer):
    """The rules of NLTK in Python's re."""

    def _in_re(rules):
        return [(re.compile(rule.pattern, rule.flags & re.IGNORECASE), by) for rule, by in rules]

    STARTING_QUOTES = _in_re(NLTKWordTokenizer.STARTING_QUOTES)
    PUNCTUATION = _in_re(NLTKWordTokenizer.PUNCTUATION)
    ENDING_QUOTES = _in_re(NLTKWordTokenizer.ENDING_QUOTES)
    PARENS_BRACKETS, DOUBLE_DASHES = _in_re([NLTKWordTokenizer.PARENS_BRACKETS, NLTKWordTokenizer.DOUBLE_DASHES])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench text", description=__doc__.split("\n")[0])
    parser.add_argument("--captions", type=Path, help="a file with one caption a line, instead of made-up ones")
    parser.add_argument("--count", type=int, default=2000, help="how many captions (default 2000)")
    parser.add_argument("--seconds", type=float, default=30.0, help="time in all (default 30)")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    captions = [*Lines(options.captions)][: options.count] if options.captions else made_up_captions(options.count)
    vocabulary = Vocabulary.build(captions)

    def in_python(tokenizer: NLTKWordTokenizer) -> tuple[list[int], list[int]]:
        tokens, offsets = [], [0]
        for caption in captions:
            tokens.append(START)
            tokens.extend(vocabulary.ids.get(word, UNK) for word in tokenizer.tokenize(caption.lower()))
            tokens.append(END)
            offsets.append(len(tokens))
        return tokens, offsets

    calls = {
        "native": lambda: encode(captions, vocabulary),
        "nltk": lambda: in_python(NLTKWordTokenizer()),
        "nltk_re": lambda: in_python(ReTokenizer()),
    }
    results = {name: call() for name, call in calls.items()}
    for name in ("nltk", "nltk_re"):
        if not all(np.array_equal(a, b) for a, b in zip(results["native"], results[name], strict=True)):
            print(f"WRONG, not timed: native differs from {name}", file=sys.stderr)
            return 1
    times = interleaved(calls, lambda name: None, options.seconds)
    tokens, offsets = results["native"]
    rows = [
        {
            "op": "text",
            "shape": options.captions.stem if options.captions else "made_up",
            "task": "captions to ids",
            "dtype": "int32",
            "device": "cpu",
            "threads": "1",
            "contender": "native",
            "baseline": baseline,
            **summary(times["native"], times[baseline]),
            "sizes": f"captions={len(captions)} tokens={offsets[-1]}",
            "least_bytes": str(sum(len(caption.encode()) for caption in captions) + tokens.nbytes + offsets.nbytes),
            "least_flops": "0",
            "torch": torch.__version__,
        }
        for baseline in ("nltk", "nltk_re")
    ]
    for row in rows:
        each = float(row["median_us"]) / len(captions)
        print(
            f"{row['baseline']:8}{row['baseline_median_us']:>12} us, native {each:.2f} us a caption, {row['speedup']} x"
        )
    if not options.no_save:
        # the machine is named by all its cores, also where this process may use one
        torch.set_num_threads(os.cpu_count() or 1)
        save(rows, RESULTS / f"{machine()}.csv")
    return 0


if __name__ == "__main__":
    sys.exit(main())
