"""What `make demo` shows: sgr and pcsr on the sample set with 40 % noise, side by side, and the report of both."""

import argparse
import time
from pathlib import Path

import pcsr_fast as pf


def main(folder: Path, data: str = "sample", **changes) -> Path:
    """Trains both, prints their recalls on test, and returns the report; settings are those of the preset."""
    began = time.monotonic()
    data, runs = pf.Dataset(data, noise=0.4), {}
    print("\nwarm-up of both: all pairs alike, with the mean of all negatives")
    pf.fit(pf.settings("sample", method="sgr", **changes | {"epochs": 0}), data, folder / "warm-up")
    for method in ("sgr", "pcsr"):
        print(f"\n{method}: {'all pairs alike' if method == 'sgr' else 'clean, refinable and ambiguous pairs'}")
        config = pf.settings("sample", method=method, **changes)
        runs[method] = pf.fit(config, data, folder / method, warmed=folder / "warm-up")
    names = [f"{side}_r{k}" for side in ("i2t", "t2i") for k in (1, 5, 10)]
    print("\ntest set, 40 % of the training pairs mismatched" + 8 * " " + "in percent; rsum is their sum")
    print(f"{'':8}" + "".join(f"{name.replace('_r', ' R@'):>10}" for name in names) + f"{'rsum':>10}")
    for method, run in runs.items():
        found = run.evaluate("test")["mean"]
        print(f"{method:8}" + "".join(f"{found[name]:10.1f}" for name in (*names, "rsum")))
    print(f"\na query: {(query := 'a two in the middle')}")
    for hit in runs["pcsr"].search(query, top=3):
        print(f"  {hit.score:.3f}  {hit.name}")
    table = runs["pcsr"].audit(folder / "pairs.csv", worst=100)
    page = runs["pcsr"].report(folder / "report", against=[runs["sgr"]])
    print(f"\nreport:                          {page}\n100 pairs that match least:      {table}")
    print(f"{time.monotonic() - began:.0f} s")
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/demo"))
    main(parser.parse_args().folder)
