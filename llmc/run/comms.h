// The communicators of a run.
//     inner   joins the ranks of a worker, every step: TCP on CPUs, NCCL on GPUs
//     outer   joins the owners of one shard on all workers: TCP, or on GPUs also NCCL
#pragma once
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "llmc/comm.h"
#include "llmc/device.h"
#include "llmc/run/comm_tcp.h"
#include "llmc/run/world.h"
#ifdef USE_CUDA
#include "llmc/run/comm_nccl.cuh"
#include "llmc/run/comm_staged.cuh"
#endif

namespace cpu {

inline std::unique_ptr<Comm> make_inner_comm(const CommGroup& group) { return make_comm_tcp(group); }

inline std::unique_ptr<Comm> make_outer_comm(const CommGroup& group, const std::string&) {
    return make_comm_tcp(group);
}

}  // namespace cpu

#ifdef USE_CUDA
namespace cuda {

inline std::unique_ptr<Comm> make_inner_comm(const CommGroup& group) {
    return std::make_unique<NcclComm>(group, false);
}

// TCP's works only on hosted streams. NCCL's occupies one SM during an exchange, or more if so configured.
inline std::unique_ptr<Comm> make_outer_comm(const CommGroup& group, const std::string& transport) {
    if (transport == "tcp") { return std::make_unique<StagedComm>(make_comm_tcp(group)); }
    for (const char* name : {"NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MIN_NRINGS"}) {
        if (group.rank > 0 || atoi(environment(name).c_str()) < 2) { continue; }
        fprintf(stderr, "warning: with %s=%s, exchanges between workers may take more than one SM of a GPU, "
                        "and delay collectives in a worker: --outer-transport tcp takes none\n",
                name, environment(name).c_str());
    }
    return std::make_unique<NcclComm>(group, true);
}

}  // namespace cuda
#endif

// The kind of stream that an outer communicator of that transport works on.
inline Stream::Kind outer_stream_kind(const std::string& transport) {
    return transport == "tcp" ? Stream::Kind::hosted : Stream::Kind::communicate;
}
