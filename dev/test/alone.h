// Alone: a communicator of one, for programs that measure or test one rank. It has nobody to talk to.
#pragma once
#include <stdexcept>

#include "llmc/comm.h"

class Alone : public Comm {
public:
    int rank() const override { return 0; }
    int size() const override { return 1; }
    void all_gather(void*, const void*, size_t, Stream&, Traffic*) override { refuse(); }
    void all_to_all(void*, const void*, size_t, Stream&, Traffic*) override { refuse(); }
    void reduce_scatter(float*, const float*, size_t, Stream&, Traffic*) override { refuse(); }
    void all_reduce(float*, size_t, Stream&, Traffic*) override { refuse(); }

private:
    [[noreturn]] static void refuse() { throw std::logic_error("one rank called a collective"); }
};
