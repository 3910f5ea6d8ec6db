"""Analysis of plain training afterwards: when did each layer module become what it is in the trained network?

The paper's figure 1 by `egeria.plasticity.Pwcca`, and beside it what can be known without the trained network: how much
of the similarities between samples changed since the checkpoint before, which is plasticity at that distance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.proving.comparing.statistics import rank_correlations
from benchmarks.proving.errors import RefusedError
from benchmarks.proving.running import checkpoint
from benchmarks.proving.running.checkpoint import UnusableError
from benchmarks.proving.running.runfile import RunFile
from benchmarks.proving.studies.oracle import Survey
from benchmarks.workloads.workload import Training
from egeria import tree
from egeria.plasticity import Pwcca, pool_map, relative_sp_loss

SAMPLES_PER_NEURON = 60
"""That are looked at, drawn from all batches; `Pwcca` asks for 50."""
MOST_NEURONS = 1024  # of a layer module that is looked at: more take gigabytes
MOST_BATCHES = 32
"""That are run: few samples of many pictures say more than many of few, which are alike."""
NUM_COMPARED, LARGEST_MAP = 256, 8  # samples for plasticity, and the side that feature maps are pooled to
STABLE = 0.01
"""Change of the distance in a sixteenth of the training up to which a layer module counts as stable, as in figure 1."""
STRETCH = 1 / 16
SLOPE = 0.2
"""Share of a module's largest pace so far under which it counts as stationary: the paper's T."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was found of one layer module at one checkpoint."""

    module: int
    share: float
    """Of the training that was done."""
    distance: float | None
    """PWCCA distance to the trained network, 0 to 1; None where there are too few samples for its neurons."""
    moved: float | None
    """Share of the similarities between samples that changed since the checkpoint before; None at the first."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """All readings of one run, by layer module and then by time."""

    names: list[str]
    weights: list[float]
    """Share of an iteration that freezing each layer module saves, front to back, the last one left out."""
    readings: list[list[Reading]]

    def stable(self, module: int) -> list[bool]:
        """Return for each stretch between two checkpoints whether the module was stable in it, by its distance."""
        return [pace is not None and pace * STRETCH <= STABLE for pace in self._paces_of_distance(module)]

    def stationary(self, module: int) -> list[bool]:
        """Return for each stretch whether the module was stationary in it, by what can be known in the training.

        Nothing is of the first one: what a network puts out before it is trained is no measure.
        """
        paces = [pace or 0.0 for pace in self._paces_of_similarities(module)]
        return [place > 0 and pace <= SLOPE * max(paces[1 : place + 1]) for place, pace in enumerate(paces)]

    @property
    def unknown(self) -> list[str]:
        """Names of the layer modules that may freeze and whose distance is not known: they count as not stable."""
        names = self.names[: len(self.weights)]
        return [name for name, own in zip(names, self.readings, strict=False) if own[-1].distance is None]

    def _paces_of_distance(self, module: int) -> list[float | None]:
        distances = [reading.distance for reading in self.readings[module]]
        return [
            None if before is None or after is None else abs(after - before) / length
            for (before, after), length in zip(itertools.pairwise(distances), self.lengths, strict=True)
        ]

    def _paces_of_similarities(self, module: int) -> list[float | None]:
        moved = [reading.moved for reading in self.readings[module][1:]]
        return [None if part is None else part / length for part, length in zip(moved, self.lengths, strict=True)]

    @property
    def lengths(self) -> list[float]:
        """Shares of the training between checkpoints."""
        return [after.share - before.share for before, after in itertools.pairwise(self.readings[0])]

    def front(self, verdict: Callable[[int], list[bool]]) -> list[int]:
        """Return how many front layer modules could rest in each stretch: as many as are at rest without a gap."""
        columns = zip(*(verdict(module) for module in range(len(self.weights))), strict=True)
        return [len(list(itertools.takewhile(bool, column))) for column in columns]

    def saving(self, verdict: Callable[[int], list[bool]], *, in_any_order: bool = False) -> float:
        """Return the share of the training's time that freezing what is at rest would save, the learning apart."""
        depths = self.front(verdict)
        saved = 0.0
        for place, length in enumerate(self.lengths):
            at_rest = (
                (weight for module, weight in enumerate(self.weights) if verdict(module)[place])
                if in_any_order
                else self.weights[: depths[place]]
            )
            saved += length * math.fsum(at_rest)
        return saved

    def agreement(self) -> float | None:
        """Return the rank correlation of both paces over stretches behind the first, ranked within each module.

        No interval: stretches that follow each other are no independent points.
        """
        moved, changed, groups = [], [], []
        for module in range(len(self.readings)):
            paces = zip(self._paces_of_similarities(module), self._paces_of_distance(module), strict=True)
            for similarities, distance in list(paces)[1:]:
                if similarities is not None and distance is not None:
                    moved.append(similarities)
                    changed.append(distance)
                    groups.append(module)
        return rank_correlations({"moved": moved}, changed, groups, within=True)["moved"][0].value if groups else None

    def delay(self, module: int) -> float | None:
        """Return how much later, as a share of the training, the module comes to rest for good by what can be known."""
        ends = [_rests_from(verdict(module), self.readings[module]) for verdict in (self.stable, self.stationary)]
        return None if ends[0] is None or ends[1] is None else ends[1] - ends[0]


def analyse(training: Training, run: RunFile, directory: Path, known: Survey) -> Analysis:
    """Compare each kept checkpoint of a run with its last.

    Args:
        training: as the run began.
        run: finished, of plain training, with its epochs kept.
        directory: of the run.
        known: of the network.

    Raises:
        RefusedError: checkpoints were not kept, or not the last.
    """
    num_epochs = run.recipe["num_epochs"]
    states = dict(_states(directory, num_epochs))
    if num_epochs not in states:
        raise RefusedError(
            f"{run.name} has no checkpoint of its last epoch in {directory / checkpoint.KEPT_NAME}. Make it again, in "
            f"another --results."
        )
    probe = Probe(training, [module["tap"] for module in known.modules])
    begun = {name: values.clone() for name, values in training.model.state_dict().items()}
    trained = probe.read(states[num_epochs])
    readings: list[list[Reading]] = [[] for _ in known.modules]
    before: list[_Activations] = []
    for epoch, state in [(0, begun), *sorted(states.items())]:
        found = probe.read(state)
        for module, own in enumerate(found):
            moved = relative_sp_loss(own.rows, before[module].rows) if before else None
            distance = own.distance(trained[module])
            readings[module].append(
                Reading(
                    module=module,
                    share=epoch / num_epochs,
                    distance=distance,
                    moved=None if moved is None else float(moved),
                )
            )
        before = found
    return Analysis(names=[module["name"] for module in known.modules], weights=known.weights, readings=readings)


def _states(directory: Path, num_epochs: int) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
    for epoch in range(1, num_epochs + 1):
        try:
            found = checkpoint.read(checkpoint.kept(directory, epoch))
        except UnusableError:
            continue
        if found is not None:
            yield epoch, found.training["model"]


@dataclass
class _Activations:
    """Of one layer module: samples by neurons, and some samples whole."""

    samples: list[Tensor]
    """[N, D] for each batch; none where there are too many neurons."""
    rows: Tensor
    """[B, ...]."""

    def distance(self, trained: _Activations) -> float | None:
        found = Pwcca()
        try:
            for own, other in zip(self.samples, trained.samples, strict=True):
                found.add(own, other)
            return found.distance()
        except ValueError:  # too few samples, or a layer that is dead
            return None


class Probe:
    """Reads activations of layer modules for the same batches, in inference mode."""

    def __init__(self, training: Training, taps: Sequence[str]) -> None:
        self._training, self._taps = training, taps
        self._batches = [batch for batch, _ in zip(training.loader, range(MOST_BATCHES), strict=False)]
        self._batch: Any = None
        """The one that runs."""

    def read(self, state: Mapping[str, Tensor]) -> list[_Activations]:
        """Return what each layer module puts out with these weights."""
        model = self._training.model
        model.load_state_dict(state)
        found: dict[int, _Activations] = {}
        with self._watched(found), torch.no_grad():
            model.eval()
            for batch in self._batches:
                self._batch = batch
                self._training.loss(model, batch)
            model.train()
        return [found[place] for place in range(len(self._taps))]

    @contextmanager
    def _watched(self, found: dict[int, _Activations]) -> Iterator[None]:
        def make(place: int) -> Callable[[nn.Module, Any, Any], None]:
            def note(_module: nn.Module, _args: Any, output: Any) -> None:
                activation = tree.first_activation(output)
                assert activation is not None, "layer modules put out tensors"
                self._note(found, place, activation)

            return note

        handles = [
            self._training.model.get_submodule(tap).register_forward_hook(make(place))
            for place, tap in enumerate(self._taps)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, found: dict[int, _Activations], place: int, activation: Tensor) -> None:
        if place not in found:
            rows = pool_map(activation[:NUM_COMPARED].float(), LARGEST_MAP)
            found[place] = _Activations(samples=[], rows=rows)
        maps = activation.movedim(1, -1) if activation.dim() == 4 else activation
        samples, num_neurons = maps[self._mask(maps)], maps.shape[-1]
        if num_neurons <= MOST_NEURONS:
            drawing = torch.Generator().manual_seed(len(found[place].samples))  # the same at each checkpoint
            most = math.ceil(SAMPLES_PER_NEURON * num_neurons / len(self._batches))
            chosen = torch.randperm(len(samples), generator=drawing)[:most]
            found[place].samples.append(samples[chosen.to(samples.device)].float())

    def _mask(self, maps: Tensor) -> Tensor:
        """Return which positions [B, ...] are samples: all, but of texts those that are no padding."""
        parts = self._batch.items() if isinstance(self._batch, Mapping) else ()
        for name, part in parts:
            if "mask" in name and part.shape == maps.shape[:-1]:
                return part.bool().to(maps.device)
        return torch.ones(maps.shape[:-1], dtype=torch.bool, device=maps.device)


def _rests_from(verdict: Sequence[bool], readings: Sequence[Reading]) -> float | None:
    """Return the share of the training from which on a module is at rest to the end; None where it never is."""
    at_rest = len(list(itertools.takewhile(bool, reversed(verdict))))
    return readings[len(readings) - 1 - at_rest].share if at_rest else None
