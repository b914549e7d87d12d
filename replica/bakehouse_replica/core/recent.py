"""A bounded memory of request ids."""

from collections import OrderedDict


class RecentIds:
    """The `n_most` ids remembered last."""

    def __init__(self, n_most: int) -> None:
        self._n_most = n_most
        self._ids: OrderedDict[str, None] = OrderedDict()  # oldest first

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def remember(self, request_id: str) -> None:
        """Makes it the newest id, and forgets the oldest where there are too many."""
        self._ids[request_id] = None
        self._ids.move_to_end(request_id)
        if len(self._ids) > self._n_most:
            self._ids.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """Forgets an id, where it is remembered."""
        self._ids.pop(request_id, None)
