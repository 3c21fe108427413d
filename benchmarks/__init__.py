"""The benchmark: training steps, likelihoods and samples, timed beside other libraries.

Run it from the repository with `make bench` or `python -m benchmarks`. It is not part of the package.
"""
