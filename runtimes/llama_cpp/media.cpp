/* Each image is one frame: scaled to at most so many tokens as LFM2-VL's processor does it without tiles, then encoded, one after
 * another. Of each sound, log-mel features are computed, then encoded; mtmd computes these features with four threads, whatever
 * `threads` is. The scheduler is asked to stop once, behind the encoder's last norm, so that encoder and connector are timed apart in
 * the very pass that is measured. */
#include "media.h"
#include "mtmd-audio.h"
#include "mtmd-image.h"
#include "../report.h"

#include <exception>
#include <memory>
#include <string>

struct media {
    clip_ctx *encoder;
    std::vector<clip_image_u8> pixels;
    std::vector<std::vector<float>> samples;
    std::unique_ptr<mtmd_audio_preprocessor_conformer> hearing;
    std::string last; /* tensor of the encoder's last norm */
    long threads;
    std::vector<float> rows;
    int64_t behind_encoder[2]; /* both clocks */
    long tokens;
};

static bool on_node(ggml_tensor *node, bool before, void *state) {
    auto *media = static_cast<struct media *>(state);
    if (before) {
        for (int i = 0; i < GGML_MAX_SRC; i++)
            if (node->src[i] && media->last == node->src[i]->name) return true;
        return false;
    }
    media->behind_encoder[0] = wall(), media->behind_encoder[1] = cpu();
    return true;
}

/* Returns the image or sound of that number as the encoder reads it. */
static clip_image_f32_batch prepared(const struct media *media, size_t number) {
    clip_image_f32_batch batch;
    if (!media->hearing) {
        batch.entries = mtmd_image_preprocessor_dyn_size(media->encoder).preprocess(media->pixels[number]).entries;
        return batch;
    }
    std::vector<mtmd_audio_mel> features;
    const auto &samples = media->samples[number];
    if (!media->hearing->preprocess(samples.data(), samples.size(), features) || features.size() != 1)
        throw std::runtime_error("no features of a sound");
    clip_image_f32 entry;
    entry.set_size({(int)features[0].n_len, (int)features[0].n_mel}, false, true);
    entry.cpy_buf(features[0].data);
    batch.is_audio = true;
    batch.entries.push_back(std::move(entry));
    return batch;
}

static void draw(struct media *media, const struct media_request *request) {
    uint64_t state = (uint64_t)request->seed;
    std::vector<uint8_t> bytes((size_t)(request->height * request->width * 3));
    for (long i = 0; i < request->images; i++) {
        for (auto &byte : bytes) byte = (uint8_t)splitmix64(&state);
        clip_image_u8 image;
        image.set_size({(int)request->width, (int)request->height}, false);
        image.cpy_buf(bytes);
        media->pixels.push_back(image);
    }
    for (long i = 0; i < request->sounds; i++) {
        std::vector<float> samples((size_t)request->samples);
        for (auto &sample : samples) sample = (float)(splitmix64(&state) >> 40) / (1 << 24) - 0.5f;
        media->samples.push_back(std::move(samples));
    }
}

struct media *open_media(const struct media_request *request) try {
    auto media = std::make_unique<struct media>();
    clip_context_params params{};
    params.flash_attn_type = request->flash ? CLIP_FLASH_ATTN_TYPE_ENABLED : CLIP_FLASH_ATTN_TYPE_DISABLED;
    params.image_min_tokens = (int)request->least;
    params.image_max_tokens = (int)request->tokens;
    params.cb_eval = on_node;
    params.cb_eval_user_data = media.get();
    clip_init_result opened = clip_init(request->projector, params);
    media->encoder = request->sounds ? opened.ctx_a : opened.ctx_v;
    if (!media->encoder) return nullptr;
    if (clip_get_projector_type(media->encoder) != (request->sounds ? PROJECTOR_TYPE_LFM2A : PROJECTOR_TYPE_LFM2)) return nullptr;
    media->last = "v.post_ln.bias";
    if (request->sounds) {
        media->last = "a.blk." + std::to_string(clip_get_hparams(media->encoder)->n_layer - 1) + ".ln2.bias";
        media->hearing = std::make_unique<mtmd_audio_preprocessor_conformer>(media->encoder);
        media->hearing->initialize();
    }
    media->threads = request->threads;
    draw(media.get(), request);
    for (size_t i = 0; i < media->pixels.size() + media->samples.size(); i++) {
        clip_image_f32_batch batch = prepared(media.get(), i);
        media->tokens += clip_n_output_tokens(media->encoder, &batch.entries[0]);
    }
    return media.release();
} catch (const std::exception &error) {
    fprintf(stderr, "%s\n", error.what());
    return nullptr;
}

long media_tokens(const struct media *media) { return media->tokens; }

int media_width(const struct media *media) { return clip_n_mmproj_embd(media->encoder); }

float *encode_media(struct media *media, int64_t wall_ns[STEPS], int64_t cpu_ns[STEPS]) try {
    media->rows.clear();
    std::vector<float> part;
    for (size_t i = 0; i < media->pixels.size() + media->samples.size(); i++) {
        int64_t begun[2] = {wall(), cpu()};
        clip_image_f32_batch batch = prepared(media, i);
        int64_t encoding[2] = {wall(), cpu()};
        part.resize((size_t)clip_n_output_tokens(media->encoder, &batch.entries[0]) * media_width(media));
        media->behind_encoder[0] = 0;
        if (!clip_image_batch_encode(media->encoder, (int)media->threads, &batch, part)) return nullptr;
        if (!media->behind_encoder[0]) return nullptr;
        media->rows.insert(media->rows.end(), part.begin(), part.end());
        int64_t ended[2] = {wall(), cpu()}, *sums[2] = {wall_ns, cpu_ns};
        for (int clock = 0; clock < 2; clock++) {
            sums[clock][PREPARE] += encoding[clock] - begun[clock];
            sums[clock][ENCODER] += media->behind_encoder[clock] - encoding[clock];
            sums[clock][CONNECTOR] += ended[clock] - media->behind_encoder[clock];
        }
    }
    bool whole = media->rows.size() == (size_t)media->tokens * media_width(media);
    return whole ? media->rows.data() : nullptr;
} catch (const std::exception &error) {
    fprintf(stderr, "%s\n", error.what());
    return nullptr;
}
