"""Benchmarks: `python -m bench` times every op against what one would write without it."""
