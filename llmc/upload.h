// Upload: copies each micro-step's tokens to the device without making the host wait.
#pragma once
#include <algorithm>
#include <array>

#include "llmc/buffer.h"
#include "llmc/layers.h"
#include "llmc/stream.h"

class Upload {
public:
    Upload() = default;
    // count: the largest number of values in one copy
    explicit Upload(long count) {
        for (Slot& slot : slots) { slot.values = HostBuffer<int>(count); }
    }

    // out[i] = values[i], in the stream's order. `values` may change as soon as this returns. Waits only if
    // the stream is behind by as many copies as there are slots.   out: (n), on the device
    void copy(int* out, const int* values, long n, Stream& stream) {
        Slot& slot = slots[next];
        next = (next + 1) % slots.size();
        slot.copied.synchronize();
        std::copy_n(values, n, slot.values.data());
        device::copy_to_device(out, slot.values.data(), n, stream);
        stream.record(slot.copied);
    }

private:
    struct Slot {
        HostBuffer<int> values;
        Event copied;
    };
    std::array<Slot, 4> slots;  // inputs and targets of two micro-steps
    size_t next = 0;
};
