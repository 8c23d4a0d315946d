"""The figures that the clusters' page gives for time that trains are those of the benchmark's own formula."""

import re
from pathlib import Path

from benchmarks.faults import LEFT_OUT, effective

PAGE = Path(__file__).parents[2] / "docs/clusters.md"


def test_the_clusters_page_has_the_time_that_trains_with_and_without_slurms_wait():
    text = PAGE.read_text()
    killed = int(re.search(r"^\| a node killed \| (\d+) \|$", text, re.M)[1])
    stops = (killed, killed + LEFT_OUT)
    for devices in (512, 16_384):
        interval = effective(stops[0], 1.0, devices)[0] / 60
        shares = " | ".join(f"{effective(stop, 1.0, devices)[1]:.1%}" for stop in stops)
        assert f"| {devices:,} | {interval:.1f} min | {shares} |" in text
    assert "| " + " | ".join(f"each stop {stop} s" for stop in stops) + " |" in text
