"""Registry of the training engines' costs by name. A new engine is a module beside this one and a line here."""

from __future__ import annotations

from stages.parallel.layout import EngineName
from stages.planner.costs import EngineCosts
from stages.planner.engines.fsdp import FsdpCosts
from stages.planner.engines.megatron import MegatronCosts

COSTS: dict[EngineName, EngineCosts] = {costs.name: costs for costs in (FsdpCosts(), MegatronCosts())}
