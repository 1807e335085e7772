/* Measures one request on one model: load, warm up, timed prompt, timed decode; one JSON object on stdout.
 *
 * Needs only llama.h, so the same file serves hosts and phones. A run is one fresh process: nothing is left over from
 * another repetition. The log goes to stderr. Exit codes follow sysexits.h and stand in runtimes/output.py.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "llama.h"

enum { USAGE = 64, LOAD_FAILED = 65, DECODE_FAILED = 70, NO_MEMORY = 71 };

struct options {
    const char *model;
    const char *kv;
    const char *logits;
    long prompt, gen, context, batch, ubatch, threads, flash, mmap, repack, seed, warmup;
};

static struct options opt = {
    .kv = "f16", .prompt = 512, .gen = 64, .context = 0, .batch = 2048, .ubatch = 512, .threads = 1,
    .flash = 1, .mmap = 0, .repack = 1, .seed = 0, .warmup = 16,
};

static char last_error[512];
static bool memory_ran_out;

/* ---- failing ------------------------------------------------------------------------------------------------- */

static void print_string(const char *text) {
    putchar('"');
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\') printf("\\%c", *c);
        else if (*c < 0x20 || *c > 0x7e) printf("\\u%04x", *c);
        else putchar(*c);
    }
    putchar('"');
}

static void fail(int code, const char *kind, const char *what) {
    if (memory_ran_out) { code = NO_MEMORY; kind = "out_of_memory"; }
    char message[1024];
    snprintf(message, sizeof message, "%s%s%s", what, last_error[0] ? ": " : "", last_error);
    printf("{\"v\":1,\"error\":{\"kind\":\"%s\",\"message\":", kind);
    print_string(message);
    printf("}}\n");
    fflush(stdout);
    _Exit(code);
}

static void *allocate(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) { memory_ran_out = true; fail(NO_MEMORY, "out_of_memory", "the runner's own buffers"); }
    return memory;
}

/* llama.cpp reports why it failed through its log only. */
static void on_log(enum ggml_log_level level, const char *text, void *unused) {
    (void)unused;
    if (level != GGML_LOG_LEVEL_ERROR && level != GGML_LOG_LEVEL_WARN) return;
    fputs(text, stderr);
    if (level != GGML_LOG_LEVEL_ERROR) return;
    if (strstr(text, "failed to allocate") || strstr(text, "unable to allocate") || strstr(text, "bad_alloc") ||
        strstr(text, "insufficient memory")) memory_ran_out = true;
    /* The first error is the cause; later ones repeat it from further out. */
    if (!last_error[0]) snprintf(last_error, sizeof last_error, "%.*s", (int)strcspn(text, "\n"), text);
}

/* ---- arguments ----------------------------------------------------------------------------------------------- */

static void usage(const char *what) {
    snprintf(last_error, sizeof last_error, "%s", what);
    fail(USAGE, "usage", "usage: runner --model FILE [--prompt N] [--gen N] [--context N] [--batch N] [--ubatch N] "
                         "[--threads N] [--kv f16|q8_0] [--flash 0|1] [--mmap 0|1] [--repack 0|1] [--seed N] [--warmup N] "
                         "[--logits FILE]");
}

static long number(const char *name, const char *text, long low, long high) {
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno || *end || end == text || value < low || value > high) usage(name);
    return value;
}

static void parse_arguments(int argc, char **argv) {
    const struct { const char *name; long *value, low, high; } numbers[] = {
        {"--prompt", &opt.prompt, 1, 1 << 22}, {"--gen", &opt.gen, 0, 1 << 22}, {"--context", &opt.context, 0, 1 << 22},
        {"--batch", &opt.batch, 1, 1 << 20}, {"--ubatch", &opt.ubatch, 1, 1 << 20}, {"--threads", &opt.threads, 1, 1024},
        {"--flash", &opt.flash, 0, 1}, {"--mmap", &opt.mmap, 0, 1}, {"--repack", &opt.repack, 0, 1},
        {"--seed", &opt.seed, 0, INT32_MAX}, {"--warmup", &opt.warmup, 0, 1024},
    };
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc) usage(argv[i]);
        bool known = true;
        if (!strcmp(argv[i], "--model")) opt.model = argv[i + 1];
        else if (!strcmp(argv[i], "--kv")) opt.kv = argv[i + 1];
        else if (!strcmp(argv[i], "--logits")) opt.logits = argv[i + 1];
        else known = false;
        for (size_t n = 0; !known && n < sizeof numbers / sizeof *numbers; n++) {
            if (strcmp(argv[i], numbers[n].name)) continue;
            *numbers[n].value = number(argv[i], argv[i + 1], numbers[n].low, numbers[n].high);
            known = true;
        }
        if (!known) usage(argv[i]);
    }
    if (!opt.model) usage("--model is missing");
    if (access(opt.model, R_OK)) usage("--model cannot be read");
    if (strcmp(opt.kv, "f16") && strcmp(opt.kv, "q8_0")) usage("--kv");
    if (!opt.context) opt.context = opt.prompt + opt.gen;
    if (opt.context < opt.prompt + opt.gen) usage("--context is shorter than prompt + gen");
}

/* ---- clocks and memory --------------------------------------------------------------------------------------- */

static int64_t nanoseconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int64_t wall(void) { return nanoseconds(CLOCK_MONOTONIC); }
/* Of all threads: with one thread it is that thread's, with more it shows what spinning at barriers costs. */
static int64_t cpu(void) { return nanoseconds(CLOCK_PROCESS_CPUTIME_ID); }

static double peak_mb(void) {
    char line[256];
    double kilobytes = NAN;
    FILE *status = fopen("/proc/self/status", "r");
    if (!status) return NAN;
    while (fgets(line, sizeof line, status))
        if (sscanf(line, "VmHWM: %lf kB", &kilobytes) == 1) break;
    fclose(status);
    return kilobytes * 1024 / 1e6;
}

/* Sets VmHWM back to what is resident now (proc(5), clear_refs); containers and some phones forbid it. */
static bool reset_peak(void) {
    int file = open("/proc/self/clear_refs", O_WRONLY);
    if (file < 0) return false;
    bool written = write(file, "5", 1) == 1;
    close(file);
    return written;
}

/* ---- the request --------------------------------------------------------------------------------------------- */

/* splitmix64 (Steele, Lea, Flood 2014): the same ids on every machine. */
static llama_token next_id(uint64_t *state, int vocab) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (llama_token)((z ^ (z >> 31)) % (uint64_t)vocab);
}

static void decode(struct llama_context *context, llama_token *ids, long count) {
    for (long done = 0; done < count; done += opt.batch) {
        long n = count - done < opt.batch ? count - done : opt.batch;
        int status = llama_decode(context, llama_batch_get_one(ids + done, (int32_t)n));
        if (status) {
            char what[64];
            snprintf(what, sizeof what, "llama_decode returned %d", status);
            if (status == -2) memory_ran_out = true; /* GGML_STATUS_ALLOC_FAILED */
            fail(DECODE_FAILED, "decode", what);
        }
    }
    llama_synchronize(context);
}

static int argmax(const float *logits, int vocab) {
    int best = 0;
    for (int i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* Rounding to 8 bits turns activations that are NaN into zeros, so a broken model shows as logits that are all equal. */
static bool all_finite(const float *logits, int vocab) {
    bool differ = vocab == 1;
    for (int i = 0; i < vocab; i++) {
        if (!isfinite(logits[i])) return false;
        differ = differ || logits[i] != logits[0];
    }
    return differ;
}

/* One row of float32 per decode call, so that kernels of other machines can be compared; outside what is timed. */
static void keep_logits(const float *logits, int vocab) {
    static FILE *file;
    if (!opt.logits) return;
    if (!file && !(file = fopen(opt.logits, "wb"))) usage("--logits cannot be written");
    if (fwrite(logits, sizeof *logits, (size_t)vocab, file) != (size_t)vocab || fflush(file)) usage("--logits is full");
}

static struct llama_model *load_model(void) {
    struct llama_model_params params = llama_model_default_params();
    params.load_mode = opt.mmap ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    params.use_extra_bufts = opt.repack;
    struct llama_model *model = llama_model_load_from_file(opt.model, params);
    if (!model) fail(LOAD_FAILED, "load", "the model file was refused");
    return model;
}

static struct llama_context *new_context(struct llama_model *model) {
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t)opt.context;
    params.n_batch = (uint32_t)opt.batch;
    params.n_ubatch = (uint32_t)opt.ubatch;
    params.n_seq_max = 1;
    params.n_threads = params.n_threads_batch = (int32_t)opt.threads;
    params.flash_attn_type = opt.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = params.type_v = strcmp(opt.kv, "q8_0") ? GGML_TYPE_F16 : GGML_TYPE_Q8_0;
    params.swa_full = false; /* a sliding window keeps its window only */
    params.no_perf = true;
    struct llama_context *context = llama_init_from_model(model, params);
    if (!context) fail(DECODE_FAILED, "context", "no context for this model and workload");
    return context;
}

static void print_array(const char *name, const int64_t *values, long count) {
    printf(",\"%s\":[", name);
    for (long i = 0; i < count; i++) printf("%s%lld", i ? "," : "", (long long)values[i]);
    printf("]");
}

static void print_size(const char *name, double megabytes) {
    if (!isnan(megabytes)) printf(",\"%s\":%.3f", name, megabytes);
    else printf(",\"%s\":null", name);
}

int main(int argc, char **argv) {
    parse_arguments(argc, argv);
    llama_log_set(on_log, NULL);
    llama_backend_init();

    int64_t begun = wall();
    struct llama_model *model = load_model();
    struct llama_context *context = new_context(model);
    double load_ms = (double)(wall() - begun) / 1e6;

    int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    if (vocab < 1) fail(LOAD_FAILED, "load", "the model file has no vocabulary size");
    long total = opt.prompt + opt.gen;
    llama_token *ids = allocate((size_t)(total > opt.warmup ? total : opt.warmup) + 1, sizeof *ids);
    int64_t *decode_ns = allocate((size_t)opt.gen + 1, sizeof *decode_ns);
    int64_t *decode_cpu_ns = allocate((size_t)opt.gen + 1, sizeof *decode_cpu_ns);
    uint64_t state = (uint64_t)opt.seed;
    for (long i = 0; i < total || i < opt.warmup; i++) ids[i] = next_id(&state, vocab);

    int64_t warming = wall();
    if (opt.warmup) {
        long longest = opt.warmup < opt.context ? opt.warmup : opt.context - 1;
        decode(context, ids, longest);
        llama_memory_clear(llama_get_memory(context), true);
    }

    double warmup_ms = (double)(wall() - warming) / 1e6;

    double peak_at_load = peak_mb();
    bool phases = reset_peak();
    int64_t t = wall(), c = cpu();
    decode(context, ids, opt.prompt);
    const float *logits = llama_get_logits_ith(context, -1);
    volatile int chosen = argmax(logits, vocab);
    double ttft_ms = (double)(wall() - t) / 1e6, prefill_cpu_ms = (double)(cpu() - c) / 1e6;
    bool finite = all_finite(logits, vocab);
    keep_logits(logits, vocab);
    double prefill_mb = peak_mb();

    phases = reset_peak() && phases;
    /* The ids that are fed do not depend on the argmax, so every run and every model walks the same sequence. */
    for (long i = 0; i < opt.gen; i++) {
        t = wall(), c = cpu();
        decode(context, ids + opt.prompt + i, 1);
        logits = llama_get_logits_ith(context, -1);
        chosen = argmax(logits, vocab);
        decode_ns[i] = wall() - t;
        decode_cpu_ns[i] = cpu() - c;
        finite = finite && all_finite(logits, vocab);
        keep_logits(logits, vocab);
    }
    (void)chosen;
    double decode_mb = peak_mb();
    double peak = fmax(peak_at_load, fmax(prefill_mb, decode_mb));

    printf("{\"v\":1,\"load_ms\":%.3f,\"ttft_ms\":%.6f,\"prefill_cpu_ms\":%.6f", load_ms, ttft_ms, prefill_cpu_ms);
    print_array("decode_ns", decode_ns, opt.gen);
    print_array("decode_cpu_ns", decode_cpu_ns, opt.gen);
    print_size("peak_rss_mb", peak);
    print_size("prefill_rss_mb", phases ? prefill_mb : NAN);
    print_size("decode_rss_mb", phases ? decode_mb : NAN);
    printf(",\"finite\":%s,\"info\":{\"warmup_ms\":%.3f,\"model_bytes\":%llu,\"model_params\":%llu,\"vocab\":%d",
           finite ? "true" : "false", warmup_ms, (unsigned long long)llama_model_size(model),
           (unsigned long long)llama_model_n_params(model), vocab);
    if (!phases) printf(",\"phase_rss_reason\":\"/proc/self/clear_refs cannot be written here\"");
    printf(",\"llama_version\":");
    print_string(llama_version());
    printf(",\"system_info\":");
    print_string(llama_print_system_info());
    printf("}}\n");
    return fflush(stdout) ? NO_MEMORY : 0;
}
