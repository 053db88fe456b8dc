"""What should the block pool do? The same rules on Python lists, for comparison."""

import numpy as np


class ModelPool:
    """`ready` is a stack, `cached` a queue (first freed first), `findable` hash to block."""

    def __init__(self, num_blocks: int):
        self.references = dict.fromkeys(range(num_blocks), 0)
        self.ready = list(reversed(range(num_blocks)))
        self.cached: list[int] = []
        self.findable: dict[tuple, int] = {}
        self.hash_of: dict[int, tuple] = {}

    @property
    def used(self) -> list[int]:
        return [block for block, count in self.references.items() if count]

    def allocate(self, counts, max_blocks, enabled=True):
        room = min(len(self.ready), max_blocks) if enabled else 0
        blocks, granted = [], []
        asked = 0
        for count in counts:
            asked += count
            granted.append(count == 0 or asked <= room)
            blocks.append([self.ready.pop() for _ in range(count)] if granted[-1] else [])
        for block in sum(blocks, []):
            self.references[block] = 1
        return granted, blocks

    def release(self, blocks):
        for block in blocks:
            self.references[block] -= 1
        freed = dict.fromkeys(block for block in blocks if not self.references[block])
        for block in reversed(freed):
            (self.cached if block in self.hash_of else self.ready).append(block)

    def share(self, blocks):
        for block in blocks:
            self.references[block] += 1
            if block in self.cached:
                self.cached.remove(block)

    def refill(self, num_ready):
        while len(self.ready) < num_ready and self.cached:
            block = self.cached.pop(0)
            self.unpublish([block])
            self.ready.append(block)

    def publish(self, blocks, hashes):
        for block, content in zip(blocks, hashes, strict=True):
            if content != (0, 0) and content not in self.findable and block not in self.hash_of:
                self.findable[content], self.hash_of[block] = block, content

    def unpublish(self, blocks):
        for block in blocks:
            if block in self.hash_of:
                del self.findable[self.hash_of.pop(block)]

    def lookup_prefix(self, hashes):
        found = []
        for content in hashes:
            if content not in self.findable:
                break
            found.append(self.findable[content])
        return found


def queue_of(pool) -> list[int]:
    """The cached blocks of a device pool, first freed first."""
    ring = np.roll(np.asarray(pool.ring_C), -int(pool.ring_head))[: int(pool.ring_length)]
    return [int(block) for block in ring if block >= 0]


def assert_equal(pool, model: ModelPool) -> None:
    """Equal contents, equal order of reuse."""
    references = np.asarray(pool.refcount_P)
    assert list(references[: len(model.references)]) == list(model.references.values())
    assert list(np.asarray(pool.ready_P)[: int(pool.num_ready)]) == model.ready
    assert queue_of(pool) == model.cached
    hashes = {i: tuple(map(int, h)) for i, h in enumerate(np.asarray(pool.hash_P2)) if h.any()}
    assert hashes == model.hash_of
