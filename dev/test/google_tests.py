"""GoogleTest programs: the names of their tests, and how a run of them ends."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from conftest import ROOT


def names(program):
    """["Suite.test", ...] in the program's order."""
    listed = subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout
    suite, found = "", []
    for line in listed.splitlines():
        name = line.split("#")[0]
        if not line.startswith(" "):
            suite = name.rstrip()
        else:
            found.append(suite + name.strip())
    return found


def outcomes(command, seconds, **environment):
    """{name: GoogleTest's report of the test}, or a text where the program ended without a report or with a failure
    that is no test's, such as a sanitizer's."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        try:
            done = subprocess.run([*command, f"--gtest_output=json:{report}"], capture_output=True, text=True,
                                  timeout=seconds, cwd=ROOT, env={**os.environ, **environment})
        except subprocess.TimeoutExpired:
            return f"{command[0]} did not end within {seconds} s"
        suites = json.loads(report.read_text())["testsuites"] if report.exists() else []
    tests = {f"{test['classname']}.{test['name']}": test for suite in suites for test in suite["testsuite"]}
    if not tests or (done.returncode != 0 and not any(test.get("failures") for test in tests.values())):
        return f"{command[0]}: status {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return tests
