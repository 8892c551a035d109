// What the programs that start processes put into their environment, for as long as this object lives: these
// variables and no others of theirs.
#pragma once
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

using Variables = std::vector<std::pair<const char*, const char*>>;

class LaunchEnvironment {
public:
    explicit LaunchEnvironment(const Variables& variables) : variables(variables) {
        for (const char* name : {"RANK",
                                 "WORLD_SIZE",
                                 "LOCAL_RANK",
                                 "LOCAL_WORLD_SIZE",
                                 "TORCHELASTIC_RUN_ID",
                                 "MASTER_PORT",
                                 "OMPI_COMM_WORLD_RANK",
                                 "OMPI_COMM_WORLD_SIZE",
                                 "OMPI_COMM_WORLD_LOCAL_RANK",
                                 "OMPI_COMM_WORLD_LOCAL_SIZE",
                                 "PMIX_NAMESPACE",
                                 "PMIX_RANK",
                                 "PALS_RANKID",
                                 "FLUX_TASK_RANK",
                                 "PMI_RANK",
                                 "PMI_SIZE",
                                 "MPI_LOCALRANKID",
                                 "MPI_LOCALNRANKS",
                                 "SLURM_PROCID",
                                 "SLURM_NTASKS",
                                 "SLURM_STEP_NUM_TASKS",
                                 "SLURM_LOCALID",
                                 "SLURM_JOB_ID",
                                 "SLURM_STEP_ID",
                                 "SLURM_NNODES",
                                 "SLURM_STEP_NUM_NODES",
                                 "DILOCO_WORKER",
                                 "DILOCO_RANK",
                                 "DILOCO_LOCAL_RANK",
                                 "DILOCO_STORE"}) {
            unsetenv(name);
        }
        for (const auto& [name, value] : variables) { setenv(name, value, 1); }
    }
    LaunchEnvironment(const LaunchEnvironment&) = delete;
    LaunchEnvironment& operator=(const LaunchEnvironment&) = delete;
    ~LaunchEnvironment() {
        for (const auto& [name, value] : variables) { unsetenv(name); }
    }

private:
    const Variables variables;
};
