// The fully connected layer, forward and backward, on cuBLASLt, with GELU fused into it or after it.
//
//     out = inp weight^T + bias
//     dinp = dout weight,   dweight += dout^T inp
//
// bf16 build: the inputs of the three products are bf16, sums are fp32. fp32 build, for checking: `highest`
// is fp32, `high` and `medium` round the inputs to tf32. In a bf16 build the forward product also applies
// GELU on some GPUs, and with `--fuse-gelu 2` the backward product also multiplies by GELU's derivative.
// cuBLASLt's matrices are column-major. A row-major (r,c) has the memory layout of a column-major (c,r) with
// leading dimension c, so each product is computed as its transpose, out of these operands:
//
//     product            D = op(A) op(B)    A, column-major  B, column-major m    n    k
//     forward            out^T              weight (C,OC)^T  inp (C,N)       OC   N    C
//     backward_inp       dinp^T             weight (C,OC)    dout (OC,N)     C    N    OC
//     backward_weight    dweight^T          inp (C,N)        dout (OC,N)^T   C    OC   N
#pragma once
#include <cublasLt.h>

#include <array>
#include <map>
#include <string>
#include <type_traits>

#include "llmc/cuda/buffer.cuh"
#include "llmc/cuda/gelu.cuh"
#include "llmc/cuda/gradient_sums.cuh"
#include "llmc/cuda/memory.cuh"
#include "llmc/cuda/stream.cuh"
#include "llmc/floatx.h"
#include "llmc/owned_array.h"

namespace cuda {

// ---- kernels

constexpr int derivative_warps = 8;
// dinp[n,i] *= gelu'(pre_gelu[n,i]), and partial[chunk,i] = its sum over the chunk's rows n.
// dinp, pre_gelu: (rows,columns), columns a multiple of 8   partial: (chunks,columns)
// A warp goes down its rows, 16 bytes a lane; then the warps' sums are added in order. Block (x, y): the
// x-th 32 packs of columns of chunk y. Bound by memory: 6 bytes a value in bf16.
__global__ void __launch_bounds__(32 * derivative_warps)
    multiply_by_gelu_derivative_kernel(floatX* dinp, float* partial, const floatX* pre_gelu, int rows,
                                       int columns, int rows_per_chunk) {
    constexpr int size = Pack<floatX>::size, width = 32 * size;
    SHARED(float[derivative_warps][width], warp_sums);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_column = blockIdx.x * width, column = first_column + lane * size;
    const int first = blockIdx.y * rows_per_chunk, last = min(rows, first + rows_per_chunk);
    float sum[size] = {};
    for (int n = first + warp; n < last && column < columns; n += derivative_warps) {
        const size_t at = size_t(n) * columns + column;
        Pack<floatX> pack = load_pack(dinp + at);
        const Pack<floatX> x = load_pack(pre_gelu + at);
        for (int i = 0; i < size; i++) {
            const float value = float(pack[i]) * gelu_derivative_of_floatX(float(x[i]));
            pack[i] = floatX(value);
            sum[i] += value;
        }
        store_pack(dinp + at, pack);
    }
    for (int i = 0; i < size; i++) { warp_sums[warp][lane * size + i] = sum[i]; }
    __syncthreads();
    const int i = threadIdx.x;
    if (i < width && first_column + i < columns) {
        float total = warp_sums[0][i];
        for (int w = 1; w < derivative_warps; w++) { total += warp_sums[w][i]; }
        partial[size_t(blockIdx.y) * columns + first_column + i] = total;
    }
}

// ---- launchers

// dinp[n,i] *= gelu'(pre_gelu[n,i]), and with the next sums.add_pending() column_sums += its sum over rows.
// dinp, pre_gelu: (rows,columns), columns a multiple of 8, 16-byte aligned   column_sums: (columns)
inline void multiply_by_gelu_derivative(floatX* dinp, float* column_sums, const floatX* pre_gelu, int rows,
                                        int columns, GradientSums& sums, Stream& stream) {
    const int rows_per_chunk = 256, chunks = int(blocks_for(rows, rows_per_chunk));
    float* partial = sums.partial(chunks, columns);
    launch(multiply_by_gelu_derivative_kernel,
           Grid{dim3(blocks_for(columns, 32 * Pack<floatX>::size), chunks), 32 * derivative_warps, 0, stream},
           dinp, partial, pre_gelu, rows, columns, rows_per_chunk);
    sums.add_later(column_sums, partial, chunks, columns, columns);
}

// ---- products

// All activations are floatX here (compare llmc/cpu/activation.h).
using Activation = floatX*;
struct ActivationBuffer : Buffer<floatX> {
    ActivationBuffer() = default;
    ActivationBuffer(long count, bool) : Buffer<floatX>(count) {}
};
inline size_t activation_size(MatmulPrecision) { return sizeof(floatX); }  // bytes of a value

// cuBLASLt's state, its workspace, and a plan for each shape so far. For one thread, stream and GPU.
class Matmul {
public:
    enum class Kind { forward, backward_inp, backward_weight };
    static constexpr bool bf16 = !std::is_same<floatX, float>::value;
    // Whether products apply GELU, and its derivative. Otherwise kernels of their own do, as in fp32 builds.
    const bool fuses_gelu, fuses_gelu_backward;
    // Set while an exchange may run beside the products: they leave it options.sms_taken SMs. Otherwise a
    // product would have a block that waits for the end of the exchange.
    bool leaves_sms = true;

    explicit Matmul(const MatmulOptions& o)
        : fuses_gelu(bf16 && (o.fuse_gelu < 0 ? gains_from_fusing_gelu(attribute(compute_major))
                                              : o.fuse_gelu > 0)),
          fuses_gelu_backward(fuses_gelu && o.fuse_gelu == 2),
          compute(bf16 || o.precision == MatmulPrecision::highest ? CUBLAS_COMPUTE_32F
                                                                  : CUBLAS_COMPUTE_32F_FAST_TF32),
          sms(o.sms_taken > 0 ? attribute(sm_count) - o.sms_taken : 0),
          workspace(workspace_bytes) {
        cublasLtHandle_t made;
        check(cublasLtCreate(&made), "cannot start: does the driver support this CUDA version?");
        handle.reset(made);
    }

    // Whether GELU is fused into the forward by default: on Hopper (an H200 takes as long either way) and on
    // server Blackwell. Elsewhere cuBLASLt's fused products should take longer than plain ones and a kernel.
    // major: compute capability's
    static bool gains_from_fusing_gelu(int major) { return major == 9 || major == 10; }

    std::string description() const {
        return bf16 ? "bf16, sums in fp32" : compute == CUBLAS_COMPUTE_32F ? "fp32" : "tf32, sums in fp32";
    }

    // Gradients of parameters are sums, in fp32; only they may be added to (`add`).
    template <Kind kind>
    using Out = std::conditional_t<kind == Kind::backward_weight, float, floatX>;

    // out = op(a) op(b), or += with `add`. All pointers are 16-byte aligned, C and OC multiples of 8.
    // aux: of out's shape, or null; forward writes it and makes out its GELU, backward_inp multiplies by the
    // derivative of GELU there   bias: (OC) or null; backward_inp with aux writes out's sum over rows: (C)
    template <Kind kind>
    void multiply(Out<kind>* out, const floatX* a, const floatX* b, const floatX* bias, const floatX* aux,
                  int N, int C, int OC, Stream& stream, bool add = false, int batch = 1) {
        require(N > 0 && C > 0 && OC > 0 && C % 8 == 0 && OC % 8 == 0 && are_aligned({out, a, b, bias, aux}));
        const cublasLtEpilogue_t epilogue = epilogue_of(kind, bias, aux);
        const Key key{int(kind), N, C, OC, int(epilogue), leaves_sms ? sms : 0, batch};
        auto found = plans.find(key);
        if (found == plans.end()) { found = plans.emplace(key, make_plan(kind, epilogue, key)).first; }
        const Plan& plan = found->second;
        set_pointers(plan, bias, aux);
        const float alpha = 1.0f, beta = add ? 1.0f : 0.0f;
        check(cublasLtMatmul(handle.get(), plan.operation.get(), &alpha, a, plan.a.get(), b, plan.b.get(),
                             &beta, out, plan.out.get(), out, plan.out.get(), &plan.algorithm,
                             workspace.data(), workspace_bytes, stream),
              plan.problem);
    }

private:
    using Key = std::array<int, 7>;  // kind, N, C, OC, epilogue, SMs (0: all), batch

    static constexpr cudaDeviceAttr compute_major = cudaDevAttrComputeCapabilityMajor,
                                    sm_count = cudaDevAttrMultiProcessorCount;

    static int attribute(cudaDeviceAttr wanted) {
        int device = 0, value = 0;
        cudaCheck(cudaGetDevice(&device));
        cudaCheck(cudaDeviceGetAttribute(&value, wanted, device));
        return value;
    }

    // As much as cuBLAS itself takes on Hopper; 4 MiB would do on earlier GPUs.
    static constexpr size_t workspace_bytes = size_t(32) << 20;

    using OwnedLayout = Owned<cublasLtMatrixLayoutOpaque_t, cublasLtMatrixLayoutDestroy>;
    struct Plan {
        std::string problem;  // in words, for errors
        Owned<cublasLtMatmulDescOpaque_t, cublasLtMatmulDescDestroy> operation;
        OwnedLayout a, b, out;
        cublasLtMatmulAlgo_t algorithm;
    };

    static void check(cublasStatus_t status, const std::string& what) {
        if (status == CUBLAS_STATUS_SUCCESS) { return; }
        throw std::runtime_error(format("cuBLASLt: %s: %s (CUBLASLT_LOG_LEVEL=1 shows why)",
                                        what.c_str(), cublasLtGetStatusString(status)));
    }

    template <class T>
    static void set(const Plan& plan, cublasLtMatmulDescAttributes_t attribute, const T& value) {
        check(cublasLtMatmulDescSetAttribute(plan.operation.get(), attribute, &value, sizeof value),
              plan.problem);
    }

    static void set_pointers(const Plan& plan, const floatX* bias, const floatX* aux) {
        set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
        set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
    }

    static cublasLtEpilogue_t epilogue_of(Kind kind, bool with_bias, bool with_aux) {
        if (with_aux && kind == Kind::backward_inp) { return CUBLASLT_EPILOGUE_DGELU_BGRAD; }
        if (with_aux) { return with_bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX; }
        return with_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    }

    // A row-major (batch,rows,columns), as cuBLASLt sees it.
    static OwnedLayout layout(cudaDataType_t type, int rows, int columns, int32_t batch) {
        cublasLtMatrixLayout_t made;
        check(cublasLtMatrixLayoutCreate(&made, type, uint64_t(columns), uint64_t(rows), columns),
              "a layout");
        OwnedLayout owned(made);
        if (batch == 1) { return owned; }
        const int64_t stride = int64_t(rows) * columns;
        check(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch,
                                               sizeof batch), "a batch");
        check(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                               sizeof stride), "a batch");
        return owned;
    }

    // For any pointers that multiply() takes.
    Plan make_plan(Kind kind, cublasLtEpilogue_t epilogue, const Key& key) const {
        const auto [kind_number, N, C, OC, epilogue_number, for_sms, batch] = key;
        const cudaDataType_t type = bf16 ? CUDA_R_16BF : CUDA_R_32F;
        Plan plan;
        const char* names[] = {"forward", "backward_inp", "backward_weight"};
        plan.problem = format("matmul %s of N %d, C %d, OC %d", names[int(kind)], N, C, OC);
        cublasLtMatmulDesc_t operation;
        check(cublasLtMatmulDescCreate(&operation, compute, CUDA_R_32F), plan.problem);
        plan.operation.reset(operation);
        const bool forward = kind == Kind::forward, of_weight = kind == Kind::backward_weight;
        plan.a = of_weight ? layout(type, N, C, batch) : layout(type, OC, C, batch);
        plan.b = forward ? layout(type, N, C, batch) : layout(type, N, OC, batch);
        plan.out = of_weight ? layout(CUDA_R_32F, OC, C, batch) : layout(type, N, forward ? OC : C, batch);
        set(plan, CUBLASLT_MATMUL_DESC_TRANSA, int32_t(forward ? CUBLAS_OP_T : CUBLAS_OP_N));
        set(plan, CUBLASLT_MATMUL_DESC_TRANSB, int32_t(of_weight ? CUBLAS_OP_T : CUBLAS_OP_N));
        set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t(epilogue));
        if (for_sms > 0) { set(plan, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, int32_t(for_sms)); }  // a hint
        if (epilogue != CUBLASLT_EPILOGUE_DEFAULT && epilogue != CUBLASLT_EPILOGUE_BIAS) {
            set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t(forward ? OC : C));
            set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, int32_t(type));
        }
        // The heuristic looks at the alignment of these two pointers, not at the values. They have the 16
        // bytes that every call promises; the first call's own pointers may be aligned better than later
        // ones.
        const floatX* aligned_to_16 = reinterpret_cast<const floatX*>(workspace.data() + 16);
        set_pointers(plan, aligned_to_16, aligned_to_16);
        plan.algorithm = find_algorithm(plan, forward ? C : of_weight ? N : OC);
        return plan;
    }

    // The heuristic's first choice. Timing eight of them gained nothing on an H200 (dev/results/h200.md).
    // Partial sums of a split k stay fp32. All pointers are promised to be 16-byte aligned, as its kernels
    // load.   k: the number of products in a sum
    cublasLtMatmulAlgo_t find_algorithm(const Plan& plan, int k) const {
        cublasLtMatmulPreference_t made;
        check(cublasLtMatmulPreferenceCreate(&made), plan.problem);
        const Owned<cublasLtMatmulPreferenceOpaque_t, cublasLtMatmulPreferenceDestroy> preference(made);
        auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
            check(cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof value), plan.problem);
        };
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(workspace_bytes));
        // Where k is split but no multiple of a tile's depth (64), cuBLAS 12 and 13 are reported to drop its
        // end (github.com/facebookexperimental/triton/pull/2767).
        prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
               uint32_t(k % 64 ? CUBLASLT_REDUCTION_SCHEME_NONE : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
        for (const auto alignment :
             {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
            prefer(alignment, uint32_t(16));
        }
        cublasLtMatmulHeuristicResult_t best{};
        int found = 0;
        const std::string what =
            plan.problem + " has no algorithm here: try another shape, a newer CUDA or --fuse-gelu 0";
        check(cublasLtMatmulAlgoGetHeuristic(handle.get(), plan.operation.get(), plan.a.get(), plan.b.get(),
                                             plan.out.get(), plan.out.get(), made, 1, &best, &found),
              what);
        check(found < 1 ? CUBLAS_STATUS_NOT_SUPPORTED : best.state, what);
        return best.algo;
    }

    cublasComputeType_t compute;
    const int sms;  // those that an exchange leaves; 0: all
    Buffer<unsigned char> workspace;
    Owned<cublasLtContext, cublasLtDestroy> handle;
    std::map<Key, Plan> plans;
};

// out: (N,OC)   inp: (N,C)   weight: (OC,C)   bias: (OC) or null
// pre_gelu: (N,OC) or null; if given, it receives inp weight^T + bias, and out = gelu(pre_gelu)
inline void matmul_forward(Matmul& matmul, floatX* out, const floatX* inp, const floatX* weight,
                           const floatX* bias, int N, int C, int OC, Stream& stream,
                           floatX* pre_gelu = nullptr) {
    if (pre_gelu && !matmul.fuses_gelu) {
        matmul.multiply<Matmul::Kind::forward>(pre_gelu, weight, inp, bias, nullptr, N, C, OC, stream);
        gelu_forward(out, pre_gelu, long(N) * OC, stream);
    } else {
        matmul.multiply<Matmul::Kind::forward>(out, weight, inp, bias, pre_gelu, N, C, OC, stream);
    }
}

// out = a b, or a b^T, for `batch` matrices, one after another.   out: (N,C)   a: (N,K)   b: (K,C) or (C,K)
inline void matmul_product(Matmul& matmul, floatX* out, const floatX* a, const floatX* b, int N, int K, int C,
                           Stream& stream, int batch = 1) {
    matmul.multiply<Matmul::Kind::backward_inp>(out, b, a, nullptr, nullptr, N, C, K, stream, false, batch);
}
inline void matmul_product_transposed(Matmul& matmul, floatX* out, const floatX* a, const floatX* b, int N,
                                      int K, int C, Stream& stream, int batch = 1) {
    matmul.multiply<Matmul::Kind::forward>(out, b, a, nullptr, nullptr, N, K, C, stream, false, batch);
}

// out = inp^T inp.   out: (C,C)   inp: (N,C)
inline void matmul_gram(Matmul& matmul, float* out, const floatX* inp, int N, int C, Stream& stream) {
    matmul.multiply<Matmul::Kind::backward_weight>(out, inp, inp, nullptr, nullptr, N, C, C, stream);
}

// Overwrites dinp, adds to dweight, or overwrites it unless sums.adds.
// dinp, inp: (N,C)   dweight, weight: (OC,C)   dout: (N,OC)
inline void matmul_backward(Matmul& matmul, floatX* dinp, float* dweight, const floatX* dout,
                            const floatX* inp, const floatX* weight, int N, int C, int OC,
                            const GradientSums& sums, Stream& stream) {
    const floatX* none = nullptr;
    matmul.multiply<Matmul::Kind::backward_weight>(dweight, inp, dout, none, none, N, C, OC, stream,
                                                   sums.adds);
    matmul.multiply<Matmul::Kind::backward_inp>(dinp, weight, dout, none, none, N, C, OC, stream);
}

// The same for inp = gelu(pre_gelu): overwrites dpre_gelu and, with the next sums.add_pending(), adds its sum
// over rows to dbias, the gradient of the bias of the product before. Where GELU is fused, cuBLASLt sums and
// rounds that sum to bf16.   pre_gelu, dpre_gelu: (N,C)   dbias: (C)
inline void matmul_gelu_backward(Matmul& matmul, floatX* dpre_gelu, float* dweight, float* dbias,
                                 const floatX* dout, const floatX* inp, const floatX* pre_gelu,
                                 const floatX* weight, int N, int C, int OC, GradientSums& sums,
                                 Stream& stream) {
    const bool fused = matmul.fuses_gelu_backward;
    const floatX *none = nullptr, *aux = fused ? pre_gelu : nullptr;
    floatX* sum = fused ? reinterpret_cast<floatX*>(sums.partial(1, C)) : nullptr;
    matmul.multiply<Matmul::Kind::backward_weight>(dweight, inp, dout, none, none, N, C, OC, stream,
                                                   sums.adds);
    matmul.multiply<Matmul::Kind::backward_inp>(dpre_gelu, weight, dout, sum, aux, N, C, OC, stream);
    if (fused) {
        sums.add_later(dbias, sum, 1, C, C);
    } else {
        multiply_by_gelu_derivative(dpre_gelu, dbias, pre_gelu, N, C, sums, stream);
    }
}

}  // namespace cuda
