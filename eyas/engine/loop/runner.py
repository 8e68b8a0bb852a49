"""The interface of the runners that compute steps: launch, and land what was launched.

A runner on a device has launched when it returns, and its flight waits for the device when it lands. The
plain runner, the specification, has computed everything when it returns: its flight only hands it over.
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
        """Launches what waits for the tokens of the step before, if anything does.

        Called once, after those are committed.
        """
        ...

    def land(self) -> SequenceOf[StepResult]:
        """Gives each work its result.

        Called once, when the step is complete, after all flights before it. Rows are where they belong.
        """
        ...


class StepRunner(Protocol):
    """Computes steps, in the order of their launches.

    `draft_wait_s`: how long the steps that are launched next may wait for drafts that come to them by
    themselves. The step loop sets it before each launch.
    """

    draft_wait_s: float

    @property
    def drafts(self) -> bool:
        """True if its steps draft by themselves, draft KV under the target's page numbers."""
        ...

    @property
    def ahead(self) -> bool:
        """True if a step may be launched while the one before it is in flight."""
        ...

    def launch(self, works: SequenceOf[SequenceWork]) -> InFlightStep:
        """Starts a step of these works, which come after all steps launched before."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page in every pool, after the steps launched before and before those after."""
        ...

    def copy_state(self, source: int, target: int) -> None:
        """Copies a slot of states, in the same order; only where there are some."""
        ...

    def wait(self) -> None:
        """Waits until all that was launched has been done, copies of pages too."""
        ...

    def close(self) -> bool:
        """Closes the runner after the last step.

        False: the device may hang, so nothing waits for it any more.
        """
        ...
