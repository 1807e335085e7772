/* Linear attention with a decaying memory per head, token by token, in float32.
 *
 * On a CPU a memory of 128 x 128 numbers stays in the second cache, so that a token costs three passes over it, less
 * than the products of the chunked form that training uses.
 */
#pragma once
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

namespace hilnas {

/* Queries and keys [tokens, key_heads, keys], values and results [tokens, heads, values]; head h takes key head
 * h % key_heads. Decays are [tokens, heads, 1], or [tokens, heads, keys] where each key has its own. */
struct Recurrence {
    int tokens, heads, key_heads, keys, values, decays;
    const float *q, *k, *v, *decay;
    const float *beta; /* [tokens, heads]; null: values are added to the memory as they are, nothing is replaced */
    float *memory;     /* [heads, keys, values] */
    float *out;
};

/* One head: memory = decay memory; memory += k (beta (v - memory^T k))^T, or k v^T; out = memory^T q / sqrt(keys). */
inline void recur_head(const Recurrence &r, int head) {
    const float scale = 1.0f / std::sqrt((float)r.keys);
    float *__restrict memory = r.memory + (size_t)head * r.keys * r.values;
    std::vector<float> written_(r.values);
    float *__restrict written = written_.data();
    for (int t = 0; t < r.tokens; t++) {
        const size_t row = (size_t)t * r.heads + head, key_row = (size_t)t * r.key_heads + head % r.key_heads;
        const float *q = r.q + key_row * r.keys, *k = r.k + key_row * r.keys, *decay = r.decay + row * r.decays;
        const float *__restrict v = r.v + row * r.values;
        float *__restrict out = r.out + row * r.values;
        memset(written, 0, sizeof(float) * r.values);
        for (int i = 0; i < r.keys; i++) {
            float *__restrict line = memory + (size_t)i * r.values;
            const float kept = decay[r.decays == 1 ? 0 : i], key = k[i];
            for (int j = 0; j < r.values; j++) {
                line[j] *= kept;
                written[j] += key * line[j];
            }
        }
        for (int j = 0; j < r.values; j++) written[j] = r.beta ? r.beta[row] * (v[j] - written[j]) : v[j];
        memset(out, 0, sizeof(float) * r.values);
        for (int i = 0; i < r.keys; i++) {
            float *__restrict line = memory + (size_t)i * r.values;
            const float key = k[i], query = q[i] * scale;
            for (int j = 0; j < r.values; j++) {
                line[j] += key * written[j];
                out[j] += query * line[j];
            }
        }
    }
}

/* All heads; `run(task, n)` calls task(0) .. task(n - 1), perhaps on several threads. */
template <class Run> void recur(const Recurrence &r, Run run) {
    run([&](size_t head) { recur_head(r, (int)head); }, (size_t)r.heads);
}

} // namespace hilnas
