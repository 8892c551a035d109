// The communicators of a run, by where the buffers lie and what carries their bytes.
//     inner   the ranks of a worker, every step: Gloo on CPUs, NCCL on GPUs
//     outer   one shard on all workers: Gloo, or on GPUs also NCCL
// A GPU's program needs no Gloo: where it is missing make defines WITHOUT_GLOO, and this file alone knows it.
#pragma once
#include <memory>
#include <string>

#include "llmc/comm.h"
#include "llmc/device.h"
#include "llmc/error.h"
#ifdef WITHOUT_GLOO
const bool has_gloo = false;
inline std::unique_ptr<cpu::Comm> make_comm_gloo(const CommGroup&) { throw RunError("built without Gloo"); }
inline std::string interface_address(const std::string&) { throw RunError("built without Gloo"); }
#else
#include "llmc/run/comm_gloo.h"
const bool has_gloo = true;
#endif
#ifdef USE_CUDA
#include "llmc/run/comm_nccl.cuh"
#include "llmc/run/comm_staged.cuh"
#endif

namespace cpu {

inline std::unique_ptr<Comm> make_inner_comm(const CommGroup& group) { return make_comm_gloo(group); }

inline std::unique_ptr<Comm> make_outer_comm(const CommGroup& group, const std::string&) {
    return make_comm_gloo(group);
}

}  // namespace cpu

#ifdef USE_CUDA
namespace cuda {

inline std::unique_ptr<Comm> make_inner_comm(const CommGroup& group) {
    return std::make_unique<NcclComm>(group, NcclOptions());
}

// Gloo's works on hosted streams only. NCCL's occupies one SM for as long as an exchange takes.
inline std::unique_ptr<Comm> make_outer_comm(const CommGroup& group, const std::string& transport) {
    if (transport == "gloo") { return std::make_unique<StagedComm>(make_comm_gloo(group)); }
    NcclOptions options;
    options.blocking = false;
    options.max_ctas = 1;
    options.measures_time = true;
    return std::make_unique<NcclComm>(group, options);
}

}  // namespace cuda
#endif

// UserError for an outer transport that this program does not have.
inline void check_outer_transport(const std::string& transport) {
    if (transport == "nccl" && !runs_on_gpu) {
        throw UserError("--outer-transport nccl is for GPUs: leave it out, or use train_gpt");
    }
    if (transport == "gloo" && !has_gloo) {
        throw UserError("--outer-transport gloo is not in this build: give nccl, or build again with Gloo");
    }
}

// UserError for a network interface that Gloo would not find; NCCL's is looked for when it is set.
inline void check_outer_interface(const std::string& transport, const std::string& interface) {
    if (transport == "gloo" && !interface.empty()) { interface_address(interface); }
}

// What an outer communicator of that transport works on.
inline Stream::Kind outer_stream_kind(const std::string& transport) {
    return transport == "gloo" ? Stream::Kind::hosted : Stream::Kind::communicate;
}
