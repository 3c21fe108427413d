"""A reader's own table: what its columns are taken for, and densities that are right in its units."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

import ciflows
from ciflows.core.flow import Flow
from ciflows.datasets import load_dataset
from ciflows.errors import UserError
from ciflows.files import read_json
from ciflows.report import columns as report_columns
from ciflows.runs.compare import report_runs
from ciflows.runs.sample_files import _value
from ciflows.tables import PLAIN_TABLE, Schema, TableSettings, as_frame
from ciflows.tables.categorical import Categorical
from ciflows.tables.cells import Cells
from ciflows.tables.column_layer import ColumnLayer
from ciflows.tables.lattice import Lattice
from ciflows.tables.prepare import prepare_table, split_rows
from ciflows.tables.real import Real
from ciflows.tables.start import column_layer
from ciflows.tables.survey import choose_columns, survey_table

ROWS = 2000


def mixed(rows: int = ROWS, seed: int = 0) -> pl.DataFrame:
    """Independent columns of every kind, with a known distribution each (see `true_log_prob`)."""
    rng = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "city": rng.choice(["Bonn", "Oslo", "Rome"], rows, p=[0.5, 0.3, 0.2]),
            "height": 1.7e9 + 20 * rng.standard_normal(rows),
            "kids": rng.binomial(6, 0.3, rows),
            "share": 1 / (1 + np.exp(-rng.standard_normal(rows))),
            "income": np.exp(10 + rng.standard_normal(rows)),
            "member": rng.random(rows) < 0.25,
            "visits": np.floor(300 + 60 * rng.standard_normal(rows)).astype(int),
        }
    )


def true_log_prob(frame: pl.DataFrame) -> np.ndarray:
    """The log of the density of what is real times the probability of what is not."""

    def normal(z: np.ndarray) -> np.ndarray:
        return -0.5 * (z**2 + math.log(2 * math.pi))

    city = frame["city"].replace_strict({"Bonn": 0.5, "Oslo": 0.3, "Rome": 0.2}).log().to_numpy()
    height = normal((frame["height"].to_numpy() - 1.7e9) / 20) - math.log(20)
    kids = frame["kids"].to_numpy()
    choose = np.log([math.comb(6, k) for k in kids])
    p, income = frame["share"].to_numpy(), np.log(frame["income"].to_numpy())
    share = normal(np.log(p / (1 - p))) - np.log(p * (1 - p))
    member = np.where(frame["member"].to_numpy(), math.log(0.25), math.log(0.75))
    visits = normal((frame["visits"].to_numpy() + 0.5 - 300) / 60) - math.log(60)
    binomial = choose + kids * math.log(0.3) + (6 - kids) * math.log(0.7)
    return city + height + binomial + share + normal(income - 10) - income + member + visits


def schema_of(frame: pl.DataFrame, **settings: object) -> Schema:
    chosen = TableSettings.model_validate(settings)
    return survey_table([frame.select(choose_columns(frame, chosen))], chosen)


def independent_flow(frame: pl.DataFrame) -> tuple[Flow, Schema]:
    """A table's own layers over N(0, I): a model of independent columns."""
    schema = schema_of(frame)
    return Flow([column_layer(schema, schema.encode(frame))]).double().eval(), schema


# -- what columns are taken for ----------------------------------------------------------------------


def test_every_kind_of_column_is_found() -> None:
    columns = {column.name: column for column in schema_of(mixed()).columns}
    kinds = {name: type(column) for name, column in columns.items()}
    assert kinds == {
        **{"city": Categorical, "height": Real, "kids": Lattice, "share": Real},
        **{"income": Real, "member": Categorical, "visits": Lattice},
    }
    assert columns["city"].words == ["Bonn", "Oslo", "Rome"]
    assert (columns["share"].low, columns["share"].high) == (0, 1)
    assert (columns["income"].low, columns["income"].high) == (0, None)
    assert (columns["height"].low, columns["height"].high) == (None, None)
    assert columns["kids"].levels is not None
    assert columns["visits"].levels is None


def test_a_bound_is_only_believed_where_the_data_come_near_it() -> None:
    generator = np.random.default_rng(0)
    frame = pl.DataFrame(
        {"pay": generator.exponential(10, 500), "percent": 100 * generator.beta(2, 2, 500)}
    )
    found = {column.name: (column.low, column.high) for column in schema_of(frame).columns}
    assert found == {"pay": (0, None), "percent": (0, 100)}
    switched_off = schema_of(frame, bounds={"pay": ":", "percent": "0:"}).columns
    assert [(column.low, column.high) for column in switched_off] == [(None, None), (0, None)]


@pytest.mark.parametrize("unit", [1e200, 1e-200])
def test_units_whose_squares_are_no_floats_are_refused(unit: float) -> None:
    frame = pl.DataFrame({"x": unit * np.random.default_rng(0).normal(size=50)})
    with pytest.raises(UserError, match=r"x goes from .* another unit"):
        schema_of(frame)


def test_a_schema_survives_json() -> None:
    schema = schema_of(mixed(), bounds={"visits": ":9000"}, given=["city"])
    assert Schema.model_validate_json(schema.model_dump_json()) == schema


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"columns": ["heigth"]}, "no column 'heigth'. Did you mean height"),
        ({"exclude": ["x"]}, "exclude: there is no column 'x'"),
        ({"given": ["town"]}, "given: there is no column 'town'"),
        ({"weights": "mass"}, "there is no column 'mass'"),
        ({"weights": "city"}, "weights have to be numbers"),
        ({"bounds": {"share": "0.5:1"}}, "bounds share=0.5:1: its values go from"),
        ({"bounds": {"share": "0-1"}}, "write them as LOW:HIGH"),
        ({"bounds": {"share": "1:0"}}, "write them as LOW:HIGH"),
        ({"bounds": {"city": "0:1"}}, "the column is categorical"),
        ({"columns": ["share"], "exclude": ["share"]}, "no column is left to model"),
        ({"weights": "income", "given": ["income"]}, "both a weight and given"),
        ({"given": mixed().columns}, "no column is left to model"),
    ],
)
def test_settings_that_make_no_sense_are_told_in_words(settings: dict, words: str) -> None:
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        schema_of(mixed(), **settings)


def test_columns_may_be_chosen_and_excluded_at_once() -> None:
    assert schema_of(mixed(), columns=["height", "kids"], exclude=["kids"]).order == ("height",)


def test_durations_names_and_lists_are_refused_with_a_hint() -> None:
    days = pl.date_range(pl.date(2020, 1, 1), pl.date(2020, 2, 19), eager=True)
    frame = pl.DataFrame({"a": np.arange(50.0) / 7, "age": days - days[0]})
    with pytest.raises(UserError, match=r"durations have no density as they stand: age \(Duration"):
        schema_of(frame)
    assert schema_of(frame, exclude=["age"]).names == ("a",)
    with pytest.raises(UserError, match=r"name has 50 different values in 50 rows.*exclude name"):
        schema_of(pl.DataFrame({"a": np.arange(50.0), "name": [f"n{i}" for i in range(50)]}))
    with pytest.raises(UserError, match="neither numbers nor words: l"):
        schema_of(pl.DataFrame({"l": [[1, 2], [3]]}))


def test_dates_and_gaps_in_a_file_are_found_however_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("born\n" + "2024-01-02\n2023-05-06\n" * 20)
    schema = load_dataset(str(path)).schema
    assert schema is not None
    assert schema.measure == {"born": "probability for each step of 1 day"}
    path.write_text("age\n" + "3\nNA\n5\n" * 20)
    with pytest.raises(UserError, match=r"missing.*age \(20\)"):
        load_dataset(str(path))
    path.write_text("a;b\n" + "3;4\n" * 20)
    with pytest.raises(UserError, match="semicolons"):
        load_dataset(str(path))


def test_options_of_tables_are_refused_for_other_data(tmp_path: Path) -> None:
    for name in ("annulus", str(tmp_path)):
        with pytest.raises(UserError, match="tables in files"):
            load_dataset(name, table=TableSettings.model_validate({"given": ["x1"]}))


def test_missing_values_are_named_and_counted_or_dropped() -> None:
    frame = pl.DataFrame({"a": [1.5, None, math.nan, *range(20)], "b": [None, "u", *("v" * 21)]})
    with pytest.raises(UserError, match=r"missing or infinite values in a \(2\), b \(1\)\. .*drop"):
        prepare_table(lambda: [frame], PLAIN_TABLE)
    said: list[str] = []
    settings = TableSettings.model_validate({"missing": "drop"})
    table = prepare_table(lambda: [frame], settings, said.append)
    assert sum(map(len, table.parts)) == 20
    assert said[0].startswith("Left out 3 of 23 rows")
    assert schema_of(frame.select("b").drop_nulls()).names == ("b",)


@pytest.mark.parametrize(
    ("kind", "text", "value"), [("integer", "2.0", 2), ("real", "2", 2.0), ("integer", "-1", -1)]
)
def test_a_value_that_is_given_has_its_column_s_type(kind: str, text: str, value: float) -> None:
    whole = Lattice(name="kids", dtype="Int64", step=1, origin=0)
    column = whole if kind == "integer" else Real(name="kids", dtype="Float64")
    made = _value(column, text)
    assert (made, type(made)) == (value, type(value))
    for wrong in ("a", "1e999", "2.5") if kind == "integer" else ("a",):
        with pytest.raises(UserError, match=f"kids={wrong}: expected a .*number"):
            _value(column, wrong)


def test_constants_are_set_aside_and_given_back() -> None:
    said: list[str] = []
    frame = mixed(100).select("height", pl.lit(7).alias("unit"), pl.lit("x").alias("mark"))
    schema = survey_table([frame], PLAIN_TABLE, said.append)
    assert said == ["Left out, because constant: unit = 7, mark = x.", "Columns: 1 real (height)."]
    back = schema.decode(schema.encode(frame).x)
    assert back.schema == frame.schema
    assert back.drop("height").equals(frame.drop("height"))


def test_chunks_give_the_same_schema_as_the_whole() -> None:
    frame = mixed()
    assert survey_table(frame.iter_slices(130), PLAIN_TABLE) == survey_table([frame], PLAIN_TABLE)


# -- values and codes --------------------------------------------------------------------------------


def test_values_come_back_from_their_codes() -> None:
    frame = mixed()
    schema = schema_of(frame)
    back = schema.decode(schema.encode(frame).x)
    assert back.schema == frame.schema
    for name in ("city", "kids", "member", "visits"):
        assert back[name].equals(frame[name])
    assert np.allclose(back["share"], frame["share"], atol=1e-6)
    assert back["height"].equals(frame["height"])


def test_another_table_is_checked_against_the_schema() -> None:
    frame = mixed()
    schema = schema_of(frame)
    extra = frame.with_columns(pl.lit(None).alias("gap")).select(reversed([*frame.columns, "gap"]))
    assert torch.equal(schema.encode(extra).x, schema.encode(frame).x)
    for bad, words in (
        (frame.drop("kids", "city"), "lacks the columns city, kids"),
        (frame.with_columns(city=pl.lit("Ulm")), "city has values that were not there in training: Ulm"),
        (
            frame.with_columns(kids=pl.lit("two")),
            r"in training and are not now: kids \(String\)",
        ),
        (frame.with_columns(share=pl.lit(None, pl.Float64)), rf"in share \({ROWS}\)"),
        (frame.with_columns(kids=pl.lit(1.5)), "kids had whole numbers in training, and now has 1.5"),
        (frame.with_columns(visits=pl.lit(0.1)), "visits had whole numbers in training"),
    ):
        with pytest.raises(UserError, match=words):
            schema.encode(bad)


# -- likelihoods -------------------------------------------------------------------------------------


def test_log_density_is_the_truth_in_the_units_of_the_file() -> None:
    """Independent columns are what a table's own layers represent, up to their fitted marginals."""
    flow, schema = independent_flow(mixed(20_000))
    test = mixed(500, seed=1)
    estimate = flow.estimate(schema.encode(test).x, samples=50, seed=0)
    difference = estimate.log_prob.numpy() - true_log_prob(test)
    assert abs(difference.mean()) < 0.01
    assert np.abs(difference).max() < 0.3


@pytest.mark.parametrize("name", ["city", "kids", "member", "visits", "share", "income", "height"])
def test_probability_sums_to_one_over_each_column(name: str) -> None:
    frame = mixed().select(name)
    flow, schema = independent_flow(frame)
    (column,) = schema.columns
    if isinstance(column, Categorical):
        grid, step = pl.DataFrame({name: column.categories}), 1.0
    elif isinstance(column, Lattice):
        low, high = int(frame[name].min()), int(frame[name].max())  # type: ignore[arg-type]
        wide = 200 if column.levels is None else 40
        grid, step = pl.DataFrame({name: np.arange(max(low - wide, 0), high + wide)}), 1.0
    else:
        ends = {"share": (0.0, 1.0), "income": (0.0, 3e6), "height": (1.7e9 - 200, 1.7e9 + 200)}[name]
        edges = np.linspace(*ends, 100_001)
        grid, step = pl.DataFrame({name: (edges[1:] + edges[:-1]) / 2}), edges[1] - edges[0]
    log_prob = flow.estimate(schema.encode(grid).x, samples=20, seed=0).log_prob
    assert float(log_prob.double().exp().sum() * step) == pytest.approx(1, abs=2e-3)


def test_a_value_outside_its_bounds_is_impossible() -> None:
    flow, schema = independent_flow(mixed().select("share", "kids", "income"))
    outside = pl.DataFrame(
        {"share": [0.5, 1.5, 0.5, 0.5], "kids": [1, 1, -1, 1], "income": [1.0, 1.0, 1.0, -1.0]}
    )
    log_prob = flow.estimate(schema.encode(outside).x, samples=3, seed=0).log_prob
    assert log_prob.isfinite().tolist() == [True, False, False, False]
    assert (log_prob[1:] == -math.inf).all()


def test_a_level_beyond_its_own_column_s_last_is_impossible() -> None:
    """Whatever the number of levels that other columns have."""
    flow = Flow([ColumnLayer(2, [([0, 1], Cells(torch.tensor([2, 4])))])])
    log_prob = flow.double().log_prob(torch.tensor([[1.0, 3.0], [2.0, 3.0]]).double(), 3, seed=0)
    assert log_prob.tolist() == [pytest.approx(-math.log(8)), -math.inf]


def test_samples_have_the_types_bounds_and_frequencies_of_the_table() -> None:
    frame = mixed()
    flow, schema = independent_flow(frame)
    drawn = schema.decode(flow.sample(ROWS, seed=0))
    assert drawn.schema == frame.schema
    assert drawn["share"].is_between(0, 1).all()
    assert (drawn["kids"] >= 0).all()
    assert (drawn["city"] == "Bonn").mean() == pytest.approx(0.5, abs=0.05)
    assert drawn["visits"].mean() == pytest.approx(frame["visits"].mean(), abs=6)


# -- fit ---------------------------------------------------------------------------------------------

TINY = {"layers": 1, "hidden": [8], "steps": 30, "validate_every": 30}


@pytest.mark.parametrize("kind", ["polars", "pandas", "numpy", "dict", "file"])
def test_fit_takes_whatever_holds_a_table(kind: str, tmp_path: Path) -> None:
    frame = mixed(200).select("height", "kids", "city")
    frame.write_csv(tmp_path / "people.csv")
    data = {
        "polars": frame,
        "pandas": pd.DataFrame(frame.to_dict(as_series=False)),
        "numpy": frame.drop("city").to_numpy(),
        "dict": frame.to_dict(as_series=False),
        "file": tmp_path / "people.csv",
    }[kind]
    run = ciflows.fit(data, **TINY)
    log_prob = run.log_prob(data, samples=5, seed=0)
    assert log_prob.shape == (200,)
    assert bool(log_prob.isfinite().all())
    assert run.score(data, samples=5, seed=0) == pytest.approx(log_prob.mean().item(), abs=1e-4)
    assert run.sample(7, seed=0).columns == (["x1", "x2"] if kind == "numpy" else frame.columns)


def test_a_run_in_memory_can_be_saved_and_loaded(tmp_path: Path) -> None:
    frame = mixed(200).select("height", "kids", "city")
    run = ciflows.fit(frame, **TINY)
    kept = run.save(tmp_path / "run")
    folder, expected = run.path, run.log_prob(frame, seed=0)
    del run
    assert not folder.exists()
    assert torch.equal(kept.log_prob(frame, seed=0), expected)
    assert kept.estimate(frame[:5], std_error=0.2, seed=0).std_error.max() < 0.4
    assert len(kept.dataset().train) == 160
    with pytest.raises(UserError, match="exists already"):
        kept.save(tmp_path / "run")
    with pytest.raises(UserError, match="no conditional density"):
        kept.sample(3, given={"city": ["Rome"]})


def test_a_table_in_memory_is_not_mistaken_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = mixed(200).select("height", "kids")
    frame.head(3).write_parquet("data.parquet")
    assert len(ciflows.fit(frame, **TINY).dataset().train) == 160


def test_a_table_without_rows_cannot_be_scored(tmp_path: Path, command: Callable[..., str]) -> None:
    ciflows.fit(mixed(200).select("height"), out=tmp_path / "run", **TINY)
    (tmp_path / "none.csv").write_text("height\n")
    words = ("score", tmp_path / "run", tmp_path / "none.csv", "--out", tmp_path / "scores.csv")
    assert "no rows" in command(*map(str, words), code=1)
    assert not (tmp_path / "scores.csv").exists()


def test_one_column_that_is_no_gaussian_is_fitted() -> None:
    """Two peaks far apart, of which a Gaussian would make one."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=1500) + 8 * rng.choice([-1, 1], 1500)
    run = ciflows.fit(x, steps=50, layers=1)
    gaussian = -0.5 * math.log(2 * math.pi * math.e * x.var())
    assert run.metrics["test"]["log_prob"] > gaussian + 0.5


def test_ten_rows_are_enough_and_nine_are_not() -> None:
    assert ciflows.fit(np.arange(10.0) ** 1.5, **TINY).metrics["test"]["points"] == 1
    with pytest.raises(UserError, match="9 rows are too few"):
        ciflows.fit(np.arange(9.0) ** 1.5, **TINY)


def test_weights_count_rows() -> None:
    """Weights of 1 and 3 have the frequencies of rows that are there once and three times."""
    frame = pl.DataFrame({"kind": ["a", "b"] * 500})
    weights = [1.0, 3.0] * 500
    run = ciflows.fit(frame, weights=weights, **TINY)
    p = run.log_prob({"kind": ["a", "b"]}, samples=200, seed=0).exp()
    assert p.tolist() == pytest.approx([0.25, 0.75], abs=0.05)
    with pytest.raises(UserError, match="a weight for each of 1000 rows"):
        ciflows.fit(frame, weights=[1.0], **TINY)
    with pytest.raises(UserError, match="have weight 0"):
        ciflows.fit(frame, weights=[1.0] + [0.0] * 999, **TINY)
    no_validation = (split_rows(1000).part() != 1).astype(float)
    with pytest.raises(UserError, match="all validation rows have weight 0"):
        ciflows.fit(frame, weights=no_validation, **TINY)


def test_conditional_density_is_the_known_one() -> None:
    """y = 3 g + N(0, 1) for given g in {0, 1, 2} and t: a shift of 10 t."""
    rng = np.random.default_rng(0)
    g, t = rng.integers(0, 3, 3000), rng.normal(size=3000)
    y = 3 * g + 10 * t + rng.normal(size=3000)
    frame = pl.DataFrame({"y": y, "g": np.array(["u", "v", "w"])[g], "t": t})
    run = ciflows.fit(frame, given=["g", "t"], steps=400, layers=1, learning_rate=0.005)
    truth = -0.5 * math.log(2 * math.pi * math.e)
    assert run.metrics["test"]["log_prob"] == pytest.approx(truth, abs=0.12)
    given = {"g": ["w"], "t": [0.5]}
    drawn = run.sample(500, given=given, seed=0)
    assert drawn.columns == ["y", "g", "t"]
    assert drawn["y"].mean() == pytest.approx(11, abs=0.4)
    assert drawn["y"].std() == pytest.approx(1, abs=0.3)
    with pytest.raises(UserError, match="conditional density: give g, t"):
        run.sample(3)
    with pytest.raises(UserError, match="lacks the column t"):
        run.log_prob({"y": [1.0], "g": ["u"]})
    with pytest.raises(UserError, match="g has values that were not there in training: z"):
        run.sample(3, given={"g": ["z"], "t": [0.0]})


def test_frames_of_all_kinds_become_the_same() -> None:
    frame = pl.DataFrame({"a": [1.5, None], "b": ["x", None], "c": [True, False], "d": [1, 2]})
    pandas = pd.DataFrame({"a": [1.5, None], "b": ["x", None], "c": [True, False], "d": [1, 2]})
    converted = as_frame(pandas)
    assert converted.schema == frame.schema
    assert converted["b"].to_list() == ["x", None]
    assert as_frame(frame.lazy()).equals(frame)
    assert as_frame(pandas.astype({"b": "category"}))["b"].to_list() == ["x", None]
    assert as_frame(torch.zeros(3)).shape == (3, 1)


def test_columns_of_any_kind_make_a_frame() -> None:
    columns = {
        "mixed": [1, 2.5],
        "objects": np.array([1, None], dtype=object),
        "nullable": pd.Series([1, None], dtype="Int64"),
        "labels": pd.Categorical(["x", None]),
        "seconds": np.array(["2024-06-01", "NaT"], dtype="datetime64[s]"),
        "tensor": torch.ones(2, requires_grad=True),
        "day": np.datetime64("2024-06-01"),
    }
    frame = as_frame(columns)
    first = datetime(2024, 6, 1)
    assert frame.row(0) == (1.0, 1, 1, "x", first, 1.0, first.date())
    assert frame.row(1) == (2.5, None, None, None, None, 1.0, first.date())
    pandas = pd.DataFrame({"t": columns["seconds"], "a": pd.Series([1, 2.5], dtype=object)})
    assert as_frame(pandas).rows() == [(first, 1.0), (None, 2.5)]
    with pytest.raises(UserError, match="more than once: a"):
        as_frame(pd.DataFrame([[1, 2]], columns=["a", "a"]))
    with pytest.raises(UserError, match="do not make a table"):
        as_frame({"a": [1, 2], "b": [1, 2, 3]})


def test_columns_without_a_value_have_gaps_alone() -> None:
    run = ciflows.fit({"a": np.arange(30.0), "b": np.arange(30) ** 0.5}, "nsf", steps=2, layers=1)
    frame = pd.DataFrame({"a": [1.0], "b": pd.Series([None], dtype="Float64")})
    with pytest.raises(UserError, match=r"missing or infinite values in b \(1\)"):
        run.log_prob(frame)
    assert len(run.log_prob(frame[:0])) == 0
    assert run.impute(frame, seed=0).dtypes["b"] == "Float64"


# -- the command line --------------------------------------------------------------------------------


def test_fit_score_and_sample_from_the_command_line(tmp_path: Path, command: Callable[..., str]) -> None:
    mixed(300).with_columns(w=pl.lit(1.5), unit=pl.lit(7)).write_parquet(tmp_path / "people.parquet")
    words = ["--set", "layers=1", "--set", "hidden=[8]", "--set", "steps=30", "--no-report"]
    options = ["--given", "city", "--bounds", "visits=0:", "--exclude", "member", "--weights", "w"]
    text = command("fit", "people.parquet", "--out", "run", *words, *options)
    assert "Left out, because constant: unit = 7." in text
    command("score", "run", "people.parquet", "--out", "scores.csv", "-m", "5")
    scores = pl.read_csv(tmp_path / "scores.csv")
    assert scores.columns == ["row", "log_prob", "std_error", "effective_samples"]
    assert len(scores) == 300
    command("sample", "run", "-n", "4", "--given", "city=Rome", "--out", "new.csv")
    assert "no column 'town'" in command(
        "sample", "run", "--given", "town=Rome", "--out", "z.csv", code=1
    )
    new = pl.read_csv(tmp_path / "new.csv")
    assert new.columns == ["city", "height", "kids", "share", "income", "visits", "unit"]
    assert new["city"].to_list() == ["Rome"] * 4
    assert "give city" in command("sample", "run", "--out", "x.csv", code=1)
    assert "was not there" not in command("sample", "run", "--given", "people.parquet", "--out", "y.csv")
    assert len(pl.read_csv(tmp_path / "y.csv")) == 300
    mixed(20).with_columns(unit=pl.lit(8)).write_parquet(tmp_path / "other.parquet")
    refused = command("score", "run", "other.parquet", "--out", "none.csv", code=1)
    assert "no row can be scored. unit: gaps, or" in " ".join(refused.split())
    assert not (tmp_path / "none.csv").exists()


# -- the report --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [[], ["city"]])
def test_the_report_shows_columns_pairs_scores_and_extreme_rows(
    given: list[str], tmp_path: Path
) -> None:
    frame = mixed(300).select("city", "visits", "share").with_columns(unit=pl.lit("km"))
    run = ciflows.fit(frame, out=tmp_path / "run", given=given, **TINY)
    report_runs([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for heading in ("Calibration", "Columns", "Pairs of columns", "Suspicious rows", "What to try next"):
        assert f"<h2>{heading}</h2>" in page
    measured = run.metrics.get("index_worth") is not None
    assert ("data.parquet nsf cif-nsf" in page) is not measured
    rows = frame.with_columns(pl.col("visits").cast(pl.String))["visits"]
    extreme = re.findall(r'<th scope="row">(suspicious|lowest|highest)</th>(.*?)</tr>', page)
    assert [kind == "highest" for kind, _ in extreme] == [False] * 5 + [True] * 5
    assert all(any(f'"visits">{value}</td>' in cells for value in rows) for _, cells in extreme)
    assert all('"unit">km</td>' in cells for _, cells in extreme)


def test_the_worst_fitting_column_comes_first() -> None:
    rng = np.random.default_rng(0)
    data, model = rng.normal(size=(2, 2000, 2))
    model[:, 1] += 1
    gaps = np.array([[report_columns.kolmogorov(*pair)] for pair in zip(data.T, model.T, strict=True)])
    assert gaps[1, 0] == pytest.approx(math.erf(0.5 / math.sqrt(2)), abs=0.03)
    limit = report_columns.chance(2000, 2000, tests=2)
    assert gaps[0, 0] < limit < gaps[1, 0]
    features = [report_columns.Feature("good"), report_columns.Feature("bad")]
    found = report_columns.Columns(
        features, data, ["m"], [model], gaps, limit, conditions=[], given=np.empty((2000, 0))
    )
    assert found.worst_first() == [1, 0]
    assert found.misfits(0) == ["bad"]


@pytest.mark.parametrize("staged", [True, False])
def test_compare_tells_what_the_index_is_worth(
    tmp_path: Path, command: Callable[..., str], staged: bool
) -> None:
    """Where training in stages chose other starts too, the difference of two runs is not the index's."""
    mixed(200).select("height", "kids").write_csv(tmp_path / "people.csv")
    settings = TINY | {"staged": str(staged).lower()}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command("compare", "people.csv", "nsf", "cif-nsf", "--out", "both", *words)
    page = (tmp_path / "both" / "report.html").read_text()
    assert ("The index changes the test log-likelihood by" in page) is not staged
    metrics = read_json(tmp_path / "both" / "cif-nsf" / "metrics.json")
    assert ("story" in metrics) is staged
    assert not staged or html.escape(metrics["story"]) in page
