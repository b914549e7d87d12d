"""What is forgotten, and when."""

from bakehouse_replica.recently_used import RecentlyUsed


def test_what_was_used_longest_ago_is_forgotten() -> None:
    kept: RecentlyUsed[str, int] = RecentlyUsed(2)
    kept.keep("a", 1)
    kept.keep("b", 2)
    assert kept.find("a") == 1
    kept.keep("c", 3)
    assert [kept.find(key) for key in "abc"] == [1, None, 3]
    assert len(kept) == 2


def test_keeping_again_replaces_and_counts_as_use() -> None:
    kept: RecentlyUsed[str, int] = RecentlyUsed(2)
    kept.keep("a", 1)
    kept.keep("b", 2)
    kept.keep("a", 3)
    kept.keep("c", 4)
    assert [kept.find(key) for key in "abc"] == [3, None, 4]
