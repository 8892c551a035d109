// Streams and events: order, waiting, and errors that reach the waiting caller.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "llmc/stream.h"

namespace test_stream {

// Work that blocks its stream until open() is called.
struct Gate {
    std::atomic<bool> is_open{false};
    void open() { is_open = true; }
    void pass() const {
        while (!is_open) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }
    }
};

TEST(Stream, inline_work_has_run_when_enqueue_returns) {
    Stream stream;
    std::thread::id where;
    stream.enqueue([&] { where = std::this_thread::get_id(); });
    EXPECT_EQ(where, std::this_thread::get_id());
}

TEST(Stream, inline_work_throws_out_of_enqueue_and_the_stream_goes_on) {
    Stream stream;
    EXPECT_THROW(stream.enqueue([] { throw std::runtime_error("broken"); }), std::runtime_error);
    bool ran = false;
    stream.enqueue([&] { ran = true; });
    EXPECT_TRUE(ran);
    EXPECT_NO_THROW(stream.synchronize());
}

TEST(Stream, queued_work_runs_in_order_on_another_thread_and_enqueue_does_not_wait) {
    Stream stream(Stream::Kind::communicate);
    Gate gate;
    std::vector<int> order;
    std::thread::id where;
    stream.enqueue([&] { gate.pass(); where = std::this_thread::get_id(); });
    for (int i = 0; i < 1000; i++) { stream.enqueue([&, i] { order.push_back(i); }); }
    EXPECT_TRUE(order.empty());
    gate.open();
    stream.synchronize();
    ASSERT_EQ(order.size(), 1000u);
    for (int i = 0; i < 1000; i++) { EXPECT_EQ(order[size_t(i)], i); }
    EXPECT_NE(where, std::this_thread::get_id());
}

TEST(Stream, the_destructor_finishes_what_is_queued) {
    int count = 0;
    {
        Stream stream(Stream::Kind::communicate);
        for (int i = 0; i < 100; i++) { stream.enqueue([&] { count++; }); }
    }
    EXPECT_EQ(count, 100);
}

TEST(Event, an_event_that_was_never_recorded_is_complete) {
    Event event;
    EXPECT_TRUE(event.query());
    EXPECT_NO_THROW(event.synchronize());
}

TEST(Event, completes_with_the_work_before_it_and_not_with_the_work_after_it) {
    Stream stream(Stream::Kind::communicate);
    Gate before, after;
    Event event;
    stream.enqueue([&] { before.pass(); });
    stream.record(event);
    stream.enqueue([&] { after.pass(); });
    EXPECT_FALSE(event.query());
    before.open();
    event.synchronize();
    EXPECT_TRUE(event.query());
    after.open();
}

TEST(Event, recording_again_makes_a_new_point_and_a_copy_keeps_the_old_one) {
    Stream stream(Stream::Kind::communicate);
    Gate gate;
    Event event;
    stream.record(event);
    const Event old = event;
    stream.enqueue([&] { gate.pass(); });
    stream.record(event);
    old.synchronize();
    EXPECT_TRUE(old.query());
    EXPECT_FALSE(event.query());
    gate.open();
    event.synchronize();
}

TEST(Event, a_stream_that_waits_for_another_ones_event_runs_after_it) {
    Stream first(Stream::Kind::communicate), second(Stream::Kind::communicate);
    Gate gate;
    std::atomic<int> value{0};
    int seen = -1;
    Event event;
    first.enqueue([&] { gate.pass(); value = 7; });
    first.record(event);
    second.wait(event);
    second.enqueue([&] { seen = value; });
    EXPECT_EQ(seen, -1);
    gate.open();
    second.synchronize();
    EXPECT_EQ(seen, 7);
}

TEST(Event, work_enqueued_after_a_wait_sees_the_point_that_was_meant) {
    Stream first(Stream::Kind::communicate), second(Stream::Kind::communicate);
    Gate gate;
    Event event;
    first.record(event);
    second.wait(event);
    first.enqueue([&] { gate.pass(); });
    first.record(event);  // records the event again: `second` still waits for the first record
    EXPECT_NO_THROW(second.synchronize());
    gate.open();
}

TEST(Stream, an_error_stops_the_stream_and_every_later_event_carries_it) {
    Stream stream(Stream::Kind::communicate);
    Event before, after, later;
    bool ran_after = false;
    stream.record(before);
    stream.enqueue([] { throw std::runtime_error("the cable is out"); });
    stream.record(after);
    stream.enqueue([&] { ran_after = true; });
    stream.record(later);
    EXPECT_NO_THROW(before.synchronize());
    for (const Event& event : {after, later}) {
        try {
            event.synchronize();
            FAIL() << "no error";
        } catch (const std::runtime_error& error) {
            EXPECT_STREQ(error.what(), "the cable is out");
        }
        EXPECT_THROW(event.query(), std::runtime_error);
    }
    EXPECT_THROW(stream.synchronize(), std::runtime_error);
    EXPECT_FALSE(ran_after);
}

TEST(Stream, an_error_reaches_a_stream_that_waits_for_the_failed_one) {
    Stream failed(Stream::Kind::communicate), waiting(Stream::Kind::communicate), main;
    Event event;
    bool ran = false;
    failed.enqueue([] { throw std::runtime_error("gone"); });
    failed.record(event);
    waiting.wait(event);
    waiting.enqueue([&] { ran = true; });
    EXPECT_THROW(waiting.synchronize(), std::runtime_error);
    EXPECT_FALSE(ran);
    EXPECT_THROW(main.wait(event), std::runtime_error);
}

TEST(Stream, dropped_work_gives_back_what_it_holds) {
    auto held = std::make_shared<int>(1);
    {
        Stream stream(Stream::Kind::communicate);
        stream.enqueue([] { throw std::runtime_error("gone"); });
        stream.enqueue([held] {});
        EXPECT_THROW(stream.synchronize(), std::runtime_error);
        EXPECT_EQ(held.use_count(), 1);
    }
}

TEST(Timestamp, tells_when_the_stream_came_there_not_when_it_was_asked_to) {
    Stream stream(Stream::Kind::communicate);
    Gate gate;
    Event first_done;
    const Timestamp begin = stream.stamp();
    stream.record(first_done);
    stream.enqueue([&] { gate.pass(); });
    const Timestamp end = stream.stamp();
    first_done.synchronize();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    gate.open();
    stream.synchronize();
    EXPECT_GE(seconds_between(begin, end), 0.02);
    EXPECT_EQ(seconds_between(begin, begin), 0);
}

TEST(Timestamp, a_copy_keeps_the_old_one) {
    Stream stream;
    Timestamp timestamp = stream.stamp();
    const Timestamp old = timestamp;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    timestamp = stream.stamp();
    EXPECT_GE(seconds_between(old, timestamp), 0.002);
}

}  // namespace test_stream
