"""Models as they are loaded: weights, adapters, attention, activations."""
