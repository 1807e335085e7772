"""What a layout is made of: block kinds (arithmetic, without torch), their torch modules, and the text they read."""
