// Slots: buffers for the syncs in flight, by sync number. A slot keeps its address while a stream works on
// it.
#pragma once
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

template <class Slot>
class Slots {
public:
    explicit Slots(int count) {
        for (int i = 0; i < count; i++) { unused.push_back(std::make_unique<Slot>()); }
    }

    bool has(long sync) const { return used.count(sync) != 0; }

    // Before any slot is taken.
    template <class Work>
    void for_each(Work work) {
        for (std::unique_ptr<Slot>& slot : unused) { work(*slot); }
    }

    Slot& take(long sync) {
        if (unused.empty() || has(sync)) { throw std::logic_error("more syncs in flight than buffers"); }
        std::unique_ptr<Slot>& slot = used[sync] = std::move(unused.back());
        unused.pop_back();
        return *slot;
    }

    Slot& of(long sync) {
        if (!has(sync)) { throw std::logic_error("a sync that is not in flight has no buffers"); }
        return *used[sync];
    }

    void give_back(long sync) {
        of(sync);
        unused.push_back(std::move(used[sync]));
        used.erase(sync);
    }

    void give_all_back() { while (!used.empty()) { give_back(used.begin()->first); } }

private:
    std::vector<std::unique_ptr<Slot>> unused;
    std::map<long, std::unique_ptr<Slot>> used;
};
