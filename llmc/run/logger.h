// What a run writes down while it goes.
//   main.log        llm.c's, one line a step or evaluation, by process 0: what its plotting scripts read
//   metrics.jsonl   by process 0, and metrics_00001.jsonl, ... by the others: everything measured, one JSON
//                   object a line, "type" first. dev/tools/metrics.md says what each type and field means
//   StatusLine      on a terminal one live line, rewritten in place; piped, a plain line every few seconds
// Times are in seconds; "time" counts from the start of the log. Every line is flushed: a reader may follow.
#pragma once
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/error.h"
#include "llmc/file.h"
#include "llmc/text/tokenizer.h"

// A JSON object of one line, built field by field. What is not a finite number becomes null, and what is not
// UTF-8 becomes U+FFFD.
class JsonLine {
public:
    JsonLine& field(const char* name, const std::string& value) { return raw(name, quoted(value)); }
    JsonLine& field(const char* name, const char* value) { return raw(name, quoted(value)); }
    JsonLine& field(const char* name, double value) { return raw(name, number(value)); }
    JsonLine& field(const char* name, bool value) { return raw(name, value ? "true" : "false"); }
    JsonLine& field(const char* name, int value) { return raw(name, std::to_string(value)); }
    JsonLine& field(const char* name, long value) { return raw(name, std::to_string(value)); }
    JsonLine& field(const char* name, uint64_t value) { return raw(name, std::to_string(value)); }
    JsonLine& field(const char* name, const JsonLine& value) { return raw(name, value.str()); }
    JsonLine& field(const char* name, const std::optional<long>& value) {  // none: null
        return raw(name, value ? std::to_string(*value) : "null");
    }
    JsonLine& field(const char* name, const std::optional<bool>& value) {
        return raw(name, value ? (*value ? "true" : "false") : "null");
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

// Of metrics.jsonl (dev/tools/metrics.md). Readers ignore what they do not know: a new type or field leaves the
// number as it is, one that is gone or means something else raises it.
constexpr int metrics_version = 2;

struct RunMetrics {
    int worker = 0, rank = 0, workers = 1, ranks = 1;
    long parameters = 0;
    std::vector<std::pair<std::string, std::string>> options;  // name and value
    std::optional<long> steps = {};             // of the whole run
    std::vector<double> fragment_offsets = {};  // t_p of each fragment; none without an outer optimizer
};

struct StepMetrics {
    long step = 0;
    double loss = 0, learning_rate = 0, norm = 0, seconds = 0;
    uint64_t tokens = 0;  // that this worker has trained on so far
    double tokens_per_second = 0;
    uint64_t inner_bytes_sent = 0, inner_bytes_received = 0;  // by this process so far
    double loss_zscore = NAN, norm_zscore = NAN;  // NAN until there are enough steps to compare with
    bool skipped = false;                         // the update
    double mfu = NAN;                             // NAN where the device's peak is not known
};

struct SyncMetrics {
    long sync = 0;
    int fragment = 0;
    long send_step = 0, apply_step = 0;
    uint64_t bytes_sent = 0, bytes_received = 0;
    double wire_seconds = 0, waited_seconds = 0;
    uint64_t global_hash = 0;  // of the global parameters that were sent from
    double delta_norm = NAN, mean_norm = NAN, quantization_error = NAN;
    std::vector<double> cosines, mean_cosines;
    // Where workers come and go.
    std::vector<double> contributors = {}, contributor_tokens = {};  // numbers of workers; none: in lock-step
    std::optional<long> decider = {};
    double grace_seconds = NAN;
    std::optional<bool> counted = {};  // this worker
};

// What happened to this worker or was seen by it, where workers come and go.
struct EventMetrics {
    long step = 0;
    std::string kind;
    std::optional<long> sync = {};  // none: of no sync
    int worker = 0;                 // whom it is about
    std::string text;               // for people
};

struct EndMetrics {
    long step = 0;
    double train_seconds = 0;
    uint64_t inner_bytes_sent = 0, outer_bytes_sent = 0;  // by this process in the whole run
    double waited_seconds = 0;
    double log_turn_seconds = NAN, log_thread_seconds = NAN;  // of the sync log; NAN: in lock-step
};

// What the logs of a run that is resumed keep: what came after its checkpoint happens again.
struct LogCut {
    long step = 0;            // the checkpoint's
    long first_sync = 0;      // the first that was not applied
    bool keeps_eval = false;  // of that very step, HellaSwag's too
};

// UserError where the folder, if it is there, holds models or states of a run.
inline void refuse_models(const std::string& folder) {
    std::error_code unreadable;  // one may write into a folder without being allowed to list it
    for (const auto& entry : std::filesystem::directory_iterator(folder, unreadable)) {
        const std::filesystem::path name = entry.path().filename();
        const bool is_of_run = name.string().rfind("model_", 0) == 0 || name.string().rfind("state_", 0) == 0;
        if (is_of_run && name.extension() == ".bin") {
            throw UserError(folder + " already holds the models of a run: give another -o, or -y 1 to go on "
                                     "with it, or remove them");
        }
    }
}

class Logger {
public:
    // Starts the logs of a run in `folder`, which is made where it is missing; an empty name means no logs.
    // process: 0 to processes - 1, over all workers.
    // takes_over: what the folder holds of a run may be replaced; cut: and the logs go on from there.
    // UserError where the folder cannot be written, or else holds models of an earlier run: they would look
    // newer than this run's.
    Logger(const std::string& folder, int process, int processes, bool takes_over = false,
           const std::optional<LogCut>& cut = {})
        : start(Clock::now()) {
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

    // The first line; where the log goes on, one that says since when, as which process and with which
    // options.
    void run(const RunMetrics& m, long resumed_at = 0) {
        JsonLine options;
        for (const auto& [name, value] : m.options) { options.field(name.c_str(), value); }
        JsonLine line;
        if (has_run_line) {
            line.field("type", "resume").field("step", resumed_at);
        } else {
            line.field("type", "run").field("version", metrics_version);
        }
        line.field("time", seconds()).field("unix_time", unix_seconds()).field("worker", m.worker)
            .field("rank", m.rank).field("workers", m.workers).field("ranks", m.ranks)
            .field("parameters", m.parameters).field("steps", m.steps)
            .field("fragment_offsets", m.fragment_offsets).field("options", options);
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

    // accuracy: of `examples` examples, the share whose right ending the model finds likeliest
    void hellaswag(long step, double accuracy, long examples) {
        print(main_log, format("s:%ld eval:%.4f", step, accuracy));
        write(JsonLine().field("type", "hellaswag").field("step", step).field("time", seconds())
                  .field("accuracy", accuracy).field("examples", examples));
    }

    void sync(const SyncMetrics& m) {
        write(JsonLine().field("type", "sync").field("sync", m.sync).field("fragment", m.fragment)
                  .field("send_step", m.send_step).field("apply_step", m.apply_step).field("time", seconds())
                  .field("bytes_sent", m.bytes_sent).field("bytes_received", m.bytes_received)
                  .field("wire_seconds", m.wire_seconds).field("waited_seconds", m.waited_seconds)
                  .field("global_hash", format("%016llx", (unsigned long long)m.global_hash))
                  .field("staleness", m.apply_step - m.send_step).field("delta_norm", m.delta_norm)
                  .field("mean_norm", m.mean_norm).field("quantization_error", m.quantization_error)
                  .field("cosines", m.cosines).field("mean_cosines", m.mean_cosines)
                  .field("contributors", m.contributors).field("contributor_tokens", m.contributor_tokens)
                  .field("decider", m.decider).field("grace_seconds", m.grace_seconds)
                  .field("counted", m.counted));
    }

    void event(const EventMetrics& m) {
        write(JsonLine().field("type", "event").field("step", m.step).field("time", seconds())
                  .field("unix_time", unix_seconds()).field("kind", m.kind).field("sync", m.sync)
                  .field("worker", m.worker).field("text", m.text));
    }

    // Returns when the disk has all that was logged so far. On any thread.
    void sync() const {
        for (const LogFile* file : {&main_log, &metrics}) {
            if (*file && fsync(fileno(file->get())) != 0) {
                throw RunError(format("cannot write the logs: %s", strerror(errno)));
            }
        }
    }

    // paused: seconds for which training stood still for the checkpoint after `step`
    void checkpoint(long step, double paused) {
        write(JsonLine().field("type", "checkpoint").field("step", step).field("time", seconds())
                  .field("paused_seconds", paused));
    }

    void end(const EndMetrics& m) {
        write(JsonLine().field("type", "end").field("step", m.step).field("time", seconds())
                  .field("train_seconds", m.train_seconds).field("inner_bytes_sent", m.inner_bytes_sent)
                  .field("outer_bytes_sent", m.outer_bytes_sent).field("waited_seconds", m.waited_seconds)
                  .field("log_turn_seconds", m.log_turn_seconds)
                  .field("log_thread_seconds", m.log_thread_seconds));
    }

private:
    using Clock = std::chrono::steady_clock;
    struct Close {
        void operator()(FILE* file) const { fclose(file); }
    };
    using LogFile = std::unique_ptr<FILE, Close>;

    static std::string metrics_path(const std::string& folder, int process) {
        return folder + (process == 0 ? "/metrics.jsonl" : format("/metrics_%05d.jsonl", process));
    }

    // There may be logs of more processes than there are now. Those of an earlier run go; those of this one,
    // before it had fewer, end where it goes on. Whose process there still is, that cares for its own.
    static void end_other_logs(const std::string& folder, int processes, const std::optional<LogCut>& cut) {
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
        if (cut) {
            const Kept kept = keep_lines(path, *cut);
            has_run_line = kept.run_line;
            seconds_before = kept.seconds;
        }
        FILE* file = fopen(path.c_str(), cut ? "ae" : "we");
        if (!file) { fail(path, strerror(errno)); }
        return LogFile(file);
    }

    // What there is of a log that goes on.
    struct Kept {
        bool run_line = false;
        double seconds = 0;  // the last time in it
    };

    // Takes out of a log, if it is there, what is not kept: a last line without an end, too.
    static Kept keep_lines(const std::string& path, const LogCut& cut) {
        Kept kept;
        std::ifstream log(path, std::ios::binary);
        if (!log) { return kept; }
        std::string text, line;
        while (std::getline(log, line) && !log.eof()) {
            if (!is_kept(line, cut)) { continue; }
            text += line + "\n";
            kept.run_line = kept.run_line || line.rfind("{\"type\":\"run\"", 0) == 0;
            const size_t time = line.find("\"time\":");
            if (time != std::string::npos) { kept.seconds = strtod(line.c_str() + time + 7, nullptr); }
        }
        write_file(path, [&](OutputFile& file) { file.write(text.data(), text.size()); });
        return kept;
    }

    // Of main.log and of metrics.jsonl. The end of the run comes again.
    static bool is_kept(const std::string& line, const LogCut& cut) {
        auto number = [&](const char* pattern) -> std::optional<long> {
            long value = 0;
            int end = 0;  // of the whole pattern
            const bool found = sscanf(line.c_str(), pattern, &value, &end) == 1 && end > 0;
            return found ? std::optional<long>(value) : std::nullopt;
        };
        for (const char* step : {"s:%ld trl:%n", "{\"type\":\"step\",\"step\":%ld,%n"}) {
            if (const auto n = number(step)) { return *n <= cut.step; }
        }
        for (const char* eval : {"s:%ld tel:%n", "s:%ld eval:%n", "{\"type\":\"eval\",\"step\":%ld,%n",
                                 "{\"type\":\"hellaswag\",\"step\":%ld,%n"}) {
            if (const auto n = number(eval)) { return *n < cut.step || (*n == cut.step && cut.keeps_eval); }
        }
        if (const auto kept = is_kept_sync(line, cut)) { return *kept; }
        if (const auto kept = is_kept_event(line, cut)) { return *kept; }
        for (const char* other : {"{\"type\":\"checkpoint\",\"step\":%ld,%n",
                                  "{\"type\":\"resume\",\"step\":%ld,%n"}) {
            if (const auto n = number(other)) { return *n <= cut.step; }
        }
        return line.rfind("{\"type\":\"run\"", 0) == 0;
    }

    // What the end of a run has merged at its last step is merged again. By the number alone it could not be
    // told: before the run had other fragments, or another H, they had others.
    static std::optional<bool> is_kept_sync(const std::string& line, const LogCut& cut) {
        long sync = 0, apply_step = 0;
        int end = 0;
        const char* pattern =
            "{\"type\":\"sync\",\"sync\":%ld,\"fragment\":%*d,\"send_step\":%*d,\"apply_step\":%ld,%n";
        if (sscanf(line.c_str(), pattern, &sync, &apply_step, &end) != 2 || end == 0) { return std::nullopt; }
        return apply_step < cut.step || (apply_step == cut.step && sync < cut.first_sync);
    }

    // The syncs that the end of a run applies at its last step are applied again; what else happened there
    // has happened.
    static std::optional<bool> is_kept_event(const std::string& line, const LogCut& cut) {
        long step = 0, sync = 0;
        const char* pattern = "{\"type\":\"event\",\"step\":%ld,\"time\":%*[^,],\"unix_time\":%*d,"
                              "\"kind\":\"applied\",\"sync\":%ld";
        const int found = sscanf(line.c_str(), pattern, &step, &sync);  // 1: of another kind
        if (found < 1) { return std::nullopt; }
        return step < cut.step || (step == cut.step && !(found == 2 && sync >= cut.first_sync));
    }

    [[noreturn]] static void fail(const std::string& path, const std::string& why) {
        throw UserError("cannot write " + path + " (" + why + "): give a log folder that can be written");
    }

    double seconds() const {
        return seconds_before + std::chrono::duration<double>(Clock::now() - start).count();
    }
    static long unix_seconds() {
        const auto now = std::chrono::system_clock::now().time_since_epoch();
        return long(std::chrono::duration_cast<std::chrono::seconds>(now).count());
    }
    void write(const JsonLine& line) { print(metrics, line.str()); }

    static void print(const LogFile& file, const std::string& line) {
        if (!file) { return; }
        if (fprintf(file.get(), "%s\n", line.c_str()) < 0 || fflush(file.get()) != 0) {
            throw RunError(format("cannot write the logs: %s", strerror(errno)));
        }
    }

    Clock::time_point start;
    double seconds_before = 0;  // of a log that goes on: its last time
    bool has_run_line = false;
    LogFile main_log, metrics;
};

// "1:02:03" or "02:03", rounded to seconds.
inline std::string clock_text(double seconds) {
    const long s = std::lround(std::min(std::max(seconds, 0.0), 3.6e8));
    return s < 3600 ? format("%02ld:%02ld", s / 60, s % 60)
                    : format("%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
}

// Progress for people. Whoever else prints to the same terminal goes through print(), or calls clear() first.
class StatusLine {
public:
    // interval: the shortest time between two updates that are shown; the first and the last always are.
    StatusLine(FILE* out, bool terminal, double interval)
        : out(out), terminal(terminal), interval(interval), start(Clock::now()) {}
    explicit StatusLine(FILE* out) : StatusLine(out, isatty(fileno(out)), isatty(fileno(out)) ? 0.1 : 5.0) {}
    StatusLine(const StatusLine&) = delete;
    StatusLine& operator=(const StatusLine&) = delete;
    ~StatusLine() { clear(); }

    // Step `step` of `steps` is done.   mfu: model flops utilization, NAN where it is not known
    void update(long step, long steps, double loss, double tokens_per_second, double mfu = NAN) {
        const double now = std::chrono::duration<double>(Clock::now() - start).count();
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

    // Takes the live line away; the next update brings it back.
    void clear() {
        if (!visible) { return; }
        fputs("\r\033[K", out);
        fflush(out);
        visible = false;
    }

private:
    using Clock = std::chrono::steady_clock;

    void show(const std::string& line) {
        if (!terminal) {
            print(line);
            return;
        }
        clear();
        fputs(line.substr(0, columns() - 1).c_str(), out);  // a wrapped line could not be taken back
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
    Clock::time_point start;
    bool visible = false;
    long first_step = -1;
    double first_time = 0, shown_time = 0;
};
