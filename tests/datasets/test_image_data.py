"""Images from their files: the literature's sets and a reader's own folder, against files made here."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.random import RandomState
from PIL import Image
from test_literature import REAL

from ciflows.datasets import (
    BENCHMARKS,
    describe_benchmark,
    holds_images,
    image_files,
    load_dataset,
    read_images,
)
from ciflows.datasets.image_files import IMAGE_SEED
from ciflows.errors import UserError

IDX = ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte")
BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


@pytest.fixture(autouse=True)
def data(data_folder: Path) -> Path:
    return data_folder


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def idx(images: np.ndarray, kind: int = 2051) -> bytes:
    rows, _, height, width = images.shape
    return struct.pack(">4I", kind, rows, height, width) + images.tobytes()


def write_idx(folder: Path, packed: bool, name: str = "mnist") -> tuple[np.ndarray, np.ndarray]:
    parts = pixels(30, 1, 6, 4), pixels(7, 1, 6, 4, seed=1)
    (folder / name).mkdir(exist_ok=True)
    for file, images in zip(IDX, parts, strict=True):
        content = gzip.compress(idx(images)) if packed else idx(images)
        (folder / name / (f"{file}.gz" if packed else file)).write_bytes(content)
    return parts


def write_cifar(folder: Path) -> list[np.ndarray]:
    (folder / "cifar-10-batches-bin").mkdir()
    parts = [pixels(4, 3, 32, 32, seed=seed) for seed in range(6)]
    for name, images in zip(BATCHES, parts, strict=True):
        records = np.hstack([np.full((4, 1), 9, np.uint8), images.reshape(4, -1)])
        (folder / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(records.tobytes())
    return parts


def write_folder(folder: Path, images: np.ndarray, suffix: str = "png") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index, image in enumerate(images):
        array = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
        Image.fromarray(array).save(folder / f"{index:03d}.{suffix}")
    return folder


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_are_read_and_split_for_good(name: str, packed: bool, data: Path) -> None:
    known, test = write_idx(data, packed, name)
    dataset = load_dataset(name)
    order = RandomState(IMAGE_SEED).permutation(30)
    parts = (dataset.train, dataset.validation, dataset.test)
    for part, wanted in zip(parts, (known[order[:27]], known[order[27:]], test), strict=True):
        assert part.dtype == torch.uint8
        assert np.array_equal(part.numpy(), wanted)
    assert (dataset.shape, dataset.features, dataset.columns) == ((1, 6, 4), 24, ())
    assert dataset.images
    assert dataset.split_seed == IMAGE_SEED
    assert load_dataset(name).fingerprint == dataset.fingerprint


def test_both_forms_hold_the_same(data: Path, tmp_path: Path) -> None:
    write_idx(data, packed=True)
    (tmp_path / "plain").mkdir()
    write_idx(tmp_path / "plain", packed=False)
    first, second = load_dataset("mnist"), load_dataset("mnist", tmp_path / "plain")
    assert first.fingerprint == second.fingerprint


def test_cifar_is_read_without_its_classes(data: Path) -> None:
    *known, test = write_cifar(data)
    dataset = load_dataset("cifar10")
    order = RandomState(IMAGE_SEED).permutation(20)
    assert np.array_equal(dataset.train.numpy(), np.concatenate(known)[order[:18]])
    assert np.array_equal(dataset.test.numpy(), test)


def test_images_are_listed_like_tables(data: Path) -> None:
    size, rows, where = describe_benchmark("mnist")
    assert (size, rows) == ("1×28×28", "54,000 / 6,000 / 10,000")
    assert where.startswith("missing: mnist/train-images-idx3-ubyte.gz and")
    write_idx(data, packed=True)
    assert describe_benchmark("mnist")[2].endswith("t10k-images-idx3-ubyte.gz, not prepared yet")
    load_dataset("mnist")
    size, rows, where = describe_benchmark("mnist")
    assert (size, rows) == ("1×6×4", "27 / 3 / 7")
    assert "prepared; published: 1×28×28 pixels, 54,000" in where


def test_missing_files_are_told(data: Path) -> None:
    with pytest.raises(UserError, match=r"cifar-10-binary\.tar\.gz of https"):
        load_dataset("cifar10")
    write_cifar(data)
    (data / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(UserError, match=r"lacks cifar-10-batches-bin/data_batch_3\.bin \("):
        load_dataset("cifar10")


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-5],
    "longer": lambda content: content + b"\0",
    "header alone": lambda content: content[:10],
    "labels": lambda content: struct.pack(">I", 2049) + content[4:],
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_idx_files_are_named(damage: str, packed: bool, data: Path) -> None:
    write_idx(data, packed)
    path = data / "mnist" / (f"{IDX[0]}.gz" if packed else IDX[0])
    content = DAMAGES[damage](gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(UserError, match=r"mnist: .*idx3-ubyte.*damaged, cut short or not an IDX file"):
        load_dataset("mnist")


def test_a_cut_gzip_and_other_sizes_are_refused(data: Path) -> None:
    write_idx(data, packed=True)
    path = data / "mnist" / f"{IDX[1]}.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"t10k-images-idx3-ubyte\.gz: damaged, cut short"):
        load_dataset("mnist")
    path.write_bytes(gzip.compress(idx(pixels(7, 1, 4, 4))))
    with pytest.raises(UserError, match="differ in size from those of train-images"):
        load_dataset("mnist")


@pytest.mark.parametrize("content", [b"", b"\1" * 3072, b"\12" + b"\1" * 3072])
def test_damaged_cifar_files_are_named(content: bytes, data: Path) -> None:
    write_cifar(data)
    (data / "cifar-10-batches-bin" / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"data_batch_2\.bin: damaged, cut short or not a file of CIFAR"):
        load_dataset("cifar10")


@pytest.mark.parametrize(("channels", "suffix"), [(1, "png"), (3, "PNG"), (3, "jpg"), (1, "jpeg")])
def test_a_folder_of_images_is_a_data_set(channels: int, suffix: str, tmp_path: Path) -> None:
    images = pixels(25, channels, 8, 6)
    folder = write_folder(tmp_path / "my photos", images, suffix)
    (folder / "notes.txt").write_text("not an image")
    dataset = load_dataset(str(folder))
    assert dataset.shape == (channels, 8, 6)
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [21, 2, 2]
    together = torch.cat([dataset.train, dataset.validation, dataset.test])
    read = read_images(image_files(folder))
    assert sorted(map(bytes, together.numpy())) == sorted(map(bytes, read))
    if suffix.lower() == "png":
        assert np.array_equal(read, images)
    assert load_dataset(str(folder)).fingerprint == dataset.fingerprint
    assert holds_images(str(folder))


def test_one_coloured_image_makes_all_coloured(tmp_path: Path) -> None:
    write_folder(tmp_path / "some", pixels(3, 1, 4, 4))
    Image.fromarray(pixels(4, 4, 3)).save(tmp_path / "some" / "colour.png")
    files = image_files(tmp_path / "some")
    images = read_images(files)
    assert images.shape == (4, 3, 4, 4)
    assert np.array_equal(images[0, 0], images[0, 2])
    assert read_images(files[:2]).shape == (2, 1, 4, 4)
    assert read_images(files[:2], channels=3).shape == (2, 3, 4, 4)


def _sizes(folder: Path) -> None:
    Image.fromarray(pixels(4, 6)).save(folder / "other.png")


def _text(folder: Path) -> None:
    (folder / "other.png").write_text("not an image")


def _cut(folder: Path) -> None:
    path = folder / "000.png"
    path.write_bytes(path.read_bytes()[:-30])


def _deep(folder: Path) -> None:
    Image.fromarray(np.full((4, 4), 300, np.uint16)).save(folder / "other.png")


def _clear(folder: Path) -> None:
    Image.fromarray(np.full((4, 4, 4), 200, np.uint8)).save(folder / "other.png")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_sizes, "other.png: 6×4 pixels, but 000.png has 4×4"),
        (_text, "other.png: damaged, cut short or not an image"),
        (_cut, "000.png: damaged, cut short or not an image"),
        (_deep, "other.png: expected 8 bits"),
        (_clear, "other.png: some of its pixels are transparent"),
    ],
)
def test_bad_folders_are_refused(harm: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "some", pixels(20, 1, 4, 4))
    harm(folder)
    with pytest.raises(UserError, match=message):
        load_dataset(str(folder))


def test_empty_folders_and_few_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="holds no images"):
        load_dataset(str(tmp_path / "none"))
    with pytest.raises(UserError, match="3 images are too few"):
        load_dataset(str(write_folder(tmp_path / "few", pixels(3, 1, 4, 4))))


def test_a_changed_folder_is_prepared_anew(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "some", pixels(20, 1, 4, 4))
    before = load_dataset(str(folder)).fingerprint
    write_folder(folder, pixels(20, 1, 4, 4, seed=1))
    assert load_dataset(str(folder)).fingerprint != before


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_real_files(name: str) -> None:
    if not (REAL / name).exists():
        pytest.skip(f"no {name} in {REAL}")
    dataset = load_dataset(name, REAL)
    parts = (dataset.train, dataset.validation, dataset.test)
    assert tuple(len(part) for part in parts) == BENCHMARKS[name].sizes
    assert dataset.shape == BENCHMARKS[name].shape
    assert {int(part.max()) for part in parts} == {255}
    assert dataset.fingerprint == BENCHMARKS[name].forms[0].fingerprint
