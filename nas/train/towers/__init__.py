"""Language models with an encoder of images or sound in front, and those that speak."""
