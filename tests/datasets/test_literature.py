"""The literature's tables: pre-processing against plain computations, the cache, and bad files."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import torch
from numpy.random import RandomState
from PIL import Image

from ciflows.datasets import BENCHMARKS, describe_benchmark, is_built_in, load_dataset, recipes
from ciflows.datasets.cache import Parts, Source, load_prepared
from ciflows.datasets.recipes import POWER_COLUMNS
from ciflows.errors import UserError
from ciflows.layers import Standardise
from ciflows.runs.assemble import build_flow
from ciflows.runs.config import resolve
from ciflows.runs.run import load_run

REAL = Path(os.environ.get("CIFLOWS_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")
ROWS = 300


@pytest.fixture(autouse=True)
def data(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, and fewer patches than the official number."""
    monkeypatch.setattr(recipes, "PATCHES", (400, 100, 200))
    return data_folder


# -- small files of the official formats -------------------------------------------------------------


def power_rows(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    ints = rng.integers(0, [9000, 900, 26000, 400, 80, 80, 30], (rows, 7)).astype(np.uint16)
    return ints, np.arange(rows, dtype=np.uint16) % 1440


def write_power(folder: Path, rows: int = ROWS) -> Path:
    ints, minutes = power_rows(rows)
    table = np.column_stack([ints / [1000, 1000, 100, 10, 1, 1, 1], minutes])
    return save(folder / "power/data.npy", lambda path: np.save(path, table))


def write_power_integers(folder: Path, rows: int = ROWS, **changed: Any) -> Path:
    ints, minutes = power_rows(rows)
    scale = np.array([1000, 1000, 100, 10, 1, 1, 1])
    content = {"ints": ints, "scale": scale, "minute_of_day": minutes, "columns": POWER_COLUMNS}
    write = lambda path: np.savez_compressed(path, **content | changed)  # noqa: E731
    return save(folder / "power/power_uint16.npz", write)


def gas_frame(rows: int = ROWS) -> pd.DataFrame:
    """Sensors of which R1, R2 and R4 follow each other; R3 is R1 upside down, and may stay."""
    rng = np.random.default_rng(1)
    common, own = rng.normal(size=(rows, 1)), rng.normal(size=(rows, 6))
    sensors = own + common * [100, 100, -100, 100, 0, 1]
    columns = ["Time", "Meth", "Eth", "R1", "R2", "R3", "R4", "R5", "R6"]
    return pd.DataFrame(np.hstack([rng.random((rows, 3)), 5 + 3 * sensors]), columns=columns)


def write_gas(folder: Path, rows: int = ROWS) -> Path:
    return save(folder / "gas/ethylene_CO.csv", partial(gas_frame(rows).to_csv, index=False))


def write_hepmass(folder: Path, rows: int = ROWS) -> Path:
    """Labels and five features, of which f1 is one of three numbers, and f3 has a floor."""
    rng = np.random.default_rng(2)
    for name, width, n in (("train", 6, rows), ("test", 7, rows // 2)):
        values = 4 + 2 * rng.normal(size=(n, width))
        values[:, 0] = np.arange(n) % 3 == 1
        values[:, 2] = rng.integers(3, size=n)
        values[:, 4] = np.maximum(values[:, 4], 3)
        header = ",".join(["# label", *(f"f{i}" for i in range(width - 2)), "mass"][:width])
        text = "\n".join([header, *(",".join(f"{x:.18e}" for x in row) for row in values)])
        save(folder / f"hepmass/1000_{name}.csv", lambda path, text=text: path.write_text(text + "\n"))
    return folder / "hepmass/1000_train.csv"


def write_miniboone(folder: Path, rows: int = ROWS) -> Path:
    table = np.random.default_rng(3).normal(2, 5, (rows, 43)).astype(np.float32)
    return save(folder / "miniboone/data.npy", lambda path: np.save(path, table))


def write_patches(folder: Path, rows: int = ROWS, **changed: Any) -> Path:
    rng = np.random.default_rng(4)
    sizes = {"train": rows, "validation": rows // 10, "test": rows // 5}
    content = {name: rng.normal(size=(n, 63)) / 10 for name, n in sizes.items()} | changed

    def write(path: Path) -> None:
        with h5py.File(path, "w") as file:
            for name, values in content.items():
                file[name] = values

    return save(folder / "BSDS300/BSDS300.hdf5", write)


def write_images(folder: Path, rows: int = 12) -> Path:
    """Colour photographs, as many to train on as there are `rows`, and 3 to test on."""
    rng = np.random.default_rng(5)
    for part, n in (("train", rows), ("test", 3)):
        for index in range(n):
            image = Image.fromarray(rng.integers(256, size=(10, 12, 3), dtype=np.uint8))
            save(folder / f"bsds300/{part}/{1000 + index}.jpg", image.save)
    return folder / "bsds300/train/1000.jpg"


def save(path: Path, write: Callable[[Path], object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    return path


# every form of every set: its name, and what writes a small file of it
FORMS: dict[str, tuple[str, Callable[..., Path]]] = {
    "power": ("power", write_power),
    "power-integers": ("power", write_power_integers),
    "gas": ("gas", write_gas),
    "hepmass": ("hepmass", write_hepmass),
    "miniboone": ("miniboone", write_miniboone),
    "bsds300": ("bsds300", write_patches),
    "bsds300-images": ("bsds300", write_images),
}


def cached(name: str) -> list[Path]:
    """All that the cache holds of a set, and all that was left behind there."""
    return sorted(Path(os.environ["CIFLOWS_CACHE"]).glob(f"{name}/*"))


def refusal(name: str) -> str:
    with pytest.raises(UserError) as caught:
        load_dataset(name)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


# -- pre-processing ----------------------------------------------------------------------------------


def check_parts(name: str, *expected: np.ndarray) -> None:
    dataset = load_dataset(name)
    parts = (dataset.train, dataset.validation, dataset.test)
    for part, wanted in zip(parts, expected, strict=True):
        assert part.shape == wanted.shape
        assert np.allclose(part.numpy(), wanted, rtol=1e-6, atol=1e-6)


def last_tenths(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    test = int(0.1 * len(table))
    rest = table[:-test]
    validation = int(0.1 * len(rest))
    return rest[:-validation], rest[-validation:], table[-test:]


@pytest.mark.parametrize("write", [write_power, write_power_integers])
def test_power_is_shuffled_blurred_and_standardised(write: Callable[..., Path], data: Path) -> None:
    table = np.load(write_power(data))
    (data / "power/data.npy").unlink()
    write(data)
    rng = RandomState(42)
    rng.shuffle(table)
    table = np.delete(np.delete(table, 3, axis=1), 1, axis=1)
    voltage, active = 0.01 * rng.rand(ROWS, 1), 0.001 * rng.rand(ROWS, 1)
    table += np.hstack([active, voltage, rng.rand(ROWS, 3), np.zeros((ROWS, 1))])
    train, validation, test = last_tenths(table)
    known = np.vstack([train, validation])
    check_parts("power", *((x - known.mean(0)) / known.std(0) for x in (train, validation, test)))
    dataset = load_dataset("power")
    assert dataset.columns[:3] == ("Global_active_power", "Voltage", "Sub_metering_1")
    assert (dataset.columns[-1], dataset.split_seed, dataset.truth) == ("minute_of_day", 42, None)


def test_both_forms_of_power_are_the_same_numbers_and_told_apart(data: Path) -> None:
    integers = write_power_integers(data)
    first = load_dataset("power").fingerprint
    write_power(data)
    assert load_dataset("power").fingerprint == first
    forms = {path.name.split("-")[0] for path in cached("power")}
    assert forms == {"integers", "zenodo"}
    about = [json.loads((path / "about.json").read_text()) for path in cached("power")]
    assert {one["source"] for one in about} == forms
    assert about[0]["files"][0]["bytes"] == integers.stat().st_size


def test_gas_loses_related_sensors(data: Path) -> None:
    write_gas(data)
    frame = gas_frame().drop(columns=["Meth", "Eth", "Time"])

    def relatives() -> np.ndarray:
        return (frame.corr() > 0.98).to_numpy().sum(axis=1)

    while np.any(relatives() > 1):
        frame = frame.drop(columns=frame.columns[np.where(relatives() > 1)[0][0]])
    frame = (frame - frame.mean()) / frame.std()
    assert tuple(frame.columns) == ("R3", "R4", "R5", "R6")
    check_parts("gas", *last_tenths(frame.to_numpy()))
    assert load_dataset("gas").columns == ("R3", "R4", "R5", "R6")


def hepmass_signal(path: Path) -> np.ndarray:
    lines = path.read_text().splitlines()[1:]
    table = np.array([[float(word) for word in line.split(",")] for line in lines])
    return table[table[:, 0] == 1, 1:]


def test_hepmass_keeps_the_signal_and_what_is_continuous(data: Path) -> None:
    write_hepmass(data)
    train = hepmass_signal(data / "hepmass/1000_train.csv")
    test = hepmass_signal(data / "hepmass/1000_test.csv")[:, :-1]
    mean, std = train.mean(0), train.std(0, ddof=1)
    train, test = (train - mean) / std, (test - mean) / std
    smallest = [sorted(Counter(column).items())[0][1] for column in train.T]
    kept = [i for i, count in enumerate(smallest) if count <= 5]
    assert kept == [0, 2, 4]
    validation = int(0.1 * len(train))
    check_parts("hepmass", train[:-validation, kept], train[-validation:, kept], test[:, kept])
    assert load_dataset("hepmass").columns == ("f0", "f2", "mass")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("train", lambda line: line + ",7"),  # longer than the header: pandas cuts what has no name
        ("test", lambda line: line.rpartition(",")[0]),  # shorter: pandas fills what is then dropped
        ("train", lambda line: line + "\r"),
    ],
)
def test_hepmass_may_have_rows_of_another_length(
    part: str, change: Callable[[str], str], data: Path
) -> None:
    write_hepmass(data)
    before = load_dataset("hepmass")
    path = data / f"hepmass/1000_{part}.csv"
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *map(change, lines)]) + "\n")
    after = load_dataset("hepmass")
    assert len(cached("hepmass")) == 2
    assert (after.fingerprint, after.columns) == (before.fingerprint, before.columns)


def test_miniboone_is_standardised_without_the_test_part(data: Path) -> None:
    train, validation, test = last_tenths(np.load(write_miniboone(data)).astype(np.float64))
    known = np.vstack([train, validation])
    check_parts("miniboone", *((x - known.mean(0)) / known.std(0) for x in (train, validation, test)))


def test_drawn_patches_stay_as_they_are(data: Path) -> None:
    write_images(data)
    with h5py.File(write_patches(data)) as file:
        check_parts("bsds300", *(file[name][:] for name in ("train", "validation", "test")))


def whole_windows(image: np.ndarray) -> list[tuple[int, ...]]:
    """Every 8×8 window of an image, as the differences of its first 63 pixels to the first one."""
    height, width = image.shape
    windows = [image[i : i + 8, j : j + 8] for i in range(height - 7) for j in range(width - 7)]
    return [
        tuple((window.flatten()[:-1].astype(int) - int(window[0, 0])).tolist()) for window in windows
    ]


def test_patches_are_windows_of_the_right_images(data: Path) -> None:
    """Pixels are multiples of 8, so that rounding takes the noise off again."""
    rng = np.random.default_rng(6)
    images = {}
    for part, n in (("train", 12), ("test", 2)):
        for index in range(n):
            pixels = 8 * rng.integers(32, size=(9, 10)).astype(np.uint8)
            images[part, index] = pixels
            write = lambda path, pixels=pixels: Image.fromarray(pixels).save(path, "PNG")  # noqa: E731
            save(data / f"bsds300/{part}/{index:03}.jpg", write)
    held_out = (0, 10)
    wanted = {
        "validation": [images["train", i] for i in held_out],
        "train": [images["train", i] for i in range(12) if i not in held_out],
        "test": [images["test", i] for i in range(2)],
    }
    dataset = load_dataset("bsds300")
    for part, n in zip(("train", "validation", "test"), recipes.PATCHES, strict=True):
        values = 256 * getattr(dataset, part).double().numpy()
        assert values.shape == (n, 63)
        steps = 8 * np.round((values - values[:, :1]) / 8)
        found = {tuple(row) for row in steps.astype(int).tolist()}
        assert found == {window for image in wanted[part] for window in whole_windows(image)}
        noise = (values - values[:, :1] - steps)[:, 1:]
        assert np.abs(noise).max() < 1
        assert noise.std() == pytest.approx(np.sqrt(1 / 6), rel=0.1)  # of a difference of two uniforms
        # with the pixel that was dropped, a patch has mean 0
        last = -values.sum(1)
        assert np.abs(last - values[:, 0]).max() < 256
        gap = (last - values[:, 0]) / 8
        assert np.abs(gap - np.round(gap)).max() < 1 / 8 + 1e-4


def test_patches_of_one_image_are_not_in_a_row(data: Path) -> None:
    """The first rows of a part stand for all of it, as a report takes them to."""
    for index, pixel in enumerate((0, 80, 160, 240)):
        image = np.full((9, 9), pixel, np.uint8)
        image[:, ::2] = 0
        write = lambda path, image=image: Image.fromarray(image).save(path, "PNG")  # noqa: E731
        for part in ("train", "test"):
            save(data / f"bsds300/{part}/{index}.jpg", write)
    heights = 256 * load_dataset("bsds300").test[:40].abs().amax(1)
    assert len((heights / 40).round().unique()) == 4


@pytest.mark.usefixtures("_warn_always")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_split_for_good(form: str, data: Path, tmp_path: Path) -> None:
    name, write = FORMS[form]
    write(data)
    first = load_dataset(name)
    assert first.train.dtype == first.validation.dtype == first.test.dtype == torch.float32
    assert first.train.shape[1] == len(first.columns) == first.features
    shutil.rmtree(tmp_path / "cache")
    again = load_dataset(name)
    assert again.fingerprint == first.fingerprint
    assert not list(tmp_path.rglob("*.tmp"))
    again.train[0] = 7.0
    said: list[str] = []
    assert load_dataset(name, say=said.append).fingerprint == first.fingerprint
    assert not said  # what a reader does to a tensor does not reach the disk


@pytest.mark.parametrize("form", sorted(FORMS.keys() - {"bsds300"}))
def test_a_few_rows_are_enough_and_fewer_are_refused(form: str, data: Path) -> None:
    name, write = FORMS[form]
    few = 1 if form == "bsds300-images" else 10
    write(data, few)
    assert "too few" in refusal(name)
    assert not cached(name)
    write(data, {"hepmass": 48, "bsds300-images": 2}.get(form, 11))
    assert len(load_dataset(name).validation) >= 1


# -- the cache ---------------------------------------------------------------------------------------


def replace_content(path: Path, content: bytes) -> None:
    """Other content of the same size and time."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_sources_are_read_once(data: Path) -> None:
    path = write_power(data)
    said: list[str] = []
    first = load_dataset("power", say=said.append)
    assert len(said) == 1
    assert str(path) in said[0]
    replace_content(path, b"0" * path.stat().st_size)
    assert load_dataset("power", say=said.append).fingerprint == first.fingerprint
    assert len(said) == 1


def test_changed_sources_are_prepared_anew(data: Path) -> None:
    path = write_power(data)
    first = load_dataset("power").fingerprint
    write_power(data, ROWS + 1)
    second = load_dataset("power").fingerprint
    table = np.load(path)
    table[0, 0] += 1
    before = path.stat()
    np.save(path, table)
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))
    assert len({first, second, load_dataset("power").fingerprint}) == 3


def test_another_folder_is_another_source(data: Path, tmp_path: Path) -> None:
    """Even where size and time are the same: some systems set the times of all files to 0."""
    first, second = write_power(data), write_power(tmp_path / "other")
    np.save(second, np.load(first) + 1)
    for path in (first, second):
        os.utime(path, ns=(0, 0))
    assert first.stat().st_size == second.stat().st_size
    load_dataset("power")
    load_dataset("power", tmp_path / "other")
    assert len(cached("power")) == 2


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda folder: os.truncate(folder / "train.npy", 2000),
    "cut to nothing": lambda folder: os.truncate(folder / "test.npy", 0),
    "one bit": lambda folder: flip(folder / "test.npy"),
    "no file": lambda folder: (folder / "validation.npy").unlink(),
    "no JSON": lambda folder: (folder / "about.json").write_text("{"),
    "other JSON": lambda folder: (folder / "about.json").write_text("{}"),
    "other shape": lambda folder: np.save(folder / "test.npy", np.ones((5, 2), np.float32)),
    "pickled": lambda folder: np.save(folder / "test.npy", np.array([{}]), allow_pickle=True),
}


def flip(path: Path, place: int = -3) -> Path:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_cache_is_named_and_made_anew(damage: str, data: Path) -> None:
    write_power(data)
    first = load_dataset("power").fingerprint
    (folder,) = cached("power")
    DAMAGES[damage](folder)
    said: list[str] = []
    dataset = load_dataset("power", say=said.append)
    assert dataset.fingerprint == first
    assert f"{folder} is damaged" in said[0]
    assert "Preparing power" in said[1]
    assert cached("power") == [folder]


def test_damaged_cache_may_be_removed_by_another(data: Path) -> None:
    write_power(data)
    first = load_dataset("power").fingerprint
    (folder,) = cached("power")
    flip(folder / "train.npy")

    def meanwhile(message: str) -> None:
        if "is damaged" in message:
            shutil.rmtree(folder)

    assert load_dataset("power", say=meanwhile).fingerprint == first


def test_damaged_cache_of_a_damaged_source_is_refused(data: Path) -> None:
    path = write_power(data)
    load_dataset("power")
    flip(cached("power")[0] / "train.npy")
    replace_content(path, b"0" * path.stat().st_size)
    assert str(path) in refusal("power")


def test_cache_that_cannot_be_written_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_power(data)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CIFLOWS_CACHE", str(tmp_path / "file"))
    message = refusal("power")
    assert str(tmp_path / "file") in message
    assert "CIFLOWS_CACHE" in message


def test_cache_is_where_the_user_wants_it(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_power(data)
    monkeypatch.delenv("CIFLOWS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    load_dataset("power")
    assert list((tmp_path / "xdg/ciflows/power").iterdir())
    monkeypatch.delenv("XDG_CACHE_HOME")
    load_dataset("power")
    assert list((tmp_path / "home/.cache/ciflows/power").iterdir())


def test_of_two_that_prepare_at_once_the_first_wins(data: Path) -> None:
    source = Source("power", "zenodo", (write_power(data),))
    both = threading.Barrier(2, timeout=30)
    results, asked = [], []

    def work(value: float) -> None:
        def prepare() -> Parts:
            asked.append(value)
            both.wait()
            part = np.full((20, 2), value)
            return Parts(part, part, part, ("a", "b"))

        results.append(load_prepared(source, prepare))

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(asked) == [0.0, 1.0]
    assert len(results) == 2
    assert torch.equal(results[0].train, results[1].train)
    assert results[0].fingerprint == results[1].fingerprint
    assert len(cached("power")) == 1


def test_interrupted_preparation_leaves_nothing(
    data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_power(data)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ciflows.datasets.cache.write_json", interrupt)
        with pytest.raises(KeyboardInterrupt):
            load_dataset("power")
    assert not cached("power")
    assert len(load_dataset("power").train) == 243


def test_complete_file_with_other_content_is_refused(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_power_integers(data)
    power = replace(BENCHMARKS["power"], sizes=(243, 27, 30))
    monkeypatch.setitem(BENCHMARKS, "power", power)
    assert "not the right content" in refusal("power")
    write_power(data)  # nothing is known of the other form's
    assert len(load_dataset("power").train) == 243


# -- bad files ---------------------------------------------------------------------------------------


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def filled(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def array(path: Path, values: Any) -> Path:
    np.save(path, values)
    return path


def edited(path: Path, change: Callable[[list[str]], Sequence[str]]) -> Path:
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    return path


def written(path: Path, frame: pd.DataFrame) -> Path:
    frame.to_csv(path, index=False)
    return path


BAD: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "power cut": ("power", lambda d: cut(write_power(d)), "cut short"),
    "power narrow": ("power", lambda d: array(write_power(d), np.ones((50, 6))), "expected 8 columns"),
    "power flat": ("power", lambda d: array(write_power(d), np.ones(50)), "expected a table"),
    "power infinite": ("power", lambda d: array(write_power(d), np.full((50, 8), np.inf)), "infinite"),
    "power constant": ("power", lambda d: array(write_power(d), np.ones((50, 8))), "constant"),
    "power empty": ("power", lambda d: filled(write_power(d), b""), "empty"),
    "integers cut": ("power", lambda d: cut(write_power_integers(d)), "cut short"),
    "integers flipped": ("power", lambda d: flip(write_power_integers(d), 200), "damaged"),
    "integers narrow": ("power", lambda d: write_power_integers(d, scale=np.ones(6)), "damaged"),
    "integers short": ("power", lambda d: write_power_integers(d, minute_of_day=[1]), "damaged"),
    "integers renamed": ("power", lambda d: write_power_integers(d, columns=["a"]), "columns"),
    "gas garbage": ("gas", lambda d: filled(write_gas(d), b"garbage\n" * 100), "damaged"),
    "gas empty": ("gas", lambda d: filled(write_gas(d), b""), "empty"),
    "gas cut": (
        "gas",
        lambda d: edited(write_gas(d), lambda lines: [*lines[:-1], lines[-1].rpartition(",")[0]]),
        "cut short",
    ),
    "gas pickle": ("gas", lambda d: filled(write_gas(d), pickle.dumps(gas_frame())), "damaged"),
    "gas words": (
        "gas",
        lambda d: written(write_gas(d), gas_frame().assign(R1="high")),
        "not a table of numbers",
    ),
    "gas without Meth": (
        "gas",
        lambda d: written(write_gas(d), gas_frame().drop(columns="Meth")),
        "expected Time, Meth, Eth",
    ),
    "gas missing": (
        "gas",
        lambda d: written(write_gas(d), gas_frame().replace({"R5": gas_frame()["R5"][3]}, np.nan)),
        "missing or infinite",
    ),
    "hepmass narrow": (
        "hepmass",
        lambda d: edited(write_hepmass(d), lambda lines: ["# label,f0,f1", *lines[1:]]).with_name(
            "1000_test.csv"
        ),
        "expected 4 columns",
    ),
    "hepmass test narrow": (
        "hepmass",
        lambda d: edited(
            write_hepmass(d).with_name("1000_test.csv"),
            lambda lines: [line.rpartition(",")[0] for line in lines],
        ),
        "expected 7 columns, one more than 1000_train.csv",
    ),
    "hepmass cut": (
        "hepmass",
        lambda d: filled(write_hepmass(d), write_hepmass(d).read_bytes()[:-60]),
        "cut short",
    ),
    "hepmass short rows": (
        "hepmass",
        lambda d: edited(
            write_hepmass(d), lambda lines: [lines[0], *(line.rpartition(",")[0] for line in lines[1:])]
        ),
        "missing",
    ),
    "hepmass ragged": (
        "hepmass",
        lambda d: edited(write_hepmass(d), lambda lines: [*lines, lines[-1] + ",1"]),
        "damaged",
    ),
    "hepmass words": (
        "hepmass",
        lambda d: edited(write_hepmass(d), lambda lines: [*lines, "1,a,b,c,d,e"]),
        "not a table of numbers",
    ),
    "hepmass empty": ("hepmass", lambda d: filled(write_hepmass(d), ""), "empty"),
    "hepmass header": (
        "hepmass",
        lambda d: edited(write_hepmass(d), lambda lines: lines[:1]),
        "empty",
    ),
    "hepmass background": (
        "hepmass",
        lambda d: edited(write_hepmass(d), lambda lines: [lines[0], *lines[1::3]]),
        "no row has a 1",
    ),
    "miniboone cut": ("miniboone", lambda d: cut(write_miniboone(d)), "cut short"),
    "miniboone wide": (
        "miniboone",
        lambda d: array(write_miniboone(d), np.ones((50, 50))),
        "expected 43 columns",
    ),
    "patches cut": ("bsds300", lambda d: cut(write_patches(d)), "cut short"),
    "patches garbage": ("bsds300", lambda d: filled(write_patches(d), b"garbage"), "damaged"),
    "patches wide": (
        "bsds300",
        lambda d: write_patches(d, test=np.ones((10, 64))),
        "expected parts (rows, 63)",
    ),
    "patches flat": ("bsds300", lambda d: write_patches(d, test=np.ones(63)), "expected parts"),
    "patches none": ("bsds300", lambda d: write_patches(d, test=np.ones((0, 63))), "expected parts"),
    "patches missing": (
        "bsds300",
        lambda d: write_patches(d, validation=np.full((10, 63), np.nan)),
        "missing or infinite",
    ),
    "image cut": ("bsds300", lambda d: cut(write_images(d)), "cut short"),
    "image garbage": ("bsds300", lambda d: filled(write_images(d), b"garbage"), "not an image"),
    "image small": (
        "bsds300",
        lambda d: save(write_images(d), Image.new("RGB", (20, 7)).save),
        "at least 8 pixels",
    ),
}


def test_patches_file_without_a_part_is_refused(data: Path) -> None:
    path = write_patches(data)
    with h5py.File(path, "a") as file:
        del file["validation"]
    assert f"{path}: damaged, cut short or not an HDF5 file with train, validation" in refusal("bsds300")


@pytest.mark.parametrize("mistake", BAD)
def test_bad_files_are_refused_by_name(mistake: str, data: Path) -> None:
    name, write, expected = BAD[mistake]
    path = write(data)
    message = refusal(name)
    assert message.startswith(f"{name}: ")
    assert expected in message
    assert mistake == "power constant" or str(path) in message
    assert not cached(name)


def test_missing_files_are_told_with_where_to_get_them(data: Path) -> None:
    message = refusal("power")
    for words in (str(data), "power/data.npy", "power/power_uint16.npz", "zenodo.org/records/1161203"):
        assert words in message
    assert "CIFLOWS_DATA" in message
    with pytest.raises(UserError) as caught:
        load_dataset("power")
    assert caught.value.command == "--data-dir DIR"
    write_hepmass(data)
    (data / "hepmass/1000_test.csv").unlink()
    message = refusal("hepmass")
    assert "1000_test.csv" in message
    assert "1000_train.csv" not in message


# -- in use ------------------------------------------------------------------------------------------


def test_names_are_built_in() -> None:
    tables = ["power", "gas", "hepmass", "miniboone", "bsds300"]
    assert list(BENCHMARKS) == [*tables, "mnist", "fashion-mnist", "cifar10"]
    assert all(name == benchmark.name for name, benchmark in BENCHMARKS.items())
    assert is_built_in("power")
    assert is_built_in("annulus")
    assert not is_built_in("power.csv")
    with pytest.raises(UserError, match="Did you mean miniboone"):
        load_dataset("minibone")


def test_flow_is_standardised_column_by_column(data: Path) -> None:
    write_patches(data)
    dataset = load_dataset("bsds300")
    flow = build_flow(resolve("bsds300", "maf"), dataset)
    first = flow.layers[0]
    assert isinstance(first, Standardise)
    train = dataset.train.double()
    assert torch.allclose(first.mean.double(), train.mean(0), rtol=1e-6, atol=1e-9)
    assert torch.allclose(first.scale.double(), train.std(0), rtol=1e-6)
    far = dataset.test.clone()
    far[3, 7] = 1e9
    with pytest.raises(UserError, match="x8 cannot be told apart"):
        build_flow(resolve("bsds300", "maf"), dataset._replace(test=far))


def test_list_tells_what_is_there(data: Path) -> None:
    features, rows, where = describe_benchmark("power")
    assert (features, rows) == ("6", "1,659,917 / 184,435 / 204,928")
    assert where.startswith("missing: power/data.npy (in data.tar.gz of https://zenodo.org")
    write_power(data)
    assert describe_benchmark("power") == (features, rows, "power/data.npy, not prepared yet")
    load_dataset("power")
    features, rows, where = describe_benchmark("power")
    assert (features, rows) == ("6", "243 / 27 / 30")
    assert where.startswith("power/data.npy, prepared; published: 6 features, 1,659,917 / 184,435")
    write_images(data)
    assert "(15 files)" in describe_benchmark("bsds300")[2]


def test_command_lists_synthetic_sets_and_tables(command: Callable[..., str], tmp_path: Path) -> None:
    text = command("data")
    assert "-1.3863" in text
    assert all(f"\n{name}: missing" in text for name in BENCHMARKS)
    assert "https://zenodo.org/records/1161203" in text
    write_miniboone(tmp_path / "elsewhere")
    text = command("data", "--data-dir", "elsewhere")
    assert re.search(r"\nminiboone: .*not prepared yet", text)
    assert str(tmp_path / "elsewhere") in text


def test_folder_is_data_here_unless_named(
    command: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CIFLOWS_DATA")
    message = command("fit", "gas", code=1)
    assert f"lacks gas/ethylene_CO.csv ({BENCHMARKS['gas'].forms[0].origin})" in message
    assert "pandas.read_pickle('ethylene_CO.pickle').to_csv(" in message
    write_gas(tmp_path / "data")
    assert "not prepared yet" in command("data")


def test_from_fit_to_scores(command: Callable[..., str], tmp_path: Path) -> None:
    write_miniboone(tmp_path / "elsewhere")
    write_power(tmp_path / "elsewhere")
    (tmp_path / "miniboone").mkdir()  # a built-in name wins over a path
    words = ["--model", "maf", "--set", "layers=1", "--set", "hidden=[8]", "--set", "steps=5"]
    folder = ("--data-dir", "elsewhere")
    text = command("fit", "miniboone", *words, *folder, "--out", "run", "--no-report")
    assert "Preparing miniboone" in text
    run = load_run(tmp_path / "run")
    assert (run.config.data, run.about["split_seed"]) == ("miniboone", 0)
    assert run.dataset().fingerprint == run.about["fingerprint"]
    assert "over 30 rows" in command("score", "run", "miniboone", *folder)
    assert "6 columns; the run was trained on 43" in command(
        "score", "run", "power", *folder, "--out", "other.csv", code=1
    )
    write_miniboone(tmp_path / "elsewhere", ROWS + 1)
    assert "have changed" in command("report", "run", *folder, code=1)


# -- the real files, where they are ------------------------------------------------------------------


@pytest.mark.skipif(not (REAL / "power/power_uint16.npz").exists(), reason=f"no power in {REAL}")
def test_real_power() -> None:
    dataset = load_dataset("power", REAL)
    parts = (dataset.train, dataset.validation, dataset.test)
    assert tuple(len(part) for part in parts) == BENCHMARKS["power"].sizes
    assert dataset.shape == BENCHMARKS["power"].shape
    if not (REAL / "power/data.npy").exists():
        assert dataset.fingerprint.startswith("8353255912405b61")
    known = torch.cat(parts[:2]).double()
    assert known.mean(0).abs().max() < 1e-6
    assert (known.std(0) - 1).abs().max() < 1e-6
    assert dataset.test.mean(0).abs().max() < 0.01
    assert (dataset.test.std(0) - 1).abs().max() < 0.02


@pytest.mark.skipif(not (REAL / "bsds300/train").exists(), reason=f"no images in {REAL}")
def test_real_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recipes, "PATCHES", BENCHMARKS["bsds300"].sizes)
    (tmp_path / "bsds300").symlink_to(REAL / "bsds300")
    dataset = load_dataset("bsds300", tmp_path)
    parts = (dataset.train, dataset.validation, dataset.test)
    assert tuple(len(part) for part in parts) == BENCHMARKS["bsds300"].sizes
    assert dataset.shape == BENCHMARKS["bsds300"].shape
    for part in parts:
        assert part.mean().abs() < 1e-3
        assert part.std(0).sub(0.1).abs().max() < 0.03
        assert part.abs().max() < 1
    shutil.rmtree(tmp_path / "cache")  # a third of a gigabyte
