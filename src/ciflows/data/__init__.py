"""Data: built-in 2-D sets with known truths, the literature's tables, and a reader's own."""

from ciflows.data.benchmarks import BENCHMARKS, Benchmark, data_folder, describe_benchmark
from ciflows.data.dataset import Dataset, is_built_in, load_dataset
from ciflows.data.synthetic import SYNTHETIC, Synthetic, get_synthetic
from ciflows.data.tables import Table, read_table, write_table

__all__ = [
    "BENCHMARKS",
    "SYNTHETIC",
    "Benchmark",
    "Dataset",
    "Synthetic",
    "Table",
    "data_folder",
    "describe_benchmark",
    "get_synthetic",
    "is_built_in",
    "load_dataset",
    "read_table",
    "write_table",
]
