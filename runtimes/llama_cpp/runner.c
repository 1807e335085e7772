/* Measures one request on one model: load, warm up, timed prompt, timed decode; one JSON object on stdout.
 * With --reference, a reference model in a process of its own takes turns with it, and its report is part of this one's.
 * Or, with --recipe, makes the model file that a recipe describes: a few KB travel instead of the model.
 *
 * With --gpu 1 every layer is on the build's GPU back end, or the run fails: nothing is computed on the processor unnoticed.
 *
 * With --mmproj, a build with HILNAS_MEDIA encodes images or sounds in front of the prompt, in the same process: see media.h.
 *
 * Needs only llama.h and ggml's headers, so the same file serves hosts and phones. A run is one fresh process: nothing is left over from
 * another repetition. The log goes to stderr. Exit codes follow sysexits.h and are in report.h.
 */
#define _GNU_SOURCE
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama.h"
#include "../report.h"
#ifdef HILNAS_MEDIA
#include "media.h"
#include "mtmd.h"
#endif

struct options {
    const char *model;
    const char *reference;
    const char *kv;
    const char *logits;
    const char *recipe;
    const char *output;
    long prompt, gen, context, batch, ubatch, threads, flash, mmap, repack, seed, warmup, vectors, gpu;
#ifdef HILNAS_MEDIA
    const char *mmproj;
    long images, height, width, tokens, least, sounds, samples, reference_prompt;
#endif
};

static struct options opt = {
    .kv = "f16", .prompt = 512, .gen = 64, .context = 0, .batch = 2048, .ubatch = 512, .threads = 1,
    .flash = 1, .mmap = 0, .repack = 1, .seed = 0, .warmup = -1, .vectors = 0,
};

static char last_error[512];
static bool memory_ran_out;

/* ---- failing ------------------------------------------------------------------------------------------------- */

static void fail(int code, const char *kind, const char *what) {
    if (memory_ran_out) { code = NO_MEMORY; kind = "out_of_memory"; }
    char message[1024];
    snprintf(message, sizeof message, "%s%s%s", what, last_error[0] ? ": " : "", last_error);
    report_failure(code, kind, message);
}

static void *allocate(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) { memory_ran_out = true; fail(NO_MEMORY, "out_of_memory", "the runner's own buffers"); }
    return memory;
}

static ggml_backend_dev_t gpu; /* NULL where the processor computes */
static double gpu_mib;         /* of buffers on it, as llama.cpp logs them */

/* "load_tensors:      Vulkan0 model buffer size =    92.11 MiB"; memory of the host that the GPU can read is not the GPU's. */
static void count_buffer(const char *text) {
    char place[64];
    double mib;
    const char *colon = strchr(text, ':'), *size = strstr(text, " buffer size = ");
    if (!colon || !size || sscanf(colon + 1, "%63s", place) != 1 || strcmp(place, ggml_backend_dev_name(gpu))) return;
    if (sscanf(size, " buffer size = %lf MiB", &mib) == 1) gpu_mib += mib;
}

/* llama.cpp reports why it failed, and what it allocated, through its log only. */
static void on_log(enum ggml_log_level level, const char *text, void *unused) {
    (void)unused;
    if (gpu && level == GGML_LOG_LEVEL_INFO) count_buffer(text);
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
                         "[--vectors 0|1] [--gpu 0|1] "
                         "[--reference FILE | --logits FILE] | runner --recipe FILE --output FILE");
}

static void parse_arguments(int argc, char **argv) {
    const struct { const char *name; long *value, low, high; } numbers[] = {
        {"--prompt", &opt.prompt, 1, 1 << 22}, {"--gen", &opt.gen, 0, 1 << 22}, {"--context", &opt.context, 0, 1 << 22},
        {"--batch", &opt.batch, 1, 1 << 20}, {"--ubatch", &opt.ubatch, 1, 1 << 20}, {"--threads", &opt.threads, 1, 1024},
        {"--flash", &opt.flash, 0, 1}, {"--mmap", &opt.mmap, 0, 1}, {"--repack", &opt.repack, 0, 1},
        {"--seed", &opt.seed, 0, INT32_MAX}, {"--warmup", &opt.warmup, 0, 1 << 20},
        {"--vectors", &opt.vectors, 0, 1}, {"--gpu", &opt.gpu, 0, 1},
#ifdef HILNAS_MEDIA
        {"--images", &opt.images, 1, 64}, {"--image-height", &opt.height, 1, 4096}, {"--image-width", &opt.width, 1, 4096},
        {"--image-tokens", &opt.tokens, 1, 4096}, {"--image-least", &opt.least, 1, 4096},
        {"--sounds", &opt.sounds, 1, 64}, {"--sound-samples", &opt.samples, 1600, 120 * 16000},
        {"--reference-prompt", &opt.reference_prompt, 1, 1 << 22},
#endif
    };
    for (int i = 1; i < argc; i += 2) {
        if (i + 1 == argc) usage(argv[i]);
        bool known = true;
        if (!strcmp(argv[i], "--model")) opt.model = argv[i + 1];
        else if (!strcmp(argv[i], "--reference")) opt.reference = argv[i + 1];
        else if (!strcmp(argv[i], "--kv")) opt.kv = argv[i + 1];
        else if (!strcmp(argv[i], "--logits")) opt.logits = argv[i + 1];
        else if (!strcmp(argv[i], "--recipe")) opt.recipe = argv[i + 1];
        else if (!strcmp(argv[i], "--output")) opt.output = argv[i + 1];
#ifdef HILNAS_MEDIA
        else if (!strcmp(argv[i], "--mmproj")) opt.mmproj = argv[i + 1];
#endif
        else known = false;
        for (size_t n = 0; !known && n < sizeof numbers / sizeof *numbers; n++) {
            if (strcmp(argv[i], numbers[n].name)) continue;
            if (!read_integer(argv[i + 1], numbers[n].low, numbers[n].high, numbers[n].value)) usage(argv[i]);
            known = true;
        }
        if (!known) usage(argv[i]);
    }
    if (opt.recipe || opt.output) {
        if (!opt.recipe || !opt.output || opt.model || opt.reference) usage("--recipe and --output go together, without a model");
        return;
    }
    if (!opt.model) usage("--model is missing");
    if (access(opt.model, R_OK)) usage("--model cannot be read");
    if (opt.reference && opt.logits) usage("--reference and --logits exclude each other");
#ifdef HILNAS_MEDIA
    if (opt.mmproj && access(opt.mmproj, R_OK)) usage("--mmproj cannot be read");
    bool images = opt.images && opt.height && opt.width && opt.tokens && opt.least, sounds = opt.sounds && opt.samples;
    if (!opt.mmproj != !(opt.images || opt.sounds) || (opt.mmproj && (images == sounds || opt.vectors || opt.gpu)))
        usage("--mmproj goes with --images, --image-height, --image-width, --image-tokens and --image-least, or with --sounds and "
              "--sound-samples, without --vectors and --gpu");
#endif
    if (opt.vectors && (opt.logits || opt.gen)) usage("--vectors goes with --gen 0 and without --logits");
    /* The first prompt of a process is slower where fewer tokens warmed it up; a GPU compiles a shader for each shape. */
    if (opt.warmup < 0) opt.warmup = opt.prompt < opt.ubatch || opt.gpu ? opt.prompt : opt.ubatch;
    if (strcmp(opt.kv, "f16") && strcmp(opt.kv, "q8_0")) usage("--kv");
    if (!opt.context) opt.context = opt.prompt + opt.gen;
    if (opt.context < opt.prompt + opt.gen) usage("--context is shorter than prompt + gen");
}

/* ---- a model file from its recipe: runtimes/llama_cpp/recipe.py describes the format ------------------------- */

enum { MAX_POOLS = 16, MAX_TENSORS = 1 << 20, ALIGNMENT = 32 };

struct pool { unsigned char *bytes; size_t size; };

static void refuse_recipe(const char *what) {
    snprintf(last_error, sizeof last_error, "%s", what);
    fail(LOAD_FAILED, "recipe", "the recipe was refused");
}

static void not_written(void) {
    snprintf(last_error, sizeof last_error, "%s", strerror(errno));
    fail(NOT_WRITTEN, "disk", "the model file cannot be written");
}

static uint64_t read_number(FILE *recipe, uint64_t high) {
    unsigned long long value;
    if (fscanf(recipe, "%20llu", &value) != 1 || value > high) refuse_recipe("a number is missing or too large");
    return value;
}

/* Quantised blocks: random quanta, one scale for all. 128 + 64 bytes of quanta and 16 sub-block scales in a Q6_K. */
static void scale_blocks(struct pool pool, size_t unit, uint16_t scale) {
    for (unsigned char *block = pool.bytes; block < pool.bytes + pool.size; block += unit) {
        size_t at = 0;
        if (unit == 210) {
            for (int i = 192; i < 208; i++) block[i] = block[i] % 17 + 1;
            at = 208;
        }
        block[at] = scale & 0xff, block[at + 1] = scale >> 8;
    }
}

/* k / 2^shift as float16 for |k| <= 1024, which it holds exactly. */
static uint16_t half(int k, int shift) {
    unsigned sign = k < 0 ? 0x8000 : 0, magnitude = (unsigned)abs(k);
    int top = 10;
    if (!magnitude) return 0;
    while (!(magnitude >> top)) top--;
    int exponent = top - shift;
    if (exponent < -14) return (uint16_t)(sign | magnitude << (24 - shift));
    return (uint16_t)(sign | (unsigned)(exponent + 15) << 10 | ((magnitude << (10 - top)) & 0x3ff));
}

/* Uniform numbers that the type holds exactly: an integer of its precision over a power of two. */
static void spread(struct pool pool, size_t unit, int shift) {
    for (unsigned char *at = pool.bytes; at < pool.bytes + pool.size; at += unit) {
        if (unit == 2) {
            int16_t bits;
            memcpy(&bits, at, unit);
            uint16_t value = half(bits >> 5, shift);
            memcpy(at, &value, unit);
        } else {
            int32_t bits;
            memcpy(&bits, at, unit);
            float value = ldexpf((float)(bits >> 8), -shift);
            memcpy(at, &value, unit);
        }
    }
}

static struct pool read_pool(FILE *recipe, uint64_t seed) {
    char name[8];
    static const struct { const char *name; size_t unit; } kinds[] = {
        {"q4_0", 18}, {"q8_0", 34}, {"q6_k", 210}, {"f16", 2}, {"f32", 4},
    };
    size_t unit = 0;
    if (fscanf(recipe, "%7s", name) != 1) refuse_recipe("a pool is missing");
    for (size_t n = 0; n < sizeof kinds / sizeof *kinds; n++)
        if (!strcmp(name, kinds[n].name)) unit = kinds[n].unit;
    if (!unit) refuse_recipe("a pool of unknown kind");
    uint64_t scale = read_number(recipe, unit > 4 ? UINT16_MAX : unit == 2 ? 24 : 64);
    uint64_t count = read_number(recipe, 1 << 26);
    if (!count) refuse_recipe("an empty pool");
    struct pool pool = {.size = count * unit};
    pool.bytes = allocate((pool.size + 7) / 8, 8);
    for (size_t at = 0; at < pool.size; at += 8) {
        uint64_t word = splitmix64(&seed);
        memcpy(pool.bytes + at, &word, 8); /* every machine that is measured is little-endian */
    }
    if (unit > 4) scale_blocks(pool, unit, (uint16_t)scale);
    else spread(pool, unit, (int)scale);
    return pool;
}

static void put(FILE *file, const void *bytes, size_t size) {
    if (fwrite(bytes, 1, size, file) != size) not_written();
}

static void put_floats(FILE *file, uint64_t size, const float *values, uint64_t period) {
    for (uint64_t i = 0; i < size / sizeof *values; i++) put(file, values + i % period, sizeof *values);
}

static void put_tensor(FILE *recipe, FILE *file, const struct pool *pools, uint64_t n_pools) {
    static const float one = 1, zero = 0;
    float decay[16];
    char how[8];
    uint64_t size = read_number(recipe, (uint64_t)1 << 40);
    if (fscanf(recipe, "%7s", how) != 1) refuse_recipe("a tensor is cut off");
    for (int i = 0; i < 16; i++) decay[i] = (float)-(i + 1);
    if (!strcmp(how, "ones")) put_floats(file, size, &one, 1);
    else if (!strcmp(how, "zeros")) put_floats(file, size, &zero, 1);
    else if (!strcmp(how, "decay")) put_floats(file, size, decay, 16);
    else if (!strcmp(how, "tile")) {
        uint64_t number = read_number(recipe, n_pools ? n_pools - 1 : 0);
        if (!n_pools) refuse_recipe("a tensor of no pool");
        const struct pool *pool = pools + number;
        uint64_t at = read_number(recipe, pool->size - 1);
        for (uint64_t left = size; left; at = 0) {
            uint64_t n = left < pool->size - at ? left : pool->size - at;
            put(file, pool->bytes + at, n);
            left -= n;
        }
    } else refuse_recipe("a tensor of unknown kind");
    static const char padding[ALIGNMENT];
    put(file, padding, (size_t)(-size % ALIGNMENT));
}

static int make_model(void) {
    FILE *recipe = fopen(opt.recipe, "rb");
    if (!recipe) usage("--recipe cannot be read");
    char magic[16];
    if (fscanf(recipe, "%15s", magic) != 1 || strcmp(magic, "hilnas-recipe") || read_number(recipe, 1) != 1)
        refuse_recipe("no recipe of version 1");
    uint64_t seed = read_number(recipe, UINT64_MAX), header_size = read_number(recipe, 1 << 26);
    uint64_t n_pools = read_number(recipe, MAX_POOLS), n_tensors = read_number(recipe, MAX_TENSORS);
    unsigned char *header = allocate(header_size + 1, 1);
    if (fgetc(recipe) != '\n' || fread(header, 1, header_size, recipe) != header_size)
        refuse_recipe("the header is cut off");
    struct pool pools[MAX_POOLS];
    for (uint64_t i = 0; i < n_pools; i++) pools[i] = read_pool(recipe, splitmix64(&seed));

    int descriptor = open(opt.output, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, "wb");
    if (!file) not_written();
    put(file, header, header_size);
    for (uint64_t i = 0; i < n_tensors; i++) put_tensor(recipe, file, pools, n_pools);
    long size = ftell(file);
    if (fclose(file)) not_written();
    printf("{\"v\":1,\"made\":%ld}\n", size);
    return fflush(stdout) ? NO_MEMORY : 0;
}

/* ---- the request --------------------------------------------------------------------------------------------- */

static void decode_batch(struct llama_context *context, struct llama_batch batch) {
    int status = llama_decode(context, batch);
    if (!status) return;
    char what[64];
    snprintf(what, sizeof what, "llama_decode returned %d", status);
    if (status == -2) memory_ran_out = true; /* GGML_STATUS_ALLOC_FAILED */
    fail(DECODE_FAILED, "decode", what);
}

static void decode(struct llama_context *context, llama_token *ids, long count) {
    for (long done = 0; done < count; done += opt.batch) {
        long n = count - done < opt.batch ? count - done : opt.batch;
        decode_batch(context, llama_batch_get_one(ids + done, (int32_t)n));
    }
    llama_synchronize(context);
}

static int argmax(const float *logits, int vocab) {
    int best = 0;
    for (int i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* Outside what is timed, so that kernels of other machines can be compared. */
static void keep_logits(const float *logits, int vocab) {
    const char *error = write_logits(opt.logits, logits, vocab);
    if (error) usage(error);
}

/* Chooses the first GPU. A driver that computes on the processor is taken as well, and said to be one in the report: without the
 * variable llama.cpp would pass it over in silence. */
static void choose_gpu(void) {
    for (size_t i = 0; i < ggml_backend_dev_count() && !gpu; i++) {
        ggml_backend_dev_t device = ggml_backend_dev_get(i);
        enum ggml_backend_dev_type type = ggml_backend_dev_type(device);
        if (type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU) gpu = device;
    }
    if (!gpu) fail(USAGE, "gpu", "no GPU answers: its driver is missing or does not load, or this build has no back end for it");
}

static bool is_software(void) {
    const char *names[] = {"llvmpipe", "SwiftShader", "softpipe"}, *description = ggml_backend_dev_description(gpu);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strstr(description, names[i])) return true;
    return false;
}

static struct llama_model *load_model(void) {
    struct llama_model_params params = llama_model_default_params();
    ggml_backend_dev_t devices[] = {gpu, NULL};
    params.n_gpu_layers = gpu ? -1 : 0; /* all, the output among them, or none */
    if (gpu) params.devices = devices;
    params.load_mode = opt.mmap ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    params.use_extra_bufts = opt.repack;
    struct llama_model *model = llama_model_load_from_file(opt.model, params);
    if (!model) fail(LOAD_FAILED, "load", "the model file was refused");
    return model;
}

static ggml_backend_sched_eval_callback node_callback; /* NULL where nothing is profiled, and no GPU is used */

static char on_processor[256]; /* operators that are not on the GPU */

/* The scheduler gives nodes that a back end lacks to the processor without a word. The embedding's rows are always there. */
static bool on_gpu_node(struct ggml_tensor *node, bool before, void *unused) {
    (void)unused;
    if (!before || !node->buffer) return !before;
    switch (node->op) {
        case GGML_OP_NONE: case GGML_OP_VIEW: case GGML_OP_RESHAPE: case GGML_OP_PERMUTE: case GGML_OP_TRANSPOSE: return false;
        case GGML_OP_GET_ROWS: if (node->src[0] && !strncmp(node->src[0]->name, "token_embd", 10)) return false; break;
        default: break;
    }
    const char *name = ggml_op_name(node->op);
    size_t used = strlen(on_processor);
    if (!ggml_backend_buft_is_host(ggml_backend_buffer_get_type(node->buffer)) || strstr(on_processor, name)) return false;
    if (used + strlen(name) + 3 < sizeof on_processor) sprintf(on_processor + used, "%s%s", used ? ", " : "", name);
    return false;
}

static struct llama_context *new_context(struct llama_model *model, struct ggml_threadpool **threadpool) {
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
    params.cb_eval = node_callback;
    params.embeddings = opt.vectors; /* then every token has an output, and no logits are computed */
    if (opt.vectors) params.pooling_type = LLAMA_POOLING_TYPE_NONE;
    struct llama_context *context = llama_init_from_model(model, params);
    if (!context) fail(DECODE_FAILED, "context", "no context for this model and workload");
    /* Without a pool of its own a context starts and ends its threads with every token. */
    struct ggml_threadpool_params threads = ggml_threadpool_params_default((int)opt.threads);
    *threadpool = ggml_threadpool_new(&threads);
    if (!*threadpool) fail(DECODE_FAILED, "context", "no threads");
    llama_attach_threadpool(context, *threadpool, NULL);
    return context;
}

/* Random token ids for prompt, decoding and warm-up. */
static llama_token *draw_ids(int vocab) {
    long total = opt.prompt + opt.gen, count = total > opt.warmup ? total : opt.warmup;
    llama_token *ids = allocate((size_t)count + 1, sizeof *ids);
    uint64_t state = (uint64_t)opt.seed;
    for (long i = 0; i < count; i++) ids[i] = (llama_token)(splitmix64(&state) % (uint64_t)vocab);
    return ids;
}

static void warm_up(struct llama_context *context, llama_token *ids) {
    if (!opt.warmup) return;
    long count = opt.warmup < opt.context ? opt.warmup : opt.context - 1;
    decode(context, ids, count);
    if (gpu) {
        decode(context, ids, 1); /* single tokens have shaders of their own */
        if (*on_processor) {
            snprintf(last_error, sizeof last_error, "%s lacks %s", ggml_backend_dev_name(gpu), on_processor);
            fail(LOAD_FAILED, "gpu", "the processor would compute a part of this model");
        }
    }
    llama_memory_clear(llama_get_memory(context), true);
}

static void print_gpu(void) {
    printf(",\"gpu\":{\"name\":");
    print_string(ggml_backend_dev_name(gpu));
    printf(",\"description\":");
    print_string(ggml_backend_dev_description(gpu));
    printf(",\"software\":%s,\"memory_mb\":%.3f}", is_software() ? "true" : "false", gpu_mib * 1024 * 1024 / 1e6);
}

static int vocab_of(const struct llama_model *model) {
    int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    if (vocab < 1) fail(LOAD_FAILED, "load", "the model file has no vocabulary size");
    return vocab;
}

struct loaded {
    struct llama_model *model;
    struct llama_context *context;
    struct ggml_threadpool *threads;
    int vocab, width; /* of a token's vector */
    llama_token *ids;
    const float *logits; /* or vectors, of the last token */
#ifdef HILNAS_MEDIA
    struct media *media; /* NULL: there are none */
    long looks;
    int64_t wall_ns[MAX_PASSES][STEPS], cpu_ns[MAX_PASSES][STEPS]; /* of each pass over the prompt */
#endif
};

static void prepare(void *state, bool prompt) {
    struct loaded *l = state;
    if (prompt) llama_memory_clear(llama_get_memory(l->context), true);
    if (opt.threads > 1) ggml_threadpool_resume(l->threads);
}

static void rest(void *state) {
    struct loaded *l = state;
    if (opt.threads > 1) ggml_threadpool_pause(l->threads);
}

static void feed(struct loaded *l, long first, long count) {
    decode(l->context, l->ids + first, count);
    if (opt.vectors) {
        l->logits = llama_get_embeddings_ith(l->context, -1);
        if (!l->logits) fail(DECODE_FAILED, "decode", "no vectors of tokens");
        return;
    }
    l->logits = llama_get_logits_ith(l->context, -1);
    volatile int chosen = argmax(l->logits, l->vocab);
    (void)chosen;
}

#ifdef HILNAS_MEDIA
static void open_all_media(struct loaded *l) {
    struct media_request request = {
        .projector = opt.mmproj, .images = opt.images, .height = opt.height, .width = opt.width, .tokens = opt.tokens,
        .least = opt.least, .sounds = opt.sounds, .samples = opt.samples, .threads = opt.threads, .seed = opt.seed,
        .flash = opt.flash,
    };
    mtmd_log_set(on_log, NULL);
    l->media = open_media(&request);
    if (!l->media) fail(LOAD_FAILED, "load", "the file of the tower was refused");
    if (media_width(l->media) != llama_model_n_embd_inp(l->model))
        fail(LOAD_FAILED, "load", "the tower has embeddings of another width than the language model");
    opt.context += (media_tokens(l->media) + 255) / 256 * 256;
}

/* Lets the language model see or hear them. */
static void look(struct loaded *l) {
    long pass = l->looks++ % MAX_PASSES, tokens = media_tokens(l->media);
    memset(l->wall_ns[pass], 0, sizeof l->wall_ns[pass]), memset(l->cpu_ns[pass], 0, sizeof l->cpu_ns[pass]);
    float *rows = encode_media(l->media, l->wall_ns[pass], l->cpu_ns[pass]);
    if (!rows) fail(DECODE_FAILED, "encode", "images or sounds were not encoded");
    for (long done = 0; done < tokens; done += opt.batch) {
        long n = tokens - done < opt.batch ? tokens - done : opt.batch;
        struct llama_batch batch = {.n_tokens = (int32_t)n, .embd = rows + done * media_width(l->media)};
        decode_batch(l->context, batch);
    }
}

static void print_steps(const char *name, int64_t (*ns)[STEPS], long passes) {
    printf(",\"%s\":[", name);
    for (long i = 0; i < passes; i++)
        printf("%s[%lld,%lld,%lld]", i ? "," : "", (long long)ns[i][PREPARE], (long long)ns[i][ENCODER], (long long)ns[i][CONNECTOR]);
    printf("]");
}

static void print_media(struct loaded *l) {
    printf(",\"%s\":{\"tokens\":%ld", opt.sounds ? "sounds" : "images", media_tokens(l->media));
    print_steps("wall_ns", l->wall_ns, l->looks);
    print_steps("cpu_ns", l->cpu_ns, l->looks);
    printf("}");
}
#endif

static void read_prompt(void *state) {
#ifdef HILNAS_MEDIA
    struct loaded *l = state;
    if (l->media) look(l);
#endif
    feed(state, 0, opt.prompt);
}

static void decode_token(void *state, long index) { feed(state, opt.prompt + index, 1); }

static bool check(void *state) {
    struct loaded *l = state;
    if (opt.vectors) return all_finite(l->logits, l->width);
    keep_logits(l->logits, l->vocab);
    return all_finite(l->logits, l->vocab);
}

static int measure(void) {
    struct measurement m = {0};
    struct reference reference, *beside = opt.reference ? &reference : NULL;
    bool serves = beside && fork_reference(beside);
    if (serves) {
        opt.model = opt.reference;
#ifdef HILNAS_MEDIA
        if (opt.reference_prompt > opt.prompt) {
            opt.context += opt.reference_prompt - opt.prompt, opt.prompt = opt.reference_prompt;
            opt.warmup = opt.prompt < opt.ubatch ? opt.prompt : opt.ubatch;
        }
#endif
    } else if (beside) await_reference(beside);
    if (opt.gpu) setenv("GGML_VK_VISIBLE_DEVICES", "0", 0);
    llama_backend_init();
    if (opt.gpu) choose_gpu(), node_callback = node_callback ? node_callback : on_gpu_node;
    struct loaded l = {0};
    int64_t begun = wall();
    l.model = load_model();
#ifdef HILNAS_MEDIA
    if (opt.mmproj && !serves) open_all_media(&l); /* the reference model reads text alone */
#endif
    l.context = new_context(l.model, &l.threads);
    m.load_ms = (double)(wall() - begun) / 1e6;

    l.vocab = vocab_of(l.model);
    l.width = llama_model_n_embd_out(l.model);
    l.ids = draw_ids(l.vocab);
    struct request r = new_request(&l, opt.gen, opt.logits != NULL);
    r.prepare = prepare, r.read_prompt = read_prompt, r.decode_token = decode_token, r.check = check, r.rest = rest;
    begun = wall();
#ifdef HILNAS_MEDIA
    if (l.media) look(&l), l.looks = 0;
#endif
    warm_up(l.context, l.ids);
    m.warmup_ms = (double)(wall() - begun) / 1e6;
    rest(&l);

    if (serves) serve_request(&m, &r, beside);
    else time_request(&m, &r, beside);
    begin_report(&m, &r);
    if (opt.vectors) printf(",\"vector_width\":%d", l.width);
    printf(",\"model_bytes\":%llu,\"model_params\":%llu,\"vocab\":%d,\"llama_version\":",
           (unsigned long long)llama_model_size(l.model), (unsigned long long)llama_model_n_params(l.model), l.vocab);
    print_string(llama_version());
    printf(",\"system_info\":");
    print_string(llama_print_system_info());
    if (gpu) print_gpu();
#ifdef HILNAS_MEDIA
    if (l.media) print_media(&l);
#endif
    return end_report(serves ? NULL : beside);
}

/* Runs `request`, or makes a model file. */
static int run(int argc, char **argv, int (*request)(void)) {
    parse_arguments(argc, argv);
    if (opt.recipe) return make_model();
    llama_log_set(on_log, NULL);
    return request();
}

#ifndef HILNAS_PROFILER
int main(int argc, char **argv) { return run(argc, argv, measure); }
#endif
