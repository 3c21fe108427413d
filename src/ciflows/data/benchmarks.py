"""The tables and images by which the literature compares density estimators, from their files."""

from __future__ import annotations

__all__ = ["BENCHMARKS", "Benchmark", "Form", "data_folder", "describe_benchmark", "load_benchmark"]

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ciflows.data import images, recipes
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
    """A set of the literature.

    Arguments:
        name: The name it goes by in settings.
        summary: What it is, in a line.
        shape: Shape of one point, as published: (features,), or (channels, height, width).
        sizes: Rows of train, validation and test, as published.
        forms: What it can be prepared from, the best first.
        seed: Seed of the split or of the points; 0 where neither is drawn.
    """

    name: str
    summary: str
    shape: tuple[int, ...]
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
    """Size of a point, rows, and where the files are or can be had from: what a list says of a set."""
    benchmark, folder = BENCHMARKS[name], folder or data_folder()
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


def _idx_forms(name: str, origin: str, fingerprint: str) -> tuple[Form, ...]:
    """The two files of images, gzipped as they are passed on, or unpacked; labels are not needed."""
    files = [f"{name}/{part}-images-idx3-ubyte" for part in ("train", "t10k")]
    packed = tuple(f"{file}.gz" for file in files)
    return (
        Form("idx-gz", packed, origin, images.idx, fingerprint),
        Form("idx", tuple(files), "the same, unpacked", images.idx, fingerprint),
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
            shape=(8,),
            sizes=(852_174, 94_685, 105_206),
            forms=(Form("zenodo", ("gas/ethylene_CO.pickle",), ZENODO, recipes.gas),),
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
            seed=images.IMAGE_SEED,
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
            seed=images.IMAGE_SEED,
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
                    images.cifar10,
                ),
            ),
            seed=images.IMAGE_SEED,
        ),
    )
}
