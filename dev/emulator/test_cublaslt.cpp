// The emulated cuBLASLt: what it computes, on asymmetric small integers, and that it refuses what the
// library's documentation forbids. Each misuse is made on purpose.
#include <cublasLt.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <cmath>
#include <thread>

#include "dev/emulator/cublaslt.h"
#include "dev/emulator/device_array.h"

namespace {

using bf16 = __nv_bfloat16;

float to_float(float value) { return value; }
float to_float(bf16 value) { return __bfloat162float(value); }

// A column-major (rows,columns) of small integers, all of its padding 77. No two neighbours are equal.
template <class T>
struct Matrix {
    int rows, columns, ld;
    std::vector<T> values;

    Matrix(int rows, int columns, int padding, int seed)
        : rows(rows), columns(columns), ld(rows + padding), values(size_t(ld) * columns, T(77.0f)) {
        for (int j = 0; j < columns; j++) {
            for (int i = 0; i < rows; i++) { set(i, j, float((5 * i + 3 * j + i * j + seed) % 7 - 3)); }
        }
    }
    float at(int i, int j) const { return to_float(values[size_t(j) * ld + i]); }
    void set(int i, int j, float value) { values[size_t(j) * ld + i] = T(value); }
};

template <class T>
constexpr cudaDataType_t type_of() {
    return sizeof(T) == 2 ? CUDA_R_16BF : CUDA_R_32F;
}

// Everything that one call takes. A test spoils one thing of it.
struct Call {
    cublasLtHandle_t handle = nullptr;
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t a_layout = nullptr, b_layout = nullptr, d_layout = nullptr;
    cublasLtMatmulPreference_t preference = nullptr;
    const void *a = nullptr, *b = nullptr, *c = nullptr;
    void* d = nullptr;
    float alpha = 1.0f, beta = 0.0f;
    size_t workspace_bytes = 1 << 20;
    DeviceArray<unsigned char> workspace{size_t(1) << 20};
    int found = -1;
    cublasLtMatmulHeuristicResult_t result{};

    explicit Call(cublasComputeType_t compute = CUBLAS_COMPUTE_32F) {
        EXPECT_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
        EXPECT_EQ(cublasLtMatmulDescCreate(&operation, compute, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
        EXPECT_EQ(cublasLtMatmulPreferenceCreate(&preference), CUBLAS_STATUS_SUCCESS);
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(workspace_bytes));
    }
    Call(const Call&) = delete;
    ~Call() {
        cublasLtMatmulPreferenceDestroy(preference);
        for (cublasLtMatrixLayout_t layout : {a_layout, b_layout, d_layout}) {
            cublasLtMatrixLayoutDestroy(layout);
        }
        cublasLtMatmulDescDestroy(operation);
        cublasLtDestroy(handle);
    }

    template <class T>
    void set(cublasLtMatmulDescAttributes_t attribute, T value) {
        EXPECT_EQ(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value),
                  CUBLAS_STATUS_SUCCESS);
    }
    template <class T>
    void prefer(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
        EXPECT_EQ(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
                  CUBLAS_STATUS_SUCCESS);
    }
    void lay_out(cublasLtMatrixLayout_t& layout, cudaDataType_t type, int rows, int columns, int ld) {
        if (layout) { cublasLtMatrixLayoutDestroy(layout); }
        EXPECT_EQ(cublasLtMatrixLayoutCreate(&layout, type, uint64_t(rows), uint64_t(columns), ld),
                  CUBLAS_STATUS_SUCCESS);
    }
    void epilogue(cublasLtEpilogue_t value) { set(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t(value)); }

    cublasStatus_t choose() {
        return cublasLtMatmulAlgoGetHeuristic(handle, operation, a_layout, b_layout, d_layout, d_layout,
                                              preference, 1, &result, &found);
    }
    cublasStatus_t multiply() {
        return cublasLtMatmul(handle, operation, &alpha, a, a_layout, b, b_layout, &beta, c, d_layout, d,
                              d_layout, &result.algo, workspace, workspace_bytes, nullptr);
    }
    cublasStatus_t run() {
        const cublasStatus_t status = choose();
        return status == CUBLAS_STATUS_SUCCESS ? multiply() : status;
    }
};

// ---- what is computed

float gelu_in_double(float x) {
    return float(0.5 * x *
                 (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * std::pow(double(x), 3)))));
}

float slope_of_gelu(float x) {
    const double h = 1e-4;
    auto f = [](double y) {
        return 0.5 * y * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (y + 0.044715 * y * y * y)));
    };
    return float((f(x + h) - f(x - h)) / (2 * h));
}

bool has_aux(cublasLtEpilogue_t epilogue) {
    return epilogue != CUBLASLT_EPILOGUE_DEFAULT && epilogue != CUBLASLT_EPILOGUE_BIAS;
}

// Sums of products of small integers and the epilogue's input are exact in float and, divided by 8, in bf16;
// GELU's results are rounded: by at most half of bf16's spacing, 2^-8 of a value, and a little for the
// derivative by differences.
template <class T, class Out>
void expect_product(bool transa, bool transb, int m, int n, int k, cublasLtEpilogue_t epilogue, float beta) {
    SCOPED_TRACE(testing::Message() << m << " " << n << " " << k << (transa ? " T" : " N")
                                    << (transb ? "T" : "N") << " epilogue " << int(epilogue) << " beta "
                                    << beta);
    const Matrix<T> a(transa ? k : m, transa ? m : k, 8, 1), b(transb ? n : k, transb ? k : n, 16, 2);
    Matrix<Out> c(m, n, 8, 3), aux(m, n, (8 - m % 8) % 8 + 8, 4);
    const Matrix<Out> bias(m, 1, 0, 5);
    DeviceArray<T> device_a(a.values), device_b(b.values);
    DeviceArray<Out> device_d(c.values), device_aux(aux.values), device_bias(bias.values);

    Call call;
    call.a = static_cast<T*>(device_a), call.b = static_cast<T*>(device_b);
    call.c = call.d = static_cast<Out*>(device_d);
    call.alpha = 0.125f, call.beta = beta;
    call.lay_out(call.a_layout, type_of<T>(), a.rows, a.columns, a.ld);
    call.lay_out(call.b_layout, type_of<T>(), b.rows, b.columns, b.ld);
    call.lay_out(call.d_layout, type_of<Out>(), m, n, c.ld);
    call.set(CUBLASLT_MATMUL_DESC_TRANSA, int32_t(transa ? CUBLAS_OP_T : CUBLAS_OP_N));
    call.set(CUBLASLT_MATMUL_DESC_TRANSB, int32_t(transb ? CUBLAS_OP_T : CUBLAS_OP_N));
    call.epilogue(epilogue);
    call.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<void*>(static_cast<Out*>(device_bias)));
    if (has_aux(epilogue)) {
        call.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
                 static_cast<void*>(static_cast<Out*>(device_aux)));
        call.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t(aux.ld));
        call.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, int32_t(type_of<Out>()));
    }
    ASSERT_EQ(call.run(), CUBLAS_STATUS_SUCCESS);

    const bool with_bias = epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    const bool with_gelu =
        epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    std::vector<float> sums;  // the bias, or its gradient
    for (int i = 0; i < m; i++) { sums.push_back(bias.at(i, 0)); }
    std::vector<float> expected;  // not rounded, and the padding as it was
    for (const Out value : c.values) { expected.push_back(to_float(value)); }
    for (int j = 0; j < n; j++) {
        for (int i = 0; i < m; i++) {
            float value = 0.0f;
            for (int l = 0; l < k; l++) {
                value += (transa ? a.at(l, i) : a.at(i, l)) * (transb ? b.at(j, l) : b.at(l, j));
            }
            value = value * 0.125f + beta * c.at(i, j) + (with_bias ? bias.at(i, 0) : 0.0f);
            if (with_gelu) {
                aux.set(i, j, value);
                value = gelu_in_double(value);
            }
            if (epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) {
                value *= slope_of_gelu(aux.at(i, j));
                sums[size_t(i)] = (j == 0 ? 0.0f : sums[size_t(i)]) + value;  // overwrites the bias
            }
            expected[size_t(j) * c.ld + i] = value;
        }
    }
    const std::vector<Out> d = device_d.to_host(), written_aux = device_aux.to_host();
    for (size_t i = 0; i < d.size(); i++) {
        const bool exact = !with_gelu && epilogue != CUBLASLT_EPILOGUE_DGELU_BGRAD;
        ASSERT_NEAR(to_float(d[i]), expected[i], exact ? 0.0f : 1e-6f + 0x1.01p-8f * std::fabs(expected[i]))
            << i;
    }
    const std::vector<Out> written_bias = device_bias.to_host();
    for (size_t i = 0; i < sums.size(); i++) {
        ASSERT_NEAR(to_float(written_bias[i]), sums[i], 1e-4f + 0x1.01p-8f * std::fabs(sums[i])) << i;
    }
    for (size_t i = 0; i < written_aux.size(); i++) {
        ASSERT_EQ(to_float(written_aux[i]), to_float(aux.values[i])) << i;
    }
}

TEST(CublasLt, ProductsOfEveryLayoutAreExactAndPaddingStaysAsItWas) {
    for (int transposed = 0; transposed < 4; transposed++) {
        for (const float beta : {0.0f, 1.0f, -2.0f}) {
            const bool transa = transposed % 2 != 0, transb = transposed / 2 != 0;
            const auto none = CUBLASLT_EPILOGUE_DEFAULT;
            expect_product<bf16, bf16>(transa, transb, 8, 5, 3, none, beta);
            expect_product<bf16, float>(transa, transb, 19, 6, 37, none, beta);
            expect_product<float, float>(transa, transb, 3, 21, 16, none, beta);
        }
    }
}

TEST(CublasLt, EpiloguesAddTheBiasToRowsAndKeepOrReadTheInputOfGelu) {
    for (const auto epilogue : {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX,
                                CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU_BGRAD}) {
        expect_product<bf16, bf16>(true, false, 19, 7, 9, epilogue, 0.0f);
        expect_product<bf16, bf16>(false, false, 8, 13, 9, epilogue, 1.0f);
    }
    expect_product<float, float>(true, false, 19, 7, 9, CUBLASLT_EPILOGUE_BIAS, 0.0f);
}

// ---- what is refused

// D (16,24) = A (16,32) B (32,24), bf16, chosen for 16-byte alignment.
struct Valid : Call {
    DeviceArray<bf16> a_values{Matrix<bf16>(16, 32, 0, 1).values},
        b_values{Matrix<bf16>(32, 24, 0, 2).values}, d_values{Matrix<bf16>(16, 24, 0, 3).values},
        aux{Matrix<bf16>(16, 24, 0, 4).values}, bias{Matrix<bf16>(16, 1, 0, 5).values};

    explicit Valid(cublasLtEpilogue_t with = CUBLASLT_EPILOGUE_DEFAULT,
                   cublasComputeType_t compute = CUBLAS_COMPUTE_32F)
        : Call(compute) {
        a = static_cast<bf16*>(a_values), b = static_cast<bf16*>(b_values), d = static_cast<bf16*>(d_values);
        c = d;
        lay_out(a_layout, CUDA_R_16BF, 16, 32, 16);
        lay_out(b_layout, CUDA_R_16BF, 32, 24, 32);
        lay_out(d_layout, CUDA_R_16BF, 16, 24, 16);
        epilogue(with);
        set_bias(bias);
        if (has_aux(with)) { set_aux(aux, 16); }
        for (const auto alignment :
             {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
              CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
            prefer(alignment, uint32_t(16));
        }
    }
    void set_bias(bf16* p) { set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<void*>(p)); }
    void set_aux(bf16* p, int64_t ld) {
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, static_cast<void*>(p));
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, ld);
    }
};

constexpr auto invalid = CUBLAS_STATUS_INVALID_VALUE, unsupported = CUBLAS_STATUS_NOT_SUPPORTED;

// The heuristic finds nothing for `call`, and says `status`.
void expect_nothing_found(Call& call, cublasStatus_t status) {
    EXPECT_EQ(call.choose(), status);
    EXPECT_EQ(call.found, 0);
}

TEST(CublasLt, TakesTheCallThatTheOthersSpoil) {
    for (const auto epilogue : {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_GELU_AUX,
                                CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU_BGRAD}) {
        EXPECT_EQ(Valid(epilogue).run(), CUBLAS_STATUS_SUCCESS);
    }
}

TEST(CublasLt, RefusesShapesThatDoNotFit) {
    auto refuse = [](int a_rows, int a_columns, int b_rows, int b_columns, int d_rows, int d_columns) {
        Valid call;
        call.lay_out(call.a_layout, CUDA_R_16BF, a_rows, a_columns, 32);
        call.lay_out(call.b_layout, CUDA_R_16BF, b_rows, b_columns, 32);
        call.lay_out(call.d_layout, CUDA_R_16BF, d_rows, d_columns, 32);
        expect_nothing_found(call, invalid);
    };
    refuse(16, 31, 32, 24, 16, 24);
    refuse(16, 32, 31, 24, 16, 24);
    refuse(15, 32, 32, 24, 16, 24);
    refuse(16, 32, 32, 23, 16, 24);
    refuse(16, 32, 32, 24, 17, 24);
    refuse(16, 32, 32, 24, 16, 25);
    refuse(24, 32, 32, 16, 16, 24);
    refuse(16, 0, 0, 24, 16, 24);
    Valid transposed;
    transposed.set(CUBLASLT_MATMUL_DESC_TRANSB, int32_t(CUBLAS_OP_T));
    expect_nothing_found(transposed, invalid);
    Valid nonsense;
    nonsense.set(CUBLASLT_MATMUL_DESC_TRANSA, int32_t(7));
    expect_nothing_found(nonsense, invalid);
}

TEST(CublasLt, RefusesALeadingDimensionBelowTheRows) {
    for (const int which : {0, 1, 2}) {
        Valid call;
        if (which == 0) { call.lay_out(call.a_layout, CUDA_R_16BF, 16, 32, 15); }
        if (which == 1) { call.lay_out(call.b_layout, CUDA_R_16BF, 32, 24, 31); }
        if (which == 2) { call.lay_out(call.d_layout, CUDA_R_16BF, 16, 24, 8); }
        expect_nothing_found(call, invalid);
    }
}

TEST(CublasLt, RefusesTypesThatDoNotGoTogether) {
    auto refuse = [](cudaDataType_t a, cudaDataType_t b, cudaDataType_t d, cublasComputeType_t compute,
                     cublasLtEpilogue_t epilogue) {
        Valid call(epilogue, compute);
        call.lay_out(call.a_layout, a, 16, 32, 16);
        call.lay_out(call.b_layout, b, 32, 24, 32);
        call.lay_out(call.d_layout, d, 16, 24, 16);
        expect_nothing_found(call, unsupported);
    };
    const auto none = CUBLASLT_EPILOGUE_DEFAULT;
    const auto fp32 = CUBLAS_COMPUTE_32F, tf32 = CUBLAS_COMPUTE_32F_FAST_TF32;
    refuse(CUDA_R_32F, CUDA_R_16BF, CUDA_R_32F, fp32, none);
    refuse(CUDA_R_16BF, CUDA_R_32F, CUDA_R_32F, fp32, none);
    refuse(CUDA_R_32F, CUDA_R_32F, CUDA_R_16BF, fp32, none);
    refuse(CUDA_R_64F, CUDA_R_64F, CUDA_R_64F, fp32, none);
    refuse(CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, tf32, none);
    refuse(CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, CUBLAS_COMPUTE_16F, none);
    refuse(CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, fp32, CUBLASLT_EPILOGUE_GELU_AUX);
    refuse(CUDA_R_32F, CUDA_R_32F, CUDA_R_32F, fp32, CUBLASLT_EPILOGUE_DGELU_BGRAD);
    refuse(CUDA_R_16BF, CUDA_R_16BF, CUDA_R_16BF, fp32, CUBLASLT_EPILOGUE_RELU);
    Valid no_aux;
    no_aux.set_aux(no_aux.aux, 16);
    expect_nothing_found(no_aux, invalid);
    Valid aux(CUBLASLT_EPILOGUE_GELU_AUX);
    aux.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, int32_t(CUDA_R_32F));
    expect_nothing_found(aux, invalid);
}

TEST(CublasLt, RefusesAMissingPointer) {
    Valid a, b, d, c;
    a.a = nullptr, b.b = nullptr, d.d = nullptr, c.c = nullptr;
    for (Call* call : std::initializer_list<Call*>{&a, &b, &d}) { EXPECT_EQ(call->run(), invalid); }
    EXPECT_EQ(c.run(), CUBLAS_STATUS_SUCCESS) << "beta is 0: C is not read";
    c.beta = 1.0f;
    EXPECT_EQ(c.run(), invalid);
    Valid bias(CUBLASLT_EPILOGUE_BIAS), gradient(CUBLASLT_EPILOGUE_DGELU_BGRAD);
    Valid aux(CUBLASLT_EPILOGUE_DGELU_BGRAD), without_ld(CUBLASLT_EPILOGUE_GELU_AUX);
    for (Valid* call : {&bias, &gradient}) {
        call->set_bias(nullptr);
        EXPECT_EQ(call->run(), invalid);
    }
    aux.set_aux(nullptr, 16);
    EXPECT_EQ(aux.run(), invalid);
    without_ld.set_aux(without_ld.aux, 0);
    expect_nothing_found(without_ld, invalid);
}

TEST(CublasLt, RefusesAnAuxThatIsMisaligned) {
    for (const int64_t ld : {8, 20, 15}) {
        Valid call(CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
        call.set_aux(call.aux, ld);
        expect_nothing_found(call, invalid);
    }
    Valid pointer(CUBLASLT_EPILOGUE_DGELU_BGRAD);
    pointer.set_aux(pointer.aux + 4, 16);
    expect_nothing_found(pointer, unsupported);
}

TEST(CublasLt, RefusesAPointerThatIsLessAlignedThanPromised) {
    for (const int which : {0, 1, 2, 3}) {
        Valid call;
        if (which == 0) { call.a = call.a_values + 4; }
        if (which == 1) { call.b = call.b_values + 4; }
        if (which == 2) { call.d = call.d_values + 4; }
        call.beta = float(which == 3);
        if (which == 3) { call.c = call.aux + 4; }
        EXPECT_EQ(call.run(), invalid) << which;
    }
    Valid bias(CUBLASLT_EPILOGUE_BIAS);
    ASSERT_EQ(bias.choose(), CUBLAS_STATUS_SUCCESS);
    bias.set_bias(bias.bias + 1);
    EXPECT_EQ(bias.multiply(), invalid) << "chosen for another alignment";
    Valid unsaid;
    unsaid.prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(256));
    unsaid.a = unsaid.a_values + 8;
    EXPECT_EQ(unsaid.run(), invalid) << "256 bytes is what the library assumes";
}

TEST(CublasLt, RefusesMemoryBeyondAnAllocationAndTheHosts) {
    for (const int which : {0, 1, 2, 3, 4}) {
        Valid call(CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
        if (which == 0) { call.a = call.a_values + 8; }
        if (which == 1) { call.b = call.b_values + 8; }
        if (which == 2) { call.d = call.d_values + 8; }
        if (which == 3) { call.set_bias(call.bias + 8); }
        if (which == 4) { call.set_aux(call.aux + 8, 16); }
        EXPECT_EQ(call.run(), CUBLAS_STATUS_EXECUTION_FAILED) << which;
    }
    alignas(256) static bf16 on_the_host[16 * 32];
    Valid call;
    call.a = on_the_host;
    EXPECT_EQ(call.run(), CUBLAS_STATUS_EXECUTION_FAILED);
}

TEST(CublasLt, RefusesAnOutputThatOverlapsAnInput) {
    Valid a, b, c;
    DeviceArray<bf16> shared(std::vector<bf16>(2048, bf16(1.0f)));
    a.a = shared + 0, a.d = shared + 16 * 32 - 8;
    EXPECT_EQ(a.run(), invalid);
    a.d = shared + 16 * 32;
    EXPECT_EQ(a.run(), CUBLAS_STATUS_SUCCESS);
    b.b = shared + 16 * 24 - 8, b.d = shared + 0;
    EXPECT_EQ(b.run(), invalid);
    c.beta = 1.0f, c.c = shared + 8, c.d = shared + 0;
    EXPECT_EQ(c.run(), invalid);
    c.c = c.d;
    EXPECT_EQ(c.run(), CUBLAS_STATUS_SUCCESS);
}

TEST(CublasLt, AnAlgorithmIsForOneProblemAndNeedsItsWorkspace) {
    Valid call;
    ASSERT_EQ(call.choose(), CUBLAS_STATUS_SUCCESS);
    call.epilogue(CUBLASLT_EPILOGUE_BIAS);
    EXPECT_EQ(call.multiply(), invalid);
    call.epilogue(CUBLASLT_EPILOGUE_DEFAULT);
    EXPECT_EQ(call.multiply(), CUBLAS_STATUS_SUCCESS);
    for (const unsigned char byte : {call.workspace.to_host()[0], call.workspace.to_host()[4095]}) {
        EXPECT_EQ(byte, 0xFF) << "workspace is the library's to write";
    }
    ASSERT_GT(call.result.workspaceSize, 0u);
    call.workspace_bytes = call.result.workspaceSize - 1;
    EXPECT_EQ(call.multiply(), invalid);
    call.prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(0));
    ASSERT_EQ(call.choose(), CUBLAS_STATUS_SUCCESS);
    call.workspace_bytes = 0;
    EXPECT_EQ(call.multiply(), CUBLAS_STATUS_SUCCESS);
}

TEST(CublasLt, RefusesUnknownAttributesWrongSizesAndNoHandle) {
    Valid call;
    const int32_t four_bytes = 0;
    const auto attribute = [&](cublasLtMatmulDescAttributes_t which) {
        return cublasLtMatmulDescSetAttribute(call.operation, which, &four_bytes, sizeof four_bytes);
    };
    EXPECT_EQ(attribute(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD), invalid);
    EXPECT_EQ(attribute(CUBLASLT_MATMUL_DESC_BIAS_POINTER), invalid);
    EXPECT_EQ(attribute(CUBLASLT_MATMUL_DESC_FAST_ACCUM), unsupported);
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(call.operation, CUBLASLT_MATMUL_DESC_TRANSA, nullptr, 4),
              invalid);
    EXPECT_EQ(cublasLtMatmulPreferenceSetAttribute(call.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                   &four_bytes, sizeof four_bytes),
              invalid);
    EXPECT_EQ(cublasLtMatmulAlgoGetHeuristic(call.handle, call.operation, call.a_layout, call.b_layout,
                                             call.d_layout, call.d_layout, call.preference, 0, &call.result,
                                             &call.found),
              invalid);
    cublasLtHandle_t made = call.handle;
    call.handle = nullptr;
    EXPECT_EQ(call.choose(), CUBLAS_STATUS_NOT_INITIALIZED);
    EXPECT_EQ(call.multiply(), CUBLAS_STATUS_NOT_INITIALIZED);
    call.handle = made;
}

// A collective holds an SM while it waits for others: products have to be cut for the other SMs.
TEST(CublasLt, RefusesToCutAProductForSmsThatACollectiveHolds) {
    Valid of_all, of_four, of_three;  // to free one would wait for the collective
    const auto choose = [](Valid& call, int32_t sms) {
        EXPECT_EQ(cublasLtMatmulDescSetAttribute(call.operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &sms,
                                                 sizeof sms),
                  CUBLAS_STATUS_SUCCESS);
        EXPECT_EQ(call.choose(), CUBLAS_STATUS_SUCCESS);
    };
    choose(of_all, 0);
    choose(of_four, 4);
    choose(of_three, 3);
    EXPECT_EQ(of_all.multiply(), CUBLAS_STATUS_SUCCESS);
    ncclUniqueId id;
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.minCTAs = config.maxCTAs = 1;
    ncclComm_t alone = nullptr, comm = nullptr, other = nullptr;
    ASSERT_EQ(ncclCommInitRankConfig(&alone, 1, id, 0, &config), ncclSuccess);
    DeviceArray<float> values(4);
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(ncclAllReduce(values, values, 4, ncclFloat, ncclSum, alone, stream), ncclSuccess);
    EXPECT_EQ(of_all.multiply(), CUBLAS_STATUS_SUCCESS) << "it waits for nobody";
    ASSERT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    std::thread second([&] { EXPECT_EQ(ncclCommInitRankConfig(&other, 2, id, 1, &config), ncclSuccess); });
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, 0, &config), ncclSuccess);
    second.join();
    EXPECT_EQ(of_all.multiply(), CUBLAS_STATUS_SUCCESS) << "nothing is under way";
    std::thread waits([&] { ncclAllReduce(values, values, 4, ncclFloat, ncclSum, comm, stream); });
    while (emulator::sms_of_communicators() == 0) { std::this_thread::yield(); }
    EXPECT_EQ(of_all.multiply(), invalid);
    EXPECT_EQ(of_four.multiply(), invalid) << "all SMs";
    EXPECT_EQ(of_three.multiply(), CUBLAS_STATUS_SUCCESS);
    ncclCommAbort(comm);
    waits.join();
    ncclCommAbort(other);
    EXPECT_EQ(of_all.multiply(), CUBLAS_STATUS_SUCCESS);
    ncclCommAbort(alone);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// ---- how it rounds, and what it passes on

TEST(CublasLt, PartialSumsAreRoundedToTheOutputsTypeWhereThatIsAllowed) {
    // 256 + 1, and at the other end of k - 256. 257 is not a bf16.
    for (const bool allowed : {false, true}) {
        Valid call;
        std::vector<bf16> a(16 * 32, bf16(0.0f)), b(32 * 24, bf16(1.0f));
        for (int i = 0; i < 16; i++) {
            a[i] = bf16(256.0f), a[16 + i] = bf16(1.0f), a[16 * 31 + i] = bf16(-256.0f);
        }
        DeviceArray<bf16> device_a(a), device_b(b);
        call.a = static_cast<bf16*>(device_a), call.b = static_cast<bf16*>(device_b);
        const auto schemes =
            allowed ? CUBLASLT_REDUCTION_SCHEME_MASK : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        call.prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(schemes));
        ASSERT_EQ(call.run(), CUBLAS_STATUS_SUCCESS);
        for (const bf16 value : call.d_values.to_host()) {
            ASSERT_EQ(to_float(value), allowed ? 0.0f : 1.0f);
        }
    }
}

TEST(CublasLt, Tf32KeepsTenBitsOfMantissa) {
    for (const auto compute : {CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32}) {
        Call call(compute);
        DeviceArray<float> a(std::vector<float>{1.0f + 0x1p-11f + 0x1p-12f}), b(std::vector<float>{1.0f}),
            d(1);
        call.a = a + 0, call.b = b + 0, call.d = d + 0;
        for (auto* layout : {&call.a_layout, &call.b_layout, &call.d_layout}) {
            call.lay_out(*layout, CUDA_R_32F, 1, 1, 1);
        }
        ASSERT_EQ(call.run(), CUBLAS_STATUS_SUCCESS);
        EXPECT_EQ(d.to_host()[0], 1.0f + (compute == CUBLAS_COMPUTE_32F ? 0x1p-11f + 0x1p-12f : 0x1p-10f));
    }
}

TEST(CublasLt, NanReachesTheRowOrColumnThatUsesIt) {
    for (const bool in_a : {true, false}) {
        Valid call;
        Matrix<bf16> a(16, 32, 0, 1), b(32, 24, 0, 2);
        (in_a ? a : b).set(5, 7, NAN);
        DeviceArray<bf16> device_a(a.values), device_b(b.values);
        call.a = static_cast<bf16*>(device_a), call.b = static_cast<bf16*>(device_b);
        ASSERT_EQ(call.run(), CUBLAS_STATUS_SUCCESS);
        const std::vector<bf16> d = call.d_values.to_host();
        for (int i = 0; i < 16 * 24; i++) {
            EXPECT_EQ(std::isnan(to_float(d[size_t(i)])), in_a ? i % 16 == 5 : i / 16 == 7) << i;
        }
    }
}

}  // namespace
