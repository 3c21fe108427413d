"""From a plain flow's checkpoint to one of the flow with indices, as if that had been trained so far."""

from __future__ import annotations

__all__ = ["branch"]

from collections.abc import Mapping

from torch import Tensor

from ciflows.core.flow import Flow
from ciflows.core.indexed import Indexed
from ciflows.core.noise import Noise
from ciflows.training.checkpoint import Checkpoints
from ciflows.training.settings import TrainingSettings
from ciflows.training.step import Step


def branch(
    flow: Flow, indexed: Flow, run: Checkpoints, indexed_run: Checkpoints, settings: TrainingSettings
) -> None:
    """Write a checkpoint of the flow with indices, as if it had been trained as the plain one was.

    It has the same weights, best weights, moments of the optimiser, averages and progress. Those of the
    index are fresh.

    Arguments:
        flow: The plain flow.
        indexed: A copy of it with indices.
        run: The plain flow's checkpoints.
        indexed_run: Where to write.
        settings: How both are trained.
    """
    found = run.load()
    assert found is not None
    tensors, facts = found
    names = dict(zip(_shared(indexed), flow.state_dict(), strict=True))
    places = {name: place for place, (name, _) in enumerate(flow.named_parameters())}
    # copies, since momenta of one shape share memory, which a file of tensors cannot hold
    state = {name: value.clone() for name, value in Step(indexed, settings, Noise()).state().items()}
    for place, (name, _) in enumerate(indexed.named_parameters()):
        if name in names:
            for kind in ("adam", "muon", "average"):
                _carry(tensors, state, f"{kind}.{places[names[name]]}", f"{kind}.{place}")
    for kind in ("flow", "best"):
        weights = indexed.state_dict() | {new: tensors[f"{kind}.{name}"] for new, name in names.items()}
        state |= {f"{kind}.{name}": value.clone() for name, value in weights.items()}
    indexed_run.save(facts["step"], state | {"generator": tensors["generator"]}, facts)


def _shared(indexed: Flow) -> list[str]:
    """The names of all tensors that are no index's, in the order that they have in the plain flow."""
    own = [f"layers.{i}." for i, layer in enumerate(indexed.layers) if isinstance(layer, Indexed)]
    return [name for name in indexed.state_dict() if not name.startswith(tuple(own))]


def _carry(old: Mapping[str, Tensor], new: dict[str, Tensor], before: str, after: str) -> None:
    """Take over all tensors of one parameter, under its new number."""
    for name in [name for name in new if name == after or name.startswith(f"{after}.")]:
        new[name] = old[before + name[len(after) :]]
