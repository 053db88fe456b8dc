"""How did training go? Its metrics as curves, or for TensorBoard."""

import json
from pathlib import Path
from typing import Any

from helios_jax.config import require


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    require(path.is_file(), f"{path}: holds no metrics; training writes them")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def draw_curves(metrics: Path, target: Path) -> None:
    """Loss and acceptance by step, as an image of the kind that the name of `target` ends in.

    Raises:
      ValueError: matplotlib is missing, or the kind unknown to it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "plot: needs matplotlib; `pip install matplotlib`, and give the same command again"
        ) from None
    lines = read_metrics(metrics)
    figure = Figure(figsize=(9, 4))
    for place, (title, names) in enumerate(
        {
            "loss": {"loss": "training"},
            "acceptance": {"total_variation": "training", "held_out_total_variation": "held out"},
        }.items()
    ):
        axes = figure.add_subplot(1, 2, place + 1)
        for name, label in names.items():
            points = [(line["step"], line[name]) for line in lines if name in line]
            values = [value if title == "loss" else 1 - value for _, value in points]
            axes.plot([step for step, _ in points], values, label=label)
        axes.set(title=title, xlabel="step")
        axes.legend()
    figure.savefig(target)


def write_tensorboard(metrics: Path, folder: Path) -> None:
    """All metrics as scalars of TensorBoard.

    Raises:
      ValueError: tensorboardX is missing.
    """
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            "tensorboard: needs tensorboardX; `pip install tensorboardX`, and give the same "
            "command again"
        ) from None
    with SummaryWriter(str(folder)) as writer:
        for line in read_metrics(metrics):
            for name, value in line.items():
                if name != "step":
                    writer.add_scalar(name, value, line["step"])
