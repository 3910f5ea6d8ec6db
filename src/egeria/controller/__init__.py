"""Who evaluates: takes activations of the training model, gives back readings of plasticity."""
