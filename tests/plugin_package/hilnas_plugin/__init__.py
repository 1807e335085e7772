"""Two block kinds for hilnas."""
