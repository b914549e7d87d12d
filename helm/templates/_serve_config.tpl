{{/*
serveConfigV2: what `serve_config(config, "kubernetes")` of bakehouse_cluster makes of the same configuration, with
which a test compares it. What can change while everything runs stands in `deployments`, the rest in `args`.
*/}}
{{- define "bakehouse.serveConfig" -}}
{{- $gatewayLimits := list "max_choices" "max_prompts" "max_stops" "max_stop_chars" "max_logprobs" "max_listed_tokens" "max_tools" "max_queued_requests" "max_queued_tokens" -}}
{{- $replicaLimits := list "max_prefill_tokens" "max_waiting_requests" -}}
{{- $config := .Values.config -}}
{{- $server := $config.server | default dict -}}
{{- $gateways := $server.gateways | default 1 | int64 -}}
{{- $gateway := dict "name" "Gateway" "num_replicas" $gateways "user_config" (include "bakehouse.pick" (list $config.gateway $gatewayLimits) | fromYaml) -}}
{{- $replica := dict "name" "Replica" "user_config" (include "bakehouse.pick" (list $config.replica $replicaLimits) | fromYaml) -}}
{{- with dig "replica" "autoscale" nil $config -}}
{{- $scaling := dict
  "min_replicas" (int64 .min_replicas)
  "max_replicas" (int64 .max_replicas)
  "target_ongoing_requests" (add .target_requests $gateways)
  "upscale_delay_s" (dig "upscale_delay_s" 30 . | int64)
  "downscale_delay_s" (dig "downscale_delay_s" 600 . | int64) -}}
{{- $_ := set $replica "autoscaling_config" $scaling -}}
{{- else -}}
{{- $_ := set $replica "num_replicas" ($server.replicas | default 1 | int64) -}}
{{- end -}}
{{- $moved := dict "gateway" $gatewayLimits "replica" (append $replicaLimits "autoscale") "server" (list "gateways" "replicas") -}}
{{- $args := dict -}}
{{- range $name, $section := $config -}}
{{- $kept := deepCopy $section -}}
{{- range get $moved $name | default list }}{{ $_ := unset $kept . }}{{ end -}}
{{- if $kept }}{{ $_ := set $args $name $kept }}{{ end -}}
{{- end -}}
{{- $application := dict
  "name" "bakehouse"
  "route_prefix" "/"
  "import_path" "bakehouse:build"
  "args" $args
  "deployments" (list $gateway $replica) -}}
{{- $document := dict
  "proxy_location" "EveryNode"
  "http_options" (dict "host" "0.0.0.0" "port" (include "bakehouse.httpPort" . | int64))
  "applications" (list $application) -}}
{{- with include "bakehouse.grpcPort" . -}}
{{- $_ := set $document "grpc_options" (dict "port" (int64 .) "grpc_servicer_functions" (list "bakehouse_router.grpc_ingress.add_services")) -}}
{{- end -}}
{{- $tracing := $config.tracing | default dict -}}
{{- $_ := set $document "tracing_config" (dict "enabled" false) -}}
{{- if $tracing.enabled -}}
{{- $_ := set $document "tracing_config" (dict
  "enabled" true
  "exporter_import_path" (printf "bakehouse_cluster.span_export:to_%s" ($tracing.exporter | default "files"))
  "sampling_ratio" (dig "sampling_ratio" 1 $tracing)) -}}
{{- end -}}
{{ toYaml $document }}
{{- end }}

{{/* Of a section, which may be missing, the keys of a list that are there, as YAML. */}}
{{- define "bakehouse.pick" -}}
{{- $picked := dict -}}
{{- $section := first . | default dict -}}
{{- range last . }}{{ if hasKey $section . }}{{ $_ := set $picked . (get $section .) }}{{ end }}{{ end -}}
{{ toYaml $picked }}
{{- end }}
