// Learning-rate schedules, llm.c's: a linear warm-up to the peak, then
//   cosine     half a cosine down to final_fraction of the peak (Loshchilov & Hutter, arXiv 1608.03983)
//   linear     a straight line down to the same
//   constant   stays at the peak
//   wsd        warm-up, stable, decay: stays, then falls as 1 - sqrt in the last 20% (arXiv 2405.18392)
#pragma once
#include <algorithm>
#include <cmath>
#include <string>

#include "llmc/error.h"

enum class ScheduleKind { cosine, linear, constant, wsd };

inline ScheduleKind schedule_kind(const std::string& name) {
    return ScheduleKind(place_of(name, {"cosine", "linear", "constant", "wsd"}, "learning-rate schedule"));
}

struct LearningRateSchedule {
    std::string kind = "cosine";  // a word that schedule_kind() knows
    float peak = 3e-4f;
    long warmup_steps = 0;
    float final_fraction = 1;  // of the peak, at the end of cosine, linear and wsd
};

// The learning rate of step 0, 1, ... total_steps - 1. If a decay begins after b steps, `step` is
// (step - b) / (total_steps - b) of the way through it, so the last step still moves the model.
inline float learning_rate(const LearningRateSchedule& schedule, long total_steps, long step) {
    const ScheduleKind kind = schedule_kind(schedule.kind);
    const double peak = schedule.peak, final = peak * schedule.final_fraction;
    if (step < schedule.warmup_steps) {
        return float(peak * double(step + 1) / double(schedule.warmup_steps));
    }
    const long decay_begin = kind == ScheduleKind::wsd ? std::max(schedule.warmup_steps, total_steps * 8 / 10)
                                                       : schedule.warmup_steps;
    if (step < decay_begin) { return schedule.peak; }
    const double steps = double(std::max(1L, total_steps - decay_begin));
    const double progress = std::min(1.0, double(step - decay_begin) / steps);
    double remaining = 1;  // share of the decay from peak to final that is left
    switch (kind) {
        case ScheduleKind::cosine: remaining = 0.5 * (1 + std::cos(M_PI * progress)); break;
        case ScheduleKind::linear: remaining = 1 - progress; break;
        case ScheduleKind::constant: break;
        case ScheduleKind::wsd: remaining = 1 - std::sqrt(progress); break;
    }
    return float(final + remaining * (peak - final));
}
