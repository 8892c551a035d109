// Removal (sync_log.h): once a period a decider removes what nobody needs any more: old payloads and lines,
// and snapshots that have no reader.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "streaming/elastic/sync_log.h"

// After a power cut some files of a folder may be empty: positions that are not of all fragments are ignored.
inline void SyncLog::sweep() {
    auto held = std::make_shared<std::vector<long>>(slots.size(), std::numeric_limits<long>::max());
    chores.push_back(
        {{StoreRequest::list, key("held"), "", ""},
         [this, held](const StoreAnswer& answer, double) { note_held(answer.listing, *held); }});
    chores.push_back(
        {{StoreRequest::list, key("durable"), "", ""}, [this, held](const StoreAnswer& answer, double) {
             std::vector<long> oldest;
             for (size_t p = 0; p < slots.size(); p++) {
                 std::vector<long> durable;
                 for (const auto& [worker, text] : answer.listing) {
                     const std::vector<long> positions = parse_numbers(text);
                     if (positions.size() == slots.size()) { durable.push_back(positions[p]); }
                 }
                 // The newest that is known to be decided.
                 const long index = schedule.index(slots[p].sync) - (slots[p].entry ? 0 : 1);
                 const long kept = rules.oldest_kept(index, options.retain, covered(durable, index));
                 oldest.push_back(std::min(kept, std::max((*held)[p], index - 16 * options.retain)));
             }
             for (const char* what : {"payload/", "sent/"}) { sweep_syncs(key(what), oldest); }
         }});
    sweep_snapshots();
}

// What living workers need that are catching up from a snapshot.
inline void SyncLog::note_held(const std::map<std::string, std::string>& listing, std::vector<long>& held) {
    for (const auto& [want, text] : listing) {
        const Incarnation who = Incarnation::parse(want);
        if (!presence.is_alive(who) || presence.is_at_work(who)) {
            add_removal(key("held"), want);
            continue;
        }
        const std::vector<long> positions = parse_numbers(text);
        if (positions.size() != held.size()) { continue; }
        for (size_t p = 0; p < held.size(); p++) { held[p] = std::min(held[p], positions[p]); }
    }
}

// Up to where the checkpoints of two workers reach, since one of them may be lost.
inline long SyncLog::covered(std::vector<long> positions, long index) const {
    if (!options.checkpoints) { return index; }
    const size_t copies = size_t(std::min(2, options.min_workers));
    if (positions.size() < copies) { return 0; }
    std::sort(positions.rbegin(), positions.rend());
    return positions[copies - 1];
}

// oldest: the oldest sync that is kept, by fragment
inline void SyncLog::sweep_syncs(const std::string& folder, const std::vector<long>& oldest) {
    chores.push_back({{StoreRequest::folders, folder, "", ""}, [=](const StoreAnswer& answer, double) {
                          for (const auto& [name, nothing] : answer.listing) {
                              const long sync = std::atol(name.substr(folder.size()).c_str());
                              if (!is_kept(sync, oldest)) { add_removal(name); }
                          }
                      }});
}

inline bool SyncLog::is_kept(long sync, const std::vector<long>& oldest) const {
    return schedule.index(sync) >= oldest[size_t(schedule.fragment(sync))];
}

// Snapshots whose reader is dead, has restarted, or has read them. Snapshots are listed before the wants;
// otherwise one whose want is just being written would seem to have no reader.
inline void SyncLog::sweep_snapshots() {
    const std::string folder = key("snapshot/");
    auto there = std::make_shared<std::set<std::string>>();
    const auto note = [there](size_t prefix) {
        return [there, prefix](const StoreAnswer& answer, double) {
            for (const auto& [name, text] : answer.listing) { there->insert(name.substr(prefix)); }
        };
    };
    chores.push_back({{StoreRequest::folders, folder, "", ""}, note(folder.size())});
    for (const char* what : {"offer", "giver"}) {
        chores.push_back({{StoreRequest::list, key(what), "", ""}, note(0)});
    }
    chores.push_back(
        {{StoreRequest::list, key("want"), "", ""}, [this, there](const StoreAnswer& answer, double) {
             for (const auto& [want, reason] : answer.listing) {
                 if (presence.is_alive(Incarnation::parse(want))) {
                     there->erase(want);
                 } else {
                     there->insert(want);
                 }
             }
             for (const std::string& want : *there) { remove_snapshot(want); }
         }});
}

inline void SyncLog::remove_snapshot(const std::string& want) {
    for (const char* what : {"want", "giver", "offer"}) { add_removal(key(what), want); }
    add_removal(key("snapshot/" + want));
}

inline std::string SyncLog::numbers(const std::vector<long>& values) {
    std::string text;
    for (long value : values) { text += (text.empty() ? "" : " ") + std::to_string(value); }
    return text;
}

inline std::vector<long> SyncLog::parse_numbers(const std::string& text) {
    std::vector<long> values;
    std::istringstream in(text);
    for (long value; in >> value;) { values.push_back(value); }
    return values;
}
