// The outer state of this process's shard: global parameters and momentum, 8 bytes per value, the same bits
// on every worker. It is used one fragment at a time, by the step that sends or receives it.
//
// A resident state lies in device memory. An offloaded one lies in pinned memory of the host, and the device
// has only as many slots as one step needs, each as large as the largest fragment, and a buffer through
// which snapshots are copied. While the model computes step t + 1, a stream of copies fetches the fragments
// that are sent or received at its end:
//
//     copies   fetch(t + 1)  ..................  write back
//     main     forward and backward of t + 1  |  delta or outer step
//
// main waits until a slot is fetched, a fetch waits for main's last use of the slot, and a write-back waits
// for the outer step. Fetches and write-backs share a stream, so a fetch follows all earlier write-backs.
#pragma once
#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "llmc/buffer.h"
#include "llmc/layout.h"
#include "llmc/stream.h"
#include "streaming/schedule.h"

// The most fragments that one step sends or receives.
inline int most_in_a_step(const std::vector<Fragment>& fragments, long H, long overlap) {
    int most = 0;
    for (const Fragment& one : fragments) {
        for (long step : {one.offset + 2 * H, one.offset + 2 * H + overlap}) {
            int now = 0;
            for (const Fragment& other : fragments) { now += is_used(other, step, H, overlap); }
            most = std::max(most, now);
        }
    }
    return most;
}

// Values in the buffer through which snapshots of an offloaded state are copied.   all: of the shard
inline long relay_values(long all) { return std::min(all, long(16) << 20); }

class OuterState {
public:
    // The range of one block, accessible to kernels.
    struct Part {
        Range range;
        long first;                // its first value within the fragment
        float *global, *momentum;  // (range.count)
    };

    // ranges: of each fragment, its blocks' shards   values: of the whole shard
    // largest: values of the largest fragment   slots: of an offloaded state; 0: resident
    OuterState(std::vector<std::vector<Range>> ranges, long values, long largest, int slots)
        : ranges(std::move(ranges)), values(values), slots(size_t(slots)) {
        if (slots == 0) {
            resident_global = Buffer<float>(values);
            resident_momentum = Buffer<float>(values);
            return;
        }
        host_global = HostBuffer<float>(values);
        host_momentum = HostBuffer<float>(values);
        relay = Buffer<float>(relay_values(values));
        for (Slot& slot : this->slots) {
            slot.global = Buffer<float>(largest);
            slot.momentum = Buffer<float>(largest);
        }
        copies.emplace(Stream::Kind::communicate);
    }

    long count() const { return values; }

    // global = local; momentum is zero from the start.   local: (values)
    void start(const float* local, Stream& main) {
        if (!copies) { return device::cast(resident_global.data(), local, values, main); }
        device::copy_to_host_later(host_global.data(), local, values, main);
        order(main, *copies, copied);
    }

    void clear() {
        for (Slot& slot : slots) { slot.fragment = none; }
    }

    // Starts to bring fragment p to the device.
    void fetch(int p) {
        if (!copies) { return; }
        Slot& slot = slot_for(p);
        slot.fragment = p;
        copies->wait(slot.used);
        for_parts(p, [&](const Range& range, long first) {
            device::copy_to_device(slot.global + first, host_global + range.shard, range.count, *copies);
            device::copy_to_device(slot.momentum + first, host_momentum + range.shard, range.count, *copies);
        });
        copies->record(slot.fetched);
    }

    // Fragment p, for work on main from now on. If it was not fetched ahead, it is fetched now; if there is
    // no slot for it, as after a resume with a smaller tau, what was fetched ahead is dropped.
    std::vector<Part> use(int p, Stream& main) {
        Slot* slot = nullptr;
        if (copies) {
            const auto fits = [p](const Slot& one) { return one.fragment == p || one.fragment == none; };
            if (std::none_of(slots.begin(), slots.end(), fits)) { clear(); }
            slot = &slot_for(p);
            if (slot->fragment != p) { fetch(p); }
            main.wait(slot->fetched);
        }
        std::vector<Part> parts;
        for_parts(p, [&](const Range& range, long first) {
            float* global = slot ? slot->global + first : resident_global + range.shard;
            float* momentum = slot ? slot->momentum + first : resident_momentum + range.shard;
            parts.push_back({range, first, global, momentum});
        });
        return parts;
    }

    // All work on main that reads fragment p has been enqueued.
    void end_read(int p, Stream& main) {
        if (copies) { main.record(slot_for(p).used); }
    }

    // All work on main that changes fragment p has been enqueued: starts to write it back.
    void end_write(int p, Stream& main) {
        if (!copies) { return; }
        Slot& slot = slot_for(p);
        order(main, *copies, slot.used);
        for_parts(p, [&](const Range& range, long first) {
            device::copy_to_host_later(host_global + range.shard, slot.global + first, range.count, *copies);
            device::copy_to_host_later(host_momentum + range.shard, slot.momentum + first, range.count,
                                       *copies);
        });
        slot.fragment = none;
    }

    // Copies `count` values from `first` on, as they are when `stream` reaches this call. The caller makes main
    // wait for `stream` before it changes a fragment or saves again.   to_global, to_momentum: HostBuffers
    void save(float* to_global, float* to_momentum, long first, long count, Stream& stream) {
        if (!copies) {
            device::copy_to_host_later(to_global, resident_global + first, count, stream);
            device::copy_to_host_later(to_momentum, resident_momentum + first, count, stream);
            return;
        }
        order(*copies, stream, copied);
        for (auto [to, from] : {std::pair(to_global, host_global + first),
                                std::pair(to_momentum, host_momentum + first)}) {
            // By way of the device, because a copy from host to host would make the host wait.
            for (long at = 0; at < count; at += relay.count()) {
                const long some = std::min(relay.count(), count - at);
                device::copy_to_device(relay.data(), from + at, some, stream);
                device::copy_to_host_later(to + at, relay.data(), some, stream);
            }
        }
    }

    // Restores what save() has written.   from_global, from_momentum: (count), of the host
    void load(const float* from_global, const float* from_momentum, long first, long count, Stream& main) {
        main.synchronize();
        if (copies) {
            copies->synchronize();
            std::copy_n(from_global, count, host_global + first);
            std::copy_n(from_momentum, count, host_momentum + first);
        } else {
            device::copy_to_device(resident_global + first, from_global, count, main);
            device::copy_to_device(resident_momentum + first, from_momentum, count, main);
            main.synchronize();
        }
    }

    // The global parameters, readable by kernels, for work on main from now on.   (values)
    const float* global(Stream& main) {
        if (!copies) { return resident_global.data(); }
        order(*copies, main, copied);
        return host_global.data();
    }

private:
    static constexpr int none = -1;

    struct Slot {
        int fragment = none;
        Buffer<float> global, momentum;  // (largest fragment)
        Event fetched, used;
    };

    // The slot that holds fragment p, or a free one.
    Slot& slot_for(int p) {
        for (int wanted : {p, none}) {
            for (Slot& slot : slots) {
                if (slot.fragment == wanted) { return slot; }
            }
        }
        throw std::logic_error("a step uses more fragments of the outer state than there are slots");
    }

    template <class Work>
    void for_parts(int p, Work work) const {
        long first = 0;
        for (const Range& range : ranges[size_t(p)]) {
            work(range, first);
            first += range.count;
        }
    }

    std::vector<std::vector<Range>> ranges;
    long values;
    Buffer<float> resident_global, resident_momentum;  // (values); offloaded: none
    HostBuffer<float> host_global, host_momentum;      // (values); resident: none
    Buffer<float> relay;                               // (relay_values(values)); resident: none
    std::vector<Slot> slots;
    Event copied;
    std::optional<Stream> copies;  // last: the stream uses the other members until it is destroyed
};
