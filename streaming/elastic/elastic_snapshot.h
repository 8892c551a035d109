// ElasticSnapshot: an elastic worker's snapshot for a checkpoint. What the worker has sent is in the store,
// where a resumed run finds it, so the snapshot waits for no sync. It adds the worker's place in the sync
// log and, as long as it is not known whether a payload counts, the residuals from before that payload: with
// error feedback 4 more bytes per value.
#pragma once
#include <climits>
#include <string>
#include <vector>

#include "llmc/state.h"
#include "streaming/elastic/sync_log_records.h"
#include "streaming/snapshot.h"

// Where in the sync log a worker is.
struct LogPlace {
    std::string generation;
    std::vector<long> positions;  // of each fragment: how many of its syncs are applied
    std::vector<bool> sent;       // of each fragment: its next sync has already changed its residuals
};

class ElasticSnapshot : public DilocoSnapshot {
public:
    // The state and the residuals must outlive the snapshot.
    ElasticSnapshot(OuterState& state, ErrorFeedback& sender, ErrorFeedback& no_owner)
        : DilocoSnapshot(state, sender, no_owner, 0, 0), sender(sender),
          residuals_before(add_array("residuals_before", sender.count())) {}

    // Starts the copies. The previous snapshot must have been written or abandoned.
    // new_place: without `sent`, which this adds
    void begin(const LogPlace& new_place, const SyncSchedule& schedule,
               const std::vector<uint64_t>& tokens_at_send, Stream& copies) {
        DilocoSnapshot::begin({}, tokens_at_send, copies);
        place = new_place;
        fields.set("log.generation", place.generation);
        for (int p = 0; p < schedule.fragments(); p++) {
            const long next = schedule.sync(p, place.positions[size_t(p)]);
            place.sent.push_back(sender.is_in_flight(next));
            fields.set("log.position." + std::to_string(p), place.positions[size_t(p)]);
            fields.set("log.sent." + std::to_string(p), place.sent.back() ? 1 : 0);
            if (place.sent.back()) { sender.save_before(p, next, residuals_before.values, copies); }
        }
        end_copies(copies);
    }

    const LogPlace& log_place() const { return place; }

private:
    ErrorFeedback& sender;
    Array& residuals_before;
    LogPlace place;
};

inline LogPlace saved_place(const SavedState& state, const Fields& fields, size_t fragments) {
    if (!fields.has("log.generation")) {
        throw UserError(state.path() + " belongs to a run without --outer-transport store: resume "
                        "without it, or start from its model (-e model_STEP.bin)");
    }
    LogPlace place;
    place.generation = fields.word("log.generation");
    for (size_t p = 0; p < fragments; p++) {
        const std::string number = std::to_string(p);
        place.positions.push_back(fields.count_up_to(LONG_MAX, "log.position." + number));
        place.sent.push_back(fields.count_up_to(1, "log.sent." + number) == 1);
    }
    return place;
}
