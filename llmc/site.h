// Site: a place in the source, for messages. As the default of a parameter, Site::here() is the place of the
// call.
#pragma once
#include "llmc/host_device.h"

struct Site {
    const char* file = "";
    int line = 0;

    HD static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};
