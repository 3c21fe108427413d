"""Columns that others determine, in all rows or in some: named, and not given a density."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
import pytest

from ciflows.errors import UserError
from ciflows.tables import Schema, TableSettings
from ciflows.tables.survey import survey_table

ROWS = 1500
Array = np.ndarray


def survey(frame: dict[str, Array], **settings: object) -> tuple[Schema, list[str]]:
    said: list[str] = []
    schema = survey_table([pl.DataFrame(frame)], TableSettings.model_validate(settings), said.append)
    return schema, said


def normals(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=(count, ROWS))


def unit(points: Array) -> Array:
    return points / np.linalg.norm(points, axis=0)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda a, b: 2 * a, r"c is determined by a \(c = 2·a\)"),
        (lambda a, b: a + b, r"c is determined by a, b"),
        (lambda a, b: np.exp(a) / np.exp(b), r"determined by"),
        (lambda a, b: a**2, r"c is determined by a"),
        (lambda a, b: np.sin(a), r"determined by"),
        (lambda a, b: a * b, r"c is determined by a, b \(c is a quadratic function"),
        (lambda a, b: np.hypot(a, b), r"c is determined by a, b \(c² is a quadratic function"),
        (lambda a, b: np.maximum(a, b), r"c is determined by a, b"),
        (lambda a, b: np.maximum(a, 0), r"c is determined by a"),
    ],
)
def test_a_column_that_others_determine_is_named(function: Callable, words: str) -> None:
    a, b = normals(2)
    frame = {"a": a, "b": b, "c": function(a, b)}
    with pytest.raises(UserError, match=words):
        survey(frame)
    noisy = frame["c"] + 0.05 * normals(1, seed=1)[0]
    assert survey(frame | {"c": noisy})[0].names == ("a", "b", "c")


def test_a_constraint_on_several_columns_is_named() -> None:
    x, y, z = unit(normals(3))
    with pytest.raises(UserError, match=r"z is determined by x, y \(z² is a quadratic"):
        survey({"x": x, "y": y, "z": z})
    with pytest.raises(UserError, match=r"y is determined by x"):
        survey(dict(zip("xy", 5 + 2 * unit(normals(2)), strict=True)))
    parts = np.random.default_rng(0).dirichlet([0.3, 0.3, 1.0], ROWS)
    parts = np.where(parts < 0.01, 0.0, parts)
    parts /= parts.sum(1, keepdims=True)
    with pytest.raises(UserError, match=r"c is determined by a, b \(c = - 1·a - 1·b \+ 1\)"):
        survey(dict(zip("abc", parts.T, strict=True)))


@pytest.mark.parametrize(
    ("tie", "share", "words"),
    [
        (lambda x: x, 0.3, r"y - x = 0 in (29|30|31)\.\d% of the rows.* put y - x in its place"),
        (lambda x: x, 0.02, r"y - x = 0 in"),
        (lambda x: x + 2.5, 0.2, r"y - x = 2\.5 in"),
        (lambda x: 1 - x, 0.2, r"y \+ x = 1 in"),
        (lambda x: 1.19 * x, 0.2, r"y / x = 1\.19 in"),
        (lambda x: 1.8 * x + 32, 0.2, r"y - 1\.8·x = 32 in"),
    ],
)
def test_a_column_tied_to_another_in_some_rows_is_named(tie: Callable, share: float, words: str) -> None:
    x, y = normals(2)
    tied = np.random.default_rng(1).random(ROWS) < share
    with pytest.raises(UserError, match=words):
        survey({"x": x, "y": np.where(tied, tie(x), 3 * y)})


def test_what_may_be_put_in_its_place_has_an_atom() -> None:
    x, y = normals(2)
    tied = np.random.default_rng(1).random(ROWS) < 0.3
    schema, _ = survey({"x": x, "difference": np.where(tied, x, y) - x})
    assert schema.columns[1].atoms == (0.0,)


def test_a_smooth_function_of_two_columns_is_said_and_noise_is_not() -> None:
    a, b = normals(2)
    _, said = survey({"a": a, "b": b, "c": np.exp(a) + b**3})
    assert any("c looks determined by a and b" in sentence for sentence in said)
    _, said = survey({"a": a, "b": b, "c": np.exp(a) + b**3 + 0.2 * normals(1, seed=1)[0]})
    assert not said or "looks determined" not in " ".join(said)


@pytest.mark.parametrize("size", [1.0, 1e7, 1e12])
def test_columns_that_only_depend_on_each_other_are_no_functions(size: float) -> None:
    a, b, c = normals(3)
    frame = {"a": size + a, "b": size + 0.99 * a + 0.14 * b, "c": size + a + b + 1e-3 * c}
    if size == 1:
        frame["d"] = a + b + 1e-6 * c
        frame.pop("c")
    assert len(survey(frame)[0].names) == 3


def test_columns_in_steps_that_agree_in_some_rows_become_lattices() -> None:
    """Bills that are rounded up to whole sums by the tip: probabilities exist where densities do not."""
    random = np.random.default_rng(0)
    bill, tip = np.round(100 * random.random((2, 300)), 2)
    tip[::10] = np.round(200 - bill[::10], 2)
    schema, _ = survey({"bill": bill, "tip": tip})
    assert [column.measure for column in schema.columns] == ["probability for each step of 0.01"] * 2


def test_points_of_two_lattices_lie_on_no_line() -> None:
    random = np.random.default_rng(0)
    year = random.integers(1982, 1989, 300).astype(float)
    rate = np.round(random.normal(7, 2, 300), 1) + 1e-13 * random.random(300)
    schema, _ = survey({"year": year, "rate": rate})
    assert len(schema.columns) == 2


def test_a_step_is_not_read_off_a_few_values() -> None:
    """Three values with three decimals, all even, among many with two."""
    x = np.round(np.random.default_rng(0).normal(size=500), 2)
    x[:3] += [0.002, 0.004, 0.006]
    schema, _ = survey({"x": np.round(x, 3)})
    assert schema.columns[0].measure.startswith("probability for each step of 0.001")


def test_columns_that_crowd_at_zero_lie_on_no_line() -> None:
    crowded = np.random.default_rng(5).beta(0.05, 0.7, size=(2, ROWS))
    survey({"a": crowded[0], "b": normals(1)[0]})
    survey({"a": crowded[0], "b": crowded[1]})
    with pytest.raises(UserError, match=r"b - a = 0"):
        survey({"a": crowded[0], "b": np.where(normals(1)[0] > 0, crowded[0], crowded[1])})
