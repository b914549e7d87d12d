{{/* The RayService's name; all other objects begin with it. */}}
{{- define "bakehouse.name" -}}
{{- if .Values.nameOverride -}}
{{ .Values.nameOverride }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name }}
{{- else -}}
{{ .Release.Name }}-{{ .Chart.Name }}
{{- end -}}
{{- end }}

{{/*
Labels of pods. What they hold must never change with the chart's version: in rayClusterConfig a changed label
builds a second cluster. `app.kubernetes.io/name` is left to the operator, which selects by it.
*/}}
{{- define "bakehouse.podLabels" -}}
app.kubernetes.io/instance: {{ quote .Release.Name }}
app.kubernetes.io/part-of: bakehouse
{{- end }}

{{/* Labels of everything else. */}}
{{- define "bakehouse.labels" -}}
{{ include "bakehouse.podLabels" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "bakehouse.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "bakehouse.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "bakehouse.name" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{- define "bakehouse.cacheClaim" -}}
{{ .Values.cache.existingClaim | default (printf "%s-cache" (include "bakehouse.name" .)) }}
{{- end }}

{{/* The Service that clients and routes reach; the operator makes it. */}}
{{- define "bakehouse.serveService" -}}
{{ include "bakehouse.name" . }}-serve-svc
{{- end }}

{{- define "bakehouse.httpPort" -}}
{{ dig "server" "port" 8000 .Values.config | int64 }}
{{- end }}

{{/* Empty where no gRPC is offered. */}}
{{- define "bakehouse.grpcPort" -}}
{{- with dig "server" "grpc_port" nil .Values.config }}{{ int64 . }}{{ end }}
{{- end }}

{{/* Whole seconds that running requests get to end. */}}
{{- define "bakehouse.drainSeconds" -}}
{{ dig "server" "drain_s" 30 .Values.config | float64 | ceil | int64 }}
{{- end }}

{{/* Seconds until the kubelet kills a pod: the pause before SIGTERM, the drain, and some for the end itself. */}}
{{- define "bakehouse.graceSeconds" -}}
{{- if .Values.drain.graceSeconds -}}
{{ .Values.drain.graceSeconds | int64 }}
{{- else -}}
{{ add .Values.drain.preStopSeconds (include "bakehouse.drainSeconds" .) 15 }}
{{- end -}}
{{- end }}

{{- define "bakehouse.isIncremental" -}}
{{- if eq .Values.upgrade.type "NewClusterWithIncrementalUpgrade" }}true{{ end }}
{{- end }}

{{/* A CPU quantity as a number: 500m is 0.5. Takes a pool or the head; limits count before requests, as for the operator. */}}
{{- define "bakehouse.cpus" -}}
{{- $cpu := dig "limits" "cpu" (dig "requests" "cpu" "0" .resources) .resources | toString -}}
{{- if hasSuffix "m" $cpu }}{{ divf (trimSuffix "m" $cpu | float64) 1000.0 }}{{ else }}{{ $cpu }}{{ end }}
{{- end }}

{{/* Most pods of all pools together. */}}
{{- define "bakehouse.mostPods" -}}
{{- $pods := 0 -}}
{{- range .Values.pools }}{{ $pods = add $pods (mul .maxReplicas (.numOfHosts | default 1)) }}{{ end -}}
{{ $pods }}
{{- end }}

{{/* Worker pods of a new cluster, and their GPUs. */}}
{{- define "bakehouse.startPods" -}}
{{- $pods := 0 -}}
{{- range .Values.pools }}{{ $pods = dig "replicas" .minReplicas . | mul (.numOfHosts | default 1) | add $pods }}{{ end -}}
{{ $pods }}
{{- end }}
{{- define "bakehouse.startGpus" -}}
{{- $gpus := 0 -}}
{{- range .Values.pools }}{{ $gpus = dig "replicas" .minReplicas . | mul (.numOfHosts | default 1) (.gpus | default 0) | add $gpus }}{{ end -}}
{{ $gpus }}
{{- end }}
