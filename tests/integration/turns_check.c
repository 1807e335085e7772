/* A runner of a model that computes nothing, over report.h alone: turns_check FILE GEN FAULT.
 *
 * Appends a line to FILE for each thing that a model does, "reference" or "candidate" first. FAULT is what goes wrong.
 */
#include "report.h"

static const char *fault, *role = "candidate";
static int lines;

static bool wrong(const char *name) { return !strcmp(fault, name) && *role == 'r'; }

static void note(const char *what) { dprintf(lines, "%s %s\n", role, what); }

static void prepare(void *model, bool prompt) { (void)model, note(prompt ? "wakes and forgets" : "wakes"); }

static void read_prompt(void *model) {
    (void)model;
    note("prompt");
    if (wrong("dies at the prompt")) raise(SIGKILL);
    if (wrong("reports")) report_failure(NO_MEMORY, "out_of_memory", "no \"room\" for {{caches}} \\");
}

static void decode_token(void *model, long index) {
    (void)model;
    note("token");
    if (wrong("dies at a token") && index == 5) raise(SIGKILL);
    if (!strcmp(fault, "candidate") && *role == 'c' && index == 5) report_failure(DECODE_FAILED, "decode", "the candidate's own");
}

static bool check(void *model) { (void)model; return true; }

static void rest(void *model) { (void)model, note("rests"); }

int main(int argc, char **argv) {
    if (argc != 4 || (lines = open(argv[1], O_WRONLY | O_CREAT | O_APPEND, 0644)) < 0) return USAGE;
    fault = argv[3];
    struct measurement m = {0, 0, 0, 0, 0, false};
    struct reference reference, *beside = strcmp(fault, "alone") ? &reference : NULL;
    bool serves = beside && fork_reference(beside);
    if (serves) role = "reference";
    else if (beside) await_reference(beside);
    struct request r = new_request(NULL, atol(argv[2]), !strcmp(fault, "once"));
    r.prepare = prepare, r.read_prompt = read_prompt, r.decode_token = decode_token, r.check = check, r.rest = rest;
    if (serves) serve_request(&m, &r, beside);
    else time_request(&m, &r, beside);
    if (wrong("dies at its end")) raise(SIGKILL);
    if (wrong("fails at its end")) { begin_report(&m, &r); return end_report(NULL) + NO_MEMORY; }
    if (wrong("prints no report")) { printf("hello\n"); return 0; }
    for (long i = 0; wrong("prints too much") && i < 3 * (1 << 20); i++) putchar('{');
    begin_report(&m, &r);
    return end_report(serves ? NULL : beside);
}
