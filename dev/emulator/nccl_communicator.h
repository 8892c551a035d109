// A communicator of the emulated NCCL: its state, its calls from the host to a stream, injected faults.
#pragma once
#include <nccl.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dev/emulator/nccl_operations.h"
#include "dev/emulator/queue.h"

struct ncclComm {
    ncclComm(const std::string& id, int rank, int size) : rank(rank), size(size), peers(id, rank, size) {}

    const int rank, size;
    bool blocking = true;
    int ctas = 0;      // config.maxCTAs; 0: NCCL's choice
    std::string name;  // config.commName
    emulator::Peers peers;
    std::atomic<int> state{ncclSuccess};  // as ncclCommGetAsyncError tells it
    std::atomic<bool> aborted{false};
    std::atomic<int> unfinished{0};   // operations on streams that are not done
    std::atomic<int> on_a_stream{0};  // those that run
    std::atomic<int> tasks{0};        // of a non-blocking communicator: calls whose work is not done
    std::atomic<uint64_t> operations{0};
    uint64_t calls = 0;
    // Non-blocking: the program has not yet seen that its last call is done; and the streams of that call.
    std::atomic<bool> end_not_seen{false};
    std::vector<emulator::StreamRef> in_progress;
    // Operations of one communicator come one after another, whatever their streams.
    emulator::StreamRef last_stream;
    emulator::PointRef last_operation;
    std::string error;
};

namespace emulator {

using CommRef = std::shared_ptr<ncclComm>;

void complain_of_nccl(const std::string& message);
void keep(const CommRef& comm);
// Null, and a complaint, if the handle is of no communicator, or of one that was aborted or destroyed.
CommRef find_communicator(ncclComm_t handle);
void forget(ncclComm_t handle);

void set_error(ncclComm& comm, ncclResult_t result, const std::string& what);
std::string error_of(ncclComm& comm);
bool gives_up(const ncclComm& comm);

// Whether a rank gets past a fault that is injected where communicators are made.
bool joins(ncclComm& comm);

// Calls `work`: for a blocking communicator now; for any other after a while, on a thread of its own. Then
// even ncclSuccess does not mean that it is done: only ncclCommGetAsyncError tells.
ncclResult_t start(const CommRef& comm, std::function<void()> work);
// The program knows now that the call is done: its further work on the streams comes after the call.
void forget_progress(ncclComm& comm);
// Whether another call may be made.
ncclResult_t ready_result(const CommRef& comm);

void begin_group();
ncclResult_t end_group();
// An operation: at once, or with its group. `name`: of NCCL's function.
ncclResult_t request(const char* name, ncclComm_t handle, cudaStream_t stream, Operation operation);

}  // namespace emulator
