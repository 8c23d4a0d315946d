"""The effective training times on the page of clusters follow from the formula of benchmarks.faults."""

import re
from pathlib import Path

from benchmarks.faults import SLURMD_TIMEOUT, effective_training_time

PAGE = Path(__file__).parents[2] / "docs/operating/clusters.md"


def test_clusters_page_has_the_effective_training_times_of_the_formula():
    text = PAGE.read_text()
    killed = int(re.search(r"^\| a node killed \| (\d+) \|$", text, re.M)[1])
    recoveries = (killed, killed + SLURMD_TIMEOUT)
    for devices in (512, 16_384):
        interval = effective_training_time(killed, devices)[0] / 60
        times = (effective_training_time(recovery, devices)[1] for recovery in recoveries)
        shares = " | ".join(f"{share:.1%}" for share in times)
        assert f"| {devices:,} | {interval:.1f} min | {shares} |" in text
    assert "| " + " | ".join(f"recovery in {recovery} s" for recovery in recoveries) + " |" in text
