"""The documentation's website: complete, and without requests to other servers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_site_has_every_page_and_the_reference_and_finds_them():
    built = subprocess.run(
        [sys.executable, ROOT / "docs/site/build.py"], capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stdout + built.stderr  # a link that leads nowhere fails
    site = ROOT / "build/site"
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT).with_suffix("")
        assert (site / (path.parent if path.name == "README" else path) / "index.html").exists(), path
    assert 'id="parallel.mesh.Mesh"' in (site / "reference/parallel/index.html").read_text()
    assert 'id="tasks.step.Step' in (site / "reference/extension-points/index.html").read_text()
    found = json.dumps(json.loads((site / "search.json").read_text()))
    assert "rejected.json" in found
    home = (site / "index.html").read_text()
    assert re.search(r'href="(\./)?style\.css"', home)
    loaded = re.findall(r"<(?:script|link|img)\b[^>]*(?:src|href)=[\"']?(https?:)?//", home)
    assert not loaded  # fonts and scripts come with the site
