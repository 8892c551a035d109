// NCCL between processes, or threads, of one machine. Operations run on their stream, and like NCCL's kernels
// wait there for the other ranks for as long as it takes: only ncclCommAbort frees a stream whose peer is
// gone. Where streams are not asynchronous, an operation is done when its call returns.
//
//     EMULATOR_NCCL_FAULT=KIND:RANK:CALL[:NAME]   at its CALL-th operation (from 1; 0: when it is to join) on
//                                                 a communicator, RANK
//         kill     dies
//         hang     takes part in nothing any more
//         error    reports ncclRemoteError from ncclCommGetAsyncError, and takes part in nothing any more
//                                             NAME: only on communicators with that config.commName
//     EMULATOR_NCCL_SILENT=1   no rank notices the death of another, as over shared memory
//
// Compiled without -fsanitize=thread (see sanitizers.h).
#include <nccl.h>
#include <unistd.h>

#include <cstdio>

#include "dev/emulator/nccl_communicator.h"

using namespace emulator;

// ---- communicators

// Until the operations are done; forever, as NCCL, if they never are.
static void wait_for_operations(const ncclComm& comm) {
    while (comm.unfinished > 0 && !gives_up(comm)) { usleep(500); }
}

static void close_connections(ncclComm& comm) {
    while (comm.on_a_stream > 0) { usleep(500); }
    comm.peers.close();
}

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> count{0};
    *id = {};
    snprintf(id->internal, sizeof(id->internal), "emulated-nccl-%d-%.0f-%d", getpid(), seconds_now() * 1e9,
             ++count);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
    const unsigned int magic_of_initializer = 0xcafebeef;
    if (size < 1 || rank < 0 || rank >= size || (config && config->magic != magic_of_initializer)) {
        return ncclInvalidArgument;
    }
    id.internal[sizeof(id.internal) - 1] = '\0';
    const auto comm = std::make_shared<ncclComm>(id.internal, rank, size);
    comm->blocking = !config || config->blocking != 0;  // undefined means blocking
    if (config && config->commName) { comm->name = config->commName; }
    if (config && config->maxCTAs != NCCL_CONFIG_UNDEF_INT) { comm->ctas = config->maxCTAs; }
    keep(comm);
    *handle = comm.get();
    return start(comm, [comm] {
        if (!joins(*comm)) { return; }
        std::string error;
        const bool connected = comm->peers.connect([&comm] { return gives_up(*comm); }, &error);
        if (!connected && !gives_up(*comm)) { set_error(*comm, ncclSystemError, error); }
    });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
    const CommRef comm = find_communicator(handle);
    if (!comm) { return ncclInvalidArgument; }
    *error = ncclResult_t(comm->state.load());
    if (*error != ncclInProgress) { forget_progress(*comm); }
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
    const CommRef comm = find_communicator(handle);
    const ncclResult_t status = ready_result(comm);
    return status != ncclSuccess ? status : start(comm, [comm] { wait_for_operations(*comm); });
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
    const CommRef comm = find_communicator(handle);
    if (!comm) { return ncclInvalidArgument; }
    while (comm->tasks > 0) { usleep(500); }
    if (comm->state == ncclSuccess) { wait_for_operations(*comm); }
    return ncclCommAbort(handle);
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
    const CommRef comm = find_communicator(handle);
    if (!comm) { return ncclInvalidArgument; }
    comm->aborted = true;
    while (comm->tasks > 0) { usleep(500); }
    forget_progress(*comm);
    close_connections(*comm);
    forget(handle);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* size) {
    const CommRef comm = find_communicator(handle);
    if (!comm) { return ncclInvalidArgument; }
    *size = comm->size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
    const CommRef comm = find_communicator(handle);
    if (!comm) { return ncclInvalidArgument; }
    *rank = comm->rank;
    return ncclSuccess;
}

const char* ncclGetLastError(ncclComm_t handle) {
    static thread_local std::string error;
    const CommRef comm = handle ? find_communicator(handle) : nullptr;
    error = comm ? error_of(*comm) : "";
    return error.c_str();
}

const char* ncclGetErrorString(ncclResult_t result) {
    const char* const names[] = {"no error",
                                 "unhandled cuda error",
                                 "unhandled system error",
                                 "internal error",
                                 "invalid argument",
                                 "invalid usage",
                                 "remote process exited or there was a network error",
                                 "NCCL operation in progress"};
    return result < ncclNumResults ? names[result] : "unknown result code";
}

// ---- operations

ncclResult_t ncclGroupStart() {
    begin_group();
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() { return end_group(); }

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    const Call what{Collective::all_gather, type, ncclSum, 0, count};
    return request(__func__, comm, stream, {what, from, to, 0, __builtin_return_address(0)});
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    const Call what{Collective::reduce_scatter, type, reduction, 0, count};
    return request(__func__, comm, stream, {what, from, to, 0, __builtin_return_address(0)});
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    const Call what{Collective::all_reduce, type, reduction, 0, count};
    return request(__func__, comm, stream, {what, from, to, 0, __builtin_return_address(0)});
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    const Call what{Collective::broadcast, type, ncclSum, root, count};
    return request(__func__, comm, stream, {what, from, to, 0, __builtin_return_address(0)});
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    const Call what{Collective::send_receive, type, ncclSum, 0, count};
    return request(__func__, comm, stream, {what, from, nullptr, peer, __builtin_return_address(0)});
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    const Call what{Collective::send_receive, type, ncclSum, 0, count};
    return request(__func__, comm, stream, {what, nullptr, to, peer, __builtin_return_address(0)});
}
