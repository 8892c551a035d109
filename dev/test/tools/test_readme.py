"""The pages: tables of options are the program's, links lead somewhere, and the README is short."""
import re
import subprocess

import pytest

from conftest import ROOT, TRAINER

PAGES = sorted(path for folder in (".", "data", "dev", "dev/*", "scripts/*", "streaming", "streaming/*")
               for path in ROOT.glob(f"{folder}/*.md"))


@pytest.mark.parametrize("option,rows", [("--options-table", 40), ("--llmc-flags-table", 20)])
def test_the_tables_of_options_are_the_program_s(option, rows):
    table = subprocess.run([TRAINER, option], capture_output=True, text=True, check=True).stdout
    assert table.count("\n| `") > rows
    assert table.strip() in (ROOT / "dev/options.md").read_text(), \
        f"copy what ./train_gpt_cpu {option} prints to dev/options.md"


def test_every_option_has_a_help_line():
    text = subprocess.run([TRAINER, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--inner-steps" in text and "--outer-dtype" in text and "fp4" in text


def anchors(page):
    """Of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_every_link_of_a_page_leads_to_a_file_and_a_heading_that_are_there():
    links, lost = 0, []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith(("http://", "https://")):
                continue
            links += 1
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            if not path.exists() or anchor and anchor not in anchors(path):
                lost.append(f"{page.relative_to(ROOT)}: {target}")
    assert links > 80 and lost == []


def test_the_readme_leads_to_the_line_that_the_paper_is_about():
    text = (ROOT / "README.md").read_text()
    assert text.index("delta = global - local") < 2000 and len(text.splitlines()) <= 300
    (body,) = re.findall(r"^    void send\(.*?^    }$", (ROOT / "streaming/diloco.h").read_text(), re.M | re.S)
    assert "delta = global - local" in body
