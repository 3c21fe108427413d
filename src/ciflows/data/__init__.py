"""Data: built-in 2-D sets with known truths, and a reader's own tables."""

from ciflows.data.dataset import Dataset, load_dataset
from ciflows.data.synthetic import SYNTHETIC, Synthetic, get_synthetic
from ciflows.data.tables import Table, read_table, write_table

__all__ = [
    "SYNTHETIC",
    "Dataset",
    "Synthetic",
    "Table",
    "get_synthetic",
    "load_dataset",
    "read_table",
    "write_table",
]
