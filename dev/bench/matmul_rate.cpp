// How fast oneDNN alone multiplies matrices on this machine: what the trainer's rate is a share of.
//
//     OMP_NUM_THREADS=2 build/matmul_rate M N K fp32|bf16     prints flops a second: the median of 20 products
//
// out (M,N) = a (M,K) b (K,N) with fp32 sums and output, in layouts that oneDNN chooses and already in its input type.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include <dnnl.hpp>

#include "llmc/clock.h"

using memory = dnnl::memory;

static double flops_a_second(long M, long N, long K, memory::data_type type) {
    dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    dnnl::stream stream(engine);
    const auto any = memory::format_tag::any;
    const memory::desc a({M, K}, type, any), b({K, N}, type, any), out({M, N}, memory::data_type::f32, any);
#if DNNL_VERSION_MAJOR >= 3
    const dnnl::matmul::primitive_desc chosen(engine, a, b, out);
#else
    const dnnl::matmul::primitive_desc chosen({a, b, out}, engine);
#endif
    const std::unordered_map<int, memory> arguments = {{DNNL_ARG_SRC, memory(chosen.src_desc(), engine)},
                                                       {DNNL_ARG_WEIGHTS, memory(chosen.weights_desc(), engine)},
                                                       {DNNL_ARG_DST, memory(chosen.dst_desc(), engine)}};
    for (const auto& argument : arguments) {
        memset(argument.second.get_data_handle(), 0, argument.second.get_desc().get_size());
    }
    dnnl::matmul matmul(chosen);
    std::vector<double> seconds;
    for (int i = -3; i < 20; i++) {  // three to warm up
        const double start = now_seconds();
        matmul.execute(stream, arguments);
        stream.wait();
        if (i >= 0) { seconds.push_back(now_seconds() - start); }
    }
    std::nth_element(seconds.begin(), seconds.begin() + 10, seconds.end());
    return 2.0 * double(M) * double(N) * double(K) / seconds[10];
}

int main(int argc, char** argv) {
    const std::string type = argc == 5 ? argv[4] : "";
    const long M = argc == 5 ? atol(argv[1]) : 0, N = argc == 5 ? atol(argv[2]) : 0, K = argc == 5 ? atol(argv[3]) : 0;
    if (M < 1 || N < 1 || K < 1 || (type != "fp32" && type != "bf16")) {
        fprintf(stderr, "error: give M N K and fp32 or bf16: build/matmul_rate 2048 1536 384 fp32\n");
        return 2;
    }
    printf("%.6g\n", flops_a_second(M, N, K, type == "fp32" ? memory::data_type::f32 : memory::data_type::bf16));
    return 0;
}
