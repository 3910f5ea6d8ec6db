"""The reference model: a snapshot of the model in training that its activations are compared with.

It is in the fastest number format that is exact enough. All that a controller uses of it::

    reference = Reference(taps, precision="auto", device="cpu", fidelity_share=0.1)
    reference.refresh(model, batch, {"layer1": 3e-4})  # now, and after every so many evaluations
    activation = reference.activation("layer1", batch)
    events = reference.take_events()
    reference.precision, reference.builder
    reference.state_dict(), reference.load_state_dict(state, model)
"""

from egeria.reference.reference import Reference

__all__ = ["Reference"]
