// The option table: one row per option gives its names, the field that it sets, its help, its range, and
// which processes must agree on it. The parser, --help, config.toml, the Markdown table of the documentation,
// the options in checkpoints and the comparison between processes all iterate over the same rows: a new
// option is a field and a row.
#pragma once
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "llmc/error.h"

// Which processes must give an option the same value.
enum class Scope {
    run,       // all processes of the run
    lockstep,  // all that take each step together: in an elastic run, only the ranks of one worker
    derived,   // fingerprint.h compares what follows from the option, or compares it under a condition
    worker,    // none: processes need not agree
};

using OptionField = std::variant<int*, long*, uint64_t*, float*, double*, bool*, std::string*>;

struct OptionRow {
    std::string names;     // such as "-b,--batch": the long name comes last
    OptionField field;     // its value before parsing is the default
    std::string help;
    Scope scope = Scope::worker;
    CLI::Validator range{};  // an empty one accepts whatever the field can hold
    bool is_saved = true;  // in config.toml and in checkpoints
    std::string section{};
    bool applies = true;   // false: the run ignores the option, so that processes need not agree on it

    std::string name() const { return names.substr(names.rfind("--")); }
};

using OptionTable = std::vector<OptionRow>;
using OptionValues = std::vector<std::pair<std::string, std::string>>;  // (name, value)

inline void add_section(OptionTable& table, const std::string& section, bool applies,
                        const OptionTable& rows) {
    for (const OptionRow& row : rows) {
        table.push_back(row);
        table.back().section = section;
        table.back().applies = applies;
    }
}

// -----------------------------------------------------------------------------------------------------------
// Ranges

// Accepts the finite numbers for which is_good() holds.   words: the range, for --help and the error message
inline CLI::Validator number(const std::string& words, bool (*is_good)(double)) {
    return CLI::Validator(
        [=](std::string& text) {
            double value;
            const bool is_number = CLI::detail::lexical_cast(text, value) && std::isfinite(value);
            return is_number && is_good(value) ? "" : "'" + text + "' is not a number of " + words;
        },
        words);
}

inline const CLI::Validator anything;
inline const CLI::Validator at_least_minus_one = number("at least -1", [](double x) { return x >= -1; });
inline const CLI::Validator at_least_0 = number("at least 0", [](double x) { return x >= 0; });
inline const CLI::Validator at_least_1 = number("at least 1", [](double x) { return x >= 1; });
inline const CLI::Validator above_0 = number("more than 0", [](double x) { return x > 0; });
inline const CLI::Validator from_0_to_1 = number("0 to 1", [](double x) { return x >= 0 && x <= 1; });
inline const CLI::Validator above_0_to_1 =
    number("more than 0 and at most 1", [](double x) { return x > 0 && x <= 1; });
inline const CLI::Validator from_0_below_1 =
    number("at least 0 and less than 1", [](double x) { return x >= 0 && x < 1; });
inline const CLI::Validator zero_or_one = CLI::IsMember({0, 1});

// Accepts the integers that Value can hold, in a long at most 10^12, so that sums and products of steps do
// not overflow. CLI11 alone would take -1 for a large number in an unsigned field, and clamp numbers of more
// than 64 bits.
template <class Value>
CLI::Validator integer() {
    const bool is_long = std::is_same_v<Value, long>;
    const Value most = is_long ? Value(1'000'000'000'000) : std::numeric_limits<Value>::max();
    const Value least = std::is_unsigned_v<Value> ? Value(0) : Value(-most);
    return CLI::Validator(
        [most, least](std::string& text) {
            Value value = 0;
            std::from_chars(text.data(), text.data() + text.size(), value);
            const bool is_good = text == std::to_string(value) && value == std::clamp(value, least, most);
            const std::string range = std::to_string(least) + " to " + std::to_string(most);
            return is_good ? "" : "'" + text + "' is not an integer from " + range;
        },
        "");
}

inline CLI::Validator one_of(const std::vector<std::string>& words) { return CLI::IsMember(words); }

// -----------------------------------------------------------------------------------------------------------
// What iterates over the rows

inline void add_options(CLI::App& app, const OptionTable& table) {
    if (app.get_help_ptr() && app.get_help_ptr()->check_sname("h")) { app.set_help_flag(); }  // CLI11's -h
    for (const OptionRow& row : table) {
        auto add = [&](auto* field) {
            using Value = std::remove_pointer_t<decltype(field)>;
            if constexpr (std::is_same_v<Value, bool>) {
                return app.add_flag(row.names, *field, row.help)->default_str("false");
            } else {
                CLI::Option* option = app.add_option(row.names, *field, row.help);
                if constexpr (std::is_integral_v<Value>) { option->check(integer<Value>()); }
                return option->capture_default_str()->take_last();
            }
        };
        CLI::Option* option = std::visit(add, row.field);
        option->group(row.section);
        option->configurable(row.is_saved);
        if (!row.range.get_description().empty()) { option->check(row.range); }
    }
}

// The value that the field holds now.
inline std::string value_of(const OptionRow& row) {
    auto text = [](auto* field) -> std::string {
        using Value = std::remove_pointer_t<decltype(field)>;
        if constexpr (std::is_same_v<Value, std::string>) {
            return *field;
        } else if constexpr (std::is_same_v<Value, bool>) {
            return *field ? "true" : "false";
        } else if constexpr (std::is_integral_v<Value>) {
            return std::to_string(*field);
        } else {
            return format("%.9g", double(*field));
        }
    };
    return std::visit(text, row.field);
}

inline OptionValues values_of(const OptionTable& table) {
    OptionValues values;
    for (const OptionRow& row : table) { values.emplace_back(row.name(), value_of(row)); }
    return values;
}

// The options of this scope that the run uses: processes compare them.
inline OptionValues values_of(const OptionTable& table, Scope scope) {
    OptionTable compared;
    for (const OptionRow& row : table) {
        if (row.applies && row.scope == scope) { compared.push_back(row); }
    }
    return values_of(compared);
}

// Makes `app` print the fields that the program has changed since they were parsed, for config.toml.
// parsed: values_of(table) at that time
inline void adopt_changes(CLI::App& app, const OptionTable& table, const OptionValues& parsed) {
    for (size_t i = 0; i < table.size(); i++) {
        const std::string value = value_of(table[i]);
        if (value == parsed[i].second) { continue; }
        CLI::Option* option = app.get_option(table[i].name());
        option->clear();
        option->default_str(value);
    }
}

// The options that checkpoints and logs keep, by their names without dashes: each as the user wrote it, or
// the default.
inline OptionValues saved_values(const CLI::App& app, const OptionTable& table) {
    OptionValues values;
    for (const OptionRow& row : table) {
        if (!row.is_saved) { continue; }
        const CLI::Option* option = app.get_option(row.name());
        const bool is_flag = std::holds_alternative<bool*>(row.field);  // =1, =on and so on are "true"
        values.emplace_back(option->get_single_name(), is_flag                ? value_of(row)
                                                       : option->count() > 0 ? option->as<std::string>()
                                                                             : option->get_default_str());
    }
    return values;
}

// For the documentation, in Markdown: all options of `app`, in the order of their definition.
inline void print_options_table(const CLI::App& app) {
    std::string section;
    for (const CLI::Option* option : app.get_options()) {
        if (option->get_group().empty()) { continue; }  // hidden
        if (option->get_group() != section) {
            section = option->get_group();
            printf("\n**%s**\n\n| option | default | |\n|---|---|---|\n", section.c_str());
        }
        std::string names = option->get_name(false, true);
        const size_t comma = names.find(',');
        if (comma != std::string::npos) { names.replace(comma, 1, "` `"); }
        printf("| `%s` | %s | %s |\n", names.c_str(), option->get_default_str().c_str(),
               option->get_description().c_str());
    }
}
