"""The benchmark: training steps, likelihoods and samples, timed beside other libraries."""

from ciflows.bench.measure import BenchSettings, run_bench
from ciflows.bench.results import Result, read_result

__all__ = ["BenchSettings", "Result", "read_result", "run_bench"]
