{{/*
The pod template of a group. Takes a dict: `root` the chart's context, `group` a pool or the head's values, `isHead`.
Everything here is part of rayClusterConfig: a change of what it renders builds a second cluster.
*/}}
{{- define "bakehouse.pod" -}}
{{- $ := .root -}}
metadata:
  labels:
    {{- include "bakehouse.podLabels" $ | nindent 4 }}
spec:
  serviceAccountName: {{ include "bakehouse.serviceAccount" $ | quote }}
  # Only the head's autoscaler talks to Kubernetes; a worker with this token could delete pods.
  automountServiceAccountToken: {{ and .isHead $.Values.autoscaler.enabled }}
  terminationGracePeriodSeconds: {{ include "bakehouse.graceSeconds" $ }}
  securityContext:
    {{- include "bakehouse.podSecurity" $ | nindent 4 }}
  {{- with $.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ quote . }}
    {{- end }}
  {{- end }}
  {{- with .group.runtimeClassName }}
  runtimeClassName: {{ quote . }}
  {{- end }}
  {{- with .group.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .group.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "bakehouse.tolerations" .group }}
  tolerations:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: ray
      image: {{ include "bakehouse.image" $ | quote }}
      imagePullPolicy: {{ $.Values.image.pullPolicy }}
      ports:
        {{- include "bakehouse.ports" . | nindent 8 }}
      env:
        {{- include "bakehouse.env" . | nindent 8 }}
      resources:
        {{- include "bakehouse.resources" .group | nindent 8 }}
      securityContext:
        {{- include "bakehouse.containerSecurity" $ | nindent 8 }}
      {{- if and (not .isHead) $.Values.drain.preStopSeconds }}
      lifecycle:
        preStop: # endpoints and load balancers forget the pod before it stops to accept
          exec: {command: [sleep, {{ $.Values.drain.preStopSeconds | toString | quote }}]}
      {{- end }}
      volumeMounts:
        {{- include "bakehouse.mounts" . | nindent 8 }}
  volumes:
    {{- include "bakehouse.volumes" . | nindent 4 }}
{{- end }}

{{- define "bakehouse.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch # a recursive chown of 200 GB of weights stalls the pod
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "bakehouse.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{/* A pool with GPUs tolerates the taint that GPU nodes usually have, unless it names its own tolerations. */}}
{{- define "bakehouse.tolerations" -}}
{{- if .tolerations -}}
{{ toYaml .tolerations }}
{{- else if .gpus -}}
- {key: {{ .gpuResource | default "nvidia.com/gpu" | quote }}, operator: Exists, effect: NoSchedule}
{{- end -}}
{{- end }}

{{- define "bakehouse.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus -}}
{{- $gpu := dict (.gpuResource | default "nvidia.com/gpu") (int64 .gpus) -}}
{{- $_ := set $resources "requests" (merge dict $gpu ($resources.requests | default dict)) -}}
{{- $_ := set $resources "limits" (merge dict $gpu ($resources.limits | default dict)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{- define "bakehouse.ports" -}}
{{- $ := .root -}}
- {name: serve, containerPort: {{ include "bakehouse.httpPort" $ }}}
{{- with include "bakehouse.grpcPort" $ }}
- {name: serve-grpc, containerPort: {{ . }}}
{{- end }}
- {name: metrics, containerPort: 8080}
{{- if include "bakehouse.haproxy" $ }}
- {name: haproxy, containerPort: 9101}
{{- end }}
{{- if .isHead }}
- {name: gcs-server, containerPort: 6379}
- {name: dashboard, containerPort: 8265}
- {name: client, containerPort: 10001}
- {name: as-metrics, containerPort: 44217}
- {name: dash-metrics, containerPort: 44227}
{{- end }}
{{- end }}

{{- define "bakehouse.env" -}}
{{- $ := .root -}}
{{- include "bakehouse.clusterEnv" $ }}
{{- if not .isHead }}
{{ include "bakehouse.modelEnv" $ }}
{{- end }}
{{- with .group.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Where models, and what is made of them, are kept. */}}
{{- define "bakehouse.modelEnv" -}}
- {name: HF_HOME, value: /cache/huggingface}
- {name: XDG_CACHE_HOME, value: /cache}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
{{- if .Values.cache.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if .Values.auth.hfTokenSecret.name }}
- {name: HF_TOKEN_PATH, value: /etc/bakehouse/hf/token}
{{- end }}
{{- end }}

{{/* Only pods that gateways may run in see the keys. */}}
{{- define "bakehouse.hasKeys" -}}
{{- $pools := dig "gateway" "pools" list .root.Values.config -}}
{{- if and .root.Values.auth.keysSecret.name (or (not $pools) (has .group.name $pools)) }}true{{ end -}}
{{- end }}

{{/* Secrets are mounted as folders, never by subPath, so that a changed Secret arrives without a restart. */}}
{{- define "bakehouse.mounts" -}}
{{- $ := .root -}}
- {name: shm, mountPath: /dev/shm}
{{- if not .isHead }}
- {name: cache, mountPath: /cache}
{{- if include "bakehouse.hasKeys" . }}
- {name: keys, mountPath: /etc/bakehouse/keys, readOnly: true}
{{- end }}
{{- if $.Values.auth.hfTokenSecret.name }}
- {name: hf-token, mountPath: /etc/bakehouse/hf, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "bakehouse.volumes" -}}
{{- $ := .root -}}
- name: shm # of the object store, and of NCCL, which fails at random without; counts against the memory limit
  emptyDir: {medium: Memory, sizeLimit: {{ .group.shm | default "1Gi" }}}
{{- if not .isHead }}
{{ include "bakehouse.cacheVolume" $ }}
{{- if include "bakehouse.hasKeys" . }}
{{- with $.Values.auth.keysSecret }}
- name: keys
  secret: {secretName: {{ quote .name }}, defaultMode: 0440, items: [{key: {{ quote .key }}, path: {{ quote .key }}}]}
{{- end }}
{{- end }}
{{- include "bakehouse.hfTokenVolume" $ }}
{{- end }}
{{- end }}

{{- define "bakehouse.cacheVolume" -}}
- name: cache
{{- if eq .Values.cache.type "emptyDir" }}
  emptyDir: {sizeLimit: {{ .Values.cache.size }}}
{{- else if eq .Values.cache.type "hostPath" }}
  hostPath: {path: {{ .Values.cache.hostPath | quote }}, type: Directory} # made by hand, writable for user 1000
{{- else }}
  persistentVolumeClaim: {claimName: {{ include "bakehouse.cacheClaim" . | quote }}}
{{- end }}
{{- end }}

{{- define "bakehouse.hfTokenVolume" -}}
{{- with .Values.auth.hfTokenSecret }}
{{- if .name }}
- name: hf-token
  secret: {secretName: {{ quote .name }}, defaultMode: 0440, items: [{key: {{ quote .key }}, path: token}]}
{{- end }}
{{- end }}
{{- end }}
