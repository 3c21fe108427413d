"""Flows inside sbi and Pyro, where these are installed."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ciflows
from ciflows import Flow
from ciflows.errors import UserError

SMALL: dict[str, Any] = {"layers": 2, "hidden": [16, 16]}
SMALL |= {f"{part}_hidden": [16] for part in ("affine", "prior", "posterior")}
quiet = pytest.mark.filterwarnings("ignore")  # what other libraries warn of


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbi writes its logs where it runs."""
    monkeypatch.chdir(tmp_path)


def simulate(theta: Tensor) -> Tensor:
    return theta + 0.3 * torch.randn_like(theta)


def code_of(library: str) -> str:
    """The block of docs/variational.md that imports a library."""
    text = (Path(__file__).parent.parent / "docs" / "variational.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\{code-block\} python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if f"from {library}" in block)
    return block


def run_page(library: str, long: str, short: str) -> dict[str, Any]:
    """Run that block with some of its words replaced, so that it is quick; its names."""
    code = code_of(library)
    assert long in code
    names: dict[str, Any] = {"torch": torch, "ciflows": ciflows}
    exec(code.replace(long, short), names)
    return names


# -- sbi -------------------------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize("bounded", [False, True])
def test_npe_finds_a_posterior(bounded: bool) -> None:
    """θ ~ U(-1, 1)², x ~ N(θ, 0.3²): at x = 0 the posterior is a normal, hardly cut."""
    pytest.importorskip("sbi", reason="sbi is not installed")
    from sbi.inference import NPE
    from sbi.utils import BoxUniform

    from ciflows.bridges.sbi import posterior_nn

    torch.manual_seed(0)
    low, high = -torch.ones(2), torch.ones(2)
    prior = BoxUniform(low, high)
    theta = prior.sample((1000,))
    build = posterior_nn("cif-nsf", bounds=(low, high) if bounded else None, draws=2, **SMALL)
    trainer = NPE(prior, density_estimator=build, show_progress_bars=False)
    trainer.append_simulations(theta, simulate(theta))
    estimator = trainer.train(max_num_epochs=20, learning_rate=8e-3)
    posterior = trainer.build_posterior(estimator)
    x = torch.zeros(1, 2)
    samples = posterior.sample((2000,), x=x, show_progress_bars=False)
    assert samples.shape == (2000, 2)
    assert samples.mean(0).abs().max() < 0.1
    assert (samples.std(0) - 0.3).abs().max() < 0.06
    log_prob = posterior.log_prob(torch.zeros(1, 2), x=x)
    assert log_prob.item() == pytest.approx(-2 * math.log(0.3 * math.sqrt(2 * math.pi)), abs=0.4)
    again = [posterior.log_prob(torch.zeros(1, 2), x=x, norm_posterior=False) for _ in range(2)]
    assert torch.equal(*again)
    if bounded:
        leaked = estimator.sample(torch.Size((5000,)), torch.ones(1, 2)).abs() > 1
        assert not bool(leaked.any())


@quiet
def test_nle_gives_a_smooth_likelihood() -> None:
    pytest.importorskip("sbi", reason="sbi is not installed")
    from sbi.inference import NLE
    from sbi.utils import BoxUniform

    from ciflows.bridges.sbi import likelihood_nn

    torch.manual_seed(0)
    prior = BoxUniform(-torch.ones(2), torch.ones(2))
    theta = prior.sample((1000,))
    trainer = NLE(
        prior,
        density_estimator=likelihood_nn("cif-maf", draws=2, samples=10, **SMALL),
        show_progress_bars=False,
    )
    trainer.append_simulations(theta, simulate(theta))
    estimator = trainer.train(max_num_epochs=20, learning_rate=8e-3)
    means = torch.tensor([[0.0, 0.0], [0.5, -0.3]])
    values = estimator.log_prob(torch.zeros(1, 1, 2), means)[0]
    truth = torch.distributions.Normal(means, 0.3).log_prob(torch.zeros(2)).sum(-1)
    assert (values - truth).abs().max() < 0.5
    parameters = {"num_chains": 20, "thin": 1, "warmup_steps": 2, "init_strategy": "proposal"}
    posterior = trainer.build_posterior(mcmc_method="slice_np_vectorized", mcmc_parameters=parameters)
    samples = posterior.sample((20,), x=torch.zeros(1, 2), show_progress_bars=False)
    assert samples.abs().max() < 1
    near = torch.tensor([[0.1, 0.2], [0.1, 0.2 + 1e-4]]).requires_grad_()
    values = estimator.log_prob(torch.zeros(1, 1, 2), near)
    (slope,) = torch.autograd.grad(values.sum(), near)
    change = (values[0, 1] - values[0, 0]).item()
    assert change == pytest.approx(1e-4 * slope[0, 1].item(), rel=0.2, abs=2e-5)


@quiet
def test_sbi_is_told_what_cannot_be() -> None:
    pytest.importorskip("sbi", reason="sbi is not installed")
    from ciflows.bridges.sbi import posterior_nn

    with pytest.raises(UserError, match="Did you mean"):
        posterior_nn("cif-nfs")
    theta, x = torch.randn(50, 2), torch.randn(50, 3)
    with pytest.raises(UserError, match="outside the bounds"):
        posterior_nn("cif-maf", bounds=(torch.zeros(2), torch.ones(2)))(theta, x)
    for bounds in ((0.0, 9.0), (-9 * torch.ones(2), torch.full((2,), math.inf))):
        with pytest.raises(UserError, match=r"finite bounds, low < high, both of shape \(2,\)"):
            posterior_nn("cif-maf", bounds=bounds)(theta, x)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="take vectors"):
        posterior_nn("cif-maf")(torch.randn(50, 2, 2), x)
    embed = torch.nn.Linear(3, 4)
    estimator = posterior_nn("cif-maf", embedding_net=embed, **SMALL)(theta, x)
    assert estimator.loss(theta, x).shape == (50,)
    assert estimator.sample(torch.Size((7,)), x).shape == (7, 50, 2)
    assert estimator.log_prob(theta, x).shape == (1, 50)


@quiet
def test_the_page_of_sbi_runs() -> None:
    pytest.importorskip("sbi", reason="sbi is not installed")
    names = run_page("sbi", ".train()", ".train(max_num_epochs=1)")
    assert names["samples"].abs().max() <= 1


# -- Pyro ------------------------------------------------------------------------------------------


@quiet
def test_a_flow_guides_a_pyro_model() -> None:
    """log p(y) is known; the bound comes close to it, and does not pass it."""
    pytest.importorskip("pyro", reason="Pyro is not installed")
    import pyro
    from pyro import distributions as dist
    from pyro.infer import SVI, Trace_ELBO
    from pyro.optim import Adam

    from ciflows.bridges.pyro import AutoFlow

    def model(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, scale), obs=y)

    def build(features: int) -> Flow:
        return ciflows.build_model("cif-maf", features=features, **SMALL)

    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    y = torch.tensor([0.3, -0.4, 1.2, 0.8, 0.1])
    guide = AutoFlow(model, build)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO(num_particles=64, vectorize_particles=True))
    for _ in range(300):
        svi.step(y)
    elbo = -Trace_ELBO(num_particles=5000, vectorize_particles=True).loss(model, guide, y)
    truth = log_evidence(y)
    assert truth - 0.1 < elbo < truth + 0.02
    assert guide(y)["scale"] > 0
    with pytest.raises(UserError, match=r"the model has 2 variables; got a flow of shape \(3,\)"):
        AutoFlow(model, lambda features: build(features + 1))(y)


@quiet
@pytest.mark.parametrize("name", ["maf", "cif-maf"])
def test_a_flow_is_a_site_of_a_pyro_model(name: str) -> None:
    pytest.importorskip("pyro", reason="Pyro is not installed")
    import pyro
    from pyro.poutine import trace

    from ciflows.bridges.pyro import PyroFlow

    prior = ciflows.build_model(name, features=2, layers=1, hidden=[8])
    flow = ciflows.build_model(name, features=2, context_features=2, layers=1, hidden=[8])
    y = torch.randn(6, 2)

    def model() -> Tensor:
        with pyro.plate("rows", 6):
            theta = pyro.sample("theta", PyroFlow(prior, seed=0))
            pyro.sample("y", PyroFlow(flow, theta, seed=0), obs=y)
        return theta

    found = trace(model).get_trace()
    theta = found.nodes["_RETURN"]["value"]
    assert theta.shape == (6, 2)
    wanted = [prior.distribution(seed=0).log_prob(theta), flow.distribution(theta, seed=0).log_prob(y)]
    assert torch.allclose(found.log_prob_sum(), sum(wanted).sum())
    assert PyroFlow(flow, theta).to_event(1).event_shape == (6, 2)


@quiet
def test_the_page_of_pyro_runs() -> None:
    pytest.importorskip("pyro", reason="Pyro is not installed")
    import pyro

    pyro.clear_param_store()
    names = run_page("pyro", "range(500)", "range(3)")
    assert math.isfinite(names["svi"].evaluate_loss())


def log_evidence(y: Tensor) -> float:
    """log ∫∫ p(mean) p(scale) p(y | mean, scale) on a grid of mean and log scale."""
    mean, log_scale = torch.linspace(-4, 4, 400), torch.linspace(-2.5, 2.5, 400)
    normal = torch.distributions.Normal
    prior = normal(0.0, 1.0).log_prob(mean)[:, None] + normal(0.0, 0.5).log_prob(log_scale)
    likelihood = normal(mean[:, None, None], log_scale.exp()[None, :, None]).log_prob(y).sum(-1)
    cell = math.log((mean[1] - mean[0]) * (log_scale[1] - log_scale[0]))
    return torch.logsumexp((prior + likelihood).flatten(), 0).item() + cell
