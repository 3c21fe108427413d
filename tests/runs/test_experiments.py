"""Experiments: every file of the paper's rows is read, its model built, its parameters counted."""

from __future__ import annotations

from pathlib import Path

import pytest

import ciflows
from ciflows import build_model
from ciflows.datasets import BENCHMARKS
from ciflows.errors import UserError
from ciflows.networks import lipschitz, lipschitz_conv
from ciflows.runs.config import read_config, resolve
from ciflows.runs.experiments import read_experiment

FOLDER = Path(ciflows.__file__).parent / "experiments"
FEATURES = {"power": 6, "gas": 8, "hepmass": 21, "miniboone": 43, "bsds300": 63}
SHAPES = {name: (features,) for name, features in FEATURES.items()}
SHAPES |= {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10": (3, 32, 32)}
TABLE_1 = [
    "resflow-10",
    "resflow-100",
    "cif-resflow-10",
    "maf",
    "cif-maf",
    "nsf",
    "cif-nsf-1",
    "cif-nsf-2",
]
TABLE_2 = ["resflow-image-small", "resflow-image-big", "cif-resflow-image"]
TABLE_3 = ["realnvp-image-small", "realnvp-image-big", "cif-realnvp-image"]
ABLATION = [f"cif-id-{k}-{size}" for k in (1, 2, 3) for size in ("small", "large")]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_experiment_builds_a_model_of_the_papers_size(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (lipschitz, lipschitz_conv):  # takes long, and changes no number of parameters
        monkeypatch.setattr(module, "converge_norms", lambda *_: None)
    experiment = read_experiment(path)
    for data in experiment.data:
        config = experiment.config(data)
        flow = build_model(config.model, shape=SHAPES.get(data, (2,)), **config.architecture)
        wanted = experiment.published(data).parameters
        if wanted is not None:
            count = sum(p.numel() for p in flow.parameters())
            assert count == pytest.approx(wanted, rel=0.01)
        for choice in experiment.candidates(data):
            config = experiment.config(data, choice=choice)
            assert choice.items() <= config.architecture.items()


def test_every_row_of_the_papers_tables_is_there() -> None:
    names = {path.stem for path in FOLDER.glob("*.toml")}
    assert names >= {*TABLE_1, *TABLE_2, *TABLE_3, *ABLATION}
    for table, sets in ((TABLE_2, ["mnist", "cifar10"]), (TABLE_3, ["fashion-mnist", "cifar10"])):
        for name in table:
            experiment = read_experiment(FOLDER / f"{name}.toml")
            assert experiment.data == sets
            assert all(experiment.published(data).bits_per_dim for data in sets)
    for name in TABLE_1:
        experiment = read_experiment(FOLDER / f"{name}.toml")
        assert set(experiment.data) == set(FEATURES)
        assert all(experiment.published(data).log_prob for data in experiment.data)
    for name in ABLATION:
        assert set(read_experiment(FOLDER / f"{name}.toml").data) == set(FEATURES) - {"bsds300"}


def test_grids_have_the_papers_candidates() -> None:
    for name, count in (("maf", 9), ("cif-maf", 8)):
        experiment = read_experiment(FOLDER / f"{name}.toml")
        for data in experiment.data:
            candidates = experiment.candidates(data)
            assert len(candidates) == len({str(choice) for choice in candidates}) == count


def test_stopping_rules_are_counted_in_passes_over_the_data() -> None:
    for name in ("maf", "cif-resflow-10", "cif-id-3-small", *TABLE_2, *TABLE_3):
        experiment = read_experiment(FOLDER / f"{name}.toml")
        for data in set(experiment.data) - {"bsds300"}:
            training = experiment.config(data).training
            assert training.validate_every == BENCHMARKS[data].sizes[0] // training.batch_size
            assert training.patience == 50


def test_settings_of_a_data_set_count_there_alone(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text(
        'model = "maf"\n[architecture]\nlayers = 3\n[training]\nsteps = 7\n'
        "[on.annulus]\narchitecture = { layers = 4 }\ntraining = { batch_size = 9 }\n[on.rings]\n"
    )
    values = read_config(str(path))
    there = resolve("annulus", "maf", layers=[values])
    elsewhere = resolve("rings", "maf", layers=[values])
    assert (there.architecture["layers"], there.training.batch_size, there.training.steps) == (4, 9, 7)
    assert (elsewhere.architecture["layers"], elsewhere.training.batch_size) == (3, 1000)
    over = resolve("annulus", "maf", layers=[values, {"architecture": {"layers": 5}}])
    assert over.architecture["layers"] == 5
    assert read_experiment(path).config("annulus", choice={"layers": 6}).architecture["layers"] == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "maf"', "needs a model and a table"),
        ("[on.power]", "needs a model and a table"),
        ('model = "maf"\n[on.power]\nsteps = 3', "takes tables"),
        ('model = "maf"\n[on]\npower = 3', "takes tables"),
        ('model = "maf"\n[on.power]\nother = {}', "takes tables"),
    ],
)
def test_files_that_are_no_experiments_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_experiment(tmp_path / "some.toml")


def test_wrong_grids_and_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text(
        'model = "maf"\n[on.power]\ngrid = { layers = 3 }\n[on.gas]\ngrid = { layer = [3] }\n'
        "paper = { log_probs = 1.0 }\n"
    )
    experiment = read_experiment(tmp_path / "some.toml")
    with pytest.raises(UserError, match="not a list of values"):
        experiment.candidates("power")
    with pytest.raises(UserError, match="Did you mean layers"):
        experiment.config("gas", choice=experiment.candidates("gas")[0])
    with pytest.raises(UserError, match="Did you mean log_prob"):
        experiment.published("gas")
    with pytest.raises(UserError, match="Did you mean power"):
        experiment.config("powr")


def test_tables_are_found_under_the_name_they_are_given_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.csv").write_text("a,b\n1,2\n")
    layer = {"on": {"people.csv": {"architecture": {"layers": 3}}}}
    config = resolve("people.csv", "maf", layers=[layer])
    assert config.architecture["layers"] == 3
    assert config.data == str(tmp_path / "people.csv")


@pytest.mark.parametrize("text", ["model = 3", "data = 1", 'seed = "a"', "training = 2"])
def test_values_of_another_kind_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text(text)
    with pytest.raises(UserError, match="wrong type"):
        read_config(str(tmp_path / "some.toml"))
