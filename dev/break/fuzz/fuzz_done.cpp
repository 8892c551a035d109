// DONE files, which record that a checkpoint is whole, and Fields, the text in them and in state files.
#include "dev/break/fuzz/fuzz.h"
#include "llmc/checkpoint/state_file.h"

const long step = 12;

void fuzz(const std::string& bytes) {
    static const Folder folder;  // the file's name contains the step
    std::ofstream(done_path(folder.path(), step), std::ios::binary) << bytes;
    may_refuse([&] {
        const Fields fields = Fields::parse(bytes, "a file");
        require(Fields::parse(fields.text(), "").text() == fields.text(), "written fields are read back");
    });
    const StateIdentity who = read_done(folder.path(), step);
    require(who.step == step && who.workers >= 1 && who.ranks >= 1, "the run is possible");
}

std::vector<std::string> seeds() {
    const StateIdentity who{step, 0, 0, 3, 2, "0123456789abcdef"};
    const Folder folder;
    write_done(folder.path(), who);
    const std::string done = whole_file(done_path(folder.path(), step));
    return {done, "word a\\\\b\\nc\n" + done};
}
