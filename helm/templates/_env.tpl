{{/*
What Ray and Serve are told on head and workers alike: `cluster_environment` of bakehouse_cluster, with which a test
compares it. Serve reads its flags when it is imported, so that they must be the container's.
*/}}
{{- define "bakehouse.clusterEnv" -}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: bakehouse_router.serve_headers.middlewares}
- {name: RAY_SERVE_GRPC_MAX_MESSAGE_SIZE, value: "67108864"}
- {name: RAY_worker_register_timeout_seconds, value: "300"}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ dig "server" "drain_s" 30 .Values.config | toString | quote }}}
{{- if .Values.haproxy }}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: "3600"}
{{- else }}
- {name: RAY_SERVE_ENABLE_DIRECT_INGRESS, value: "0"}
{{- end }}
{{- end }}
