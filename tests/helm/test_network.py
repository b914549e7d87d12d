"""Who may reach what: network policy, Ingress, Gateway API."""

from charts import NAMESPACE, Helm, Tree, containers, of_kind

OWN = {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/part-of": "bakehouse"}


def _rules(helm: Helm, example: str, *sets: str) -> list[Tree]:
    (policy,) = of_kind(helm.objects(example, *sets), "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"] == OWN
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    rules: list[Tree] = policy["spec"]["ingress"]
    return rules


def _namespace(name: str) -> Tree:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _ports(rule: Tree) -> list[object]:
    return [port["port"] for port in rule["ports"]]


def test_every_port_is_open_to_the_releases_own_pods_only(helm: Helm) -> None:
    own, *others = _rules(helm, "full")
    assert own == {"from": [{"podSelector": {"matchLabels": OWN}}]}
    assert all("ports" in rule for rule in others)
    assert not {6379, 10001} & {port for rule in others for port in _ports(rule)}


def test_the_operator_reaches_the_dashboard_the_agent_and_serve(helm: Helm) -> None:
    _, operator, *_ = _rules(helm, "full")
    assert operator["from"] == [_namespace("kuberay-system")]
    assert _ports(operator) == [8265, 52365, 8000]
    assert _rules(helm, "minimal-cpu")[1]["from"] == [_namespace("kuberay-operator")]


def test_monitoring_reaches_ports_of_metrics_that_pods_have(helm: Helm) -> None:
    objects = helm.objects("full")
    _, _, monitoring, _ = _rules(helm, "full")
    assert monitoring["from"] == [_namespace("observability")]
    named = {port["name"] for box in containers(objects).values() for port in box["ports"]}
    assert set(_ports(monitoring)) == {"metrics", "as-metrics", "dash-metrics", "haproxy"}
    assert set(_ports(monitoring)) <= named
    assert "haproxy" not in str(_rules(helm, "minimal-cpu", "config.server.ingress=proxy"))


def test_clients_reach_http_and_grpc_and_may_be_named(helm: Helm) -> None:
    *_, clients = _rules(helm, "full")
    assert clients["from"] == [_namespace("ingress-nginx"), _namespace("gateways")]
    assert _ports(clients) == [8000, 9000]
    assert _rules(helm, "minimal-cpu")[-1] == {"ports": [{"protocol": "TCP", "port": 8000}]}


def test_without_a_policy_there_is_none(helm: Helm) -> None:
    assert not of_kind(helm.objects("minimal-cpu", "networkPolicy.enabled=false"), "NetworkPolicy")


def test_an_ingress_leads_to_the_api_only_and_holds_no_answer_back(helm: Helm) -> None:
    http, grpc = of_kind(helm.objects("full"), "Ingress")
    (rule,) = http["spec"]["rules"]
    assert rule["host"] == "llm.example.org"
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1"]
    assert _service(rule) == ("chat-serve-svc", "serve")
    annotations = http["metadata"]["annotations"]
    assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert annotations["nginx.ingress.kubernetes.io/proxy-read-timeout"] == "600"
    assert http["spec"]["tls"] == [{"secretName": "llm-tls", "hosts": ["llm.example.org"]}]
    (rule,) = grpc["spec"]["rules"]
    assert rule["host"] == "grpc.llm.example.org"
    assert _service(rule) == ("chat-serve-svc", "serve-grpc")
    assert grpc["metadata"]["annotations"]["nginx.ingress.kubernetes.io/backend-protocol"] == "GRPC"


def _service(rule: Tree) -> tuple[str, str]:
    service = rule["http"]["paths"][0]["backend"]["service"]
    return service["name"], service["port"]["name"]


def test_a_users_annotation_wins(helm: Helm) -> None:
    change = 'ingress.annotations={"nginx.ingress.kubernetes.io/proxy-buffering": "on"}'
    http, _ = of_kind(helm.objects("full", change), "Ingress")
    assert http["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "on"


def test_routes_of_the_gateway_api_lead_http_and_grpc_to_serve(helm: Helm) -> None:
    objects = helm.objects("full")
    (http,), (grpc,) = of_kind(objects, "HTTPRoute"), of_kind(objects, "GRPCRoute")
    for route, port in ((http, 8000), (grpc, 9000)):
        assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "gateways"}]
        assert route["spec"]["rules"][0]["backendRefs"] == [{"name": "chat-serve-svc", "port": port}]
    (rule,) = http["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["timeouts"] == {"request": "3600s"}
    services = [match["method"]["service"] for match in grpc["spec"]["rules"][0]["matches"]]
    assert services == ["bakehouse.v1.Inference", "grpc.health.v1.Health"]


def test_there_is_no_grpc_route_where_no_grpc_is_offered(helm: Helm) -> None:
    on = ("gatewayApi.enabled=true", 'gatewayApi.parentRefs=[{"name": "public"}]')
    objects = helm.objects("minimal-cpu", *on)
    assert of_kind(objects, "HTTPRoute")
    assert not of_kind(objects, "GRPCRoute")


def test_everything_is_in_the_releases_namespace(helm: Helm, example: str) -> None:
    assert {one["metadata"].get("namespace", NAMESPACE) for one in helm.objects(example)} == {NAMESPACE}
