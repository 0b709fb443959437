"""Teaching helpers for the notebooks: guesses, checked exercises and static pictures."""

import warnings

from oomb_widgets.alive import alive
from oomb_widgets.check import check, judge
from oomb_widgets.differences import gradient_differences
from oomb_widgets.growth import memory_growth
from oomb_widgets.kernels import kernel_ladder, page_lookup
from oomb_widgets.maps import gradient_flow, who_reads_whom
from oomb_widgets.page_table import page_film, page_table
from oomb_widgets.picture import Picture, count, size
from oomb_widgets.predict import predict, reveal

# Nothing above imports transformers, whose progress bars ask for ipywidgets; none is needed here.
warnings.filterwarnings("ignore", message="IProgress not found")

__all__ = [
    "Picture",
    "alive",
    "check",
    "count",
    "gradient_differences",
    "gradient_flow",
    "judge",
    "kernel_ladder",
    "memory_growth",
    "page_film",
    "page_lookup",
    "page_table",
    "predict",
    "reveal",
    "size",
    "who_reads_whom",
]
