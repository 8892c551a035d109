// The fully connected layer, forward and backward, on oneDNN; with GELU fused into either side.
//
//     out = inp weight^T + bias
//     dinp = dout weight,   dweight += dout^T inp
//
// `highest` is fp32; `high` and `medium` round the inputs of the three products to bf16 and sum in fp32,
// where the CPU multiplies bf16 natively (AVX512-BF16, AMX), and are fp32 elsewhere. oneDNN may divide the
// long sums of a small output among its threads: then the bits depend on how many there are.
//
// Where they round, outputs that only attention or GELU reads are stored in bf16, too (activation.h).
#pragma once
#include <dnnl.hpp>

#include <array>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "llmc/buffer.h"
#include "llmc/cpu/activation.h"
#include "llmc/cpu/gelu.h"
#include "llmc/cpu/gradient_sums.h"
#include "llmc/floatx.h"
#include "llmc/gelu.h"
#include "llmc/stream.h"

namespace cpu {

// True if this CPU has these instructions, and oneDNN may use them (ONEDNN_MAX_CPU_ISA).
inline bool cpu_has(dnnl::cpu_isa isa) {
    return (unsigned(dnnl::get_effective_cpu_isa()) & unsigned(isa)) == unsigned(isa);
}

// True if this CPU multiplies bf16 natively: emulated, bf16 products are slower than fp32 ones.
inline bool cpu_has_fast_bf16() { return cpu_has(dnnl::cpu_isa::avx512_core_bf16); }

// True if this CPU also has AMX, the program is built for it, and the system lets the process use it.
inline bool multiplies_in_amx() {
#if defined(__AMX_BF16__)
    return cpu_has(dnnl::cpu_isa::avx512_core_amx);
#else
    return false;
#endif
}

inline bool rounds_to_bf16(MatmulPrecision precision) {
    return precision != MatmulPrecision::highest && cpu_has_fast_bf16();
}

// Bytes of a value of an Activation.
inline size_t activation_size(MatmulPrecision precision) {
    return rounds_to_bf16(precision) ? sizeof(uint16_t) : sizeof(float);
}

// out[i] = bf16(inp[i]).   out, inp: (n)
inline void convert_to_bf16(uint16_t* out, const float* inp, long n) {
    assign_in_parallel(out, n, [=](long i) { return inp[i]; });
}

// oneDNN's state, its primitives (one for each shape so far) and scratch. For one thread at a time. oneDNN
// reads weights fastest in its own blocked layout, and a reorder that also rounds to bf16 costs no more than
// rounding alone; for activations its internal copy is cheaper than a reorder.
class Matmul {
public:
    const bool bf16;  // products round their inputs to it
    bool leaves_sms = false;  // of a GPU

    explicit Matmul(const MatmulOptions& options)
        : bf16(rounds_to_bf16(options.precision)),
          engine(dnnl::engine::kind::cpu, 0),
          stream(engine) {}

    // What is used, in words.
    std::string description() const { return bf16 ? "bf16, sums in fp32" : "fp32"; }

    // inp or dout in the type that products take: rounded into scratch of its own, or unchanged.
    void* round_inp(Activation inp, long n) {
        return inp.visit([&](auto* values) { return round(inp_scratch, values, n); });
    }
    void* round_dout(Activation dout, long n) {
        return dout.visit([&](auto* values) { return round(dout_scratch, values, n); });
    }

    // out (N,OC) = inp (N,C) weight (OC,C)^T + bias.   inp: from round_inp
    void forward(Activation out, void* inp, const float* weight, const float* bias, int N, int C, int OC) {
        const Product& p = product(Kind::forward, N, C, OC, bias != nullptr, out.is_bf16());
        execute(p, out.data(), inp, pack(p, weight), bias);
    }

    // dinp (N,C) = dout (N,OC) weight (OC,C).   dout: from round_dout
    void backward_inp(float* dinp, void* dout, const float* weight, int N, int C, int OC) {
        const Product& p = product(Kind::backward_inp, N, C, OC);
        execute(p, dinp, dout, pack(p, weight), nullptr);
    }

    // dweight (OC,C) = dout (N,OC)^T inp (N,C), or += if it adds.   dout, inp: from round_dout and round_inp
    void backward_weight(float* dweight, void* dout, void* inp, int N, int C, int OC, bool adds) {
        const Kind kind = adds ? Kind::add_backward_weight : Kind::backward_weight;
        execute(product(kind, N, C, OC), dweight, dout, inp, nullptr);
    }

    // Where to store in fp32 what is then rounded to `out`: `out` itself if it is fp32, else scratch (n).
    float* unrounded(float* out, long) { return out; }
    float* unrounded(uint16_t*, long n) {
        if (out_scratch.count() < n) { out_scratch = Buffer<float>(n); }
        return out_scratch;
    }

private:
    using memory = dnnl::memory;
    using Tag = dnnl::memory::format_tag;

    enum class Kind { forward, backward_inp, backward_weight, add_backward_weight };

    struct Product {  // out = a b + bias
        dnnl::matmul primitive;
        dnnl::reorder pack;             // of the weight
        memory::desc a, b, bias, out;
        memory::desc weight;            // before `pack`; after it, it is b
    };

    static uint16_t* scratch(Buffer<uint16_t>& buffer, long n) {
        if (buffer.count() < n) { buffer = Buffer<uint16_t>(n); }
        return buffer.data();
    }

    void* round(Buffer<uint16_t>& buffer, const float* values, long n) {
        if (!bf16) { return const_cast<float*>(values); }
        convert_to_bf16(scratch(buffer, n), values, n);
        return buffer.data();
    }

    void* round(Buffer<uint16_t>&, uint16_t* values, long) {
        if (!bf16) { throw std::logic_error("a product of fp32 takes no bf16"); }
        return values;
    }

    void execute(const Product& p, void* out, void* a, void* b, const float* bias) {
        std::unordered_map<int, memory> arguments{{DNNL_ARG_SRC, memory(p.a, engine, a)},
                                                  {DNNL_ARG_WEIGHTS, memory(p.b, engine, b)},
                                                  {DNNL_ARG_DST, memory(p.out, engine, out)}};
        if (bias) { arguments[DNNL_ARG_BIAS] = memory(p.bias, engine, const_cast<float*>(bias)); }
        p.primitive.execute(stream, arguments);
        stream.wait();
    }

    // The weight in the layout and type that the product reads.
    void* pack(const Product& p, const float* weight) {
        uint16_t* packed = scratch(weight_scratch, long(p.b.get_size() / sizeof(uint16_t)));
        memory from(p.weight, engine, const_cast<float*>(weight)), to(p.b, engine, packed);
        p.pack.execute(stream, from, to);
        return packed;
    }

    const Product& product(Kind kind, int N, int C, int OC, bool with_bias = false, bool to_bf16 = false) {
        const std::array<int, 6> key{int(kind), N, C, OC, with_bias, to_bf16};
        Product& p = products[key];
        if (!p.primitive) { p = make(kind, N, C, OC, with_bias, to_bf16); }
        return p;
    }

    Product make(Kind kind, int N, int C, int OC, bool with_bias, bool to_bf16) {
        const auto f32 = memory::data_type::f32, type = bf16 ? memory::data_type::bf16 : f32;
        Product p;
        dnnl::primitive_attr attributes;
        const bool is_packed = kind == Kind::forward || kind == Kind::backward_inp;
        if (is_packed) {
            const int K = kind == Kind::forward ? C : OC, columns = kind == Kind::forward ? OC : C;
            p.a = memory::desc({N, K}, type, Tag::ab);
            p.b = memory::desc({K, columns}, type, Tag::any);
            p.out = memory::desc({N, columns}, to_bf16 ? memory::data_type::bf16 : f32, Tag::ab);
            p.weight = memory::desc({K, columns}, f32, kind == Kind::forward ? Tag::ba : Tag::ab);
        } else {
            p.a = memory::desc({OC, N}, type, Tag::ba);
            p.b = memory::desc({N, C}, type, Tag::ab);
            p.out = memory::desc({OC, C}, f32, Tag::ab);
            dnnl::post_ops sum;
            if (kind == Kind::add_backward_weight) { sum.append_sum(1.0f); }
            attributes.set_post_ops(sum);
        }
        if (with_bias) { p.bias = memory::desc({1, OC}, f32, Tag::ab); }
#if DNNL_VERSION_MAJOR >= 3
        const auto describe = [&] {
            return dnnl::matmul::primitive_desc(engine, p.a, p.b, p.bias, p.out, attributes);
        };
#else
        const dnnl::matmul::desc product(p.a, p.b, p.bias, p.out);
        const auto describe = [&] { return dnnl::matmul::primitive_desc(product, attributes, engine); };
#endif
        dnnl::matmul::primitive_desc chosen = describe(), other = describe();
        // Where both inputs must be repacked, oneDNN's older kernels take up to 17% less time than its first
        // choice (oneDNN 2.6.3 on Zen 5), but they do not use AMX.
        while (!is_packed && !cpu_has(dnnl::cpu_isa::avx512_core_amx) && other.next_impl()) {
            if (strcmp(other.impl_info_str(), "gemm:jit") == 0) {
                chosen = other;
                break;
            }
        }
        p.primitive = dnnl::matmul(chosen);
        p.b = chosen.weights_desc();
        if (is_packed) {
            p.pack = dnnl::reorder(dnnl::reorder::primitive_desc(engine, p.weight, engine, p.b));
        }
        return p;
    }

    dnnl::engine engine;
    dnnl::stream stream;
    std::map<std::array<int, 6>, Product> products;
    Buffer<uint16_t> inp_scratch, dout_scratch, weight_scratch;
    Buffer<float> out_scratch;
};

// out: (N,OC)   inp: (N,C)   weight: (OC,C)   bias: (OC) or null
inline void matmul_forward(Matmul& matmul, Activation out, Activation inp, const float* weight,
                           const float* bias, int N, int C, int OC, Stream&) {
    matmul.forward(out, matmul.round_inp(inp, long(N) * C), weight, bias, N, C, OC);
}

// The same with GELU: pre_gelu = inp weight^T + bias, out = gelu(pre_gelu).   out, pre_gelu: (N,OC)
inline void matmul_forward(Matmul& matmul, Activation out, Activation inp, const float* weight,
                           const float* bias, int N, int C, int OC, Stream& stream, Activation pre_gelu) {
    matmul_forward(matmul, pre_gelu, inp, weight, bias, N, C, OC, stream);
    gelu_forward(out, pre_gelu, long(N) * OC, stream);
}

// out = a b, or a b^T, for `batch` matrices, one after another.   out: (N,C)   a: (N,K)   b: (K,C) or (C,K)
inline void matmul_product(Matmul& matmul, float* out, const float* a, const float* b, int N, int K, int C,
                           Stream&, int batch = 1) {
    for (; batch > 0; batch--, out += long(N) * C, a += long(N) * K, b += long(K) * C) {
        matmul.backward_inp(out, matmul.round_dout(a, long(N) * K), b, N, C, K);
    }
}
inline void matmul_product_transposed(Matmul& matmul, float* out, const float* a, const float* b, int N,
                                      int K, int C, Stream&, int batch = 1) {
    for (; batch > 0; batch--, out += long(N) * C, a += long(N) * K, b += long(K) * C) {
        matmul.forward(out, matmul.round_inp(a, long(N) * K), b, nullptr, N, K, C);
    }
}

// out = inp^T inp.   out: (C,C)   inp: (N,C)
inline void matmul_gram(Matmul& matmul, float* out, const float* inp, int N, int C, Stream&) {
    void* rounded = matmul.round_inp(inp, long(N) * C);
    matmul.backward_weight(out, rounded, rounded, N, C, C, false);
}

// Overwrites dinp; adds to dweight, or overwrites it unless sums.adds.
// dinp, inp: (N,C)   dweight, weight: (OC,C)   dout: (N,OC)
inline void matmul_backward(Matmul& matmul, float* dinp, float* dweight, Activation dout, Activation inp,
                            const float* weight, int N, int C, int OC, const GradientSums& sums, Stream&) {
    void* rounded = matmul.round_dout(dout, long(N) * OC);
    matmul.backward_weight(dweight, rounded, matmul.round_inp(inp, long(N) * C), N, C, OC, sums.adds);
    matmul.backward_inp(dinp, rounded, weight, N, C, OC);
}

// dpre_gelu[i] = dout[i] * the derivative of GELU at pre_gelu[i]. Adds its sum over rows to dbias, or
// overwrites that unless sums.adds.
// dpre_gelu, dout, pre_gelu: (N,C), where dpre_gelu may be dout   dbias: (C)
template <class T>
inline void gelu_backward(T* dpre_gelu, float* dbias, const float* dout, const T* pre_gelu, int N, int C,
                          const GradientSums& sums) {
    add_column_sums({dbias}, N, C, sums, [=](float* sum, long n) {
        const float* d = dout + n * C;
        const T* x = pre_gelu + n * C;
        assign(dpre_gelu + n * C, C, [=](long c) {
            const float value = d[c] * gelu_derivative(widened(x[c]));
            sum[c] += value;
            return value;
        });
    });
}

// The same for inp = gelu(pre_gelu). Overwrites dpre_gelu, and adds its sum over rows to dbias, the gradient
// of the preceding product's bias, or overwrites that unless sums.adds.
// pre_gelu, dpre_gelu: (N,C)   dbias: (C)
inline void matmul_gelu_backward(Matmul& matmul, Activation dpre_gelu, float* dweight, float* dbias,
                                 const float* dout, Activation inp, Activation pre_gelu,
                                 const float* weight, int N, int C, int OC, const GradientSums& sums,
                                 Stream& stream) {
    dpre_gelu.visit([&](auto* values) {
        float* dinp = matmul.unrounded(values, long(N) * C);
        matmul_backward(matmul, dinp, dweight, dout, inp, weight, N, C, OC, sums, stream);
        gelu_backward(values, dbias, dinp, pre_gelu.like(values), N, C, sums);
    });
}

}  // namespace cpu
