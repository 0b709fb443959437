"""Which pages of history a query page reads: page summaries, votes and Top-K.

Selecting is differentiable nowhere: a page's gradient comes from the attention that read it, never
from its having been chosen.
"""

from oomb.sparse.selection import Selection, select_pages
from oomb.sparse.selector import Selections, Selector
from oomb.sparse.summary import asked, summarise, summary_width
from oomb.sparse.votes import page_votes, top_pages

__all__ = [
    "Selection",
    "Selections",
    "Selector",
    "asked",
    "page_votes",
    "select_pages",
    "summarise",
    "summary_width",
    "top_pages",
]
