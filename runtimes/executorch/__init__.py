"""ExecuTorch 8da4w: any hybrid as a chain of lowered blocks, run by our own C++ runner.

An artifact is one file, little endian:

    "HILNASET", version (u32), 0 (u32), length of the header (u64), the header, then sections, each on a multiple of 64

The header is text, a record a line; offsets count from the first multiple of 64 after it:

    model D V CHUNK                                     width, vocabulary, most tokens a call takes
    embedding OFFSET SIZE SCALES SIZE                   int8 rows [V, D] and a float32 scale for each
    program OFFSET SIZE                                 a .pte without constants
    method PROGRAM COUNT                                a program with constants of its own, COUNT records below it:
    data KEY OFFSET SIZE [DIMENSION ...]                  what the program calls KEY; of float32 the shape
    cache KV_HEADS HEAD_DIM WINDOW                      keys and values; WINDOW 0: of all tokens
    latents LATENT SHARED                               a cache of latents and of the keys that all heads share
    mixer METHOD PARALLEL                               x, residual, states -> x, states
    rope TURNED [DIVISOR ...]                           of the next attention: the numbers of a head that turn, 0: all,
                                                        and what the angles of their pairs are divided by
    longrope TURNED TOKENS OFFSET OFFSET                the same with divisors in sections, of contexts of up to TOKENS
                                                        and of longer ones
    softcap BOUND                                       of the next attention's scores, or of the logits
    attention METHOD PARALLEL CACHE THETA SINKS         the same, its kernel reads CACHE; SINKS: offset or -
    ffn METHOD                                          x -> x
    scores SOFTMAX NORMED                               of the next mixture, each 0 or 1; without it 0 1
    moe METHOD TOP_K EXPERTS BIAS                       x -> norm(x), logits; then the chosen of the next EXPERTS
    head METHOD                                         x of the last token -> logits

Each program is stored once, however many layers run it, and a layer that shares another's weights runs its methods with
a state of its own. Constants are stored as XNNPACK wants them: 4-bit weights as packed nibbles, group scales as
bfloat16, everything else float32. Nothing in a program depends on weights or context length, so programs are lowered
once per shape (`templates`). Programs come first of all sections, so a file of random weights is known by its beginning
and by how the rest is drawn: its recipe (`recipe`).
"""
