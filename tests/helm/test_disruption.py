"""How many pods may be away when nodes are drained."""

from charts import Helm, of_kind


def _budgets(helm: Helm, example: str, *sets: str) -> dict[str, int]:
    budgets = of_kind(helm.objects(example, *sets), "PodDisruptionBudget")
    assert all(one["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for one in budgets)
    return {one["spec"]["selector"]["matchLabels"]["ray.io/group"]: one["spec"]["minAvailable"] for one in budgets}


def test_one_pod_of_each_pool_may_be_away_and_the_head_never(helm: Helm) -> None:
    assert _budgets(helm, "full") == {"headgroup": 1, "cpu": 1, "gpu": 1}
    assert _budgets(helm, "tensor-parallel-4", "pools[0].minReplicas=3") == {"headgroup": 1, "cpu": 2}


def test_a_pool_whose_only_pod_may_be_away_has_no_budget(helm: Helm) -> None:
    assert _budgets(helm, "minimal-cpu") == {"headgroup": 1}


def test_a_replica_on_several_hosts_may_be_away_as_a_whole(helm: Helm) -> None:
    assert _budgets(helm, "multi-node", "pools[1].minReplicas=3", "pools[1].maxReplicas=3") == {
        "headgroup": 1,
        "gpu": 4,
    }


def test_budgets_can_be_switched_off(helm: Helm) -> None:
    assert _budgets(helm, "full", "podDisruptionBudget.enabled=false") == {}
