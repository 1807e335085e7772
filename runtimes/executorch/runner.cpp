/* Measures one request on one model: load, warm up, timed prompt, timed decode; one JSON object on stdout.
 * With --reference, a reference model in a process of its own takes turns with it, and its report is part of this one's.
 *
 * Or, with --recipe, makes the model file that a recipe describes.
 *
 * A model is an artifact (the format stands in __init__.py) whose blocks are ExecuTorch programs, or one whole-graph
 * .pte. Links ExecuTorch's own libraries and no torch. A run is one fresh process: nothing is left over from another
 * repetition. The log goes to stderr. Exit codes are in report.h.
 *
 * The libraries may have been compiled with libstdc++ and this file with libc++ (compile.py: _CROSS_FLAGS). Of the standard
 * library only this crosses the border between them: std::optional and std::array, which are the same in both,
 * std::variant, which compile.py makes the same, and std::string_view, which `text` turns round. No exception crosses it.
 */
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <malloc.h>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <executorch/extension/kernel_util/make_boxed_from_unboxed_functor.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/backend/interface.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/core/exec_aten/util/tensor_util.h>
#include <executorch/runtime/core/function_ref.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/runtime.h>

#include "../report.h"
#include "attention.h"
#include "recipe.h"
#include "recurrence.h"

/* The wheel ships the library that holds this class but not its header. */
namespace executorch::extension::threadpool {
class ThreadPool {
  public:
    bool _unsafe_reset_threadpool(uint32_t threads);
    void run(runtime::FunctionRef<void(size_t)> task, size_t count);
};
ThreadPool *get_threadpool();
} // namespace executorch::extension::threadpool

namespace {

using executorch::aten::ScalarType;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;
using executorch::extension::MallocMemoryAllocator;
using namespace executorch::runtime;

struct Options {
    const char *model = nullptr, *reference = nullptr, *kv = "f16", *logits = nullptr, *recipe = nullptr, *output = nullptr;
    long prompt = 512, gen = 64, context = 0, batch = 512, threads = 1, mmap = 0, seed = 0, warmup = -1;
} opt;

/* ---- failing ------------------------------------------------------------------------------------------------- */

[[noreturn]] void fail(int code, const char *kind, const std::string &message) {
    report_failure(code, kind, message.c_str());
    abort(); /* not reached */
}

[[noreturn]] void refuse(const std::string &why) { fail(LOAD_FAILED, "load", "the model file was refused: " + why); }

void check(Error error, int code, const char *what) {
    if (error == Error::Ok) return;
    bool memory = error == Error::MemoryAllocationFailed;
    char number[32];
    snprintf(number, sizeof number, " returned 0x%x", (unsigned)error);
    fail(memory ? NO_MEMORY : code, memory ? "out_of_memory" : "executorch", what + std::string(number));
}

/* ---- arguments ----------------------------------------------------------------------------------------------- */

[[noreturn]] void usage(const std::string &what) {
    fail(USAGE, "usage", "usage: runner --model FILE [--prompt N] [--gen N] [--context N] [--batch N] [--threads N] "
                         "[--kv f16|f32] [--mmap 0|1] [--seed N] [--warmup N] [--reference FILE | --logits FILE] | "
                         "runner --recipe FILE --output FILE: " + what);
}

void parse_arguments(int argc, char **argv) {
    const struct { const char *name; long *value, low, high; } numbers[] = {
        {"--prompt", &opt.prompt, 1, 1 << 22}, {"--gen", &opt.gen, 0, 1 << 22}, {"--context", &opt.context, 0, 1 << 22},
        {"--batch", &opt.batch, 1, 1 << 20}, {"--threads", &opt.threads, 1, 1024}, {"--mmap", &opt.mmap, 0, 1},
        {"--seed", &opt.seed, 0, INT32_MAX}, {"--warmup", &opt.warmup, 0, 1 << 20},
    };
    const struct { const char *name; const char **value; } texts[] = {
        {"--model", &opt.model}, {"--reference", &opt.reference}, {"--kv", &opt.kv}, {"--logits", &opt.logits},
        {"--recipe", &opt.recipe}, {"--output", &opt.output},
    };
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc) usage(argv[i]);
        bool known = false;
        for (auto &one : texts)
            if (!strcmp(argv[i], one.name)) *one.value = argv[i + 1], known = true;
        for (auto &one : numbers)
            if (!strcmp(argv[i], one.name)) {
                if (!read_integer(argv[i + 1], one.low, one.high, one.value)) usage(argv[i]);
                known = true;
            }
        if (!known) usage(argv[i]);
    }
    if (opt.recipe || opt.output) {
        if (!opt.recipe || !opt.output || opt.model || opt.reference) usage("--recipe and --output go together, without a model");
        if (access(opt.recipe, R_OK)) usage("--recipe cannot be read");
        return;
    }
    if (!opt.model) usage("--model is missing");
    if (access(opt.model, R_OK)) usage("--model cannot be read");
    if (opt.reference && opt.logits) usage("--reference and --logits exclude each other");
    /* The first prompt of a process is slower where fewer tokens warmed it up. */
    if (opt.warmup < 0) opt.warmup = std::min(opt.prompt, opt.batch);
    if (strcmp(opt.kv, "f16") && strcmp(opt.kv, "f32")) usage("--kv");
    if (!opt.context) opt.context = opt.prompt + opt.gen;
    if (opt.context < opt.prompt + opt.gen) usage("--context is shorter than prompt + gen");
}

/* ---- the file ------------------------------------------------------------------------------------------------ */

/* The model file, mapped. Parts are copied out of it unless --mmap asks for its pages themselves, and pages that were
 * copied are given back, so that memory is counted once. */
class File {
  public:
    explicit File(const char *path) {
        int file = open(path, O_RDONLY);
        struct stat status;
        if (file < 0 || fstat(file, &status) || status.st_size < 64) refuse("it cannot be read, or is too short");
        size_ = (size_t)status.st_size;
        void *mapped = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
        if (mapped == MAP_FAILED) fail(NO_MEMORY, "out_of_memory", "the model file cannot be mapped");
        data_ = (const uint8_t *)mapped;
        descriptor_ = file;
    }

    size_t size() const { return size_; }

    const uint8_t *at(uint64_t offset, uint64_t size) const {
        if (offset > size_ || size > size_ - offset) refuse("a part lies outside the file");
        return data_ + offset;
    }

    FreeableBuffer part(uint64_t offset, uint64_t size) const {
        const uint8_t *mapped = at(offset, size);
        if (opt.mmap) return FreeableBuffer(mapped, size, nullptr);
        void *copy = nullptr;
        if (posix_memalign(&copy, 64, std::max<size_t>(size, 1))) fail(NO_MEMORY, "out_of_memory", "loading a constant");
        read_into(offset, size, copy);
        return FreeableBuffer(copy, size, [](void *, void *data, size_t) { free(data); });
    }

    void read_into(uint64_t offset, uint64_t size, void *target) const {
        at(offset, size);
        for (uint64_t done = 0; done < size;) {
            ssize_t count = pread(descriptor_, (char *)target + done, size - done, (off_t)(offset + done));
            if (count <= 0) refuse("it cannot be read");
            done += (uint64_t)count;
        }
    }

  private:
    const uint8_t *data_;
    size_t size_;
    int descriptor_;
};

/* One program in the file. */
class Section final : public DataLoader {
  public:
    Section(const File &file, uint64_t offset, uint64_t size) : file_(file), offset_(offset), size_(size) {
        file.at(offset, size);
    }
    Result<FreeableBuffer> load(size_t offset, size_t size, const SegmentInfo &) const override {
        if (offset > size_ || size > size_ - offset) return Error::InvalidArgument;
        return file_.part(offset_ + offset, size);
    }
    Result<size_t> size() const override { return (size_t)size_; }

  private:
    const File &file_;
    uint64_t offset_, size_;
};

#ifdef LIBRARIES_OF_LIBSTDCXX
static_assert(sizeof(std::variant<bool, char>) == 2, "the index of a variant is one byte, as in libstdc++");
#endif

/* What a library hands over as a key: libstdc++ stores the length of a string_view first, libc++ last. */
std::string text(std::string_view key) {
#ifdef LIBRARIES_OF_LIBSTDCXX
    return std::string((const char *)key.size(), (size_t)key.data());
#else
    return std::string(key);
#endif
}

/* The constants of one method. */
class Constants final : public NamedDataMap {
  public:
    explicit Constants(const File &file) : file_(file) {}

    void add(const std::string &key, uint64_t offset, uint64_t size, std::vector<int32_t> shape) {
        file_.at(offset, size);
        std::vector<uint8_t> order(shape.size());
        for (size_t i = 0; i < order.size(); i++) order[i] = (uint8_t)i;
        if (!entries_.emplace(key, Entry{offset, size, std::move(shape), std::move(order)}).second) refuse(key + " twice");
    }
    Result<const TensorLayout> get_tensor_layout(std::string_view key) const override {
        auto found = entries_.find(text(key));
        if (found == entries_.end()) return Error::NotFound;
        const Entry &entry = found->second;
        return TensorLayout::create({entry.shape.data(), entry.shape.size()}, {entry.order.data(), entry.order.size()},
                                    ScalarType::Float);
    }
    Result<FreeableBuffer> get_data(std::string_view key) const override {
        auto found = entries_.find(text(key));
        if (found == entries_.end()) return Error::NotFound;
        return file_.part(found->second.offset, found->second.size);
    }
    Error load_data_into(std::string_view key, void *buffer, size_t size) const override {
        auto found = entries_.find(text(key));
        if (found == entries_.end() || found->second.size != size) return Error::NotFound;
        file_.read_into(found->second.offset, size, buffer);
        return Error::Ok;
    }
    Result<uint32_t> get_num_keys() const override { return (uint32_t)entries_.size(); }
    Result<const char *> get_key(uint32_t index) const override {
        if (index >= entries_.size()) return Error::InvalidArgument;
        return std::next(entries_.begin(), index)->first.c_str();
    }

  private:
    struct Entry {
        uint64_t offset, size;
        std::vector<int32_t> shape;
        std::vector<uint8_t> order;
    };
    const File &file_;
    std::unordered_map<std::string, Entry> entries_;
};

/* ---- attention ----------------------------------------------------------------------------------------------- */

void in_parallel(const std::function<void(size_t)> &task, size_t count) {
    executorch::extension::threadpool::get_threadpool()->run(task, count);
}

/* Keys and values of one layer, in --kv's format. A window keeps its own tokens and room for one chunk. Of latent
 * attention keys only: the first `latent` numbers of one are the value. */
class Cache {
  public:
    Cache(int kv_heads, int dim, int64_t window, int latent, int64_t context, int64_t chunk)
        : kv_heads(kv_heads), dim(dim), latent(latent), window(window), half_(!strcmp(opt.kv, "f16")),
          capacity_((size_t)(window ? std::min(context, window - 1 + chunk) : context)),
          stride_(hilnas::round_up(dim, 2 * hilnas::LANES)) {
        size_t bytes = (latent ? 1 : 2) * kv_heads * capacity_ * stride_ * (half_ ? 2 : 4);
        void *memory = nullptr;
        if (posix_memalign(&memory, 64, std::max<size_t>(bytes, 1))) fail(NO_MEMORY, "out_of_memory", "the cache");
        memset(memory, 0, bytes); /* a context that was asked for counts as memory, whether or not it is filled */
        memory_ = memory;
    }

    const int kv_heads, dim, latent;
    const int64_t window;

    void clear() { first_ = seen_ = 0; }
    int64_t seen() const { return seen_; }

    void append(const float *keys, const float *values, int tokens) {
        make_room(tokens);
        if (seen_ - first_ + tokens > (int64_t)capacity_) fail(DECODE_FAILED, "context", "more tokens than the context");
        with_rows([&](auto k, auto v) {
            hilnas::append(k, keys, tokens, kv_heads, dim, (size_t)(seen_ - first_));
            if (!latent) hilnas::append(v, values, tokens, kv_heads, dim, (size_t)(seen_ - first_));
        });
        seen_ += tokens;
    }

    void attend(const float *q, int tokens, int heads, const float *sinks, float softcap, float *out) {
        hilnas::Shape shape{tokens, heads, kv_heads, dim, first_, seen_ - tokens, window, sinks, softcap};
        with_rows([&](auto k, auto v) { hilnas::attend(shape, q, k, v, out, in_parallel); });
    }

  private:
    template <class Use> void with_rows(Use use) {
        size_t count = latent ? 0 : kv_heads * capacity_ * stride_;
        auto both = [&](auto *data) {
            using Number = std::remove_pointer_t<decltype(data)>;
            use(hilnas::Rows<Number>{data, capacity_, stride_}, hilnas::Rows<Number>{data + count, capacity_, stride_});
        };
        if (half_) both((hilnas::Half *)memory_);
        else both((float *)memory_);
    }

    /* Moves what later queries can still see to the front, when the end is reached. */
    void make_room(int tokens) {
        if (!window || seen_ - first_ + tokens <= (int64_t)capacity_) return;
        int64_t kept = std::min(seen_ - first_, window - 1), dropped = seen_ - first_ - kept;
        with_rows([&](auto k, auto v) {
            for (int h = 0; h < kv_heads; h++)
                for (auto rows : {k, v})
                    memmove(rows.row(h, 0), rows.row(h, dropped), (size_t)kept * stride_ * sizeof *rows.data);
        });
        first_ += dropped;
    }

    const bool half_;
    const size_t capacity_;
    const int stride_;
    void *memory_;
    int64_t first_ = 0, seen_ = 0;
};

/* Cosines and sines of RoPE [context, turned / 2]: angles as in nas.model.nn, each rounded once. */
struct Rope {
    const int turned;
    std::vector<float> cosines, sines;

    Rope(double theta, int turned, const std::vector<float> &divisors, long context) : turned(turned) {
        int half = turned / 2;
        cosines.resize((size_t)context * half);
        sines.resize(cosines.size());
        for (int i = 0; i < half; i++) {
            float frequency = (float)std::pow(theta, -(double)i / half);
            if (!divisors.empty()) frequency /= divisors[i];
            for (long position = 0; position < context; position++) {
                float angle = (float)position * frequency;
                cosines[position * half + i] = (float)std::cos((double)angle);
                sines[position * half + i] = (float)std::sin((double)angle);
            }
        }
    }

    /* Turns numbers of the heads of x [tokens, heads, dim], from number `from` of a head on; x begins at `position`. */
    void turn(std::vector<float> &x, int tokens, int heads, int dim, int from, int64_t position) const {
        size_t at = (size_t)position * (turned / 2);
        if (at + (size_t)tokens * (turned / 2) > cosines.size())
            fail(DECODE_FAILED, "context", "more tokens than the context");
        hilnas::rotate(x.data() + from, tokens, heads, dim, turned, &cosines[at], &sines[at]);
    }
};

/* What the attention operator of the running program works on. */
struct Attention {
    Cache *cache;
    const Rope *rope;
    const float *sinks;
    int most_heads; /* for which the file has sinks */
    float softcap;
} *current;

int known(int64_t size, int wanted, const char *what) {
    if (size != wanted) refuse(std::string(what) + " of a program and of its step differ");
    return (int)size;
}

Tensor &attend_cached(KernelRuntimeContext &context, const Tensor &q, Tensor &out) {
    Cache &cache = *current->cache;
    int tokens = (int)q.size(1), heads = (int)q.size(2), dim = known(q.size(3), cache.dim, "head size");
    int32_t sizes[] = {1, tokens, heads * dim};
    if (resize_tensor(out, {sizes, 3}) != Error::Ok) { context.fail(Error::InvalidArgument); return out; }
    int64_t position = cache.seen() - tokens;
    if (position < 0) refuse("a step reads a cache before it is written");
    if (heads % cache.kv_heads || (current->sinks && heads > current->most_heads)) refuse("number of query heads");
    static std::vector<float> turned;
    turned.assign(q.const_data_ptr<float>(), q.const_data_ptr<float>() + q.numel());
    if (current->rope) current->rope->turn(turned, tokens, heads, dim, 0, position);
    cache.attend(turned.data(), tokens, heads, current->sinks, current->softcap, out.mutable_data_ptr<float>());
    return out;
}

Tensor &attend(KernelRuntimeContext &context, const Tensor &q, const Tensor &k, const Tensor &v, Tensor &out) {
    Cache &cache = *current->cache;
    int tokens = (int)k.size(1), heads = known(k.size(2), cache.kv_heads, "number of heads");
    known(k.size(3), cache.dim, "head size"), known(v.numel(), (int)k.numel(), "number of values");
    static std::vector<float> turned;
    turned.assign(k.const_data_ptr<float>(), k.const_data_ptr<float>() + k.numel());
    if (current->rope) current->rope->turn(turned, tokens, heads, cache.dim, 0, cache.seen());
    cache.append(turned.data(), v.const_data_ptr<float>(), tokens);
    return attend_cached(context, q, out);
}

Tensor &attend_latent(KernelRuntimeContext &context, const Tensor &q, const Tensor &latent, const Tensor &shared,
                      Tensor &out) {
    Cache &cache = *current->cache;
    const int tokens = (int)q.size(1), heads = (int)q.size(2), dim = known(q.size(3), cache.dim, "head size");
    const int size = known(latent.size(2), cache.latent, "size of latents"), last = known(shared.size(2), dim - size, "key");
    known(latent.size(1), tokens, "number of latents"), known(shared.size(1), tokens, "number of keys");
    int32_t sizes[] = {1, tokens, heads * size};
    if (resize_tensor(out, {sizes, 3}) != Error::Ok) { context.fail(Error::InvalidArgument); return out; }
    static std::vector<float> keys, queries, mixed;
    keys.resize((size_t)tokens * dim), mixed.resize((size_t)tokens * heads * dim);
    for (int t = 0; t < tokens; t++) {
        memcpy(&keys[(size_t)t * dim], latent.const_data_ptr<float>() + (size_t)t * size, sizeof(float) * size);
        memcpy(&keys[(size_t)t * dim + size], shared.const_data_ptr<float>() + (size_t)t * last, sizeof(float) * last);
    }
    queries.assign(q.const_data_ptr<float>(), q.const_data_ptr<float>() + q.numel());
    if (current->rope) {
        current->rope->turn(keys, tokens, 1, dim, size, cache.seen());
        current->rope->turn(queries, tokens, heads, dim, size, cache.seen());
    }
    cache.append(keys.data(), nullptr, tokens);
    cache.attend(queries.data(), tokens, heads, nullptr, 0, mixed.data());
    float *target = out.mutable_data_ptr<float>();
    for (size_t i = 0; i < (size_t)tokens * heads; i++) memcpy(target + i * size, &mixed[i * dim], sizeof(float) * size);
    return out;
}

EXECUTORCH_LIBRARY(hilnas, "attend.out", attend);
EXECUTORCH_LIBRARY(hilnas, "attend_latent.out", attend_latent);
EXECUTORCH_LIBRARY(hilnas, "attend_shared.out", attend_cached);

/* Arguments q, k, v, decay, memory and, with `replaces`, beta; then y and the memory afterwards, both to be written.
 * Boxed by hand: the library's own boxing knows one output. */
template <bool replaces> void recur(KernelRuntimeContext &context, Span<EValue *> stack) {
    const Tensor &q = stack[0]->toTensor(), &k = stack[1]->toTensor(), &v = stack[2]->toTensor();
    const Tensor &decay = stack[3]->toTensor(), &memory = stack[4]->toTensor(), *beta = nullptr;
    if (replaces) beta = &stack[5]->toTensor();
    Tensor &y = stack[5 + replaces]->toTensor(), &after = stack[6 + replaces]->toTensor();
    const int tokens = (int)q.size(0), heads = (int)memory.size(0), key_heads = (int)q.size(1);
    const int keys = (int)memory.size(1), values = (int)memory.size(2), decays = (int)decay.size(2);
    const int64_t rows = (int64_t)tokens * heads;
    const bool fits = k.numel() == q.numel() && q.size(2) == keys && key_heads && heads % key_heads == 0 &&
                      v.numel() == rows * values && (decays == 1 || decays == keys) &&
                      decay.numel() == rows * decays && (!beta || beta->numel() == rows) &&
                      after.numel() == memory.numel();
    if (!fits || resize_tensor(y, v.sizes()) != Error::Ok) return context.fail(Error::InvalidArgument);
    float *kept = after.mutable_data_ptr<float>();
    memmove(kept, memory.const_data_ptr<float>(), sizeof(float) * memory.numel());
    hilnas::recur({tokens, heads, key_heads, keys, values, decays, q.const_data_ptr<float>(),
                   k.const_data_ptr<float>(), v.const_data_ptr<float>(), decay.const_data_ptr<float>(),
                   beta ? beta->const_data_ptr<float>() : nullptr, kept, y.mutable_data_ptr<float>()}, in_parallel);
}

const Error recurrences[] = {
    register_kernel(Kernel("hilnas::delta_rule.out", recur<true>)),
    register_kernel(Kernel("hilnas::linear_attention.out", recur<false>)),
};

/* ---- the chain ----------------------------------------------------------------------------------------------- */

/* Memory that programs plan for what lives during one call: one call runs at a time, so all share it. */
class Arena {
  public:
    void grow(size_t index, size_t size) {
        if (index >= buffers_.size()) buffers_.resize(index + 1);
        if (buffers_[index].size() < size) buffers_[index].resize(size);
    }
    std::vector<Span<uint8_t>> spans() {
        std::vector<Span<uint8_t>> all;
        for (auto &buffer : buffers_) all.push_back({buffer.data(), buffer.size()});
        return all;
    }

  private:
    std::vector<std::vector<uint8_t>> buffers_;
};

/* A dense tensor over memory of the caller's. */
class View {
  public:
    View(void *data, std::vector<int32_t> shape, ScalarType type = ScalarType::Float)
        : sizes_(std::move(shape)), strides_(sizes_.size(), 1), order_(sizes_.size()) {
        for (size_t i = 0; i < order_.size(); i++) order_[i] = (uint8_t)i;
        for (size_t i = sizes_.size(); i-- > 1;) strides_[i - 1] = strides_[i] * sizes_[i];
        tensor_.emplace(type, (ssize_t)sizes_.size(), sizes_.data(), data, order_.data(), strides_.data());
    }
    View(const View &) = delete;
    EValue value() { return EValue(Tensor(&*tensor_)); }

  private:
    std::vector<int32_t> sizes_, strides_;
    std::vector<uint8_t> order_;
    std::optional<TensorImpl> tensor_;
};

struct LoadedProgram {
    std::unique_ptr<Section> section;
    std::optional<Program> program;
    std::vector<std::vector<int32_t>> states; /* shapes; only mixers have them, behind x and residual */
};

class LoadedMethod {
  public:
    LoadedMethod(const LoadedProgram &from, const Constants &constants, Arena &arena, EventTracer *tracer)
        : spans_(arena.spans()), planned_({spans_.data(), spans_.size()}),
          memory_(&allocator_, &planned_, &temporary_),
          method_(from.program->load_method("forward", &memory_, tracer, &constants)), states(from.states) {
        check(method_.error(), LOAD_FAILED, "loading a method");
    }

    /* Outputs are written where the caller says; inputs are read there. */
    void call(const std::vector<EValue> &inputs, const std::vector<std::pair<float *, size_t>> &outputs) {
        if (method_->inputs_size() != inputs.size() || method_->outputs_size() != outputs.size())
            refuse("a program has other inputs or outputs than its step");
        for (size_t i = 0; i < inputs.size(); i++) check(method_->set_input(inputs[i], i), DECODE_FAILED, "set_input");
        for (size_t i = 0; i < outputs.size(); i++)
            check(method_->set_output_data_ptr(outputs[i].first, outputs[i].second * sizeof(float), i), DECODE_FAILED,
                  "set_output_data_ptr");
        check(method_->execute(), DECODE_FAILED, "execute");
    }

  private:
    std::vector<Span<uint8_t>> spans_;
    HierarchicalAllocator planned_;
    MallocMemoryAllocator allocator_, temporary_;
    MemoryManager memory_;
    Result<Method> method_;

  public:
    const std::vector<std::vector<int32_t>> states;
};

enum class Kind { mixer, attention, ffn, moe };

struct Step {
    Kind kind;
    size_t method;
    bool parallel = false;
    Attention attention{};
    int top_k = 0, experts = 0;
    bool softmax = false, normed = true; /* scores of experts, and the weights of those that are chosen */
    const float *bias = nullptr;
    std::vector<std::vector<float>> states[2]{}; /* read from one, written to the other */
};

/* A model: token ids in, logits of the last one out. */
class Model {
  public:
    virtual ~Model() = default;
    virtual const float *feed(const int64_t *ids, int count) = 0; /* at most `chunk` ids */
    virtual void reset() = 0;
    int64_t vocab = 0, chunk = 0;
    size_t programs = 0;
    const char *kv = opt.kv;
};

class ChainModel final : public Model {
  public:
    static constexpr int EMBEDDING = -2, HEAD = -1; /* parts besides the steps, which count from 0 */

    /* `tracer` gets the events of all methods. */
    explicit ChainModel(const File &file, EventTracer *tracer = nullptr) : file_(file), tracer_(tracer) {
        const uint8_t *head = file.at(0, 24);
        uint32_t version;
        uint64_t length;
        memcpy(&version, head + 8, 4);
        memcpy(&length, head + 16, 8);
        if (version != 1) refuse("it is of another version");
        if (length > file.size()) refuse("its header is cut");
        std::istringstream header(std::string((const char *)file.at(24, length), length));
        body_ = (24 + length + 63) / 64 * 64;
        std::string line;
        while (std::getline(header, line)) {
            std::istringstream words(line);
            std::string what;
            words >> what;
            read(what, words, header);
            if (words.fail()) refuse("line \"" + line + "\"");
        }
        if (!head_) refuse("it has no head");
        for (auto *x : {&x_, &y_, &before_, &hidden_, &expert_in_, &expert_out_}) x->resize((size_t)longest_ * width_);
        logits_.resize((size_t)vocab);
        reset();
    }

    void reset() override {
        for (auto &cache : caches_) cache->clear();
        for (auto &step : steps_)
            for (auto &side : step.states)
                for (auto &state : side) std::fill(state.begin(), state.end(), 0.0f);
        side_ = 0;
    }

    const float *feed(const int64_t *ids, int count) override {
        return feed(ids, count, [](int, auto work) { work(); });
    }

    /* `around(part, work)` calls `work` for each part of the model. */
    template <class Around> const float *feed(const int64_t *ids, int count, Around around) {
        around(EMBEDDING, [&] {
            for (int t = 0; t < count; t++) embed(ids[t], &x_[(size_t)t * width_]);
        });
        for (size_t i = 0; i < steps_.size(); i++) around((int)i, [&] { run(steps_[i], count); });
        side_ ^= 1;
        around(HEAD, [&] {
            float *last = &x_[(size_t)(count - 1) * width_];
            head_->call({tensor(last, 1)}, {{logits_.data(), logits_.size()}});
            held_.clear();
            if (softcap_ != 0)
                for (float &logit : logits_) logit = softcap_ * std::tanh(logit / softcap_);
        });
        return logits_.data();
    }

  private:
    /* Checked numbers: whatever the file says, no size is negative or beyond what a file can hold. */
    static uint64_t size(std::istringstream &words) {
        int64_t value = -1;
        words >> value;
        if (value < 0 || value > (int64_t)1 << 46) words.setstate(std::ios::failbit);
        return words.fail() ? 0 : (uint64_t)value;
    }
    template <class List> size_t index(std::istringstream &words, const List &list) {
        uint64_t value = size(words);
        if (value >= list.size()) refuse("it names a part that it has not");
        return value;
    }
    const float *floats(std::istringstream &words, uint64_t count) {
        return (const float *)file_.at(body_ + size(words), count * sizeof(float));
    }

    void read(const std::string &what, std::istringstream &words, std::istringstream &header) {
        if (what == "model") {
            width_ = (int64_t)size(words), vocab = (int64_t)size(words), chunk = (int64_t)size(words);
            if (!width_ || !vocab || !chunk || width_ > 1 << 20 || chunk > 1 << 16 || vocab > 1 << 28) refuse("sizes");
            longest_ = chunk;
            chunk = std::min<int64_t>(chunk, opt.batch);
        } else if (what == "embedding") {
            uint64_t at = size(words), bytes = size(words), scales = size(words), scale_bytes = size(words);
            if (bytes != (uint64_t)(vocab * width_) || scale_bytes != (uint64_t)vocab * 4) refuse("embedding size");
            rows_ = (const int8_t *)file_.at(body_ + at, bytes);
            scales_ = (const float *)file_.at(body_ + scales, scale_bytes);
        } else if (what == "program") read_program(words);
        else if (what == "method") read_method(words, header);
        else if (what == "cache") {
            int heads = (int)size(words), dim = (int)size(words);
            int64_t window = (int64_t)size(words);
            if (heads < 1 || dim < 2 || heads > 1 << 16 || dim > 1 << 16) refuse("cache");
            caches_.push_back(std::make_unique<Cache>(heads, dim, window, 0, opt.context, chunk));
        } else if (what == "latents") {
            int latent = (int)size(words), shared = (int)size(words);
            if (latent < 1 || shared < 2 || latent > 1 << 16 || shared > 1 << 16) refuse("cache");
            caches_.push_back(std::make_unique<Cache>(1, latent + shared, 0, latent, opt.context, chunk));
        } else if (what == "head") {
            head_ = methods_[index(words, methods_)].get();
            softcap_ = std::exchange(next_softcap_, 0.0f);
        } else if (what == "softcap") {
            words >> next_softcap_;
            if (!(next_softcap_ > 0)) refuse("a bound that is not positive");
        } else if (what == "scores") next_softmax_ = size(words) != 0, next_normed_ = size(words) != 0;
        else if (what == "rope") read_rope(words);
        else if (what == "longrope") read_long_rope(words);
        else read_step(what, words);
    }

    void read_rope(std::istringstream &words) {
        next_turned_ = (int)size(words);
        if (words.fail() || next_turned_ > 1 << 16) refuse("RoPE");
        next_divisors_.clear();
        for (std::string word; words >> word; next_divisors_.push_back((float)atof(word.c_str()))) {}
        words.clear();
    }

    void read_long_rope(std::istringstream &words) {
        next_turned_ = (int)size(words);
        const bool far = (uint64_t)opt.context > size(words);
        std::string offsets[2];
        words >> offsets[0] >> offsets[1];
        if (words.fail() || next_turned_ > 1 << 16) refuse("RoPE");
        std::istringstream offset(offsets[far]);
        const float *divisors = floats(offset, next_turned_ / 2);
        next_divisors_.assign(divisors, divisors + next_turned_ / 2);
    }

    void read_program(std::istringstream &words) {
        LoadedProgram one;
        uint64_t at = size(words), bytes = size(words);
        one.section = std::make_unique<Section>(file_, body_ + at, bytes);
        auto program = Program::load(one.section.get(), Program::Verification::InternalConsistency);
        check(program.error(), LOAD_FAILED, "loading a program");
        one.program.emplace(std::move(*program));
        auto meta = one.program->method_meta("forward");
        check(meta.error(), LOAD_FAILED, "method_meta");
        for (size_t i = 0; i < meta->num_memory_planned_buffers(); i++)
            arena_.grow(i, (size_t)*meta->memory_planned_buffer_size(i));
        for (size_t i = 2; i < meta->num_inputs(); i++) {
            auto sizes = meta->input_tensor_meta(i)->sizes();
            one.states.emplace_back(sizes.begin(), sizes.end());
        }
        loaded_.push_back(std::move(one));
        programs = loaded_.size();
    }

    void read_method(std::istringstream &words, std::istringstream &header) {
        const LoadedProgram &program = loaded_[index(words, loaded_)];
        Constants constants(file_);
        std::string line;
        for (uint64_t left = size(words); left; left--) {
            if (!std::getline(header, line)) refuse("a method is cut");
            std::istringstream record(line);
            std::string what, key;
            record >> what >> key;
            uint64_t at = size(record), bytes = size(record);
            if (what != "data" || record.fail()) refuse("line \"" + line + "\"");
            std::vector<int32_t> shape;
            for (int32_t dimension; record >> dimension;) shape.push_back(dimension);
            constants.add(key, body_ + at, bytes, std::move(shape));
        }
        methods_.push_back(std::make_unique<LoadedMethod>(program, constants, arena_, tracer_));
    }

    void read_step(const std::string &what, std::istringstream &words) {
        Step step{};
        step.method = index(words, methods_);
        if (what == "mixer" || what == "attention") step.parallel = size(words) != 0;
        if (what == "mixer") step.kind = Kind::mixer;
        else if (what == "attention") read_attention(step, words);
        else if (what == "ffn") step.kind = Kind::ffn;
        else if (what == "moe") {
            step.kind = Kind::moe;
            step.top_k = (int)size(words), step.experts = (int)size(words);
            step.softmax = std::exchange(next_softmax_, false), step.normed = std::exchange(next_normed_, true);
            if (step.top_k < 1 || step.experts < step.top_k || step.method + step.experts >= methods_.size())
                refuse("experts");
            step.bias = floats(words, step.experts);
            router_.resize(std::max(router_.size(), (size_t)(longest_ * step.experts)));
        } else refuse("unknown record " + what);
        for (auto &side : step.states)
            for (auto &shape : methods_[step.method]->states) {
                size_t floats = 1;
                for (int32_t dimension : shape) floats *= (size_t)dimension;
                side.emplace_back(floats);
            }
        steps_.push_back(std::move(step));
    }

    void read_attention(Step &step, std::istringstream &words) {
        step.kind = Kind::attention;
        Cache &cache = *caches_[index(words, caches_)];
        double theta = 0;
        std::string sinks;
        words >> theta >> sinks;
        step.attention.cache = &cache;
        step.attention.softcap = std::exchange(next_softcap_, 0.0f);
        const int whole = cache.latent ? cache.dim - cache.latent : cache.dim;
        const int part = std::exchange(next_turned_, 0), turned = part ? part : whole;
        const std::vector<float> divisors = std::exchange(next_divisors_, {});
        if (theta != 0) {
            if (turned > whole || turned % 2 || (!divisors.empty() && divisors.size() * 2 != (size_t)turned))
                refuse("RoPE of more numbers than a head has, or with divisors of other pairs");
            auto &rope = ropes_[{theta, turned, divisors}];
            if (!rope) rope = std::make_unique<Rope>(theta, turned, divisors, opt.context);
            step.attention.rope = rope.get();
        }
        if (sinks != "-") {
            std::istringstream offset(sinks);
            step.attention.sinks = floats(offset, 1);
            const uint8_t *rest = (const uint8_t *)step.attention.sinks, *end = file_.at(file_.size(), 0);
            step.attention.most_heads = (int)std::min<ptrdiff_t>((end - rest) / (ptrdiff_t)sizeof(float), 1 << 16);
        }
    }

    void embed(int64_t id, float *x) const {
        const int8_t *row = rows_ + id * width_;
        for (int64_t d = 0; d < width_; d++) x[d] = (float)row[d] * scales_[id];
    }

    EValue tensor(float *data, int count) {
        held_.push_back(std::make_unique<View>(data, std::vector<int32_t>{1, count, (int)width_}));
        return held_.back()->value();
    }

    EValue state(std::vector<float> &values, const std::vector<int32_t> &shape) {
        held_.push_back(std::make_unique<View>(values.data(), shape));
        return held_.back()->value();
    }

    void run(Step &step, int count);
    void run_experts(Step &step, int count);

    const File &file_;
    EventTracer *tracer_;
    uint64_t body_ = 0;
    int64_t width_ = 0, longest_ = 0;
    const int8_t *rows_ = nullptr;
    const float *scales_ = nullptr;
    Arena arena_;
    std::vector<LoadedProgram> loaded_;
    std::vector<std::unique_ptr<LoadedMethod>> methods_;
    std::vector<std::unique_ptr<Cache>> caches_;
    std::map<std::tuple<double, int, std::vector<float>>, std::unique_ptr<Rope>> ropes_;
    std::vector<float> next_divisors_;
    int next_turned_ = 0;
    bool next_softmax_ = false, next_normed_ = true;
    float next_softcap_ = 0, softcap_ = 0;
    std::vector<Step> steps_;
    LoadedMethod *head_ = nullptr;
    std::vector<std::unique_ptr<View>> held_;
    std::vector<float> x_, y_, before_, hidden_, expert_in_, expert_out_, router_, logits_;
    int side_ = 0;
};


void ChainModel::run(Step &step, int count) {
    held_.clear();
    if (step.kind == Kind::moe) {
        std::copy_n(x_.begin(), (size_t)count * width_, before_.begin()); /* shared experts read it, too */
        return run_experts(step, count);
    }
    LoadedMethod &method = *methods_[step.method];
    std::vector<EValue> inputs{tensor(step.parallel ? before_.data() : x_.data(), count)};
    std::vector<std::pair<float *, size_t>> outputs{{y_.data(), y_.size()}};
    if (step.kind != Kind::ffn) inputs.push_back(tensor(x_.data(), count));
    for (size_t i = 0; i < method.states.size(); i++) {
        inputs.push_back(state(step.states[side_][i], method.states[i]));
        outputs.push_back({step.states[side_ ^ 1][i].data(), step.states[side_ ^ 1][i].size()});
    }
    current = &step.attention;
    method.call(inputs, outputs);
    if (!step.parallel) before_.swap(x_);
    x_.swap(y_);
}

/* Experts are chosen by score + bias and weighted by score, as in nas.model.nn.moe; each runs once, on all its tokens. */
void ChainModel::run_experts(Step &step, int count) {
    const int experts = step.experts, k = step.top_k;
    methods_[step.method]->call({tensor(x_.data(), count)},
                                {{hidden_.data(), hidden_.size()}, {router_.data(), (size_t)(longest_ * experts)}});
    struct Use { int token; float weight; };
    std::vector<std::vector<Use>> uses(experts);
    std::vector<float> score(experts);
    std::vector<int> order(experts);
    for (int t = 0; t < count; t++) {
        const float *logits = &router_[(size_t)t * experts], most = *std::max_element(logits, logits + experts);
        float all = 0;
        for (int e = 0; e < experts; e++) {
            score[e] = step.softmax ? std::exp(logits[e] - most) : 1.0f / (1.0f + std::exp(-logits[e]));
            all += score[e];
            order[e] = e;
        }
        if (step.softmax)
            for (float &one : score) one /= all;
        std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int a, int b) {
            float x = score[a] + step.bias[a], y = score[b] + step.bias[b];
            return x != y ? x > y : a < b;
        });
        float total = step.softmax ? 0.0f : 1e-6f;
        for (int i = 0; i < k; i++) total += score[order[i]];
        if (!step.normed) total = 1;
        for (int i = 0; i < k; i++) uses[order[i]].push_back({t, score[order[i]] / total});
    }
    const size_t width = (size_t)width_;
    for (int e = 0; e < experts; e++) {
        const int tokens = (int)uses[e].size();
        if (!tokens) continue;
        for (int i = 0; i < tokens; i++)
            memcpy(&expert_in_[i * width], &hidden_[uses[e][i].token * width], width * sizeof(float));
        methods_[step.method + 1 + e]->call({tensor(expert_in_.data(), tokens)},
                                            {{expert_out_.data(), expert_out_.size()}});
        for (int i = 0; i < tokens; i++) {
            float *x = &x_[uses[e][i].token * width];
            const float *y = &expert_out_[i * width], weight = uses[e][i].weight;
            for (size_t d = 0; d < width; d++) x[d] += weight * y[d];
        }
    }
}

/* ---- a whole graph ------------------------------------------------------------------------------------------- */

/* The operators of ExecuTorch's own attention, head-major inside the same cache buffer, by our kernel. */
hilnas::Rows<float> cached_rows(const Tensor &cache) {
    return {const_cast<float *>(cache.const_data_ptr<float>()), (size_t)cache.size(1), (int)cache.size(3)};
}

bool are_floats(std::initializer_list<const Tensor *> tensors) {
    return std::all_of(tensors.begin(), tensors.end(),
                       [](const Tensor *one) { return one->scalar_type() == ScalarType::Float && one->dim() == 4; });
}

/* Whether the rows of `value` [1, S, heads, dim] lie inside a cache [1, R, heads, dim], from `position` on. */
bool fits(const Tensor &value, const Tensor &cache, int64_t position) {
    return are_floats({&value, &cache}) && value.size(0) == 1 && value.size(2) == cache.size(2) &&
           value.size(3) == cache.size(3) && value.size(3) % hilnas::LANES == 0 && position >= 0 &&
           position <= cache.size(1) - value.size(1);
}

Tensor &update_cache(KernelRuntimeContext &context, const Tensor &value, Tensor &cache, int64_t position, Tensor &out) {
    if (!fits(value, cache, position)) { context.fail(Error::InvalidArgument); return out; }
    hilnas::append(cached_rows(cache), value.const_data_ptr<float>(), (int)value.size(1), (int)value.size(2),
                   (int)value.size(3), (size_t)position);
    return out;
}

/* Each token goes to a row of its own. */
Tensor &update_cache_with_indices(KernelRuntimeContext &context, const Tensor &value, Tensor &cache, int64_t,
                                  const Tensor &indices, Tensor &out) {
    if (!fits(value, cache, 0) || indices.scalar_type() != ScalarType::Long || indices.numel() != value.size(1)) {
        context.fail(Error::InvalidArgument);
        return out;
    }
    const int heads = (int)value.size(2), dim = (int)value.size(3);
    for (int64_t t = 0; t < value.size(1); t++) {
        int64_t row = indices.const_data_ptr<int64_t>()[t];
        if (row < 0 || row >= cache.size(1)) { context.fail(Error::InvalidArgument); return out; }
        hilnas::append(cached_rows(cache), value.const_data_ptr<float>() + t * heads * dim, 1, heads, dim, (size_t)row);
    }
    return out;
}

/* What a mask lets the last query see is the window; 0 where the mask is not that of a window over a cache in which
 * position p lies in row p modulo the number of rows. */
int64_t window_of(const Tensor &mask, int64_t position) {
    const int64_t tokens = mask.size(0), count = mask.size(1), end = position + tokens;
    const float *line = mask.const_data_ptr<float>();
    const int64_t window = std::count(line + (tokens - 1) * count, line + tokens * count, 0.0f);
    if (window < 1 || std::min(end, window - 1 + tokens) > count) return 0;
    for (int64_t now = position; now < end; now++, line += count)
        for (int64_t row = 0; row < count; row++) {
            int64_t held = end - 1 - ((end - 1 - row) % count + count) % count;
            bool sees = held >= 0 && held <= now && held > now - window;
            if (sees ? line[row] != 0.0f : !(line[row] < hilnas::NEVER / 2)) return 0;
        }
    return window;
}

/* The rows of `count` tokens from `first` on, in their order. */
hilnas::Rows<float> in_order(const Tensor &cache, int64_t first, int64_t count, std::vector<float> &copy) {
    hilnas::Rows<float> rows = cached_rows(cache);
    const int heads = (int)cache.size(2);
    copy.resize((size_t)heads * count * rows.stride);
    hilnas::Rows<float> ordered{copy.data(), (size_t)count, rows.stride};
    for (int h = 0; h < heads; h++)
        for (int64_t t = 0; t < count; t++)
            memcpy(ordered.row(h, t), rows.row(h, (first + t) % cache.size(1)), sizeof(float) * rows.stride);
    return ordered;
}

Tensor &custom_sdpa(KernelRuntimeContext &context, const Tensor &q, const Tensor &k, const Tensor &v, int64_t position,
                    const std::optional<Tensor> &mask, double, bool causal, std::optional<double>, Tensor &out) {
    auto refused = [&]() -> Tensor & { context.fail(Error::InvalidArgument); return out; };
    if (!are_floats({&q, &k, &v, &out}) || !k.sizes().equals(v.sizes()) || k.size(3) != q.size(3) ||
        q.size(3) % hilnas::LANES || k.size(2) < 1 || q.size(2) % k.size(2))
        return refused();
    const int64_t tokens = q.size(1), count = k.size(1);
    if (tokens < 1 || position < 0 || causal == mask.has_value() || (!mask && position > count - tokens)) return refused();
    if (mask && (mask->scalar_type() != ScalarType::Float || mask->dim() != 2 || mask->size(0) != tokens ||
                 mask->size(1) != count))
        return refused();
    const int64_t window = mask ? window_of(*mask, position) : 0;
    if ((mask && !window) || resize_tensor(out, q.sizes()) != Error::Ok) return refused();
    const int64_t first = window ? std::max<int64_t>(0, position + 1 - window) : 0;
    hilnas::Shape shape{(int)tokens, (int)q.size(2), (int)k.size(2), (int)q.size(3), first, position, window, nullptr, 0};
    static std::vector<float> copies[2];
    auto rows = [&](const Tensor &cache, std::vector<float> &copy) {
        return window ? in_order(cache, first, position + tokens - first, copy) : cached_rows(cache);
    };
    hilnas::attend(shape, q.const_data_ptr<float>(), rows(k, copies[0]), rows(v, copies[1]),
                   out.mutable_data_ptr<float>(), in_parallel);
    return out;
}

EXECUTORCH_LIBRARY(llama, "update_cache.out", update_cache);
EXECUTORCH_LIBRARY(llama, "update_cache_with_indices.out", update_cache_with_indices);
EXECUTORCH_LIBRARY(llama, "custom_sdpa.out", custom_sdpa);

/* One .pte with tokens and position in, logits out, and its state inside. */
class WholeModel final : public Model {
  public:
    explicit WholeModel(const File &file) : section_(file, 0, file.size()) {
        auto program = Program::load(&section_, Program::Verification::InternalConsistency);
        check(program.error(), LOAD_FAILED, "loading the program");
        program_.emplace(std::move(*program));
        vocab = constant("get_vocab_size");
        chunk = std::min<int64_t>(constant("get_max_seq_len"), opt.batch);
        const int64_t longest = constant("get_max_context_len");
        if (vocab < 1 || chunk < 1) refuse("sizes");
        if (opt.context > longest) refuse("it is for " + std::to_string(longest) + " tokens, not " + std::to_string(opt.context));
        programs = 1;
        kv = "f32"; /* whatever was asked for: its caches are part of the program */
        method_ = load("forward");
    }

    void reset() override { position_ = 0; } /* at position 0 the program forgets by itself */

    const float *feed(const int64_t *ids, int count) override {
        View tokens(const_cast<int64_t *>(ids), {1, count}, ScalarType::Long), at(&position_, {1}, ScalarType::Long);
        check(method_->method->set_input(tokens.value(), 0), DECODE_FAILED, "set_input");
        check(method_->method->set_input(at.value(), 1), DECODE_FAILED, "set_input");
        check(method_->method->execute(), DECODE_FAILED, "execute");
        position_ += count;
        const Tensor &logits = method_->method->get_output(0).toTensor();
        if (logits.numel() != vocab || logits.scalar_type() != ScalarType::Float) refuse("its logits are not of its vocabulary");
        return logits.const_data_ptr<float>();
    }

  private:
    struct Loaded {
        Arena arena;
        std::vector<Span<uint8_t>> spans;
        std::optional<HierarchicalAllocator> planned;
        MallocMemoryAllocator allocator, temporary;
        std::optional<MemoryManager> memory;
        std::optional<Method> method;
    };

    std::unique_ptr<Loaded> load(const char *name) {
        auto loaded = std::make_unique<Loaded>();
        auto meta = program_->method_meta(name);
        check(meta.error(), LOAD_FAILED, name);
        for (size_t i = 0; i < meta->num_memory_planned_buffers(); i++)
            loaded->arena.grow(i, (size_t)*meta->memory_planned_buffer_size(i));
        loaded->spans = loaded->arena.spans();
        loaded->planned.emplace(Span<Span<uint8_t>>{loaded->spans.data(), loaded->spans.size()});
        loaded->memory.emplace(&loaded->allocator, &*loaded->planned, &loaded->temporary);
        auto method = program_->load_method(name, &*loaded->memory);
        check(method.error(), LOAD_FAILED, name);
        loaded->method.emplace(std::move(*method));
        return loaded;
    }

    int64_t constant(const char *name) {
        auto loaded = load(name);
        check(loaded->method->execute(), LOAD_FAILED, name);
        return loaded->method->get_output(0).toInt();
    }

    Section section_;
    std::optional<Program> program_;
    std::unique_ptr<Loaded> method_;
    int64_t position_ = 0;
};

std::unique_ptr<Model> load_model(const File &file) {
    if (!memcmp(file.at(0, 8), "HILNASET", 8)) return std::make_unique<ChainModel>(file);
    if (!memcmp(file.at(4, 4), "ET12", 4)) return std::make_unique<WholeModel>(file);
    refuse("it is no model of ours and no ExecuTorch program");
}

/* ---- the request --------------------------------------------------------------------------------------------- */

const float *feed(Model &model, const int64_t *ids, long count) {
    const float *logits = nullptr;
    for (long done = 0; done < count; done += model.chunk)
        logits = model.feed(ids + done, (int)std::min<long>(count - done, (long)model.chunk));
    return logits;
}

/* Outside what is timed. */
void keep_logits(const float *logits, int64_t vocab) {
    if (const char *error = write_logits(opt.logits, logits, vocab)) usage(error);
}

/* One scratch memory for all of XNNPACK's subgraphs, which run one at a time; by default each has its own. */
void share_workspace() {
    constexpr int GLOBAL = 2; /* WorkspaceSharingMode::Global of XNNPACKBackend.h, which the wheel does not ship */
    BackendOptions<1> options;
    check(options.set_option("workspace_sharing_mode", GLOBAL), LOAD_FAILED, "workspace_sharing_mode");
    check(set_option("XnnpackBackend", options.view()), LOAD_FAILED, "workspace_sharing_mode");
}

int make_model() {
    auto refuse = [](const std::string &why) { fail(LOAD_FAILED, "recipe", "the recipe was refused: " + why); };
    auto not_written = [](const std::string &why) { fail(NOT_WRITTEN, "disk", "the model file cannot be written: " + why); };
    printf("{\"v\":1,\"made\":%" PRIu64 "}\n", hilnas::Recipe(opt.recipe, refuse, not_written).make(opt.output));
    return fflush(stdout) ? NO_MEMORY : 0;
}

void start_threads() {
    executorch::extension::threadpool::get_threadpool()->_unsafe_reset_threadpool((uint32_t)opt.threads);
    share_workspace();
}

/* Random token ids for prompt, decoding and warm-up. */
std::vector<int64_t> draw_ids(int64_t vocab) {
    std::vector<int64_t> ids(std::max(opt.prompt + opt.gen, opt.warmup));
    uint64_t state = (uint64_t)opt.seed;
    for (auto &id : ids) id = (int64_t)(splitmix64(&state) % (uint64_t)vocab);
    return ids;
}

void warm_up(Model &model, const std::vector<int64_t> &ids) {
    if (!opt.warmup) return;
    feed(model, ids.data(), std::min(opt.warmup, opt.context));
    model.reset();
}

struct Loaded {
    Model *model;
    const std::vector<int64_t> *ids;
    const float *logits;

    void feed(long first, long count) {
        logits = ::feed(*model, &(*ids)[first], count);
        volatile int64_t chosen = std::max_element(logits, logits + model->vocab) - logits;
        (void)chosen;
    }
};

int measure() {
    measurement m{};
    reference other, *beside = opt.reference ? &other : nullptr;
    const bool serves = beside && fork_reference(beside);
    if (serves) opt.model = opt.reference;
    else if (beside) await_reference(beside);
    runtime_init();
    int64_t begun = wall();
    start_threads();
    File file(opt.model);
    std::unique_ptr<Model> model = load_model(file);
    m.load_ms = (double)(wall() - begun) / 1e6;

    const std::vector<int64_t> ids = draw_ids(model->vocab);
    Loaded loaded{model.get(), &ids, nullptr};
    request r = new_request(&loaded, opt.gen, opt.logits);
    r.prepare = [](void *state, bool prompt) { if (prompt) ((Loaded *)state)->model->reset(); };
    r.read_prompt = [](void *state) { ((Loaded *)state)->feed(0, opt.prompt); };
    r.decode_token = [](void *state, long index) { ((Loaded *)state)->feed(opt.prompt + index, 1); };
    r.check = [](void *state) {
        auto &l = *(Loaded *)state;
        keep_logits(l.logits, l.model->vocab);
        return all_finite(l.logits, l.model->vocab);
    };
    r.rest = [](void *) {};
    begun = wall();
    warm_up(*model, ids);
    m.warmup_ms = (double)(wall() - begun) / 1e6;

    if (serves) serve_request(&m, &r, beside);
    else time_request(&m, &r, beside);
    begin_report(&m, &r);
    printf(",\"model_bytes\":%zu,\"programs\":%zu,\"vocab\":%" PRId64 ",\"chunk\":%" PRId64 ",\"kv\":\"%s\"", file.size(),
           model->programs, model->vocab, model->chunk, model->kv);
    return end_report(serves ? nullptr : beside);
}

/* Runs `request`, or makes a model file. */
int run(int argc, char **argv, int (*request)()) {
    parse_arguments(argc, argv);
    std::set_new_handler([] { fail(NO_MEMORY, "out_of_memory", "the runner's own buffers"); });
    /* Constants are read, packed and freed one by one: what is freed goes back, and is not counted twice. */
#ifdef M_MMAP_THRESHOLD /* Android's C library has none */
    mallopt(M_MMAP_THRESHOLD, 1 << 16);
#endif
    return opt.recipe ? make_model() : request();
}

} // namespace

#ifndef HILNAS_PROFILER
int main(int argc, char **argv) { return run(argc, argv, measure); }
#endif
