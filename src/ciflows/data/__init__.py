"""Data: built-in 2-D sets with known truths, the literature's tables and images, and a reader's own."""

from ciflows.data.benchmarks import BENCHMARKS, Benchmark, data_folder, describe_benchmark
from ciflows.data.dataset import Dataset, holds_images, is_built_in, load_dataset
from ciflows.data.images import image_files, read_images
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
    "holds_images",
    "image_files",
    "is_built_in",
    "load_dataset",
    "read_images",
    "read_table",
    "write_table",
]
