// The fully connected layer, forward and backward, on oneDNN; with GELU fused into either side.
//
//     out = inp weight^T + bias;      dinp = dout weight,   dweight += dout^T inp,   dbias += sum over rows of dout
//
// Precision in PyTorch's words: `highest` is fp32; `high` and `medium` round the inputs of the three products to bf16 and
// sum in fp32, where the CPU multiplies bf16 natively (AVX512-BF16, AMX), and are fp32 elsewhere.
#pragma once
#include <dnnl.hpp>

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "llmc/buffer.h"
#include "llmc/gelu.h"
#include "llmc/stream.h"

enum class MatmulPrecision { highest, high, medium };

namespace cpu {

// True where bf16 products are faster than fp32 ones: emulated, they are slower.
inline bool cpu_has_fast_bf16() {
    const unsigned bf16 = unsigned(dnnl::cpu_isa::avx512_core_bf16);
    return (unsigned(dnnl::get_effective_cpu_isa()) & bf16) == bf16;
}

// The library's state, and the primitives made so far: one for each shape. For one thread at a time.
class Matmul {
public:
    explicit Matmul(MatmulPrecision precision)
        : bf16(precision != MatmulPrecision::highest && cpu_has_fast_bf16()), engine(dnnl::engine::kind::cpu, 0),
          stream(engine) {}

    // What is used, for people.
    std::string description() const { return bf16 ? "bf16, sums in fp32" : "fp32"; }

    // out (M,N) = or += a b + bias.   a: (M,K), or (K,M) if a_transposed   b: (K,N), or (N,K) if b_transposed
    // bias: (N) or null
    void multiply(float* out, const float* a, bool a_transposed, const float* b, bool b_transposed, const float* bias,
                  int M, int N, int K, bool accumulate) {
        using dnnl::memory;
        Product& p = product({M, N, K, a_transposed, b_transposed, bias != nullptr, accumulate});
        std::unordered_map<int, memory> arguments;
        arguments[DNNL_ARG_SRC] = memory(p.a, engine, input(p.a_scratch, a, long(M) * K));
        arguments[DNNL_ARG_WEIGHTS] = memory(p.b, engine, input(p.b_scratch, b, long(N) * K));
        arguments[DNNL_ARG_DST] = memory(p.out, engine, out);
        if (bias) { arguments[DNNL_ARG_BIAS] = memory(p.bias, engine, const_cast<float*>(bias)); }
        p.primitive.execute(stream, arguments);
        stream.wait();
    }

private:
    struct Product {
        dnnl::matmul primitive;
        dnnl::memory::desc a, b, bias, out;
        Buffer<uint16_t> a_scratch, b_scratch;
    };

    void* input(Buffer<uint16_t>& scratch, const float* values, long n) {
        if (!bf16) { return const_cast<float*>(values); }
        if (scratch.count() < n) { scratch = Buffer<uint16_t>(n); }
        uint16_t* out = scratch.data();
        #pragma omp parallel for simd
        for (long i = 0; i < n; i++) {
            uint32_t bits = uint32_t(bits_of_float(values[i]));
            out[i] = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
        }
        return out;
    }

    Product& product(const std::array<int, 7>& key) {
        auto found = products.find(key);
        if (found != products.end()) { return found->second; }
        using dnnl::memory;
        auto [M, N, K, a_transposed, b_transposed, with_bias, accumulate] = key;
        const auto type = bf16 ? memory::data_type::bf16 : memory::data_type::f32, f32 = memory::data_type::f32;
        const auto ab = memory::format_tag::ab, ba = memory::format_tag::ba;
        Product p;
        p.a = memory::desc({M, K}, type, a_transposed ? ba : ab);
        p.b = memory::desc({K, N}, type, b_transposed ? ba : ab);
        p.bias = with_bias ? memory::desc({1, N}, f32, ab) : memory::desc();
        p.out = memory::desc({M, N}, f32, ab);
        dnnl::primitive_attr attributes;
        if (accumulate) {
            dnnl::post_ops sum;
            sum.append_sum(1.0f);
            attributes.set_post_ops(sum);
        }
#if DNNL_VERSION_MAJOR >= 3
        p.primitive = dnnl::matmul({engine, p.a, p.b, p.bias, p.out, attributes});
#else
        p.primitive = dnnl::matmul({{p.a, p.b, p.bias, p.out}, attributes, engine});
#endif
        return products.emplace(key, std::move(p)).first->second;
    }

    bool bf16;
    dnnl::engine engine;
    dnnl::stream stream;
    std::map<std::array<int, 7>, Product> products;
};

// out: (N,OC)   inp: (N,C)   weight: (OC,C)   bias: (OC) or null
// pre_gelu: (N,OC) or null; given, it is what is described above, and out = gelu(pre_gelu)
inline void matmul_forward(Matmul& matmul, float* out, const float* inp, const float* weight, const float* bias, int N,
                           int C, int OC, Stream&, float* pre_gelu = nullptr) {
    float* product = pre_gelu ? pre_gelu : out;
    matmul.multiply(product, inp, false, weight, true, bias, N, OC, C, false);
    if (pre_gelu) {
        #pragma omp parallel for simd
        for (long i = 0; i < long(N) * OC; i++) { out[i] = gelu(pre_gelu[i]); }
    }
}

// dinp, inp: (N,C), dinp overwritten   dweight: (OC,C) and dbias: (OC) or null, added to   dout: (N,OC)   weight: (OC,C)
// pre_gelu: (N,C) or null; given, inp is gelu(pre_gelu), and dinp becomes the gradient of pre_gelu
inline void matmul_backward(Matmul& matmul, float* dinp, float* dweight, float* dbias, const float* dout,
                            const float* inp, const float* weight, int N, int C, int OC, Stream&,
                            const float* pre_gelu = nullptr) {
    matmul.multiply(dinp, dout, false, weight, false, nullptr, N, C, OC, false);
    if (pre_gelu) {
        #pragma omp parallel for simd
        for (long i = 0; i < long(N) * C; i++) { dinp[i] *= gelu_derivative(pre_gelu[i]); }
    }
    matmul.multiply(dweight, dout, true, inp, false, nullptr, OC, C, N, true);
    if (dbias) {
        for (int n = 0; n < N; n++) {
            #pragma omp simd
            for (int i = 0; i < OC; i++) { dbias[i] += dout[long(n) * OC + i]; }
        }
    }
}

}  // namespace cpu
