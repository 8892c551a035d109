// The logs: llm.c's lines, JSON that any reader takes, and a status line that leaves a terminal tidy.
#include <signal.h>
#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>

#include "dev/test/files.h"
#include "llmc/run/report.h"

namespace test_logger {

std::vector<std::string> lines_of(const std::string& path) {
    std::istringstream text(read_bytes(path));
    std::vector<std::string> lines;
    for (std::string line; std::getline(text, line);) { lines.push_back(line); }
    return lines;
}

// The lines of a log with their times replaced by T.
std::vector<std::string> without_times(const std::string& path) {
    std::vector<std::string> lines = lines_of(path);
    for (std::string& line : lines) {
        for (const std::string name : {"\"time\":", "\"unix_time\":"}) {
            const size_t begin = line.find(name);
            if (begin == std::string::npos) { continue; }
            line.replace(begin, line.find_first_of(",}", begin) - begin, name + "T");
        }
    }
    return lines;
}

void write_sync(Logger& logger, const SyncReport& report, long step) {
    logger.write(sync_line(report, step, logger.seconds()));
}

// Of a sync that was merged in `step`, and for which nobody waited.
void write_sync(Logger& logger, long sync, long step) {
    SyncReport report{};
    report.sync = sync;
    report.idle_from = report.idle_until = Stream().stamp();
    write_sync(logger, report, step);
}

void write_event(Logger& logger, long step, const OuterEvent& event) {
    logger.write(event_line(event, step, logger.seconds(), Logger::unix_seconds()));
}

void write_end(Logger& logger) { logger.write(end_line(0, logger.seconds(), {}, 0, {})); }

// What `write` prints to a stream.
template <typename Write>
std::string printed(Write write) {
    FILE* stream = tmpfile();
    write(stream);
    rewind(stream);
    std::string text;
    for (int c; (c = fgetc(stream)) != EOF;) { text += char(c); }
    fclose(stream);
    return text;
}

TEST(Logger, main_log_is_llmcs) {
    TemporaryFolder folder;
    Logger logger(folder / "new/log", 0, 1);
    logger.eval(0, 5.123456);
    StepMetrics step;
    step.step = 1, step.loss = 4.98765, step.learning_rate = 3e-4, step.norm = 1.2345;
    logger.step(step);
    logger.hellaswag(1, 0.29446, 10042);
    EXPECT_EQ(read_bytes(folder / "new/log/main.log"),
              "s:0 tel:5.1235\n"
              "s:1 trl:4.9877 lr:0.000300 norm:1.23\n"
              "s:1 eval:0.2945\n");
}

TEST(Logger, metrics_hold_every_field_one_object_a_line) {
    TemporaryFolder folder;
    Logger logger(folder.name(), 0, 2);
    RunMetrics run{"a.example.org", "CPU", 0, 0, 2, 1, 812345, {}, 21, {0, 7, 14}};
    run.options = {{"--lr", "0.001"}, {"--output", "a \"b\\c\"\n"}};
    logger.run(run);
    logger.step({1, 4.5f, 3e-4f, 1.25, 0.5, 4096, 8192, 10, 20});
    logger.step({2, 4.5, 0.5, 1.25, 0.5, 4096, 8192, 10, 20, -0.5, 3.5, true, 0.375});
    logger.eval(1, 4.25);
    logger.hellaswag(1, 0.28125, 10042);
    Stream stream;
    SyncReport two{7, 2, 20, 0, {6000000000u, 5, 0.125}, stream.stamp(), {}, 0xfedcba9876543210u, {},
                   {0.5, 0.0625, {1, NAN, -0.125}, {}}, std::make_shared<HostBuffer<float>>(1)};
    two.mean_square->data()[0] = 0.0625;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    two.idle_until = stream.stamp();
    write_sync(logger, two, 23);
    SyncReport many{};  // workers
    many.idle_from = many.idle_until = stream.stamp();
    many.statistics.mean_cosines = {0.5};
    many.log = LogReport{{{1, 4096}, {3, 512}}, false, 3, 1.5};
    write_sync(logger, many, 0);
    write_event(logger, 20, {"late", {}, 2, "is late", false});
    Totals totals;
    totals.train_seconds = 9.5, totals.outer.bytes_sent = 2, totals.waited_seconds = 0.75;
    logger.write(end_line(21, logger.seconds(), totals, 1, {0.5}));
    const std::vector<std::string> expected = {
        R"({"type":"run","version":2,"time":T,"unix_time":T,"host":"a.example.org","device":"CPU",)"
        R"("worker":0,"rank":0,"workers":2,"ranks":1,"parameters":812345,"steps":21,"fragment_offsets":[0,7,14],)"
        R"("options":{"--lr":"0.001","--output":"a \"b\\c\"\u000a"}})",
        R"({"type":"step","step":1,"time":T,"loss":4.5,"lr":0.000300000014,"norm":1.25,"seconds":0.5,)"
        R"("tokens":4096,"tokens_per_second":8192,"inner_bytes_sent":10,"inner_bytes_received":20,)"
        R"("loss_zscore":null,"norm_zscore":null,"skipped":false,"mfu":null})",
        R"({"type":"step","step":2,"time":T,"loss":4.5,"lr":0.5,"norm":1.25,"seconds":0.5,)"
        R"("tokens":4096,"tokens_per_second":8192,"inner_bytes_sent":10,"inner_bytes_received":20,)"
        R"("loss_zscore":-0.5,"norm_zscore":3.5,"skipped":true,"mfu":0.375})",
        R"({"type":"eval","step":1,"time":T,"loss":4.25})",
        R"({"type":"hellaswag","step":1,"time":T,"accuracy":0.28125,"examples":10042})",
        R"({"type":"sync","sync":7,"fragment":2,"send_step":20,"apply_step":23,"time":T,)"
        R"("bytes_sent":6000000000,"bytes_received":5,"wire_seconds":0.125,"waited_seconds":)" +
            format("%.9g", two.waited_seconds()) + R"(,"global_hash":"fedcba9876543210",)"
        R"("staleness":3,"delta_norm":0.5,"mean_norm":0.25,)"
        R"("quantization_error":0.0625,"cosines":[1,null,-0.125],"mean_cosines":null,)"
        R"("contributors":null,"contributor_tokens":null,"decider":null,"grace_seconds":null,)"
        R"("counted":null})",
        R"({"type":"sync","sync":0,"fragment":0,"send_step":0,"apply_step":0,"time":T,"bytes_sent":0,)"
        R"("bytes_received":0,"wire_seconds":0,"waited_seconds":0,"global_hash":"0000000000000000",)"
        R"("staleness":0,"delta_norm":null,"mean_norm":null,"quantization_error":null,"cosines":null,)"
        R"("mean_cosines":[0.5],)"
        R"("contributors":[1,3],"contributor_tokens":[4096,512],"decider":3,"grace_seconds":1.5,)"
        R"("counted":false})",
        R"({"type":"event","step":20,"time":T,"unix_time":T,"kind":"late","sync":null,"worker":2,)"
        R"("text":"is late"})",
        R"({"type":"end","step":21,"time":T,"train_seconds":9.5,"inner_bytes_sent":1,"outer_bytes_sent":2,)"
        R"("waited_seconds":0.75,"log_turn_seconds":0.5,"log_thread_seconds":null})"};
    EXPECT_EQ(without_times(folder / "metrics.jsonl"), expected);
}

TEST(Logger, lines_are_there_at_once_and_time_goes_on) {
    TemporaryFolder folder;
    Logger logger(folder.name(), 0, 1);
    double last = -1;
    for (int step = 1; step <= 3; step++) {
        logger.eval(step, 1.0);
        const std::vector<std::string> lines = lines_of(folder / "metrics.jsonl");
        ASSERT_EQ(lines.size(), size_t(step));
        const double time = std::stod(lines.back().substr(lines.back().find("\"time\":") + 7));
        EXPECT_GT(time, last);
        EXPECT_LT(time, 60);
        last = time;
    }
}

// A file may not grow beyond a limit that lies within the line of step 2. So a part of that line is written.
TEST(Logger, a_line_without_room_is_lost_as_a_whole_and_said_once) {
    TemporaryFolder folder;
    Logger logger(folder.name(), 0, 1);
    const auto log = [&](long step) {
        StepMetrics m;
        m.step = step;
        logger.step(m);
    };
    log(1);
    rlimit before;
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    rlimit less = before;
    less.rlim_cur = read_bytes(folder / "metrics.jsonl").size() + 50;
    const auto handler = signal(SIGXFSZ, SIG_IGN);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &less), 0);
    testing::internal::CaptureStderr();
    log(2);
    log(3);
    const std::string said = testing::internal::GetCapturedStderr();
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, handler);
    log(4);
    EXPECT_EQ(said,
              "warning: a log cannot be written (File too large): lines are lost there, and the run continues\n");
    const std::vector<std::string> lines = lines_of(folder / "metrics.jsonl");
    ASSERT_EQ(lines.size(), 2u);
    EXPECT_EQ(lines[0].rfind("{\"type\":\"step\",\"step\":1,", 0), 0u) << lines[0];
    EXPECT_EQ(lines[1].rfind("{\"type\":\"step\",\"step\":4,", 0), 0u) << lines[1];
}

TEST(Logger, what_is_not_a_number_becomes_null) {
    const double infinity = std::numeric_limits<double>::infinity();
    JsonLine line;
    line.field("a", std::nan("")).field("b", infinity).field("c", -infinity).field("d", 0.1f);
    EXPECT_EQ(line.str(), R"({"a":null,"b":null,"c":null,"d":0.100000001})");
}

TEST(Logger, text_that_is_not_utf8_becomes_valid_json) {
    JsonLine line;  // a byte alone, a character cut off, a whole one
    line.field("a", "x\xe9y").field("b", "\xe2\x80").field("c", "\xc3\xa9\xf0\x9f\x98\x80");
    EXPECT_EQ(line.str(), R"({"a":"x\ufffdy","b":"\ufffd\ufffd",)"
                          "\"c\":\"\xc3\xa9\xf0\x9f\x98\x80\"}");
}

TEST(Logger, other_processes_write_their_own_metrics_and_no_main_log) {
    TemporaryFolder folder;
    Logger(folder.name(), 3, 4).eval(1, 2.0);
    EXPECT_EQ(lines_of(folder / "metrics_00003.jsonl").size(), 1u);
    EXPECT_FALSE(std::filesystem::exists(folder / "main.log"));
    EXPECT_FALSE(std::filesystem::exists(folder / "metrics.jsonl"));
}

TEST(Logger, a_new_run_leaves_nothing_of_an_older_one) {
    TemporaryFolder folder;
    for (int process : {0, 1, 2, 3}) { Logger(folder.name(), process, 4).eval(1, 2.0); }
    for (int process : {1, 0}) { Logger(folder.name(), process, 2); }
    EXPECT_EQ(read_bytes(folder / "main.log"), "");
    EXPECT_EQ(read_bytes(folder / "metrics.jsonl"), "");
    EXPECT_EQ(read_bytes(folder / "metrics_00001.jsonl"), "");
    EXPECT_FALSE(std::filesystem::exists(folder / "metrics_00002.jsonl"));
    EXPECT_FALSE(std::filesystem::exists(folder / "metrics_00003.jsonl"));
}

TEST(Logger, a_folder_with_the_models_of_a_run_is_refused_and_left_alone) {
    TemporaryFolder folder;
    Logger(folder.name(), 0, 1).eval(1, 2.0);
    write_bytes(folder / "model_00000010.bin", "");
    const std::string message = user_error([&] { Logger(folder.name(), 0, 1); });
    EXPECT_TRUE(contains(message, folder.name() + " already holds the models of a run"));
    EXPECT_EQ(lines_of(folder / "metrics.jsonl").size(), 1u);
    EXPECT_EQ(lines_of(folder / "main.log").size(), 1u);
    EXPECT_NO_THROW(Logger(folder.name(), 0, 1, true));
    std::filesystem::rename(folder / "model_00000010.bin", folder / "state_00000010_00000.bin");
    EXPECT_TRUE(contains(user_error([&] { Logger(folder.name(), 0, 1); }), "-y 1"));
    std::filesystem::remove(folder / "state_00000010_00000.bin");
    EXPECT_NO_THROW(Logger(folder.name(), 0, 1));
}

TEST(Logger, a_resumed_run_goes_on_without_what_it_does_again) {
    TemporaryFolder folder;
    auto write = [](Logger& logger, long from, long to) {
        for (long n = from; n <= to; n++) {
            StepMetrics step;
            step.step = n;
            logger.step(step);
            if (n > 2) { write_sync(logger, n - 2, n); }  // in flight for two steps
            logger.eval(n, double(n));
            logger.hellaswag(n, 0.25, 10);
            if (n % 3 == 0) { logger.checkpoint(n, 0.5); }
        }
    };
    {
        Logger logger(folder.name(), 0, 2);
        logger.run({});
        write(logger, 1, 6);
        write_end(logger);
    }
    const std::vector<std::string> whole = without_times(folder / "metrics.jsonl");
    const std::string main_log = read_bytes(folder / "main.log");
    std::ofstream(folder / "metrics.jsonl", std::ios::app) << R"({"type":"step","step":2,"ti)";  // torn
    Logger logger(folder.name(), 0, 2, true, LogCut{3, 2, true});
    const std::vector<std::string> kept = without_times(folder / "metrics.jsonl");
    EXPECT_EQ(kept, std::vector<std::string>(whole.begin(), whole.begin() + 12));
    logger.run({}, 3);
    write(logger, 4, 6);
    write_end(logger);
    std::vector<std::string> resumed = without_times(folder / "metrics.jsonl");
    EXPECT_EQ(resumed[12].rfind(R"({"type":"resume","step":3,)", 0), 0u);
    resumed.erase(resumed.begin() + 12);
    EXPECT_EQ(resumed, whole);
    EXPECT_EQ(read_bytes(folder / "main.log"), main_log);
}

TEST(Logger, a_run_that_goes_on_with_fewer_processes_keeps_what_the_others_have_written_by_then) {
    TemporaryFolder folder;
    for (int process : {0, 1, 2}) {
        Logger logger(folder.name(), process, 3);
        logger.run({"", "", process, 0, 3, 1, 0, {}});
        for (long step : {1, 2, 3}) { logger.eval(step, 1.0); }
    }
    Logger logger(folder.name(), 0, 1, true, LogCut{2, 0, true});
    for (int process : {1, 2}) {
        EXPECT_EQ(lines_of(folder / format("metrics_%05d.jsonl", process)).size(), 3u);
    }
    logger.run({"", "", 0, 0, 1, 1, 0, {}}, 2);
    EXPECT_EQ(without_times(folder / "metrics.jsonl").back(),
              R"({"type":"resume","step":2,"time":T,"unix_time":T,"host":"","device":"","worker":0,)"
              R"("rank":0,"workers":1,"ranks":1,"parameters":0,"steps":null,"fragment_offsets":null,"options":{}})");
}

TEST(Logger, syncs_are_kept_by_the_step_that_merged_them_for_other_fragments_have_other_numbers) {
    TemporaryFolder folder;
    {
        Logger logger(folder.name(), 0, 1);
        logger.run({});
        for (long step : {1, 2, 3}) { write_sync(logger, 40 + step, step); }
        for (long step : {4, 5, 6}) { write_sync(logger, 3 + step, step); }  // resumed, with fewer fragments
        write_sync(logger, 10, 6);                                           // at the end of that run
        write_sync(logger, 10, 7);
    }
    const std::vector<std::string> whole = without_times(folder / "metrics.jsonl");
    Logger logger(folder.name(), 0, 1, true, LogCut{6, 10, true});
    EXPECT_EQ(without_times(folder / "metrics.jsonl"),
              std::vector<std::string>(whole.begin(), whole.end() - 2));
}

TEST(Logger, events_that_are_not_done_again_are_kept) {
    TemporaryFolder folder;
    {
        Logger logger(folder.name(), 1, 2);
        logger.run({});
        write_event(logger, 0, {"starts", {}, 1, "starts as 1.1", false});
        write_event(logger, 4, {"late", 7, 0, "is late", false});
        write_event(logger, 5, {"applied", 2, 1, "applies sync 2", false});
        write_event(logger, 5, {"applied", 3, 1, "applies sync 3", false});  // of an earlier, shorter run
        write_event(logger, 6, {"decided", 7, 1, "decides sync 7", false});
        write_event(logger, 6, {"gone", {}, 0, "is gone", false});
        write_event(logger, 6, {"applied", 2, 1, "applies sync 2", false});
        write_event(logger, 6, {"applied", 3, 1, "applies sync 3", false});
        write_event(logger, 7, {"back", {}, 0, "is back", false});
        write_event(logger, 7, {"applied", 2, 1, "applies sync 2", false});
    }
    const std::vector<std::string> whole = without_times(folder / "metrics_00001.jsonl");
    { Logger logger(folder.name(), 1, 2, true, LogCut{6, 3, true}); }
    EXPECT_EQ(without_times(folder / "metrics_00001.jsonl"),
              std::vector<std::string>(whole.begin(), whole.end() - 3));
    { Logger logger(folder.name(), 1, 2, true, LogCut{3, 0, true}); }
    EXPECT_EQ(without_times(folder / "metrics_00001.jsonl"),
              std::vector<std::string>(whole.begin(), whole.begin() + 2));
}

TEST(Logger, evaluations_of_the_step_that_a_run_goes_on_from_are_kept_only_where_they_do_not_come_again) {
    for (bool keeps_eval : {true, false}) {
        TemporaryFolder folder;
        {
            Logger logger(folder.name(), 0, 1);
            logger.run({});
            for (long step : {4, 8, 12}) {
                logger.eval(step, 2.0);
                logger.hellaswag(step, 0.25, 10);
            }
        }
        const std::vector<std::string> whole = without_times(folder / "metrics.jsonl");
        Logger logger(folder.name(), 0, 1, true, LogCut{8, 0, keeps_eval});
        const long steps = keeps_eval ? 2 : 1;
        EXPECT_EQ(without_times(folder / "metrics.jsonl"),
                  std::vector<std::string>(whole.begin(), whole.begin() + 1 + 2 * steps));
        const std::string first = "s:4 tel:2.0000\ns:4 eval:0.2500\n";
        EXPECT_EQ(read_bytes(folder / "main.log"),
                  keeps_eval ? first + "s:8 tel:2.0000\ns:8 eval:0.2500\n" : first);
    }
}

TEST(Logger, a_log_that_goes_on_has_times_that_go_on_and_one_that_is_missing_begins) {
    TemporaryFolder folder;
    std::ofstream(folder / "metrics.jsonl") << R"({"type":"run","time":1})" << "\n"
                                            << R"({"type":"eval","step":1,"time":250.5,"loss":1})" << "\n"
                                            << R"({"type":"eval","step":2,"time":300,"loss":1})" << "\n";
    Logger logger(folder.name(), 0, 1, true, LogCut{2, 0, false});  // the eval of step 2 comes again
    logger.eval(2, 1);
    const std::string last = lines_of(folder / "metrics.jsonl").back();
    const double time = strtod(last.c_str() + last.find("\"time\":") + 7, nullptr);
    EXPECT_GE(time, 250.5);
    EXPECT_LT(time, 300);
    Logger other(folder / "new", 0, 1, true, LogCut{2, 0, false});
    other.run({}, 2);
    EXPECT_EQ(lines_of(folder / "new/metrics.jsonl")[0].rfind(R"({"type":"run")", 0), 0u);
}

TEST(Logger, without_a_folder_nothing_is_written_and_an_impossible_one_is_an_error) {
    Logger none("", 0, 1);
    EXPECT_NO_THROW(none.eval(1, 2.0));
    TemporaryFolder folder;
    write_bytes(folder / "file", "");
    EXPECT_TRUE(contains(user_error([&] { Logger(folder / "file/log", 0, 1); }), folder / "file/log"));
    std::filesystem::create_directories(folder / "log/main.log");
    EXPECT_TRUE(contains(user_error([&] { Logger(folder / "log", 0, 1); }), "main.log"));
}

TEST(StatusLine, is_rewritten_in_place_on_a_terminal_and_gone_before_other_output) {
    const std::string text = printed([](FILE* out) {
        StatusLine status(out, true, 0);
        status.update(1, 3, 4.56789, 1234.5);
        status.print("val loss 4.2");
        status.update(2, 3, 3.5, 1300);
    });
    const std::string clear = "\r\033[K";
    EXPECT_EQ(text, "step 1/3  loss 4.5679  1234 tokens/s" + clear + "val loss 4.2\n" +
                        "step 2/3  loss 3.5000  1300 tokens/s  00:00 left" + clear);
}

TEST(StatusLine, prints_plain_lines_when_piped_the_first_the_last_and_few_between) {
    const std::string text = printed([](FILE* out) {
        StatusLine status(out, false, 3600);
        for (long step = 1; step <= 100; step++) { status.update(step, 100, 2.0, 1000); }
    });
    EXPECT_EQ(text, "step 1/100  loss 2.0000  1000 tokens/s\n"
                    "step 100/100  loss 2.0000  1000 tokens/s  00:00 left\n");
}

TEST(StatusLine, never_wraps) {
    auto shown = [] {  // no terminal tells its width here
        return printed([](FILE* out) {
            StatusLine(out, true, 0).update(1000000000000, 2000000000000, 1e30, 1e30);
        }).find("\r\033[K");
    };
    EXPECT_EQ(shown(), 79u);
    setenv("DILOCO_COLUMNS", "60", 1);
    EXPECT_EQ(shown(), 59u);
    setenv("DILOCO_COLUMNS", "none", 1);
    EXPECT_EQ(shown(), 79u);
    unsetenv("DILOCO_COLUMNS");
}

TEST(StatusLine, writes_times_as_clocks_do) {
    EXPECT_EQ(clock_text(0), "00:00");
    EXPECT_EQ(clock_text(59.6), "01:00");
    EXPECT_EQ(clock_text(3599), "59:59");
    EXPECT_EQ(clock_text(3600 + 2 * 60 + 3), "1:02:03");
    EXPECT_EQ(clock_text(90000), "25:00:00");
    EXPECT_EQ(clock_text(-1), "00:00");
}

}  // namespace test_logger
