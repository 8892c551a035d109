// SyncLog: one worker's part in exchanges that do not wait for workers that are slow, dead, or not there yet.
// README.md describes the protocol: roles, records, and what happens between a sync's send and its merge.
//
// Nothing here waits or reads a clock. requests() says what to ask the store next, and answer() takes the
// answers; the trainer calls turn() at the end of a step, which says whether to continue. Lost answers are
// asked for again: every request may be done twice, and a batch may break off between any two requests. The
// caller must never let two of these functions run at the same time (a mutex).
//
// The class is declared here. Its functions are in the files that its sections name; the public ones are in
// sync_log_requests.h and sync_log_turns.h.
#pragma once
#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "llmc/run/log_store.h"
#include "streaming/elastic/sync_log_decision.h"
#include "streaming/elastic/sync_log_records.h"
#include "streaming/elastic/sync_log_rules.h"
#include "streaming/elastic/sync_log_types.h"

class SyncLog {
public:
    SyncLog(const SyncLogOptions& options, const SyncSchedule& schedule, int worker, LogShard& shard,
            const SyncLogRules& rules, const LogStart& start);

    // What to ask the store now, if anything, in this order. The caller brings the answers before it asks for
    // more.
    std::vector<StoreRequest> requests(double now);

    // Takes the answers to all requests(). From the first lost one on, they are asked for again.
    void answer(const std::vector<StoreAnswer>& answers, double now);

    // requests() and answer() for a second connection, which brings entries and payloads. See `patience`.
    std::vector<StoreRequest> listen();
    void hear(const std::vector<StoreAnswer>& answers, double now);
    bool listens() const;
    double patience = 0;  // set by listen(): seconds for LogStore::await; 0: do not wait

    // To be called at the end of `step`, and again as long as it says to wait. Before the first step, with
    // the last step that is done: then it says to wait until this worker has a place in the run.
    LogTurn turn(long step, double now);

    // After the last step, in place of turn(). All that was sent by then is due now, so all workers that end
    // there have the same global parameters. Also waits while another worker needs a snapshot from this one.
    LogTurn finish(long last_step, double now);

    // Would turn() say, or do, something else now than when it last said to wait?
    bool is_turn_due() const;

    // Seconds until requests() will have something to ask, unless turn() changes that. It cannot foresee when
    // a payload will be encoded.
    double rest(double now) const;

    LogPulse pulse() const;

    // The answers to a beat (Heartbeat); of three, one lists all workers' beats.   from: when it was sent
    void hear_beats(const std::vector<StoreAnswer>& answers, double from, double now);

    // The answer to a request for `run/generation`.
    void check_generation(const StoreAnswer& answer);

    // A checkpoint with these positions is on the disk, and survives a crash.
    void checkpointed(const std::vector<long>& positions) {
        ask_later({StoreRequest::put, key("durable"), std::to_string(me.worker), numbers(positions)});
    }

    std::vector<long> positions() const {
        std::vector<long> positions;
        for (const Slot& slot : slots) { positions.push_back(schedule.index(slot.sync)); }
        return positions;
    }
    const std::string& current_generation() const { return generation; }
    Incarnation incarnation() const { return me; }  // number 0: not registered yet
    const LogStop& stopped() const { return end; }
    bool is_running() const { return phase == Phase::running; }
    // Why a wait may never end: the store does not answer, nobody can give the snapshot, or there is no room
    // for it. "": none of these.
    std::string helpless() const {
        if (is_cut_off || (listens() && !listen_trouble.empty())) {
            const std::string& why = is_cut_off ? trouble : listen_trouble;
            return "the store does not answer" + (why.empty() ? "" : " (" + why + ")");
        }
        if (phase != Phase::behind) { return ""; }
        if (!lacks_room.empty()) { return lacks_room; }
        if (alone_since < 0 || snapshot.offer) { return ""; }
        return "no live worker can give the snapshot that this worker needs";
    }
    std::vector<LogEvent> events() { return std::exchange(told, {}); }

private:
    using Listing = std::map<std::string, std::string>;  // a folder's values, by name
    using Handler = std::function<void(const StoreAnswer&, double now)>;
    struct Asked {
        StoreRequest request;
        Handler then;
    };
    enum class Phase { opening, comparing, registering, agreeing, running, behind, stopped };

    // A fragment's next sync.
    struct Slot {
        enum Own { none, sending, sent, abstaining, abstained };
        long sync = 0;
        uint64_t hash = 0;
        Own own = none;
        size_t chunks = 0;  // written
        bool heard = false;  // the store has said whether there is an entry
        double look_at = 0;
        // Over a bucket, by worker: the line in its place, with the payload; the line that closes its place.
        Listing found;
        std::map<int, LogLine> closed;
        bool is_near = false, is_gone = false;  // more lines may come soon; a line that must exist is absent
        std::optional<LogLines> lines;     // as they have just been read
        std::optional<LogEntry> proposal;  // to be written if there is no entry yet
        std::optional<LogEntry> entry;
        std::vector<std::string> payloads;  // of the contributors, as far as they are read
        size_t bytes_read = 0;
        double due_since = -1;
        double excused = 0;     // seconds since then in which the store did not answer

        // The time since which it counts as due; negative: it is not due yet.
        double judged_since() const { return due_since < 0 ? -1 : due_since + excused; }
        bool has_line() const { return own == sent || own == abstained; }
        bool has_payload(size_t i) const { return payloads[i].size() >= entry->contributors[i].bytes; }
        bool is_fetched() const {
            for (size_t i = 0; i < payloads.size(); i++) {
                if (!has_payload(i)) { return false; }
            }
            return bool(entry);
        }
    };

    struct Snapshot {
        int attempt = 1;         // each attempt has its own name
        bool has_room = false;   // the disk had room for it before it was first wanted
        bool is_wanted = false;  // the store holds this worker's want
        std::optional<LogOffer> offer = std::nullopt;
        Spool bytes = Spool();
        size_t chunks = 0;
        bool is_whole = false;
        double look_at = 0;
    };

    struct Giving {
        std::string want;
        bool takes_over;          // from a giver that makes no progress
        bool is_claimed = false;  // nobody else gives it
        Spool bytes = Spool();    // empty until the trainer's turn
        size_t chunks = 0;        // written
    };

    // A snapshot that another worker wants and that nobody has offered yet.
    struct Wanted {
        double since;        // when its giver's progress was last seen to change
        std::string giver;   // the start that has claimed it, and how far it is
    };

    // Asking: what goes out together (sync_log_requests.h)
    static void ignore(const StoreAnswer&, double) {}
    // Only in choose() and answer(): between them `asked` is on its way.
    void ask(StoreRequest request, Handler then = ignore) {
        asked.push_back({std::move(request), std::move(then)});
    }
    // can_wait: the request may be held back until it can be sent with a payload, which does not wait for the
    // request's answer; over a bucket, until no payload is being sent
    void ask_later(StoreRequest request, Handler then = ignore, bool can_wait = false) {
        chores_can_wait = can_wait && (chores_can_wait || chores.empty());
        chores.push_back({std::move(request), std::move(then)});
    }
    std::string run() const { return generation + "/" + std::to_string(options.shard); }
    std::string key(const std::string& folder) const { return run() + "/" + folder; }
    // Writes chunk number `chunk`. Nothing else can lie under this start's name, so the answer need not bring
    // the chunk back.
    StoreRequest own_chunk(const std::string& folder, size_t chunk, std::string bytes) const {
        return {StoreRequest::put_if_absent, folder, chunk_name(me, chunk), std::move(bytes),
                /*asks_winner=*/false};
    }
    static bool writes(const StoreRequest& one) {
        return one.kind == StoreRequest::put || one.kind == StoreRequest::put_if_absent;
    }
    bool is_of_lines(const StoreRequest& one) const { return one.folder.rfind(key("sent/"), 0) == 0; }
    void lose_store(const StoreRequest& lost, const std::string& trouble, double now);
    void make_room(double now);
    void forgive(double seconds, double now);
    void choose(double now);
    void choose_running(double now);
    bool cannot_give() const { return times_put_off >= 2; }  // it has tried in vain
    bool may_leave() const;
    void ask_chores();
    void add_removal(const std::string& folder, const std::string& name = "", bool can_wait = false) {
        ask_later({StoreRequest::remove, folder, name}, ignore, can_wait);
    }

    // The newest sync up to which this worker has applied all.
    long all_applied() const {
        long next = std::numeric_limits<long>::max();
        for (const Slot& slot : slots) { next = std::min(next, slot.sync); }
        return next - 1;
    }

    // Starting (sync_log_start.h)
    void open();
    void compare();
    void register_start();
    LogBase base() const;
    void agree(double now);
    void agree_on(const Listing& registered, double now);
    void begin(const LogBeginning& beginning, double now);
    void enter(const std::vector<long>& positions, bool is_sure);

    // Events (sync_log_requests.h)
    void stop(const std::string& reason);
    void say(LogEventKind kind, const std::string& text, long sync = -1,
             const std::optional<LogEntry>& entry = std::nullopt) {
        told.push_back({kind, sync, me.worker, text, entry});
    }
    void say_waits(const std::string& what, long sync = to_begin);
    void tell_changes();

    // A sync, on the trainer's side (sync_log_turns.h)
    LogTurn take_turn(long step, double now);
    bool is_due(long sync) const;
    int ready() const;
    // Whether it knows what others have sent, so that a newcomer takes no step before it jumps to theirs.
    bool knows_its_place() const { return is_aligned || has_looked; }
    bool is_far_behind() const;
    void keep_pace(double now);
    LogTurn jump();
    void apply(Slot& slot);
    void keep_promise(const Slot& slot);
    void show_pace(long sync, double now);
    void make_promise();
    void take_part();

    // A sync, on the store's side (sync_log_sync.h)
    std::string folder(const char* what, long sync) const { return key(what + ("/" + std::to_string(sync))); }
    bool needs_store(const Slot& slot, double now) const;
    void serve(Slot& slot);
    Slot* find(long sync) {
        Slot& slot = slots[size_t(schedule.fragment(sync))];
        return slot.sync == sync ? &slot : nullptr;
    }
    // A handler finds its slot by the sync, since the slot may have moved on to its next sync.
    template <class Then>
    Handler with_slot(long sync, Then then) {
        return [this, sync, then](const StoreAnswer& answer, double now) {
            if (Slot* slot = find(sync)) { then(*slot, answer, now); }
        };
    }
    void send(Slot& slot);
    void write_line(Slot& slot, const LogLine& line, Slot::Own own, const std::string& payload = "");
    std::vector<std::string> lacking(const Slot& slot, Presence::Which of = Presence::at_work) const;
    void add_lines(std::vector<Asked>& to, const Slot& slot, Presence::Which of);
    void ask_lines(const Slot& slot, Presence::Which of, bool may_close);
    void weigh(Slot& slot, bool may_close, double now);
    void close(Slot& slot);
    void listen_to_lines(Slot& slot);
    void settle(Slot& slot, const StandingLines& standing);
    // Lets send() repeat the line, and the chunks that slot.chunks does not count.
    void send_again(Slot& slot) { slot.own = slot.own == Slot::sent ? Slot::sending : Slot::abstaining; }
    void look(Slot& slot);
    void take_lines(Slot& slot, const Listing& texts);
    size_t chunk_of(size_t bytes) const { return bytes <= options.in_line ? bytes : options.chunk; }
    bool is_behind(const Slot& slot) const { return newest_open > slot.sync; }
    // A worker that sends the fragment's next sync has applied this one.   open: the newest that is sent
    bool is_over(long sync, long open) const { return open >= sync + schedule.fragments(); }
    bool listens_to(const Slot& slot) const;
    void learn(Slot& slot, const StoreAnswer& decision, long open);
    void consider(Slot& slot, double asked, double now);
    std::optional<LogEntry> decide(const Slot& slot, const StandingLines& standing, double asked, double now);
    double due_for_all(const Slot& slot, double now) const;
    double stands_since(double now) const;
    void tell_of_few(Slot& slot, const StandingLines& standing, double asked);
    void write_entry(long sync, const LogEntry& entry);
    void take_entry(Slot& slot, const std::string& text);
    void refuse(const std::string& folder, const std::string& name, const std::string& text);
    void diverge(const Slot& slot);
    void diverge() { stop(format("the global parameters of worker %d are not those of the run", me.worker)); }
    void fetch_payloads(Slot& slot);
    void take_chunk(Slot& slot, size_t i, size_t at, const StoreAnswer& answer);
    void take_known_payloads(Slot& slot);

    // Looking around: which workers are alive, which need a snapshot (sync_log_snapshots.h)
    void look_around(bool beside_payload);
    void look_for_readers(bool is_last, double now);
    void look_at_wants();
    void note_wants(const Listing& wants, const Listing& offers, Listing& givers, double now);
    bool in_bucket() const { return options.in_line > 0; }
    bool gives(const std::string& want) const { return giving && giving->want == want; }
    bool has_written(const std::string& giver) const;
    void rest_from_looking(double seconds, double now);
    double pause() const { return std::max(options.poll, 4 * look_seconds); }
    // When to look around. Over a bucket the heartbeat does, and this is for when the heartbeat is late.
    double looks_around_at() const {
        const bool has_looks = in_bucket() && is_aligned && !is_leaving && phase == Phase::running;
        return look_around_at + (has_looks ? options.expiry / 4 : 0);
    }
    void see(Listing listing, double from, double seconds, double now);
    void note_open(long sync);
    void choose_reader(bool is_last, double now);
    void look_for_an_end();

    // Snapshots (sync_log_snapshots.h)
    bool lacks_snapshot() const { return giving && giving->is_claimed && giving->bytes.empty(); }
    void write_snapshot(double now);
    void give();
    std::string progress() const { return me.text() + " " + std::to_string(giving->chunks); }
    void claim();
    void give_chunk();
    void give_no_more();
    void put_off_giving(const std::string& why, double now);
    void fall_behind(const std::string& reason);
    void miss_entry(long sync);
    void forget_snapshot();
    std::string want() const { return me.text() + "." + std::to_string(snapshot.attempt); }
    void choose_behind(double now);
    bool has_room_for_snapshot();
    void look_for_offer();
    void read_snapshot();
    void take_chunk_of_snapshot(const StoreAnswer& answer);
    void load_snapshot();

    // Removing what nobody needs any more (sync_log_snapshots.h)
    void sweep(bool with_snapshots, bool is_in_need = false);
    void sweep_by(StoreRequest request, Handler then) {
        ask_later(std::move(request), std::move(then), true);
    }
    void note_held(const Listing& listing, std::vector<long>& held);
    long covered(const Listing& durable) const;
    long newest_decided(const Slot& slot) const { return schedule.index(slot.sync) - (slot.entry ? 0 : 1); }
    void sweep_syncs(const std::string& folder, const std::vector<long>& oldest);
    void sweep_snapshots();
    void remove_snapshot(const std::string& want) {
        for (const char* what : {"want", "giver", "offer"}) { add_removal(key(what), want); }
        add_removal(key("snapshot/" + want));
    }

    static constexpr double long_ago = -1e300;
    static constexpr long to_begin = -1, nobody_to_give = -2, no_room = -3;  // in waits_told, not of a sync

    const SyncLogOptions options;
    const SyncSchedule schedule;
    LogShard& shard;
    const SyncLogRules& rules;
    const LogStart start;
    Incarnation me;
    Phase phase = Phase::opening;
    std::string generation;
    LogStop end;
    std::vector<LogEvent> told;
    std::set<long> waits_told;  // syncs for which it has told that it waits

    std::vector<Asked> asked, listened_for;  // by requests(), by listen(), and not answered yet
    double asked_at = 0, cut_off_since = 0, retry_at = 0;
    bool asks_beats = false;  // a fragment's requests are to be followed by a look around
    bool is_cut_off = false;  // the last answer was lost
    bool refuses_writes = false;  // then a write was lost: a store that is full still answers what only reads
    std::string trouble, listen_trouble;  // why answers were lost: of requests(), of listen()
    std::vector<Asked> chores;
    bool chores_can_wait = false;

    double agree_from = 0, agree_at = 0;
    int next_number = 0;                    // to register as; 0: the taken numbers are not known yet
    bool is_registered = false;             // before the run has begun
    Presence candidates;                    // which workers are alive then
    std::optional<LogBeginning> beginning;  // to be written if there is none yet

    std::vector<Slot> slots;  // by fragment
    long step = 0;
    bool has_begun = false;  // it has a place in the run; turn() keeps the next two
    long began_step = 0;
    double began_at = 0, waits_since = 0;
    long newest_sent = -1, newest_open = -1;  // the newest sync that this worker, that any worker has sent
    long missed = -1, times_missed = 0;       // the sync whose entry was gone, and how often in a row
    double not_open_at = long_ago;            // when it last looked and no other had sent newest_open yet
    std::vector<long> encoded_until;          // by fragment: the newest sync that this start has encoded
    std::vector<bool> is_proven;              // by fragment: an entry has confirmed its parameters
    std::map<long, std::string> trims;        // over a bucket, by sync: its counted line without payload
    bool has_large = false;                   // some payloads lie under `payload`
    long promise = LogBeat::catches_up;
    long jumps_to = -1;
    int times_late = 0;
    bool is_lagging = false;
    double lag = 0, turn_at = 0;
    bool is_aligned = false;  // it keeps step with the others: its last payload was counted, without a jump

    double look_around_at = 0, look_earliest = 0, look_seconds = 0;
    double looked_from = long_ago;  // when the last look was asked for
    bool has_looked = false;
    bool is_waiting = true;  // the trainer
    Presence presence;
    std::set<int> asks_if_done;  // workers that are gone
    bool looks_at_wants = false, wants_are_last = false;
    std::map<std::string, Wanted> wanted;  // snapshots that nobody has offered yet
    bool is_wanted = false;                // a living worker wants a snapshot
    bool are_few = false;                  // its last sync's entry named at most half of the workers
    std::optional<Giving> giving;
    double sweeps_at = long_ago;   // if the store is full
    bool has_told_need = false;    // that it removes payloads that checkpoints lack
    double gives_from = long_ago;  // it gives no snapshot before
    int times_put_off = 0;         // since it has given one
    Snapshot snapshot;
    double alone_since = -1;  // since when it is behind and nobody could give it a snapshot
    bool looks_for_an_end = false;
    std::string lacks_room;  // why it cannot keep the snapshot that it needs

    bool is_finishing = false;     // after the last step
    bool is_leaving = false;       // all is applied
    bool has_looked_last = false;  // and it has looked since then whether anybody needs a snapshot
    bool has_left = false;         // and it has left a note
};

#include "streaming/elastic/sync_log_requests.h"
#include "streaming/elastic/sync_log_snapshots.h"
#include "streaming/elastic/sync_log_start.h"
#include "streaming/elastic/sync_log_sync.h"
#include "streaming/elastic/sync_log_turns.h"
