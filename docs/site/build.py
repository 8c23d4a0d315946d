"""Build the documentation as a website, in build/site: `make docs`.

The pages are the repository's own Markdown files, staged in build/pages under their own paths, so that links between them hold as
they are. After a code block's language, some name what a test does with the block; that word is removed in the staged copy. The
reference of `parallel` and of the extension points is made from docstrings. A link or an anchor that leads nowhere is an error.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
PAGES, SITE, CONFIG = BUILD / "pages", BUILD / "site", BUILD / "zensical.toml"
INDEX = "docs/README.md"
AT_ROOT = {
    "README.md": "Trainshed",
    "CONTRIBUTING.md": "Contributing",
    "CHANGELOG.md": "Changelog",
    "SECURITY.md": "Security",
}
# Modules that users' code imports: docs/extending.
EXTENSION_POINTS = (
    "tasks.step",
    "tasks.launchers.base",
    "tasks.launchers.causes",
    "tasks.launchers.conformance",
    "tasks.tracking.protocol",
    "tasks.sources.shard",
    "modeling.models.language_model",
    "profiles.sections.families",
)
# Names of keys stay whole: on a phone, tables scroll instead.
STYLE = ".md-typeset td code { word-break: normal; }"
FENCE = re.compile(r"^( *```\w+) .+$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)")
HEADING = re.compile(r"^## ([^:\n]+)", re.MULTILINE)
ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)]+)\)", re.MULTILINE)


def main() -> int:
    """Stage the pages, write the configuration, and build. Returns the builder's exit code."""
    for folder in (PAGES, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    stage()
    navigation: list[dict[str, Any]] = [
        {title: page} for page, title in AT_ROOT.items() if page == "README.md"
    ]
    navigation += [*documentation(), {"Reference": list(reference())}]
    navigation += [{title: page} for page, title in AT_ROOT.items() if page != "README.md"]
    CONFIG.write_text(configuration(navigation))
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(CONFIG)]
    return subprocess.run(command, cwd=BUILD).returncode


def stage() -> None:
    """Copy the pages, their pictures, and the other files that they link to, and write the style sheet."""
    shutil.copytree(
        ROOT / "docs", PAGES / "docs", ignore=shutil.ignore_patterns("site", "__pycache__", "*.py")
    )
    for name in AT_ROOT:
        shutil.copyfile(ROOT / name, PAGES / name)
    for page in list(PAGES.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for link in LINK.findall(text):
            _stage_linked(page, link)
        page.write_text(FENCE.sub(r"\1", text), encoding="utf-8")
    (PAGES / "style.css").write_text(STYLE)


def _stage_linked(page: Path, link: str) -> None:
    """Copy a file outside docs/ that a page links to."""
    target = (page.parent / link).resolve()
    if "://" in link or target.exists() or not target.is_relative_to(PAGES):
        return
    source = ROOT / target.relative_to(PAGES)
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def documentation() -> Iterator[dict[str, list[dict[str, str]]]]:
    """The sections of the documentation's index, each with the pages in its table."""
    text = (ROOT / INDEX).read_text(encoding="utf-8")
    _, *parts = HEADING.split(text)
    for title, table in zip(parts[::2], parts[1::2], strict=True):
        yield {title: [{name[0].upper() + name[1:]: f"docs/{page}"} for name, page in ROW.findall(table)]}


def reference() -> Iterator[dict[str, str]]:
    """Write a page per package of `parallel`, and one of extension points; yields title and path."""
    folder = PAGES / "reference"
    folder.mkdir()
    modules = sorted((ROOT / "parallel").rglob("*.py"))
    packages: dict[str, list[str]] = {"parallel": []}
    for path in modules:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        packages.setdefault(package, []).append(module)
    for package, members in [*packages.items(), ("extension points", [*EXTENSION_POINTS])]:
        page = folder / f"{package.replace(' ', '-')}.md"
        page.write_text(f"# {package}\n\n" + "\n\n".join(_directives(members)) + "\n", encoding="utf-8")
        yield {package: str(page.relative_to(PAGES))}


def _directives(modules: Iterable[str]) -> Iterator[str]:
    return (f"::: {module}" for module in modules)


def configuration(navigation: list[dict[str, Any]]) -> str:
    """Zensical's configuration, as TOML: without fonts or scripts of other servers."""
    options = {
        "docstring_style": "google",
        "show_root_heading": True,
        "show_root_full_path": True,
        "show_source": False,
        "heading_level": 2,
        "members_order": "source",
        "show_signature_annotations": True,
        "separate_signature": True,
        "docstring_options": {
            "warn_unknown_params": False,
            "warn_missing_types": False,
        },  # "k, v: ..." in one line
    }
    project = {
        "site_name": "Trainshed",
        "site_description": "Train language models as one Prefect flow, on Trainium, GPUs and CPUs",
        "docs_dir": PAGES.name,
        "extra_css": ["style.css"],
        "site_dir": SITE.name,
        "nav": navigation,
    }
    lines = ["[project]", *(f"{key} = {_toml(value)}" for key, value in project.items())]
    lines += [
        "[project.theme]",
        "font = false",
        'features = ["navigation.indexes", "navigation.top", "content.code.copy", "search.highlight", "toc.follow"]',
        "[[project.theme.palette]]",
        'scheme = "default"',
        'media = "(prefers-color-scheme: light)"',
        'toggle = {icon = "lucide/moon", name = "Dark"}',
        "[[project.theme.palette]]",
        'scheme = "slate"',
        'media = "(prefers-color-scheme: dark)"',
        'toggle = {icon = "lucide/sun", name = "Light"}',
        "[project.markdown_extensions]",
        "attr_list = {}",
        "md_in_html = {}",
        "tables = {}",
        'toc = {permalink = true, slugify = {object = "pymdownx.slugs.slugify", kwds = {case = "lower"}}}',
        "pymdownx = {highlight = {}, superfences = {}, inlinehilite = {}}",
        "[project.plugins.mkdocstrings.handlers.python]",
        f"paths = [{_toml(str(ROOT))}]",
        f"options = {_toml(options)}",
    ]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """A value as TOML, whose strings, numbers and lists are JSON's; tables on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
