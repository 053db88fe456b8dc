"""What `tuned/<device>.json` holds, and how a call finds its entry.

    {"device": "h200", "max_kernel_rows": M, "int4_matmul": [ENTRY, ...],
     "paged_attention": [ENTRY, ...]}

    ENTRY = {"key": {...}, "config": {...}, "status": "predicted" | "measured", "microseconds": t,
             "share_of_floor": s, ...}

`max_kernel_rows`, where `bench --tune` has measured it, is the most activation rows for which
int4_matmul's kernel is taken rather than XLA's matmul on the dequantised weight. `key` holds the
sizes the entry is for (see each op's `config.table_key`), `config` the fields of the op's `Config`.
"predicted" entries were compiled for the device and never ran on one (see `aot`); "measured" ones
come from `bench --tune`.
"""

import functools
import json
from pathlib import Path

FOLDER = Path(__file__).parent / "tuned"


@functools.cache
def load(device_key: str) -> dict:
    """The parsed table of a device; an empty one where there is no file."""
    path = FOLDER / f"{device_key}.json"
    if not path.exists():
        return {"device": device_key}
    return json.loads(path.read_text())


def lookup(device_key: str, op: str, key: dict) -> dict | None:
    """The entry of `op` whose key equals `key`, or None."""
    return _index(device_key, op).get(_frozen(key))


def store(device_key: str, op: str, entries: list[dict]) -> Path:
    """Replaces the entries of `op` that have the same keys as `entries`; returns the file."""
    table = load(device_key)
    merged = {_frozen(entry["key"]): entry for entry in table.get(op, [])}
    merged |= {_frozen(entry["key"]): entry for entry in entries}
    return _write(device_key, table | {op: list(merged.values())})


def store_max_kernel_rows(device_key: str, rows: int) -> Path:
    """Sets the table's `max_kernel_rows`; returns the file."""
    return _write(device_key, load(device_key) | {"max_kernel_rows": rows})


def _write(device_key: str, table: dict) -> Path:
    path = FOLDER / f"{device_key}.json"
    path.write_text(_dump(table))
    load.cache_clear()
    _index.cache_clear()
    return path


@functools.cache
def _index(device_key: str, op: str) -> dict:
    return {_frozen(entry["key"]): entry for entry in load(device_key).get(op, [])}


def _frozen(key: dict) -> tuple:
    return tuple(sorted(key.items()))


def _dump(table: dict) -> str:
    """JSON with one entry a line, so that a change of tuning reads as a change of lines."""
    scalars = [key for key in ("device", "max_kernel_rows") if key in table]
    parts = [f"  {json.dumps(key)}: {json.dumps(table[key])}" for key in scalars]
    for op in sorted(set(table) - set(scalars)):
        lines = ",\n".join(f"    {json.dumps(entry)}" for entry in table[op])
        parts.append(f'  "{op}": [\n{lines}\n  ]')
    return "{\n" + ",\n".join(parts) + "\n}\n"
