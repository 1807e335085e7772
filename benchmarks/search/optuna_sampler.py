"""Optuna's samplers as proposers, to compare with: NSGA-II, TPE, Gaussian processes, and any other.

A layout is encoded as a fixed number of parameters, since Optuna's samplers handle conditional ones separately or not
at all: its frame's choices, its depth, and kind and variant of mixer and feed-forward for as many layers as the space
allows. Decoded layouts are repaired by `Sampler.settle`, as edited ones are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nas.core.layout import Layout
from nas.core.model_choices import Frame, choice_of
from nas.search.proposers.api import Observation, Proposal
from nas.search.proposers.editable_layout import Draft, resample
from nas.search.proposers.layout_list import Listed
from nas.search.proposers.mutation import draft_of
from nas.search.proposers.sampling import Rng, Sampler
from nas.search.proposers.state import BaseProposer, Child

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler

SamplerFactory = Callable[[int], "BaseSampler"]
"""Seed -> new sampler; called for each proposal, so that a proposal depends on the log alone."""
_REPEATS = 3
"""Known layouts that the sampler may propose in a row before a random one is taken."""


class Encoding:
    """Layouts of a space as Optuna's parameters, and back.

    Args:
        sampler: of the space.
    """

    def __init__(self, sampler: Sampler) -> None:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        self._sampler = sampler
        space = sampler.space
        depths = [int(depth) for depth in space.model.depth.choices]
        self._slots = max(depths)
        self._mixers = list(space.mixer_choices)
        self._ffn = [block.kind for block in space.ffn]
        self._axes = [index for index, axis in enumerate(sampler.frames.axes) if len(axis) > 1]
        self.distributions: dict[str, BaseDistribution] = {"depth": IntDistribution(min(depths), max(depths))}
        for index in self._axes:
            self.distributions[f"frame{index}"] = CategoricalDistribution(range(len(sampler.frames.axes[index])))
        for slot in range(self._slots):
            for role, kinds in (("mixer", self._mixers), ("ffn", self._ffn)):
                if len(kinds) > 1:
                    self.distributions[f"{role}{slot}"] = CategoricalDistribution(kinds)
                self.distributions[f"{role}{slot}.variant"] = FloatDistribution(0.0, 1.0)

    def decode(self, params: Mapping[str, Any], rng: Rng) -> Layout | None:
        """Returns the layout of parameters, settled; None where there is none."""
        frames = self._sampler.frames
        frame = frames.at([int(params.get(f"frame{index}", 0)) for index in range(len(frames.axes))])
        depth = int(params["depth"])
        length = min(frame.period, depth) or depth
        genes = []
        for slot in range(length):
            pair = [self._half(params, role, slot, frame) for role in ("mixer", "ffn")]
            if None in pair:
                return None
            genes.append((pair[0], pair[1]))
        return self._sampler.settle(Draft(frame, depth, tuple(genes)), rng)

    def encode(self, layout: Layout, rng: Rng) -> dict[str, Any]:
        """Returns the parameters of a layout of the space; those without effect are random, or repeat."""
        frames, draft = self._sampler.frames, draft_of(layout, self._sampler, rng)
        picks = frames.picks(draft.frame)
        params: dict[str, Any] = {"depth": layout.depth} | {f"frame{index}": picks[index] for index in self._axes}
        genes = draft.genes + resample(draft.genes, self._slots)[len(draft.genes) :]
        for slot, gene in enumerate(genes):
            for role, half in zip(("mixer", "ffn"), gene, strict=True):
                options = frames.halves(draft.frame, choice_of(half))
                if f"{role}{slot}" in self.distributions:
                    params[f"{role}{slot}"] = choice_of(half)
                params[f"{role}{slot}.variant"] = (options.index(half) + 0.5) / len(options)
        return params

    def _half(self, params: Mapping[str, Any], role: str, slot: int, frame: Frame) -> Any:
        kinds = self._mixers if role == "mixer" else self._ffn
        kind = frame.ffn if role == "ffn" and frame.ffn else params.get(f"{role}{slot}", kinds[0])
        options = self._sampler.frames.halves(frame, str(kind))
        return options[min(int(params[f"{role}{slot}.variant"] * len(options)), len(options) - 1)] if options else None


class ListEncoding:
    """Layouts of a space that lists them as Optuna's parameters: their places, one number from 0 to 1 for each axis.

    Args:
        listed: the layouts.
        is_taken: whether a layout was proposed or observed; such layouts are not decoded.
    """

    def __init__(self, listed: Listed, is_taken: Callable[[Layout], bool]) -> None:
        from optuna.distributions import FloatDistribution

        self._listed, self._is_taken = listed, is_taken
        self.distributions: dict[str, BaseDistribution] = {
            f"place{axis}": FloatDistribution(0.0, 1.0) for axis in range(listed.positions.shape[1])
        }

    def decode(self, params: Mapping[str, Any], rng: Rng) -> Layout | None:
        """Returns the nearest layout that is not taken; None where all are."""
        return self._listed.nearest(np.array([params[name] for name in self.distributions]), self._is_taken)

    def encode(self, layout: Layout, rng: Rng) -> dict[str, Any]:
        """Returns the place of a layout of the list."""
        return dict(zip(self.distributions, self._listed.position(layout).tolist(), strict=True))


class OptunaSearch(BaseProposer):
    """Asks an Optuna sampler, and reports objectives and constraints to it (`trial.set_constraint`).

    Optuna needs a value of every objective: a layout over a budget gets the worst quality seen so far, and its broken
    constraint. Heuristic seeds come first, as with our own proposers; before them, trials of earlier studies are
    reported. The state also keeps the order of reports and proposals, since evolution in generations depends on it.

    Args:
        sampler: of the space.
        seed: of all random choices.
        factory: of the Optuna sampler.
        one_constraint: report the worst excess over any budget instead of one constraint per budget. Samplers that
            read constraints by position need this, because a layout that breaks a budget is not measured further.
    """

    def __init__(self, sampler: Sampler, seed: int, factory: SamplerFactory, *, one_constraint: bool = False) -> None:
        super().__init__(sampler, seed)
        self._factory = factory
        self._one_constraint = one_constraint
        self._encoding = Encoding(sampler) if sampler.listed is None else ListEncoding(sampler.listed, self.log.knows)
        self._study: Study | None = None
        self._trials: dict[str, Trial] = {}
        self._reports: dict[str, Observation] = {}
        self._trail: list[tuple[list[str], dict[str, Any]]] = []

    def state(self) -> dict[str, Any]:
        """Returns the log, and for each proposal its parameters and the layouts reported since the one before."""
        return super().state() | {"trail": [[ids, params] for ids, params in self._trail]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `Proposer.restore`; without parameters, each layout counts as reported before the next proposal."""
        super().restore(state)
        self._study, self._trials, self._reports, self._trail = None, {}, {}, []
        layouts = [proposal.layout.id for proposal in self.log.proposals]
        in_turn = [(before, None) for before in [[], *([layout] for layout in layouts[:-1])]]
        for proposal, (ids, params) in zip(self.log.proposals, state.get("trail", in_turn), strict=False):
            for layout_id in ids:
                if layout_id in self.log.observations:
                    self._report(self.log.observations[layout_id])
            self._trail.append((list(ids), self._register(proposal, params)))

    def ask(self, count: int) -> list[Proposal]:
        proposals = []
        for _ in range(count):
            ids = self._sync()
            batch = super().ask(1)
            if not batch:
                break
            self._trail.append((ids, self._register(batch[0])))
            proposals += batch
        return proposals

    def propose(self, rng: Rng) -> Child | None:
        study = self._live()
        study.sampler = self._factory(int(rng.integers(1 << 31)))
        for _ in range(_REPEATS):
            trial = study.ask(self._encoding.distributions)
            layout = self._encoding.decode(trial.params, rng)
            if layout is not None and not self.log.knows(layout):
                self._trials[layout.id] = trial
                return layout, "optuna", ()
            study.tell(trial, state=_failed())
        return self.sampler.draw(rng), "random", ()

    def _live(self) -> Study:
        if self._study is None:
            import optuna

            optuna.logging.set_verbosity(optuna.logging.WARNING)
            directions = [optuna.study.StudyDirection.MINIMIZE] * len(self.log.objectives)
            self._study = optuna.create_study(directions=directions, sampler=self._factory(self.log.seed))
            for _, observation in sorted(self.log.earlier.items()):
                self._report(observation)
            # They are of another study: this one may propose them and report its own results.
            self._trials.clear()
            self._reports.clear()
        return self._study

    def _register(self, proposal: Proposal, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the parameters of a proposal's trial; creates the trial where Optuna did not propose it."""
        if proposal.layout.id not in self._trials:
            study, rng = self._live(), np.random.default_rng([self.log.seed, proposal.number, 1])
            study.sampler = self._factory(int(rng.integers(1 << 31)))
            study.enqueue_trial(params or self._encoding.encode(proposal.layout, rng))
            self._trials[proposal.layout.id] = study.ask(self._encoding.distributions)
        return self._trials[proposal.layout.id].params

    def _sync(self) -> list[str]:
        """Reports new final observations to Optuna in the order of proposals; returns their layouts' ids."""
        numbers = {proposal.layout.id: proposal.number for proposal in self.log.proposals}
        fresh = [
            observation
            for observation in self.log.sorted_observations()
            if observation.status != "running" and observation.layout.id not in self._reports
        ]
        fresh.sort(key=lambda observation: (numbers.get(observation.layout.id, -1), observation.layout.id))
        for observation in fresh:
            self._report(observation)
        return [observation.layout.id for observation in fresh]

    def _report(self, observation: Observation) -> None:
        """Reports one observation to Optuna; for a layout that was not proposed, a trial is created."""
        study = self._live()
        self._reports[observation.layout.id] = observation
        trial = self._trials.get(observation.layout.id)
        if trial is None:
            if not self.sampler.admits(observation.layout):
                return
            study.enqueue_trial(self._encoding.encode(observation.layout, np.random.default_rng([self.log.seed, 2])))
            trial = study.ask(self._encoding.distributions)
            self._trials[observation.layout.id] = trial
        for name, value in self._constraints(observation).items():
            trial.set_constraint(name, value)
        values = self._values(observation)
        if values is None:
            study.tell(trial, state=_failed())
        else:
            study.tell(trial, values)

    def _constraints(self, observation: Observation) -> Mapping[str, float]:
        """Returns constraints by budget; or the worst, 0 where none is known: references are exempt."""
        if self._one_constraint:
            return {"budgets": max(observation.constraints.values(), default=0.0)}
        return observation.constraints

    def _values(self, observation: Observation) -> list[float] | None:
        """Returns all objectives, missing ones as the worst so far; None for layouts that failed or were stopped."""
        if observation.status not in ("complete", "infeasible"):
            return None
        values = []
        for name in self.log.objectives:
            column = [other.objectives[name] for other in self._reports.values() if name in other.objectives]
            values.append(observation.objectives.get(name, max(column, default=0.0)))
        return values


def nsga2(sampler: Sampler, seed: int) -> OptunaSearch:
    """Returns NSGA-II (Deb et al. 2002), with a population that suits a few hundred evaluations."""

    def factory(seed: int) -> BaseSampler:
        from optuna.samplers import NSGAIISampler

        return NSGAIISampler(population_size=20, seed=seed)

    return OptunaSearch(sampler, seed, factory)


def tpe(sampler: Sampler, seed: int) -> OptunaSearch:
    """Returns tree-structured Parzen estimators for several objectives (Ozaki et al. 2022)."""

    def factory(seed: int) -> BaseSampler:
        from optuna.samplers import TPESampler

        return TPESampler(seed=seed)

    return OptunaSearch(sampler, seed, factory)


def gp(sampler: Sampler, seed: int) -> OptunaSearch:
    """Returns expected hypervolume improvement on Gaussian processes; needs torch, and seconds per proposal."""

    def factory(seed: int) -> BaseSampler:
        from optuna.samplers import GPSampler

        return GPSampler(seed=seed)

    return OptunaSearch(sampler, seed, factory, one_constraint=True)


def _failed() -> Any:
    from optuna.trial import TrialState

    return TrialState.FAIL
