"""Models as they are loaded: weights, adapters, activations, compiler."""
