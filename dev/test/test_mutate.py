"""The tool that breaks kernels: what it finds in a source, and that its verdicts are right."""

import dataclasses
import re
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "dev"))
import mutate  # noqa: E402

SOURCE = """#pragma once
// if (i < n) { __syncthreads(); }
constexpr float log2_e = 1.44269504f;
constexpr int tile = 64;

template <int size>
__global__ void __launch_bounds__(128, 2) sum_kernel(float* out, const float* inp, int n) {
    static_assert(size % 32 == 0, "a < b");
    const int lane = threadIdx.x % 32;
    float sum = 0.0f, largest = -INFINITY;
    copy_async_commit();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        copy_async_wait<1>();
        __syncthreads();
        sum += inp[i] * 2.0f;
    }
    largest = fmaxf(largest, __shfl_xor_sync(full_warp, sum, 16));
    const bool valid = lane < n;
    if (lane == 0) { out[blockIdx.x + 1] = valid ? sum : largest; }
}

__device__ inline float masked(float x, int query, int key) {
    return key <= query ? x : -INFINITY;
}

inline void sum(float* out, const float* inp, int n, Stream& stream) {
    if (n < 1) { throw std::invalid_argument("sum: n < 1: nothing to sum"); }
    launch(sum_kernel<32>, Grid{blocks_for(n, 128), 128, size_t(n) * 4, stream}, out, inp, n);
}
"""


def changes(source=SOURCE):
    return mutate.Source("x.cuh", source).changes


def becomes(kind, source=SOURCE):
    return [change.becomes for change in changes(source) if change.kind == kind]


@pytest.mark.parametrize(
    "kind,line",
    [
        ("barrier", ";"),
        ("wait", "copy_async_wait<(1) + 1>();"),
        ("wait", ";"),
        ("boundary", "const bool valid = lane <= n;"),
        ("boundary", "const bool valid = true;"),
        ("boundary", "if (true) { out[blockIdx.x + 1] = valid ? sum : largest; }"),
        ("boundary", "if (lane == 0) { out[blockIdx.x + 1] = true ? sum : largest; }"),
        ("mask", "return key < query ? x : -INFINITY;"),
        ("mask", "return true ? x : -INFINITY;"),
        ("index", "const int lane = threadIdx.x % 16;"),
        ("index", "const int lane = threadIdx.x / 32;"),
        ("index", "if (lane == 0) { out[blockIdx.x - 1] = valid ? sum : largest; }"),
        ("scale", "constexpr float log2_e = 1.0f;"),
        ("scale", "sum += inp[i] * 1.0f;"),
        ("scale", "sum += inp[i] ;"),
        ("init", "float sum = 1.0f, largest = -INFINITY;"),
        ("init", "float sum = 0.0f, largest = 0.0f;"),
        ("init", "sum = inp[i] * 2.0f;"),
        ("init", "if (lane == 0) { out[blockIdx.x + 1] += valid ? sum : largest; }"),
        ("loop", "for (int i = (threadIdx.x) + (blockDim.x); i < n; i += blockDim.x) {"),
        ("loop", "for (int i = threadIdx.x; i < (n) - (blockDim.x); i += blockDim.x) {"),
        ("loop", "for (int i = threadIdx.x; i < n; i += 2 * (blockDim.x)) {"),
        ("shuffle", "largest = fmaxf(largest, sum);"),
        ("minmax", "largest = fminf(largest, __shfl_xor_sync(full_warp, sum, 16));"),
        ("check", 'if (false) { throw std::invalid_argument("sum: n < 1: nothing to sum"); }'),
        ("launch", "launch(sum_kernel<32>, Grid{blocks_for(n, 128) - 1, 128, size_t(n) * 4, stream}, out, inp, n);"),
        ("launch", "launch(sum_kernel<32>, Grid{blocks_for(n, 128), 128, (size_t(n) * 4) / 2, stream}, out, inp, n);"),
    ],
)
def test_each_kind_finds_its_place(kind, line):
    assert line in becomes(kind)


def test_comments_texts_and_what_the_compiler_checks_stay():
    for change in changes():
        changed = mutate.changed(SOURCE, change)
        for kept in ("// if (i < n) { __syncthreads(); }", '"sum: n < 1: nothing to sum"', "constexpr int tile = 64;",
                     'static_assert(size % 32 == 0, "a < b");', "__launch_bounds__(128, 2)", "template <int size>"):
            assert kept in changed, change.id


def test_only_what_the_emulated_build_compiles_is_changed():
    source = """__device__ int f(int a) {
#ifdef __CUDACC__
    return a + 1;
#else
    return a - 2;
#endif
}
"""
    assert [change.becomes for change in changes(source)] == ["return a + 2;"]


def test_of_the_seam_only_the_reductions_are_changed():
    file = "llmc/cuda/device.cuh"
    functions = {change.function for change in mutate.Source(file, (ROOT / file).read_text()).changes}
    assert {"warp_reduce", "block_reduce", "shuffle_xor"} <= functions
    assert not functions & {"launch", "load_matrix_x4", "copy_async_16"}


def test_names_of_changes_are_stable_and_differ():
    first, again = changes(), changes()
    assert first == again
    assert len({change.id for change in first}) == len(first)
    barrier = next(change for change in first if change.kind == "barrier")
    line = SOURCE[: SOURCE.index("        __syncthreads();")].count("\n") + 1
    assert (barrier.id, barrier.function) == (f"x.cuh:{line}:barrier:1", "sum_kernel")
    moved = next(change for change in changes("\n" + SOURCE) if change.kind == "barrier")
    assert moved.id == f"x.cuh:{line + 1}:barrier:1"
    assert (moved.was, moved.becomes) == (barrier.was, barrier.becomes)


def test_a_selection_has_each_kind_in_each_function_and_every_barrier_wait_and_mask():
    everything = changes()
    selected = mutate.selection(everything, 25)
    assert selected == mutate.selection(everything, 25)
    assert {(change.function, change.kind) for change in selected} == \
        {(change.function, change.kind) for change in everything}
    for kind in mutate.ALWAYS:
        assert [change for change in selected if change.kind == kind] == \
            [change for change in everything if change.kind == kind]
    assert len(mutate.selection(everything, len(everything))) == len(everything)


def test_explanations_are_found_by_the_text_of_the_line():
    change = next(change for change in changes() if change.kind == "mask")
    text = f"# Title\n\n`x.cuh`: a reason\nof two lines.\n\n{mutate.difference(change)}\n"
    (entry,) = mutate.read_explanations(text)
    assert entry.reason == "a reason of two lines."
    assert entry.is_of(change) and not entry.is_of(dataclasses.replace(change, file="y.cuh"))


def test_the_committed_explanations_have_a_reason_and_a_file_each():
    text = mutate.SURVIVORS.read_text()
    found = mutate.read_explanations(text)
    assert len(found) == len(re.findall(r"^    \+", text, re.MULTILINE))
    for entry in found:
        assert entry.reason and entry.was != entry.becomes and (ROOT / entry.file).exists(), entry


def test_an_unexplained_survivor_or_an_explanation_that_is_not_so_fails_the_run(capsys):
    everything = changes()
    verdicts = [mutate.Verdict(change, "killed") for change in everything]
    assert mutate.report(verdicts, [], everything)
    verdicts[0].outcome = "survived"
    assert not mutate.report(verdicts, [], everything)
    first = mutate.Explanation("x.cuh", everything[0].was, everything[0].becomes, "reason")
    share = 1 - 1 / len(everything)
    assert mutate.report(verdicts, [first], everything) == (share >= mutate.LEAST_KILLED)
    verdicts[0].outcome = "killed"
    assert not mutate.report(verdicts, [first], everything)
    verdicts[0].outcome = "not compiled"
    assert not mutate.report(verdicts, [dataclasses.replace(first, was="another line")], everything)
    assert "no such change any more" in capsys.readouterr().out


def test_a_missing_barrier_is_killed_and_an_unchanged_program_is_not(tmp_path):
    """One real build: the test of the reductions."""
    tree = mutate.Tree(tmp_path)
    file = "llmc/cuda/device.cuh"
    source = mutate.Source(file, tree.read(file))
    barrier = next(change for change in source.changes if change.kind == "barrier" and change.function == "block_reduce")
    mutator = mutate.Mutator(tree, 1)
    verdict = mutator.try_change(barrier)
    assert (verdict.outcome, verdict.by.split(":")[0]) == ("killed", "plain test_device")
    broken = mutator.try_change(dataclasses.replace(barrier, text=")"))
    assert broken.outcome == "not compiled"
    assert mutator.kill("plain", "test_device", mutator.slots.get()) == ""
    assert tree.read(file) == (ROOT / file).read_text()
