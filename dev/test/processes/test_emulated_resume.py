"""Checkpoints of the CUDA trainer on a CPU (train_gpt_emulated): taken and resumed in mid-exchange, under an
adversary that delays its streams, over NCCL and TCP, with the outer state on the device and in the host's
memory."""
import shutil
import signal
import sys
import time

import pytest

from conftest import ROOT
from test_emulated_training import EMULATED, SMALL, environment

from torture import Start, compare, set_back, state_sections  # noqa: E402

pytestmark = pytest.mark.skipif(not EMULATED.exists(),
                                reason="build/plain/train_gpt is not built: make test does it")

# Sends at steps 1, 3, 5, 6, 8, 10, 11 and 13: after step 6 two of them are in flight.
RUN = {**SMALL, "-k": "cosine", "-x": 13, "-n": 6, "-y": 1}
FEEDBACK = {"--outer-error-feedback": True, "--outer-rounding": "stochastic",
            "--outer-exchange": "all_to_all"}


@pytest.fixture(scope="module")
def undisturbed(tokens, tmp_path_factory):
    """undisturbed(options): the run that all others are compared with; every call is done when it returns."""
    runs = {}

    def run(options):
        key = tuple(options.items())
        if key not in runs:
            runs[key] = Start({**RUN, **options}, tmp_path_factory.mktemp("undisturbed"), EMULATED, tokens)
            assert runs[key].wait() == [0], runs[key].output()
        return runs[key].written()

    return run


@pytest.fixture
def finish(tokens, tmp_path):
    """finish(name, options, seed) runs to the end; seed: of the adversary."""
    def run(name, options, seed):
        start = Start({**RUN, **options}, tmp_path / name, EMULATED, tokens, environment=environment(seed))
        assert start.wait() == [0], start.output()
        return start

    return run


@pytest.mark.parametrize("options,seed", [
    ({"--outer-offload": True}, 1),
    pytest.param({}, 2, marks=pytest.mark.long),
    pytest.param({"--outer-transport": "tcp"}, 3, marks=pytest.mark.long),
    pytest.param({"--outer-offload": True, "--outer-transport": "tcp"}, 4, marks=pytest.mark.long),
    pytest.param({"--overlap": 4}, 5, marks=pytest.mark.long),
    pytest.param({"--overlap": 4, "--outer-offload": True}, 6, marks=pytest.mark.long),
    pytest.param(FEEDBACK, 7, marks=pytest.mark.long),
    pytest.param({**FEEDBACK, "--outer-transport": "tcp", "--overlap": 4}, 8, marks=pytest.mark.long),
], ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else str(value))
def test_a_run_resumes_in_mid_exchange_to_the_same_bits(undisturbed, finish, options, seed):
    same_bits = ("--outer-transport", "--outer-offload")
    expected = undisturbed({name: value for name, value in options.items() if name not in same_bits})
    start = finish("run", options, seed)
    compare(start.written(), expected)  # taking checkpoints under an adversary changes nothing
    assert "in_flight.1.mean" in state_sections(start.folders[0] / "state_00000006_00003.bin")
    set_back(start.folders, 6)
    resumed = finish("run", options, seed + 100)
    assert "resumed after step 6\n" in resumed.stdout()
    compare(resumed.written(), expected)


def test_a_checkpoint_over_nccl_resumes_over_tcp_with_outer_state_in_host_memory(undisturbed, finish,
                                                                                  tmp_path):
    expected = undisturbed({})
    shutil.copytree(expected.folders[0], tmp_path / "run" / "run")
    set_back([tmp_path / "run" / "run"], 6)
    resumed = finish("run", {"--outer-transport": "tcp", "--outer-offload": True}, 9)
    assert "resumed after step 6\n" in resumed.stdout()
    compare(resumed.written(), expected)


@pytest.mark.long
def test_a_request_to_stop_is_carried_out_under_an_adversary(undisturbed, finish, tokens, tmp_path):
    expected = undisturbed({"-x": 24, "-n": 0})
    start = Start({**RUN, "-x": 24, "-n": 0}, tmp_path / "run", EMULATED, tokens, environment=environment(10))
    while not start.has_ended() and "step 1/" not in start.stdout():
        time.sleep(0.01)
    start.launchers[0].send_signal(signal.SIGTERM)
    assert start.wait() == [143], start.output()
    resumed = finish("run", {"-x": 24, "-n": 0}, 11)
    assert f"resumed after step {resumed.written().newest_done()}\n" in resumed.stdout()
    compare(resumed.written(), expected)
