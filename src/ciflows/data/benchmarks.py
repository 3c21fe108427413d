"""The five tables by which the literature compares density estimators, from the files they come in."""

from __future__ import annotations

__all__ = ["BENCHMARKS", "Benchmark", "Form", "data_folder", "describe_benchmark", "load_benchmark"]

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ciflows.data import recipes
from ciflows.data.prepared import Parts, Prepared, Say, Source, load_prepared, prepared_sizes, silent
from ciflows.errors import UserError

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Form:
    """One of the forms in which a set is passed on.

    Arguments:
        name: What the cache calls it.
        files: Patterns of its files below the data folder, each for at least one file.
        origin: Where to get them.
        prepare: Reads the files and splits what they hold.
        fingerprint: SHA-256 of what the complete files are prepared to; None where it is not known, or
            depends on the libraries that read them.
    """

    name: str
    files: tuple[str, ...]
    origin: str
    prepare: Callable[[Sequence[Path]], Parts]
    fingerprint: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """A table of the literature.

    Arguments:
        name: The name it goes by in settings.
        summary: What it is, in a line.
        features: Number of features, as published.
        sizes: Rows of train, validation and test, as published.
        forms: What it can be prepared from, the best first.
        seed: Seed of the split or of the points; 0 where neither is drawn.
    """

    name: str
    summary: str
    features: int
    sizes: Sizes
    forms: tuple[Form, ...]
    seed: int = 0


def data_folder() -> Path:
    """The folder in which the files of the sets are looked for: CIFLOWS_DATA, or ./data."""
    return Path(os.environ.get("CIFLOWS_DATA") or "data")


def load_benchmark(name: str, folder: Path | None = None, say: Say = silent) -> Prepared:
    """A set by its name, prepared from the files in a folder the first time it is asked for."""
    benchmark, folder = BENCHMARKS[name], folder or data_folder()
    found = _find(benchmark, folder)
    if found is None:
        raise UserError(
            f"{name} is not in {folder.absolute()}, which lacks {_missing(benchmark, folder)}. "
            "Name another folder with --data-dir or in CIFLOWS_DATA."
        )
    form, source = found
    try:
        prepared = load_prepared(source, lambda: form.prepare(source.files), say)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error.__cause__
    sizes = (len(prepared.train), len(prepared.validation), len(prepared.test))
    if sizes == benchmark.sizes and form.fingerprint not in (None, prepared.fingerprint):
        raise UserError(f"{name}: {source.files[0]} has the right size, but not the right content.")
    return prepared


def describe_benchmark(name: str, folder: Path | None = None) -> tuple[str, str, str]:
    """Features, rows, and where the files are or can be had from: what a list says of a set."""
    benchmark, folder = BENCHMARKS[name], folder or data_folder()
    found = _find(benchmark, folder)
    features, rows = str(benchmark.features), _rows(benchmark.sizes)
    if found is None:
        return features, rows, f"missing: {_missing(benchmark, folder)}"
    form, source = found
    known = prepared_sizes(source)
    files = " and ".join(form.files) + (f" ({len(source.files)} files)" if "*" in form.files[0] else "")
    state = f"{files}, {'prepared' if known else 'not prepared yet'}"
    if known is None or known == (benchmark.sizes, benchmark.features):
        return features, rows, state
    return str(known[1]), _rows(known[0]), f"{state}; published: {features} features, {rows} rows"


def _rows(sizes: Sizes) -> str:
    return " / ".join(f"{size:,}" for size in sizes)


def _find(benchmark: Benchmark, folder: Path) -> tuple[Form, Source] | None:
    """The first form of which all files are there."""
    for form in benchmark.forms:
        files = [sorted(folder.glob(pattern)) for pattern in form.files]
        if all(files):
            flat = tuple(path for paths in files for path in paths)
            return form, Source(benchmark.name, form.name, flat)
    return None


def _missing(benchmark: Benchmark, folder: Path) -> str:
    lacking = [(f, [p for p in f.files if not any(folder.glob(p))]) for f in benchmark.forms]
    return " or ".join(f"{' and '.join(files)} ({form.origin})" for form, files in lacking)


# -- all of them -------------------------------------------------------------------------------------

ZENODO = "in data.tar.gz of https://zenodo.org/records/1161203"

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            name="power",
            summary="electric power used in a household, minute by minute",
            features=6,
            sizes=(1_659_917, 184_435, 204_928),
            forms=(
                Form("zenodo", ("power/data.npy",), ZENODO, recipes.power_from_table),
                Form(
                    "integers",
                    ("power/power_uint16.npz",),
                    "UCI data set 235 as integers",
                    recipes.power_from_integers,
                    # Of what is prepared, not of the file, which may be packed anew. Every processor
                    # gets these bits: sums are rounded exactly, and all else is plain IEEE arithmetic.
                    fingerprint="8353255912405b61b00ce09de225614a416acbe672c02faa768eb290444eec9d",
                ),
            ),
            seed=recipes.POWER_SEED,
        ),
        Benchmark(
            name="gas",
            summary="sensors in mixtures of ethylene and carbon monoxide",
            features=8,
            sizes=(852_174, 94_685, 105_206),
            forms=(Form("zenodo", ("gas/ethylene_CO.pickle",), ZENODO, recipes.gas),),
        ),
        Benchmark(
            name="hepmass",
            summary="simulated collisions of particles that make a new one",
            features=21,
            sizes=(315_123, 35_013, 174_987),
            forms=(
                Form(
                    "zenodo",
                    ("hepmass/1000_train.csv", "hepmass/1000_test.csv"),
                    ZENODO,
                    recipes.hepmass,
                ),
            ),
        ),
        Benchmark(
            name="miniboone",
            summary="electron neutrinos in the MiniBooNE experiment",
            features=43,
            sizes=(29_556, 3_284, 3_648),
            forms=(Form("zenodo", ("miniboone/data.npy",), ZENODO, recipes.miniboone),),
        ),
        Benchmark(
            name="bsds300",
            summary="8×8 patches of photographs, less their mean and last pixel",
            features=63,
            sizes=recipes.PATCHES,
            forms=(
                Form("zenodo", ("BSDS300/BSDS300.hdf5",), ZENODO, recipes.bsds300_from_patches),
                Form(
                    "images",
                    ("bsds300/train/*.jpg", "bsds300/test/*.jpg"),
                    "the Berkeley segmentation images",
                    recipes.bsds300_from_images,
                ),
            ),
            seed=recipes.PATCH_SEED,
        ),
    )
}
