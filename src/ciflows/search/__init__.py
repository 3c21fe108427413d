"""Searches: an experiment's settings chosen by validation, then tested over several seeds.

A search has a folder of its own:

    search.journal    Optuna's record of the trials, which several processes may share
    trials/NNN        a run folder for each choice of settings
    seeds/S           a run folder for each further seed of the chosen one
    claims            which process works on what
    search.json       the result

Settings are chosen by their validation log-likelihood alone; test figures have no part in it. The chosen
ones' own trial serves as the first seed: its run is not repeated.

The paper repeats the whole search for each seed instead. That is one search a seed, each with a `seed`
of its own and `seeds = 1`.
"""

from ciflows.search.plan import SAMPLERS, Plan, plan_search
from ciflows.search.results import Candidate, SearchResult, SeedScore
from ciflows.search.running import run_search

__all__ = [
    "SAMPLERS",
    "Candidate",
    "Plan",
    "SearchResult",
    "SeedScore",
    "plan_search",
    "run_search",
]
