"""The pool of KV blocks: who holds which block, and which computed prefixes can be found again.

Rule 1. Every block is in exactly one of three places:

    free      holds nothing that anyone could want
    cached    registered and held by nobody: a prefix that may be wanted again, and may be evicted
    held      in at least one block table; `n_holders` is the number of tables it is in

    allocate   free → held, or the oldest cached → held (evicted: its registration ends)
    share      cached or held → held, one holder more
    release    one holder fewer; the last one makes it cached where it is registered, else free

Rule 2. Only full, computed blocks are registered, and a registered block is never written again. Writes go to
the position after the last computed one, so they meet a registered block never and a shared block only in a
partly filled tail. There `writable` puts a fresh block into the table and asks for a `BlockCopy`, unless the
table is the block's last holder, which may write in place: nobody else can see it, and nobody can find it.

Rule 3. The registered blocks form trees. A block is registered only behind a registered parent, and a table
that computed the twin of a registered block takes that one instead of its own. Hence whoever holds a block
holds its ancestors, an ancestor is released later than its descendants (tables are released deepest block
first), and the oldest cached block never has a registered child. Eviction therefore needs no search, and it
eats chains from their end, where they are least likely to be asked for again.

Rule 4. A hash finds a candidate; it proves nothing. A hit also compares the parent block and the token ids, and
since a parent stays registered as long as its children (rule 3), equality of parents is equality of prefixes.
A colliding hash costs a hit, never a wrong answer.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from bakehouse_replica.core.account import Account, PoolTime
from bakehouse_replica.core.hashing import next_block_hash
from bakehouse_replica.core.types import BlockCopy

RESIDENT_HASH_BYTES = 8  # enough to route by: a wrong match costs a replica one prefill, not an answer


@dataclass(frozen=True, slots=True)
class _Registration:
    block_hash: bytes
    parent: int | None
    token_ids: tuple[int, ...]


class BlockPool:
    """Counts the holders of `n_blocks` blocks. A block table is a list of block ids, owned by its sequence.

    Methods that take a table (`writable`, `register`) may replace the entry they are asked about.
    """

    def __init__(self, *, n_blocks: int, block_size: int, hash_key: bytes) -> None:
        self.n_blocks = n_blocks
        self.block_size = block_size
        self._hash_key = hash_key
        self._n_holders = [0] * n_blocks
        self._account = Account(n_blocks)
        self._free = list(reversed(range(n_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first
        self._registrations: dict[int, _Registration] = {}
        self._index: OrderedDict[bytes, int] = OrderedDict()  # by hash, longest unused first

    @property
    def n_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def n_cached(self) -> int:
        """Blocks that hold a findable prefix and are in no table."""
        return len(self._cached)

    @property
    def n_held(self) -> int:
        """Blocks that are in at least one table."""
        return self.n_blocks - len(self._free) - len(self._cached)

    @property
    def n_available(self) -> int:
        """How many times `allocate` can succeed from here."""
        return len(self._free) + len(self._cached)

    @property
    def now(self) -> float:
        """The moment of the last `advance`."""
        return self._account.now

    @property
    def time(self) -> PoolTime:
        """Block-seconds by state, up to the moment of the last `advance`. Others read it."""
        return self._account.time

    def advance(self, now: float) -> None:
        """It is `now`. What happens from here on does so at that moment."""
        n_free, n_cached = len(self._free), len(self._cached)
        n_held = self.n_blocks - n_free - n_cached
        self._account.advance(now, n_free=n_free, n_cached=n_cached, n_held=n_held)

    def reading(self, block_ids: Iterable[int]) -> float:
        """What a holder of these blocks subtracts from its bill when it takes them, and adds when it lets them go.

        Before or after, at the same moment: all the same (`core.account`).
        """
        return self._account.reading(block_ids, self._n_holders)

    def n_blocks_for(self, n_tokens: int) -> int:
        """The length of a table that has room for `n_tokens`."""
        return -(-n_tokens // self.block_size)

    def n_holders(self, block_id: int) -> int:
        """How many tables the block is in."""
        return self._n_holders[block_id]

    def next_hash(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The hash under which the full block `token_ids` behind `parent` is registered."""
        return next_block_hash(parent, token_ids, self._hash_key)

    def match(self, block_hashes: Sequence[bytes], token_ids: Sequence[int]) -> list[int]:
        """The longest registered chain that begins `token_ids`, at most one block a hash. Changes nothing."""
        matched: list[int] = []
        parent: int | None = None
        for index, block_hash in enumerate(block_hashes):
            block_id = self._index.get(block_hash)
            if block_id is None:
                break
            begin, found = index * self.block_size, self._registrations[block_id]
            wanted_ids = tuple(token_ids[begin : begin + self.block_size])
            if found.parent != parent or found.token_ids != wanted_ids:
                break
            matched.append(block_id)
            parent = block_id
        return matched

    def allocate(self) -> int:
        """A block for one new holder: a free one, else the cached one that was longest unused."""
        assert self.n_available, "allocate() needs a free or cached block; the caller counts them first"
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._cached.popitem(last=False)
            del self._index[self._registrations.pop(block_id).block_hash]
        self._account.begin(block_id)
        self._n_holders[block_id] = 1
        return block_id

    def share(self, table: Sequence[int]) -> None:
        """One more holder for each block of the chain `table`, cached or held."""
        for block_id in reversed(table):  # the first block of a chain ends up as the most recently used
            assert self._n_holders[block_id] or block_id in self._cached, f"block {block_id} is free"
            self._cached.pop(block_id, None)
            self._account.change(block_id, self._n_holders[block_id])
            self._n_holders[block_id] += 1
            self._touch(block_id)

    def release(self, table: Sequence[int]) -> None:
        """One holder fewer for each block of `table`; those left by all become cached or free."""
        for block_id in reversed(table):  # rule 3: deepest first
            assert self._n_holders[block_id], f"block {block_id} is released more often than held"
            self._account.change(block_id, self._n_holders[block_id])
            self._n_holders[block_id] -= 1
            self._touch(block_id)
            if self._n_holders[block_id] == 0:
                if block_id in self._registrations:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    def writable(self, table: list[int], index: int) -> BlockCopy | None:
        """Makes `table[index]` a block that this table alone holds, and says what must be copied for it.

        Needs one available block where the block is shared. The source keeps at least one holder, so no source
        of a step's copies can become a target within that step.
        """
        source = table[index]
        if self._n_holders[source] == 1:
            assert source not in self._registrations, f"block {source} is findable and would be overwritten"
            return None
        target = self.allocate()
        self._account.change(source, self._n_holders[source])
        self._n_holders[source] -= 1
        table[index] = target
        return BlockCopy(source=source, target=target)

    def register(self, table: list[int], index: int, block_hash: bytes, token_ids: Sequence[int]) -> bool:
        """Lets others find the full, computed block `table[index]`, or gives it up for its registered twin.

        False where the hash is taken by other content: this block and what follows it stay private.
        """
        block_id = table[index]
        parent = table[index - 1] if index else None
        assert self._n_holders[block_id], f"block {block_id} is registered while nobody holds it"
        assert block_id not in self._registrations, f"block {block_id} is registered twice"
        assert parent is None or parent in self._registrations, f"parent {parent} of {block_id} is not registered"
        registration = _Registration(block_hash, parent, tuple(token_ids))
        twin = self._index.get(block_hash)
        if twin is None:
            self._registrations[block_id] = registration
            self._index[block_hash] = block_id
        elif self._registrations[twin] == registration:
            self.share([twin])
            self.release([block_id])
            table[index] = twin
        else:
            return False
        return True

    def resident_hashes(self, n_most: int) -> tuple[bytes, ...]:
        """Up to `n_most` registered hashes, most recently used first, cut to `RESIDENT_HASH_BYTES`."""
        return tuple(block_hash[:RESIDENT_HASH_BYTES] for block_hash in islice(reversed(self._index), n_most))

    def check_bills(self, block_seconds: float) -> None:
        """Asserts that all bills there have been, up to now, add up to what was held."""
        self._account.check(block_seconds)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts the rules above, given all block tables there are. O(n_blocks): an audit, not for each step."""
        n_holders = Counter(block_id for table in tables for block_id in table)
        for block_id in range(self.n_blocks):
            counted, found = self._n_holders[block_id], n_holders[block_id]
            assert counted == found, f"block {block_id} counts {counted} holders; {found} tables hold it"
        free, cached, held = set(self._free), set(self._cached), set(n_holders)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert len(free) + len(cached) + len(held) == self.n_blocks == len(free | cached | held), (
            f"{len(free)} free + {len(cached)} cached + {len(held)} held blocks of {self.n_blocks}"
        )
        assert cached <= self._registrations.keys(), "a cached block cannot be found"
        assert not free & self._registrations.keys(), "a free block can be found"
        assert self._index == {entry.block_hash: block_id for block_id, entry in self._registrations.items()}
        age = {block_id: age for age, block_id in enumerate(self._cached)}
        for block_id, entry in self._registrations.items():
            if entry.parent is None:
                continue
            assert entry.parent in self._registrations, f"block {block_id} outlived its parent"
            assert self._n_holders[entry.parent] >= self._n_holders[block_id], f"{block_id} is held without parent"
            assert entry.parent not in age or age[block_id] < age[entry.parent], f"{block_id} outlasts its parent"

    def _touch(self, block_id: int) -> None:
        registration = self._registrations.get(block_id)
        if registration is not None:
            self._index.move_to_end(registration.block_hash)
