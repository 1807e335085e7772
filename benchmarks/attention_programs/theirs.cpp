/* llama.cpp's side: flash attention of ggml's CPU backend as llama.cpp's graphs call it. The cache is float16, a row a
 * token; keys up to the next multiple of 256 are looked at and masked; masks are made outside the clock, since
 * llama.cpp makes them once for all layers. Threads live on between calls. */
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-cpu.h"
#include "ggml.h"
#include "request.h"

class Side {
  public:
    explicit Side(const Request &r) : r(r), in(r) {
        const size_t bytes = 2 * (size_t)r.tokens * r.kv_heads * r.dim * 2;
        cache_context = ggml_init({bytes + (1 << 16), nullptr, false});
        for (auto &one : cache) {
            one = ggml_new_tensor_2d(cache_context, GGML_TYPE_F16, (int64_t)r.dim * r.kv_heads, r.tokens);
            memset(one->data, 0, ggml_nbytes(one));
        }
        ggml_cpu_init();
        ggml_threadpool_params params = ggml_threadpool_params_default(r.threads);
        pool = ggml_threadpool_new(&params);
    }

    ~Side() {
        ggml_threadpool_free(pool);
        ggml_free(context);
        ggml_free(cache_context);
    }

    void prepare(int at, int count) {
        ggml_free(context);
        const int seen = std::min(r.tokens, (at + count + 255) / 256 * 256);
        const size_t size = (size_t)count * (2 * r.heads + 2 * r.kv_heads) * r.dim * 4 + (size_t)seen * count * 2;
        context = ggml_init({size + (1 << 20), nullptr, false});
        graph = ggml_new_graph(context);
        ggml_tensor *k = stored(0, &in.k[(size_t)at * r.kv_heads * r.dim], at, count, seen);
        ggml_tensor *v = stored(1, &in.v[(size_t)at * r.kv_heads * r.dim], at, count, seen);
        ggml_tensor *q = filled(&in.q[(size_t)at * r.heads * r.dim], r.heads, count);
        out = ggml_flash_attn_ext(context, ggml_permute(context, q, 0, 2, 1, 3), k, v, causal(at, count, seen),
                                  1.0f / std::sqrt((float)r.dim), 0, 0);
        ggml_prec_set_acc(out, GGML_PREC_F32);
        ggml_build_forward_expand(graph, out);
        plan = ggml_graph_plan(graph, r.threads, pool);
        work.resize(plan.work_size);
        plan.work_data = work.data();
    }

    void attend() {
        if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) exit(70);
    }

    void take(float *target) const { memcpy(target, out->data, ggml_nbytes(out)); }

  private:
    ggml_tensor *filled(const float *source, int heads, int count) {
        ggml_tensor *made = ggml_new_tensor_3d(context, GGML_TYPE_F32, r.dim, heads, count);
        memcpy(made->data, source, ggml_nbytes(made));
        return made;
    }

    /* Writes keys or values behind those in the cache; returns what attention reads, [dim, seen, heads]. */
    ggml_tensor *stored(int i, const float *source, int at, int count, int seen) {
        const int64_t width = (int64_t)r.dim * r.kv_heads;
        const size_t row = ggml_row_size(GGML_TYPE_F16, width), head = ggml_row_size(GGML_TYPE_F16, r.dim);
        ggml_tensor *fresh = ggml_reshape_2d(context, filled(source, r.kv_heads, count), width, count);
        ggml_tensor *target = ggml_view_2d(context, cache[i], width, count, row, row * at);
        ggml_build_forward_expand(graph, ggml_cpy(context, fresh, target));
        return ggml_permute(context, ggml_view_3d(context, cache[i], r.dim, r.kv_heads, seen, head, row, 0), 0, 2, 1, 3);
    }

    ggml_tensor *causal(int at, int count, int seen) {
        ggml_tensor *mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, seen, count);
        ggml_fp16_t *values = (ggml_fp16_t *)mask->data;
        for (int t = 0; t < count; t++)
            for (int j = 0; j < seen; j++) *values++ = ggml_fp32_to_fp16(j <= at + t ? 0.0f : -INFINITY);
        return mask;
    }

    const Request r;
    const Inputs in;
    ggml_context *cache_context, *context = nullptr;
    ggml_tensor *cache[2], *out = nullptr;
    ggml_cgraph *graph = nullptr;
    ggml_threadpool *pool;
    ggml_cplan plan{};
    std::vector<uint8_t> work;
};

int main(int argc, char **argv) {
    const Request r = read_request(argc, argv);
    Side side(r);
    measure(r, side);
}
