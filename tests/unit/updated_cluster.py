"""Engines that serve while their weights are updated."""

from __future__ import annotations

from loopback import Loopback

from eyas.common.weights import (
    CloseForWeights,
    CommitWeights,
    PrepareWeights,
    Running,
    Source,
    WeightsCommand,
    WeightsReply,
)

ANSWER_S = 30.0


class Cluster(Loopback):
    """Engines that are told of weights, and answer."""

    def begin(self, worker: str, command: WeightsCommand) -> int:
        return self.workers[worker].begin_change(command)

    def tell(self, worker: str, command: WeightsCommand) -> WeightsReply:
        return self.workers[worker].change(command, ANSWER_S)

    def targets(self) -> list[str]:
        return [name for name, worker in self.workers.items() if name != "draft"]

    def update(self, source: Source, generation: int = 1, *, whole: bool = True) -> str:
        """All steps on all workers; the digest."""
        digests = set()
        for worker in self.targets():
            reply = self.tell(worker, PrepareWeights(f"v{generation}", generation, source, whole))
            assert reply.failure is None, reply.failure
            digests.add(reply.digest)
        (digest,) = digests
        for command in (CloseForWeights(digest, Running.DRAIN, 20.0, 20.0), CommitWeights(digest)):
            for worker in self.targets():
                reply = self.tell(worker, command)
                assert reply.failure is None, reply.failure
        return digest
