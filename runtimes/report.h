/* What runners and profilers share, in C11 and C++17: exit codes, arguments, clocks, memory, and the printed report.
 *
 * runtimes/runner.py describes the report. Times are of monotonic clocks; sizes are in MB of 10^6 bytes.
 */
#ifndef HILNAS_REPORT_H
#define HILNAS_REPORT_H

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

/* Exit codes, after sysexits.h. */
enum { USAGE = 64, LOAD_FAILED = 65, DECODE_FAILED = 70, NO_MEMORY = 71, NOT_WRITTEN = 74 };

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

/* ---- the report of a measurement ----------------------------------------------------------------------------- */

struct measurement {
    double load_ms, warmup_ms, ttft_ms, prefill_cpu_ms;
    double load_mb, prefill_mb, decode_mb; /* peaks */
    bool phases; /* whether each peak is of its phase alone */
    bool finite;
    long gen; /* numbers in each array */
    const int64_t *decode_ns, *decode_cpu_ns;
};

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
static inline void begin_report(const struct measurement *m) {
    printf("{\"v\":1,\"load_ms\":%.3f,\"ttft_ms\":%.6f,\"prefill_cpu_ms\":%.6f", m->load_ms, m->ttft_ms, m->prefill_cpu_ms);
    print_array("decode_ns", m->decode_ns, m->gen);
    print_array("decode_cpu_ns", m->decode_cpu_ns, m->gen);
    print_size("peak_rss_mb", fmax(m->load_mb, fmax(m->prefill_mb, m->decode_mb)));
    print_size("prefill_rss_mb", m->phases ? m->prefill_mb : NAN);
    print_size("decode_rss_mb", m->phases ? m->decode_mb : NAN);
    printf(",\"finite\":%s,\"info\":{\"warmup_ms\":%.3f", m->finite ? "true" : "false", m->warmup_ms);
    if (!m->phases) printf(",\"phase_rss_reason\":\"/proc/self/clear_refs cannot be written here\"");
}

/* Ends the report; returns the exit code. */
static inline int end_report(void) {
    printf("}}\n");
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
