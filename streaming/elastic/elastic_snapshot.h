// ElasticSnapshot: an elastic worker's snapshot for a checkpoint. What the worker has sent is in the store,
// where a resumed run finds it, so the snapshot waits for no sync. It adds the worker's place in the sync
// log and, as long as it is not known whether a payload counts, the residuals of before that payload: 4
// more bytes per value with error feedback.
#pragma once
#include <limits>
#include <string>
#include <vector>

#include "llmc/state.h"
#include "streaming/snapshot.h"

// Where in the sync log a worker is.
struct LogPlace {
    std::string generation;
    std::vector<long> positions;  // of each fragment: how many of its syncs are applied
    std::vector<bool> sent;       // of each fragment: its next sync has already changed its residuals
};

class ElasticSnapshot : public DilocoSnapshot {
public:
    // The state and the residuals must outlive the snapshot.   values: of the shard
    ElasticSnapshot(OuterState& state, ErrorFeedback& sender, ErrorFeedback& no_owner, long values)
        : DilocoSnapshot(state, sender, no_owner, values, 0, 0), sender(sender) {}

    // Starts the copies. The previous snapshot must have been written or abandoned.
    // syncs: the next one of each fragment
    void begin(const LogPlace& new_place, const std::vector<long>& syncs,
               const std::vector<uint64_t>& tokens_at_send, Stream& main) {
        DilocoSnapshot::begin({}, tokens_at_send, main);
        place = new_place;
        if (residuals_before.count() == 0) { residuals_before = HostBuffer<float>(sender.count()); }
        for (int p = 0; p < int(syncs.size()); p++) {
            if (place.sent[size_t(p)]) {
                sender.save_before(p, syncs[size_t(p)], residuals_before.data(), main);
            }
        }
        record(main);
    }

    std::vector<StateSection> sections() const override {
        std::vector<StateSection> all = DilocoSnapshot::sections();
        if (residuals_before.count() > 0) {
            const size_t bytes = size_t(residuals_before.count()) * sizeof(float);
            all.push_back({"residuals_before", residuals_before.data(), bytes});
        }
        return all;
    }

    void add_fields(Fields& fields) const override {
        DilocoSnapshot::add_fields(fields);
        fields.set("log.generation", place.generation);
        for (size_t p = 0; p < place.positions.size(); p++) {
            fields.set("log.position." + std::to_string(p), place.positions[p]);
            fields.set("log.sent." + std::to_string(p), place.sent[p] ? 1 : 0);
        }
    }

    const LogPlace& log_place() const { return place; }

private:
    ErrorFeedback& sender;
    LogPlace place;
    HostBuffer<float> residuals_before;  // (residuals)
};

inline LogPlace saved_place(const SavedState& state, const Fields& fields, size_t fragments) {
    if (!fields.has("log.generation")) {
        throw UserError(state.path() + " is of a run without --outer-transport store: resume it without, or "
                        "start from its model (-e model_STEP.bin)");
    }
    LogPlace place;
    place.generation = fields.word("log.generation");
    for (size_t p = 0; p < fragments; p++) {
        place.positions.push_back(count_of(fields, "log.position." + std::to_string(p),
                                           std::numeric_limits<long>::max()));
        place.sent.push_back(count_of(fields, "log.sent." + std::to_string(p), 1) == 1);
    }
    return place;
}
