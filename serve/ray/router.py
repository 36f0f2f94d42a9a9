"""Which replica gets a request: the one that had prompts with the same beginning, and so has their
keys and values."""

from hashlib import blake2b

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from eesd.runtime.request import Request

PREFIX_TOKENS = 64
"""Tokens that decide. Conversations and system prompts differ within so many, and their
continuations do not."""


class PrefixRouter(RequestRouter):  # type: ignore[misc] # Ray has no types here
    """Orders the replicas by a hash of the prompt's beginning and the replica's name (rendezvous
    hashing, Thaler 1996).

    Every router orders them alike without a common state, and a replica that comes or goes moves
    only the prompts that it gets or had. The first replica is passed over while it has ``slack``
    more requests than the least busy one. Ray's own router of this kind needs vLLM or SGLang.
    """

    def initialize_state(self, slack: int = 8) -> None:
        self._slack = slack

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All replicas; each is tried if those before it are full."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        request = pending_request.args[0] if pending_request and pending_request.args else None
        tokens = request.tokens if isinstance(request, Request) else ()
        prefix = ",".join(map(str, tokens[:PREFIX_TOKENS]))
        ranked = sorted(
            candidate_replicas, key=lambda replica: rank(prefix, replica.replica_id.unique_id)
        )
        waiting = {
            replica: self.replica_queue_len_cache.get(replica.replica_id) or 0 for replica in ranked
        }
        least = min(waiting.values(), default=0)
        # Sorting is stable: the order of the others stays.
        return [
            [replica]
            for replica in sorted(
                ranked, key=lambda replica: waiting[replica] >= least + self._slack
            )
        ]


def rank(prefix: str, replica: str) -> bytes:
    """Where a replica stands for the beginning of a prompt; the least is first."""
    return blake2b(f"{replica}:{prefix}".encode(), digest_size=8).digest()
