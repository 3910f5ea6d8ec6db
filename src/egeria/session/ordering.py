"""Cutting the model again once its first forward pass has shown in which order it runs."""

from __future__ import annotations

from egeria.events import ModulesOrdered
from egeria.layers.modules import LayerModule
from egeria.session.applier import HarmfulFreezeError
from egeria.session.engine import Engine, EngineBuilder
from egeria.session.recorder import Recorder


class Ordering:
    """Watches the first forward pass, and makes the parts of a session anew where its order is another.

    Args:
        builder: makes the parts.
        modules: the layer modules in the order of their definition.
        recorder: where a new cut is told.
    """

    def __init__(self, builder: EngineBuilder, modules: tuple[LayerModule, ...], recorder: Recorder) -> None:
        self._builder = builder
        self._modules = modules
        self._recorder = recorder
        self._watched = builder.watch_order(modules)
        self.is_open = True
        """Whether the order is still to be seen."""

    def begin_again(self) -> None:
        """Watch by other means: calls turned out to be compiled."""
        if self.is_open:
            self._watched.close()
            self._watched = self._builder.watch_order(self._modules)

    def settle(self, engine: Engine, step: int) -> Engine:
        """Return the parts to go on with; the same where nothing was seen yet, or the order is as expected.

        Raises:
            HarmfulFreezeError: no gradient would come through a frozen layer.
        """
        watched = self._watched.record()
        if watched is None:
            return engine
        self.is_open = False
        if watched.without_grad:
            raise HarmfulFreezeError(
                f"{min(watched.without_grad)} runs under reentrant activation checkpointing, which loses every "
                f"gradient behind a frozen layer. Use torch.utils.checkpoint with use_reentrant=False"
            )
        modules = self._builder.parse(watched.order)
        found = self._builder.describe(modules, watched)
        if found != self._builder.describe(engine.modules):
            engine = self._builder.build(modules, watched)
            self._recorder.write(ModulesOrdered(step=step, **found))
        limit = modules[found["deepest_freeze"]]
        if limit.tap in watched.returned_to:
            reason = f"{limit.tap} is called again after layers behind it, so freezing it would save nothing"
            self._recorder.decline(f"freezing {limit.name} and what follows", reason)
        return engine

    def close(self) -> None:
        """Look no more."""
        self.is_open = False
        self._watched.close()
