"""The service: one study's life, from a space to a front, over the store, Ray and the device jobs."""
