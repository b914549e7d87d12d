{{/*
What Ray and Serve are told on head and workers alike, made by tools/chart_files.py of `cluster_environment` of
bakehouse_cluster. Serve reads its flags when it is imported, so that they must be the container's.
*/}}
{{- define "bakehouse.clusterEnv" -}}
{{- $environment := .Files.Get "files/environment.yaml" | fromYaml -}}
{{- $variables := merge (dict "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" (dig "server" "drain_s" 30 .Values.config | toString)) (get $environment (ternary "haproxy" "proxy" .Values.haproxy)) -}}
{{- /* Gateways and replicas have these by themselves, Serve's own proxies only from here. */ -}}
{{- $tracing := dig "tracing" dict .Values.config | default dict -}}
{{- if and $tracing.enabled (not .Values.haproxy) -}}
{{- $_ := set $variables "OTEL_SERVICE_NAME" "bakehouse" -}}
{{- with $tracing.endpoint }}{{ $_ := set $variables "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" . }}{{ end -}}
{{- end -}}
{{- $list := list -}}
{{- range $name, $value := $variables }}{{ $list = append $list (dict "name" $name "value" $value) }}{{ end -}}
{{ toYaml $list }}
{{- end }}
