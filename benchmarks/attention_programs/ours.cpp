/* Our side: the kernel and the thread pool of the ExecuTorch runner, a head-major float16 cache. */
#include <executorch/runtime/core/function_ref.h>

#include "attention.h"
#include "request.h"

/* The wheel ships the library that holds this class but not its header. */
namespace executorch::extension::threadpool {
class ThreadPool {
  public:
    bool _unsafe_reset_threadpool(uint32_t threads);
    void run(runtime::FunctionRef<void(size_t)> task, size_t count);
};
ThreadPool *get_threadpool();
} // namespace executorch::extension::threadpool

struct Side {
    explicit Side(const Request &r)
        : r(r), in(r), stride(hilnas::round_up(r.dim, 2 * hilnas::LANES)), out((size_t)r.chunk * r.heads * r.dim) {
        for (auto &one : cache) one.resize((size_t)r.kv_heads * r.tokens * stride);
        pool->_unsafe_reset_threadpool((uint32_t)r.threads);
    }

    void prepare(int from, int tokens) { at = from, count = tokens; }

    void attend() {
        const size_t row = (size_t)r.kv_heads * r.dim;
        hilnas::append(rows(0), &in.k[row * at], count, r.kv_heads, r.dim, (size_t)at);
        hilnas::append(rows(1), &in.v[row * at], count, r.kv_heads, r.dim, (size_t)at);
        const hilnas::Shape shape{count, r.heads, r.kv_heads, r.dim, 0, at, 0, nullptr};
        const float *q = &in.q[(size_t)at * r.heads * r.dim];
        hilnas::attend(shape, q, rows(0), rows(1), out.data(), [&](auto task, size_t n) { pool->run(task, n); });
    }

    void take(float *target) const { std::copy_n(out.data(), (size_t)count * r.heads * r.dim, target); }

  private:
    hilnas::Rows<hilnas::Half> rows(int i) { return {cache[i].data(), (size_t)r.tokens, stride}; }

    const Request r;
    const Inputs in;
    const int stride;
    std::vector<hilnas::Half> cache[2];
    std::vector<float> out;
    executorch::extension::threadpool::ThreadPool *pool = executorch::extension::threadpool::get_threadpool();
    int at = 0, count = 0;
};

int main(int argc, char **argv) {
    const Request r = read_request(argc, argv);
    Side side(r);
    measure(r, side);
}
