// For tests of kernels: values on the host, made at random, converted and compared, and calls that have to be
// refused.
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "llmc/floatx.h"
#include "llmc/random.h"

using Floats = std::vector<float>;

// The number of elements that tests put after a call's own, and that the call must leave alone.
constexpr size_t guard = 32;

// Uniform in [offset - range, offset + range).
inline Floats random_floats(size_t count, uint64_t seed, float range, float offset = 0.0f) {
    Floats values(count);
    for (size_t i = 0; i < count; i++) {
        values[i] = range * (2 * uniform(random_bits(seed, RandomUse::sampling, i).v[0]) - 1) + offset;
    }
    return values;
}

template <class To, class From>
std::vector<To> converted(const std::vector<From>& values) {
    std::vector<To> result;
    result.reserve(values.size());
    for (const From value : values) { result.push_back(To(float(value))); }
    return result;
}

inline std::vector<floatX> to_floatX(const Floats& values) { return converted<floatX>(values); }

template <class T>
Floats to_floats(const std::vector<T>& values) {
    return converted<float>(values);
}

// -0 is not 0 here, and a NaN is the same as itself.
template <class T>
void expect_same_bits(const std::vector<T>& values, const std::vector<T>& expected,
                      const std::string& what = "values") {
    ASSERT_EQ(values.size(), expected.size()) << what;
    for (size_t i = 0; i < values.size(); i++) {
        ASSERT_EQ(memcmp(&values[i], &expected[i], sizeof(T)), 0)
            << what << "[" << i << "] is " << float(values[i]) << " instead of " << float(expected[i]);
    }
}

// `call`, whose only mistake is `wrong`, throws std::invalid_argument, which says where the launcher is.
inline void expect_refused(const std::string& wrong, const std::function<void()>& call) {
    try {
        call();
        ADD_FAILURE() << wrong << ": taken";
    } catch (const std::invalid_argument& error) {
        const std::string place = error.what();
        const bool is_launchers = place.find(".cuh:") != place.npos && place.find("device.cuh") == place.npos;
        EXPECT_TRUE(is_launchers) << wrong << ": " << place;
    }
}
