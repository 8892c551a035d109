// The communicators of a run.
//     inner   joins the ranks of a worker, every step: Gloo on CPUs, NCCL on GPUs
//     outer   joins the owners of one shard on all workers: Gloo, or on GPUs also NCCL
// A program for GPUs may be built without Gloo: make then defines WITHOUT_GLOO, which only this file knows.
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

// Gloo's works only on hosted streams. NCCL's occupies one SM during an exchange.
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

// UserError if this program does not have the outer transport.
inline void check_outer_transport(const std::string& transport) {
    if (transport == "nccl" && !runs_on_gpu) {
        throw UserError("--outer-transport nccl is for GPUs: leave it out, or use train_gpt");
    }
    if (transport == "gloo" && !has_gloo) {
        throw UserError("--outer-transport gloo is not in this build: give nccl, or build again with Gloo");
    }
}

// UserError if Gloo would not find the network interface. (NCCL's is checked when it is set.)
inline void check_outer_interface(const std::string& transport, const std::string& interface) {
    if (transport == "gloo" && !interface.empty()) { interface_address(interface); }
}

// The kind of stream that an outer communicator of that transport works on.
inline Stream::Kind outer_stream_kind(const std::string& transport) {
    return transport == "gloo" ? Stream::Kind::hosted : Stream::Kind::communicate;
}
