"""The README's table of options is the program's."""

import subprocess

from conftest import ROOT, TRAINER


def test_the_table_of_options_is_the_program_s():
    table = subprocess.run([TRAINER, "--options-table"], capture_output=True, text=True, check=True).stdout
    assert table.count("\n| `") > 40
    assert (
        table.strip() in (ROOT / "README.md").read_text()
    ), "put ./train_gpt_cpu --options-table into README.md"


def test_every_option_has_a_help_line():
    text = subprocess.run([TRAINER, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--inner-steps" in text and "--outer-dtype" in text and "fp4" in text
