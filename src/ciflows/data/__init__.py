"""Data: built-in 2-D sets with known truths, the literature's tables and images, and a reader's own."""

from ciflows.data.benchmarks import BENCHMARKS, Benchmark, data_folder, describe_benchmark
from ciflows.data.dataset import (
    Dataset,
    check_drawn,
    holds_images,
    holds_table,
    is_built_in,
    load_dataset,
    table_dataset,
)
from ciflows.data.images import image_files, read_images
from ciflows.data.schema import PLAIN_TABLE, Schema, TableSettings
from ciflows.data.synthetic import SYNTHETIC, Synthetic, get_synthetic
from ciflows.data.tables import (
    Table,
    TableLike,
    as_frame,
    read_chunks,
    read_table,
    write_frame,
    write_table,
)

__all__ = [
    "BENCHMARKS",
    "PLAIN_TABLE",
    "SYNTHETIC",
    "Benchmark",
    "Dataset",
    "Schema",
    "Synthetic",
    "Table",
    "TableLike",
    "TableSettings",
    "as_frame",
    "check_drawn",
    "data_folder",
    "describe_benchmark",
    "get_synthetic",
    "holds_images",
    "holds_table",
    "image_files",
    "is_built_in",
    "load_dataset",
    "read_chunks",
    "read_images",
    "read_table",
    "table_dataset",
    "write_frame",
    "write_table",
]
