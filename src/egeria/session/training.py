"""What the user trains, as `attach` was given it, and the watch over its first step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from egeria.config import Config
from egeria.distributed import ddp, fsdp2
from egeria.distributed.ranks import is_initialized, together, world_size
from egeria.errors import StateError, UnsupportedModelError
from egeria.journal import Recorder
from egeria.model.compile import Compilation
from egeria.model.cut import Cut, LayerModule, make_modules, read_graph
from egeria.model.group import find_pieces, parent_of
from egeria.model.hooks import Hook, sweep
from egeria.model.pretrained import is_mostly_trained, settings_of_cut
from egeria.model.watch import Watch
from egeria.policy import UnfreezeRule


def facts_of(model: nn.Module, optimizers: Sequence[Any]) -> dict[str, Any]:
    """Return what `draw_up` takes beside the layer modules: `adaptive` and `num_parameters`."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    adaptive = all("betas" in group for group in groups)  # as those of Adam and its kin
    return {"adaptive": adaptive, "num_parameters": sum(p.numel() for p in model.parameters())}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The model, its optimizers, and where events are noted."""

    model: nn.Module
    """Without wrappers."""
    given: nn.Module
    """As `attach` was given it: maybe compiled, or in DistributedDataParallel."""
    optimizers: Sequence[Any]
    config: Config
    rule: UnfreezeRule
    rule_name: str
    total_steps: int | None
    recorder: Recorder
    compilation: Compilation | None = None
    """What compiling costs; None where nothing is compiled."""
    norms: dict[str, bool] = field(default_factory=dict)
    """For each normalisation layer whether it came trained; of a resumed run, when that began."""

    @property
    def policy_name(self) -> str:
        """The name of the policy, or of what makes it."""
        name = self.config.policy.name
        return name if isinstance(name, str) else getattr(name, "__qualname__", type(name).__name__)

    @property
    def is_pretrained(self) -> bool:
        """Whether the weights come from an earlier training, most of them at least."""
        given = self.config.policy.pretrained
        return is_mostly_trained(self.norms) if given == "auto" else bool(given)

    @property
    def device_type(self) -> str:
        """The type of device that the model is on."""
        return next((entry.device.type for entry in self.model.parameters()), "cpu")

    def learning_rate(self, modules: Sequence[LayerModule]) -> float:
        """Return the largest rate of the groups that train what may freeze, else of all groups."""
        named = self.named()
        own = {id(named.get(name)) for module in modules[:-1] for name in module.parameters}
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        fitting = [group for group in groups if any(id(entry) in own for entry in group["params"])]
        return max(float(group.get("lr") or 0.0) for group in fitting or groups)

    def named(self) -> dict[str, nn.Parameter]:
        """Return all parameters by all of their names."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    def check_state(self, policy_name: str, parameters: list[str], known: list[str]) -> None:
        """Raise StateError if a saved state is of another policy or of another model."""
        if policy_name != self.policy_name:
            raise StateError(
                f"A run goes on under the policy that it began with, {policy_name!r}, found "
                f"{self.policy_name!r}. Give policy={policy_name!r}, or do not load the state."
            )
        own = self.named()
        missing = set(parameters) - own.keys()
        added = {name for name, entry in own.items() if entry.requires_grad}.difference(known)
        if missing or (parameters and added):
            has = "has" if missing else "does not have"
            raise StateError(
                f"A run's state fits its own model, found that of another model, which {has} "
                f"{', '.join(sorted(missing or added)[:3])}. Attach the model it was saved from."
            )


class FreezingEndedError(Exception):
    """Nothing may be frozen any more, for a reason that is no fault of ours."""


class FirstStep:
    """Watches the user's own passes from `attach` to the first update, and cuts the model then.

    With several optimizers the cut comes when each of them has come to its first step: only then
    is it known which parameters train. A compiled model runs eagerly until then, since hooks do not
    fire in compiled code.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._pieces = find_pieces(training.model, training.config.modules.pattern)
        self.watch = Watch(training.model, self._pieces)
        self.wrapper = ddp.find_wrapper(training.given)
        """DistributedDataParallel around the model; None where there is none, or not yet."""
        self.dropped: list[str] = []
        """Blocks that did not run, although others beside them did, as under LayerDrop."""
        self._seen: set[str] = set()
        self._to_come = set(range(len(training.optimizers)))

    def open(self) -> None:
        """Begin to watch."""
        self.watch.open()
        model, compilation = self._training.model, self._training.compilation
        if self.wrapper is None and is_initialized():
            model.register_forward_pre_hook(Hook(self, FirstStep._look_for_wrapper))
        if compilation is not None:
            compilation.wait()

    def close(self) -> None:
        """Take the hooks off."""
        self.watch.close()
        sweep(self._training.model, self)

    def comes_to(self, number: int) -> bool:
        """Note what has a gradient at an optimizer's first step; return whether it was the last."""
        if number in self._to_come:
            self._to_come.discard(number)
            groups = self._training.optimizers[number].param_groups
            own = {id(entry) for group in groups for entry in group["params"]}
            for name, entry in self._training.model.named_parameters():
                if id(entry) in own and entry.grad is not None:
                    self._seen.add(name)
        return not self._to_come

    def cut(self) -> tuple[Cut, str]:
        """Cut the model, alike on all ranks; return the cut, and why nothing can freeze, if so."""
        training = self._training
        # by what ran on each of them, in the order of the first
        views = together(lambda: (list(self.watch.order), self._trained()))
        order = [name for name in views[0][0] if all(name in view[0] for view in views)]
        seen = set.intersection(*(set(view[1]) for view in views))
        self.dropped = self._find_dropped(order)
        given, is_pretrained = asdict(training.config.modules), training.is_pretrained
        settings = settings_of_cut(given, is_pretrained=is_pretrained)

        def read() -> Cut:
            if self.watch.failure:
                raise UnsupportedModelError(self.watch.failure)
            model, watch = training.model, self.watch
            modules = make_modules(model, watch=watch, order=order, seen=seen, **settings)
            groups = [group for o in training.optimizers for group in o.param_groups]
            trained = {entry for group in groups for entry in group["params"]}
            return read_graph(model, modules, watch, trained)

        cut = Cut.combine(together(read))
        is_sharded = fsdp2.is_sharded(training.model)
        reason = "" if is_sharded or world_size() == 1 else ddp.refuse(self.wrapper) or ""
        if not reason and sum(cut.trainable) < 2:
            reason = "fewer than two layer modules received a gradient in the first step"
        return cut, next(filter(None, together(lambda: reason)), "")

    def _look_for_wrapper(self, model: nn.Module, *_: Any) -> None:
        self.wrapper = self.wrapper or ddp.find_wrapper(model)

    def _find_dropped(self, order: Collection[str]) -> list[str]:
        found = [piece for piece in self._pieces if piece.role == "block"]
        blocks = {piece.name: (parent_of(piece.name), type(piece.module)) for piece in found}
        ran = {kind for name, kind in blocks.items() if name in order}
        return [name for name, kind in blocks.items() if name not in order and kind in ran]

    def _trained(self) -> set[str]:
        """Return the names of the parameters that received a gradient."""
        if self._seen:
            return self._seen
        # An optimizer without hooks: the loop may have set the gradients to None by now.
        model, order = self._training.model, self.watch.order
        ran = [model.get_submodule(piece.name) for piece in self._pieces if piece.name in order]
        own = {id(entry) for part in ran for entry in part.parameters() if entry.requires_grad}
        return {name for name, entry in model.named_parameters() if id(entry) in own}
