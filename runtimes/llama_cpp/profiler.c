/* Times every node of the graph in one request, summed by layer and operator: `nas bench --profile`.
 *
 * A program beside the one that measures (runner.c), compiled from the same source: arguments, model file, context, warm-up and
 * token ids are the runner's. Its context has an eval callback, with which ggml's scheduler computes one node after another. The
 * request runs several times with nodes computed together, as in a measurement, and as often one by one; of each time the least is
 * reported, because other processes only add to it. One JSON object on stdout: nas/core/profile.py.
 */
#define HILNAS_PROFILER
#include "runner.c"

enum { MAX_LAYERS = 512, EMBEDDING = 2 * MAX_LAYERS, HEAD, PLACES, MAX_OPERATORS = 48, PASSES = 3 };
enum phase { PREFILL, DECODE, UNTIMED };

/* The time of all nodes of one operator in one place: the mixer (2 N) or the feed-forward (2 N + 1) of layer N, or outside of layers. */
struct entry { const char *operator_name; long nodes; int64_t ns, least_ns; };

static struct entry table[UNTIMED][PLACES][MAX_OPERATORS];
static enum phase phase = UNTIMED;
static int place = EMBEDDING;
static const struct ggml_tensor *norm; /* a norm that is computed together with the next node */
static int64_t started;

/* Weights and caches carry the number of their layer in their names. A node without either belongs where the one before it does. */
static int place_of(const struct ggml_tensor *node, int before) {
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        const char *name = node->src[i] ? node->src[i]->name : "", *cached;
        unsigned layer = MAX_LAYERS;
        int end = 0;
        if (sscanf(name, "blk.%u.%n", &layer, &end) == 1 && end && layer < MAX_LAYERS)
            return (int)(2 * layer) + (!strncmp(name + end, "ffn_", 4) || !strncmp(name + end, "exp_probs_b", 11));
        if (!strncmp(name, "cache_", 6) && (cached = strstr(name, "_l")) && sscanf(cached, "_l%u", &layer) == 1 && layer < MAX_LAYERS)
            return (int)(2 * layer);
        if (!strncmp(name, "token_embd", 10) || !strncmp(name, "output", 6))
            return node->op == GGML_OP_GET_ROWS ? EMBEDDING : HEAD;
    }
    return before;
}

static void add(const char *operator_name, int64_t ns) {
    struct entry *entry = table[phase][place];
    while (entry->operator_name && strcmp(entry->operator_name, operator_name))
        if (++entry == table[phase][place] + MAX_OPERATORS) fail(DECODE_FAILED, "profile", "more operators in one block than expected");
    entry->operator_name = operator_name;
    entry->nodes++;
    entry->ns += ns;
}

/* Called before a node, to ask whether to stop behind it, and where it was asked to, again when the node is computed. */
static bool on_node(struct ggml_tensor *node, bool before, void *unused) {
    (void)unused;
    if (phase == UNTIMED) return false;
    if (before) {
        switch (node->op) {
            case GGML_OP_NONE: case GGML_OP_VIEW: case GGML_OP_RESHAPE: case GGML_OP_PERMUTE: case GGML_OP_TRANSPOSE: return false;
            /* ggml computes a norm and the product with its weights in one pass, and the weights name the layer. */
            case GGML_OP_RMS_NORM: norm = node; return false;
            default: started = wall(); return true;
        }
    }
    int64_t ns = wall() - started;
    place = place_of(node, place);
    bool weighted = norm && node->op == GGML_OP_MUL && (node->src[0] == norm || node->src[1] == norm);
    add(weighted ? ggml_op_name(GGML_OP_RMS_NORM) : ggml_op_desc(node), ns);
    norm = NULL;
    return true;
}

/* Runs the request as runner.c does. `least_ns` are the least times of prompt and decoded tokens in all passes until now. */
static bool run_request(struct llama_context *context, llama_token *ids, int vocab, bool timed, int pass, int64_t least_ns[2]) {
    bool finite = true;
    int64_t ns[2] = {0};
    for (long i = -1; i < opt.gen; i++) {
        enum phase now = i < 0 ? PREFILL : DECODE;
        phase = timed ? now : UNTIMED;
        int64_t begun = wall();
        decode(context, i < 0 ? ids : ids + opt.prompt + i, i < 0 ? opt.prompt : 1);
        const float *logits = llama_get_logits_ith(context, -1);
        volatile int chosen = argmax(logits, vocab);
        (void)chosen;
        ns[now] += wall() - begun;
        finite = finite && all_finite(logits, vocab);
    }
    phase = UNTIMED;
    llama_memory_clear(llama_get_memory(context), true);
    for (enum phase which = PREFILL; which < UNTIMED; which++) {
        least_ns[which] = least(least_ns[which], ns[which], pass);
        for (int i = 0; timed && i < PLACES * MAX_OPERATORS; i++) {
            struct entry *entry = &table[which][i / MAX_OPERATORS][i % MAX_OPERATORS];
            entry->least_ns = least(entry->least_ns, entry->ns, pass);
            if (pass < PASSES - 1) entry->nodes = 0;
            entry->ns = 0;
        }
    }
    return finite;
}

static void print_phase(const char *name, enum phase which, const int64_t whole[2], const int64_t profiled[2]) {
    begin_phase(name, whole[which], profiled[which]);
    bool first = true;
    for (int at = 0; at < PLACES; at++)
        for (int i = 0; i < MAX_OPERATORS && table[which][at][i].operator_name; i++, first = false) {
            const struct entry *entry = &table[which][at][i];
            const char *part = at == HEAD ? "head" : at == EMBEDDING ? "embedding" : at % 2 ? "ffn" : "mixer";
            print_node(first, at < EMBEDDING ? at / 2 : -1, part, entry->operator_name, entry->nodes, entry->least_ns);
        }
    printf("]}");
}

static int profile(void) {
    node_callback = on_node;
    if (opt.gpu) setenv("GGML_VK_VISIBLE_DEVICES", "0", 0);
    llama_backend_init();
    if (opt.gpu) choose_gpu();
    struct llama_model *model = load_model();
    struct ggml_threadpool *threads;
    struct llama_context *context = new_context(model, &threads);
    int vocab = vocab_of(model);
    llama_token *ids = draw_ids(vocab);
    warm_up(context, ids);

    int64_t whole[2], profiled[2];
    bool finite = true;
    for (int pass = 0; pass < PASSES; pass++) {
        finite = run_request(context, ids, vocab, false, pass, whole) && finite;
        finite = run_request(context, ids, vocab, true, pass, profiled) && finite;
    }
    printf("{\"v\":1,\"prompt\":%ld,\"gen\":%ld,\"finite\":%s", opt.prompt, opt.gen, finite ? "true" : "false");
    print_phase("prefill", PREFILL, whole, profiled);
    print_phase("decode", DECODE, whole, profiled);
    printf("}\n");
    return fflush(stdout) ? NO_MEMORY : 0;
}

int main(int argc, char **argv) { return run(argc, argv, profile); }
