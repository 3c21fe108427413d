"""Run the suite and write a table and a picture: `python -m benchmarks.tables`.

Every fit has a process of its own on one core, and its time is the CPU time of that process, so that
others may use the machine too. Results are added to results.jsonl one by one, and what is in it
already is not fitted again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables.data import Entry, read_suite
from benchmarks.tables.report import Fit, read_fits, write_report

METHODS = ("default", "nsf", "cif-nsf", "zuko", "mixture", "kde")
ON_REQUEST = ("informative", "muon")
SECONDS, SEEDS = 60.0, 3
QUICK_SECONDS, QUICK_ROWS, QUICK_TABLES = 2.0, 1000, ("iris", "quakes")


def main() -> None:
    """Fit what is missing, then write the report."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "results.jsonl"
    done = {(fit.table, fit.method, fit.seed, fit.seconds) for fit in read_fits(path)}
    for entry in _chosen(options):
        for seed in range(options.seeds):
            for method in options.methods:
                if (entry.name, method, seed, options.seconds) in done:
                    continue
                fit = _run(entry, method, seed, options)
                if fit is not None:
                    with path.open("a") as file:
                        file.write(json.dumps(fit._asdict()) + "\n")
    fits = [fit for fit in read_fits(path) if fit.seconds == options.seconds]
    print(write_report(fits, options.out))


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options on the command line, or in some words."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=main.__doc__)
    parser.add_argument("--part", choices=["development", "held-out", "all"], default="all")
    parser.add_argument("--tables", nargs="+", help="only these tables")
    parser.add_argument("--methods", nargs="+", choices=METHODS + ON_REQUEST, default=METHODS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU seconds for each fit")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("tables-results"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="two small tables for two seconds each")
    options = parser.parse_args(words)
    if options.quick:
        options.tables, options.seconds, options.seeds = QUICK_TABLES, QUICK_SECONDS, 1
    options.rows = QUICK_ROWS if options.quick else None
    return options


def _chosen(options: argparse.Namespace) -> list[Entry]:
    suite = [entry for entry in read_suite() if options.part in ("all", entry.part)]
    unknown = set(options.tables or ()) - {entry.name for entry in suite}
    if unknown:
        sys.exit(f"There is no table {', '.join(sorted(unknown))}; see suite.toml.")
    return [entry for entry in suite if not options.tables or entry.name in options.tables]


def _run(entry: Entry, method: str, seed: int, options: argparse.Namespace) -> Fit | None:
    """One fit in a process of its own; None, with a word on why, where it failed."""
    task = [entry.name, method, str(seed), str(options.seconds), str(options.rows or 0)]
    command = [sys.executable, "-m", "benchmarks.tables.worker", *task]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        print(f"{entry.name}, {method}, seed {seed}: {reason[0]}", file=sys.stderr)
        return None
    score = json.loads(done.stdout.splitlines()[-1])
    fit = Fit(entry.name, entry.part, method, seed, options.seconds, **score)
    print(f"{fit.table:>14} {method:>8} seed {seed}: {fit.log_prob:9.3f}  {fit.note}", flush=True)
    return fit


if __name__ == "__main__":
    main()
