"""Fine-tune PyTorch models in less time by freezing layers while they have little to learn.

Two lines in an ordinary loop::

    run = egeria.attach(model, optimizer, loader, scheduler=scheduler, total_steps=steps)
    ...                      # model(inputs), loss.backward(), optimizer.step()
    run.step(loss)           # after each optimizer step

Everything else (`Config`, `read_journal`, `report`) is there for when you want to know more.
"""

from egeria.advice import Advice, advise, plan
from egeria.cache import ShardSampler
from egeria.config import Config
from egeria.errors import ConfigError, EgeriaError, JournalError, StateError, UnsupportedModelError
from egeria.journal import Journal, read_journal
from egeria.report import report
from egeria.session import EgeriaWarning, Run, attach

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "Config",
    "ConfigError",
    "EgeriaError",
    "EgeriaWarning",
    "Journal",
    "JournalError",
    "Run",
    "ShardSampler",
    "StateError",
    "UnsupportedModelError",
    "advise",
    "attach",
    "plan",
    "read_journal",
    "report",
]
