"""Attaching to a training loop: the one place where decisions are applied.

`attach` checks what it is given and builds a `Run`; the run counts steps, asks the evaluator for
readings, hands them to the policy, and lets the applier carry out what the policy decides.
"""

from egeria.journal import EgeriaWarning
from egeria.session.attach import Run, attach

__all__ = ["EgeriaWarning", "Run", "attach"]
