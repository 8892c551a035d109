"""The tool that breaks the CUDA trainer: which changes it finds in a source, and that its verdicts are right."""

import dataclasses
import json
import re
import sys

import pytest

from conftest import ROOT

import mutate  # noqa: E402
from mutation import host, kernel_tests, kernels, orders, report, source, wire  # noqa: E402

KERNELS = """#pragma once
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
    require(n % 4 == 0 && are_aligned({out, inp}));
    launch(sum_kernel<32>, Grid{blocks_for(n, 128), 128, size_t(n) * 4, stream}, out, inp, n);
}
"""


def changes(text=KERNELS):
    return kernels.KernelSource("x.cuh", text).changes


def becomes(kind, text=KERNELS):
    return [change.becomes for change in changes(text) if change.kind == kind]


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
        ("check", "require(true && are_aligned({out, inp}));"),
        ("check", "require(n % 4 == 0 && true);"),
        ("launch", "launch(sum_kernel<32>, Grid{blocks_for(n, 128) - 1, 128, size_t(n) * 4, stream}, out, inp, n);"),
        ("launch", "launch(sum_kernel<32>, Grid{blocks_for(n, 128), 128, (size_t(n) * 4) / 2, stream}, out, inp, n);"),
    ],
)
def test_each_kind_of_change_is_found(kind, line):
    assert line in becomes(kind)


def test_comments_texts_and_static_assertions_are_not_changed():
    for change in changes():
        changed = source.changed(KERNELS, change)
        for kept in ("// if (i < n) { __syncthreads(); }", '"sum: n < 1: nothing to sum"', "constexpr int tile = 64;",
                     'static_assert(size % 32 == 0, "a < b");', "__launch_bounds__(128, 2)", "template <int size>"):
            assert kept in changed, change.id


def test_only_code_that_the_emulated_build_compiles_is_changed():
    text = """__device__ int f(int a) {
#ifdef __CUDACC__
    return a + 1;
#else
    return a - 2;
#endif
}
"""
    assert [change.becomes for change in changes(text)] == ["return a + 2;"]


def test_only_the_reductions_of_the_device_seam_are_changed():
    file = "llmc/cuda/device.cuh"
    functions = {change.function for change in kernels.KernelSource(file, (ROOT / file).read_text()).changes}
    assert {"warp_reduce", "block_reduce", "shuffle_xor"} <= functions
    assert not functions & {"launch", "load_matrix_x4", "copy_async_16"}


def test_names_of_changes_are_stable_and_unique():
    first, again = changes(), changes()
    assert first == again
    assert len({change.id for change in first}) == len(first)
    barrier = next(change for change in first if change.kind == "barrier")
    line = KERNELS[: KERNELS.index("        __syncthreads();")].count("\n") + 1
    assert (barrier.id, barrier.function) == (f"x.cuh:{line}:barrier:1", "sum_kernel")
    moved = next(change for change in changes("\n" + KERNELS) if change.kind == "barrier")
    assert moved.id == f"x.cuh:{line + 1}:barrier:1"
    assert (moved.was, moved.becomes) == (barrier.was, barrier.becomes)


def test_a_selection_has_each_kind_in_each_function_and_every_barrier_wait_and_mask():
    everything = changes()
    selected = kernels.selection(everything, 25)
    assert selected == kernels.selection(everything, 25)
    assert {(change.function, change.kind) for change in selected} == \
        {(change.function, change.kind) for change in everything}
    for kind in kernels.ALWAYS:
        assert [change for change in selected if change.kind == kind] == \
            [change for change in everything if change.kind == kind]
    assert len(kernels.selection(everything, len(everything))) == len(everything)


def test_explanations_are_found_by_the_function_and_the_text_of_the_line():
    change = next(change for change in changes() if change.kind == "mask")
    text = f"# Title\n\n`x.cuh`, `{change.function}`: a reason\nof two lines.\n\n{report.difference(change)}\n"
    (entry,) = report.read_explanations(text)
    assert entry.reason == "a reason of two lines."
    assert entry.is_of(change)
    assert not entry.is_of(dataclasses.replace(change, file="y.cuh"))
    assert not entry.is_of(dataclasses.replace(change, function="its_twin"))


def test_each_committed_explanation_has_a_reason_and_a_file():
    text = report.SURVIVORS.read_text()
    found = report.read_explanations(text)
    assert len(found) == len(re.findall(r"^    \+", text, re.MULTILINE))
    for entry in found:
        assert entry.reason and entry.was != entry.becomes and (ROOT / entry.file).exists(), entry


def test_each_committed_explanation_is_of_an_existing_change(tmp_path):
    everything = []
    for name, part in mutate.PARTS.items():
        (tmp_path / name).mkdir()
        everything += part(tmp_path / name, 1).changes
    explained = report.read_explanations(report.SURVIVORS.read_text())
    assert [entry for entry in explained if not any(entry.is_of(change) for change in everything)] == []


def test_an_unexplained_survivor_or_a_wrong_explanation_fails_the_run(capsys):
    everything = changes()
    verdicts = [report.Verdict(change, "killed") for change in everything]
    assert report.report(verdicts, [], everything)
    verdicts[0].outcome = "survived"
    assert not report.report(verdicts, [], everything)
    first = report.Explanation("x.cuh", everything[0].function, everything[0].was, everything[0].becomes, "reason")
    share = 1 - 1 / len(everything)
    assert report.report(verdicts, [first], everything) == (share >= report.LEAST_KILLED)
    verdicts[0].outcome = "killed"
    assert not report.report(verdicts, [first], everything)
    verdicts[0].outcome = "not compiled"
    assert not report.report(verdicts, [dataclasses.replace(first, was="another line")], everything)
    assert "no longer has such a change" in capsys.readouterr().out


HOST = """#pragma once
// stream.wait(event);
struct Trainer {
    void wait(const Event& event) { stream.enqueue([=](cudaStream_t on) { cudaCheck(cudaStreamWaitEvent(on, event)); }); }
    bool query() const {
        const cudaError_t status = cudaEventQuery(event);
        return status == cudaSuccess && host.query();
    }
};
inline void hand_over(Trainer& t) {
    t.main.record(t.event);
    t.comm.wait(t.event);
}
inline void order(Stream& before, Stream& after, Event& event) {
    before.record(event);
    after.wait(event);
}
inline void step(Trainer& t, long n) {
    if (!t.event.query()) { throw std::logic_error("not seen"); }
    hand_over(t);
    order(t.main, *t.copies, t.event);
    settle(locked([&] { return ncclAllGather(t.comm); }), "ncclAllGather");
    check(cublasLtCreate(&t.handle), "cannot begin");
    until(query());
    check();
    for (long i = 0; i < n; i++) { t.main.wait(t.gathered[i]); }
    while (!t.done.query()) { t.stream.synchronize(); }
}
"""


def host_source():
    return host.read_sources(["x.h"], lambda file: HOST)[0]


def test_statements_of_the_host_side_that_order_or_wait_are_found_and_no_others():
    assert [(change.kind, change.function, change.becomes) for change in host_source().changes] == [
        ("event-wait", "wait", "void wait(const Event& event) { stream.enqueue([=](cudaStream_t on) { ; }); }"),
        ("poll", "query", "const cudaError_t status = cudaSuccess;"),
        ("poll", "query", "return status == cudaSuccess && true;"),
        ("record", "hand_over", ";"),
        ("event-wait", "hand_over", ";"),
        ("record", "order", ";"),
        ("event-wait", "order", ";"),
        ("order", "step", "hand_back(t);"),
        ("order", "step", ";"),
        ("order", "step", ";"),
        ("order", "step", "order(*t.copies, t.main, t.event);"),
        ("poll", "step", "locked([&] { return ncclAllGather(t.comm); });"),
        ("check", "step", ";"),
        ("event-wait", "step", "for (long i = 0; i < n; i++) { ; }"),
        ("poll", "step", "while (!true) { t.stream.synchronize(); }"),
        ("synchronize", "step", "while (!t.done.query()) { ; }"),
    ]


def test_all_changes_of_the_host_side_are_built_into_one_program_which_chooses_one():
    found = host_source()
    text = host.with_all_changes(found, lambda change: found.changes.index(change) + 1)
    for line in ("if (mutated(1)) { ; } else { cudaCheck(cudaStreamWaitEvent(on, event)); }",
                 "const cudaError_t status = (mutated(2) ? cudaSuccess : cudaEventQuery(event));",
                 "return status == cudaSuccess && (mutated(3) ? true : host.query());",
                 "if (mutated(4)) { ; } else { t.main.record(t.event); }",
                 "if (mutated(9)) { ; } else if (mutated(8)) { hand_back(t); } else { hand_over(t); }",
                 "while (!(mutated(15) ? true : t.done.query())) {", "// stream.wait(event);"):
        assert line in text
    assert text.count("mutated(") == len(found.changes)


def test_every_file_of_the_host_side_is_searched():
    names = {path.relative_to(ROOT).as_posix() for pattern in host.FILES for path in ROOT.glob(pattern)}
    found = {found.file for found in host.read_sources(sorted(names), lambda file: (ROOT / file).read_text())}
    assert {"train_gpt.cu", "streaming/diloco.h", "streaming/exchange.h", "llmc/upload.h", "llmc/cuda/stream.cuh",
            "llmc/run/comm_nccl.cuh", "llmc/run/comm_staged.cuh", "llmc/cuda/memory.cuh"} <= found


def test_runs_are_compared_by_models_states_samples_and_numbers_but_not_by_times(tmp_path):
    row = {"type": "eval", "step": 2, "time": 0.5, "loss": 4.25}
    (tmp_path / "model_00000002.bin").write_bytes(b"weights")

    def seen(sample="abc", **changed):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({**row, **changed}) + "\n")
        return orders.Seen.of(tmp_path, f"sample after step 2:\n---\n{sample}\n---\n1.5 s\n")

    first = seen()
    assert first.difference(seen(time=0.75)) == ""
    assert first.difference(seen(loss=4.5)) == "other eval in metrics.jsonl"
    assert first.difference(seen(loss=None)) == "other eval in metrics.jsonl"
    assert first.difference(seen("abd")) == "other samples"
    (tmp_path / "model_00000002.bin").write_bytes(b"Weights")
    assert first.difference(seen()) == "other models"


@pytest.mark.long
def test_a_missing_barrier_is_killed_and_an_unchanged_program_is_not(tmp_path):
    """With one real build: the test of the reductions."""
    tree = kernel_tests.Tree(tmp_path)
    file = "llmc/cuda/device.cuh"
    found = kernels.KernelSource(file, tree.read(file)).changes
    barrier = next(change for change in found if change.kind == "barrier" and change.function == "block_reduce")
    mutator = kernel_tests.Mutator(tree, 1)
    verdict = mutator.try_change(barrier)
    assert (verdict.outcome, verdict.by.split(":")[0]) == ("killed", "plain test_device")
    broken = mutator.try_change(dataclasses.replace(barrier, text=")"))
    assert broken.outcome == "not compiled"
    assert mutator.kill("plain", "test_device", mutator.slots.get()) == ""
    assert tree.read(file) == (ROOT / file).read_text()


WIRE = """#pragma once
struct Exchange {
    void start(const Sync& sync, Stream& main) {
        Slot& slot = slots.of(sync);
        slot.traffic = Traffic();
        order(main, stream, slot.ready);
        comm.all_gather(slot.received, slot.sent, bytes(sync), stream, &slot.traffic);
        for (double& sum : total) { sum += *sums++; }
        if (!applied) { device::copy_values(out, before, n - 1, stream); }
        throw std::logic_error("no such exchange");
    }
};
"""


def test_calls_assignments_and_arithmetic_of_the_wire_are_changed_but_no_declarations_or_orderings():
    found = [(change.kind, change.becomes) for change in wire.WireSource("x.h", WIRE).changes]
    for expected in (("assignment", ";"), ("call", ";"), ("assignment", "for (double& sum : total) { ; }"),
                     ("call", "if (!applied) { ; }"), ("init", "for (double& sum : total) { sum = *sums++; }"),
                     ("boundary", "if (true) { device::copy_values(out, before, n - 1, stream); }"),
                     ("boundary", "if (false) { device::copy_values(out, before, n - 1, stream); }")):
        assert expected in found
    assert sum(kind == "call" for kind, _ in found) == sum(kind == "assignment" for kind, _ in found) == 2
    for change in wire.WireSource("x.h", WIRE).changes:
        changed = source.changed(WIRE, change)
        for kept in ("Slot& slot = slots.of(sync);", "order(main, stream, slot.ready);", "throw std::logic_error("):
            assert kept in changed, change.id


def test_every_file_of_the_wire_has_changes_and_the_selection_has_each_kind_in_each_function():
    found = [change for file in wire.FILES for change in wire.WireSource(file, (ROOT / file).read_text()).changes]
    assert {change.file for change in found} == set(wire.FILES)
    groups = {(change.function, change.kind) for change in found}
    assert {(change.function, change.kind) for change in kernels.selection(found, wire.SELECTED)} == groups
