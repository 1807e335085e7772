/* Causal grouped-query attention over a head-major cache: float32 or float16 keys and values, windows, sinks, bounds.
 *
 * One pass over the keys with a running maximum (Milakov and Gimelshein 2018; Dao et al. 2022, algorithm 1), on vectors
 * of eight floats that GCC and Clang turn into whatever the machine has.
 */
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace hilnas {

constexpr int LANES = 8;
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

inline Vector spread(float x) { return Vector{x, x, x, x, x, x, x, x}; }
inline Vector load(const float *p) { Vector v; memcpy(&v, p, sizeof v); return v; }
inline void store(float *p, Vector v) { memcpy(p, &v, sizeof v); }
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }
inline float sum(Vector v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

/* Half precision, stored as its bits. */
typedef uint16_t Half;

inline Vector load(const Half *p) {
#if defined(__F16C__)
    return (Vector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
    float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    float32x4_t low = vcvt_f32_f16(vget_low_f16(h)), high = vcvt_f32_f16(vget_high_f16(h));
    Vector v;
    memcpy(&v, &low, 16);
    memcpy((char *)&v + 16, &high, 16);
    return v;
#else
    _Float16 h[LANES];
    memcpy(h, p, sizeof h);
    return Vector{(float)h[0], (float)h[1], (float)h[2], (float)h[3], (float)h[4], (float)h[5], (float)h[6], (float)h[7]};
#endif
}

inline void store(Half *p, Vector v) {
#if defined(__F16C__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    float32x4_t low, high;
    memcpy(&low, &v, 16);
    memcpy(&high, (const char *)&v + 16, 16);
    vst1q_u16(p, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(low), vcvt_f16_f32(high))));
#else
    for (int i = 0; i < LANES; i++) {
        _Float16 h = (_Float16)v[i];
        memcpy(p + i, &h, sizeof h);
    }
#endif
}

/* e^x for x <= 0: x = n ln 2 + r, and a polynomial in r with a relative error below 2e-7. NaN stays NaN: a broken model
 * must not look like one that works. */
inline Vector exponential(Vector x) {
    x = larger(spread(-87.0f), x);
    Integers n = __builtin_convertvector(x * spread(1.44269504f) - spread(0.5f), Integers);
    Vector whole = __builtin_convertvector(n, Vector);
    Vector r = x - whole * spread(0.693359375f) + whole * spread(2.12194440e-4f);
    Vector y = spread(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        y = y * r + spread(c);
    y = y * r * r + r + spread(1.0f);
    Integers bits = (n + 127) << 23;
    Vector power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

/* C [R, N] += A [R, K] B [K, N]; N is a multiple of 16. Rows in registers, B read once for all of them. */
template <int R> void multiply_rows(int n, int k, const float *a, int lda, const float *b, int ldb, float *c, int ldc) {
    for (int column = 0; column < n; column += 2 * LANES) {
        Vector left[R], right[R];
        for (int r = 0; r < R; r++) {
            left[r] = load(c + r * ldc + column);
            right[r] = load(c + r * ldc + column + LANES);
        }
        for (int i = 0; i < k; i++) {
            Vector b0 = load(b + (size_t)i * ldb + column), b1 = load(b + (size_t)i * ldb + column + LANES);
            for (int r = 0; r < R; r++) {
                Vector x = spread(a[r * lda + i]);
                left[r] += x * b0;
                right[r] += x * b1;
            }
        }
        for (int r = 0; r < R; r++) {
            store(c + r * ldc + column, left[r]);
            store(c + r * ldc + column + LANES, right[r]);
        }
    }
}

inline void multiply(int m, int n, int k, const float *a, int lda, const float *b, int ldb, float *c, int ldc) {
    int row = 0;
    for (; row + 6 <= m; row += 6) multiply_rows<6>(n, k, a + row * lda, lda, b, ldb, c + row * ldc, ldc);
    for (; row + 2 <= m; row += 2) multiply_rows<2>(n, k, a + row * lda, lda, b, ldb, c + row * ldc, ldc);
    if (row < m) multiply_rows<1>(n, k, a + row * lda, lda, b, ldb, c + row * ldc, ldc);
}

/* Keys or values: [heads, capacity, stride], the first `dim` of each row used and the rest zero; of Half, stride is
 * `round_up(dim, 2 * LANES)`. */
template <class Number> struct Rows {
    Number *data;
    size_t capacity;
    int stride;
    Number *row(int head, size_t token) const { return data + ((size_t)head * capacity + token) * stride; }
};

struct Shape {
    int tokens, heads, kv_heads, dim;
    int64_t first;       /* position of the oldest key in the cache */
    int64_t position;    /* of the first query */
    int64_t window;      /* tokens seen, the query's own included; 0: all */
    const float *sinks;  /* a logit per query head, or null */
    float softcap = 0;   /* bound b of scores: b tanh(score / b); 0: none */
};

constexpr int KEYS = 64, QUERIES = 32;
constexpr float NEVER = -1e30f;

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

/* `count` rows from `token` on as float32 [count, dim]: in place where they are that already, else in `copy`. */
inline const float *as_floats(Rows<float> rows, int head, size_t token, int count, int dim, float *copy) {
    if (rows.stride == dim) return rows.row(head, token);
    for (int j = 0; j < count; j++) {
        memcpy(copy + j * dim, rows.row(head, token + j), sizeof(float) * rows.stride);
        std::fill(copy + j * dim + rows.stride, copy + (j + 1) * dim, 0.0f);
    }
    return copy;
}

inline const float *as_floats(Rows<Half> rows, int head, size_t token, int count, int dim, float *copy) {
    for (int j = 0; j < count; j++)
        for (int d = 0; d < dim; d += LANES) store(copy + j * dim + d, load(rows.row(head, token + j) + d));
    return copy;
}

/* The queries from..to of the heads that read key-value head `kv`. */
template <class Number>
void attend_tile(const Shape &s, const float *q, Rows<Number> keys, Rows<Number> values, float *out, int kv, int from,
                 int to) {
    const int group = s.heads / s.kv_heads, rows = (to - from) * group, dim = round_up(s.dim, 2 * LANES);
    thread_local std::vector<float> scratch;
    const size_t needed = (size_t)rows * (2 * dim + KEYS + 2) + (size_t)3 * KEYS * dim;
    if (scratch.size() < needed) scratch.resize(needed);
    float *query = scratch.data(), *mixed = query + rows * dim, *score = mixed + rows * dim;
    float *greatest = score + rows * KEYS, *total = greatest + rows, *turned = total + rows;
    float *key_copy = turned + KEYS * dim, *value_copy = key_copy + KEYS * dim;
    std::fill(query, mixed + rows * dim, 0.0f);
    const float scale = 1.0f / std::sqrt((float)s.dim);
    for (int r = 0; r < rows; r++) {
        int head = kv * group + r % group;
        const float *source = q + ((size_t)(from + r / group) * s.heads + head) * s.dim;
        for (int d = 0; d < s.dim; d++) query[r * dim + d] = source[d] * scale;
        greatest[r] = s.sinks ? s.sinks[head] : NEVER;
        total[r] = s.sinks ? 1.0f : 0.0f;
    }
    const int64_t oldest = s.window ? std::max<int64_t>(s.first, s.position + from - s.window + 1) : s.first;
    const int64_t end = s.position + to;
    for (int64_t start = oldest; start < end; start += KEYS) {
        const int count = (int)std::min<int64_t>(KEYS, end - start);
        const float *key = as_floats(keys, kv, start - s.first, count, dim, key_copy);
        const float *value = as_floats(values, kv, start - s.first, count, dim, value_copy);
        if (rows <= LANES) {
            for (int j = 0; j < count; j++)
                for (int r = 0; r < rows; r++) {
                    Vector a = spread(0), b = spread(0);
                    for (int d = 0; d < dim; d += 2 * LANES) {
                        a += load(query + r * dim + d) * load(key + j * dim + d);
                        b += load(query + r * dim + d + LANES) * load(key + j * dim + d + LANES);
                    }
                    score[r * KEYS + j] = sum(a + b);
                }
        } else {
            for (int j = 0; j < KEYS; j++)
                for (int d = 0; d < dim; d++) turned[d * KEYS + j] = j < count ? key[j * dim + d] : 0.0f;
            std::fill(score, score + rows * KEYS, 0.0f);
            multiply(rows, KEYS, dim, query, dim, turned, KEYS, score, KEYS);
        }
        for (int r = 0; r < rows; r++) {
            float *line = score + r * KEYS;
            const int64_t now = s.position + from + r / group;
            const int until = (int)std::clamp<int64_t>(now + 1 - start, 0, count);
            const int since = s.window ? (int)std::clamp<int64_t>(now + 1 - s.window - start, 0, until) : 0;
            if (since == until) { std::fill(line, line + KEYS, 0.0f); continue; }
            if (s.softcap != 0)
                for (int j = since; j < until; j++) line[j] = s.softcap * std::tanh(line[j] / s.softcap);
            std::fill(line, line + since, NEVER);
            std::fill(line + until, line + KEYS, NEVER);
            Vector high = load(line);
            for (int j = LANES; j < KEYS; j += LANES) high = larger(high, load(line + j));
            float most = greatest[r];
            for (int i = 0; i < LANES; i++) most = std::max(most, high[i]);
            const float shrink = std::exp(greatest[r] - most);
            Vector shares = spread(0);
            for (int j = 0; j < KEYS; j += LANES) {
                Vector share = exponential(load(line + j) - spread(most));
                store(line + j, share);
            }
            std::fill(line, line + since, 0.0f);
            std::fill(line + until, line + KEYS, 0.0f);
            for (int j = 0; j < KEYS; j += LANES) shares += load(line + j);
            total[r] = total[r] * shrink + sum(shares);
            if (shrink != 1.0f)
                for (int d = 0; d < dim; d += LANES) store(mixed + r * dim + d, load(mixed + r * dim + d) * spread(shrink));
            greatest[r] = most;
        }
        multiply(rows, dim, count, score, KEYS, value, dim, mixed, dim);
    }
    for (int r = 0; r < rows; r++) {
        float *target = out + ((size_t)(from + r / group) * s.heads + kv * group + r % group) * s.dim;
        for (int d = 0; d < s.dim; d++) target[d] = mixed[r * dim + d] / total[r];
    }
}

/* q [tokens, heads, dim] -> out, the same; `run(task, n)` calls task(0) .. task(n - 1), perhaps on several threads. */
template <class Number, class Run>
void attend(const Shape &s, const float *q, Rows<Number> keys, Rows<Number> values, float *out, Run run) {
    const int tiles = (s.tokens + QUERIES - 1) / QUERIES;
    run([&](size_t task) {
        const int from = (int)(task / s.kv_heads) * QUERIES;
        attend_tile(s, q, keys, values, out, (int)(task % s.kv_heads), from, std::min(s.tokens, from + QUERIES));
    }, (size_t)tiles * s.kv_heads);
}

/* Writes k or v [tokens, kv_heads, dim] behind row `at`. */
template <class Number> void append(Rows<Number> rows, const float *source, int tokens, int heads, int dim, size_t at) {
    float padded[LANES];
    for (int t = 0; t < tokens; t++)
        for (int h = 0; h < heads; h++, source += dim) {
            Number *row = rows.row(h, at + t);
            for (int d = 0; d < rows.stride; d += LANES) {
                const int count = std::min(LANES, dim - d);
                for (int i = 0; i < LANES; i++) padded[i] = i < count ? source[d + i] : 0.0f;
                store(row + d, load(padded));
            }
        }
}

/* RoPE in place on the first `turned` numbers of the heads of x [tokens, heads, dim]: number i of their first half pairs
 * with number i of their second. Products are rounded one by one, as a graph of separate operators rounds them. */
#if defined(__clang__)
#define SEPARATE_ROUNDING
#else
#define SEPARATE_ROUNDING __attribute__((optimize("fp-contract=off")))
#endif
SEPARATE_ROUNDING inline void rotate(float *x, int tokens, int heads, int dim, int turned, const float *cosines,
                                     const float *sines) {
#if defined(__clang__)
#pragma clang fp contract(off)
#endif
    const int half = turned / 2;
    for (int t = 0; t < tokens; t++, cosines += half, sines += half)
        for (int h = 0; h < heads; h++, x += dim)
            for (int i = 0; i < half; i++) {
                const float a = x[i], b = x[i + half];
                const float ac = a * cosines[i], bs = b * sines[i], bc = b * cosines[i], as = a * sines[i];
                x[i] = ac - bs;
                x[i + half] = bc + as;
            }
}

} // namespace hilnas
