"""Paged storage for K, V and their gradients."""

from oomb.cache.history import History, Pages, Segment, Visit
from oomb.cache.pool import PagePool
from oomb.cache.stochastic import StochasticRounding
from oomb.cache.table import PageTable, PageTableView

__all__ = [
    "History",
    "PagePool",
    "PageTable",
    "PageTableView",
    "Pages",
    "Segment",
    "StochasticRounding",
    "Visit",
]
