"""What must not change when the program is rearranged: which options the processes of a run compare, what a
table of short runs computes and sends, and how a checkpoint of an earlier program ends. The program that
made dev/test/data/unchanged/, and how to make it anew: dev/test/make_unchanged.py."""
import functools
import json
import warnings

import pytest

import make_unchanged
from conftest import TRAINER
from make_unchanged import AGREEMENTS, CHECKPOINTS, DATA, RUNS, bits_of, numbers_of

pytestmark = pytest.mark.skipif(not TRAINER.exists(), reason="train_gpt_cpu is not built: run make")

# Losses of another kind of machine: its sums are rounded otherwise, and then the deltas are.
TOLERANCE = 0.02


@functools.cache
def pinned(name):
    return json.loads((DATA / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("unchanged")


@pytest.fixture(scope="module")
def tokens(base):
    return make_unchanged.write_tokens(base / "tokens", 9000)


@pytest.fixture(scope="module")
def many_tokens(base):
    """More than a run takes before it is stopped."""
    return make_unchanged.write_tokens(base / "many tokens", 600000)


@pytest.fixture(scope="module")
def result(base, tokens):
    """result(name): the folder of that run, which is made once for the tests of its numbers and its bits."""

    @functools.cache
    def of(name):
        folder = base / name
        if name in RUNS:
            make_unchanged.run(TRAINER, folder, tokens, RUNS[name])
        else:
            make_unchanged.resume(TRAINER, folder, tokens, name.removeprefix("resumed "))
        return folder

    return of


@functools.cache
def known_bits():
    """The data of this kind of machine; None if they have not been written yet."""
    kind = make_unchanged.machine(TRAINER)
    known = pinned("bits").get(kind)
    if known is None:
        warnings.warn("BITS ARE NOT COMPARED: dev/test/data/unchanged/bits.json has none of this machine, "
                      + kind)
    return known


ALL = [*RUNS, *(f"resumed {name}" for name in CHECKPOINTS)]


@pytest.mark.parametrize("name", ALL)
def test_a_run_computes_and_sends_what_it_did(result, name):
    now, then = numbers_of(result(name)), pinned("numbers")[name]
    assert {key: now[key] for key in now if key not in ("losses", "validation")} == \
           {key: then[key] for key in then if key not in ("losses", "validation")}
    for kind in ("losses", "validation"):
        assert now[kind].keys() == then[kind].keys()
        for process, losses in then[kind].items():
            assert now[kind][process] == pytest.approx(losses, rel=TOLERANCE), f"{kind} of process {process}"


@pytest.mark.parametrize("name", ALL)
def test_a_run_has_the_bits_that_it_had(result, name):
    known = known_bits()
    if known is None or name not in known:
        pytest.skip("no bits of this kind of machine: dev/test/make_unchanged.py --bits adds them")
    assert bits_of(result(name)) == known[name]


@pytest.mark.parametrize("name", AGREEMENTS)
def test_the_same_options_must_agree(base, many_tokens, name):
    now = make_unchanged.agreements(TRAINER, base / f"agreement {name}", many_tokens, AGREEMENTS[name])
    assert now == pinned("agreements")[name]


def test_a_checkpoint_of_the_old_order_starts_its_epoch_anew_where_sequences_are_shuffled(base, tokens):
    text = make_unchanged.resume(TRAINER, base / "shuffled anew", tokens, "lock-step", {"--shuffle": 1})
    lines = [line for line in text.splitlines() if "of the data starts over" in line]
    assert lines == ["epoch 1 of the data starts over: the checkpoint is from a version that shuffled batches, "
                     "not sequences"], text
