"""The name of each model and what it is, without importing torch: `ciflows models` is quick."""

from __future__ import annotations

__all__ = ["SUMMARIES", "index_pair"]

SUMMARIES = {
    "resflow": "residual flow: x + g(x), Lip g < 1; stiff but bounded; samples in a few passes",
    "cif-resflow": "resflow + index: for holes and separate pieces in two or three columns",
    "maf": "masked autoregressive flow: cheapest to train and score; samples one pass per column",
    "cif-maf": "maf + index: helps where data fall into pieces; steps cost up to 6 times as much",
    "nsf": "neural spline flow: strong, exact scores; samples one pass per column, coupling=true in two",
    "cif-nsf": "nsf + index: the default for tables; fit keeps the index only if validation gains",
    "realnvp": "affine couplings: samples as fast as scores",
    "cif-realnvp": "realnvp + index",
    "cif-id-1": "the paper's ablation: indices alone, z = x + u",
    "cif-id-2": "the paper's ablation: indices alone, z = x + t(u)",
    "cif-id-3": "the paper's ablation: indices alone, z = e^s(u) (x + t(u))",
    "vae": "variational autoencoder: a CIF of one layer whose index does not depend on z",
    "mixture": "mixture of masked autoregressive flows: one discrete index, summed exactly",
    "naf": "neural autoregressive flow: samples by bisection in [-10, 10], slow",
    "cif-naf": "naf + index",
    "unaf": "unconstrained neural autoregressive flow: samples by bisection in [-10, 10], very slow",
    "cif-unaf": "unaf + index",
    "sospf": "sums of squared polynomials: samples by bisection in [-10, 10], slow",
    "cif-sospf": "sospf + index",
    "bpf": "Bernstein polynomials: samples by bisection, slow",
    "cif-bpf": "bpf + index",
    "gf": "Gaussianization flow: feature by feature, with rotations; no density far from the data",
    "cif-gf": "gf + index",
    "cnf": "continuous flow: solves a differential equation for each row, slow both ways",
    "cif-cnf": "cnf + index",
    "realnvp-image": "images: ten couplings at two scales; quick both ways",
    "cif-realnvp-image": "realnvp-image + index: the default for images",
    "resflow-image": "images: convolutional residual blocks at three scales; samples in a few passes",
    "cif-resflow-image": "resflow-image + index: ahead of resflow-image on MNIST",
}


def index_pair(name: str) -> tuple[str, str] | None:
    """The names of a model without and with an index; None if it has no such pair.

    Example:
        >>> index_pair("cif-maf"), index_pair("vae")
        (('maf', 'cif-maf'), None)
    """
    plain = name.removeprefix("cif-")
    return (plain, f"cif-{plain}") if {plain, f"cif-{plain}"} <= SUMMARIES.keys() else None
