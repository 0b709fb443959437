"""`python -m oomb.cli` is `oomb`."""

from oomb.cli import app

app()
