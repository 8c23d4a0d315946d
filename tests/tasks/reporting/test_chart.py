"""Axis ticks, downsampling and finite points of line charts."""

import itertools
import math
import re

import pytest

from tasks.reporting import html
from tasks.reporting.chart import MAX_POINTS, Series, integer_ticks, line_chart, ticks
from tasks.reporting.downsampling import downsample


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (5.3, 8.31), (1, 300), (0.0001, 0.00011), (7, 7), (1e17, 1e17), (0, 5e-324), (-3, 1e6)],
)
def test_ticks_are_round_and_enclose_the_range(low, high):
    marks = ticks(low, high)
    assert marks[0] <= low <= high <= marks[-1]
    assert 2 <= len(marks) <= 8
    steps = {round((b - a) / (marks[1] - marks[0]), 6) for a, b in itertools.pairwise(marks)}
    assert steps == {1}
    mantissa = (marks[1] - marks[0]) / 10 ** math.floor(math.log10(marks[1] - marks[0]) + 1e-9)
    assert min(abs(mantissa - digit) for digit in (1, 2, 5)) < 1e-6


def test_chart_skips_non_finite_points_and_stays_inside_the_plot():
    chart = line_chart(
        [Series("loss", "training", [(1, 8.0), (2, math.nan), (3, 7.0)])], x_label="step", y_label="loss"
    )
    positions = re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", chart.split('class="line')[1])
    assert len(positions) == 2
    assert all(0 <= float(x) <= 1000 and 0 <= float(y) <= 400 for x, y in positions)
    assert "nan" not in chart
    chart = line_chart(
        [Series("loss", "training", [(1, 8.0), (2, math.nan)])], x_label="step", y_label="loss"
    )
    assert 'class="dots training" d="M0.0,' in chart  # a line of one point would be invisible
    assert re.findall(r"<b>(.+?)</b>", chart) == ["1", "2"]  # no half steps


def test_a_single_line_with_the_name_of_its_axis_has_no_legend():
    lines = [Series("loss", "smooth", [(1, 2.0), (2, 1.0)])]
    assert "figcaption" not in line_chart(lines, x_label="step", y_label="loss")
    assert "figcaption" in line_chart(lines, x_label="step", y_label="validation loss")


def test_points_that_are_not_joined_have_no_line_and_a_dot_in_the_legend():
    points = [(1.0, 6.0), (2.0, 5.0)]
    chart = line_chart(
        [Series("measured", "training", points, dots=True, joined=False)], x_label="FLOPs", y_label="loss"
    )
    assert 'class="line' not in chart
    assert '<span class="training points">measured</span>' in chart
    assert chart.count("h0") == 2


def test_exponents_have_powers_of_ten_as_ticks_and_both_axes_a_label():
    chart = line_chart(
        [Series("law", "smooth", [(11.2, 6.0), (12.9, 5.0)])],
        x_label="training FLOPs",
        y_label="held-out loss",
        x_exponents=True,
    )
    assert re.findall(r"10<sup>(\d+)</sup>", chart) == ["11", "12", "13"]
    assert '<div class="y-label">held-out loss</div>' in chart
    assert '<div class="label">training FLOPs</div>' in chart


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [(11, 13, [11, 12, 13]), (11.2, 11.4, [11, 12]), (3, 22, [0, 5, 10, 15, 20, 25])],
)
def test_integer_ticks_enclose_the_range(low, high, marks):
    assert integer_ticks(low, high) == marks


def test_chart_without_points_leaves_no_card():
    chart = line_chart([Series("loss", "training", [])], x_label="step", y_label="loss")
    assert html.section("Loss", chart, html.columns(), html.columns(chart, chart), html.properties({})) == ""


def test_long_curves_are_downsampled_to_means():
    points = [(float(x), float(x % 2)) for x in range(10 * MAX_POINTS)]
    assert len(downsample(points, MAX_POINTS)) == MAX_POINTS
    assert {y for _, y in downsample(points, MAX_POINTS)} == {0.5}
