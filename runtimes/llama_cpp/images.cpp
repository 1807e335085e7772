/* Each image is one frame: scaled to at most so many tokens as LFM2-VL's processor does it without tiles, then encoded, one after
 * another. The scheduler is asked to stop once, behind the encoder's last norm, so that encoder and connector are timed apart in the
 * very pass that is measured. */
#include "images.h"
#include "mtmd-image.h"
#include "../report.h"

#include <exception>
#include <memory>

struct images {
    clip_ctx *encoder;
    std::vector<clip_image_u8> pixels;
    long threads;
    std::vector<float> rows;
    int64_t behind_encoder[2]; /* both clocks */
    long tokens;
};

static bool is_last_of_encoder(const ggml_tensor *node) {
    for (int i = 0; i < GGML_MAX_SRC; i++)
        if (node->src[i] && !strcmp(node->src[i]->name, "v.post_ln.bias")) return true;
    return false;
}

static bool on_node(ggml_tensor *node, bool before, void *state) {
    if (before) return is_last_of_encoder(node);
    auto *images = static_cast<struct images *>(state);
    images->behind_encoder[0] = wall(), images->behind_encoder[1] = cpu();
    return true;
}

static clip_image_f32_batch scaled(const struct images *images, const clip_image_u8 &image) {
    clip_image_f32_batch batch;
    batch.entries = mtmd_image_preprocessor_dyn_size(images->encoder).preprocess(image).entries;
    return batch;
}

struct images *open_images(const struct image_request *request) try {
    auto images = std::make_unique<struct images>();
    clip_context_params params{};
    params.flash_attn_type = request->flash ? CLIP_FLASH_ATTN_TYPE_ENABLED : CLIP_FLASH_ATTN_TYPE_DISABLED;
    params.image_min_tokens = (int)request->least;
    params.image_max_tokens = (int)request->tokens;
    params.cb_eval = on_node;
    params.cb_eval_user_data = images.get();
    images->encoder = clip_init(request->projector, params).ctx_v;
    if (!images->encoder || clip_get_projector_type(images->encoder) != PROJECTOR_TYPE_LFM2) return nullptr;
    images->threads = request->threads;
    uint64_t state = (uint64_t)request->seed;
    std::vector<uint8_t> bytes((size_t)(request->height * request->width * 3));
    for (long i = 0; i < request->count; i++) {
        for (auto &byte : bytes) byte = (uint8_t)splitmix64(&state);
        clip_image_u8 image;
        image.set_size({(int)request->width, (int)request->height}, false);
        image.cpy_buf(bytes);
        images->pixels.push_back(image);
    }
    for (const auto &image : images->pixels) {
        clip_image_f32_batch batch = scaled(images.get(), image);
        images->tokens += clip_n_output_tokens(images->encoder, &batch.entries[0]);
    }
    return images.release();
} catch (const std::exception &error) {
    fprintf(stderr, "%s\n", error.what());
    return nullptr;
}

long image_tokens(const struct images *images) { return images->tokens; }

int image_embedding_width(const struct images *images) { return clip_n_mmproj_embd(images->encoder); }

float *encode_images(struct images *images, int64_t wall_ns[STEPS], int64_t cpu_ns[STEPS]) try {
    images->rows.clear();
    std::vector<float> frame;
    for (const auto &image : images->pixels) {
        int64_t begun[2] = {wall(), cpu()};
        clip_image_f32_batch batch = scaled(images, image);
        int64_t encoding[2] = {wall(), cpu()};
        frame.resize((size_t)clip_n_output_tokens(images->encoder, &batch.entries[0]) * image_embedding_width(images));
        images->behind_encoder[0] = 0;
        if (!clip_image_batch_encode(images->encoder, (int)images->threads, &batch, frame)) return nullptr;
        if (!images->behind_encoder[0]) return nullptr;
        images->rows.insert(images->rows.end(), frame.begin(), frame.end());
        int64_t ended[2] = {wall(), cpu()}, *sums[2] = {wall_ns, cpu_ns};
        for (int clock = 0; clock < 2; clock++) {
            sums[clock][SCALE] += encoding[clock] - begun[clock];
            sums[clock][ENCODER] += images->behind_encoder[clock] - encoding[clock];
            sums[clock][CONNECTOR] += ended[clock] - images->behind_encoder[clock];
        }
    }
    bool whole = images->rows.size() == (size_t)images->tokens * image_embedding_width(images);
    return whole ? images->rows.data() : nullptr;
} catch (const std::exception &error) {
    fprintf(stderr, "%s\n", error.what());
    return nullptr;
}
