"""Do the pictures show what the reports say? Skipped where matplotlib, an extra, is missing."""

import pytest

pytest.importorskip("matplotlib")

from helios_jax import plots  # noqa: E402
from helios_jax.bench.profile import ProfileJob, profile_config  # noqa: E402
from helios_jax.profiler import GPUS, PARTS, Formats  # noqa: E402
from helios_jax.replay import MODELS  # noqa: E402


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_the_profile_has_a_bar_per_part_and_per_gpu(tmp_path):
    report = profile_config("m", MODELS["llama-3-8b"], Formats(), ProfileJob())
    figure = plots.profile_picture(report)
    by_part, by_time = figure.axes
    assert [bar.get_width() for bar in by_part.patches] == pytest.approx(
        [report["bytes"][part] / 1e6 for part in PARTS]
    )
    assert len(by_time.patches) == len(GPUS)
    plots.save(figure, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert plots.as_data_url(figure).startswith("data:image/png;base64,")


def test_replays_are_told_apart():
    run = {"ttfts": [0.3, None, 0.1], "median_user_tokens_per_second": 12.5,
           "output_throughput": 80.0}  # fmt: skip
    figure = plots.replay_picture({"a": run, "b": run | {"output_throughput": 90.0}})
    waits, _ = figure.axes
    assert waits.lines[0].get_xdata().tolist() == [0.1, 0.3]
    assert {"12.5", "80", "90"} <= set(texts(figure))


def test_a_wait_that_never_ended_has_no_point_and_spoils_no_other():
    runs = [
        {"policy": "x", "load": load, "ttft_met": 0.5, "ttft_p95_seconds": seconds}
        for load, seconds in ((0.5, 2.0), (1.0, None), (1.5, float("inf")))
    ]
    figure = plots.sweep_picture({"runs": runs, "wanted": 0.95})
    first, second, third = figure.axes[1].lines[0].get_ydata()
    assert first == 2 and second != second and third == float("inf")
    assert plots.as_data_url(figure).startswith("data:image/png;base64,")


def test_a_sweep_has_a_line_per_policy():
    runs = [
        {"policy": policy, "load": load, "ttft_met": 1 - load / 4, "ttft_p95_seconds": load}
        for policy in ("x", "y")
        for load in (0.5, 1.0)
    ]
    figure = plots.sweep_picture({"runs": runs, "wanted": 0.95})
    met, _ = figure.axes
    assert met.lines[0].get_ydata().tolist() == [0.875, 0.75]
    assert [text.get_text() for text in met.get_legend().get_texts()] == ["x", "y"]


def test_training_is_drawn_by_step():
    lines = [
        {"step": 1, "loss": 2.0, "total_variation": 0.75},
        {"step": 2, "loss": 1.0, "total_variation": 0.5},
        {"step": 2, "held_out_loss": 1.5, "held_out_total_variation": 0.625},
    ]
    loss, acceptance = plots.training_picture(lines).axes
    assert loss.lines[0].get_xydata().tolist() == [[1, 2], [2, 1]]
    training, held_out = acceptance.lines
    assert training.get_xydata().tolist() == [[1, 0.25], [2, 0.5]]
    assert held_out.get_xydata().tolist() == [[2, 0.375]]
