// Environment variables for the time of a test.
#pragma once
#include <stdlib.h>

#include <map>
#include <string>

// Variables of the environment while it lives; an empty value means none.
class Environment {
public:
    explicit Environment(const std::map<std::string, std::string>& values) {
        for (const auto& [name, value] : values) {
            const char* const was = getenv(name.c_str());
            before[name] = was ? was : "";
            set(name, value);
        }
    }
    Environment(const std::string& name, const std::string& value)
        : Environment(std::map<std::string, std::string>{{name, value}}) {}
    Environment(const Environment&) = delete;
    ~Environment() {
        for (const auto& [name, value] : before) { set(name, value); }
    }

private:
    static void set(const std::string& name, const std::string& value) {
        value.empty() ? unsetenv(name.c_str()) : setenv(name.c_str(), value.c_str(), 1);
    }
    std::map<std::string, std::string> before;
};
