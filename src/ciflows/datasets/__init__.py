"""Data: built-in 2-D sets with known truths, the literature's tables and images, and a reader's own."""

from ciflows.datasets.dataset import (
    Dataset,
    check_drawn,
    holds_images,
    holds_table,
    is_built_in,
    load_dataset,
    table_dataset,
)
from ciflows.datasets.image_files import image_files, read_images
from ciflows.datasets.literature import BENCHMARKS, Benchmark, data_folder, describe_benchmark
from ciflows.datasets.synthetic import SYNTHETIC, Synthetic, get_synthetic

__all__ = [
    "BENCHMARKS",
    "SYNTHETIC",
    "Benchmark",
    "Dataset",
    "Synthetic",
    "check_drawn",
    "data_folder",
    "describe_benchmark",
    "get_synthetic",
    "holds_images",
    "holds_table",
    "image_files",
    "is_built_in",
    "load_dataset",
    "read_images",
    "table_dataset",
]
