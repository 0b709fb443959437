"""A recording in forms that other programs open."""

from oomb.profiling.export.html import write_html

__all__ = ["write_html"]
