"""What is tried: scenarios, recipes, constraints and the presets that choose them."""
