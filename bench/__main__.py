"""`python -m bench COMMAND`: one entry to all benchmarks; `python -m bench` alone times the kernels.

kernels     every op against plain torch
step        a whole training step against the published loop; --profile FILE writes a trace
loader      batches, waiting, and opening a store of 3.3 million pairs
evaluation  the score matrix of a split
epoch       division, training and validation of an epoch
scale       everything beside the network, up to 3.3 million pairs
experiments retrieval under noise: methods, ablations, deviations from the paper
text        captions to token ids, against NLTK
gpu_static  what can be known of the GPU kernels without a GPU
report      plots, and the tables of README.md and docs/benchmarks.md, from bench/results

All take --help. Results go to bench/results, a CSV for each machine.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = ("kernels", "step", "loader", "evaluation", "epoch", "scale", "experiments", "text", "gpu_static", "report")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = [*(sys.argv[1:] if arguments is None else arguments)]
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if arguments and not arguments[0].startswith("-"):
        command, *arguments = arguments
    else:
        command = "kernels"
    if command not in COMMANDS:
        print(f"bench: no benchmark is called {command!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return import_module(f"bench.{command}").main(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
