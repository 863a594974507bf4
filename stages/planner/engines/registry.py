"""Registry of the planner's cost model for each training engine; a new one is a module here and a line."""

from stages.parallel.layout import EngineName
from stages.planner.costs import EngineCosts
from stages.planner.engines.fsdp import FsdpCosts
from stages.planner.engines.megatron import MegatronCosts

COSTS: dict[EngineName, EngineCosts] = {costs.name: costs for costs in (FsdpCosts(), MegatronCosts())}
