"""Two block kinds for hilnas: S4D, a mixer, and GeGLU, a feed-forward."""
