// NCCL between processes, or threads, of one machine. Operations run on their stream, and like NCCL's kernels
// wait there for the other ranks for as long as it takes: only ncclCommAbort frees a stream whose peer is
// gone. Where streams are not asynchronous, an operation is done when its call returns.
//
//     EMULATOR_NCCL_FAULT=KIND:RANK:CALL[:NAME]   at its CALL-th operation (from 1) on a communicator, RANK
//         kill     dies
//         hang     takes part in nothing any more
//         error    reports ncclRemoteError from ncclCommGetAsyncError, and takes part in nothing any more
//                                             NAME: only on communicators with that config.commName
//     EMULATOR_NCCL_SILENT=1   no rank notices the death of another, as over shared memory
//
// Compiled without -fsanitize=thread (see sanitizers.h).
#include <nccl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "dev/emulator/device_memory.h"
#include "dev/emulator/emulator.h"
#include "dev/emulator/machine.h"
#include "dev/emulator/nccl_operations.h"
#include "dev/emulator/queue.h"

using namespace emulator;

struct ncclComm {
    ncclComm(const std::string& id, int rank, int size) : rank(rank), size(size), peers(id, rank, size) {}

    const int rank, size;
    bool blocking = true;
    std::string name;
    Peers peers;
    std::atomic<int> state{ncclSuccess};  // as ncclCommGetAsyncError tells it
    std::atomic<bool> aborted{false};
    std::atomic<int> unfinished{0};   // operations that are not done
    std::atomic<int> on_a_stream{0};  // those that run
    std::atomic<int> tasks{0};        // of a non-blocking communicator: calls whose work is not done
    uint64_t calls = 0, operations = 0;
    // Non-blocking: the program has not yet asked, or been told, that its last call is done; and its streams.
    std::atomic<bool> end_not_seen{false};
    std::vector<StreamRef> in_progress;
    std::string error;
};

namespace {

using CommRef = std::shared_ptr<ncclComm>;

void complain(const std::string& message) { fprintf(stderr, "emulator: NCCL: %s\n", message.c_str()); }

// Communicators by handle. No handle is used twice: all communicators are kept.
class Communicators {
public:
    static Communicators& instance() {
        static Communicators& communicators = *new Communicators;
        return communicators;
    }
    void add(const CommRef& comm) {
        Locked lock(monitor);
        open[comm.get()] = comm;
        all.push_back(comm);
    }
    // Null, and a complaint, if there is none.
    CommRef find(ncclComm_t handle) {
        {
            Locked lock(monitor);
            const auto found = open.find(handle);
            if (found != open.end()) { return found->second; }
        }
        complain("use of a communicator that is not there, or no more");
        return nullptr;
    }
    void remove(ncclComm_t handle) {
        Locked lock(monitor);
        open.erase(handle);
    }

    Monitor monitor;  // also of `in_progress` and `error` of all communicators

private:
    std::map<ncclComm_t, CommRef> open;
    std::vector<CommRef> all;
};

void set_error(ncclComm& comm, ncclResult_t result, const std::string& what) {
    const std::string message = "rank " + std::to_string(comm.rank) + " of " +
                                (comm.name.empty() ? "a communicator" : comm.name) + ": " + what;
    complain(message);
    Locked lock(Communicators::instance().monitor);
    if (comm.error.empty()) { comm.error = message; }  // once: a caller may have its address
    if (result != ncclSuccess) { comm.state = result; }
}

bool gives_up(const ncclComm& comm) { return comm.aborted || sticky_error(); }

void spin_until_aborted(const ncclComm& comm) {
    while (!gives_up(comm)) { usleep(1000); }
}

// ---- faults

struct Fault {
    std::string kind, name;
    int rank = -1;
    uint64_t call = 0;
};

const Fault& injected_fault() {
    static const Fault fault = [] {
        Fault parsed;
        const char* text = getenv("EMULATOR_NCCL_FAULT");
        if (!text) { return parsed; }
        char kind[16], name[64] = "";
        if (sscanf(text, "%15[a-z]:%d:%lu:%63s", kind, &parsed.rank, &parsed.call, name) < 3) {
            throw Error("EMULATOR_NCCL_FAULT is KIND:RANK:CALL[:NAME]");
        }
        parsed.kind = kind;
        parsed.name = name;
        return parsed;
    }();
    return fault;
}

// False: the operation does not take place.
bool survives(ncclComm& comm, uint64_t operation) {
    const Fault& fault = injected_fault();
    if (fault.rank != comm.rank || operation < fault.call) { return true; }
    if (!fault.name.empty() && fault.name != comm.name) { return true; }
    if (operation == fault.call) { complain("injected fault: " + fault.kind); }
    if (fault.kind == "kill") { raise(SIGKILL); }
    if (fault.kind == "error" && operation == fault.call) { set_error(comm, ncclRemoteError, "injected error"); }
    return false;
}

// ---- on a stream

// False: nothing more can come.
bool run_one(ncclComm& comm, const std::function<Peers::Outcome(const Member&, std::string*)>& work) {
    const Peers::Stops stops = [&comm] { return gives_up(comm); };
    std::string error;
    const int state = comm.state;
    if ((state != ncclSuccess && state != ncclInProgress) || !survives(comm, ++comm.operations)) { return false; }
    const auto outcome = work({comm.peers, comm.rank, comm.size, stops}, &error);
    static const bool silent = getenv("EMULATOR_NCCL_SILENT") != nullptr;
    if (outcome == Peers::Outcome::lost && !silent) { set_error(comm, ncclRemoteError, error); }
    if (outcome == Peers::Outcome::mismatch) {
        set_error(comm, ncclSuccess, error + ": this operation never ends, and others may be garbage");
    }
    return outcome == Peers::Outcome::done;
}

void run_operations(ncclComm& comm, const std::vector<Operation>& operations) {
    WaitsForOthers waits;
    comm.on_a_stream++;
    std::vector<Operation> transfers;
    bool alive = true;
    for (const Operation& operation : operations) {
        if (operation.call.kind == Collective::send_receive) {
            transfers.push_back(operation);
        } else if (alive && !comm.aborted) {
            alive = run_one(comm, [&](const Member& member, std::string* error) {
                return perform(member, operation, error);
            });
        }
    }
    if (alive && !transfers.empty() && !comm.aborted) {
        alive = run_one(comm, [&](const Member& member, std::string* error) {
            return perform_transfers(member, transfers, error);
        });
    }
    if (!alive) { spin_until_aborted(comm); }
    comm.on_a_stream--;
    comm.unfinished--;
}

// ---- calls

// Of a blocking communicator now; of any other after a while, on a thread of its own.
ncclResult_t start(const CommRef& comm, std::function<void()> work) {
    if (comm->blocking) {
        work();
        return ncclResult_t(comm->state.load());
    }
    comm->state = ncclInProgress;
    comm->end_not_seen = true;
    comm->tasks++;
    Random random{settings().seed * 0xD1B54A32D192ED03u ^ uint64_t(comm->rank) << 32 ^ comm->calls++};
    const bool at_once = settings().seed == 0 || random.below(2) == 0;
    const auto microseconds = useconds_t(at_once ? 50 : random.below(5000));
    std::thread([comm, work = std::move(work), microseconds] {
        usleep(microseconds);
        work();
        int expected = ncclInProgress;
        comm->state.compare_exchange_strong(expected, ncclSuccess);
        comm->tasks--;
    }).detach();
    return ncclInProgress;
}

// The program knows now that the call is done: what it enqueues on the streams comes behind.
void forget_progress(ncclComm& comm) {
    comm.end_not_seen = false;
    std::vector<StreamRef> ended;
    {
        Locked lock(Communicators::instance().monitor);
        ended.swap(comm.in_progress);
    }
    for (const StreamRef& stream : ended) { end_nccl_call(stream); }
}

ncclResult_t ready_result(const CommRef& comm) {
    if (!comm) { return ncclInvalidArgument; }
    if (comm->end_not_seen) {
        complain("a call on a communicator whose last call is still in progress: ncclCommGetAsyncError tells");
        return ncclInvalidArgument;
    }
    return ncclResult_t(comm->state.load());
}

struct Request {
    CommRef comm;
    StreamRef stream;
    const char* name;
    Operation operation;
};

struct Group {
    int depth = 0;
    std::vector<Request> requests;
};

Group& group() {
    static thread_local Group group;
    return group;
}

struct Batch {
    StreamRef stream;
    const char* name;
    std::vector<Operation> operations;
};

// All that a group asks of one communicator, by stream.
ncclResult_t submit(const CommRef& comm, const std::vector<Request>& requests) {
    std::vector<Batch> batches;
    for (const Request& request : requests) {
        if (request.comm != comm) { continue; }
        auto batch = batches.begin();
        while (batch != batches.end() && batch->stream != request.stream) { batch++; }
        if (batch == batches.end()) {
            batch = batches.insert(batch, Batch{request.stream, request.name, {}});
        }
        batch->operations.push_back(request.operation);
    }
    for (const Batch& batch : batches) {
        comm->unfinished++;
        if (comm->blocking) { continue; }
        begin_nccl_call(batch.stream);
        Locked lock(Communicators::instance().monitor);
        comm->in_progress.push_back(batch.stream);
    }
    return start(comm, [comm, batches] {
        for (const Batch& batch : batches) {
            const auto work = [comm, operations = batch.operations] { run_operations(*comm, operations); };
            if (comm->blocking) {
                enqueue(batch.stream, batch.name, work);
            } else if (!comm->aborted) {
                enqueue_for_nccl(batch.stream, work);
            }
        }
    });
}

ncclResult_t submit_group() {
    std::vector<Request> requests;
    requests.swap(group().requests);
    std::vector<CommRef> comms;
    for (const Request& request : requests) {
        bool known = false;
        for (const CommRef& comm : comms) { known |= comm == request.comm; }
        if (!known) { comms.push_back(request.comm); }
    }
    ncclResult_t result = ncclSuccess;
    for (const CommRef& comm : comms) {
        const ncclResult_t own = submit(comm, requests);
        if (own != ncclSuccess && result == ncclSuccess) { result = own; }
    }
    return result;
}

bool is_accessible(const void* p, size_t bytes) {
    return !p || bytes == 0 ||
           (DeviceMemory::instance().kind_of(p) != Memory::pageable && DeviceMemory::instance().holds(p, bytes));
}

ncclResult_t call(const char* name, ncclComm_t handle, cudaStream_t stream, Operation operation) {
    const CommRef comm = Communicators::instance().find(handle);
    const ncclResult_t status = ready_result(comm);
    if (status != ncclSuccess) { return status; }
    const StreamRef on = find_stream(stream, name);
    const bool broadcasts = operation.call.kind == Collective::broadcast;
    const int other = broadcasts ? operation.call.root : operation.peer;
    if (broadcasts && other != comm->rank) { operation.from = nullptr; }
    if (!on || other < 0 || other >= comm->size || operation.call.type >= ncclNumTypes ||
        !is_accessible(operation.from, source_bytes(operation, comm->size)) ||
        !is_accessible(operation.to, target_bytes(operation, comm->size))) {
        complain(std::string(name) +
                 ": an invalid stream, rank or type, or a buffer that is too small or not on the device");
        return ncclInvalidArgument;
    }
    group().requests.push_back({comm, on, name, operation});
    return group().depth > 0 ? ncclSuccess : submit_group();
}

// Until the operations are done; forever, as NCCL, if they never are.
void wait_for_operations(const ncclComm& comm) {
    while (comm.unfinished > 0 && !gives_up(comm)) { usleep(500); }
}

void close_connections(ncclComm& comm) {
    while (comm.on_a_stream > 0) { usleep(500); }
    comm.peers.close();
}

}  // namespace

// ---- communicators

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> count{0};
    *id = {};
    snprintf(id->internal, sizeof(id->internal), "emulated-nccl-%d-%.0f-%d", getpid(), seconds_now() * 1e9, ++count);
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
    Communicators::instance().add(comm);
    *handle = comm.get();
    return start(comm, [comm] {
        std::string error;
        comm->peers.connect([&comm] { return gives_up(*comm); }, &error);
        if (!error.empty()) { set_error(*comm, ncclSystemError, error); }
    });
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
    const CommRef comm = Communicators::instance().find(handle);
    if (!comm) { return ncclInvalidArgument; }
    *error = ncclResult_t(comm->state.load());
    if (*error != ncclInProgress) { forget_progress(*comm); }
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
    const CommRef comm = Communicators::instance().find(handle);
    const ncclResult_t status = ready_result(comm);
    return status != ncclSuccess ? status : start(comm, [comm] { wait_for_operations(*comm); });
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
    const CommRef comm = Communicators::instance().find(handle);
    if (!comm) { return ncclInvalidArgument; }
    while (comm->tasks > 0) { usleep(500); }
    if (comm->state == ncclSuccess) { wait_for_operations(*comm); }
    return ncclCommAbort(handle);
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
    const CommRef comm = Communicators::instance().find(handle);
    if (!comm) { return ncclInvalidArgument; }
    comm->aborted = true;
    while (comm->tasks > 0) { usleep(500); }
    forget_progress(*comm);
    close_connections(*comm);
    Communicators::instance().remove(handle);
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* size) {
    const CommRef comm = Communicators::instance().find(handle);
    if (!comm) { return ncclInvalidArgument; }
    *size = comm->size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
    const CommRef comm = Communicators::instance().find(handle);
    if (!comm) { return ncclInvalidArgument; }
    *rank = comm->rank;
    return ncclSuccess;
}

const char* ncclGetLastError(ncclComm_t handle) {
    if (!handle) { return ""; }
    const CommRef comm = Communicators::instance().find(handle);
    Locked lock(Communicators::instance().monitor);
    return comm ? comm->error.c_str() : "";
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
    group().depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (group().depth == 0) { return ncclInvalidUsage; }
    return --group().depth > 0 ? ncclSuccess : submit_group();
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    const Call what{Collective::all_gather, type, ncclSum, 0, count};
    return call(__func__, comm, stream, {what, from, to, 0, __builtin_return_address(0)});
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    const Call what{Collective::reduce_scatter, type, reduction, 0, count};
    return call(__func__, comm, stream, {what, from, to, 0, __builtin_return_address(0)});
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t reduction, ncclComm_t comm, cudaStream_t stream) {
    const Call what{Collective::all_reduce, type, reduction, 0, count};
    return call(__func__, comm, stream, {what, from, to, 0, __builtin_return_address(0)});
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    const Call what{Collective::broadcast, type, ncclSum, root, count};
    return call(__func__, comm, stream, {what, from, to, 0, __builtin_return_address(0)});
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    const Call what{Collective::send_receive, type, ncclSum, 0, count};
    return call(__func__, comm, stream, {what, from, nullptr, peer, __builtin_return_address(0)});
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    const Call what{Collective::send_receive, type, ncclSum, 0, count};
    return call(__func__, comm, stream, {what, nullptr, to, peer, __builtin_return_address(0)});
}
