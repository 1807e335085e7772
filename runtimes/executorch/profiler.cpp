/* Times every instruction of a model's chain in one request, summed by step and operator: `nas bench --profile`.
 *
 * A program beside the one that measures (runner.cpp), compiled from the same source: arguments, artifact, kernels and token ids are
 * the runner's. ExecuTorch's libraries report each instruction to the event tracer of a method. Other processes only add to times, so
 * the request runs several times with the tracer on and off, and the least of each time is reported: one JSON object on stdout
 * (nas/core/profile.py), whose layers are numbers of steps; runtimes/executorch/runtime.py makes layers of them.
 */
#define ET_EVENT_TRACER_ENABLED /* as the libraries were compiled */
#define HILNAS_PROFILER
#include <map>
#include <tuple>

#include "runner.cpp"

namespace {

constexpr int PASSES = 3;
enum Phase { PREFILL, DECODE };

struct Time {
    long nodes = 0;
    int64_t ns = 0, least_ns = 0;
};

std::map<std::pair<int, std::string>, Time> table[2]; /* of a phase: step and operator */
Phase phase = PREFILL;
int place = ChainModel::EMBEDDING;
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
    bool on = false;

    EventTracerEntry start_profiling(const char *name, ChainID, DebugHandle) override {
        EventTracerEntry entry{};
        if (!on) return entry;
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

/* The model's feed with each part timed, whose instructions the tracer times; the rest is handing over tensors, and choosing experts. */
const float *timed_feed(ChainModel &model, const int64_t *ids, int count) {
    return model.feed(ids, count, [](int part, auto work) {
        place = part;
        traced_ns = 0;
        const int64_t begun = wall();
        work();
        add(part == ChainModel::EMBEDDING ? "embed" : "other", wall() - begun - traced_ns);
    });
}

/* Runs the request as runner.cpp does. `least_ns` are the least times of prompt and decoded tokens in all passes until now. */
bool run_request(ChainModel &model, const std::vector<int64_t> &ids, bool with_tracer, int pass, int64_t least_ns[2]) {
    bool finite = true;
    int64_t ns[2] = {0, 0};
    tracer.on = with_tracer;
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
    begin_phase(name, whole[which], profiled[which]);
    bool first = true;
    for (auto &[key, time] : table[which]) {
        const char *part = key.first == ChainModel::HEAD ? "head" : key.first < 0 ? "embedding" : "mixer";
        print_node(first, std::max(key.first, -1), part, key.second.c_str(), time.nodes, time.least_ns);
        first = false;
    }
    printf("]}");
}

int profile() {
    runtime_init();
    start_threads();
    trace_own_kernels();
    File file(opt.model);
    if (memcmp(file.at(0, 8), "HILNASET", 8)) refuse("a whole graph has no steps to time");
    ChainModel model(file, &tracer);
    const std::vector<int64_t> ids = draw_ids(model.vocab);
    warm_up(model, ids);
    int64_t whole[2], profiled[2];
    bool finite = true;
    for (int pass = 0; pass < PASSES; pass++) {
        finite = run_request(model, ids, false, pass, whole) && finite;
        finite = run_request(model, ids, true, pass, profiled) && finite;
    }
    printf("{\"v\":1,\"prompt\":%ld,\"gen\":%ld,\"finite\":%s", opt.prompt, opt.gen, finite ? "true" : "false");
    print_phase("prefill", PREFILL, whole, profiled);
    print_phase("decode", DECODE, whole, profiled);
    printf("}\n");
    return fflush(stdout) ? NO_MEMORY : 0;
}

} // namespace

int main(int argc, char **argv) { return run(argc, argv, profile); }
