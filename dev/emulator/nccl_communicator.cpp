// Communicators of the emulated NCCL. Compiled without -fsanitize=thread (see sanitizers.h).
#include "dev/emulator/nccl_communicator.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <thread>

#include "dev/emulator/cublaslt.h"
#include "dev/emulator/device_memory.h"
#include "dev/emulator/emulator.h"
#include "dev/emulator/machine.h"

namespace emulator {

void complain_of_nccl(const std::string& message) {
    fprintf(stderr, "emulator: NCCL: %s\n", message.c_str());
}

// ---- by handle

namespace {

// No handle is used twice: all communicators are kept.
struct Communicators {
    Monitor monitor;  // also of what is not atomic in a communicator
    std::map<ncclComm_t, CommRef> open;
    std::vector<CommRef> all;
};

Communicators& communicators() {
    static Communicators& all = *new Communicators;
    return all;
}

}  // namespace

void keep(const CommRef& comm) {
    Locked lock(communicators().monitor);
    communicators().open[comm.get()] = comm;
    communicators().all.push_back(comm);
}

CommRef find_communicator(ncclComm_t handle) {
    {
        Locked lock(communicators().monitor);
        const auto found = communicators().open.find(handle);
        if (found != communicators().open.end()) { return found->second; }
    }
    complain_of_nccl("use of a communicator that is not there, or no more");
    return nullptr;
}

void forget(ncclComm_t handle) {
    Locked lock(communicators().monitor);
    communicators().open.erase(handle);
}

int sms_of_communicators() {
    Locked lock(communicators().monitor);
    int sms = 0;
    for (const auto& [handle, comm] : communicators().open) {
        if (comm->size > 1 && comm->unfinished > 0) { sms += comm->ctas; }
    }
    return sms;
}

// ---- errors

void set_error(ncclComm& comm, ncclResult_t result, const std::string& what) {
    const std::string message = "rank " + std::to_string(comm.rank) + " of " +
                                (comm.name.empty() ? "a communicator" : comm.name) + ": " + what;
    complain_of_nccl(message);
    Locked lock(communicators().monitor);
    if (comm.error.empty()) { comm.error = message; }
    if (result != ncclSuccess) { comm.state = result; }
}

std::string error_of(ncclComm& comm) {
    Locked lock(communicators().monitor);
    return comm.error;
}

bool gives_up(const ncclComm& comm) { return comm.aborted || sticky_error(); }

namespace {

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
    static const Fault& fault = *[] {
        auto* parsed = new Fault;  // never destroyed: streams may outlive main()
        const char* text = getenv("EMULATOR_NCCL_FAULT");
        if (!text) { return parsed; }
        char kind[16], name[64] = "";
        const int parts = sscanf(text, "%15[a-z]:%d:%lu:%63s", kind, &parsed->rank, &parsed->call, name);
        parsed->kind = kind;
        if (parts < 3 || (parsed->kind != "kill" && parsed->kind != "hang" && parsed->kind != "error")) {
            throw Error("EMULATOR_NCCL_FAULT is kill, hang or error, then :RANK:CALL, then :NAME if wanted");
        }
        parsed->name = name;
        return parsed;
    }();
    return fault;
}

// False: the operation does not take place.
bool survives(ncclComm& comm, uint64_t operation) {
    const Fault& fault = injected_fault();
    if (fault.rank != comm.rank || operation < fault.call) { return true; }
    if (!fault.name.empty() && fault.name != comm.name) { return true; }
    if (operation == fault.call) { complain_of_nccl("injected fault: " + fault.kind); }
    if (fault.kind == "kill") { raise(SIGKILL); }
    if (fault.kind == "error" && operation == fault.call) {
        set_error(comm, ncclRemoteError, "injected error");
    }
    return false;
}

// ---- on a stream

// False: nothing more can come.
bool run_one(ncclComm& comm, const std::function<Peers::Outcome(const Member&, std::string*)>& work) {
    const Peers::Stops stops = [&comm] { return gives_up(comm); };
    std::string error;
    const int state = comm.state;
    if ((state != ncclSuccess && state != ncclInProgress) || !survives(comm, ++comm.operations)) {
        return false;
    }
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

}  // namespace

// ---- calls

bool joins(ncclComm& comm) {
    if (survives(comm, 0)) { return true; }
    spin_until_aborted(comm);
    return false;
}

ncclResult_t start(const CommRef& comm, std::function<void()> work) {
    injected_fault();  // by the caller, before any thread that uses the communicator
    if (comm->blocking) {
        work();
        return ncclResult_t(comm->state.load());
    }
    int expected = ncclSuccess;  // unless an error has come up
    if (!comm->state.compare_exchange_strong(expected, ncclInProgress)) { return ncclResult_t(expected); }
    comm->end_not_seen = true;
    comm->tasks++;
    Random random{settings().seed * 0xD1B54A32D192ED03u ^ uint64_t(comm->rank) << 32 ^ comm->calls++};
    const bool at_once = settings().seed == 0 || random.below(2) == 0;
    const auto microseconds = useconds_t(at_once ? 50 : random.below(5000));
    const bool says_so = settings().seed == 0 || random.below(4) > 0;
    std::thread([comm, work = std::move(work), microseconds] {
        usleep(microseconds);
        work();
        int expected = ncclInProgress;
        comm->state.compare_exchange_strong(expected, ncclSuccess);
        comm->tasks--;
    }).detach();
    return says_so ? ncclInProgress : ncclSuccess;
}

void forget_progress(ncclComm& comm) {
    comm.end_not_seen = false;
    std::vector<StreamRef> ended;
    {
        Locked lock(communicators().monitor);
        ended.swap(comm.in_progress);
    }
    for (const StreamRef& stream : ended) { end_nccl_call(stream); }
}

ncclResult_t ready_result(const CommRef& comm) {
    if (!comm) { return ncclInvalidArgument; }
    if (comm->end_not_seen) {
        complain_of_nccl(
            "a call on a communicator whose last call is still in progress: ncclCommGetAsyncError tells");
        return ncclInvalidArgument;
    }
    return ncclResult_t(comm->state.load());
}

namespace {

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

void enqueue_batch(const CommRef& comm, const Batch& batch) {
    std::vector<PointRef> after;
    if (comm->last_stream && comm->last_stream != batch.stream) { after.push_back(comm->last_operation); }
    const auto work = [comm, operations = batch.operations] { run_operations(*comm, operations); };
    comm->unfinished++;
    comm->last_operation = comm->blocking ? enqueue(batch.stream, batch.name, work, after)
                                          : enqueue_for_nccl(batch.stream, work, after);
    comm->last_stream = batch.stream;
}

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
        if (comm->blocking) { continue; }
        begin_nccl_call(batch.stream);
        Locked lock(communicators().monitor);
        comm->in_progress.push_back(batch.stream);
    }
    return start(comm, [comm, batches] {
        for (const Batch& batch : batches) {
            if (!comm->aborted) { enqueue_batch(comm, batch); }
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
           (DeviceMemory::instance().kind_of(p) != Memory::pageable &&
            DeviceMemory::instance().holds(p, bytes));
}

}  // namespace

void begin_group() { group().depth++; }

ncclResult_t end_group() {
    if (group().depth == 0) { return ncclInvalidUsage; }
    return --group().depth > 0 ? ncclSuccess : submit_group();
}

ncclResult_t request(const char* name, ncclComm_t handle, cudaStream_t stream, Operation operation) {
    const CommRef comm = find_communicator(handle);
    const ncclResult_t status = ready_result(comm);
    if (status != ncclSuccess) { return status; }
    const StreamRef on = find_stream(stream, name);
    const bool broadcasts = operation.call.kind == Collective::broadcast;
    const int other = broadcasts ? operation.call.root : operation.peer;
    if (broadcasts && other != comm->rank) { operation.from = nullptr; }
    if (!on || other < 0 || other >= comm->size || operation.call.type >= ncclNumTypes ||
        !is_accessible(operation.from, source_bytes(operation, comm->size)) ||
        !is_accessible(operation.to, target_bytes(operation, comm->size))) {
        complain_of_nccl(
            std::string(name) +
            ": an invalid stream, rank or type, or a buffer that is too small or not on the device");
        return ncclInvalidArgument;
    }
    group().requests.push_back({comm, on, name, operation});
    return group().depth > 0 ? ncclSuccess : submit_group();
}

}  // namespace emulator
