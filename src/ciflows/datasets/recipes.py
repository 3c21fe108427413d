"""How each table of the literature is preprocessed and split.

All follow the code of Papamakarios et al. (2017, "Masked autoregressive flow for density estimation"),
as later papers do. Sums are rounded exactly, and random numbers come from RandomState, whose stream
numpy keeps fixed: every machine gets the same bits.
"""

from __future__ import annotations

__all__ = [
    "PATCHES",
    "PATCH_SEED",
    "POWER_SEED",
    "bsds300_from_images",
    "bsds300_from_patches",
    "gas",
    "hepmass",
    "miniboone",
    "power_from_integers",
    "power_from_table",
    "reading",
]

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.random import RandomState
from numpy.typing import NDArray

from ciflows.datasets.cache import Parts
from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.tables.read import own_names, read_table

POWER_SEED = 42
POWER_COLUMNS = (
    *("Global_active_power", "Global_reactive_power", "Voltage", "Global_intensity"),
    *("Sub_metering_1", "Sub_metering_2", "Sub_metering_3"),
)
CORRELATED = 0.98
MOST_OF_THE_SMALLEST = 5
PATCH_SEED = 300
PATCH_SIDE = 8
PATCHES = (1_000_000, 50_000, 250_000)

Array = NDArray[np.float64]


def power_from_table(files: Sequence[Path]) -> Parts:
    """POWER from an array with all eight columns."""
    return _power(_read_npy(files[0], len(POWER_COLUMNS) + 1))


def power_from_integers(files: Sequence[Path]) -> Parts:
    """POWER from the meters' readings as integers, to be divided by their scales."""
    # opened here, because numpy leaves a damaged file open
    with reading(files[0], "an .npz file of power"), files[0].open("rb") as opened:
        file = np.load(opened)
        columns = tuple(file["columns"].tolist())
        table = np.column_stack([file["ints"] / file["scale"], file["minute_of_day"]])
    if columns != POWER_COLUMNS:
        raise UserError(f"{files[0]}: expected the columns {', '.join(POWER_COLUMNS)}.")
    return _power(_finite(table, files[0]))


def gas(files: Sequence[Path]) -> Parts:
    """GAS: the sensors without those that repeat another; standardised with the test rows."""
    values, names = _read_csv(files[0])
    others = ("Time", "Meth", "Eth")
    sensors = [i for i, name in enumerate(names) if name not in others]
    if not sensors or not set(others) <= set(names):
        raise UserError(f"{files[0]}: expected {', '.join(others)} and sensors; got {', '.join(names)}.")
    cut, end = _cut(len(values))
    columns = [names[i] for i in sensors]
    points = _finite(values[:, sensors], files[0])
    points = _standardise(points, points, columns, ddof=1)
    some = _unrelated(points)
    points = points[:, some]
    return Parts(points[:cut], points[cut:end], points[end:], tuple(columns[i] for i in some))


def hepmass(files: Sequence[Path]) -> Parts:
    """HEPMASS: the signal, without discrete features, whose smallest value occurs often."""
    path, test_path = files
    labelled, names = _read_csv(path)
    test_labelled, test_names = _read_csv(test_path)
    if len(test_names) != len(names) + 1:
        raise UserError(
            f"{test_path}: expected {len(names) + 1} columns, one more than {path.name} has; "
            f"got {len(test_names)}."
        )
    known, test = _signal(labelled, path), _signal(test_labelled[:, :-1], test_path)
    cut = len(known) - int(0.1 * len(known))
    if cut == len(known):
        raise UserError(f"{path}: {cut} rows of class 1 are too few to split.")
    train, test = (_standardise(points, known, names[1:], ddof=1) for points in (known, test))
    some = np.flatnonzero((train == train.min(0)).sum(0) <= MOST_OF_THE_SMALLEST).tolist()
    if not some:
        raise UserError(f"{path}: the smallest value of every feature occurs many times.")
    train, test = train[:, some], test[:, some]
    return Parts(train[:cut], train[cut:], test, tuple(names[i + 1] for i in some))


def miniboone(files: Sequence[Path]) -> Parts:
    """MINIBOONE: electron neutrinos; the file lacks outliers and seven discrete features already."""
    columns = own_names(43)
    points = _read_npy(files[0], len(columns))
    cut, end = _cut(len(points))
    points = _standardise(points, points[:end], columns, ddof=0)
    return Parts(points[:cut], points[cut:end], points[end:], columns)


def bsds300_from_patches(files: Sequence[Path]) -> Parts:
    """BSDS300: the patches drawn for the literature."""
    import h5py

    columns = own_names(PATCH_SIDE**2 - 1)
    names = ("train", "validation", "test")
    with reading(files[0], f"an HDF5 file with {', '.join(names)}"), h5py.File(files[0]) as file:
        parts = [file[name].astype(np.float32)[:] for name in names]
    for part in parts:
        if part.shape[1:] != (len(columns),) or not len(part):
            raise UserError(f"{files[0]}: expected parts (rows, {len(columns)}); got {part.shape}.")
    train, validation, test = (_finite(part, files[0]) for part in parts)
    return Parts(train, validation, test, columns)


def bsds300_from_images(files: Sequence[Path]) -> Parts:
    """BSDS300: new patches; every tenth training image is for validation only, so none overlap."""
    train, test = ([path for path in files if path.parent.name == part] for part in ("train", "test"))
    validation = train[::10]
    rest = [path for path in train if path not in validation]
    if not rest:
        raise UserError(f"{files[0].parent}: one image is too few to split.")
    rng = RandomState(PATCH_SEED)
    images = zip((rest, validation, test), PATCHES, strict=True)
    parts = [_patches(paths, n, rng) for paths, n in images]
    return Parts(parts[0], parts[1], parts[2], own_names(PATCH_SIDE**2 - 1))


# -- for one table -----------------------------------------------------------------------------------


def _power(table: Array) -> Parts:
    """Shuffle, drop reactive power and intensity, and dequantise the meters' readings."""
    rng, rows = RandomState(POWER_SEED), len(table)
    columns = (POWER_COLUMNS[0], POWER_COLUMNS[2], *POWER_COLUMNS[4:], "minute_of_day")
    cut, end = _cut(rows)
    # the same order as rng.shuffle(table), which loops over rows in Python
    points = table[rng.permutation(rows)][:, [0, 2, 4, 5, 6, 7]]
    voltage, active, metered = 0.01 * rng.rand(rows, 1), 0.001 * rng.rand(rows, 1), rng.rand(rows, 3)
    points = points + np.hstack([active, voltage, metered, np.zeros((rows, 1))])
    points = _standardise(points, points[:end], columns, ddof=0)
    return Parts(points[:cut], points[cut:end], points[end:], columns)


def _unrelated(points: Array) -> list[int]:
    """Columns left after repeatedly removing the first that is correlated with another."""
    related = np.atleast_2d(np.corrcoef(points, rowvar=False)) > CORRELATED
    np.fill_diagonal(related, False)
    left = list(range(len(related)))
    while (first := next((i for i in left if related[i, left].any()), None)) is not None:
        left.remove(first)
    return left


def _read_csv(path: Path) -> tuple[Array, list[str]]:
    """Rows, cut or padded with NaN to as many columns as the first line has names; and the names."""
    first, _, rest = path.read_bytes().partition(b"\n")
    names = [name.strip("# \r") for name in first.decode("utf-8", "replace").split(",")]
    kinds = {f"{i}": pl.Float64 for i in range(rest.partition(b"\n")[0].count(b",") + 1)}
    try:
        frame = pl.read_csv(rest, has_header=False, schema=kinds)
    except (Exception, pl.exceptions.PanicException) as error:
        raise UserError(f"{path}: damaged, cut short or not a table of numbers.") from error
    if frame.is_empty():
        raise UserError(f"{path}: the table is empty.")
    values = frame.to_numpy()[:, : len(names)]
    missing = np.full((len(values), len(names) - values.shape[1]), np.nan)
    return np.hstack([values, missing]), names


def _signal(labelled: Array, path: Path) -> Array:
    """The rows of class 1, without the class in the first column."""
    points = _finite(labelled, path)[labelled[:, 0] == 1, 1:]
    if not len(points):
        raise UserError(f"{path}: no row has a 1, for signal, in its first column.")
    return points


def _patches(images: Sequence[Path], n: int, rng: RandomState) -> NDArray[np.float32]:
    """n random patches: dequantised, divided by 256, without their mean and last pixel."""
    drawn = rng.randint(len(images), size=n)
    patches = np.empty((n, PATCH_SIDE**2 - 1), np.float32)
    for index, path in enumerate(images):
        rows = np.flatnonzero(drawn == index)
        windows = sliding_window_view(_read_grey(path), (PATCH_SIDE, PATCH_SIDE))
        top, left = (rng.randint(size, size=len(rows)) for size in windows.shape[:2])
        pixels = windows[top, left].reshape(len(rows), PATCH_SIDE**2)
        values = (pixels + rng.rand(*pixels.shape)) / 256
        patches[rows] = (values - values.mean(1, keepdims=True))[:, :-1]
    return patches


def _read_grey(path: Path) -> NDArray[np.uint8]:
    from PIL import Image

    with reading(path, "an image"), Image.open(path) as image:
        pixels = np.asarray(image.convert("L"))
    if min(pixels.shape) < PATCH_SIDE:
        raise UserError(f"{path}: expected an image of at least {PATCH_SIDE} pixels a side.")
    return pixels


# -- for all -----------------------------------------------------------------------------------------


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Raise errors in reading a file as a `UserError` that names it."""
    try:
        yield
    except (PermissionError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{path}: damaged, cut short or not {kind}.") from error


def _read_npy(path: Path, width: int) -> Array:
    values: Array = read_table(path).values.numpy()
    if values.shape[1] != width:
        raise UserError(f"{path}: expected {width} columns; got {values.shape[1]}.")
    return values


def _finite(values: NDArray[Any], path: Path) -> NDArray[Any]:
    if not np.isfinite(values).all():
        raise UserError(f"{path}: damaged or cut short: it has missing or infinite values.")
    return values


def _cut(rows: int) -> tuple[int, int]:
    """Where validation and test begin: the test is the last tenth, validation a tenth of the rest."""
    end = rows - int(0.1 * rows)
    cut = end - int(0.1 * end)
    if cut == end:
        raise UserError(f"{rows} rows are too few to split.")
    return cut, end


def _standardise(points: Array, known: Array, columns: Sequence[str], ddof: int) -> Array:
    """Subtract the means of the known rows, and divide by their standard deviations."""
    means, scales = np.array([_moments(column, ddof) for column in known.T]).T
    constant = [name for name, scale in zip(columns, scales, strict=True) if not scale > 0]
    if constant:
        raise UserError(f"constant columns: {', '.join(constant)}.")
    return (points - means) / scales


def _moments(column: Array, ddof: int) -> tuple[float, float]:
    # the last bits of numpy's sums depend on the processor
    mean = math.fsum(column.tolist()) / len(column)
    return mean, math.sqrt(math.fsum(((column - mean) ** 2).tolist()) / (len(column) - ddof))
