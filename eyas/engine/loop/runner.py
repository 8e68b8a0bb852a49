"""The interface of the runners that compute steps: a step is launched, and later lands with its results.

`launch` of a device's runner returns before the step is computed, and `land` waits for the device. The plain
runner, which is the specification, computes the whole step in `launch`.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.batch.step_result import StepResult


class InFlightStep(Protocol):
    """A step that was launched, at `launched` (monotonic seconds). Steps of one `shape` take equal times."""

    @property
    def works(self) -> SequenceOf[SequenceWork]:
        """The work that the step computes."""
        ...

    @property
    def launched(self) -> float:
        """The time of its launch, in monotonic seconds."""
        ...

    @property
    def shape(self) -> Hashable:
        """Equal for steps that take equal times."""
        ...

    @property
    def depth(self) -> int | None:
        """The depth of the drafts that its rounds verify and make; None: its runner makes none."""
        ...

    @property
    def over(self) -> bool:
        """True if it has been computed; does not wait."""
        ...

    def complete(self) -> None:
        """Launches the part of the step, if any, that needs the previous step's tokens.

        Called once, after those tokens are committed.
        """
        ...

    def land(self) -> SequenceOf[StepResult]:
        """Waits for the step, and returns one result per work; the KV rows of accepted drafts are in place.

        Called once, after `complete`, in the order of the launches.
        """
        ...


class StepRunner(Protocol):
    """Computes steps in the order of their launches.

    `draft_wait_s`: how long the next step may wait on the device for drafts of a remote drafter, in seconds.
    The step loop sets it before each launch.
    """

    draft_wait_s: float

    @property
    def drafts(self) -> bool:
        """True if its steps run a draft head, whose KV pages have the target's page numbers."""
        ...

    @property
    def ahead(self) -> bool:
        """True if a step may be launched while the previous one is in flight."""
        ...

    def launch(self, works: SequenceOf[SequenceWork]) -> InFlightStep:
        """Launches a step of these works, behind all steps launched before."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page in every pool, after the steps launched before and before those after."""
        ...

    def copy_state(self, source: int, target: int) -> None:
        """Copies a slot of recurrent states, in the same order; only for models that have states."""
        ...

    def wait(self) -> None:
        """Waits until all launched steps and copies have finished."""
        ...

    def close(self) -> bool:
        """Closes the runner after the last step. False if the device does not respond: do not wait for it."""
        ...
