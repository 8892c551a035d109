// A folder of checkpoints, and what another process says that it has in its folder: on which checkpoint do
// they agree?
//
//     | uint16: bytes of DONE | uint16: bytes of the answer | DONE | the other's answer | the state file |
//
// If the answer is empty, there is no other process.
#include "dev/break/fuzz/fuzz.h"
#include "llmc/checkpoint/resume.h"

const long step = 12;

struct Inputs {
    std::string done, said, state;
};

// A store in which process 1 gives the same answer to every question.
class AnsweringStore : public MemoryStore {
public:
    explicit AnsweringStore(std::string answer) : answer(std::move(answer)) {}

    std::optional<std::string> try_get(const std::string& key) override {
        const bool is_asked = key.size() > 2 && key.compare(key.size() - 2, 2, "/1") == 0;
        return is_asked ? answer : MemoryStore::try_get(key);
    }

private:
    const std::string answer;
};

// The lineage of a state file, or "none" if the file is not whole.
std::string lineage_of(const std::string& path) {
    try {
        const StateReader state(path);
        state.verify();
        return state.identity().lineage;
    } catch (const UserError&) { return "none"; }
}

void agree(const Inputs& inputs, const std::string& folder) {
    Process process;
    process.workers = inputs.said.empty() ? 1 : 2;
    process.store = std::make_shared<PrefixStore>(std::make_shared<AnsweringStore>(inputs.said), "");
    std::vector<std::string> notes;
    std::optional<ResumePoint> point;
    try {
        point = agree_on_checkpoint(process, folder, {0, 0, 0, process.workers, 1, "", false}, notes);
    } catch (const UserError& error) {
        if (inputs.said.empty()) { check_message(error.what()); }
        return;
    }
    // Another process's words may be quoted unchanged: only members of the run can write to the store.
    for (const std::string& note : notes) {
        if (inputs.said.empty()) { check_message(note); }
    }
    if (point) {
        require(point->step == step, "the step exists");
        require(lineage_of(state_path(folder, step, 0)) == point->lineage, "file is whole and of the run");
    }
}

void fuzz(const std::string& bytes) {
    static const Folder folder;
    uint16_t sizes[2];
    if (bytes.size() < sizeof sizes) { return; }
    memcpy(sizes, bytes.data(), sizeof sizes);
    const std::string rest = bytes.substr(sizeof sizes);
    const size_t first = std::min<size_t>(sizes[0], rest.size());
    const size_t second = std::min<size_t>(sizes[1], rest.size() - first);
    const Inputs inputs{rest.substr(0, first), rest.substr(first, second), rest.substr(first + second)};
    std::ofstream(done_path(folder.path(), step), std::ios::binary) << inputs.done;
    std::ofstream(state_path(folder.path(), step, 0), std::ios::binary) << inputs.state;
    agree(inputs, folder.path());
}

std::string input(const std::string& done, const std::string& said, const std::string& state) {
    return bytes_of(std::vector<uint16_t>{uint16_t(done.size()), uint16_t(said.size())}) + done + said +
           state;
}

// A run of one process and one of two, each whole and as left behind by a kill.
std::vector<std::string> seeds() {
    std::vector<std::string> all;
    for (int workers : {1, 2}) {
        const Folder folder;
        const StateIdentity who{step, 0, 0, workers, 1, "0123456789abcdef"};
        const std::vector<float> values(8, 1.5f);
        write_state(state_path(folder.path(), step, 0), who, {{"master", values.data(), 32}});
        write_done(folder.path(), who);
        const std::string done = whole_file(done_path(folder.path(), step));
        const std::string state = whole_file(state_path(folder.path(), step, 0));
        FolderView other;
        other.folder = "/elsewhere";
        other.states[{step, 1}] = {{step, who.lineage, 2, 1}, ""};
        other.done[step] = {step, who.lineage, 2, 1};
        const std::string said = workers == 1 ? "" : other.pack();
        all.push_back(input(done, said, state));
        all.push_back(input("", said, state.substr(0, state.size() / 2)));
    }
    return all;
}
