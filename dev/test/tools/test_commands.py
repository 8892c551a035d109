"""Every command that the documents or the help of make show is run: as it stands, or in a short form of itself.

COMMANDS has a row for each: a pattern that the whole command matches, and how it is tried. A command without a row
fails this test, so that no document shows a command that was never run. A command that needs a GPU, a network, a
cluster or another person's machine is skipped, and the test says so; if another test runs a short form of it, the row
names that test.
"""
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from conftest import ROOT, TRAINER

HELP_FILES = ["Makefile", "dev/dev.mk", "dev/break/fuzz/fuzz.mk"]
PROGRAMS = ("make bash sh python python3 gdb nsys ncu perf git cd pip export sudo sbatch srun salloc mpirun torchrun ssh "
            "scp curl wget wg redis-server redis-cli")
COMMAND = re.compile(rf"(?:\w+=\S* )*(?:{'|'.join(PROGRAMS.split())}|(?:\./|\.venv/|dev/|data/|scripts/|build/)[\w./-]*\w)"
                     r"(?= |$)")


# -----------------------------------------------------------------------------------------------------------
# What is shown

def documents():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True)
    found = listed.stdout.split() if listed.returncode == 0 else []
    return found or [str(path.relative_to(ROOT)) for path in ROOT.glob("[!.]*/**/*.md")] + ["README.md"]


def commands_of(text):
    """The commands in a document's fenced and indented blocks, without comments, continued lines joined."""
    found, is_fenced, before = [], False, ""
    for line in text.splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    ") or before:
            words = before + line.strip()
            before = words[:-1] if words.endswith("\\") else ""
            if not before and COMMAND.match(words):
                found.append(re.sub(r"\s+# .*|\s+&$", "", words))
    return found


def targets_of(text):
    """make and its targets, as the comment at the beginning of a makefile lists them."""
    head = text[: re.search(r"^[^#\n]", text, re.M).start()]
    return [name.strip() for name in re.findall(r"^# (make(?: [\w-]+)?)  ", head, re.M) if name != "make fuzz-NAME"]


def shown():
    """{command: where}"""
    found = {}
    for name in documents():
        for command in commands_of((ROOT / name).read_text()):
            found.setdefault(command, name)
    for name in HELP_FILES:
        for command in targets_of((ROOT / name).read_text()):
            found.setdefault(command, name)
    return found


# -----------------------------------------------------------------------------------------------------------
# How it is tried

@dataclass
class Try:
    """The command itself, or `short`, in which \\g<0> is the command. seconds: more than a few make it a long test.
    needs: programs without which it is skipped. beside: what another worker runs at the same time."""
    short: str = r"\g<0>"
    seconds: int = 5
    needs: str = ""
    beside: str = ""
    environment: dict = field(default_factory=dict)


@dataclass
class Needs:
    """What a test machine does not have."""
    what: str


@dataclass
class Covered:
    """Another test runs the same program, shorter."""
    by: str


TINY = "--layers 2 --heads 2 --channels 32 -t 16 -b 4 -m 1 -s 0"
MEET = {"DILOCO_STORE": "file:meet"}
COMMANDS = {
    # README
    r"\.venv/bin/python data/prepare.py --text my.txt --tokenizer bpe:4096 --out data/mine":
        Try(".venv/bin/python data/prepare.py --text my.txt --tokenizer bpe:400 --out data/again"),
    r"(\./train_gpt_cpu -i .*) -e d6 -t 256 -b 8 -o log (.*)": Try(rf"\1 -o new \2 {TINY} -x 60"),
    r"\./train_gpt_cpu --generate .*": Try(r"\g<0> -g 8"),
    r"(\./train_gpt_cpu --config .*) -o (\w+) (.*)--worker (\d) --interface wg0":
        Try(r"\1 -o \2.\4 \3--worker 0 --interface lo", beside=r"\1 -o \2.other \3--worker 1 --interface lo",
            environment=MEET),
    r"(\./train_gpt_cpu --config .*) -o (\w+) (.*transport store.*)--worker (\d)(.*)":
        Try(r"\1 -o \2.\4 \3--worker 0\5", beside=r"\1 -o \2.\4 \3--worker 1\5", environment=MEET),
    r"export (DILOCO_STORE=(redis|s3)://|AWS_SHARED_CREDENTIALS_FILE=|WORKER=).*": Try(),
    r"\.venv/bin/python dev/tools/simulate.py .*|dev/tools/predict.py .*": Try(),
    r"\.venv/bin/python dev/tools/export_hf.py .* hf .*": Try(r"rm -rf hf && \g<0>"),
    r"\.venv/bin/python dev/tools/import_hf.py hf model.bin":
        Try(r".venv/bin/python dev/tools/export_hf.py log/model_00000008.bin hf-in --no-tokenizer && "
            r".venv/bin/python dev/tools/import_hf.py hf-in model.bin"),
    r"dev/tools/watch.py log": Try(r"\g<0> --once"),
    r"dev/tools/compare.py log other": Try(),
    r"\.venv/bin/python dev/tools/plot.py log other (.*)": Try(),
    r"(?:\.venv/bin/python )?dev/tools/export_tensorboard.py .*": Covered("test_tensorboard.py"),
    r"\.venv/bin/python -m pip install tensorboard .*": Covered("test_tensorboard.py"),

    # What runs elsewhere
    r"\./train_gpt -i .*|nsys stats .*": Needs("a GPU"),
    r"(nsys profile|ncu) .* (\./train_gpt) (--config .*)": Try(r"./train_gpt_cpu \3"),  # which they would watch
    r"make -j16 (test-gpu|bench-gpu|gpu-report)|make (test-gpu|bench-gpu|gpu-report|train_gpt|test_gpt)": Needs("a GPU"),
    r"make -j16 gpu-report DRY_RUN=1": Try(r"make gpu-report DRY_RUN=1 ARGUMENTS='--only versions memory'", seconds=240),
    r".*data/(fineweb|hellaswag|tinystories|tinyshakespeare).py.*": Covered("test_corpora.py"),
    r".*scripts/(run_gpt\w+|multi_node/run_\w+)\.(sh|sbatch).*": Covered("test_run_scripts.py"),
    r".*scripts/multi_node/redis_server.sh.*": Covered("test_run_scripts.py"),
    r"scripts/multi_node/s3_keys.sh .*": Covered("test_s3.py"),
    r"cd /etc/wireguard.*|scp -p ~/.diloco-password.*": Needs("a second site"),
    r"(?:sudo )?\.venv/bin/python dev/wan/probe.py .*": Covered("test_wan.py"),
    r"scripts/fetch_offline_deps.sh DIR|bash scripts/setup.sh --offline DIR.*": Covered("test_build.py"),
    r"make DEPS_HOME=.*": Covered("test_build.py"),
    r"(.* )?gdb --args build/.*": Needs("a person at gdb"),
    r"(?:gdb --args )?(\./train_gpt_cpu .*) --worker (\d) --store \S+ --timeout 9999":  # without gdb
        Try(r"\1 --worker 0", beside=r"\1 --worker 1", environment=MEET),

    # make
    r"make|make setup|make train_gpt_cpu": Try(),
    r"make build/(unit_tests|plain/test_quantize) && .*": Try(seconds=300),
    r"make train_gpt_cpu && \.venv/bin/python -m pytest .*": Try(seconds=60),
    r"\.venv/bin/python -m pytest --long -s dev/test/processes/test_elastic.py .*": Try(r"\g<0> --collect-only"),
    r"make (test|test-long|test-commands|test-emulated|check-cuda)": Try(r"\g<0> -n"),  # this test is a part of them
    r"make (train_gpt_emulated|build/debug/train_gpt)": Try(r"\g<0> -n"),  # built for the emulated tests
    r"make clean(-runs)?": Try(r"\g<0> -n"),
    r"make demo": Try("STEPS=80 make demo", seconds=400),
    r"make simulate": Try(seconds=60),
    r"make bench-cpu": Try(r"\g<0> ARGUMENTS=--quick", seconds=200),
    r"make bench-formats": Try(seconds=200),
    r"make bench-losses": Try(r"\g<0> PEER=.venv/bin/python ARGUMENTS=--quick", seconds=200, needs="torch"),
    r"make bench-peers": Try(),  # without PEERS=1 it says what it would install
    r"make bench-(wire-quality|quality)": Try(r"\g<0> ARGUMENTS=--quick", seconds=200),
    r"make bench-wan": Try(r"\g<0> ARGUMENTS='--quick --only streaming --minutes 3'", seconds=600, needs="lines"),
    r"make bench-uneven": Try(r"\g<0> ARGUMENTS='--quick --only bits --minutes 3'", seconds=600, needs="lines"),
    r"make torture": Try(r"\g<0> KILLS=3", seconds=200),
    r"make chaos": Try(r"\g<0> MINUTES=0.2", seconds=400, needs="redis-server"),
    r"make attack": Try(r"\g<0> MINUTES=0.1 ARGUMENTS='--only twice'", seconds=200),
    r"make mutate": Try(r"\g<0> MUTATE='--only llmc/cuda/gelu.cuh'", seconds=600),
    r"make fuzz": Try(r"make fuzz-tokenizer SECONDS=2", seconds=200, needs="clang++"),
    r"make registers": Try(seconds=400, needs="/usr/local/cuda/bin/nvcc"),
}


def row_of(command):
    """(the short form, the row), or None."""
    for pattern, row in COMMANDS.items():
        if match := re.fullmatch(pattern, command):
            return match, row
    return None


# -----------------------------------------------------------------------------------------------------------
# A copy of the sources, with a corpus and two runs in it

BUILT = ["train_gpt_cpu", "test_gpt_cpu"]


def copy_sources(to):
    """Sources with their times, so that make takes what is built for new; build's folders of objects are shared."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("this is no git repository: the sources are not known")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    (to / ".venv").symlink_to((ROOT / ".venv").resolve())
    (to / "build").mkdir(exist_ok=True)
    for path in [ROOT / name for name in BUILT] + [path for path in (ROOT / "build").glob("*") if path.is_file()]:
        if path.exists():
            shutil.copy2(path, to / path.relative_to(ROOT))
    for kind in ("unit", "plain", "fuzz"):
        if (ROOT / "build" / kind).exists():
            (to / "build" / kind).symlink_to(ROOT / "build" / kind)


def run(command, folder, **options):
    """By a shell, as a user would; make is not a part of the make that runs the tests."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    environment.update(options.pop("environment", {}))
    return subprocess.Popen(["bash", "-c", f"set -e -o pipefail; {command}"], cwd=folder, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def must(command, folder, seconds, **options):
    process = run(command, folder, **options)
    try:
        output = process.communicate(timeout=max(120, 3 * seconds))[0]
    finally:
        process.kill()
    assert process.returncode == 0, f"{command}: status {process.returncode}\n{output[-3000:]}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The sources, with what the documents' commands take for there: my.txt, data/mine, log and other."""
    folder = tmp_path_factory.mktemp("commands") / "diloco"
    folder.mkdir()
    copy_sources(folder)
    (folder / "my.txt").write_text("".join((ROOT / name).read_text() for name in documents()))
    must(".venv/bin/python data/prepare.py --text my.txt --tokenizer bpe:400 --out data/mine", folder, 60)
    data = "-i 'data/mine/*_train_*.bin' -j 'data/mine/*_val_*.bin'"
    for name, options in (("log", "-n 8"), ("other", "-n 0 --seed 2")):
        must(f"./train_gpt_cpu {data} {TINY} -x 8 -o {name} --workers 2 -H 4 --fragment-layers 1 {options}", folder, 60)
    for command in shown():
        for model in re.findall(r"log/model_\d+\.bin", command):
            shutil.copy(folder / "log/model_00000008.bin", folder / model)
    return folder


def lack(needs):
    if needs == "torch":
        return None if importlib.util.find_spec("torch") else "PyTorch is not installed"
    if needs == "lines":
        sites = subprocess.run([sys.executable, ROOT / "dev/wan/sites.py"], capture_output=True, text=True)
        return sites.stderr.strip() if sites.returncode != 0 else None
    return f"needs {needs}" if needs and not shutil.which(needs) else None


# -----------------------------------------------------------------------------------------------------------
# The tests

def rows():
    for command, where in shown().items():
        found = row_of(command)
        is_long = found and isinstance(found[1], Try) and found[1].seconds > 5
        yield pytest.param(command, where, id=command, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize("command, where", list(rows()))
def test_a_command_that_is_shown_works(command, where, place, tmp_path):
    found = row_of(command)
    assert found, f"{where} shows a command that is not tried: give it a row in {Path(__file__).name}: {command}"
    match, row = found
    if isinstance(row, Needs):
        pytest.skip(f"needs {row.what}: {command}")
    if isinstance(row, Covered):
        check_cover(row, command)
        return
    if row.seconds > 250 and not os.environ.get("EVERY_COMMAND"):
        pytest.skip(f"takes minutes, make test-commands runs it: {command}")
    if missing := lack(row.needs):
        pytest.skip(f"{command}: {missing}")
    meeting = {"DILOCO_STORE": f"file:{tmp_path}/meet"} if row.environment else {}
    others = [run(match.expand(row.beside), place, environment=meeting)] if row.beside else []
    try:
        must(match.expand(row.short), place, row.seconds, environment=meeting)
        for other in others:
            text = other.communicate(timeout=120)[0]
            assert other.returncode == 0, text[-3000:]
    finally:
        for other in others:
            other.kill()


def check_cover(row, command):
    """The test that is named runs that program."""
    text = "".join(path.read_text() for path in (ROOT / "dev/test").rglob(row.by))
    programs = [Path(word).name for word in command.split() if re.fullmatch(r"[\w./-]+\.(py|sh|sbatch)", word)]
    missing = [name for name in programs if name not in text and Path(name).stem not in text]
    assert text and not missing, f"{row.by} does not run {missing}"


def test_every_target_that_a_document_names_is_a_target():
    makefiles = "".join((ROOT / name).read_text() for name in HELP_FILES)
    names = {name for document in documents()
             for name in re.findall(r"`make ([a-z_-]+)", (ROOT / document).read_text())}
    assert len(names) > 10
    missing = [name for name in sorted(names) if not re.search(rf"^[\w. -]*\b{name}\b[\w -]*:|^\$\(FUZZERS", makefiles, re.M)]
    assert missing == []


def test_what_no_row_knows_is_found():
    assert row_of("make coffee") is None
    text = "A line\n\n    make coffee   # hot\n    ./train_gpt_cpu -x 1 \\\n        -v 0\n    llmc/   a folder\n"
    assert commands_of(text) == ["make coffee", "./train_gpt_cpu -x 1 -v 0"]
    assert targets_of("# make      all\n# make tea   green\nX = 1\n# make nothing  x\n") == ["make", "make tea"]
