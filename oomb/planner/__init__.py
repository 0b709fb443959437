"""Where every byte of a step goes, before it runs."""

from oomb.planner.budget import Card, page_budget, refuse_what_cannot_fit
from oomb.planner.memory import GIB, Machine, Plan, changes, longest_context, plan_step
from oomb.planner.model import ModelSizes

__all__ = [
    "GIB",
    "Card",
    "Machine",
    "ModelSizes",
    "Plan",
    "changes",
    "longest_context",
    "page_budget",
    "plan_step",
    "refuse_what_cannot_fit",
]
