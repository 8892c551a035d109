"""What make finds and what it says of what is missing; programs that are built without hiredis; the set-up, with
and without a network. Where only the choices of make and the set-up matter, g++ stands in for nvcc, and sh for Python
and apt."""

import http.server
import os
import shlex
import shutil
import subprocess
import sys
import threading

import pytest

from conftest import ROOT

WITHOUT = ROOT / "build" / "without" / "train_gpt"
RUN = {"--layers": 1, "--heads": 1, "--channels": 64, "-b": 1, "-x": 4}
WORKERS = {**RUN, "--workers": 2, "-H": 4}


# ---- make's choices


def make(*arguments, path=None, folder=ROOT):
    """make in the sources, by itself: not as a part of the make that runs the tests."""
    left_out = {"MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"}
    left_out |= {"CUDA_HOME", "NCCL_HOME", "DEPS_HOME", "GPU_ARCH"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PATH"] = f"{path}:{environment['PATH']}" if path else environment["PATH"]
    words = ["make", "--no-print-directory", *map(str, arguments)]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


def refused(result, *words):
    """One line for the user; make adds where it stopped."""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make: ***")]
    assert result.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for word in words:
        assert word in lines[0], lines[0]


def compiler_line(program, *arguments, path=None):
    """How make would build a program, as words."""
    result = make("-n", "-B", program, *arguments, path=path)
    assert result.returncode == 0, result.stderr
    text = result.stdout.replace("\\\n", " ")
    return shlex.split(next(line for line in reversed(text.splitlines()) if f"-o {program}" in line))


def script(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def library(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", file], check=True)


@pytest.fixture
def toolkit(tmp_path):
    """A CUDA toolkit whose nvcc is g++."""
    home = tmp_path / "cuda"
    script(home / "bin" / "nvcc", f'exec g++ "$@" -I{home}/include -L{home}/lib64')
    (home / "include").mkdir()
    (home / "include" / "cublasLt.h").touch()
    library(home / "lib64" / "libcublasLt.so")
    return home


@pytest.fixture
def nccl(tmp_path):
    """NCCL as NVIDIA's wheel has it."""
    home = tmp_path / "nvidia" / "nccl"
    library(home / "lib" / "libnccl.so.2")
    (home / "include").mkdir()
    (home / "include" / "nccl.h").touch()
    return home


def no_gpu(folder):
    script(folder / "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    return folder


def test_a_missing_nvcc_is_one_line(tmp_path):
    refused(make("train_gpt", f"CUDA_HOME={tmp_path}"), "nvcc", str(tmp_path), "CUDA_HOME=DIR")


def test_without_a_gpu_the_user_is_asked_for_which_to_build(toolkit, tmp_path):
    path = no_gpu(tmp_path / "bin")
    refused(make("gpu_dependencies", f"CUDA_HOME={toolkit}", path=path), "no GPU here", "GPU_ARCH=90")


@pytest.mark.parametrize("gpus,odd", [("banana", "banana"), ("90 75", "75"), ("9.0", "9.0"), ("sm_70", "70")])
def test_a_gpu_that_is_none_or_too_old_is_one_line(toolkit, gpus, odd):
    refused(make("gpu_dependencies", f"CUDA_HOME={toolkit}", f"GPU_ARCH={gpus}"), f"GPU '{odd}'", "80")


def test_what_the_cuda_trainer_needs_is_looked_for_before_it_is_compiled(toolkit, nccl, tmp_path):
    where = [f"CUDA_HOME={toolkit}", "GPU_ARCH=90"]
    assert make("gpu_dependencies", *where, f"NCCL_HOME={nccl}").returncode == 0
    refused(make("gpu_dependencies", *where, f"NCCL_HOME={tmp_path}"), str(tmp_path), "NCCL_HOME")
    (nccl / "lib" / "libnccl.so.2").unlink()
    refused(make("gpu_dependencies", *where, f"NCCL_HOME={nccl}"), "libnccl.so", "NCCL_HOME")


LIBRARIES = [("cuBLASLt", "-lcublasLt"), ("NCCL", "-lnccl"), ("xxHash", "-lxxhash")]


@pytest.mark.parametrize("name,flag", LIBRARIES)
def test_a_library_that_does_not_link_is_one_line(toolkit, name, flag):
    script(toolkit / "bin" / "nvcc", f'case "$*" in *{flag}*) exit 1;; esac')
    refused(make("gpu_dependencies", f"CUDA_HOME={toolkit}", "GPU_ARCH=90"), f"{name} is missing")


def test_a_compiler_that_compiles_nothing_is_named(tmp_path):
    script(tmp_path / "cxx", "exit 1")
    refused(make("dependencies", f"CXX={tmp_path}/cxx"), "compiler", f"{tmp_path}/cxx")
    script(tmp_path / "cxx", 'case "$*" in *-ldnnl*) exit 1;; esac')
    refused(make("dependencies", f"CXX={tmp_path}/cxx"), "oneDNN", f"{tmp_path}/cxx", "make setup")


def test_a_folder_of_libraries_with_spaces_is_refused(tmp_path):
    result = make("dependencies", f"DEPS_HOME={tmp_path}/my deps")
    assert result.returncode == 2 and f"DEPS_HOME is '{tmp_path}/my deps'" in result.stderr


def test_clean_leaves_what_benchmarks_continue_from(tmp_path):
    for name in ("Makefile", "scripts", "dev"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("build/quality/text", "build/unit"):
        (tmp_path / name).mkdir(parents=True)
    result = make("clean", folder=tmp_path)
    assert result.returncode == 0 and "build/quality (make clean-runs removes them)" in result.stdout
    assert sorted((tmp_path / "build").iterdir()) == [tmp_path / "build/quality"]
    assert make("clean-runs", folder=tmp_path).returncode == 0 and list((tmp_path / "build").iterdir()) == []
    assert "clean-runs" not in make("clean", folder=tmp_path).stdout


def test_the_last_gpu_named_is_built_for_in_ptx_too(toolkit):
    words = compiler_line("train_gpt", f"CUDA_HOME={toolkit}", "GPU_ARCH=80 sm_90")
    assert [words[i + 1] for i, word in enumerate(words) if word == "-gencode"] == [
        "arch=compute_80,code=[sm_80]",
        "arch=compute_90,code=[sm_90,compute_90]",
    ]


@pytest.mark.parametrize("gpus, codes", [("100 80", ["sm_80", "sm_100,compute_100"]), ("90 sm_90", ["sm_90,compute_90"]),
                                         ("90a 90", ["sm_90", "sm_90a,compute_90a"])])
def test_gpus_may_be_named_in_any_order_and_twice(toolkit, gpus, codes):
    words = compiler_line("train_gpt", f"CUDA_HOME={toolkit}", f"GPU_ARCH={gpus}")
    assert [word.split("[")[1] for word in words if word.startswith("arch=")] == [code + "]" for code in codes]


def test_this_machine_s_gpus_are_built_for_once_each(toolkit, tmp_path):
    script(tmp_path / "bin" / "nvidia-smi", "printf '9.0\\n10.0\\n9.0\\n'")
    words = compiler_line("train_gpt", f"CUDA_HOME={toolkit}", path=tmp_path / "bin")
    assert [words[i + 1] for i, word in enumerate(words) if word == "-gencode"] == [
        "arch=compute_90,code=[sm_90]",
        "arch=compute_100,code=[sm_100,compute_100]",
    ]


def remembered(words):
    """The folders of -rpath."""
    return [words[i + 2] for i, word in enumerate(words) if word == "-rpath"]


def test_the_program_remembers_where_nccl_and_unpacked_libraries_were_found(toolkit, nccl, tmp_path):
    unpacked = tmp_path / "deps" / "usr" / "lib"
    unpacked.mkdir(parents=True)
    (tmp_path / "deps" / "usr" / "include").mkdir()
    arguments = [f"CUDA_HOME={toolkit}", "GPU_ARCH=90", f"NCCL_HOME={nccl}/", f"DEPS_HOME={tmp_path}/deps"]
    words = compiler_line("train_gpt", *arguments)
    assert remembered(words) == [str(toolkit / "lib64"), str(nccl / "lib"), str(unpacked)]
    assert {f"-I{nccl}/include", "-l:libnccl.so.2", f"{tmp_path}/deps/usr/include"} <= set(words)


def test_system_folders_are_not_remembered():
    assert remembered(compiler_line("train_gpt_cpu")) == []


@pytest.mark.parametrize("name,library,flag", [
    ("hiredis", "hiredis", "-DWITHOUT_HIREDIS"),
    ("OpenSSL", "ssl", "-DWITHOUT_OPENSSL"),
    ("PCRE2", "pcre2-8", "-DWITHOUT_PCRE2"),
    ("curl", "curl", "-DWITHOUT_CURL"),
])
def test_what_is_not_found_is_left_out_and_said(toolkit, name, library, flag):
    arguments = [f"CUDA_HOME={toolkit}", "GPU_ARCH=90", f"HAS_{name.upper()}="]
    words = compiler_line("train_gpt", *arguments)
    assert flag in words and f"-l{library}" not in words
    assert f"{name}: not found" in make("-n", "-B", "train_gpt", *arguments).stdout


# ---- programs without them


@pytest.fixture
def without():
    if not WITHOUT.exists():
        pytest.skip("build/without/train_gpt is not built: make build/without/train_gpt")
    return WITHOUT


def test_a_build_without_them_reads_none_of_their_headers():
    words = compiler_line("build/without/train_gpt")
    words = words[: words.index("none") - 1] + ["-M"]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "train_gpt.cu" in result.stdout and "/CLI/" in result.stdout
    for name in ("hiredis/", "openssl/", "pcre2", "dnnl"):
        assert name not in result.stdout


@pytest.mark.parametrize(
    "options,words",
    [
        ({**WORKERS, "--worker": 0, "--store": "redis://127.0.0.1:1"}, ["redis:// is not in", "file:DIR"]),
    ],
)
def test_what_needs_what_is_left_out_is_refused_before_anything_is_written(without, train, options, words):
    run = train("run", options, status=2, trainer=without)
    lines = run.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), run.stderr
    assert all(word in lines[0] for word in words)
    assert not run.folder.exists()


def test_without_them_workers_exchange_over_nccl(without, train):
    run = train("run", WORKERS, trainer=without)
    assert run.losses() and run.lines("sync")


# ---- the set-up without a network


def set_up(*arguments, folder=None):
    words = ["bash", ROOT / "scripts" / "setup.sh", *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True)


@pytest.fixture
def offline(tmp_path):
    """A folder as scripts/fetch_offline_deps.sh makes it, of another release."""
    folder = tmp_path / "offline"
    folder.mkdir()
    (folder / "release").write_text("plan9 4 amd64\n")
    with open(folder / "SHA256SUMS", "w") as sums:
        subprocess.run(["sha256sum", "./release"], cwd=folder, stdout=sums, check=True)
    return folder


@pytest.mark.skipif(not shutil.which("dpkg"), reason="this is not Debian or Ubuntu")
def test_the_set_up_refuses_a_folder_that_does_not_fit(offline, tmp_path):
    refused(set_up("--offline", offline), "plan9 4 amd64", "fetch on a machine like this one")
    (offline / "release").write_text("plan9 5 amd64\n")
    refused(set_up("--offline", offline), str(offline), "damaged")
    refused(set_up("--offline", offline.name, folder=tmp_path), str(offline), "damaged")
    refused(set_up("--offline", "none/a", folder=tmp_path), f"{tmp_path}/none/a", "fetch_offline_deps.sh")
    refused(set_up("--offline"), "--offline DIR")
    refused(set_up("--offline", offline, "--prefix"), "--prefix DIR")
    refused(set_up("--prefix", tmp_path / "prefix"), "--offline")
    refused(set_up("--online"), "--online")
    assert not (tmp_path / "prefix").exists()


@pytest.mark.skipif(not shutil.which("apt-get"), reason="this is not Debian or Ubuntu")
def test_fetching_leaves_alone_what_is_there(tmp_path):
    def fetch(*arguments):
        words = ["bash", ROOT / "scripts" / "fetch_offline_deps.sh", *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True)

    (tmp_path / "kept").write_text("mine")
    (tmp_path / "new.part").mkdir()
    refused(fetch(tmp_path), str(tmp_path), "another folder")
    refused(fetch(tmp_path / "new"), "new.part", "another folder")
    refused(fetch(), "DIR")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kept", "new.part"]


# ---- what the set-up asks for, of programs that stand in


class Place:
    """A copy of the set-up, with a Python that writes down its words, and makes itself an environment's."""

    def __init__(self, folder):
        self.folder, self.words, self.venv = folder, folder / "words", folder / ".venv"
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        shutil.copy(ROOT / "requirements.txt", folder)
        for name in ("cublasLt.h", "nccl.h"):
            (folder / "cuda" / "include").mkdir(parents=True, exist_ok=True)
            (folder / "cuda" / "include" / name).touch()
        self.python("true")

    def python(self, text, file="python"):
        """text: more that it does, in sh."""
        script(self.folder / file, f'''echo "$@" >>{self.words}
[ "$1 $2" != "-m venv" ] || {{ mkdir -p .venv/bin && cp {self.folder}/python .venv/bin/python; }}
{text}''')

    def set_up(self, **variables):
        """The run, and the words that Python and other programs got."""
        environment = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "SETUP_PYTHON": self.folder / "python",
                       "CUDA_HOME": self.folder / "cuda", "SKIP_PACKAGES": 1, **variables}
        self.words.write_text("")
        result = subprocess.run(["bash", self.folder / "scripts/setup.sh"], capture_output=True, text=True,
                                env={name: str(value) for name, value in environment.items()})
        return result, self.words.read_text()


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_an_environment_of_another_s_is_kept_and_installed_into(place):
    place.python("true", ".venv/bin/python")
    (place.venv / "mine").touch()
    result, words = place.set_up()
    assert result.returncode == 0 and "did not make this .venv" in result.stdout
    assert "install" in words and "-m venv" not in words
    result, words = place.set_up()
    assert (result.returncode, result.stdout) == (0, "") and "install" not in words
    (place.folder / "requirements.txt").write_text("numpy\n")
    result, words = place.set_up()
    assert result.stdout == "installing into .venv: numpy \n" and "install" in words
    assert (place.venv / "mine").exists()


def test_an_environment_without_pip_is_made_anew_only_if_the_set_up_has_made_it(place):
    place.python("exit 1", ".venv/bin/python")
    refused(place.set_up()[0], ".venv", "rename it")
    assert place.venv.exists()
    (place.venv / "requirements.sha256").touch()
    (place.venv / "old").touch()
    result, words = place.set_up()
    assert result.returncode == 0 and "-m venv .venv" in words and not (place.venv / "old").exists()


def test_packages_that_a_new_python_does_not_see_are_installed_again(place):
    assert place.set_up()[0].returncode == 0
    place.python('case "$*" in *find_spec*) exit 1;; esac', ".venv/bin/python")
    result, words = place.set_up()
    assert result.returncode == 0 and "install" in words and "-m venv" not in words


def test_a_python_that_is_too_old_makes_no_environment(place):
    place.python("exit 1")
    refused(place.set_up()[0], "Python 3.10", "SETUP_PYTHON")
    assert not place.venv.exists()


def test_without_the_cuda_headers_the_set_up_goes_on_except_in_ci(place):
    (place.folder / "cuda/include/nccl.h").unlink()
    place.python('[ "$1" != scripts/fetch_cuda_headers.py ]')
    result, _ = place.set_up()
    assert result.returncode == 0 and result.stderr.count("\n") == 1 and "make test stops" in result.stderr
    assert place.set_up(CI="true")[0].returncode == 2


@pytest.fixture
def debian(place):
    """A user of Debian, where no package is installed."""
    for name, text in {"dpkg-query": "exit 1", "redis-server": "", "id": "echo 1000", "sudo": 'exec "$@"',
                       "apt-get": f'echo "$@" >>{place.words}'}.items():
        script(place.folder / "bin" / name, text)
    return place


def test_packages_are_installed_and_none_is_removed(debian):
    result, words = debian.set_up(SKIP_PACKAGES="")
    (install,) = [line for line in words.splitlines() if "libdnnl-dev" in line]
    assert result.returncode == 0 and {"install", "-y", "--no-remove"} <= set(install.split())
    script(debian.folder / "bin/apt-get", 'case "$*" in *install*) exit 100;; esac')
    refused(debian.set_up(SKIP_PACKAGES="")[0], "removed", "SKIP_PACKAGES=1")


def test_who_may_not_use_sudo_is_told_of_other_ways(debian):
    script(debian.folder / "bin/sudo", "exit 1")
    result, words = debian.set_up(SKIP_PACKAGES="")
    refused(result, "sudo does not work", "apt-get install g++", "dev/building.md")
    assert words == ""


# ---- the headers of CUDA's libraries


def fetch_headers(folder, index):
    """With an index that pip's configuration names."""
    (folder / "pip.py").write_text(f"print({index!r})\n")
    environment = {name: value for name, value in os.environ.items() if name != "PIP_INDEX_URL"}
    return subprocess.run([sys.executable, ROOT / "scripts/fetch_cuda_headers.py", folder / "cuda"], text=True,
                          capture_output=True, env={**environment, "PYTHONPATH": str(folder), "no_proxy": "*"})


class Cut(http.server.BaseHTTPRequestHandler):
    """Promises more than it sends."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_headers_that_cannot_be_fetched_are_one_line(tmp_path):
    result = fetch_headers(tmp_path, "https://me:secret@127.0.0.1:9/simple")
    assert result.returncode == 1 and "holds a password" in result.stderr and "secret" not in result.stderr
    with http.server.HTTPServer(("127.0.0.1", 0), Cut) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = fetch_headers(tmp_path, f"http://127.0.0.1:{server.server_port}/simple")
        server.shutdown()
    assert result.returncode == 1 and "IncompleteRead" in result.stderr and result.stderr.count("\n") == 1
