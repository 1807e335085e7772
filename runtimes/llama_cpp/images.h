/* Images in front of a prompt, computed by the parts of llama.cpp's libmtmd that need no vocabulary. */
#ifndef HILNAS_IMAGES_H
#define HILNAS_IMAGES_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct images;

/* What happens to the pixels of all images, one step after another. */
enum { SCALE, ENCODER, CONNECTOR, STEPS };

struct image_request {
    const char *projector; /* file of encoder and connector */
    long count, height, width; /* of the images, in pixels; their content is drawn from `seed` */
    long tokens, least; /* of an image at most and at least */
    long threads, seed;
    bool flash;
};

/* Returns NULL where the file is refused; the log says why. */
struct images *open_images(const struct image_request *request);
/* Tokens of all images. */
long image_tokens(const struct images *images);
/* Numbers of an embedding. */
int image_embedding_width(const struct images *images);
/* Scales and encodes all images; adds the nanoseconds of each step on both clocks. Returns rows [tokens, width], which
 * `images` owns, or NULL. */
float *encode_images(struct images *images, int64_t wall_ns[STEPS], int64_t cpu_ns[STEPS]);

#ifdef __cplusplus
}
#endif

#endif
