// World: this process's number among those that another program has started, as that program says it.
//     torchrun, mpirun, srun   say it in the environment
//     -pn N -pr R -pg G        llm.c's flags, for other launchers: process R of N, G on each machine
#pragma once
#include <cstdlib>
#include <optional>
#include <string>

#include "llmc/error.h"

struct World {
    std::string program;  // for messages; empty: -pn and -pr
    long number = 0, size = 1;
    int local_rank = 0;   // its number among the processes on this machine
    long local_size = 0;  // the number of processes on this machine; 0: not known
    std::string job;      // the same for all processes, and different for other runs; may be empty

    bool is_on_one_machine() const { return local_size == size; }
    std::string says() const { return program.empty() ? "-pn says" : program + " started"; }
};

inline std::string environment(const char* name) {
    const char* value = getenv(name);
    return value ? value : "";
}

// Whether the launcher (launcher.h) has started this process.
inline bool has_launcher() { return getenv("DILOCO_WORKER") && getenv("DILOCO_RANK"); }

// The value of a variable, or a UserError if it is no number of at least 0.
inline long environment_number(const char* name) {
    const std::string text = environment(name);
    if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != std::string::npos) {
        throw UserError(
            format("%s is '%s', not a number: restart the processes, or unset it", name, text.c_str()));
    }
    return std::stol(text);
}

// The same, or 0 if the variable is missing.
inline int number_or_zero(const char* name) { return getenv(name) ? int(environment_number(name)) : 0; }

// A SLURM step, if it has several tasks or as many as a run of `expected` processes.
inline std::optional<World> find_slurm_step(long expected) {
    const bool has_step = getenv("SLURM_STEP_NUM_TASKS");
    World step = {"srun", environment_number("SLURM_PROCID"),
                  environment_number(has_step ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS"),
                  number_or_zero("SLURM_LOCALID"), 0,
                  environment("SLURM_JOB_ID") + "." + environment("SLURM_STEP_ID")};
    const bool has_nodes = getenv("SLURM_STEP_NUM_NODES");
    if (number_or_zero(has_nodes ? "SLURM_STEP_NUM_NODES" : "SLURM_NNODES") == 1) {
        step.local_size = step.size;
    }
    if (step.size > 1 || step.size == expected) { return step; }
    return std::nullopt;
}

// torchrun and mpirun set their variables only in the processes that they start. SLURM also sets its own in a
// batch script and in an interactive shell, which are no parallel programs, and torchrun and mpirun pass them
// on: so SLURM comes last, and only a step number and several tasks mean srun.
inline std::optional<World> find_world(long expected) {
    if (getenv("RANK") && getenv("WORLD_SIZE") && getenv("LOCAL_RANK")) {
        // Without --rdzv-id all runs have the same id, but each run on a machine has its own port.
        const std::string id = environment("TORCHELASTIC_RUN_ID"), port = environment("MASTER_PORT");
        return World{"torchrun", environment_number("RANK"), environment_number("WORLD_SIZE"),
                     number_or_zero("LOCAL_RANK"), number_or_zero("LOCAL_WORLD_SIZE"),
                     id.empty() || port.empty() ? id : id + "." + port};
    }
    if (getenv("OMPI_COMM_WORLD_RANK") && getenv("OMPI_COMM_WORLD_SIZE")) {
        return World{"mpirun", environment_number("OMPI_COMM_WORLD_RANK"),
                     environment_number("OMPI_COMM_WORLD_SIZE"), number_or_zero("OMPI_COMM_WORLD_LOCAL_RANK"),
                     number_or_zero("OMPI_COMM_WORLD_LOCAL_SIZE"), environment("PMIX_NAMESPACE")};
    }
    if (getenv("PMI_RANK") && getenv("PMI_SIZE") && getenv("MPI_LOCALRANKID")) {  // MPICH's, Intel MPI's
        return World{"mpirun", environment_number("PMI_RANK"), environment_number("PMI_SIZE"),
                     number_or_zero("MPI_LOCALRANKID"), number_or_zero("MPI_LOCALNRANKS"), ""};
    }
    if (getenv("SLURM_PROCID") && getenv("SLURM_STEP_ID") && getenv("SLURM_NTASKS")) {
        return find_slurm_step(expected);
    }
    return std::nullopt;
}
