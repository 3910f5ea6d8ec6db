"""What users need to test a policy or a controller of their own."""

from egeria.testing.scripted import ScriptedController

__all__ = ["ScriptedController"]
