// The mean of a merged sync (sync_log_means.h) as bytes: the payloads of its contributors decoded, averaged
// as all-gather does, and encoded once more in the wire's format.
//
//     payload of a mean | header | the n headers of what it is a mean of | sums | scales | codes |
//
// It is the payload of all-to-all's means with the fragment in one part, and to nearest it has their values:
// what is rounded are whole blocks. Random bits are those of owner 0, whoever computes it.
//
// On the host, in both builds: nobody's training waits for it. CPU and GPU give the same bits. Cost: about as
// much as a send and, of sums of products, what all-gather's comparison takes (statistics.h); while it is
// computed, n payloads and 4 bytes a value.
#pragma once
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "streaming/exchange.h"
#include "streaming/elastic/sync_log_shard.h"

// By itself from five contributors on, of whom the store is asked for 8 payloads and means in place of 20,
// where these are large: what is saved has to be worth the two ways to the store and back that a mean takes
// longer. (Over 80 ms, with a store's line no wider than a worker's: eight workers from 0.7 MB on at 200
// Mbit/s and from 5 MB on at 1 Gbit/s; five, from 3 MB on at 200 Mbit/s. By dev/simulation.) Never with error
// feedback, which could not give back what the mean's rounding loses.
inline MergedFrom merged_from(const WireOptions& wire) {
    switch (wire.exchange) {
        case ExchangeKind::automatic: return wire.error_feedback ? MergedFrom{} : MergedFrom{5, 2 << 20};
        case ExchangeKind::merged: return {2, 0};
        case ExchangeKind::all_gather:
        case ExchangeKind::all_to_all: break;
    }
    return {};
}

inline PayloadLayout merged_layout(Format format, long n, int contributors) {
    return mean_payload_layout(format, n, contributors, 1);
}

inline void check_size(const std::string& what, size_t bytes, size_t expected) {
    if (bytes == expected) { return; }
    throw RunError(what + format(" was refused: it has %zu bytes, not %zu: do all workers run the same "
                                 "program with the same options?",
                                 bytes, expected));
}

// The header of a payload from the store, checked to be of this worker and sync.
inline PayloadHeader checked_payload_header(const Contribution& one, const Sync& sync, Format format) {
    const PayloadLayout layout = payload_layout(format, sync.values);
    check_size("the payload of worker " + std::to_string(one.worker) + " for " + describe(sync),
               one.payload.size(), layout.bytes);
    PayloadHeader header;
    memcpy(&header, one.payload.data(), sizeof header);
    check_header(header, sync, layout, 0, one.worker);
    return header;
}

// What the payload of a mean begins with.
inline Headers checked_mean_headers(const std::string& mean, const std::vector<int>& workers,
                                    const Sync& sync, Format format) {
    const int count = int(workers.size());
    const PayloadLayout layout = merged_layout(format, sync.values, count);
    check_size("the mean of " + describe(sync), mean.size(), layout.bytes);
    std::vector<PayloadHeader> headers(size_t(1 + count));
    memcpy(headers.data(), mean.data(), headers.size() * sizeof(PayloadHeader));
    check_header(headers[0], sync, layout, 0, workers[0]);
    for (int i = 0; i < count; i++) {
        check_header(headers[size_t(1 + i)], sync, layout, 0, workers[size_t(i)]);
    }
    std::vector<double> sums(size_t(row_sums(count)));
    memcpy(sums.data(), mean.data() + mean_sums_offset(count), sums.size() * sizeof(double));
    return {{{headers.begin() + 1, headers.end()}}, {headers[0]}, sums};
}

// One behind the other.
inline std::vector<uint8_t> side_by_side(const std::vector<Contribution>& contributions, const Sync& sync,
                                         Format format) {
    std::vector<uint8_t> payloads;
    payloads.reserve(contributions.size() * payload_bytes(format, sync.values));
    for (const Contribution& one : contributions) {
        checked_payload_header(one, sync, format);
        payloads.insert(payloads.end(), one.payload.begin(), one.payload.end());
    }
    return payloads;
}

// pieces: of the sync's fragment, this process's shard
inline std::string encode_merged_mean(const WireOptions& wire, const Sync& sync,
                                      const std::vector<Piece>& pieces,
                                      const std::vector<Contribution>& contributions) {
    const int count = int(contributions.size());
    const PayloadLayout sent = payload_layout(wire.format, sync.values);
    const PayloadLayout layout = merged_layout(wire.format, sync.values, count);
    const std::vector<uint8_t> payloads = side_by_side(contributions, sync, wire.format);
    std::vector<float> mean(static_cast<size_t>(sync.values)), weights;
    std::vector<double> partial(static_cast<size_t>(partial_sums(count)));
    std::string out(layout.bytes, '\0');
    uint8_t* bytes = reinterpret_cast<uint8_t*>(out.data());
    cpu::Stream here;  // runs its work at once

    if (wire.token_weights) {
        weights.resize(size_t(count));
        cpu::token_weights(weights.data(), payloads.data(), sent.bytes, count, here);
    }
    cpu::dequantize_mean(mean.data(), payloads.data(), sent.bytes, count, sent,
                         wire.token_weights ? weights.data() : nullptr, here);
    cpu::sum_rows(reinterpret_cast<double*>(bytes + mean_sums_offset(count)), partial.data(), payloads.data(),
                  sent.bytes, count, sent, mean.data(), here);
    cpu::write_mean_headers(bytes, make_header(sync, layout, 0, contributions[0].worker, 0), payloads.data(),
                            sent.bytes, count, here);
    const Rounding rounding = wire.rounding(0, sync.number, RoundingStage::owner);
    for (const Piece& piece : pieces) {
        cpu::quantize(bytes, layout, rounding.at(piece.index), piece.first, {mean.data() + piece.first},
                      piece.count, here);
    }
    return out;
}

// How the store's syncs are merged, for people: a line, or nothing.
// values: of each fragment, this process's shard
inline std::string describe_merging(const WireOptions& wire, const std::vector<long>& values, int workers) {
    const MergedFrom from = merged_from(wire);
    const size_t largest = payload_bytes(wire.format, *std::max_element(values.begin(), values.end()));
    if (!from.contains(size_t(workers), largest)) { return ""; }
    const std::string of_payloads =
        from.bytes > 0 ? format(", with payloads of %zu bytes and more,", from.bytes) : "";
    return format("syncs of %d workers and more%s are merged: who decides one reads the payloads of the "
                  "others and writes their mean, which the others read\n",
                  from.contributors, of_payloads.c_str());
}
