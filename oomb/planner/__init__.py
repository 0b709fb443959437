"""Where every byte of a step goes, before it runs."""

from oomb.planner.memory import GIB, Machine, Plan, changes, longest_context, plan_step
from oomb.planner.model import ModelSizes

__all__ = ["GIB", "Machine", "ModelSizes", "Plan", "changes", "longest_context", "plan_step"]
