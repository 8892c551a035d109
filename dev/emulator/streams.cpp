// CUDA's runtime: streams and events. Compiled without -fsanitize=thread (see sanitizers.h).
#include <map>

#include "dev/emulator/runtime.h"

namespace emulator {
namespace {

struct Event {
    PointRef last;  // what the last record recorded; null: never recorded, which counts as complete
    bool has_time;
};

// Never destroyed: streams may outlive main().
class Events {
public:
    static Events& instance() {
        static Events& events = *new Events;
        return events;
    }

    cudaEvent_t open(bool has_time) {
        Locked lock(monitor);
        const auto handle = reinterpret_cast<cudaEvent_t>(++opened * 16);  // never used twice
        events[handle] = Event{nullptr, has_time};
        return handle;
    }
    bool close(cudaEvent_t handle) {
        Locked lock(monitor);
        return events.erase(handle) == 1;
    }
    // False if `handle` is none.
    bool get(cudaEvent_t handle, Event* event) {
        Locked lock(monitor);
        const auto found = events.find(handle);
        if (found == events.end()) { return false; }
        *event = found->second;
        return true;
    }
    void record(cudaEvent_t handle, const PointRef& point) {
        Locked lock(monitor);
        const auto found = events.find(handle);
        if (found != events.end()) { found->second.last = point; }
    }

private:
    Monitor monitor;
    std::map<cudaEvent_t, Event> events;
    uintptr_t opened = 0;
};

// As CUDA's, "not ready" stays in cudaGetLastError, too.
cudaError_t ready_result(const PointRef& point) {
    return result(is_done(point) ? cudaSuccess : cudaErrorNotReady);
}

}  // namespace
}  // namespace emulator

using namespace emulator;

// ---- streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    *stream = open_stream((flags & cudaStreamNonBlocking) == 0);
    return result(cudaSuccess);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return handle_result(close_stream(stream)); }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    const StreamRef on = find_stream(stream, "cudaStreamSynchronize");
    if (on) { wait_for(last_point(on)); }
    return handle_result(on != nullptr);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    const StreamRef on = find_stream(stream, "cudaStreamQuery");
    return on ? ready_result(last_point(on)) : handle_result(false);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    const StreamRef on = find_stream(stream, "cudaStreamWaitEvent");
    Event state;
    if (!on || !Events::instance().get(event, &state)) { return handle_result(false); }
    if (state.last) { enqueue(on, "cudaStreamWaitEvent", nullptr, {state.last}); }
    return result(cudaSuccess);
}

// ---- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    *event = Events::instance().open((flags & cudaEventDisableTiming) == 0);
    return result(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) { return handle_result(Events::instance().close(event)); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const StreamRef on = find_stream(stream, "cudaEventRecord");
    Event state;
    if (!on || !Events::instance().get(event, &state)) { return handle_result(false); }
    Events::instance().record(event, enqueue(on, "cudaEventRecord", nullptr));
    return result(cudaSuccess);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    Event state;
    return Events::instance().get(event, &state) ? ready_result(state.last) : handle_result(false);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    Event state;
    if (!Events::instance().get(event, &state)) { return handle_result(false); }
    wait_for(state.last);
    return result(cudaSuccess);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    Event first, second;
    const bool known = Events::instance().get(from, &first) && Events::instance().get(to, &second);
    if (!known || !first.has_time || !second.has_time || !first.last || !second.last) {
        return handle_result(false);
    }
    if (!is_done(first.last) || !is_done(second.last)) { return result(cudaErrorNotReady); }
    *milliseconds = float((second.last->seconds - first.last->seconds) * 1e3);
    return result(cudaSuccess);
}
