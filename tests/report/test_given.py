"""What a report shows of the columns that a conditional density is given."""

from __future__ import annotations

import numpy as np
import pytest

import ciflows
from ciflows.report import Entry
from ciflows.report.columns import compare_columns, pairs_block
from ciflows.report.scores import _cells
from ciflows.tables.values import given_values

pl = pytest.importorskip("polars")
GIVEN = ["x", "kind", "hour", "children"]


@pytest.fixture(scope="module")
def entry() -> Entry:
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    x = 1e4 + rng.normal(size=300)
    columns = {"kind": rng.choice(["a", "b"], 300), "hour": rng.integers(0, 24, 300), "x": x}
    table = pl.DataFrame({**columns, "children": rng.poisson(3, 300), "y": x + rng.normal(size=300)})
    run = ciflows.fit(table, model="nsf", given=GIVEN, circular={"hour": (0, 24)}, steps=2, seed=0)
    return Entry("nsf", run.flow, run.dataset(), run.metrics, run.history, run.config.to_toml())


def test_given_values_come_back_from_what_the_model_sees(entry: Entry) -> None:
    schema = entry.dataset.schema
    assert schema is not None
    table = {"x": [9999.5, 1e4], "kind": ["b", "a"], "hour": [23, 0], "children": [0, 7]}
    context = schema.encode_given(pl.DataFrame(table))
    assert schema.decode_given(context).select(GIVEN[1:]).to_dict(as_series=False) == {
        name: table[name] for name in GIVEN[1:]
    }
    values = given_values(schema, context)  # type: ignore[arg-type]
    names = [column.name for column in schema.given]
    assert values[:, names.index("x")] == pytest.approx([9999.5, 1e4], abs=1e-3)
    assert values[:, names.index("kind")].tolist() == [1, 0]


def test_given_columns_stand_in_pairs_and_beside_odd_rows(entry: Entry) -> None:
    columns = compare_columns([entry], seed=0)
    wide = columns.with_given()
    assert [feature.name for feature in wide.features] == [*GIVEN, "y"]
    assert (wide.drawn[0][: len(wide.shown), :4] == wide.shown[:, :4]).all()
    assert len(pairs_block(columns).pictures) == 4  # each with y, and none of two given columns
    names, cells = _cells(entry, [0, 1])
    assert set(names) == {*GIVEN, "y"}
    assert len(cells) == 2
