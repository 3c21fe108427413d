"""The tables and images that papers compare density estimators on, read from their files."""

from __future__ import annotations

__all__ = ["BENCHMARKS", "Benchmark", "Form", "data_folder", "describe_benchmark", "load_benchmark"]

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ciflows.datasets import image_files, recipes
from ciflows.datasets.cache import Parts, Prepared, Source, load_prepared, prepared_sizes
from ciflows.errors import UserError
from ciflows.progress import Say, silent

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Form:
    """One of the file formats that a data set is distributed in.

    Arguments:
        name: Its name in the cache.
        files: Patterns of its files in the data folder; each must match at least one.
        origin: Where to get them.
        prepare: Reads and splits the files.
        fingerprint: SHA-256 of the prepared data; None if it is unknown, or depends on the libraries
            that read the files.
    """

    name: str
    files: tuple[str, ...]
    origin: str
    prepare: Callable[[Sequence[Path]], Parts]
    fingerprint: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """A data set of the literature.

    Arguments:
        name: Its name in settings.
        shape: Shape of one point, as published: (features,), or (channels, height, width).
        sizes: Rows of train, validation and test, as published.
        forms: The formats that it can be read from, the best first.
        seed: Seed of the split or of the points; 0 if nothing is drawn.
    """

    name: str
    summary: str
    shape: tuple[int, ...]
    sizes: Sizes
    forms: tuple[Form, ...]
    seed: int = 0


def data_folder() -> Path:
    """The folder with the files of the data sets: CIFLOWS_DATA, or ./data."""
    return Path(os.environ.get("CIFLOWS_DATA") or "data")


def load_benchmark(name: str, folder: Path | None = None, say: Say = silent) -> Prepared:
    """Load a data set by its name; the first time, prepare it from the files in a folder."""
    benchmark, folder = BENCHMARKS[name], folder or data_folder()
    found = _find(benchmark, folder)
    if found is None:
        raise UserError(
            f"{name} is not in {folder.absolute()}, which lacks {_missing(benchmark, folder)}. "
            "Set CIFLOWS_DATA to the folder that has it.",
            command="--data-dir DIR",
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


def describe_benchmark(name: str) -> tuple[str, str, str]:
    """Size of a point, rows, and where the files are, or where to get them."""
    benchmark, folder = BENCHMARKS[name], data_folder()
    found = _find(benchmark, folder)
    size, rows = _size(benchmark.shape), _rows(benchmark.sizes)
    if found is None:
        return size, rows, f"missing: {_missing(benchmark, folder)}"
    form, source = found
    known = prepared_sizes(source)
    files = " and ".join(form.files) + (f" ({len(source.files)} files)" if "*" in form.files[0] else "")
    state = f"{files}, {'prepared' if known else 'not prepared yet'}"
    if known is None or known == (benchmark.sizes, benchmark.shape):
        return size, rows, state
    unit = "features" if len(benchmark.shape) == 1 else "pixels"
    return _size(known[1]), _rows(known[0]), f"{state}; published: {size} {unit}, {rows} rows"


def _size(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _rows(sizes: Sizes) -> str:
    return " / ".join(f"{size:,}" for size in sizes)


def _find(benchmark: Benchmark, folder: Path) -> tuple[Form, Source] | None:
    """The first form whose files are all there."""
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
GAS = (
    f'from gas/ethylene_CO.pickle {ZENODO}; pandas 1 converts it: python -c "import pandas; '
    "pandas.read_pickle('ethylene_CO.pickle').to_csv('ethylene_CO.csv', index=False)\""
)


def _idx_forms(name: str, origin: str, fingerprint: str) -> tuple[Form, ...]:
    """The two files of images, gzipped or unpacked; labels are not needed."""
    files = [f"{name}/{part}-images-idx3-ubyte" for part in ("train", "t10k")]
    packed = tuple(f"{file}.gz" for file in files)
    return (
        Form("idx-gz", packed, origin, image_files.idx, fingerprint),
        Form("idx", tuple(files), "the same, unpacked", image_files.idx, fingerprint),
    )


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            name="power",
            summary="electric power used in a household, minute by minute",
            shape=(6,),
            sizes=(1_659_917, 184_435, 204_928),
            forms=(
                Form("zenodo", ("power/data.npy",), ZENODO, recipes.power_from_table),
                Form(
                    "integers",
                    ("power/power_uint16.npz",),
                    "UCI data set 235 as integers",
                    recipes.power_from_integers,
                    # of the prepared data, since the file may be compressed again; every processor gets
                    # these bits: sums are rounded exactly, and the rest is plain IEEE arithmetic
                    fingerprint="8353255912405b61b00ce09de225614a416acbe672c02faa768eb290444eec9d",
                ),
            ),
            seed=recipes.POWER_SEED,
        ),
        Benchmark(
            name="gas",
            summary="sensors in mixtures of ethylene and carbon monoxide",
            shape=(8,),
            sizes=(852_174, 94_685, 105_206),
            forms=(Form("zenodo", ("gas/ethylene_CO.csv",), GAS, recipes.gas),),
        ),
        Benchmark(
            name="hepmass",
            summary="simulated collisions of particles that make a new one",
            shape=(21,),
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
            shape=(43,),
            sizes=(29_556, 3_284, 3_648),
            forms=(Form("zenodo", ("miniboone/data.npy",), ZENODO, recipes.miniboone),),
        ),
        Benchmark(
            name="bsds300",
            summary="8×8 patches of photographs, less their mean and last pixel",
            shape=(63,),
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
        Benchmark(
            name="mnist",
            summary="handwritten digits",
            shape=(1, 28, 28),
            sizes=(54_000, 6_000, 10_000),
            forms=_idx_forms(
                "mnist",
                "https://ossci-datasets.s3.amazonaws.com/mnist",
                "e4dcc3e26387333e7d66ab831e50be51925c930f56fa60d0a638a2953557772b",
            ),
            seed=image_files.IMAGE_SEED,
        ),
        Benchmark(
            name="fashion-mnist",
            summary="articles of clothing",
            shape=(1, 28, 28),
            sizes=(54_000, 6_000, 10_000),
            forms=_idx_forms(
                "fashion-mnist",
                "https://github.com/zalandoresearch/fashion-mnist",
                "d8da970fc0ed73f9f61d4411fcf0a382879076cbbd649b7f2ac59de3df3e719e",
            ),
            seed=image_files.IMAGE_SEED,
        ),
        Benchmark(
            name="cifar10",
            summary="small photographs of ten kinds of things",
            shape=(3, 32, 32),
            sizes=(45_000, 5_000, 10_000),
            forms=(
                Form(
                    "binary",
                    tuple(
                        f"cifar-10-batches-bin/{part}.bin"
                        for part in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
                    ),
                    "cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html",
                    image_files.cifar10,
                ),
            ),
            seed=image_files.IMAGE_SEED,
        ),
    )
}
