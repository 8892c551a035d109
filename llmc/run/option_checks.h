// Checks of options that need no file: combinations that make no run, or that would silently do nothing, end
// with a UserError before any process waits for another.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "llmc/device.h"
#include "llmc/error.h"
#include "llmc/outlier.h"
#include "llmc/run/options.h"

// Refuses options of a section that this run ignores.   user: what they are for   needed: what turns that on
inline void refuse_ignored(const Options& o, const std::string& section, const std::string& user,
                           const std::string& needed) {
    const std::vector<std::string> ignored = changed_in_section(o, section);
    if (ignored.empty()) { return; }
    const bool is_one = ignored.size() == 1;
    throw UserError(list_in_words(ignored) + (is_one ? " is for " : " are for ") + user + ": add " + needed +
                    ", or leave " + (is_one ? "it" : "them") + " out, also of a --config file");
}

inline void check_elastic(const Options& o) {
    if (!o.diloco.streams()) {
        throw UserError("--outer-transport store carries fragments, but there is no outer optimizer: give "
                        "--outer-optimizer nesterov, or leave out --outer-transport");
    }
    if (o.diloco.outer_exchange == "all_to_all") {
        throw UserError("--outer-exchange all_to_all is for workers in lock-step: with --outer-transport "
                        "store give all_gather or auto");
    }
    if (o.elastic.min_workers > o.workers) {
        throw UserError(format("--min-workers %d is more than the %d workers: give at most as many",
                               o.elastic.min_workers, o.workers));
    }
    if (o.has_own_batch() && o.max_steps < 0) {
        throw UserError("the number of steps does not follow from the data if each elastic worker has its "
                        "own batch: give -x");
    }
}

inline void check_output(const Options& o) {
    if (o.resume && o.output.empty()) { throw UserError("-y 1 resumes from the log folder: give -o"); }
    if (o.save_every > 0 && o.output.empty()) {
        throw UserError(format("-n %ld writes checkpoints into the log folder: give -o", o.save_every));
    }
    const bool keeps_syncs = o.diloco.streams() && !o.diloco.is_elastic();  // an elastic run's are in its log
    if (keeps_syncs && o.save_every > 0 && o.save_every <= o.diloco.overlap) {
        throw UserError(format("-n %ld must be larger than the %ld steps for which a sync is in flight "
                               "(--overlap)", o.save_every, o.diloco.overlap));
    }
}

inline void check_options(const Options& o) {
    if (o.train_data.empty()) {
        throw UserError("no training data: give -i 'PATTERN' (data/prepare.py makes some)");
    }
    if (o.total_batch % o.micro_batch() != 0) {
        throw UserError(format(
            "-d %ld tokens a step are not divisible by -b %d x -t %d x --ranks %d = %ld: change one of them",
            o.total_batch, o.batch, o.seq_len, o.ranks, o.micro_batch()));
    }
    if (o.hellaswag && o.hellaswag_data.empty()) {
        throw UserError("there is no data/hellaswag/hellaswag_val.bin for -h 1: run data/hellaswag.py, name "
                        "another with --hellaswag-data, or leave -h 1 out");
    }
    if (o.hellaswag && o.validate_every == 0) {
        throw UserError("-h 1 evaluates HellaSwag with each validation, but -v 0 has none: give -v, or leave "
                        "-h 1 out");
    }
    const float limit = std::max(o.outliers.loss_zscore, o.outliers.norm_zscore);
    if (limit >= largest_zscore) {
        throw UserError(
            format("no z-score of %d values is above %.1f, so -sl and -sg of %g would skip nothing: give "
                   "a smaller value, or 0", outlier_window_size, largest_zscore, double(limit)));
    }
    if (!runs_on_gpu && o.diloco.transport == "nccl") {
        throw UserError("--outer-transport nccl is for GPUs: leave it out, or use train_gpt");
    }
    if (!runs_on_gpu && o.diloco.offload) {
        throw UserError("--outer-offload is for GPUs, whose memory is not the host's: leave it out");
    }
    check_output(o);
    if (!o.uses_muon()) { refuse_ignored(o, muon_section, "Muon", "--optimizer muon"); }
    if (o.diloco.is_elastic()) {
        check_elastic(o);
    } else {
        refuse_ignored(o, elastic_section, "elastic workers", "--outer-transport store");
    }
}
