"""streaming/README.md and streaming/elastic/README.md speak of what there is: files, functions, options and numbers.
The figures are those that dev/results/figures.py draws. That the trainer comes to the example's numbers is in test_worked_example.cpp."""
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from conftest import ROOT

import figures
import reference_diloco

PAGE = ROOT / "streaming/README.md"
PAGES = [PAGE, ROOT / "streaming/elastic/README.md"]
TEXT = "".join(page.read_text() for page in PAGES)
NAME = r"[A-Za-z]\w*"


def code_of(path):
    """A source without its comments."""
    return re.sub(r"//.*", "", path.read_text())


def code_lines():
    """[(file, [names])] of the paragraphs that begin with "Code:"."""
    for page in PAGES:
        for paragraph in re.findall(r"^Code: (.*?)\n\n", page.read_text(), re.M | re.S):
            _, *parts = re.split(r"\[[^]]+\]\(([^)]+)\)", paragraph)
            for path, names in zip(parts[::2], parts[1::2]):
                yield (page.parent / path).resolve(), re.findall(r"`([^`]+)`", names)


def run(*arguments, **environment):
    return subprocess.run([sys.executable, ROOT / "dev/results/figures.py", *map(str, arguments)], text=True,
                          capture_output=True, env={**os.environ, **environment})


def test_every_link_leads_to_a_file():
    links = {(page.parent / link).resolve() for page in PAGES
             for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link}
    assert len(links) > 20
    assert [link for link in sorted(links) if not link.is_file()] == []


def test_every_header_of_the_algorithm_is_on_a_page():
    headers = set(PAGE.parent.rglob("*.h"))
    assert len(headers) > 12
    linked = {(page.parent / link).resolve() for page in PAGE.parent.rglob("README.md")
              for link in re.findall(r"\]\(([^)]+)\)", page.read_text())}
    assert headers - linked == set()


def test_every_function_is_in_the_file_that_is_named_with_it():
    found = list(code_lines())
    assert len(found) > 20 and sum(len(names) for _, names in found) > 40
    assert [(path, name) for path, names in found for name in names
            if not re.search(rf"\b{name}\b", code_of(path))] == []


def test_every_other_name_is_in_the_sources():
    names = set(re.findall(rf"`({NAME})`", TEXT))
    sources = "".join(code_of(path) for pattern in ("streaming/**/*.h", "streaming/*.cuh", "llmc/**/*.h", "*.cu")
                      for path in ROOT.glob(pattern))
    assert len(names) > 40
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", sources)] == []


def test_every_option_is_one_of_the_program():
    options = set(re.findall(r"`(--[\w-]+)", TEXT))
    known = set(re.findall(r"--[a-z][\w-]*", (ROOT / "llmc/run/options.h").read_text()))
    assert len(options) >= 12
    assert options - known == set()


def test_there_are_no_line_numbers():
    assert re.findall(r"\.(?:h|cuh|cu|cpp|py)(?::|#L)\d+|\bline \d+", TEXT) == []


def test_the_example_is_what_the_script_computes():
    printed = run("--example")
    assert printed.returncode == 0, printed.stderr
    lines = printed.stdout.splitlines()
    assert len(lines) == 20
    assert "\n".join("    " + line for line in lines) in TEXT, "copy what dev/results/figures.py --example prints"


@pytest.mark.parametrize("format", reference_diloco.FOUR_BITS)
def test_the_example_keeps_the_equations_of_the_page(format):
    rows, scales = figures.example(format)
    rows = {name: np.float64(row) for name, row in rows.items()}
    largest = reference_diloco.FOUR_BITS[format][1]
    for worker in range(2):
        delta, scale, code = rows[f"delta {worker}"], scales[worker], rows[f"code {worker}"]
        assert delta == pytest.approx(rows["global"] - rows[f"local {worker}"], abs=1e-7)
        assert 0 <= scale * largest - np.abs(delta).max() <= np.abs(delta).max() / 128
        assert set(np.abs(code)) <= set(figures.CODES[format])
        assert rows[f"lost {worker}"] == pytest.approx(delta - code * scale, abs=1e-7)
    mean = sum(rows[f"code {worker}"] * scales[worker] for worker in range(2)) / 2
    assert rows["mean"] == pytest.approx(mean, abs=1e-7)
    assert rows["momentum"] == pytest.approx(mean, abs=1e-7)
    assert rows["new global"] == pytest.approx(rows["global"] - 0.4 * 1.9 * mean, abs=1e-6)
    later = rows["local 0, a step later"]
    assert rows["local 0, merged"] == pytest.approx(0.5 * later + 0.5 * rows["new global"], abs=1e-6)


def test_what_the_page_says_of_the_other_format_in_the_example_is_so():
    rows, _ = figures.example("fp4")
    decoded = rows["code 0 * scale 0"]
    assert f"E3M0 would read it as {decoded[3]:.5f}, but the -0.3 beside it as {decoded[2]:.3f}" in TEXT


@pytest.mark.parametrize("format", reference_diloco.FOUR_BITS)
def test_the_values_that_are_drawn_are_all_that_the_format_has(format):
    nearest, largest = reference_diloco.FOUR_BITS[format]
    found = {float(value) for value in nearest(np.linspace(0, largest, 100001))}
    assert sorted(found) == figures.CODES[format]


def test_numbers_of_the_text_are_those_of_the_figures():
    text = " ".join(TEXT.split())
    assert f"E2M1 loses {100 * figures.lost_share('fp4_e2m1'):.0f}%" in text
    assert f"E3M0 {100 * figures.lost_share('fp4'):.0f}%" in text
    peaks = {name: max(count for _, count in sent) / 1e6 for name, sent in figures.traffic().items()}
    averages = {name: sum(count for _, count in sent) / 1e8 for name, sent in figures.traffic().items()}
    assert f"sends {peaks['data-parallel']:.0f} MB in every step" in text
    assert (f"sends {averages['DiLoCo, fp32']:.2f} MB a step on average, but all "
            f"{peaks['DiLoCo, fp32']:.0f} MB at once") in text
    assert (f"lower the peak to {peaks['Streaming DiLoCo, fp32']:.1f} MB, four bits to "
            f"{peaks['Streaming DiLoCo, fp4_e2m1']:.3g} MB, and the average to "
            f"{averages['Streaming DiLoCo, fp4_e2m1']:.3f} MB") in text


def test_the_memory_that_the_text_names_is_that_of_the_model():
    largest = 3 * figures.GPT2.layer_values  # a fragment of layers: the embedding's blocks are no larger
    assert max(figures.GPT2.blocks(1, 3)) <= largest
    sends = [offset for offset, _ in figures.sync_bytes("fp4_e2m1", 3)]
    used = [step % 100 for offset in sends for step in (offset, offset + 1)]
    assert len(set(used)) == len(used)  # one slot: no step sends one fragment and merges another
    text = " ".join(TEXT.split())
    relay = 4e-6 * (16 << 20)  # streaming/outer_state.h: relay_values
    assert f"{8e-6 * figures.GPT2.values:.0f} MB on the host and {8e-6 * largest + relay:.0f} MB on the GPU" in text


def test_losses_are_those_of_the_wire_s_table():
    table = (ROOT / "dev/results/wire_quality.md").read_text()
    measured = [float(re.search(rf"\| 2 +\| {name} +\| nearest +\|[^|]+\| ([+-][\d.]+)%", table)[1])
                for name in ("fp4 E2M1", "fp4 E3M0")]
    (said,) = re.findall(r"([+-][\d.]+)% and ([+-][\d.]+)% from fp32's", TEXT)
    assert [float(number) for number in said] == pytest.approx(measured, abs=0.0051)


def test_each_fragment_is_sent_once_in_any_H_steps_and_several_fly():
    H, tau = figures.INNER_STEPS, figures.OVERLAP
    for fragment in figures.TIMELINE:
        sent = figures.sends(fragment.offset, H, 5 * H)
        assert sent[0] <= H and set(np.diff(sent)) == {H}
    counts = figures.in_flight(figures.TIMELINE, H, tau, 5 * H)
    assert counts[0] == 0 and max(counts) == 2
    one = [SimpleNamespace(offset=2)]
    assert figures.in_flight(one, 5, 1, 10) == [0, 1, 1, 0, 0, 0, 1, 1, 0, 0]


def test_figures_are_small_shown_on_the_page_and_the_same_each_time(tmp_path):
    for folder, seed in (("one", "1"), ("two", "2")):
        drawn = run("-o", tmp_path / folder, PYTHONHASHSEED=seed)
        assert drawn.returncode == 0, drawn.stderr
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert names == {path.name for path in figures.FOLDER.iterdir()}
    assert {f"figures/{name}" for name in names} == set(re.findall(r"!\[[^]]+\]\(([^)]+)\)", TEXT))
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
        assert (figures.FOLDER / name).stat().st_size <= 30_000
        assert ElementTree.parse(figures.FOLDER / name).getroot().tag.endswith("}svg")


def test_the_figures_of_the_page_are_those_of_the_script(tmp_path):
    version = f"Matplotlib v{matplotlib.__version__},"
    others = [path.name for path in figures.FOLDER.iterdir() if version not in path.read_text()]
    if others:
        pytest.skip(f"{', '.join(others)}: drawn by another matplotlib than {matplotlib.__version__}")
    assert run("-o", tmp_path).returncode == 0
    for path in figures.FOLDER.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), f"draw {path.name} again"


def test_mistakes_are_one_line_and_2(tmp_path):
    (tmp_path / "file").write_text("")
    for arguments in (["-o", tmp_path / "file"], ["-o", tmp_path / "file/below"], ["--unknown"]):
        result = run(*arguments)
        assert result.returncode == 2 and result.stdout == ""
        assert re.fullmatch(r"error: [^\n]+: [^\n]+\n", result.stderr)
