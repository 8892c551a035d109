"""The orders between the trainer's streams and its host, under an adversary: no seed of its delays changes a bit.

The runs are those in which `make mutate` takes the orders away one by one.
"""

import sys

import pytest

from conftest import ROOT
from token_files import write_tokenizer

from mutation.orders import CONFIGURATIONS, Seen, environment  # noqa: E402

EMULATED = ROOT / "build" / "plain" / "train_gpt"


@pytest.mark.parametrize("seeds", [(11,), pytest.param((12, 13), marks=pytest.mark.long)], ids=["one seed", "two more"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_seed_of_delays_changes_a_bit(train, tmp_path, name, seeds):
    write_tokenizer(tmp_path / "tokenizer.bin", 64)
    options = {**CONFIGURATIONS[name], "--tokenizer": tmp_path / "tokenizer.bin", "--timeout": 60}

    def seen(run):
        assert "emulator:" not in run.stderr
        return Seen.of(run.folder, run.stdout)

    calm = seen(train("calm", options, trainer=EMULATED))
    assert calm.models and calm.logs
    for seed in seeds:
        run = train(f"seed{seed}", options, environment=environment(seed), trainer=EMULATED)
        assert calm.difference(seen(run)) == ""


def test_the_runs_use_all_that_happens_between_steps(train, tmp_path):
    """Validation, samples, models and exchanges, or their orders would be taken away unnoticed."""
    write_tokenizer(tmp_path / "tokenizer.bin", 64)
    run = train("calm", {**CONFIGURATIONS["nccl"], "--tokenizer": tmp_path / "tokenizer.bin"}, trainer=EMULATED)
    seen = Seen.of(run.folder, run.stdout)
    assert len(seen.models) == 2 and len(seen.samples) == 3
    assert len(seen.states) == 8 and {"master", "m", "global", "momentum"} <= set(seen.states[0][1])
    assert {kind for _, kind, _ in seen.logs} == {"step", "eval", "sync", "end"}
    assert [row["step"] for row in run.lines("eval")] == [0, 3, 5]
    steps = {(row["send_step"], row["apply_step"]) for row in run.lines("sync")}
    assert (3, 5) in steps and len(steps) > 1
