/* What both sides of benchmarks/attention_kernel.py do: the same numbers in, times and results out.
 *
 * A side fills a cache of TOKENS from nothing, CHUNK at a time, and then lets one more query look at all of it. It times
 * writing new keys and values into the cache and attending; numbers in and out are float32, [token, head, dim].
 */
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

struct Request {
    int heads, kv_heads, dim, tokens, chunk, threads, repetitions, steps;
    const char *out;
};

inline Request read_request(int argc, char **argv) {
    if (argc != 10) {
        fprintf(stderr, "usage: %s HEADS KV_HEADS DIM TOKENS CHUNK THREADS REPETITIONS STEPS OUT\n", argv[0]);
        exit(64);
    }
    int n[8];
    for (int i = 0; i < 8; i++) n[i] = atoi(argv[i + 1]);
    return {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], argv[9]};
}

/* Uniform in [-2, 2): the same for the same seed everywhere. */
inline std::vector<float> numbers(size_t count, uint64_t state) {
    std::vector<float> values(count);
    for (float &x : values) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x = (float)(state >> 40) / (float)(1 << 22) - 2.0f;
    }
    return values;
}

struct Inputs {
    std::vector<float> q, k, v;
    explicit Inputs(const Request &r)
        : q(numbers((size_t)r.tokens * r.heads * r.dim, 1)), k(numbers((size_t)r.tokens * r.kv_heads * r.dim, 2)),
          v(numbers(k.size(), 3)) {}
};

template <class Work> int64_t nanoseconds(Work work) {
    auto begun = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begun).count();
}

/* A side is `prepare(at, count)`, then `attend()` by the clock: it adds `count` tokens from `at` on to the cache, and
 * they attend to all of it; `take(out)` gives what came out. */
template <class Side> void measure(const Request &r, Side &side) {
    const size_t row = (size_t)r.heads * r.dim;
    std::vector<float> out(row * r.tokens), last(row);
    std::vector<int64_t> prefill, decode;
    for (int repetition = 0; repetition <= r.repetitions; repetition++) {
        int64_t total = 0;
        for (int at = 0; at < r.tokens; at += r.chunk) {
            side.prepare(at, std::min(r.chunk, r.tokens - at));
            total += nanoseconds([&] { side.attend(); });
            side.take(&out[row * at]);
        }
        if (repetition) prefill.push_back(total); /* the first one warms up */
    }
    side.prepare(r.tokens - 1, 1);
    for (int step = -3; step < r.steps; step++) {
        int64_t one = nanoseconds([&] { side.attend(); });
        if (step >= 0) decode.push_back(one);
    }
    side.take(last.data());
    FILE *file = fopen(r.out, "wb");
    if (!file || fwrite(out.data(), 4, out.size(), file) != out.size() ||
        fwrite(last.data(), 4, last.size(), file) != last.size() || fclose(file))
        exit(74);
    for (auto *times : {&prefill, &decode}) {
        printf("%s[", times == &prefill ? "{\"prefill_ns\":" : ",\"decode_ns\":");
        for (size_t i = 0; i < times->size(); i++) printf("%s%lld", i ? "," : "", (long long)(*times)[i]);
        printf("]");
    }
    printf("}\n");
}
