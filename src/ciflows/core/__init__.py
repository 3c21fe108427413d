"""The paper's model: layers, densities, flows, their likelihoods and objectives."""
