"""The tables of options in dev/options.md are the program's."""

import subprocess

import pytest

from conftest import ROOT, TRAINER


@pytest.mark.parametrize("option,rows", [("--options-table", 40), ("--llmc-flags-table", 20)])
def test_the_tables_of_options_are_the_program_s(option, rows):
    table = subprocess.run([TRAINER, option], capture_output=True, text=True, check=True).stdout
    assert table.count("\n| `") > rows
    assert table.strip() in (ROOT / "dev/options.md").read_text(), \
        f"copy what ./train_gpt_cpu {option} prints to dev/options.md"


def test_every_option_has_a_help_line():
    text = subprocess.run([TRAINER, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--inner-steps" in text and "--outer-dtype" in text and "fp4" in text
