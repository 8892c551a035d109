// cuBLASLt on a CPU: D = epilogue(alpha op(A) op(B) + beta C) of column-major matrices, bf16 or float, sums
// in float in ascending order of k. The functions, attributes and types that this program uses, no others.
//
// It is as strict as the library's documentation, or stricter where a comment says so, and makes the worst
// choice that a caller allows: an algorithm that needs all the alignment it was promised, overwrites its
// workspace, works for that one problem only and, if allowed to, rounds partial sums to D's type. With
// CUBLASLT_LOG_LEVEL=1 in the environment it prints the reason of a refusal to stderr. As long as there is a
// communicator with a set number of CTAs, it refuses products that are not limited to the SMs which the
// collectives leave free: on Hopper such products would take twice as long, in two waves.
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "dev/emulator/cublaslt.h"
#include "dev/emulator/device_memory.h"
#include "dev/emulator/queue.h"
#include "dev/emulator/sanitizers.h"

struct cublasLtContext {};

namespace emulator {
namespace {

constexpr cublasStatus_t success = CUBLAS_STATUS_SUCCESS, invalid = CUBLAS_STATUS_INVALID_VALUE,
                         unsupported = CUBLAS_STATUS_NOT_SUPPORTED;

struct MatrixLayout {
    cudaDataType_t type;
    uint64_t rows, columns;
    int64_t ld;
    int32_t batch = 1;
    int64_t stride = 0;  // values from one matrix of a batch to the next
};

struct Operation {
    cublasComputeType_t compute;
    cudaDataType_t scale_type;
    int32_t transa = CUBLAS_OP_N, transb = CUBLAS_OP_N;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    void *bias = nullptr, *aux = nullptr;
    int64_t aux_ld = 0;
    int32_t aux_type = -1;  // D's
    int32_t sms = 0;        // all
};

struct Preference {
    uint64_t workspace_bytes = 0;
    uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
    uint32_t alignment[4] = {256, 256, 256, 256};  // of A, B, C, D
};

// What the heuristic chose: for which problem, and what it relies on.
struct Algorithm {
    uint64_t problem;
    uint64_t workspace_bytes;
    uint32_t alignment[4];  // of A, B, C, D
    uint32_t bias_alignment;
    bool rounds_partial_sums;
    bool loses_end;  // of k: what follows the last multiple of 64
};

template <class Own, class Opaque>
Own& own(Opaque* opaque) {
    static_assert(sizeof(Own) <= sizeof(Opaque) && alignof(Own) <= alignof(Opaque), "fits into cuBLASLt's");
    return *reinterpret_cast<Own*>(opaque);
}
Operation& own(cublasLtMatmulDesc_t p) { return own<Operation>(p); }
MatrixLayout& own(cublasLtMatrixLayout_t p) { return own<MatrixLayout>(p); }
Preference& own(cublasLtMatmulPreference_t p) { return own<Preference>(p); }

template <class Opaque, class Own>
cublasStatus_t create(Opaque** created, const Own& value) {
    if (!created) { return invalid; }
    *created = new Opaque();
    new (&own(*created)) Own(value);
    return success;
}

cublasStatus_t refuse(cublasStatus_t status, const std::string& why) {
    const char* level = getenv("CUBLASLT_LOG_LEVEL");
    if (level && atoi(level) > 0) { fprintf(stderr, "cuBLASLt: %s\n", why.c_str()); }
    return status;
}

template <class T>
cublasStatus_t set(T& attribute, const void* value, size_t bytes) {
    if (!value || bytes != sizeof attribute) { return refuse(invalid, "an attribute of another size"); }
    memcpy(&attribute, value, sizeof attribute);
    return success;
}

std::atomic<long>& heuristics() {
    static std::atomic<long> asked{0};
    return asked;
}

// ---- one problem, and whether it is one

size_t size_of(int32_t type) { return type == CUDA_R_16BF ? 2 : 4; }
bool is_bf16(int32_t type) { return type == CUDA_R_16BF; }
bool is_float(int32_t type) { return type == CUDA_R_32F; }

struct Problem {
    Operation operation;
    MatrixLayout a, b, c, d;
    int64_t m = 0, n = 0, k = 0;

    bool adds_bias() const {
        return operation.epilogue == CUBLASLT_EPILOGUE_BIAS ||
               operation.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    }
    bool writes_aux() const {
        return operation.epilogue == CUBLASLT_EPILOGUE_GELU_AUX ||
               operation.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    }
    bool reads_aux() const { return operation.epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD; }
    bool has_aux() const { return writes_aux() || reads_aux(); }
    MatrixLayout aux() const { return {d.type, uint64_t(m), uint64_t(n), operation.aux_ld}; }
};

cublasStatus_t check_types(const Problem& p) {
    const Operation& operation = p.operation;
    if (!is_float(operation.scale_type)) { return refuse(unsupported, "a scale type other than float"); }
    if (p.a.type != p.b.type || p.c.type != p.d.type) {
        return refuse(unsupported, "A and B, or C and D, of different types");
    }
    const bool floats = is_float(p.a.type) && is_float(p.d.type);
    const bool bf16 = is_bf16(p.a.type) && (is_bf16(p.d.type) || is_float(p.d.type));
    const bool exact = operation.compute == CUBLAS_COMPUTE_32F;
    const bool tf32 = operation.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    if (!(floats && (exact || tf32)) && !(bf16 && exact)) {
        return refuse(unsupported, "this combination of types of A, B, C, D and of the computation");
    }
    if (p.has_aux() && !is_bf16(p.d.type)) {
        return refuse(unsupported, "an epilogue with GELU and a D that is not bf16");
    }
    if (p.has_aux() && operation.aux_type != -1 && operation.aux_type != p.d.type) {
        return refuse(invalid, "AUX of a type that is not D's");
    }
    return success;
}

cublasStatus_t check_shapes(Problem& p) {
    for (const MatrixLayout* matrix : {&p.a, &p.b, &p.c, &p.d}) {
        if (matrix->rows == 0 || matrix->columns == 0) { return refuse(invalid, "an empty matrix"); }
        if (matrix->ld < int64_t(matrix->rows)) {
            return refuse(invalid, "a leading dimension that is less than the rows");
        }
    }
    const bool transa = p.operation.transa == CUBLAS_OP_T, transb = p.operation.transb == CUBLAS_OP_T;
    p.m = int64_t(transa ? p.a.columns : p.a.rows);
    p.k = int64_t(transa ? p.a.rows : p.a.columns);
    p.n = int64_t(transb ? p.b.rows : p.b.columns);
    const int64_t k_of_b = int64_t(transb ? p.b.columns : p.b.rows);
    for (const MatrixLayout* matrix : {&p.c, &p.d}) {
        if (int64_t(matrix->rows) != p.m || int64_t(matrix->columns) != p.n) {
            return refuse(invalid, "C or D is not (rows of op(A), columns of op(B))");
        }
    }
    for (const MatrixLayout* matrix : {&p.a, &p.b, &p.c, &p.d}) {
        if (matrix->batch < 1 || matrix->batch != p.d.batch) { return refuse(invalid, "batches of different sizes"); }
        if (matrix->batch > 1 && matrix->stride < matrix->ld * int64_t(matrix->columns)) {
            return refuse(invalid, "matrices of a batch overlap");
        }
    }
    if (p.d.batch > 1 && p.operation.epilogue != CUBLASLT_EPILOGUE_DEFAULT) {  // none is needed
        return refuse(unsupported, "a batch and an epilogue");
    }
    if (k_of_b != p.k) { return refuse(invalid, "op(A) has not as many columns as op(B) has rows"); }
    if (p.has_aux() && (p.operation.aux_ld < p.m || p.operation.aux_ld % 8 != 0)) {
        return refuse(invalid, "AUX_LD is not a multiple of 8 or less than the rows of D");
    }
    return success;
}

cublasStatus_t check_operation(const Problem& p) {
    for (const int32_t transposed : {p.operation.transa, p.operation.transb}) {
        if (transposed != CUBLAS_OP_N && transposed != CUBLAS_OP_T) {
            return refuse(invalid, "TRANSA or TRANSB is neither N nor T");
        }
    }
    if (p.operation.epilogue != CUBLASLT_EPILOGUE_DEFAULT && !p.adds_bias() && !p.has_aux()) {
        return refuse(unsupported, "this epilogue");
    }
    // Stricter than the documentation, which does not forbid them: they were meant for another epilogue.
    if (!p.has_aux() && (p.operation.aux_ld != 0 || p.operation.aux_type != -1)) {
        return refuse(invalid, "AUX_LD or AUX_DATA_TYPE, and an epilogue without AUX");
    }
    return success;
}

// The problem that is described, in `p`.
cublasStatus_t describe(Problem& p, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                        cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d) {
    if (!operation || !a || !b || !c || !d) { return refuse(invalid, "a descriptor is null"); }
    p = Problem{own(operation), own(a), own(b), own(c), own(d)};
    for (const cublasStatus_t status : {check_operation(p), check_types(p)}) {
        if (status != success) { return status; }
    }
    return check_shapes(p);
}

// A number for all of a problem but its pointers.
uint64_t fingerprint(const Problem& p) {
    uint64_t sum = 14695981039346656037u;
    auto add = [&](uint64_t value) { sum = (sum ^ value) * 1099511628211u; };
    for (const MatrixLayout* matrix : {&p.a, &p.b, &p.c, &p.d}) {
        add(matrix->type), add(matrix->rows), add(matrix->columns), add(uint64_t(matrix->ld));
        add(uint64_t(matrix->batch)), add(uint64_t(matrix->stride));
    }
    add(p.operation.compute), add(uint64_t(p.operation.transa)), add(uint64_t(p.operation.transb));
    add(p.operation.epilogue), add(uint64_t(p.operation.sms)), add(p.has_aux() ? uint64_t(p.operation.aux_ld) : 0);
    return sum;
}

// ---- memory that a problem touches

// The alignment of an address, at most 256; null has any.
uint32_t alignment_of(const void* p) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(p) | 256;
    return uint32_t(address & -address);
}

struct Part {
    const char* name;
    const void* begin;
    MatrixLayout layout;
    uint32_t alignment;
    bool written;

    size_t bytes() const {
        const size_t before = size_t(layout.batch - 1) * size_t(layout.stride);
        return (before + size_t(layout.columns - 1) * size_t(layout.ld) + size_t(layout.rows)) *
               size_of(layout.type);
    }
    const char* column(uint64_t j, int32_t in = 0) const {  // of matrix `in` of the batch
        return static_cast<const char*>(begin) +
               (size_t(in) * size_t(layout.stride) + size_t(j) * size_t(layout.ld)) * size_of(layout.type);
    }
    bool overlaps(const Part& other) const {
        const char *own_begin = column(0), *other_begin = other.column(0);
        return own_begin < other_begin + other.bytes() && other_begin < own_begin + bytes();
    }
};

struct Pointers {
    const void *a, *b, *c;
    void *d, *workspace;
    float alpha, beta;
};

// Everything that is read and written.
std::vector<Part> parts_of(const Problem& p, const Pointers& pointers, const Algorithm& algorithm) {
    const uint32_t(&alignment)[4] = algorithm.alignment;
    std::vector<Part> parts = {{"A", pointers.a, p.a, alignment[0], false},
                               {"B", pointers.b, p.b, alignment[1], false},
                               {"D", pointers.d, p.d, alignment[3], true}};
    if (pointers.beta != 0.0f) { parts.push_back({"C", pointers.c, p.c, alignment[2], false}); }
    if (p.adds_bias() || p.reads_aux()) {
        const MatrixLayout layout{p.d.type, uint64_t(p.m), 1, p.m};
        const char* name = p.adds_bias() ? "the bias" : "the gradient of the bias";
        parts.push_back({name, p.operation.bias, layout, algorithm.bias_alignment, p.reads_aux()});
    }
    if (p.has_aux()) { parts.push_back({"AUX", p.operation.aux, p.aux(), 16, p.writes_aux()}); }
    if (algorithm.workspace_bytes > 0) {
        const uint64_t floats = algorithm.workspace_bytes / sizeof(float);
        parts.push_back(
            {"the workspace", pointers.workspace, {CUDA_R_32F, floats, 1, int64_t(floats)}, 256, true});
    }
    return parts;
}

// Whether all parts are there and aligned, and no written part overlaps another; only C may be D itself.
cublasStatus_t check_parts(const Problem& p, const std::vector<Part>& parts) {
    for (const Part& part : parts) {
        const std::string name = part.name;
        if (!part.begin) { return refuse(invalid, name + " is null"); }
        if (alignment_of(part.begin) < part.alignment) {
            return refuse(invalid, name + " is not aligned to " + std::to_string(part.alignment) + " bytes");
        }
        if (!is_device_memory(part.begin, part.bytes())) {
            return refuse(CUBLAS_STATUS_EXECUTION_FAILED, name + " reaches beyond its device memory");
        }
    }
    for (const Part& written : parts) {
        for (const Part& other : parts) {
            const bool same = &other == &written ||
                              (other.name[0] == 'C' && other.begin == written.begin && p.c.ld == p.d.ld);
            if (written.written && !same && written.overlaps(other)) {
                return refuse(invalid, std::string(written.name) + " overlaps " + other.name);
            }
        }
    }
    return success;
}

// ---- the product

float value_at(const void* matrix, int32_t type, int64_t i) {
    return is_float(type) ? static_cast<const float*>(matrix)[i]
                          : __bfloat162float(static_cast<const __nv_bfloat16*>(matrix)[i]);
}

void store_at(void* matrix, int32_t type, int64_t i, float value) {
    if (is_float(type)) {
        static_cast<float*>(matrix)[i] = value;
    } else {
        static_cast<__nv_bfloat16*>(matrix)[i] = __float2bfloat16(value);
    }
}

float rounded_to_bf16(float value) { return __bfloat162float(__float2bfloat16(value)); }

// To the nearest float with 10 bits of mantissa: what tensor cores take for tf32.
float rounded_to_tf32(float value) {
    if (!std::isfinite(value)) { return value; }
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFFu;
    memcpy(&value, &bits, sizeof bits);
    return value;
}

// The tanh form, which is the library's. Written out here: it checks the trainer's own.
float gelu_of(float x) {
    return float(0.5 * x * (1.0 + std::tanh(0.7978845608028654 * (x + 0.044715 * double(x) * x * x))));
}

float gelu_slope_of(float x) {
    const double t = std::tanh(0.7978845608028654 * (x + 0.044715 * double(x) * x * x));
    const double inner = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * double(x) * x);
    return float(0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner);
}

// Panels of `width` rows of op(A), or columns of op(B), interleaved, with zeros after the last:
// panel[p][l][i] is element (p * width + i, l) of op(A), or (l, p * width + i) of op(B).
constexpr int lanes = 8;
typedef float Lanes __attribute__((vector_size(lanes * sizeof(float))));

std::vector<float> panels_of(const void* matrix, const MatrixLayout& layout, bool along_rows, int64_t count,
                             int64_t k, int64_t width, bool tf32) {
    std::vector<float> panels(size_t((count + width - 1) / width * width * k));
    for (int64_t i = 0; i < count; i++) {
        float* panel = panels.data() + i / width * width * k + i % width;
        for (int64_t l = 0; l < k; l++) {
            const float value =
                value_at(matrix, layout.type, along_rows ? i + l * layout.ld : i * layout.ld + l);
            panel[l * width] = tf32 ? rounded_to_tf32(value) : value;
        }
    }
    return panels;
}

// sum (4 columns of 8 values) += 8 rows of op(A) times 4 columns of op(B), for k in [first, last).
void multiply(Lanes (&sum)[4], const float* a, const float* b, int64_t first, int64_t last) {
    Lanes s0 = sum[0], s1 = sum[1], s2 = sum[2], s3 = sum[3];
    for (int64_t l = first; l < last; l++) {
        Lanes column;
        memcpy(&column, a + l * lanes, sizeof column);
        const float* row = b + l * 4;
        s0 += column * row[0];
        s1 += column * row[1];
        s2 += column * row[2];
        s3 += column * row[3];
    }
    sum[0] = s0, sum[1] = s1, sum[2] = s2, sum[3] = s3;
}

// One element of D (and AUX), from its sum over k. Returns it as it was before it was rounded.
float finish(const Problem& p, const Pointers& pointers, int64_t i, int64_t j, float sum) {
    const Operation& operation = p.operation;
    float value = pointers.alpha * sum;
    if (pointers.beta != 0.0f) { value += pointers.beta * value_at(pointers.c, p.c.type, i + j * p.c.ld); }
    if (p.adds_bias()) { value += value_at(operation.bias, p.d.type, i); }
    const int64_t at_aux = i + j * operation.aux_ld;
    if (p.writes_aux()) {
        store_at(operation.aux, p.d.type, at_aux, value);
        value = gelu_of(value);
    }
    if (p.reads_aux()) { value *= gelu_slope_of(value_at(operation.aux, p.d.type, at_aux)); }
    store_at(pointers.d, p.d.type, i + j * p.d.ld, value);
    return value;
}

void run(const Problem& p, const Pointers& pointers, const Algorithm& algorithm) {
    OwnAccesses own_accesses;
    if (pointers.workspace) { memset(pointers.workspace, 0xFF, algorithm.workspace_bytes); }
    const bool tf32 = p.operation.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    const std::vector<float> a =
        panels_of(pointers.a, p.a, p.operation.transa == CUBLAS_OP_N, p.m, p.k, lanes, tf32);
    const std::vector<float> b =
        panels_of(pointers.b, p.b, p.operation.transb == CUBLAS_OP_T, p.n, p.k, 4, tf32);
    const int64_t middle = algorithm.rounds_partial_sums ? p.k / 2 : 0;
    std::vector<float> gradient_of_bias(size_t(p.m));  // rounded once, to D's type: cublasLt.h
    for (int64_t j = 0; j < p.n; j += 4) {
        for (int64_t i = 0; i < p.m; i += lanes) {
            Lanes sum[4] = {};
            multiply(sum, a.data() + i * p.k, b.data() + j * p.k, 0, middle);
            for (int64_t x = 0; algorithm.rounds_partial_sums && x < 4 * lanes; x++) {
                sum[x / lanes][x % lanes] = rounded_to_bf16(sum[x / lanes][x % lanes]);
            }
            Lanes rest[4] = {};
            multiply(rest, a.data() + i * p.k, b.data() + j * p.k, middle,
                     algorithm.loses_end ? p.k / 64 * 64 : p.k);
            for (int x = 0; x < 4; x++) { sum[x] += rest[x]; }
            for (int64_t column = j; column < std::min(j + 4, p.n); column++) {
                for (int64_t row = i; row < std::min(i + lanes, p.m); row++) {
                    gradient_of_bias[size_t(row)] +=
                        finish(p, pointers, row, column, sum[column - j][row - i]);
                }
            }
        }
    }
    for (int64_t i = 0; p.reads_aux() && i < p.m; i++) {
        store_at(p.operation.bias, p.d.type, i, gradient_of_bias[size_t(i)]);
    }
}

void note_accesses(const std::vector<Part>& parts) {
    for (const Part& part : parts) {
        const size_t bytes = size_t(part.layout.rows) * size_of(part.layout.type);
        for (uint64_t j = 0; j < part.layout.columns * uint64_t(part.layout.batch); j++) {
            const char* column = part.column(j % part.layout.columns, int32_t(j / part.layout.columns));
            if (part.written) {
                note_write(const_cast<char*>(column), bytes);
            } else {
                note_read(column, bytes);
            }
        }
    }
}

}  // namespace

long heuristics_asked() { return heuristics(); }

}  // namespace emulator

using namespace emulator;

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    if (!handle) { return invalid; }
    *handle = new cublasLtContext;
    return success;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    if (!handle) { return CUBLAS_STATUS_NOT_INITIALIZED; }
    delete handle;
    return success;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
    return create(layout, MatrixLayout{type, rows, columns, ld});
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
    if (!layout) { return invalid; }
    switch (attribute) {
        case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
            return set(own(layout).batch, value, bytes);
        case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
            return set(own(layout).stride, value, bytes);
        default:
            return refuse(unsupported, "this attribute of a layout");
    }
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    delete layout;
    return success;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation, cublasComputeType_t compute,
                                        cudaDataType_t scale_type) {
    Operation made{};
    made.compute = compute;
    made.scale_type = scale_type;
    return create(operation, made);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
    delete operation;
    return success;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
    if (!operation) { return invalid; }
    Operation& o = own(operation);
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_TRANSA:
            return set(o.transa, value, bytes);
        case CUBLASLT_MATMUL_DESC_TRANSB:
            return set(o.transb, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE:
            return set(o.epilogue, value, bytes);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
            return set(o.bias, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
            return set(o.aux, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
            return set(o.aux_ld, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE:
            return set(o.aux_type, value, bytes);
        case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
            return set(o.sms, value, bytes);
        default:
            return refuse(unsupported, "this attribute of an operation");
    }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    return create(preference, Preference{});
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    delete preference;
    return success;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
    if (!preference) { return invalid; }
    Preference& p = own(preference);
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
            return set(p.workspace_bytes, value, bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
            return set(p.reductions, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
            return set(p.alignment[0], value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
            return set(p.alignment[1], value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
            return set(p.alignment[2], value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
            return set(p.alignment[3], value, bytes);
        default:
            return refuse(unsupported, "this preference");
    }
}

// As many bytes of workspace as a small algorithm would take, if it may.
constexpr uint64_t workspace_wanted = 64 * 1024;

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int* found) {
    if (!handle) { return CUBLAS_STATUS_NOT_INITIALIZED; }
    if (!preference || !results || !found || requested < 1) { return invalid; }
    *found = 0;
    heuristics()++;
    Problem p;
    const cublasStatus_t status = describe(p, operation, a, b, c, d);
    if (status != success) { return status; }
    if (p.has_aux() && alignment_of(p.operation.aux) < 16) {
        return refuse(unsupported, "AUX is not aligned to 16 bytes");
    }
    const Preference& wishes = own(preference);
    Algorithm algorithm{};
    algorithm.problem = fingerprint(p);
    algorithm.workspace_bytes = std::min(wishes.workspace_bytes, workspace_wanted);
    std::copy_n(wishes.alignment, 4, algorithm.alignment);
    algorithm.bias_alignment = std::min(alignment_of(p.operation.bias), 16u);
    const uint32_t rounding = CUBLASLT_REDUCTION_SCHEME_INPLACE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
    algorithm.rounds_partial_sums =
        is_bf16(p.d.type) && algorithm.workspace_bytes > 0 && (wishes.reductions & rounding) != 0;
    algorithm.loses_end = p.k > 64 && algorithm.workspace_bytes > 0 && wishes.reductions != 0;
    static_assert(sizeof algorithm <= sizeof results[0].algo, "fits into cuBLASLt's");
    *found = 1;
    results[0] = {};
    memcpy(&results[0].algo, &algorithm, sizeof algorithm);
    results[0].workspaceSize = size_t(algorithm.workspace_bytes);
    results[0].state = success;
    results[0].wavesCount = 1.0f;
    return success;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha,
                              const void* A, cublasLtMatrixLayout_t a, const void* B,
                              cublasLtMatrixLayout_t b, const void* beta, const void* C,
                              cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* chosen, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
    if (!handle) { return CUBLAS_STATUS_NOT_INITIALIZED; }
    if (!alpha || !beta || !chosen) { return refuse(invalid, "alpha, beta or the algorithm is null"); }
    Problem p;
    cublasStatus_t status = describe(p, operation, a, b, c, d);
    if (status != success) { return status; }
    Algorithm algorithm;
    memcpy(&algorithm, chosen, sizeof algorithm);
    if (algorithm.problem != fingerprint(p)) {
        return refuse(invalid, "the algorithm was not chosen for this problem");
    }
    if (workspace_bytes < algorithm.workspace_bytes) {
        return refuse(invalid, "the workspace is smaller than the algorithm's");
    }
    cudaDeviceProp device;
    cudaGetDeviceProperties(&device, 0);
    const int taken = sms_of_communicators();
    if (taken > 0 && (p.operation.sms < 1 || p.operation.sms > device.multiProcessorCount - taken)) {
        return refuse(invalid, "SM_COUNT_TARGET is more than the SMs that collectives leave");
    }
    const Pointers pointers{
        A, B, C, D, workspace, *static_cast<const float*>(alpha), *static_cast<const float*>(beta)};
    const std::vector<Part> parts = parts_of(p, pointers, algorithm);
    status = check_parts(p, parts);
    if (status != success) { return status; }
    const StreamRef on = find_stream(stream, __func__);
    if (!on) { return refuse(invalid, "this is no stream"); }
    const void* caller = __builtin_return_address(0);
    enqueue(on, __func__, [=] {
        CalledFrom from(caller);
        note_accesses(parts);
        for (int32_t i = 0; i < p.d.batch; i++) {
            auto at = [i](const void* matrix, const MatrixLayout& layout) {
                return static_cast<const char*>(matrix) + i * layout.stride * int64_t(size_of(layout.type));
            };
            Pointers one = pointers;
            one.a = at(pointers.a, p.a), one.b = at(pointers.b, p.b), one.c = at(pointers.c, p.c);
            one.d = const_cast<char*>(at(pointers.d, p.d));
            run(p, one, algorithm);
        }
    });
    return success;
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS:
            return "the operation completed successfully";
        case CUBLAS_STATUS_NOT_INITIALIZED:
            return "the library was not initialized";
        case CUBLAS_STATUS_INVALID_VALUE:
            return "an unsupported value or parameter was passed to the function";
        case CUBLAS_STATUS_NOT_SUPPORTED:
            return "the functionality requested is not supported";
        case CUBLAS_STATUS_EXECUTION_FAILED:
            return "the GPU program failed to execute";
        default:
            return "a status that the emulator does not make";
    }
}
