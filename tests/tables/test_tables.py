"""Tables: what is read, what is refused and in which words, and how data are split and scored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from rich.console import Console

from ciflows.datasets import load_dataset
from ciflows.errors import UserError
from ciflows.models import build_model
from ciflows.runs import score as scoring
from ciflows.runs.config import resolve
from ciflows.runs.run import Run
from ciflows.tables import read_table, write_table
from ciflows.tables.read import GrowingTable, check_output


def _save_npz(path: Path, frame: pl.DataFrame) -> None:
    with path.open("wb") as file:  # numpy would add a suffix to a name it does not know
        np.savez(file, **{name: frame[name].to_numpy() for name in frame.columns})


WRITERS: dict[str, Callable[[pl.DataFrame, Path], object]] = {
    ".csv": pl.DataFrame.write_csv,
    ".tsv": lambda frame, path: frame.write_csv(path, separator="\t"),
    ".parquet": pl.DataFrame.write_parquet,
    ".arrow": pl.DataFrame.write_ipc,
    ".feather": lambda frame, path: frame.write_ipc(path, compression="zstd"),
    ".npy": lambda frame, path: np.save(path, frame.to_numpy()),
    ".npz": lambda frame, path: _save_npz(path, frame),
}
SUFFIXES = sorted(WRITERS)


def text_file(folder: Path, content: str, name: str = "data.csv") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def array_file(folder: Path, array: np.ndarray) -> Path:
    path = folder / "data.npy"
    np.save(path, array)
    return path


def refusal(path: Path, columns: list[str] | None = None) -> str:
    """The one sentence that a bad table gets: it opens with the file's path."""
    with pytest.raises(UserError) as caught:
        read_table(path, columns)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.endswith(".")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


# -- reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", ["data", "data[1]*?"])
def test_every_format_keeps_every_bit(suffix: str, name: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame({"x1": 1.7e9 + rng.uniform(-20, 20, 50), "x2": rng.normal(size=50) / 3})
    path = tmp_path / (name + suffix)
    WRITERS[suffix](frame, path)
    table = read_table(path)
    assert table.columns == ("x1", "x2")
    assert table.values.dtype == torch.float64
    assert table.values.is_contiguous()
    assert np.array_equal(table.values.numpy(), frame.to_numpy())
    assert len(table.values[:, 0].unique()) == 50  # in float32 all of these times are one


@pytest.mark.usefixtures("_warn_always")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_one_column_and_loud_suffix(suffix: str, tmp_path: Path) -> None:
    quiet, loud = tmp_path / f"quiet{suffix}", tmp_path / f"loud{suffix.upper()}"
    WRITERS[suffix](pl.DataFrame({"x1": [1.0, 2.0, 3.0]}), quiet)
    table = read_table(quiet.rename(loud))
    assert table.columns == ("x1",)
    assert table.values.tolist() == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    "content", ["1,1,-2e3\n4,5,.5\n", "\ufeff1,1,-2e3\n4,5,.5\n", "1,1,-2e3\r\n4,5,.5\r\n"]
)
def test_csv_without_names_keeps_its_first_row(content: str, tmp_path: Path) -> None:
    table = read_table(text_file(tmp_path, content))
    assert table.columns == ("x1", "x2", "x3")
    assert table.values.tolist() == [[1, 1, -2000], [4, 5, 0.5]]


def test_one_name_among_numbers_is_a_header(tmp_path: Path) -> None:
    table = read_table(text_file(tmp_path, "2019,other\n1,2\n"))
    assert table.columns == ("2019", "other")
    assert table.values.tolist() == [[1, 2]]


def test_decimals_may_come_late(tmp_path: Path) -> None:
    table = read_table(text_file(tmp_path, "a\n" + "1\n" * 500 + "2.5\n"))
    assert table.values[-1].item() == 2.5


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float32", ">f8"])
def test_real_dtypes_of_npy(dtype: str, tmp_path: Path) -> None:
    table = read_table(array_file(tmp_path, np.array([[0, 1, 1]], dtype=dtype).T))
    assert table.values.dtype == torch.float64
    assert table.values.tolist() == [[0], [1], [1]]


def test_booleans_are_0_and_1(tmp_path: Path) -> None:
    table = read_table(text_file(tmp_path, "a,b\n2,true\n3,false\n"))
    assert table.values.tolist() == [[2, 1], [3, 0]]


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a,b\n1,NaN\ninf,\n-inf,3\n", "missing or infinite values in a (2), b (2)."),
        ("a,b,c\n1,2,3\n,2,3\n", "missing or infinite values in a (1)."),
        ("1,,3\n4,5,6\n", "missing or infinite values in x2 (1)."),
        ("a,b\n1,x\n2,3\n", "columns that are not numbers: b (String)."),
        ("a,b,a,b,c\n1,2,3,4,5\n", "column names that occur more than once: a, b."),
        ("a,b\n1,2\n3,4,5\n", "a row has more fields than the first one."),
        ("a,b\n", "the table is empty."),
        ("", "the file is empty."),
        ("\n \n", "the file is empty."),
    ],
)
def test_bad_csv_is_told_in_words(content: str, expected: str, tmp_path: Path) -> None:
    assert refusal(text_file(tmp_path, content)) == expected


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.ones((3, 2), complex), "expected real numbers; got complex128."),
        (np.array([["a", "b"]]), "expected real numbers; got <U1."),
        (np.zeros((2, 2), "datetime64[s]"), "expected real numbers; got datetime64[s]."),
        (np.zeros(3, [("a", float)]), "expected real numbers; got [('a', '<f8')]."),
        (np.array([[1, None]]), "it holds Python objects, not numbers."),
        (np.ones(3), "expected a table (rows, columns); got shape (3,)."),
        (np.ones((3, 2, 1)), "expected a table (rows, columns); got shape (3, 2, 1)."),
        (np.ones((0, 2)), "the table is empty."),
        (np.ones((2, 0)), "the table is empty."),
        (np.array([[1, np.nan], [np.inf, np.nan]]), "missing or infinite values in x1 (1), x2 (2)."),
    ],
)
def test_bad_npy_is_told_in_words(array: np.ndarray, expected: str, tmp_path: Path) -> None:
    assert refusal(array_file(tmp_path, array)) == expected


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather", ".npy"])
def test_cut_foreign_and_empty_files_are_named(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    WRITERS[suffix](pl.DataFrame({"x1": np.arange(100.0)}), path)
    content = path.read_bytes()
    for bad in (content[: len(content) // 2], b"a,b\n1,2\n"):
        path.write_bytes(bad)
        assert refusal(path) == f"damaged, cut short or not a {suffix} file."
    path.write_bytes(b"")
    assert refusal(path) == "the file is empty."


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    for content in (b"caf\xe9,b\n1,2\n", b"a,b\n" + b"1,2\n" * 10_000 + b"\xe9,2\n"):
        (tmp_path / "data.csv").write_bytes(content)
        assert refusal(tmp_path / "data.csv") == "the text is not UTF-8."


def test_paths_that_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    assert refusal(tmp_path / "folder.csv").startswith("this is a folder; give a file that ends in .csv")
    assert refusal(text_file(tmp_path, "a\n1\n", "bare")).startswith("its name has no suffix")
    assert refusal(text_file(tmp_path, "a\n1\n", "book.xlsx")).startswith(".xlsx files cannot be read")
    assert refusal(tmp_path / "none.csv") == "there is no such file."


# -- chosen columns ----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".arrow"])
def test_only_the_chosen_columns_matter(suffix: str, tmp_path: Path) -> None:
    frame = pl.DataFrame({"name": ["u", "v"], "a": [1, 2], "gap": [None, 0.5], "b": [3, 4]})
    path = tmp_path / f"data{suffix}"
    WRITERS[suffix](frame, path)
    table = read_table(path, ["b", "a"])
    assert table.columns == ("b", "a")
    assert table.values.tolist() == [[3, 1], [4, 2]]
    assert refusal(path, ["a", "gap"]) == "missing or infinite values in gap (1)."
    assert refusal(path, ["c", "a", "d"]) == "lacks the columns c, d; it has name, a, gap, b."


def test_only_a_chosen_column_must_be_named_once(tmp_path: Path) -> None:
    path = text_file(tmp_path, "a,a,b\n1,2,3\n")
    assert read_table(path, ["b"]).values.tolist() == [[3]]
    assert refusal(path, ["a", "b"]) == "column names that occur more than once: a."


def test_nameless_columns_are_taken_all_or_not_at_all(tmp_path: Path) -> None:
    for path in (array_file(tmp_path, np.ones((2, 3))), text_file(tmp_path, "1,1,1\n1,1,1\n")):
        assert read_table(path, ["x3", "x1", "x2"]).columns == ("x3", "x1", "x2")
        expected = "has 3 columns without names; expected 2 columns: x1, x2."
        assert refusal(path, ["x1", "x2"]) == expected
        assert refusal(path, ["a", "x1", "x2"]) == "lacks the column a; it has x1, x2, x3."


# -- writing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "OUT.CSV", "new/folder/out.Parquet"])
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    columns = {"a": torch.rand(5, dtype=torch.float64), "b": torch.arange(5.0) / 3}
    write_table(tmp_path / name, columns)
    table = read_table(tmp_path / name, ["a", "b"])
    assert torch.equal(table.values[:, 0], columns["a"])
    assert torch.equal(table.values[:, 1].float(), columns["b"])
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == [Path(name).name]


def test_bad_output_is_refused_and_nothing_overwritten(tmp_path: Path) -> None:
    mine = text_file(tmp_path, "mine")
    for path, words in (
        (mine, "exists already"),
        (tmp_path, "exists already"),
        (tmp_path / "out.npy", "ends in .csv or .parquet"),
        (tmp_path / "out", "ends in .csv or .parquet"),
        (mine / "out.csv", "is a file, not a folder"),
    ):
        for refuse in (check_output, lambda path: write_table(path, {"a": torch.ones(2)})):
            with pytest.raises(UserError, match=words):
                refuse(path)
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]
    assert mine.read_text() == "mine"


# -- splits ------------------------------------------------------------------------------------------


def numbered(folder: Path, rows: int, name: str = "data.csv", change: float = 0.0) -> str:
    values = np.arange(2.0 * rows).reshape(rows, 2)
    values[rows // 2, 1] += change
    path = folder / name
    pl.DataFrame(values, schema=["a", "b"], orient="row").write_csv(path)
    return str(path)


@pytest.mark.parametrize("rows", [10, 29, 1000])
def test_split_is_fixed_disjoint_and_complete(rows: int, tmp_path: Path) -> None:
    name = numbered(tmp_path, rows)
    first, again = load_dataset(name), load_dataset(name)
    parts = (first.train, first.validation, first.test)
    held_out = rows // 10
    assert [len(part) for part in parts] == [rows - 2 * held_out, held_out, held_out]
    assert first.schema is not None
    ids = (first.schema.decode(torch.cat(parts))["a"] / 2).to_numpy()
    assert ids.tolist() != sorted(ids.tolist())
    assert sorted(ids.tolist()) == list(range(rows))
    for part, same in zip(parts, (again.train, again.validation, again.test), strict=True):
        assert torch.equal(part, same)
    assert (first.features, first.columns, first.truth) == (2, ("a", "b"), None)


def test_fingerprint_follows_the_values(tmp_path: Path) -> None:
    prints = {
        key: load_dataset(numbered(tmp_path, 30, f"{key}.csv", change)).fingerprint
        for key, change in (("same", 0.0), ("copy", 0.0), ("other", 2.0))
    }
    assert prints["same"] == prints["copy"]
    assert prints["same"] != prints["other"]


def test_drawn_sets_stay_float32() -> None:
    assert load_dataset("annulus").train.dtype == torch.float32


def test_nine_rows_are_too_few(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="9 rows are too few"):
        load_dataset(numbered(tmp_path, 9))


# -- scoring -----------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """What every folder loads to: an untrained model of the columns b and a."""
    flow = build_model("cif-resflow", features=2, layers=1, hidden=[8]).eval()
    run = Run(Path("run"), resolve("annulus", "cif-resflow"), flow, {"columns": ["b", "a"]}, {}, [])
    monkeypatch.setattr(scoring, "load_run", lambda folder, device: run)
    return run


def score(
    folder: Path, data: Path | str, samples: int = 3, std_error: float | None = None, **more: int
) -> np.ndarray:
    out = folder / "scores.parquet"
    out.unlink(missing_ok=True)
    settings = scoring.ScoreSettings(samples, std_error, **more)
    scoring.score_data(folder, str(data), out, settings, "cpu", Console(quiet=True))
    return pl.read_parquet(out)["log_prob"].to_numpy()


@pytest.mark.usefixtures("run")
def test_scores_depend_on_the_runs_columns_alone(tmp_path: Path) -> None:
    plain = text_file(tmp_path, "b,a\n0.1,0.2\n-1,1\n")
    mixed = text_file(tmp_path, "id,a,b,gap\nu,0.2,0.1,\nv,1,-1,3\n", "mixed.csv")
    swapped = text_file(tmp_path, "a,b\n0.1,0.2\n-1,1\n", "swapped.csv")
    assert np.array_equal(score(tmp_path, plain), score(tmp_path, mixed))
    assert not np.allclose(score(tmp_path, plain), score(tmp_path, swapped))


def test_a_built_in_set_must_have_as_many_columns(run: Run, tmp_path: Path) -> None:
    assert len(score(tmp_path, "annulus", samples=1)) == 5000
    run.about["columns"].append("c")
    with pytest.raises(UserError, match=r"annulus has 2 columns; .* trained on 3: b, a, c\."):
        score(tmp_path, "annulus")


@pytest.mark.usefixtures("run")
def test_values_beyond_the_runs_precision_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"too large for the run's torch\.float32"):
        score(tmp_path, text_file(tmp_path, "b,a\n1,1e39\n"))


@pytest.mark.usefixtures("run")
def test_draws_end_at_max_samples(tmp_path: Path) -> None:
    data = text_file(tmp_path, "b,a\n0.1,0.2\n-1,1\n")
    with pytest.warns(UserWarning, match="took all of 4 draws"):
        score(tmp_path, data, std_error=1e-9, max_samples=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 0}, "At least one draw"),
        ({"max_samples": 0}, "At least one draw"),
        ({"std_error": 0.0}, "above 0; got 0.0"),
        ({"std_error": -1.0}, "above 0; got -1.0"),
        ({"std_error": float("nan")}, "above 0; got nan"),
    ],
)
def test_draws_that_make_no_sense_are_refused_at_once(
    options: dict, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "load_run", lambda *_: pytest.fail("it began to work"))
    with pytest.raises(UserError, match=words):
        score(tmp_path, "annulus", **options)


def test_a_full_disk_is_told_in_the_system_s_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(frame: pl.DataFrame, path: Path) -> None:
        path.write_bytes(b"half")
        raise pl.exceptions.ComputeError("parquet: No space left on device (os error 28)")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    with pytest.raises(OSError, match="No space left"), GrowingTable(tmp_path / "new.csv") as table:
        table.add(pl.DataFrame({"a": [1.0]}))
    assert not list(tmp_path.iterdir())
