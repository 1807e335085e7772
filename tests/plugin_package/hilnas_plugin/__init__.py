"""Two block kinds for hilnas: S4D, a mixer, and ReGLU, a feed-forward."""
