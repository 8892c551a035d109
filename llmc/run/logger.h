// The logs of a run.
//   main.log        as llm.c's, one line a step or evaluation, by process 0: llm.c's plotting scripts read it
//   metrics.jsonl   by process 0, and metrics_00001.jsonl, ... by the others: everything measured, one JSON
//                   object a line, "type" first. dev/tools/metrics.md explains every type and field
//   StatusLine      on a terminal one live line, rewritten in place; piped, a plain line every few seconds
// Times are in seconds; "time" counts from the start of the log. Every line is written at once: a reader may
// follow. A line for which the disk has no room is lost, and the run continues.
#pragma once
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "llmc/clock.h"
#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/owned_array.h"
#include "llmc/text/tokenizer.h"

// A JSON object of one line, built field by field. Numbers that are not finite become null, and bytes that
// are not UTF-8 become U+FFFD.
class JsonLine {
public:
    JsonLine& field(const char* name, const std::string& value) { return raw(name, quoted(value)); }
    JsonLine& field(const char* name, const char* value) { return raw(name, quoted(value)); }
    JsonLine& field(const char* name, double value) { return raw(name, number(value)); }
    JsonLine& field(const char* name, bool value) { return raw(name, value ? "true" : "false"); }
    template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
    JsonLine& field(const char* name, Integer value) { return raw(name, std::to_string(value)); }
    JsonLine& field(const char* name, const JsonLine& value) { return raw(name, value.str()); }
    template <class T>
    JsonLine& field(const char* name, const std::optional<T>& value) {  // none: null
        return value ? field(name, *value) : raw(name, "null");
    }
    JsonLine& field(const char* name, const std::vector<double>& values) {  // none: null
        std::string list;
        for (double value : values) { list += (list.empty() ? "" : ",") + number(value); }
        return raw(name, values.empty() ? "null" : "[" + list + "]");
    }

    std::string str() const { return "{" + text + "}"; }

private:
    JsonLine& raw(const char* name, const std::string& value) {
        text += (text.empty() ? "" : ",") + quoted(name) + ":" + value;
        return *this;
    }

    static std::string number(double value) {  // nine digits: exact for a float
        return std::isfinite(value) ? format("%.9g", value) : "null";
    }

    static std::string quoted(const std::string& value) {
        std::string result = "\"";
        for (size_t at = 0; at < value.size();) {
            const size_t length = utf8_length(value, at);
            const char c = value[at];
            if (length == 0) {
                result += "\\ufffd";
            } else if (c == '"' || c == '\\') {
                result += std::string("\\") + c;
            } else if (uint8_t(c) < 0x20) {
                result += format("\\u%04x", unsigned(uint8_t(c)));
            } else {
                result.append(value, at, length);
            }
            at += std::max<size_t>(length, 1);
        }
        return result + "\"";
    }

    std::string text;
};

// The version of metrics.jsonl (dev/tools/metrics.md). Readers ignore types and fields that they do not know:
// adding one keeps the version; removing one, or changing its meaning, raises it.
constexpr int metrics_version = 2;

struct RunMetrics {
    std::string host, device;  // names
    int worker = 0, rank = 0, workers = 1, ranks = 1;
    long parameters = 0;
    std::vector<std::pair<std::string, std::string>> options;  // name and value
    std::optional<long> steps = {};             // of the whole run; none: not known
    std::vector<double> fragment_offsets = {};  // t_p of each fragment; none without an outer optimizer
};

struct StepMetrics {
    long step = 0;
    double loss = 0, learning_rate = 0, norm = 0, seconds = 0;
    uint64_t tokens = 0;  // of this worker so far
    double tokens_per_second = 0;
    uint64_t inner_bytes_sent = 0, inner_bytes_received = 0;  // by this process so far
    double loss_zscore = NAN, norm_zscore = NAN;  // NAN until there are enough steps to compare with
    bool skipped = false;                         // whether the update was left out
    double mfu = NAN;                             // NAN if the device's peak is not known
};

// Which lines the logs of a resumed run keep: what came after its checkpoint happens again.
struct LogCut {
    long step = 0;            // the checkpoint's
    long first_sync = 0;      // the first sync that was not applied
    bool keeps_eval = false;  // keeps the evaluations of that very step
};

// Throws a UserError if the folder exists and holds models or states of a run.
inline void refuse_models(const std::string& folder) {
    std::error_code unreadable;  // a folder that may be written need not be readable
    for (const auto& entry : std::filesystem::directory_iterator(folder, unreadable)) {
        const std::filesystem::path name = entry.path().filename();
        const bool is_of_run = name.string().rfind("model_", 0) == 0 || name.string().rfind("state_", 0) == 0;
        if (is_of_run && name.extension() == ".bin") {
            throw UserError(folder + " already holds the models of a run: give another -o, or -y 1 to "
                                     "resume it, or remove them");
        }
    }
}

class Logger {
public:
    // Starts the logs of a run in `folder`, which is made if it is missing; an empty name means no logs.
    // process: 0 to processes - 1, over all workers
    // takes_over: what the folder holds of a run may be replaced   cut: the logs continue from there
    // UserError if the folder cannot be written, or holds models of an earlier run and !takes_over: they
    // would look newer than this run's.
    Logger(const std::string& folder, int process, int processes, bool takes_over = false,
           const std::optional<LogCut>& cut = {}) {
        if (folder.empty()) { return; }
        std::error_code error;
        std::filesystem::create_directories(folder, error);
        if (error) { fail(folder, error.message()); }
        if (process == 0) {
            if (!takes_over) { refuse_models(folder); }
            end_other_logs(folder, processes, cut);
            main_log = open(folder + "/main.log", cut);
        }
        metrics = open(metrics_path(folder, process), cut);
    }

    // The first line of a log; or in a log that continues, a line of type "resume" with the same fields.
    void run(const RunMetrics& m, long resumed_at = 0) {
        JsonLine options;
        for (const auto& [name, value] : m.options) { options.field(name.c_str(), value); }
        JsonLine line;
        if (has_run_line) {
            line.field("type", "resume").field("step", resumed_at);
        } else {
            line.field("type", "run").field("version", metrics_version);
        }
        line.field("time", seconds()).field("unix_time", unix_seconds()).field("host", m.host)
            .field("device", m.device).field("worker", m.worker).field("rank", m.rank)
            .field("workers", m.workers).field("ranks", m.ranks).field("parameters", m.parameters)
            .field("steps", m.steps).field("fragment_offsets", m.fragment_offsets)
            .field("options", options);
        write(line);
    }

    void step(const StepMetrics& m) {
        print(main_log, format("s:%ld trl:%.4f lr:%.6f norm:%.2f", m.step, m.loss, m.learning_rate, m.norm));
        write(JsonLine().field("type", "step").field("step", m.step).field("time", seconds())
                  .field("loss", m.loss).field("lr", m.learning_rate).field("norm", m.norm)
                  .field("seconds", m.seconds).field("tokens", m.tokens)
                  .field("tokens_per_second", m.tokens_per_second)
                  .field("inner_bytes_sent", m.inner_bytes_sent)
                  .field("inner_bytes_received", m.inner_bytes_received)
                  .field("loss_zscore", m.loss_zscore).field("norm_zscore", m.norm_zscore)
                  .field("skipped", m.skipped).field("mfu", m.mfu));
    }

    void eval(long step, double loss) {
        print(main_log, format("s:%ld tel:%.4f", step, loss));
        write(JsonLine().field("type", "eval").field("step", step).field("time", seconds())
                  .field("loss", loss));
    }

    // accuracy: the share of `examples` examples whose right ending the model finds most likely
    void hellaswag(long step, double accuracy, long examples) {
        print(main_log, format("s:%ld eval:%.4f", step, accuracy));
        write(JsonLine().field("type", "hellaswag").field("step", step).field("time", seconds())
                  .field("accuracy", accuracy).field("examples", examples));
    }

    // A line of any other type.
    void write(const JsonLine& line) { print(metrics, line.str()); }
    double seconds() const { return seconds_before + now_seconds() - start; }
    static long unix_seconds() { return time(nullptr); }

    // Returns when everything logged so far is on the disk. Any thread may call it.
    void sync() const {
        for (const LogFile* file : {&main_log, &metrics}) {
            if (*file && fsync(fileno(file->get())) != 0) {
                throw RunError(format("cannot write the logs: %s", strerror(errno)));
            }
        }
    }

    // paused: seconds that training stood still for the checkpoint after `step`
    void checkpoint(long step, double paused) {
        write(JsonLine().field("type", "checkpoint").field("step", step).field("time", seconds())
                  .field("paused_seconds", paused));
    }

private:
    using LogFile = Owned<FILE, fclose>;

    static std::string metrics_path(const std::string& folder, int process) {
        return folder + (process == 0 ? "/metrics.jsonl" : format("/metrics_%05d.jsonl", process));
    }

    // Trims or removes the logs of processes that this run no longer has. (Its processes trim their own
    // logs.) If the run continues, its former processes' logs end at its checkpoint; an earlier run's are
    // removed.
    void end_other_logs(const std::string& folder, int processes, const std::optional<LogCut>& cut) {
        for (;; processes++) {
            const std::string path = metrics_path(folder, processes);
            if (!std::filesystem::exists(path)) { return; }
            if (cut) {
                keep_lines(path, *cut);
            } else {
                std::filesystem::remove(path);
            }
        }
    }

    LogFile open(const std::string& path, const std::optional<LogCut>& cut) {
        if (cut) { keep_lines(path, *cut); }
        FILE* file = fopen(path.c_str(), cut ? "ae" : "we");
        if (!file) { fail(path, strerror(errno)); }
        return LogFile(file);
    }

    // Removes from a log, if there is one, the lines that are not kept, and a last line without an end. Sets
    // has_run_line and seconds_before: of several logs, those of the last one stay.
    void keep_lines(const std::string& path, const LogCut& cut) {
        has_run_line = false;
        seconds_before = 0;
        std::ifstream log(path, std::ios::binary);
        if (!log) { return; }
        std::string line;
        off_t bytes = 0;
        bool is_cut = false, is_beginning = true;  // is_beginning: truncating is enough, which needs no room
        while (std::getline(log, line) && !log.eof()) {
            if (!is_kept(line, cut)) {
                is_cut = true;
                continue;
            }
            is_beginning = !is_cut;
            bytes += off_t(line.size()) + 1;
            has_run_line = has_run_line || line.rfind("{\"type\":\"run\"", 0) == 0;
            const size_t time = line.find("\"time\":");
            if (time != std::string::npos) { seconds_before = strtod(line.c_str() + time + 7, nullptr); }
        }
        if (log.bad()) { throw RunError("cannot read " + path); }
        if (is_beginning && truncate(path.c_str(), bytes) != 0) { fail(path, strerror(errno)); }
        if (!is_beginning) { write_file(path, [&](OutputFile& file) { copy_kept(file, path, log, cut); }); }
    }

    // A megabyte at a time: a log of weeks has gigabytes.
    static void copy_kept(OutputFile& file, const std::string& path, std::ifstream& log, const LogCut& cut) {
        std::string text, line;
        log.clear();
        log.seekg(0);
        while (std::getline(log, line) && !log.eof()) {
            if (!is_kept(line, cut)) { continue; }
            text += line + "\n";
            if (text.size() < 1 << 20) { continue; }
            file.write(text.data(), text.size());
            text.clear();
        }
        if (log.bad()) { throw RunError("cannot read " + path); }
        file.write(text.data(), text.size());
    }

    // Whether a line of main.log ("s:20 trl:...") or metrics.jsonl is kept. An `end` line never is: the
    // resumed run writes a new one.
    static bool is_kept(const std::string& line, const LogCut& cut) {
        auto field = [&](const char* name) {
            const size_t at = line.find(format("\"%s\":", name));
            if (at == std::string::npos) { return LONG_MAX; }
            return strtol(line.c_str() + at + strlen(name) + strlen("\"\":"), nullptr, 10);
        };
        char kind[16] = "";
        long step = 0;
        if (sscanf(line.c_str(), "s:%ld %15[a-z]:", &step, kind) != 2) {
            if (sscanf(line.c_str(), "{\"type\":\"%15[a-z]\"", kind) != 1) { return false; }
            step = field(strcmp(kind, "sync") == 0 ? "apply_step" : "step");
        }
        auto is = [&](const char* type) { return strcmp(kind, type) == 0; };
        if (is("run")) { return true; }
        if (is("end") || step != cut.step) { return !is("end") && step < cut.step; }
        if (is("tel") || is("eval") || is("hellaswag")) { return cut.keeps_eval; }
        // The step's last syncs may have to be applied again. Their numbers alone do not tell: the run may
        // have had other fragments, or another H, before.
        const bool is_sync = is("sync") || line.find("\"kind\":\"applied\"") != std::string::npos;
        return !is_sync || field("sync") < cut.first_sync;
    }

    [[noreturn]] static void fail(const std::string& path, const std::string& why) {
        check_disk("cannot write " + path);
        throw UserError("cannot write " + path + " (" + why + "): give a log folder that can be written");
    }

    void print(const LogFile& file, const std::string& line) {
        if (!file || append(fileno(file.get()), line + "\n") || std::exchange(has_lost_lines, true)) { return; }
        fprintf(stderr, "warning: a log cannot be written (%s): lines are lost there, and the run continues\n",
                strerror(errno));
    }

    // All or nothing. False, with errno, if it cannot be written.
    static bool append(int descriptor, const std::string& text) {
        const off_t end = lseek(descriptor, 0, SEEK_END);
        if (write_whole(descriptor, text.data(), text.size())) { return true; }
        const int error = errno;
        if (lseek(descriptor, 0, SEEK_END) == end || ftruncate(descriptor, end) == 0) { errno = error; }
        return false;
    }

    const double start = now_seconds();
    double seconds_before = 0;  // the last time in a log that continues
    bool has_run_line = false, has_lost_lines = false;
    LogFile main_log, metrics;
};

// "1:02:03" or "02:03", rounded to seconds.
inline std::string clock_text(double seconds) {
    const long s = std::lround(std::min(std::max(seconds, 0.0), 3.6e8));
    return s < 3600 ? format("%02ld:%02ld", s / 60, s % 60)
                    : format("%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
}

// Progress for people. All other output to the same terminal must go through print(), or call clear() first.
class StatusLine {
public:
    // interval: seconds between two updates that are shown, at least; the first and the last always are.
    StatusLine(FILE* out, bool terminal, double interval)
        : out(out), terminal(terminal), interval(interval) {}
    StatusLine& operator=(StatusLine&&) = delete;  // which also rules out copies
    ~StatusLine() { clear(); }

    // Step `step` of `steps` is done.   mfu: model flops utilization, NAN if it is not known
    void update(long step, long steps, double loss, double tokens_per_second, double mfu = NAN) {
        const double now = now_seconds();
        if (first_step < 0) {
            first_step = step;
            first_time = now;
        } else if (step < steps && now - shown_time < interval) {
            return;
        }
        shown_time = now;
        std::string line =
            format("step %ld/%ld  loss %.4f  %.0f tokens/s", step, steps, loss, tokens_per_second);
        if (std::isfinite(mfu)) { line += format("  %.1f%% MFU", 100 * mfu); }
        if (step > first_step) {  // the first step is slower and says little about the rest
            const double step_seconds = (now - first_time) / double(step - first_step);
            line += "  " + clock_text(step_seconds * double(steps - step)) + " left";
        }
        show(line);
    }

    // A line that stays, above the live one.
    void print(const std::string& line) {
        clear();
        fprintf(out, "%s\n", line.c_str());
        fflush(out);
    }

    // Removes the live line; the next update brings it back.
    void clear() {
        if (!visible) { return; }
        fputs("\r\033[K", out);
        fflush(out);
        visible = false;
    }

private:
    void show(const std::string& line) {
        if (!terminal) { return print(line); }
        clear();
        fputs(line.substr(0, columns() - 1).c_str(), out);  // a wrapped line could not be removed
        fflush(out);
        visible = true;
    }

    // A process that a launcher has started prints through a pipe: the launcher knows the terminal's width.
    size_t columns() const {
        winsize size;
        if (ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) { return size.ws_col; }
        const char* columns = getenv("DILOCO_COLUMNS");
        const int width = columns ? atoi(columns) : 0;
        return width > 0 ? size_t(width) : 80;
    }

    FILE* out;
    bool terminal;
    double interval;
    bool visible = false;
    long first_step = -1;
    double first_time = 0, shown_time = 0;
};
