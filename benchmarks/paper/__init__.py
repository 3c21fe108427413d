"""The queue of the paper's rows: train what queue.toml lists, and write the page of results.

Run it from the repository with `python -m benchmarks.paper`. It is not part of the package.
"""
