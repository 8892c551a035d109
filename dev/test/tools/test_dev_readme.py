"""dev/README.md speaks of files, functions and targets that there are."""
import re

from conftest import ROOT

TEXT = (ROOT / "dev/README.md").read_text()
IMAGINED = {"llmc/rmsnorm.h", "llmc/cpu/rmsnorm.h", "llmc/cuda/rmsnorm.cuh",
            "dev/test/kernels/test_rmsnorm.cpp"}


def quoted():
    return {word for part in re.findall(r"`([^`]+)`", TEXT) for word in part.split()}


def test_every_file_that_is_named_is_there():
    names = {word for word in quoted() if re.fullmatch(r"(data|dev|llmc|streaming|scripts)/[\w/.]*", word)}
    assert len(names) > 40
    assert [name for name in sorted(names - IMAGINED) if not (ROOT / name).exists()] == []


def test_every_target_that_is_named_is_in_the_makefile():
    makefile = "".join((ROOT / name).read_text() for name in ("Makefile", "dev/dev.mk", "dev/break/fuzz/fuzz.mk"))
    targets = set(re.findall(r"(?:`|^    |&& )make ([a-z_-]+)(?=[` \n])", TEXT, re.M))
    assert len(targets) > 8
    missing = [name for name in targets if not re.search(rf"^[\w -]*\b{name}\b[\w -]*:", makefile, re.M)]
    assert missing == []


def test_every_name_of_the_code_that_is_named_is_there():
    names = {word for word in quoted() if re.fullmatch(r"[a-z]+(_[a-z]+)+|([A-Z][a-z]+){2,}", word)
             and not word.startswith("test_")}
    patterns = ("*.cu", "Makefile", "dev/dev.mk", "llmc/**/*.h", "llmc/**/*.cuh", "streaming/**/*.h", "streaming/*.cuh",
                "data/*.py", "dev/emulator/*.h", "dev/test/**/*.h")
    sources = "".join(path.read_text() for pattern in patterns for path in ROOT.glob(pattern))
    assert len(names) > 20
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", sources)] == []
