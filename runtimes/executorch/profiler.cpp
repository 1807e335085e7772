/* Times every instruction of a model's chain in one request, summed by step and operator: `nas bench --profile`.
 *
 * A program of its own, so that what measures (runner.cpp) stays as it is. It is compiled from the same source: arguments, artifact,
 * kernels and token ids are the runner's. ExecuTorch's libraries report each instruction to the event tracer of a method, if it has
 * one. The runner gives its methods none and hides its steps, hence `private`. Other processes only add to times, so the request runs
 * several times with and without tracer, and the least of each time is reported: one JSON object on stdout (nas/core/profile.py),
 * whose layers are numbers of steps; runtimes/executorch/runtime.py makes layers of them.
 */
#define ET_EVENT_TRACER_ENABLED /* as the libraries were compiled */

/* Whatever is included before `private` is redefined stays as it is. */
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
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
#include <time.h>
#include <tuple>
#include <unistd.h>
#include <unordered_map>
#include <variant>
#include <vector>

#define private public
#define main measure_main
#include "runner.cpp"
#undef main
#undef private

namespace {

constexpr int PASSES = 3, EMBEDDING = -2, HEAD = -1;
enum Phase { PREFILL, DECODE };

struct Time {
    long nodes = 0;
    int64_t ns = 0, least_ns = 0;
};

std::map<std::pair<int, std::string>, Time> table[2]; /* of a phase: step and operator */
Phase phase = PREFILL;
int place = EMBEDDING;
int64_t traced_ns = 0; /* of the instructions of the current step */
const char *kernel = ""; /* of the current instruction */

void add(const std::string &name, int64_t ns) {
    Time &time = table[phase][{place, name}];
    time.nodes++;
    time.ns += ns;
}

/* Events nest: a method, its instructions, and in an instruction that calls a kernel of the libraries, the kernel. */
class Tracer final : public EventTracer {
  public:
    EventTracerEntry start_profiling(const char *name, ChainID, DebugHandle) override {
        EventTracerEntry entry{};
        if (!strcmp(name, "DELEGATE_CALL")) kernel = "XNNPACK";
        else if (!strcmp(name, "OPERATOR_CALL")) kernel = "other"; /* reshaping has no kernel that reports */
        else if (!strncmp(name, "native_call_", 12)) kernel = name + 12; /* a literal of the library */
        entry.event_id = !strcmp(name, "DELEGATE_CALL") || !strcmp(name, "OPERATOR_CALL");
        entry.start_time = (et_timestamp_t)wall();
        return entry;
    }
    void end_profiling(EventTracerEntry entry) override {
        if (!entry.event_id) return;
        const int64_t ns = wall() - (int64_t)entry.start_time;
        traced_ns += ns;
        add(kernel, ns);
    }

    void create_event_block(const char *) override {}
    EventTracerEntry start_profiling_delegate(const char *, DelegateDebugIntId) override { return {}; }
    void end_profiling_delegate(EventTracerEntry, const void *, size_t) override {}
    void log_profiling_delegate(const char *, DelegateDebugIntId, et_timestamp_t, et_timestamp_t, const void *, size_t) override {}
    void track_allocation(AllocatorID, size_t) override {}
    AllocatorID track_allocator(const char *) override { return 0; }
    Result<bool> log_evalue(const EValue &, LoggedEValueType) override { return false; }
    Result<bool> log_intermediate_output_delegate(const char *, DelegateDebugIntId, const Tensor &) override { return false; }
    Result<bool> log_intermediate_output_delegate(const char *, DelegateDebugIntId, const ArrayRef<Tensor>) override { return false; }
    Result<bool> log_intermediate_output_delegate(const char *, DelegateDebugIntId, const int &) override { return false; }
    Result<bool> log_intermediate_output_delegate(const char *, DelegateDebugIntId, const bool &) override { return false; }
    Result<bool> log_intermediate_output_delegate(const char *, DelegateDebugIntId, const double &) override { return false; }
    void set_delegation_intermediate_output_filter(EventTracerFilterBase *) override {}
} tracer;

/* The kernels of runner.cpp report nothing to a tracer, so they are called through these. */
std::vector<Kernel> own_kernels;

template <size_t I> void call_own(KernelRuntimeContext &context, Span<EValue *> values) {
    kernel = own_kernels[I].name_;
    own_kernels[I].op_(context, values);
}

void trace_own_kernels() {
    static const OpFunction callers[] = {call_own<0>, call_own<1>, call_own<2>, call_own<3>, call_own<4>, call_own<5>};
    for (const Kernel &registered : get_registered_kernels()) {
        if (strncmp(registered.name_, "hilnas::", 8)) continue;
        if (own_kernels.size() == std::size(callers)) fail(DECODE_FAILED, "profile", "more kernels than expected");
        own_kernels.push_back(registered);
        const_cast<Kernel &>(registered).op_ = callers[own_kernels.size() - 1];
    }
}

/* Times a part of the model, whose instructions the tracer times; what is left is handing over tensors, and choosing experts. */
template <class Work> void timed(int where, const char *rest, Work work) {
    place = where;
    traced_ns = 0;
    const int64_t begun = wall();
    work();
    add(rest, wall() - begun - traced_ns);
}

/* ChainModel::feed with each part timed. */
const float *timed_feed(ChainModel &model, const int64_t *ids, int count) {
    timed(EMBEDDING, "embed", [&] {
        for (int t = 0; t < count; t++) model.embed(ids[t], &model.x_[(size_t)t * model.width_]);
    });
    for (size_t i = 0; i < model.steps_.size(); i++) timed((int)i, "other", [&] { model.run(model.steps_[i], count); });
    model.side_ ^= 1;
    timed(HEAD, "other", [&] {
        float *last = &model.x_[(size_t)(count - 1) * model.width_];
        model.head_->call({model.tensor(last, 1)}, {{model.logits_.data(), model.logits_.size()}});
        model.held_.clear();
    });
    return model.logits_.data();
}

int64_t least(int64_t before, int64_t now, int pass) { return pass ? std::min(before, now) : now; }

/* Runs the request as runner.cpp does. `least_ns` are the least times of prompt and decoded tokens in all passes until now. */
bool run_request(ChainModel &model, const std::vector<int64_t> &ids, bool with_tracer, int pass, int64_t least_ns[2]) {
    bool finite = true;
    int64_t ns[2] = {0, 0};
    for (auto &method : model.methods_) method->method_->event_tracer_ = with_tracer ? &tracer : nullptr;
    for (auto &one : table)
        for (auto &entry : one)
            if (with_tracer) entry.second.nodes = entry.second.ns = 0;
    for (long i = -1; i < opt.gen; i++) {
        phase = i < 0 ? PREFILL : DECODE;
        const int64_t *first = i < 0 ? ids.data() : &ids[opt.prompt + i], begun = wall();
        const float *logits = nullptr;
        for (long done = 0, count = i < 0 ? opt.prompt : 1; done < count; done += model.chunk) {
            const int now = (int)std::min<long>(count - done, (long)model.chunk);
            logits = with_tracer ? timed_feed(model, first + done, now) : model.feed(first + done, now);
        }
        volatile int64_t chosen = std::max_element(logits, logits + model.vocab) - logits;
        (void)chosen;
        ns[phase] += wall() - begun;
        finite = finite && all_finite(logits, model.vocab);
    }
    model.reset();
    for (int which : {PREFILL, DECODE}) {
        least_ns[which] = least(least_ns[which], ns[which], pass);
        for (auto &entry : table[which])
            if (with_tracer) entry.second.least_ns = least(entry.second.least_ns, entry.second.ns, pass);
    }
    return finite;
}

void print_phase(const char *name, Phase which, const int64_t whole[2], const int64_t profiled[2]) {
    printf("\"%s\":{\"whole_ns\":%" PRId64 ",\"profiled_ns\":%" PRId64 ",\"nodes\":[", name, whole[which], profiled[which]);
    const char *comma = "";
    for (auto &[key, time] : table[which]) {
        if (key.first < 0) printf("%s[null,\"%s\"", comma, key.first == HEAD ? "head" : "embedding");
        else printf("%s[%d,\"mixer\"", comma, key.first);
        printf(",\"%s\",%ld,%" PRId64 "]", key.second.c_str(), time.nodes, time.least_ns);
        comma = ",";
    }
    printf("]}");
}

int profile() {
    executorch::extension::threadpool::get_threadpool()->_unsafe_reset_threadpool((uint32_t)opt.threads);
    share_workspace();
    trace_own_kernels();
    File file(opt.model);
    if (memcmp(file.at(0, 8), "HILNASET", 8)) refuse("a whole graph has no steps to time");
    ChainModel model(file);
    std::vector<int64_t> ids(std::max(opt.prompt + opt.gen, opt.warmup));
    uint64_t state = (uint64_t)opt.seed;
    for (auto &id : ids) id = (int64_t)(hilnas::splitmix64(&state) % (uint64_t)model.vocab);
    if (opt.warmup) {
        feed(model, ids.data(), std::min(opt.warmup, opt.context));
        model.reset();
    }
    int64_t whole[2], profiled[2];
    bool finite = true;
    for (int pass = 0; pass < PASSES; pass++) {
        finite = run_request(model, ids, false, pass, whole) && finite;
        finite = run_request(model, ids, true, pass, profiled) && finite;
    }
    printf("{\"v\":1,\"prompt\":%ld,\"gen\":%ld,", opt.prompt, opt.gen);
    print_phase("prefill", PREFILL, whole, profiled);
    printf(",");
    print_phase("decode", DECODE, whole, profiled);
    printf(",\"finite\":%s}\n", finite ? "true" : "false");
    return fflush(stdout) ? NO_MEMORY : 0;
}

} // namespace

int main(int argc, char **argv) {
    parse_arguments(argc, argv);
    runtime_init();
    std::set_new_handler([] { fail(NO_MEMORY, "out_of_memory", "the runner's own buffers"); });
    return opt.recipe ? make_model() : profile();
}
