"""The reference model: a snapshot of the model in training that its activations are compared with.

::

    reference = Reference(taps, precision="auto", device="cpu")
    reference.refresh(model, batch, {"layer1": 3e-4})  # now, and after every so many evaluations
    activation = reference.activation("layer1", batch)
"""

from egeria.reference.reference import Reference

__all__ = ["Reference"]
