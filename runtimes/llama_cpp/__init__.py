"""llama.cpp: export of layouts as GGUF files, builds, the runner, and the equivalence gate."""
