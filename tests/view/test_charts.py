"""What is drawn, of what, and in how many bytes."""

import json
import re
import time

import numpy as np
import pytest
from folders import numbers, write_rollout, write_run

from rlkit.metrics import METRICS
from rlkit.run.reader import RunReader
from rlkit.view.charts import Charts
from rlkit.view.distribution import Rewards
from rlkit.view.panels import PLANS, History, charts_of, explain, mean_times
from rlkit.view.static import chart_as_svg


def history(folder):
    found = History(RunReader(folder))
    while found.update():
        pass
    return found


def log(folder, *lines):
    folder.mkdir(exist_ok=True)
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_every_planned_metric_is_declared():
    assert {name for plan in PLANS for name in plan.metrics} <= set(METRICS)
    assert "healthy: below 0.5" in explain("frac_reward_zero_std")


def test_charts_appear_when_they_have_data(tmp_path):
    log(tmp_path / "r", {"step": 0, "reward": 0.5})
    found = history(tmp_path / "r")
    assert [chart.title for chart in charts_of([found])] == ["Reward"]
    charts = Charts([found], live=False)
    log(tmp_path / "r", {"step": 1, "kl": 0.1, "my own <b>number</b>": 3.0})
    found.reader.refresh()
    found.update()
    assert charts.draw()
    titles = [note.name for note in charts.figure.layout.annotations]
    assert titles == ["Reward", "KL to the reference", "my own <b>number</b>"]
    assert "<b>number" not in str(charts.figure.layout.annotations[2].text)
    assert not charts.draw()  # nothing new, nothing sent
    log(tmp_path / "r", {"step": 2, "rewards/exact/mean": 0.25, "rewards/form/mean": 1.0})
    found.reader.refresh()
    found.update()
    charts.draw()
    assert "exact" in charts.figure.layout.annotations[0].text  # a title names curves that came later
    assert [note.name for note in charts.figure.layout.annotations] == titles


def test_before_the_first_step_there_is_a_word_and_no_empty_axes(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.json").write_text("{}")
    found = history(tmp_path / "r")
    charts = Charts([found], live=False)
    layout = charts.figure.layout
    assert layout.xaxis.visible is layout.yaxis.visible is False
    assert [note.text for note in layout.annotations] == ["The charts come with the first step."]
    log(tmp_path / "r", {"step": 0, "reward": 0.5})
    found.reader.refresh()
    found.update()
    charts.draw()
    assert [note.name for note in layout.annotations] == ["Reward"]
    assert layout.xaxis.visible is layout.yaxis.visible is None  # plotly's default: seen


def test_axes_say_what_they_are(tmp_path):
    """The steps below, the unit beside the title; in the picture of a saved notebook too."""
    found = history(write_run(tmp_path / "r", 30))
    layout = Charts([found], live=False).figure.layout
    texts = {note.name: note.text for note in layout.annotations}
    assert "nats" in texts["KL to the reference"] and "nats" in texts["Entropy"]
    assert "tokens" in texts["Completion length"] and "share" in texts["Clipped ratios"]
    assert all(layout[f"xaxis{number or ''}"].title.text == "step" for number in [0, *range(2, len(texts) + 1)])
    (entropy,) = [chart for chart in charts_of([found]) if chart.title == "Entropy"]
    assert "Entropy, nats" in chart_as_svg(entropy, ["r"])


def test_a_narrow_page_has_fewer_charts_side_by_side(tmp_path):
    """No title runs into the next chart, and no chart is lost."""
    charts = Charts([history(write_run(tmp_path / "r", 30))], live=False)
    layout = charts.figure.layout
    many, tall = len(layout.annotations), layout.height

    def side_by_side():
        return len({layout[f"xaxis{number or ''}"].domain for number in [0, *range(2, many + 1)]})

    assert side_by_side() == 3
    for width, wanted in ((620, 2), (320, 1), (200, 1), (1500, 3)):
        charts.fit(width)
        assert side_by_side() == wanted and len(layout.annotations) == many
        for note in layout.annotations:
            seen = re.sub("<[^>]*>", "", note.text)
            assert len(seen) * 6.3 < max(300, width / wanted), seen
    assert layout.height == tall and not charts.draw()


def test_a_full_run_has_all_charts_with_an_explanation_each(tmp_path):
    charts = Charts([history(write_run(tmp_path / "r", 30))], live=False)
    titles = [note.name for note in charts.figure.layout.annotations]
    assert {
        "Reward",
        "Reward distribution",
        "KL to the reference",
        "Clipped ratios",
        "Entropy",
        "Completion length",
    } < {*titles}
    assert {"Groups without signal", "Sampler gap", "Gradient norm", "Time per phase"} < {*titles}
    assert all(note.hovertext for note in charts.figure.layout.annotations)
    assert any("healthy: below 0.5" in (trace.hovertemplate or "").replace("<br>", " ") for trace in charts.figure.data)
    assert [shape.y0 for shape in charts.figure.layout.shapes] == [0.5]
    boxes = [
        (*charts.figure.layout[f"xaxis{n or ''}"].domain, *charts.figure.layout[f"yaxis{n or ''}"].domain)
        for n in [0, *range(2, len(titles) + 1)]
    ]
    for a in boxes:  # no chart on top of another
        assert 0 <= a[0] < a[1] <= 1 and 0 <= a[2] < a[3] <= 1
        assert all(a is b or a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2] for b in boxes)


def test_numbers_that_are_not_finite_are_gaps_with_crosses(tmp_path):
    log(tmp_path / "r", *({"step": i, "kl": None if i == 2 else 1.0 * i} for i in range(5)), {"step": 9, "reward": 1})
    charts = Charts([history(tmp_path / "r")], live=False)
    crosses = [trace for trace in charts.figure.data if trace.marker.symbol == "x-thin"]
    assert [list(trace.x) for trace in crosses] == [[2]] and list(crosses[0].y) == [1]  # as high as before
    line = next(trace for trace in charts.figure.data if trace.name == "kl" and trace.mode.startswith("lines"))
    assert np.isnan(line.y[2]) and len(line.x) == 5  # and no gap at step 9, which did not measure it


def test_a_number_that_is_logged_now_and_then_is_one_curve_without_gaps(tmp_path):
    log(tmp_path / "r", *({"step": i, "reward": 1.0} | ({"eval": 0.1 * i} if i % 5 == 0 else {}) for i in range(11)))
    charts = Charts([history(tmp_path / "r")], live=False)
    line = next(trace for trace in charts.figure.data if trace.name == "eval")
    assert list(line.x) == [0, 5, 10] and not any(trace.marker.symbol == "x-thin" for trace in charts.figure.data)


def test_runs_are_told_apart_once_in_the_legend(tmp_path):
    runs = [history(write_run(tmp_path / name, 20, seed=seed)) for seed, name in enumerate("abc")]
    figure = Charts(runs, live=False).figure
    assert [trace.name for trace in figure.data if trace.showlegend] == ["a", "b", "c"]
    colors = {
        trace.name: {t.line.color for t in figure.data if t.name == trace.name and t.type == "scatter"}
        for trace in figure.data
    }
    assert all(len(found) <= 1 for found in colors.values())
    groups = {trace.legendgroup for trace in figure.data if trace.type == "scatter"}
    assert groups == {"0", "1", "2"}  # a click on a name hides the run everywhere


def test_what_the_user_restyled_stays(tmp_path):
    found = history(write_run(tmp_path / "r", 10))
    charts = Charts([found], live=False)
    charts.figure.update_traces(line_width=5, selector={"type": "scatter"})
    charts.figure.update_layout(font_size=20, paper_bgcolor="ivory", yaxis_type="log")
    log(tmp_path / "r", numbers(11, 20, __import__("random").Random(0)) | {"brand new": 1.0})
    found.reader.refresh()
    found.update()
    charts.draw()
    assert charts.figure.layout.font.size == 20 and charts.figure.layout.yaxis.type == "log"
    assert charts.figure.layout.paper_bgcolor == "ivory" and charts.figure.data[0].line.width == 5
    assert len(charts.figure.data[0].x) == 11


def test_the_distribution_counts_shares(tmp_path):
    write_run(tmp_path / "r", 1)
    write_rollout(tmp_path / "r", 7, rows=8)
    found = Rewards()
    found.update(RunReader(tmp_path / "r"))
    heat = found.heat_map()
    assert heat.steps.tolist() == [0, 7]
    assert heat.shares.sum(0) == pytest.approx([1, 1])
    truth = RunReader(tmp_path / "r").rollouts(7)["reward"].mean()  # rewards are 0 or 1
    assert heat.shares[heat.rewards.tolist().index(1.0), 1] == pytest.approx(truth)


def test_phases_are_means_that_add_up(tmp_path):
    write_run(tmp_path / "r", 250, every=1000)
    timings = RunReader(tmp_path / "r").timings
    steps, phases = mean_times(timings, buckets=50)
    assert len(steps) == 50
    total = phases.pop("step_time")
    assert sum(phases.values()) == pytest.approx(total, rel=1e-6)
    assert total.mean() == pytest.approx(timings["step_time"].mean(), rel=1e-9)


def cost_of_an_update(folder, steps):
    """Least CPU seconds of five updates by one step each, and the bytes of what is drawn."""
    found = history(write_run(folder, steps, every=10**9))
    charts = Charts([found], live=True)
    costs = []
    for step in range(steps, steps + 5):
        write_run(folder, 1, every=10**9, first=step)
        started = time.thread_time()
        assert found.reader.refresh()
        found.update()
        assert charts.draw()
        costs.append(time.thread_time() - started)
    size = sum(trace.x.nbytes + trace.y.nbytes for trace in charts.figure.data if trace.type == "scatter")
    charts.figure.close()
    return min(costs), size


@pytest.mark.slow
def test_an_update_costs_at_step_100_000_what_it_costs_at_step_1000(tmp_path):
    """The cost and the bytes of an update do not grow with the run."""
    short, few = cost_of_an_update(tmp_path / "short", 1_000)
    long, many = cost_of_an_update(tmp_path / "long", 100_000)
    assert many < 1.6 * few, (few, many)
    assert long < 4 * short, (short, long)
