{{- define "gpushare.image" -}}
{{ .Values.image.name }}:{{ .Values.image.tag }}
{{- end }}

{{- /* The tolerations of a pod for the nodes with GPUs, as JSON; empty without a taint. */}}
{{- define "gpushare.tolerations" -}}
{{- with .Values.nodes.taint -}}
{{ list (dict "key" .key "operator" "Exists" "effect" .effect) | toJson }}
{{- else -}}
[]
{{- end }}
{{- end }}

{{- define "gpushare.pullSecrets" -}}
{{- $names := list }}
{{- range .Values.image.pullSecrets }}{{ $names = append $names (dict "name" .) }}{{ end }}
{{- $names | toJson }}
{{- end }}

{{- /* A peer of a NetworkPolicy: pods of JupyterHub's chart with one of these components. */}}
{{- define "gpushare.hubPods" -}}
{{- $one := dict "key" "component" "operator" "In" "values" (index . 1) }}
{{- $namespace := dict "kubernetes.io/metadata.name" (index . 0).Values.hub.namespace }}
{{- dict "namespaceSelector" (dict "matchLabels" $namespace) "podSelector" (dict "matchExpressions" (list $one)) | toJson }}
{{- end }}

{{- /* One Queue: name, priority, GPUs (quota, limit, overQuotaWeight), and further fields of its spec. */}}
{{- define "gpushare.queue" -}}
{{- $free := dict "quota" -1 "limit" -1 "overQuotaWeight" 1 }}
{{- $spec := dict "priority" .priority "resources" (dict "gpu" .gpu "cpu" $free "memory" $free) }}
apiVersion: scheduling.run.ai/v2
kind: Queue
metadata: {name: {{ .name | quote }}, labels: {app.kubernetes.io/managed-by: gpushare}}
spec: {{ merge $spec (.more | default dict) | toJson }}
{{- end }}
