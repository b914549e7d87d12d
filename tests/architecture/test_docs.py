"""The documentation names files, and sections of them, that exist."""

import re
from pathlib import Path

import pytest
from documents import anchors

ROOT = Path(__file__).parents[2]
READMES = [ROOT / "README.md", *sorted(ROOT.glob("[!.]*/README.md")), *sorted(ROOT.glob("docs/*.md"))]
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
SECTION = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)#([^)\s]+)\)")


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(readme: Path) -> None:
    missing = [link for link in LINK.findall(readme.read_text()) if not (readme.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_sections_lead_somewhere(readme: Path) -> None:
    missing = []
    for link, section in SECTION.findall(readme.read_text()):
        target = readme.parent / link if link else readme
        if target.suffix == ".md" and section not in anchors(target.read_text()):
            missing.append(f"{link}#{section}")
    assert not missing


@pytest.mark.parametrize("folder", ["cluster", "router", "replica", "kernels", "helm"])
def test_each_top_folder_tells_its_part_of_a_requests_life_in_numbered_steps(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text()
    assert re.search(r"^1\. ", text, re.MULTILINE)
    assert re.search(r"^2\. ", text, re.MULTILINE)
