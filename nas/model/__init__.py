"""What a layout is made of: block kinds (arithmetic, without torch) and their torch modules."""
