"""llm.c's flags with real processes: those that mpirun, srun or -pn and -pr number are ranks of one worker,
and a run that was started with such flags goes on from its config.toml. test_options.cpp has what each flag
becomes."""

import os
import shutil
import subprocess

import pytest

from conftest import TRAINER, command
from slurm_cluster import SlurmCluster, missing_programs
from token_files import write_tokenizer

# As in llm.c's scripts, with what is small in the tests' own model.
LLMC = {
    "-z": 1,
    "-ge": 1,
    "-r": 0,
    "-c": 0.1,
    "-q": 0.0,
    "-u": 2,
    "-d": 256,
    "-x": 8,
    "-n": 4,
    "-nk": 5,
    "-sl": 7.0,
}
TWO_RANKS = {**LLMC, "-z": None, "-ge": None, "--ranks": 2}

# Open MPI asks before it runs as root and before it starts more processes than there are cores.
MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


def finish(words, folder, environment=None):
    return subprocess.run(words, capture_output=True, text=True, env=environment, cwd=folder, timeout=120)


@pytest.fixture
def mpirun(tmp_path):
    """mpirun(arguments) starts two processes of the trainer."""
    installed = shutil.which("mpirun")
    if not installed or "Open MPI" not in subprocess.check_output(["mpirun", "--version"], text=True):
        pytest.skip("Open MPI's mpirun is not installed (Debian: openmpi-bin)")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, **MPI, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}

    def run(arguments, status=0):
        result = finish(["mpirun", "-np", "2", *arguments], tmp_path, environment)
        assert result.returncode == status, result.stdout + result.stderr
        assert not list(temporary.glob("diloco-*")), "the folder in which the processes met is left behind"
        return result

    return run


def test_mpirun_starts_the_ranks_of_one_worker(mpirun, train, tokens, tmp_path):
    mpirun(command(tokens, tmp_path / "mpi", LLMC))
    expected = train("run", TWO_RANKS)
    assert (tmp_path / "mpi" / "model_00000008.bin").read_bytes() == expected.model()
    assert len(expected.losses()) == 8


def test_mpirun_s_processes_refuse_what_is_wrong_and_leave_nothing(mpirun, tokens, tmp_path):
    result = mpirun(command(tokens, tmp_path / "mpi", {**LLMC, "-i": "nowhere/*.bin"}), status=2)
    errors = {line for line in result.stderr.splitlines() if line.startswith("error: ")}
    assert len(errors) == 1 and "nowhere" in errors.pop()
    assert not (tmp_path / "mpi").exists()


def test_srun_on_one_machine_needs_no_store_either(train, tokens, tmp_path):
    if missing_programs():
        pytest.skip(f"SLURM's {', '.join(missing_programs())} not installed (Debian: slurm-wlm, munge)")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with SlurmCluster(nodes=1) as cluster:
        environment = {**cluster.environment, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        result = finish(["srun", "-n2", *command(tokens, tmp_path / "srun", LLMC)], tmp_path, environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "srun" / "model_00000008.bin").read_bytes() == train("run", TWO_RANKS).model()
    assert not list(temporary.glob("diloco-*"))


def test_processes_that_pn_and_pr_number_meet_in_the_folder_of_pf(train, tokens, tmp_path):
    flags = {**LLMC, "-pn": 2, "-pg": 8, "-pi": "fs", "-pf": tmp_path / "shared"}
    commands = [command(tokens, tmp_path / "numbered", {**flags, "-pr": rank}) for rank in (1, 0)]
    started = [subprocess.Popen(words, stdout=subprocess.DEVNULL, cwd=tmp_path) for words in commands]
    assert [process.wait(timeout=60) for process in started] == [0, 0]
    assert (tmp_path / "numbered" / "model_00000008.bin").read_bytes() == train("run", TWO_RANKS).model()
    assert not list((tmp_path / "shared").iterdir())


def test_a_run_that_llm_c_s_flags_have_started_goes_on_from_its_config(train, tmp_path):
    write_tokenizer(tmp_path / "letters.bin", 64)
    flags = {**LLMC, "-d": 128, "-f": 0, "-sg": 7, "-nm": 8, "--matmul-precision": None, "--prompt": 'A"B"',
             "--tokenizer": tmp_path / "letters.bin"}
    whole = train("whole", {**flags, "-x": 12})
    train("run", flags)
    config = ["--config", tmp_path / "run" / "config.toml", "-x", "12", "-y", "1"]
    result = finish([TRAINER, *config], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "resumed after step 8" in result.stdout
    changes = [line for line in result.stdout.splitlines() if line.startswith("resumed with changed options")]
    assert changes == ["resumed with changed options: max-steps 8 -> 12"]
    assert (tmp_path / "run" / "model_00000012.bin").read_bytes() == whole.model()


@pytest.mark.parametrize(
    "options,words", [({"-z": 2}, "-z 2"), ({"-pn": 2, "-pr": 0, "-pi": "tcp"}, "redis://HOST")]
)
def test_flags_that_are_refused_get_one_line(train, options, words):
    run = train("run", {**LLMC, **options}, status=2)
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1 and words in run.stderr
    assert not run.folder.exists()


def test_gpt3_has_2048_positions(train):
    shape = {"-e": "gpt3:c384", "--layers": 1, "--channels": 64, "--heads": 1, "-x": 0}
    assert "2048 positions" in train("run", shape).stdout
    assert "64 positions" in train("other", {**shape, "--max-seq-len": 64}).stdout
    assert "2048" in train("refused", {**shape, "-t": 2049}, status=2).stderr
