"""From a configuration to a flow: the model, preceded by the layers that its data need."""

from __future__ import annotations

__all__ = [
    "Variant",
    "about_flow",
    "build_flow",
    "build_together",
    "index_settings",
    "is_staged",
    "other_starts",
    "rebuild_flow",
    "starts_together",
    "variant_of",
]

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ciflows.core.density import StandardNormal
from ciflows.core.flow import Flow
from ciflows.core.layer import Layer, Shape
from ciflows.datasets import Dataset
from ciflows.errors import UserError
from ciflows.layers import Standardise
from ciflows.layers.blend import blend_flows
from ciflows.layers.gaussian_mixture import GaussianMixture
from ciflows.models import build_model, get_model
from ciflows.models.index import IndexSettings, add_index
from ciflows.runs.config import RunConfig
from ciflows.runs.folder import about_run, read_schema
from ciflows.tables import Schema
from ciflows.tables.column_layer import ColumnLayer
from ciflows.tables.start import (
    column_layer,
    few_rows,
    fit_base,
    fit_without_tails,
    start_as_identity,
)
from ciflows.tables.without_tails import WithoutTails
from ciflows.training.processes import Processes

COARSEST = 1e-3  # rounding of the largest value, relative to a column's standard deviation


def build_flow(config: RunConfig, dataset: Dataset) -> Flow:
    """Build the flow that a configuration describes, as a density in the units of the data.

    A table's flow begins with the layers of its columns, other vectors are standardised, and images
    are taken as they are.

    Arguments:
        dataset: The data; statistics for the first layers come from the training part.
    """
    flow = _build_model(config, dataset.shape, dataset.context_features, indexed=not is_staged(config))
    if dataset.schema is not None:
        return _to_precision(_start_table_flow(flow, dataset.schema, dataset), flow.dtype)
    if dataset.images:
        _check_levels(dataset, config.architecture["levels"])
    return _standardise(flow, dataset) if _is_standardised(dataset) else flow


def build_together(
    config: RunConfig, dataset: Dataset, device: torch.device, processes: Processes
) -> tuple[Flow, dict[str, Any]]:
    """Build the same flow in all processes, on their devices; and the content of about.json.

    The first one builds it: what is fitted to the data on the way may round differently elsewhere.
    """
    processes.check_same(
        dataset.fingerprint, f"{dataset.name} is not the same on all machines: give each the same files."
    )
    flow = build_flow(config, dataset) if processes.main else None
    about = processes.from_main(lambda: about_flow(dataset, cast(Flow, flow)))
    flow = (flow or rebuild_flow(config, about, indexed=False)).to(device)
    processes.copy_from_main(flow.state_dict().values())
    return flow, about


class Variant(NamedTuple):
    """In what flows for the same table differ, beside their weights.

    Attributes:
        residual: Whether the networks are residual.
        components: Number of Gaussians in the base; 0 for the model's own base.
        trained: Whether there are layers to train between the columns and the base.
        tails: Whether the base is over the columns' scores; otherwise what they do to tails is undone.
    """

    residual: bool
    components: int
    trained: bool = True
    tails: bool = True


def variant_of(config: RunConfig, flow: Flow) -> Variant:
    """The variant of what `build_flow` made."""
    return Variant(config.architecture.get("residual", False), _components(flow))


def _components(flow: Flow) -> int:
    """Number of Gaussians in a flow's base; 0 for another base."""
    return len(flow.base.means) if isinstance(flow.base, GaussianMixture) else 0


def other_starts(config: RunConfig, dataset: Dataset, flow: Flow) -> dict[Variant, Flow]:
    """Other flows that may suit a table better than what `build_flow` made, before training.

    They are for small tables: on a larger one the time to try them is better spent on training. One has
    random first weights over the model's own base, one residual networks. Not to be trained: the mixture
    of Gaussians that the flow starts from, or a better one of columns with their own tails. All have the
    same layer of columns.
    """
    own, columns = variant_of(config, flow), flow.layers[0] if len(flow.layers) else None
    restarts = any(layer.starts_from_data for layer in flow.layers)
    few = few_rows(dataset.independent_rows)
    if not own.components or not isinstance(columns, ColumnLayer) or restarts or not few:
        return {}
    mixture = cast(GaussianMixture, flow.base)
    variants = [own._replace(components=0)]
    if _may_be_residual(config):
        variants.append(own._replace(residual=True))
    found = {variant: _variant_flow(config, flow, variant) for variant in variants}
    for variant, other in found.items():
        if variant.components:
            other.base.load_state_dict(mixture.state_dict())
    straight = fit_without_tails(columns, mixture, dataset.rows("train"), dataset.rows("validation"))
    layers, base = ([], copy.deepcopy(mixture)) if straight is None else ([straight[0]], straight[1])
    fixed = Variant(False, len(base.means), trained=False, tails=straight is None)
    found[fixed] = _to_precision(Flow([columns, *layers], base), flow.dtype)
    return found


def starts_together(
    config: RunConfig, dataset: Dataset, flow: Flow, processes: Processes
) -> dict[Variant, Flow]:
    """The same `other_starts` in all processes, on their devices: the first one makes them."""
    made = other_starts(config, dataset, flow) if processes.main else {}
    variants = processes.from_main(lambda: list(made))
    found = made or {variant: _variant_flow(config, flow, variant) for variant in variants}
    for other in found.values():
        processes.copy_from_main(other.to(flow.device).state_dict().values())
    return found


def _variant_flow(config: RunConfig, flow: Flow, variant: Variant) -> Flow:
    """A flow of that variant with the columns of another; it starts as the identity over a mixture."""
    residual = {"residual": True} if variant.residual else {}
    config = config.model_copy(update={"architecture": config.architecture | residual})
    model = _build_model(config, flow.shape, 0, indexed=False)
    if variant.components:
        start_as_identity(model)
    if not variant.tails:
        some = torch.ones(model.shape)
        model = _to_precision(Flow([WithoutTails(some, some, some)], model.base), model.dtype)
    elif not variant.trained:
        model = Flow([], model.base)
    return _over_columns(flow.layers[0], model, variant.components)


def _over_columns(columns: Layer, model: Flow, components: int) -> Flow:
    """A model behind a layer of columns, over a mixture of Gaussians, or over its own base for none."""
    base = GaussianMixture(components, model.shape[0]) if components else model.base
    return _to_precision(Flow([columns, *model.layers], base), model.dtype)


def _may_be_residual(config: RunConfig) -> bool:
    own = config.architecture
    return (
        own.get("residual") is False and not own.get("coupling") and len(set(own.get("hidden", []))) == 1
    )


def is_staged(config: RunConfig) -> bool:
    """Whether training starts from the flow without an index, and adds the index later.

    A conditional density keeps its index from the start: its affine map, which sees the context, moves
    a whole layer at once, where a spline's few bins cannot. So does a flow whose index starts
    informative: one that joins later has to start as the identity.
    """
    if config.architecture.get("index_start") == "informative":
        return False
    same = config.architecture.get("prior_hidden") == config.architecture.get("posterior_hidden")
    able = get_model(config.model).indexed and same
    return config.training.staged and able and not config.table.given


def index_settings(config: RunConfig) -> IndexSettings:
    """The settings of the index in a configuration of a CIF over vectors."""
    own = {key: value for key, value in config.architecture.items() if key in IndexSettings.model_fields}
    return IndexSettings(**own)


def rebuild_flow(
    config: RunConfig,
    about: dict[str, Any],
    indexed: bool = True,
    members: Sequence[Variant] | None = None,
) -> Flow:
    """Build the flow of a run without its data; its weights are yet to be loaded.

    Arguments:
        indexed: Whether training in stages kept the index.
        members: The variants whose mixture the run is; what about.json tells if None.
    """
    flow = _rebuild_flow(config, about)
    if members is not None:
        flows = [_variant_flow(config, flow, member) for member in members]
        flow = flows[0] if len(flows) == 1 else blend_flows(flows)
    return add_index(flow, index_settings(config)) if is_staged(config) and indexed else flow


def _rebuild_flow(config: RunConfig, about: dict[str, Any]) -> Flow:
    schema = read_schema(about)
    # runs from before there were images name the number of features
    shape = tuple(about.get("shape") or [about["features"]])
    context_features = schema.context_features if schema else 0
    flow = _build_model(config, shape, context_features, indexed=not is_staged(config))
    if schema is not None:
        return _over_columns(column_layer(schema), flow, about["components"])
    if about["standardised"]:
        ones = torch.ones(flow.shape, dtype=flow.dtype)
        return _prepend(Standardise(ones, ones), flow)
    return flow


def about_flow(dataset: Dataset, flow: Flow) -> dict[str, Any]:
    """The content of about.json for a flow that `build_flow` made."""
    standardised = _is_standardised(dataset)
    return about_run(dataset, flow, standardised=standardised, components=_components(flow))


def _build_model(config: RunConfig, shape: Shape, context_features: int, indexed: bool) -> Flow:
    """The model; with `indexed` false, a CIF's flow without its index."""
    name, settings = config.model, config.architecture
    if not indexed:
        name = name.removeprefix("cif-")
        known = get_model(name).settings.model_fields
        settings = {key: value for key, value in settings.items() if key in known}
    flow = build_model(
        name, shape=shape, context_features=context_features, seed=config.seed, **settings
    )
    return flow.double() if config.training.precision == "float64" else flow


def _to_precision(flow: Flow, dtype: torch.dtype) -> Flow:
    return flow.double() if dtype == torch.float64 else flow


def _prepend(layer: Layer, flow: Flow) -> Flow:
    return Flow([layer, *flow.layers], flow.base)


def _start_table_flow(flow: Flow, schema: Schema, dataset: Dataset) -> Flow:
    """Add the layers of a table's columns; start from a mixture of Gaussians where possible."""
    layer, base = column_layer(schema, dataset.rows("train")), flow.base
    if start_as_identity(flow) and not schema.given and isinstance(base, StandardNormal):
        few = few_rows(dataset.independent_rows)
        base = fit_base(layer, dataset.rows("train"), dataset.rows("validation"), few)
    return Flow([layer, *flow.layers], base)


def _check_levels(dataset: Dataset, levels: int) -> None:
    largest = max(int(part.max()) for part in (dataset.train, dataset.validation, dataset.test))
    if largest >= levels:
        raise UserError(
            f"{dataset.name}: there are pixels of value {largest}, but with levels = {levels} the "
            f"largest is {levels - 1}."
        )


def _is_standardised(dataset: Dataset) -> bool:
    """Whether the flow begins with a standardisation: for vectors that are neither drawn nor a table."""
    return dataset.truth is None and dataset.schema is None and not dataset.images


def _standardise(flow: Flow, dataset: Dataset) -> Flow:
    mean, scale, largest = _column_statistics(dataset)
    constant = [name for name, s in zip(dataset.columns, scale, strict=True) if not s > 0]
    if constant:
        raise UserError(f"{dataset.name}: leave out constant columns: {', '.join(constant)}.")
    kept = torch.finfo(flow.dtype)
    bad = (largest > kept.max) | (largest * kept.eps > COARSEST * scale) | (scale < kept.tiny)
    if bad.any():
        names = [name for name, wrong in zip(dataset.columns, bad, strict=True) if wrong]
        raise UserError(
            f"{dataset.name}: {', '.join(names)} cannot be told apart in {flow.dtype}: their values are "
            "too large, or differ too little. Use precision = float64, or shift and scale them."
        )
    return _prepend(Standardise(mean.to(flow.dtype), scale.to(flow.dtype)), flow)


def _column_statistics(dataset: Dataset) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and standard deviation of each training column, and the largest |x| in all parts."""
    rows = []
    # column by column: a copy of all rows in double precision may not fit into memory
    for column in range(dataset.features):
        train = dataset.train[:, column].double()
        parts = (train, dataset.validation[:, column], dataset.test[:, column])
        largest = torch.stack([part.abs().max().double() for part in parts]).max()
        rows.append(torch.stack([train.mean(), train.std(), largest]))
    mean, scale, largest = torch.stack(rows, dim=1)
    return mean, scale, largest
