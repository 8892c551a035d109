// Newton-Schulz in double precision, which tests of the CPU's and of the GPU's version compare with.
#pragma once
#include <cmath>
#include <cstddef>
#include <vector>

namespace newton_schulz_test {

using Doubles = std::vector<double>;

// a b, or a b^T.   a: (M,K)   b: (K,N), or (N,K)
inline Doubles product(const Doubles& a, const Doubles& b, int M, int K, int N, bool transposed) {
    Doubles out(size_t(M) * size_t(N));
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
            for (int k = 0; k < K; k++) {
                out[size_t(i) * size_t(N) + size_t(j)] +=
                    a[size_t(i) * size_t(K) + size_t(k)] *
                    b[transposed ? size_t(j) * size_t(K) + size_t(k) : size_t(k) * size_t(N) + size_t(j)];
            }
        }
    }
    return out;
}

// By the equations, X (rows,columns) from the left, whatever its shape: X = a X + (b A + c A A) X, A = X X^T.
inline Doubles exact_newton_schulz(Doubles x, int rows, int columns, double scale) {
    double norm = 0;
    for (double value : x) { norm += value * value; }
    for (double& value : x) { value /= std::sqrt(norm); }
    for (int i = 0; i < 5; i++) {
        const Doubles gram = product(x, x, rows, columns, rows, true);
        Doubles polynomial = product(gram, gram, rows, rows, rows, false);
        for (size_t j = 0; j < gram.size(); j++) { polynomial[j] = 2.0315 * polynomial[j] - 4.7750 * gram[j]; }
        const Doubles change = product(polynomial, x, rows, rows, columns, false);
        for (size_t j = 0; j < x.size(); j++) { x[j] = 3.4445 * x[j] + change[j]; }
    }
    for (double& value : x) { value *= scale; }
    return x;
}

}  // namespace newton_schulz_test
