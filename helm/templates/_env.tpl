{{/*
What Ray and Serve are told on head and workers alike, made by tools/chart_files.py of `cluster_environment` of
bakehouse_cluster. Serve reads its flags when it is imported, so that they must be the container's.
*/}}
{{- define "bakehouse.clusterEnv" -}}
{{- $environment := .Files.Get "files/environment.yaml" | fromYaml -}}
{{- $variables := merge (dict "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" (dig "server" "drain_s" 30 .Values.config | toString)) (get $environment (include "bakehouse.haproxy" . | default "proxy")) -}}
{{- /* What `tracing_environment` says: gateways and replicas have it by themselves, Serve's own proxies from here. */ -}}
{{- $tracing := dig "tracing" dict .Values.config | default dict -}}
{{- if and $tracing.enabled (not (include "bakehouse.haproxy" .)) -}}
{{- $_ := set $variables "OTEL_SERVICE_NAME" "bakehouse" -}}
{{- $_ := set $variables "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH" (printf "bakehouse_cluster.span_export:to_%s" ($tracing.exporter | default "files")) -}}
{{- $_ := set $variables "RAY_SERVE_TRACING_SAMPLING_RATIO" (dig "sampling_ratio" 1 $tracing | toString) -}}
{{- with $tracing.endpoint }}{{ $_ := set $variables "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" . }}{{ end -}}
{{- end -}}
{{- $list := list -}}
{{- range $name, $value := $variables }}{{ $list = append $list (dict "name" $name "value" $value) }}{{ end -}}
{{ toYaml $list }}
{{- end }}

{{/*
`haproxy`, or nothing where Serve's own proxies stand in front of the gateways. On a cluster no gateway can have the
asked port to itself, so that `direct`, by which HAProxy reaches the gateways, is what HAProxy passes on to.
*/}}
{{- define "bakehouse.haproxy" -}}
{{- if ne (dig "server" "ingress" "direct" .Values.config) "proxy" }}haproxy{{ end -}}
{{- end }}
