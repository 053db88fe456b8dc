"""How do the source articles' figures come out on this machine? A report that anybody can repeat.

`parts` are commands of `helios` whose JSON is kept; `article` the figures of others; `tables` says
which number of which part stands beside which figure, and in what they differ; `pages` writes
Markdown and HTML. `results/` holds a report that was made.
"""

from helios_jax.evidence.pages import write_pages
from helios_jax.evidence.parts import (
    Inputs,
    Part,
    kept_inputs,
    kept_parts,
    make_inputs,
    parts_of,
    run_part,
)
from helios_jax.evidence.recheck import Recheck, recheck
from helios_jax.evidence.tables import Cell, Table, tables_of

__all__ = [
    "Cell",
    "Inputs",
    "Part",
    "Recheck",
    "Table",
    "kept_inputs",
    "kept_parts",
    "make_inputs",
    "parts_of",
    "recheck",
    "run_part",
    "tables_of",
    "write_pages",
]
