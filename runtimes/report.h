/* What runners and profilers share, in C11 and C++17: exit codes, arguments, clocks, memory, and the printed report.
 *
 * runtimes/runner.py describes the report. Times are of monotonic clocks; sizes are in MB of 10^6 bytes.
 */
#ifndef HILNAS_REPORT_H
#define HILNAS_REPORT_H

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Exit codes, after sysexits.h. */
enum { USAGE = 64, LOAD_FAILED = 65, REFERENCE_FAILED = 69, DECODE_FAILED = 70, NO_MEMORY = 71, NOT_WRITTEN = 74 };

/* ---- failing ------------------------------------------------------------------------------------------------- */

static inline void print_string(const char *text) {
    putchar('"');
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\') printf("\\%c", *c);
        else if (*c < 0x20 || *c > 0x7e) printf("\\u%04x", *c);
        else putchar(*c);
    }
    putchar('"');
}

/* Prints an error report and ends the process. */
static inline void report_failure(int code, const char *kind, const char *message) {
    printf("{\"v\":1,\"error\":{\"kind\":\"%s\",\"message\":", kind);
    print_string(message);
    printf("}}\n");
    fflush(stdout);
    _Exit(code);
}

/* ---- arguments ----------------------------------------------------------------------------------------------- */

/* Reads a decimal integer in [low, high]; returns whether the text is one. */
static inline bool read_integer(const char *text, long low, long high, long *value) {
    char *end;
    errno = 0;
    *value = strtol(text, &end, 10);
    return !errno && !*end && end != text && *value >= low && *value <= high;
}

/* ---- clocks and memory --------------------------------------------------------------------------------------- */

static inline int64_t nanoseconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline int64_t wall(void) { return nanoseconds(CLOCK_MONOTONIC); }

/* Of all threads: with one thread it is that thread's, with more it shows what spinning at barriers costs. */
static inline int64_t cpu(void) { return nanoseconds(CLOCK_PROCESS_CPUTIME_ID); }

/* Peak of resident memory since the last `reset_peak`; NAN where the kernel does not tell. */
static inline double peak_mb(void) {
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
static inline bool reset_peak(void) {
    int file = open("/proc/self/clear_refs", O_WRONLY);
    if (file < 0) return false;
    bool written = write(file, "5", 1) == 1;
    close(file);
    return written;
}

/* ---- random numbers ------------------------------------------------------------------------------------------ */

/* splitmix64 (Steele, Lea, Flood 2014): the same numbers on every machine. */
static inline uint64_t splitmix64(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* ---- the logits ---------------------------------------------------------------------------------------------- */

/* Rounding to 8 bits turns activations that are NaN into zeros, so a broken model shows as logits that are all equal. */
static inline bool all_finite(const float *logits, long vocab) {
    bool differ = vocab == 1;
    for (long i = 0; i < vocab; i++) {
        if (!isfinite(logits[i])) return false;
        differ = differ || logits[i] != logits[0];
    }
    return differ;
}

/* Appends one row of float32 to the file `path`, which the first call makes; returns an error, or NULL. */
static inline const char *write_logits(const char *path, const float *logits, long vocab) {
    static FILE *file;
    if (!path) return NULL;
    if (!file && !(file = fopen(path, "wb"))) return "--logits cannot be written";
    return fwrite(logits, sizeof *logits, (size_t)vocab, file) != (size_t)vocab || fflush(file) ? "--logits is full" : NULL;
}

/* ---- the request: a prompt, then tokens one by one, alone or in turn with a reference model -------------------- */

enum { MAX_PASSES = 5, PASSES_NS = 1000000000, FIRST_TURN = 4, MAX_TURN = 64, TURN_NS = 3000000 };
enum { MAX_REPORT = 1 << 20 }; /* bytes of a reference model's report; the service takes no more from one process */

/* A loaded model and the times of its request. `prepare` and `check` are outside of what is timed. */
struct request {
    void *model;
    void (*prepare)(void *model, bool prompt); /* wakes its threads; before a prompt also empties its caches */
    void (*read_prompt)(void *model);          /* to the argmax of its last position */
    void (*decode_token)(void *model, long index);
    bool (*check)(void *model); /* whether the logits are finite; also writes them */
    void (*rest)(void *model);  /* lets its threads sleep */
    long gen;
    bool once; /* one pass over the prompt: its logits are written */

    bool finite;
    long passes, decoded, n_turns;
    int64_t prefill_ns[MAX_PASSES], prefill_cpu_ns[MAX_PASSES];
    int64_t *decode_ns, *decode_cpu_ns, *turns;
};

/* The process of the reference model, which this one gives commands. */
struct reference {
    pid_t process;
    int commands, answers, report; /* pipes */
    const char *text;              /* its report, when it has ended */
};

static inline struct request new_request(void *model, long gen, bool once) {
    struct request request;
    memset(&request, 0, sizeof request);
    request.model = model, request.gen = gen, request.once = once, request.finite = true;
    int64_t **arrays[] = {&request.decode_ns, &request.decode_cpu_ns, &request.turns};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        *arrays[i] = (int64_t *)calloc((size_t)gen + 1, sizeof **arrays[i]);
        if (!*arrays[i]) report_failure(NO_MEMORY, "out_of_memory", "the runner's own buffers");
    }
    return request;
}

/* Reads the prompt once; returns nanoseconds. */
static inline int64_t time_prompt(struct request *r) {
    r->prepare(r->model, true);
    int64_t t = wall(), c = cpu();
    r->read_prompt(r->model);
    int64_t ns = r->prefill_ns[r->passes] = wall() - t;
    r->prefill_cpu_ns[r->passes++] = cpu() - c;
    r->finite = r->check(r->model) && r->finite;
    r->rest(r->model);
    return ns;
}

/* Decodes `count` tokens; returns nanoseconds. The ids that are fed do not depend on the argmax, so every run and every
 * model walks the same sequence. */
static inline int64_t time_turn(struct request *r, long count) {
    int64_t sum = 0;
    r->prepare(r->model, false);
    for (long end = r->decoded + count; r->decoded < end; r->decoded++) {
        int64_t t = wall(), c = cpu();
        r->decode_token(r->model, r->decoded);
        sum += r->decode_ns[r->decoded] = wall() - t;
        r->decode_cpu_ns[r->decoded] = cpu() - c;
        r->finite = r->check(r->model) && r->finite;
    }
    r->turns[r->n_turns++] = count;
    r->rest(r->model);
    return sum;
}

static inline bool read_whole(int file, void *bytes, size_t size) {
    for (char *at = (char *)bytes; size;) {
        ssize_t n = read(file, at, size);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n, size -= (size_t)n;
    }
    return true;
}

/* Starts a process for the reference model, before anything is loaded, so that neither memory nor processor time of
 * the two are mixed up. Returns whether this is that process: it prints its report to a pipe and dies with its parent. */
static inline bool fork_reference(struct reference *reference) {
    int commands[2], answers[2], report[2];
    pid_t parent = getpid();
    signal(SIGPIPE, SIG_IGN);
    if (pipe(commands) || pipe(answers) || pipe(report) || fflush(stdout) || (reference->process = fork()) < 0)
        report_failure(REFERENCE_FAILED, "reference", strerror(errno));
    bool child = !reference->process;
    if (child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent || dup2(report[1], STDOUT_FILENO) < 0) _Exit(REFERENCE_FAILED);
    }
    reference->commands = commands[!child], reference->answers = answers[child], reference->report = report[0];
    close(commands[child]), close(answers[!child]), close(report[1]);
    if (child) close(report[0]);
    return child;
}

/* Reads what the reference model's process prints, to its end. */
static inline char *read_report(const struct reference *reference) {
    static char text[MAX_REPORT + 1];
    size_t size = 0;
    for (ssize_t n; size < MAX_REPORT && (n = read(reference->report, text + size, MAX_REPORT - size)) > 0;) size += (size_t)n;
    text[size] = '\0';
    return text;
}

/* Ends this process with the message, a JSON string, of the error report that the reference model's process printed. */
static inline void fail_with_reference(const struct reference *reference) {
    const char *message = strstr(read_report(reference), "\"message\":"), *end = message ? strstr(message, "}}\n") : NULL;
    if (!end) report_failure(REFERENCE_FAILED, "reference", "it ended without a report");
    message += strlen("\"message\":");
    printf("{\"v\":1,\"error\":{\"kind\":\"reference\",\"message\":%.*s}}\n", (int)(end - message), message);
    fflush(stdout);
    _Exit(REFERENCE_FAILED);
}

/* Waits until the reference model did what it was told; returns the nanoseconds that it took. */
static inline int64_t await_reference(const struct reference *reference) {
    int64_t ns;
    if (!read_whole(reference->answers, &ns, sizeof ns)) fail_with_reference(reference);
    return ns;
}

enum { READ_PROMPT = -1, END = 0 }; /* commands; a positive one is a number of tokens */

static inline int64_t command_reference(const struct reference *reference, int64_t command) {
    if (write(reference->commands, &command, sizeof command) != sizeof command) fail_with_reference(reference);
    return await_reference(reference);
}

static inline void answer(const struct reference *reference, int64_t ns) {
    if (write(reference->answers, &ns, sizeof ns) != sizeof ns) _Exit(REFERENCE_FAILED);
}

/* In the reference's process: tells that it is loaded, then does what it is told, to the end. */
static inline void serve_turns(struct request *r, const struct reference *parent) {
    int64_t command;
    answer(parent, 0);
    while (read_whole(parent->commands, &command, sizeof command) && command != END)
        answer(parent, command == READ_PROMPT ? time_prompt(r) : time_turn(r, (long)command));
    answer(parent, 0);
}

/* Ends the process of the reference model and keeps its report, before anything of this one's is printed. */
static inline void end_reference(struct reference *reference) {
    command_reference(reference, END);
    char *text = read_report(reference);
    if (strlen(text) == MAX_REPORT) report_failure(REFERENCE_FAILED, "reference", "its report is longer than 1 MiB");
    int status = 0;
    if (waitpid(reference->process, &status, 0) < 0 || status || *text != '{')
        report_failure(REFERENCE_FAILED, "reference", "it ended without a report");
    text[strcspn(text, "\n")] = '\0';
    reference->text = text;
}

/* Reads the prompt, until it took a second; the reference model (or NULL) before each time. */
static inline void time_prompts(struct request *r, const struct reference *reference) {
    for (int64_t spent = 0; r->passes < (r->once ? 1 : MAX_PASSES) && spent < PASSES_NS;) {
        if (reference) command_reference(reference, READ_PROMPT);
        spent += time_prompt(r);
    }
}

/* Decodes all tokens, without a reference model in one turn. */
static inline void time_tokens(struct request *r, const struct reference *reference) {
    for (long size = reference ? (long)FIRST_TURN : r->gen; r->decoded < r->gen;) {
        long left = r->gen - r->decoded, count = size < left ? size : left;
        int64_t beside = reference ? command_reference(reference, count) : 0, ns = time_turn(r, count);
        if (r->n_turns > 1) continue;
        int64_t token = (beside && beside < ns ? beside : ns) / count + 1;
        int64_t tokens = (TURN_NS + token - 1) / token;
        size = (long)(tokens < FIRST_TURN ? (int64_t)FIRST_TURN : tokens > MAX_TURN ? (int64_t)MAX_TURN : tokens);
    }
}

/* ---- the report of a measurement ----------------------------------------------------------------------------- */

struct measurement {
    double load_ms, warmup_ms;
    double load_mb, prefill_mb, decode_mb; /* peaks */
    bool phases; /* whether each peak is of its phase alone */
};

/* Measures the request; its model is loaded and warm. */
static inline void time_request(struct measurement *m, struct request *r, struct reference *reference) {
    m->load_mb = peak_mb();
    m->phases = reset_peak();
    time_prompts(r, reference);
    m->prefill_mb = peak_mb();
    m->phases = reset_peak() && m->phases;
    time_tokens(r, reference);
    m->decode_mb = peak_mb();
    if (reference) end_reference(reference);
}

/* The same in the process of a reference model. */
static inline void serve_request(struct measurement *m, struct request *r, const struct reference *parent) {
    m->load_mb = m->prefill_mb = m->decode_mb = NAN;
    serve_turns(r, parent);
    m->decode_mb = peak_mb();
}

static inline void print_array(const char *name, const int64_t *values, long count) {
    printf(",\"%s\":[", name);
    for (long i = 0; i < count; i++) printf("%s%lld", i ? "," : "", (long long)values[i]);
    printf("]");
}

static inline void print_size(const char *name, double megabytes) {
    if (!isnan(megabytes)) printf(",\"%s\":%.3f", name, megabytes);
    else printf(",\"%s\":null", name);
}

/* Prints the report up to the first field of "info"; the caller prints more fields and calls `end_report`. */
static inline void begin_report(const struct measurement *m, const struct request *r) {
    printf("{\"v\":1,\"load_ms\":%.3f,\"ttft_ms\":%.6f,\"prefill_cpu_ms\":%.6f", m->load_ms,
           (double)r->prefill_ns[0] / 1e6, (double)r->prefill_cpu_ns[0] / 1e6);
    print_array("prefill_ns", r->prefill_ns, r->passes);
    print_array("prefill_cpu_ns", r->prefill_cpu_ns, r->passes);
    print_array("decode_ns", r->decode_ns, r->decoded);
    print_array("decode_cpu_ns", r->decode_cpu_ns, r->decoded);
    print_array("turns", r->turns, r->n_turns);
    print_size("peak_rss_mb", fmax(m->load_mb, fmax(m->prefill_mb, m->decode_mb)));
    print_size("prefill_rss_mb", m->phases ? m->prefill_mb : NAN);
    print_size("decode_rss_mb", m->phases ? m->decode_mb : NAN);
    printf(",\"finite\":%s,\"info\":{\"warmup_ms\":%.3f", r->finite ? "true" : "false", m->warmup_ms);
    if (!m->phases) printf(",\"phase_rss_reason\":\"/proc/self/clear_refs cannot be written here\"");
}

/* Ends the report, with that of the reference model where there is one; returns the exit code. */
static inline int end_report(const struct reference *reference) {
    printf("}");
    if (reference) printf(",\"reference\":%s", reference->text);
    printf("}\n");
    return fflush(stdout) ? NO_MEMORY : 0;
}

/* ---- the report of a profile --------------------------------------------------------------------------------- */

static inline void begin_phase(const char *name, int64_t whole_ns, int64_t profiled_ns) {
    printf(",\"%s\":{\"whole_ns\":%lld,\"profiled_ns\":%lld,\"nodes\":[", name, (long long)whole_ns, (long long)profiled_ns);
}

/* One entry of "nodes"; layer < 0: outside of layers. */
static inline void print_node(
    bool first, int layer, const char *part, const char *operator_name, long nodes, int64_t ns
) {
    printf("%s[", first ? "" : ",");
    if (layer < 0) printf("null");
    else printf("%d", layer);
    printf(",\"%s\",\"%s\",%ld,%lld]", part, operator_name, nodes, (long long)ns);
}

static inline int64_t least(int64_t before, int64_t now, int pass) { return pass && before < now ? before : now; }

#endif
