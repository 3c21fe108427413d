"""A table of your own: reading it, finding out what its columns are, mapping them to scores."""

from ciflows.tables.options import PLAIN_TABLE, TableSettings
from ciflows.tables.read import (
    Table,
    TableLike,
    as_frame,
    read_chunks,
    read_table,
    write_frame,
    write_table,
)
from ciflows.tables.schema import Schema

__all__ = [
    "PLAIN_TABLE",
    "Schema",
    "Table",
    "TableLike",
    "TableSettings",
    "as_frame",
    "read_chunks",
    "read_table",
    "write_frame",
    "write_table",
]
