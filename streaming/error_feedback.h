// Error feedback (Seide et al. 2014): the rounding error of a fragment, its residual, is added when the
// fragment is rounded the next time. quantize() updates the residuals; this class keeps them from one sync
// to the next. If this worker's payload is not part of a mean that is applied, its fragment gets back its
// residuals from before the sync. Memory: 4 bytes per value, and as much for each fragment in flight.
#pragma once
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "llmc/buffer.h"
#include "llmc/state.h"
#include "streaming/quantize.h"
#include "streaming/slots.h"

class ErrorFeedback {
public:
    ErrorFeedback() = default;  // no error feedback: all residuals are null

    // values: of each fragment   in_flight: the most syncs at the same time
    ErrorFeedback(const std::vector<long>& values, int in_flight) : values(values), before(in_flight) {
        residuals = Buffer<float>(std::accumulate(values.begin(), values.end(), 0L));
        const long largest = *std::max_element(values.begin(), values.end());
        before.for_each([=](Buffer<float>& residuals) { residuals = Buffer<float>(largest); });
    }

    // The residuals of a fragment, for a sync that will change them.   returns (values), or null
    float* begin(int fragment, long sync, Stream& stream) {
        if (values.empty()) { return nullptr; }
        copy(before.take(sync), of(fragment), fragment, stream);
        return of(fragment);
    }

    // The sync has ended, and its exchange no longer uses the fragment's residuals.
    void end(int fragment, long sync, bool applied, Stream& stream) {
        if (values.empty()) { return; }
        if (!applied) { copy(of(fragment), before.of(sync), fragment, stream); }
        before.give_back(sync);
    }

    // Whether begin() was called for a sync, and end() was not.
    bool is_in_flight(long sync) const { return before.has(sync); }

    // Sets all residuals to zero, with no sync in flight.
    void clear(Stream& stream) {
        if (values.empty()) { return; }
        before.give_all_back();
        device::set_zero(residuals.data(), count(), stream);
    }

    // Sets the residuals of a fragment that is not in flight to zero.
    void clear(int fragment, Stream& stream) {
        if (values.empty() || values[size_t(fragment)] == 0) { return; }
        device::set_zero(of(fragment), values[size_t(fragment)], stream);
    }

    // Of all fragments.
    long count() const { return residuals.count(); }

    // Copies the residuals of a fragment that is not in flight to their place in `out`.
    // out: (count()), of a HostBuffer
    void save(int fragment, float* out, Stream& stream) const {
        if (values.empty() || values[size_t(fragment)] == 0) { return; }
        const long first = first_of(fragment);
        device::copy_to_host_later(out + first, residuals + first, values[size_t(fragment)], stream);
    }

    // The same for its residuals of before a sync in flight.
    void save_before(int fragment, long sync, float* out, Stream& stream) {
        const long n = values[size_t(fragment)];
        device::copy_to_host_later(out + first_of(fragment), before.of(sync).data(), n, stream);
    }

    // Restores what save() has written, while no sync is in flight.   name: of the section
    void load(const SavedState& saved, const std::string& name, Stream& main) {
        if (count() == 0) { return; }  // an owner may have no part of any fragment
        const std::vector<float> all = saved.floats(name, count());
        device::copy_to_device(residuals.data(), all.data(), count(), main);
        main.synchronize();
    }

    // Restores what save_before() has written: the sync is in flight again.
    void load_before(int fragment, long sync, const SavedState& saved, const std::string& name,
                     Stream& main) {
        if (count() == 0) { return; }
        const std::vector<float> all = saved.floats(name, count());
        const long n = values[size_t(fragment)];
        device::copy_to_device(before.take(sync).data(), all.data() + first_of(fragment), n, main);
        main.synchronize();
    }

private:
    long first_of(int fragment) const { return std::accumulate(&values[0], &values[size_t(fragment)], 0L); }
    float* of(int fragment) { return residuals + first_of(fragment); }

    // n may be 0: an owner has no part of a fragment with fewer blocks than there are workers.
    void copy(float* out, const float* inp, int fragment, Stream& stream) {
        const long n = values[size_t(fragment)];
        if (n > 0) { device::copy_values(out, inp, n, stream); }
    }

    std::vector<long> values;
    Buffer<float> residuals;  // (values of all fragments)
    Slots<Buffer<float>> before{0};  // (largest fragment) each, of the syncs in flight
};
