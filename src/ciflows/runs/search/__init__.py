"""Searches: choose an experiment's settings by validation, then test them over several seeds.

A search has its own folder:

    search.db      Optuna's study; several processes may share it
    trials/NNN     one run folder per combination of settings
    seeds/S        one run folder per further seed of the best combination
    search.json    the result

Only the validation log-likelihood decides; test results play no part. The best trial is also the first
seed, so its run is not repeated.

The paper instead repeats the whole search for each seed. To do that, run one search per `seed`, each
with `seeds = 1`.
"""

from ciflows.runs.search.plan import SAMPLERS, Plan, plan_search
from ciflows.runs.search.results import Candidate, SearchResult, SeedScore
from ciflows.runs.search.worker import run_search

__all__ = [
    "SAMPLERS",
    "Candidate",
    "Plan",
    "SearchResult",
    "SeedScore",
    "plan_search",
    "run_search",
]
