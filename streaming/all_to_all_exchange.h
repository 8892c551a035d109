// AllToAllExchange cuts a fragment into as many parts as there are workers. Each worker owns the mean of one:
//
//     all_to_all   part w of every worker's payload goes to worker w
//     on worker w  decodes the M parts, and encodes their mean as a payload
//     all_gather   that payload goes to every worker
//
//     payload of a mean | header | the headers of the M parts | sums | scales | codes |
//
// A process sends and receives 2 (M - 1) / M payloads instead of M - 1, and values are rounded twice. All
// of it runs on the outer stream without the host, which checks all headers before the mean is used. The
// sums are sums of products of the M parts (statistics.h), which only the owner has. Owners, too, may use
// error feedback, for the rounding of their means.
#pragma once
#include <algorithm>

#include "streaming/exchange.h"

class AllToAllExchange : public Exchange {
public:
    // pieces: of each fragment, this process's shard   in_flight: the most exchanges at the same time
    AllToAllExchange(const WireOptions& wire, std::vector<std::vector<Piece>> pieces_, int in_flight,
                     Comm& comm, Stream& stream)
        : Exchange(wire, comm.size(), in_flight, comm, stream), pieces(std::move(pieces_)), me(comm.rank()) {
        std::vector<long> values, owned;  // of each fragment: of the shard, of the part that is owned here
        for (const std::vector<Piece>& one : pieces) {
            values.push_back(one.empty() ? 0 : one.back().first + one.back().count);
            owned.push_back(layout_of(values.back()).values_of(me));
        }
        const long largest = *std::max_element(values.begin(), values.end());
        const long sent = long(layout_of(largest).bytes), mean = long(mean_layout_of(largest).bytes);
        slots.for_each([&](Slot& slot) {
            slot.sent = Buffer<uint8_t>(sent * workers);
            slot.received = Buffer<uint8_t>(sent * workers);
            slot.means = Buffer<uint8_t>(mean * workers);
            slot.headers = HostBuffer<PayloadHeader>(workers * (1 + workers));
            slot.sums = HostBuffer<double>(long(workers) * row_sums(workers));
        });
        own_mean = Buffer<float>(layout_of(largest).part_values);
        own_payload = Buffer<uint8_t>(mean);
        if (wire.error_feedback) { owner_feedback = ErrorFeedback(owned, in_flight); }
    }

    ~AllToAllExchange() override { let_end(stream); }

    void mean(float* out, const Sync& sync, Stream& main) override {
        const uint8_t* means = slots.of(sync.number).means;
        device::dequantize_mean(out, means, 0, 1, mean_layout_of(sync.values), nullptr, main);
    }

private:
    void enqueue(const Sync& sync, Slot& slot) override {
        comm.all_to_all(slot.received, slot.sent, layout(sync).bytes, stream, &slot.traffic);
        encode_mean(sync, slot.received);
        const size_t bytes = mean_layout_of(sync.values).bytes;
        comm.all_gather(slot.means, own_payload, bytes, stream, &slot.traffic);
        device::read_groups(slot.headers.data(), slot.means, bytes, workers, 1 + workers, stream);
        device::read_groups(slot.sums.data(), slot.means + mean_sums_offset(workers), bytes, workers,
                            row_sums(workers), stream);
    }

    Headers check(const Sync& sync, const Slot& slot) const override {
        Headers all;
        all.sums.resize(size_t(row_sums(workers)));
        const double* sums = slot.sums.data();  // added in ascending order, so that all workers get the same
        for (int part = 0; part < workers; part++) {
            const PayloadHeader* headers = slot.headers + part * (1 + workers);
            check_header(headers[0], sync, layout(sync), part, part);
            for (int worker = 0; worker < workers; worker++) {
                check_header(headers[1 + worker], sync, layout(sync), part, worker);
            }
            all.means.push_back(headers[0]);
            all.sent.emplace_back(headers + 1, headers + 1 + workers);
            for (double& sum : all.sums) { sum += *sums++; }
        }
        return all;
    }

    PayloadLayout layout_of(long n) const { return payload_layout(wire.format, n, workers); }
    PayloadLayout mean_layout_of(long n) const { return mean_payload_layout(wire.format, n, workers); }

    // own_payload = the mean of this worker's part, from the received payloads. On the outer stream.
    void encode_mean(const Sync& sync, const uint8_t* received) {
        const PayloadLayout whole = layout(sync), own = mean_layout_of(sync.values).only(me);
        mean_of_payloads(own_mean, weights.data(), received, workers, whole.only(me), stream);
        double* sums = reinterpret_cast<double*>(own_payload + mean_sums_offset(workers));
        device::sum_rows(sums, partial, received, whole.bytes, workers, whole.only(me), own_mean, stream);
        device::write_mean_headers(own_payload, make_header(sync, whole, me, me, 0), received, whole.bytes,
                                   workers, stream);
        device::clear_padding(own_payload, own, stream);
        const Source part{own_mean, nullptr, owner_feedback.begin(sync.fragment, sync.number, stream)};
        const Rounding rounding = wire.rounding(me, sync.number, RandomUse::owner_rounding);
        const long begin = whole.first_of(me);  // the part's first value in the fragment
        // Piece by piece, because values are rounded with the random bits of their places in the model.
        for (const Piece& piece : pieces[size_t(sync.fragment)]) {
            const long first = std::max(piece.first, begin);
            const long end = std::min(piece.first + piece.count, begin + own.values);
            if (first >= end) { continue; }
            device::quantize(own_payload, own, rounding.at(piece.index + uint64_t(first - piece.first)),
                             first - begin, part.from(first - begin), end - first, stream);
        }
    }

    const std::vector<std::vector<Piece>> pieces;
    const int me;
    Buffer<float> own_mean;       // (part); this and the next are used on the outer stream alone
    Buffer<uint8_t> own_payload;  // (payload of a mean)
};
