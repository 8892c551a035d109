// All number formats of the wire, and their names, for tests and benchmarks.
#pragma once
#include <string>
#include <vector>

#include "streaming/formats.h"

inline const std::vector<Format> all_formats = [] {
    std::vector<Format> all;
    for (size_t i = 0; i < format_names.size(); i++) { all.push_back(Format(i)); }
    return all;
}();

inline std::string name_of(Format format) { return format_names[size_t(format)]; }
