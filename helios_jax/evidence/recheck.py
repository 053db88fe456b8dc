"""Do cells drawn at random come out again?"""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from helios_jax.evidence.parts import execute
from helios_jax.evidence.tables import SHIPPED, Cell, Table

# Times of a shared machine against arithmetic.
TOLERANCES = {True: 0.5, False: 1e-3}


class Recheck(NamedTuple):
    """A cell, the report's value, the new one, and whether they agree."""

    cell: Cell
    reported: float
    found: float | None
    agrees: bool


def recheck(
    tables: list[Table],
    kept: Mapping[str, Mapping[str, Any]],
    folder: Path,
    *,
    number: int = 3,
    seed: int | None = None,
    say: Callable[[str], Any] = lambda text: None,
) -> list[Recheck]:
    """Runs the commands of `number` cells again.

    Args:
      kept: the report's parts by name, as `run_part` returns them.
      seed: of the draw; None draws anew each time.
    """
    cells = []
    for table in tables:
        for cell in table.cells:
            if cell.part != SHIPPED and cell.value(kept[cell.part]["result"]) is not None:
                cells.append(cell)
    drawn = random.Random(seed).sample(cells, min(number, len(cells)))
    again: dict[str, Any] = {}
    found = []
    for cell in drawn:
        part = kept[cell.part]
        if cell.part not in again:
            say(f"{cell.part}: {part['title']}")
            again[cell.part] = execute(part["arguments"], folder)["result"]
        reported, new = cell.value(part["result"]), cell.value(again[cell.part])
        assert reported is not None, "only such cells are drawn"
        tolerance = TOLERANCES[part["is_measured"]]
        agrees = new is not None and abs(new - reported) <= tolerance * max(abs(reported), 1e-9)
        found.append(Recheck(cell, reported, new, agrees))
    return found
