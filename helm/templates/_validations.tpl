{{/*
What no schema can say: values that contradict each other. One error at a time, which begins with the path of the value
to change. `rayservice.yaml` calls it before anything else.
*/}}
{{- define "bakehouse.validate" -}}
{{- include "bakehouse.validateName" . -}}
{{- include "bakehouse.validatePools" . -}}
{{- include "bakehouse.validatePlacement" . -}}
{{- include "bakehouse.validateScaling" . -}}
{{- include "bakehouse.validateSecrets" . -}}
{{- include "bakehouse.validateCache" . -}}
{{- include "bakehouse.validateTracing" . -}}
{{- include "bakehouse.validateObjectStore" . -}}
{{- include "bakehouse.validateDrain" . -}}
{{- include "bakehouse.validateUpgrade" . -}}
{{- include "bakehouse.validateRoutes" . -}}
{{- if and .Values.gcsFaultTolerance.enabled (not .Values.gcsFaultTolerance.redisAddress) -}}
{{- fail "gcsFaultTolerance.redisAddress: empty, but gcsFaultTolerance.enabled needs a Redis" -}}
{{- end -}}
{{- end }}

{{- define "bakehouse.validateName" -}}
{{- $name := include "bakehouse.name" . -}}
{{- if gt (len $name) 47 -}}
{{- fail (printf "nameOverride: the RayService would be called %q, of %d characters; KubeRay takes 47 (a shorter release name does as well)" $name (len $name)) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "nameOverride: the RayService would be called %q; a name is of a-z, 0-9 and -, and begins with a letter" $name) -}}
{{- end -}}
{{- end }}

{{- define "bakehouse.validatePools" -}}
{{- $names := list -}}
{{- range $i, $pool := .Values.pools -}}
{{- if has .name $names -}}
{{- fail (printf "pools[%d].name: there is a pool %q already" $i .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- $replicas := dig "replicas" .minReplicas . | int -}}
{{- if or (gt (int .minReplicas) $replicas) (gt $replicas (int .maxReplicas)) -}}
{{- fail (printf "pools[%d].replicas: minReplicas %d <= replicas %d <= maxReplicas %d does not hold" $i (int .minReplicas) $replicas (int .maxReplicas)) -}}
{{- end -}}
{{- if and .idleTimeoutSeconds (not $.Values.autoscaler.enabled) -}}
{{- fail (printf "pools[%d].idleTimeoutSeconds: it needs autoscaler.enabled" $i) -}}
{{- end -}}
{{- range $part := list "requests" "limits" -}}
{{- range $resource, $_ := get $pool.resources $part | default dict -}}
{{- if or (hasSuffix "gpu" $resource) (hasPrefix "nvidia.com/mig-" $resource) -}}
{{- fail (printf "pools[%d].resources.%s: %s belongs in pools[%d].gpus and gpuResource" $i $part $resource $i) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $section := list "gateway" "replica" -}}
{{- range dig $section "pools" list $.Values.config -}}
{{- if not (has . $names) -}}
{{- fail (printf "config.%s.pools: there is no pool %q among pools: %s" $section . (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/*
A replica fits into one pod, or its ranks do where they may be spread, of every pool that is named for them; where none
is named Ray takes any pool that has room. The same for gateways, which need CPUs only.
*/}}
{{- define "bakehouse.validatePlacement" -}}
{{- $config := .Values.config -}}
{{- $device := dig "model" "device" "auto" $config -}}
{{- $ranks := dig "replica" "tensor_parallel" 1 $config | int -}}
{{- $isPacked := eq (dig "replica" "rank_placement" "strict_pack" $config) "strict_pack" -}}
{{- $cpus := dig "replica" "cpus" 1 $config | default 1 -}}
{{- $named := dig "replica" "pools" list $config -}}
{{- $mostRanks := 0 -}}
{{- range $i, $pool := .Values.pools -}}
{{- if or (not $named) (has .name $named) -}}
{{- if and .gpus (eq $device "auto") -}}
{{- fail (printf "config.model.device: auto is decided before the GPUs of pools[%d] (%s) have joined the cluster; say cuda, or cpu" $i .name) -}}
{{- end -}}
{{- if and .gpus $named (eq $device "cpu") -}}
{{- fail (printf "config.model.device: cpu, but replicas run in pools[%d] (%s), which has GPUs" $i .name) -}}
{{- end -}}
{{- $room := mul (.gpus | default 0) (ternary 1 (mul (.numOfHosts | default 1) .maxReplicas) $isPacked) | int -}}
{{- $mostRanks = max $mostRanks $room | int -}}
{{- $isCertain := or $named (eq (len $.Values.pools) 1) -}}
{{- if and $isCertain (eq $device "cuda") (eq $room 0) -}}
{{- fail (printf "config.model.device: cuda, but pools[%d].gpus (%s) is 0" $i .name) -}}
{{- end -}}
{{- if and $isCertain (eq $device "cuda") (gt $ranks $room) -}}
{{- fail (printf "config.replica.tensor_parallel: %d ranks, but pools[%d].gpus (%s) has room for %d%s" $ranks $i .name $room (ternary " in one pod" "" $isPacked)) -}}
{{- end -}}
{{- $needed := ternary $cpus (divf $cpus $ranks) $isPacked | float64 -}}
{{- if and $isCertain (gt $needed (include "bakehouse.cpus" . | float64)) -}}
{{- fail (printf "config.replica.cpus: %v CPUs for a replica, but pools[%d].resources (%s) has %s" $cpus $i .name (include "bakehouse.cpus" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $device "cuda") (gt $ranks $mostRanks) -}}
{{- fail (printf "config.replica.tensor_parallel: %d ranks on GPUs, but no pool has room for more than %d (pools[].gpus)" $ranks $mostRanks) -}}
{{- end -}}
{{- $gatewayPools := dig "gateway" "pools" list $config -}}
{{- $gatewayCpus := dig "gateway" "cpus" 0.1 $config | float64 -}}
{{- range $i, $pool := .Values.pools -}}
{{- if and (has .name $gatewayPools) (gt $gatewayCpus (include "bakehouse.cpus" . | float64)) -}}
{{- fail (printf "config.gateway.cpus: %v CPUs for a gateway, but pools[%d].resources (%s) has %s" $gatewayCpus $i .name (include "bakehouse.cpus" .)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The pools are wide enough for all replicas that there may be, with the autoscaler's help where it is on. */}}
{{- define "bakehouse.validateScaling" -}}
{{- $config := .Values.config -}}
{{- $scaling := dig "replica" "autoscale" nil $config -}}
{{- $server := $config.server | default dict -}}
{{- if and $scaling (hasKey $server "replicas") -}}
{{- fail (printf "config.server.replicas: it is %v, but config.replica.autoscale says how many there are; leave out one of the two" $server.replicas) -}}
{{- end -}}
{{- $path := "config.server.replicas" -}}
{{- $replicas := $server.replicas | default 1 | int -}}
{{- if $scaling -}}
{{- $path = "config.replica.autoscale.max_replicas" -}}
{{- $replicas = int $scaling.max_replicas -}}
{{- if gt (int $scaling.min_replicas) $replicas -}}
{{- fail (printf "config.replica.autoscale.min_replicas: %d, but max_replicas is %d" (int $scaling.min_replicas) $replicas) -}}
{{- end -}}
{{- end -}}
{{- $isOnGpus := eq (dig "model" "device" "auto" $config) "cuda" -}}
{{- $isPacked := eq (dig "replica" "rank_placement" "strict_pack" $config) "strict_pack" -}}
{{- $ranks := dig "replica" "tensor_parallel" 1 $config | int -}}
{{- $cpus := dig "replica" "cpus" 1 $config | default 1 | float64 -}}
{{- $named := dig "replica" "pools" list $config -}}
{{- $room := 0.0 -}}
{{- range .Values.pools -}}
{{- if or (not $named) (has .name $named) -}}
{{- $pods := ternary .maxReplicas (dig "replicas" .minReplicas .) $.Values.autoscaler.enabled | mul (.numOfHosts | default 1) -}}
{{- $each := divf (include "bakehouse.cpus" . | float64) $cpus -}}
{{- if $isOnGpus -}}{{- $each = minf $each (divf (.gpus | default 0) $ranks) -}}{{- end -}}
{{- if $isPacked -}}{{- $each = floor $each -}}{{- end -}}
{{- $room = addf $room (mulf $each $pods) -}}
{{- end -}}
{{- end -}}
{{- if gt $replicas (floor $room | int) -}}
{{- fail (printf "%s: %d replicas, but the CPUs and GPUs of their pools have room for %d (pools[].%s)" $path $replicas (floor $room | int) (ternary "maxReplicas" "replicas; autoscaler.enabled would go up to maxReplicas" .Values.autoscaler.enabled)) -}}
{{- end -}}
{{- end }}

{{/* Secrets come by reference only: what stands in values is in Helm's release, the custom resource and Ray's dashboard. */}}
{{- define "bakehouse.validateSecrets" -}}
{{- $taken := dict -}}
{{- range include "bakehouse.env" (dict "root" . "group" dict "isHead" false) | fromYamlArray -}}
{{- $_ := set $taken .name true -}}
{{- end -}}
{{- range $i, $group := prepend .Values.pools .Values.head -}}
{{- $path := ternary "head" (printf "pools[%d]" (sub $i 1)) (eq $i 0) -}}
{{- $named := dict -}}
{{- range .env -}}
{{- if hasKey $named .name -}}
{{- fail (printf "%s.env: %s is there twice" $path .name) -}}
{{- end -}}
{{- $_ := set $named .name true -}}
{{- if hasKey $taken .name -}}
{{- fail (printf "%s.env: the chart sets %s itself" $path .name) -}}
{{- end -}}
{{- if and .value (regexMatch "(^|_)(TOKENS?|PASSWORD|PASSWD|SECRETS?|CREDENTIALS?|(API|ACCESS|PRIVATE|SECRET)_?KEYS?)$" (upper .name)) -}}
{{- fail (printf "%s.env: %s is a secret in clear text; use valueFrom.secretKeyRef (or auth.hfTokenSecret)" $path .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $file := dig "gateway" "keys" "" .Values.config | default "" -}}
{{- $mounted := printf "/etc/bakehouse/keys/%s" .Values.auth.keysSecret.key -}}
{{- if and .Values.auth.keysSecret.name (ne $file $mounted) -}}
{{- fail (printf "config.gateway.keys: %q, but auth.keysSecret is mounted as %s" $file $mounted) -}}
{{- end -}}
{{- if and $file (not .Values.auth.keysSecret.name) -}}
{{- fail (printf "auth.keysSecret.name: empty, but config.gateway.keys is %q, a file that only a Secret can bring" $file) -}}
{{- end -}}
{{- end }}

{{- define "bakehouse.validateCache" -}}
{{- with .Values.cache -}}
{{- if and .existingClaim (ne .type "pvc") -}}
{{- fail (printf "cache.existingClaim: %q, but cache.type is %s, not pvc" .existingClaim .type) -}}
{{- end -}}
{{- if and .hostPath (ne .type "hostPath") -}}
{{- fail (printf "cache.hostPath: %q, but cache.type is %s" .hostPath .type) -}}
{{- end -}}
{{- if and (eq .type "hostPath") (not (hasPrefix "/" .hostPath)) -}}
{{- fail (printf "cache.hostPath: %q is no absolute path, but cache.type is hostPath" .hostPath) -}}
{{- end -}}
{{- $pods := include "bakehouse.mostPods" $ | int -}}
{{- if ne $.Values.upgrade.type "None" -}}{{- $pods = mul 2 $pods | int -}}{{- end -}}
{{- if and (eq .type "pvc") (hasPrefix "ReadWriteOnce" .accessMode) (gt $pods 1) -}}
{{- fail (printf "cache.accessMode: %s binds all pods to one node, but there may be %d (maxReplicas of all pools%s); use ReadWriteMany" .accessMode $pods (ternary "" ", twice in an upgrade that is not None" (eq $.Values.upgrade.type "None"))) -}}
{{- end -}}
{{- $source := dig "model" "source" "smollm2" $.Values.config -}}
{{- if .prefetch -}}
{{- if .offline -}}
{{- fail "cache.prefetch: it asks the hub for the model, but cache.offline forbids that" -}}
{{- end -}}
{{- if has .type (list "emptyDir" "hostPath") -}}
{{- fail (printf "cache.prefetch: a Job cannot fill a cache.type %s of other pods" .type) -}}
{{- end -}}
{{- if not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+$" $source) -}}
{{- fail (printf "cache.prefetch: config.model.source %q is no hub id (owner/name)" $source) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "bakehouse.validateTracing" -}}
{{- $config := .Values.config -}}
{{- $tracing := $config.tracing | default dict -}}
{{- if and $tracing.endpoint (ne ($tracing.exporter | default "files") "otlp") -}}
{{- fail (printf "config.tracing.endpoint: %q, but config.tracing.exporter is %s; only otlp sends anything" $tracing.endpoint ($tracing.exporter | default "files")) -}}
{{- end -}}
{{- end }}

{{/* A size that is a number has its bounds in the schema; of a text a schema knows the form alone. */}}
{{- define "bakehouse.validateObjectStore" -}}
{{- $size := dig "server" "object_store" nil .Values.config -}}
{{- if kindIs "string" $size -}}
{{- $text := lower $size -}}
{{- $bytes := regexFind "^[0-9.]+" $text | float64 -}}
{{- $unit := ternary 1024 1000 (contains "i" $text) -}}
{{- $power := get (dict "k" 1 "m" 2 "g" 3 "t" 4 "p" 5 "e" 6) (regexFind "[kmgtpe]" $text) | default 0 | int -}}
{{- range until $power }}{{ $bytes = mulf $bytes $unit }}{{ end -}}
{{- if lt $bytes 80000000.0 -}}
{{- fail (printf "config.server.object_store: %q, but Ray takes no less than 80 MB" $size) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "bakehouse.validateDrain" -}}
{{- $drain := include "bakehouse.drainSeconds" . | int -}}
{{- if lt $drain 30 -}}
{{- fail (printf "config.server.drain_s: %d, but Serve's proxies drain for 30 s" $drain) -}}
{{- end -}}
{{- $least := add .Values.drain.preStopSeconds $drain | int -}}
{{- if le (include "bakehouse.graceSeconds" . | int) $least -}}
{{- fail (printf "drain.graceSeconds: %d s end in the middle of drain.preStopSeconds %d + config.server.drain_s %d" (int .Values.drain.graceSeconds) (int .Values.drain.preStopSeconds) $drain) -}}
{{- end -}}
{{- if and (ne .Values.upgrade.type "None") (lt (int .Values.upgrade.deletionDelaySeconds) $drain) -}}
{{- fail (printf "upgrade.deletionDelaySeconds: %d s are less than config.server.drain_s %d" (int .Values.upgrade.deletionDelaySeconds) $drain) -}}
{{- end -}}
{{- end }}

{{- define "bakehouse.validateUpgrade" -}}
{{- if include "bakehouse.isIncremental" . -}}
{{- if not .Values.autoscaler.enabled -}}
{{- fail "upgrade.type: NewClusterWithIncrementalUpgrade needs autoscaler.enabled" -}}
{{- end -}}
{{- if not .Values.upgrade.gatewayClassName -}}
{{- fail "upgrade.gatewayClassName: empty, but upgrade.type NewClusterWithIncrementalUpgrade needs a Gateway" -}}
{{- end -}}
{{- if gt (int .Values.upgrade.stepSizePercent) (int .Values.upgrade.maxSurgePercent) -}}
{{- fail (printf "upgrade.stepSizePercent: %d is more than upgrade.maxSurgePercent %d" (int .Values.upgrade.stepSizePercent) (int .Values.upgrade.maxSurgePercent)) -}}
{{- end -}}
{{- if include "bakehouse.grpcPort" . -}}
{{- fail "upgrade.type: NewClusterWithIncrementalUpgrade routes HTTP only, but config.server.grpc_port is set" -}}
{{- end -}}
{{- range list "ingress" "gatewayApi" -}}
{{- if (get $.Values .).enabled -}}
{{- fail (printf "upgrade.type: NewClusterWithIncrementalUpgrade makes its own Gateway and route, so that %s.enabled leads nowhere" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "bakehouse.validateRoutes" -}}
{{- $grpcPort := include "bakehouse.grpcPort" . -}}
{{- if and $grpcPort (eq $grpcPort (include "bakehouse.httpPort" .)) -}}
{{- fail (printf "config.server.grpc_port: %s is config.server.port as well" $grpcPort) -}}
{{- end -}}
{{- range $path := list "port" "grpc_port" -}}
{{- $port := dig "server" $path nil $.Values.config -}}
{{- if and $port (has (int $port) (list 6379 8080 8265 8404 9101 10001 44217 44227 52365)) -}}
{{- fail (printf "config.server.%s: %d is a port of Ray's" $path (int $port)) -}}
{{- end -}}
{{- end -}}
{{- with .Values.ingress -}}
{{- if and .enabled (not .host) -}}
{{- fail "ingress.host: empty, but ingress.enabled" -}}
{{- end -}}
{{- if and .grpcHost (not $grpcPort) -}}
{{- fail (printf "ingress.grpcHost: %q, but config.server.grpc_port is not set" .grpcHost) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.gatewayApi.enabled (not .Values.gatewayApi.parentRefs) -}}
{{- fail "gatewayApi.parentRefs: empty, but gatewayApi.enabled needs a Gateway" -}}
{{- end -}}
{{- end }}
