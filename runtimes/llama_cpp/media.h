/* Images or sounds in front of a prompt, computed by the parts of llama.cpp's libmtmd that need no vocabulary. */
#ifndef HILNAS_MEDIA_H
#define HILNAS_MEDIA_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct media;

/* What happens to all of them, one step after another: scaling of pixels or features of samples, then the tower. */
enum { PREPARE, ENCODER, CONNECTOR, STEPS };

struct media_request {
    const char *projector; /* file of encoder and connector */
    long images, height, width; /* in pixels; content is drawn from `seed` */
    long tokens, least; /* of an image at most and at least */
    long sounds, samples; /* of each at 16 kHz */
    long threads, seed;
    bool flash;
};

/* Returns NULL where the file is refused; the log says why. */
struct media *open_media(const struct media_request *request);
/* Tokens of all. */
long media_tokens(const struct media *media);
/* Numbers of an embedding. */
int media_width(const struct media *media);
/* Prepares and encodes all; adds the nanoseconds of each step on both clocks. Returns rows [tokens, width], which `media`
 * owns, or NULL. */
float *encode_media(struct media *media, int64_t wall_ns[STEPS], int64_t cpu_ns[STEPS]);

#ifdef __cplusplus
}
#endif

#endif
