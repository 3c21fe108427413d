"""One fit, as a process of its own: prints its score as JSON."""

from __future__ import annotations

import json
import sys
import warnings

from benchmarks.tables.data import load_table, read_suite
from benchmarks.tables.methods import score


def main() -> None:
    """Arguments: table, method, seed, seconds, rows (0 for all)."""
    name, method, seed, seconds, rows = sys.argv[1:]
    warnings.simplefilter("ignore")  # mixtures that stop before they converge
    entry = next(entry for entry in read_suite() if entry.name == name)
    table = load_table(entry, int(rows) or None)
    result = score(method, table, float(seconds), int(seed))
    facts = result._asdict()
    facts["spent"] = facts.pop("seconds")
    sizes = {"rows": len(table.train), "columns": table.train.shape[1]}
    print(json.dumps(facts | sizes))


if __name__ == "__main__":
    main()
