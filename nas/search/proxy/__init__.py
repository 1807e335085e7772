"""Short training of narrow proxies, and the quality number made of it."""
