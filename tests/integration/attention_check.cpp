/* attention.h against a direct computation in double precision; prints the greatest error of each case. */
#include "attention.h"

#include <cstdio>
#include <cstdlib>

using namespace hilnas;

static float draw() { return (float)rand() / RAND_MAX * 2 - 1; }

static void serially(auto task, size_t count) {
    for (size_t i = 0; i < count; i++) task(i);
}

template <class Number>
static double worst(int tokens, int past, int heads, int kv_heads, int dim, int window, bool sink, float softcap = 0) {
    const int total = past + tokens, stride = round_up(dim, 2 * LANES), capacity = total + 3;
    std::vector<float> q(tokens * heads * dim), k(total * kv_heads * dim), v(k.size()), sinks(heads), out(q.size());
    for (auto *numbers : {&q, &k, &v, &sinks})
        for (float &x : *numbers) x = draw() * 2;
    std::vector<Number> keys((size_t)kv_heads * capacity * stride), values(keys.size());
    Rows<Number> key_rows{keys.data(), (size_t)capacity, stride}, value_rows{values.data(), (size_t)capacity, stride};
    append(key_rows, k.data(), total, kv_heads, dim, 0);
    append(value_rows, v.data(), total, kv_heads, dim, 0);
    Shape shape{tokens, heads, kv_heads, dim, 0, past, window, sink ? sinks.data() : nullptr, softcap};
    attend(shape, q.data(), key_rows, value_rows, out.data(), [](auto task, size_t n) { serially(task, n); });
    double error = 0;
    for (int t = 0; t < tokens; t++)
        for (int h = 0; h < heads; h++) {
            const int kv = h / (heads / kv_heads), now = past + t, oldest = window ? std::max(0, now - window + 1) : 0;
            std::vector<double> mixed(dim), share;
            double all = sink ? std::exp((double)sinks[h]) : 0;
            for (int j = oldest; j <= now; j++) {
                double score = 0;
                for (int d = 0; d < dim; d++)
                    score += (double)q[(t * heads + h) * dim + d] * k[(j * kv_heads + kv) * dim + d];
                score /= std::sqrt((double)dim);
                if (softcap != 0) score = softcap * std::tanh(score / softcap);
                share.push_back(std::exp(score));
                all += share.back();
            }
            for (int j = oldest; j <= now; j++)
                for (int d = 0; d < dim; d++)
                    mixed[d] += share[j - oldest] / all * v[(j * kv_heads + kv) * dim + d];
            for (int d = 0; d < dim; d++) error = std::max(error, std::abs(mixed[d] - out[(t * heads + h) * dim + d]));
        }
    return error;
}

/* How many results are wrong where one key is broken: queries that see it have no numbers, others are as before. */
template <class Number> static int hidden(int tokens, int broken) {
    const int heads = 6, kv_heads = 2, dim = 20, past = 100, total = past + tokens, stride = round_up(dim, 2 * LANES);
    std::vector<float> q(tokens * heads * dim), k(total * kv_heads * dim), out(q.size());
    for (auto *numbers : {&q, &k})
        for (float &x : *numbers) x = draw();
    for (int h = 0; h < kv_heads; h++) k[(broken * kv_heads + h) * dim + 3] = NAN;
    std::vector<Number> keys((size_t)kv_heads * total * stride), values(keys.size());
    Rows<Number> key_rows{keys.data(), (size_t)total, stride}, value_rows{values.data(), (size_t)total, stride};
    append(key_rows, k.data(), total, kv_heads, dim, 0);
    attend({tokens, heads, kv_heads, dim, 0, past, 0, nullptr}, q.data(), key_rows, value_rows, out.data(),
           [](auto task, size_t n) { serially(task, n); });
    int wrong = 0;
    for (size_t i = 0; i < out.size(); i++) wrong += std::isnan(out[i]) != (past + (int)i / (heads * dim) >= broken);
    return wrong;
}

int main() {
    srand(1);
    for (int dim : {16, 20, 64})
        for (int window : {0, 1, 37})
            for (int sink : {0, 1})
                for (int tokens : {1, 7, 71})
                    for (int past : {0, 1, 200}) {
                        double single = worst<float>(tokens, past, 6, 2, dim, window, sink);
                        double half = worst<Half>(tokens, past, 6, 2, dim, window, sink);
                        printf("%d %d %d %d %d %g %g\n", dim, window, sink, tokens, past, single, half);
                    }
    for (int window : {0, 37})
        for (int tokens : {1, 71}) {
            double single = worst<float>(tokens, 200, 6, 2, 20, window, false, 2);
            printf("bounded %d %d %g %g\n", window, tokens, single, worst<Half>(tokens, 200, 6, 2, 20, window, false, 2));
        }
    for (int broken : {50, 100})
        for (int tokens : {1, 71}) {
            int single = hidden<float>(tokens, broken);
            printf("broken %d %d %d %d\n", broken, tokens, single, hidden<Half>(tokens, broken));
        }
    printf("broken 120 71 %d %d\n", hidden<float>(71, 120), hidden<Half>(71, 120));
}
