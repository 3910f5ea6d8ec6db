"""What tests and benchmarks share, open to users too: small models, a menagerie, scripted parts."""

from egeria.testing.menagerie import MENAGERIE, Specimen
from egeria.testing.scripted import ScriptedController

__all__ = ["MENAGERIE", "ScriptedController", "Specimen"]
