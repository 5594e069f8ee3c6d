"""A lock with a lease, as a model: whoever holds it loses it at some time, and nobody logs that."""

from collections.abc import Iterable, Sequence

from checker.trace import Event, TraceModel


class Lock(TraceModel):
    """The state: who holds the lock, and the newest token that it was given with."""

    name = "lock"

    def init(self, nodes: Sequence[str]) -> Iterable[tuple[str, int]]:
        return [("nobody", 0)]

    def next(self, state: tuple[str, int], event: Event) -> Iterable[tuple[str, int]]:
        holder, token = state
        if event.name == "acquired":
            return [(event.node, event["token"])] if holder == "nobody" and event["token"] > token else []
        return [("nobody", token)] if holder == event.node else []  # released

    def hidden(self, state: tuple[str, int]) -> Iterable[tuple[str, int]]:
        holder, token = state
        return [("nobody", token)] if holder != "nobody" else []  # the lease is over

    def never(self, state: tuple[str, int], event: Event) -> bool:
        holder, token = state
        if event.name == "acquired":
            return bool(event["token"] <= token)  # tokens only grow
        return holder != event.node  # this is the next that it does, so it will not acquire the lock before

    def why(self, state: tuple[str, int], event: Event) -> str:
        holder, token = state
        if event.name == "acquired":
            return f"{event.node} gets the token {event['token']} after token {token}"
        return f"{event.node} releases the lock, which {holder} holds"
